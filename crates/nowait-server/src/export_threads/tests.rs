//! Threads start for the clients that come, and a connection is handed from one to another.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::export_threads::*;
use crate::nbd::handshake::{Handshake, TlsState};
use crate::nbd::meta_context::Contexts;
use crate::nbd::wire;

/// An export whose size changes while it is served, and whose threads can never start.
#[derive(Default)]
struct Growing {
    name: &'static str,
    size: AtomicU64,
    refused: AtomicUsize,
    /// How often it was asked for its status.
    asked: AtomicUsize,
}

impl Servable for Growing {
    fn name(&self) -> &str {
        self.name
    }

    fn description(&self) -> &str {
        ""
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn set_read_only(&self, _: bool) -> Result<(), Error> {
        Ok(())
    }

    fn allocated_ahead(&self) -> u64 {
        self.asked.fetch_add(1, Ordering::Relaxed);
        0
    }

    fn size(&self) -> u64 {
        0
    }

    fn refresh(&self) -> Result<u64, Error> {
        Ok(0)
    }

    fn grow(&self, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn flush(&self) -> Result<(), Error> {
        Ok(())
    }

    fn summarize_faults(&self) {}

    fn properties(&self) -> BlockProperties {
        BlockProperties { size: 0, read_only: true, discards: false, block: 512 }
    }

    fn info(&self, id: ExportId) -> ExportInfo {
        ExportInfo {
            id,
            name: "disk".into(),
            description: String::new(),
            size: self.size.load(Ordering::Relaxed),
            transmission_flags: 0,
            contexts: Contexts::NONE,
            min_block: 1,
            preferred_block: 4096,
            max_payload: 1 << 20,
        }
    }

    fn serve(self: Arc<Self>, context: ThreadContext) -> Result<(), Error> {
        self.refused.fetch_add(1, Ordering::Relaxed);
        context.fail_start(Error::new(libc::ENOMEM, Operation::SetUp));
        Ok(())
    }
}

fn serving(export: Arc<Growing>) -> (Arc<Shared>, Receiver<ThreadEvent>) {
    let options = Options {
        queues: 2,
        kind: nowait::QueueKind::Threads,
        max_connections: 1,
        ..Options::default()
    };
    let exports: [(Arc<dyn Servable>, bool); 1] = [(export, false)];
    let (sender, events) = channel();
    (Arc::new(Shared::new(exports, options, sender)), events)
}

#[test]
fn a_thread_that_cannot_start_closes_its_connection_and_the_next_connection_retries() {
    let export = Arc::new(Growing::default());
    let (shared, events) = serving(export.clone());
    for tries in 1..=3 {
        let (near, mut far) = UnixStream::pair().unwrap();
        let permit = shared.limit.take().unwrap();
        shared
            .clone()
            .assign(ExportId(0), HandoffConnection::new(near.into(), TlsState::Off, permit));
        assert!(matches!(events.recv().unwrap(), ThreadEvent::ThreadEnded));
        assert_eq!(far.read(&mut [0]).unwrap(), 0);
        assert_eq!((export.refused.load(Ordering::Relaxed), shared.registry.running()), (tries, 0));
    }
}

#[test]
fn no_thread_is_started_once_the_server_is_stopping() {
    let export = Arc::new(Growing::default());
    let (shared, _events) = serving(export.clone());
    shared.stop();
    let (near, mut far) = UnixStream::pair().unwrap();
    let permit = shared.limit.take().unwrap();
    shared.clone().assign(ExportId(0), HandoffConnection::new(near.into(), TlsState::Off, permit));
    assert_eq!(far.read(&mut [0]).unwrap(), 0);
    assert_eq!(export.refused.load(Ordering::Relaxed), 0);
}

#[test]
fn a_connection_on_its_way_to_a_removed_export_is_closed() {
    let (shared, _events) = serving(Arc::default());
    let id = shared.registry.add(Arc::new(Growing { name: "other", ..Growing::default() }), false);
    let id = id.unwrap();
    shared.registry.remove(id, Duration::ZERO).unwrap();
    let (near, mut far) = UnixStream::pair().unwrap();
    let permit = shared.limit.take().unwrap();
    shared.clone().assign(id, HandoffConnection::new(near.into(), TlsState::Off, permit));
    assert_eq!(far.read(&mut [0]).unwrap(), 0);
}

#[test]
fn the_status_of_one_export_asks_none_of_the_others() {
    let first = Arc::new(Growing::default());
    let (shared, _events) = serving(first.clone());
    let other = Arc::new(Growing { name: "other", ..Growing::default() });
    let id = shared.registry.add(other.clone(), false).unwrap();
    let exports = crate::exports::Exports(shared.clone());
    let asked = || [&first, &other].map(|export| export.asked.load(Ordering::Relaxed));
    assert_eq!(exports.status_of(id).unwrap().name, "other");
    assert_eq!(asked(), [0, 1]);
    assert_eq!(exports.status().len(), 2);
    assert_eq!(asked(), [1, 2]);
    assert_eq!(exports.find("other"), Some(id));
    shared.registry.remove(id, Duration::ZERO).unwrap();
    assert!(exports.status_of(id).is_none() && exports.with_number(id.number()).is_none());
}

#[test]
fn a_name_leads_to_the_first_export_that_has_it_and_is_free_once_that_is_removed() {
    let named = || -> (Arc<dyn Servable>, bool) {
        (Arc::new(Growing { name: "twice", ..Growing::default() }), false)
    };
    let unnamed: (Arc<dyn Servable>, bool) = (Arc::new(Growing::default()), false);
    let registry = Registry::new([unnamed, named(), named()]);
    let found = || registry.find("twice").map(|export| export.id);
    for id in [ExportId(1), ExportId(2)] {
        assert_eq!(found(), Some(id));
        assert_eq!(registry.add(named().0, false).unwrap_err().errno(), libc::EEXIST);
        registry.remove(id, Duration::ZERO).unwrap();
    }
    assert_eq!(found(), None);
    let again = registry.add(named().0, false).unwrap();
    assert_eq!(found(), Some(again));
}

#[test]
fn each_option_reports_the_current_size() {
    let export = Arc::new(Growing::default());
    let (shared, _events) = serving(export.clone());
    let mut handshake = Handshake::new(TlsState::Off);
    let mut input = Vec::from(u32::from(wire::FLAG_FIXED_NEWSTYLE).to_be_bytes());
    for (option, size) in [(wire::OPT_INFO, 1 << 30), (wire::OPT_INFO, 5), (wire::OPT_GO, 7)] {
        export.size.store(size, Ordering::Relaxed);
        input.extend(wire::OPTION_MAGIC.to_be_bytes());
        input.extend(option.to_be_bytes());
        // An empty name and no further questions.
        input.extend([0, 0, 0, 6, 0, 0, 0, 0, 0, 0]);
        let mut out = Vec::new();
        handshake.feed(&input, &|| shared.infos(), &mut out);
        // The first reply: 20 bytes of its header, the kind of information, the size.
        assert_eq!(out[22..30], size.to_be_bytes());
        input.clear();
    }
}

#[test]
fn a_thread_that_does_not_answer_a_wake_up_is_noticed() {
    let (shared, _events) = serving(Arc::default());
    let exports = crate::exports::Exports(shared.clone());
    let short = Duration::from_millis(20);
    assert!(exports.is_responsive(short), "without a thread there is none that hangs");
    let channels = shared.channels().unwrap();
    let thread = channels.connections.thread().clone();
    let registered = shared.registry.default_export().unwrap();
    registered.add_thread(0, |_| Ok(channels)).unwrap();
    assert!(!exports.is_responsive(short));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                thread.acknowledge();
            }
        });
        assert!(exports.is_responsive(Duration::from_secs(60)));
        stop.store(true, Ordering::Relaxed);
    });
}
