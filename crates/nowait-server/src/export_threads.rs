//! The exports of a server, the threads of each, and the handoff of a connection from one thread to
//! another.
//!
//! Invariant: only the threads of an export serve its requests; they share the export and their
//! connection channels, nothing else. A connection is in one channel or on one thread. No thread is
//! started once the server is stopping.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nowait::{Budget, Error, Operation, Uring};

use crate::buffer_budget::DeclaredUse;
use crate::nbd::connection::HandoffConnection;
use crate::nbd::connection_channel::ConnectionChannel;
use crate::nbd::handshake::ExportInfo;
use crate::nbd::nbd_frontend::NbdFrontend;
use crate::nbd::negotiate::ExportDirectory;
use crate::nbd::write_split::SplitPolicy;
use crate::net::acceptor::Acceptor;
use crate::net::connection_limit::ConnectionLimit;
use crate::net::listener::Listener;
use crate::server_options::Options;
use crate::thread_handle::ThreadHandle;

/// The most threads without connections that wait for their idle timeout, not counting the acceptor
/// thread.
const MAX_IDLE: usize = 16;

/// An export with any block map.
pub(crate) trait Servable: Send + Sync {
    /// The export's current properties, as told to clients.
    fn info(&self) -> ExportInfo;

    /// The export's name.
    fn name(&self) -> &str;

    /// Logs the storage failures that were only counted.
    fn summarize_faults(&self);

    /// Serves as the thread of `context` until the server stops.
    ///
    /// # Errors
    /// The queue has failed. (A queue that could not be made is reported to `context`.)
    fn serve(self: Arc<Self>, context: ThreadContext) -> Result<(), Error>;
}

/// An event for [`Server::run`](crate::Server::run).
pub(crate) enum ThreadEvent {
    StopRequested,
    ThreadEnded,
    /// A thread's queue has failed; the thread has logged why.
    ThreadFailed,
    /// No connection is left, and at least one client had chosen an export.
    LastClientLeft,
}

/// An export and the channels of its threads: none until a client chooses it.
struct ExportThreads {
    export: Arc<dyn Servable>,
    threads: Mutex<Vec<Arc<ConnectionChannel>>>,
}

/// The context of a thread that starts.
pub(crate) struct ThreadContext {
    pub(crate) shared: Arc<Shared>,
    /// Index of the export.
    pub(crate) export_index: usize,
    /// Index of the thread among the threads of the export.
    pub(crate) queue: u16,
    pub(crate) channel: Arc<ConnectionChannel>,
    pub(crate) listeners: Vec<Listener>,
    /// Receives whether the thread has started.
    ready: Option<Sender<Result<(), Error>>>,
}

impl ThreadContext {
    /// The NBD frontend of the thread. It takes the listeners.
    pub(crate) fn nbd_frontend(&mut self) -> NbdFrontend {
        let (shared, listeners) = (self.shared.clone(), std::mem::take(&mut self.listeners));
        let Options { tls, split_bytes, config, .. } = shared.options.clone();
        let split_policy = SplitPolicy { fragment_bytes: split_bytes, strict: config.strict };
        let acceptor = Acceptor::new(listeners, shared.limit.clone());
        let channel = self.channel.clone();
        NbdFrontend::new(shared, self.export_index, channel, acceptor, tls, split_policy)
    }

    /// Reports that the thread has started.
    pub(crate) fn report_started(&mut self) {
        if let Some(ready) = self.ready.take() {
            let _ = ready.send(Ok(()));
        }
    }

    /// Reports that the thread cannot start. Closes the connections assigned to it.
    pub(crate) fn fail_start(self, error: Error) {
        if let Some(group) = self.shared.groups.get(self.export_index) {
            lock(&group.threads).retain(|channel| !Arc::ptr_eq(channel, &self.channel));
        }
        drop(self.channel.take_all());
        match self.ready {
            Some(ready) => drop(ready.send(Err(error))),
            None => tracing::error!("export {}, queue {}: {error}", self.export_index, self.queue),
        }
    }

    /// The context of a thread that serves `export` alone and is in no list of threads;
    /// `split_bytes` as in [`Options`].
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn simulated(
        export: Arc<dyn Servable>,
        config: nowait::Config,
        split_bytes: u64,
    ) -> Result<Self, Error> {
        let options = Options {
            queues: 1,
            kind: nowait::QueueKind::Threads,
            config,
            tls: crate::nbd::tls_config::Tls::Off,
            max_connections: 64,
            idle: Options::IDLE,
            split_bytes,
        };
        let (events, _) = std::sync::mpsc::channel();
        let shared = Arc::new(Shared::new([export], options, events));
        let (channel, listeners) = (Arc::new(shared.channel()?), Vec::new());
        Ok(Self { shared, export_index: 0, queue: 0, channel, listeners, ready: None })
    }

    fn run(self, export: Arc<dyn Servable>) {
        let shared = self.shared.clone();
        let event = match catch_unwind(AssertUnwindSafe(|| export.serve(self))) {
            Ok(Ok(())) => ThreadEvent::ThreadEnded,
            // The panic hook has written a message to standard error.
            Ok(Err(_)) | Err(_) => ThreadEvent::ThreadFailed,
        };
        shared.running.fetch_sub(1, Ordering::AcqRel);
        // The receiver is gone once the server's shutdown timeout has expired.
        let _ = shared.events.send(event);
    }
}

/// State shared by the threads of a server.
pub(crate) struct Shared {
    groups: Vec<ExportThreads>,
    pub(crate) options: Options,
    pub(crate) limit: Arc<ConnectionLimit>,
    /// Buffer bytes that the connections of all threads hold.
    pub(crate) declared: DeclaredUse,
    /// The buffer memory of all engines.
    pub(crate) budget: Budget,
    stopping: AtomicBool,
    /// The missing io_uring was logged.
    warned: AtomicBool,
    /// Threads that were started and have not ended.
    running: AtomicUsize,
    /// How many times a thread has become idle.
    idle_count: Arc<AtomicU64>,
    events: Sender<ThreadEvent>,
}

/// Whether a thread without connections retires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retired {
    /// It goes on: a connection was assigned to it.
    No,
    /// It ends; other threads of its export go on.
    OneOfSeveral,
    /// It ends, and no thread of its export is left.
    TheLast,
}

impl Shared {
    pub(crate) fn new(
        exports: impl IntoIterator<Item = Arc<dyn Servable>>,
        options: Options,
        events: Sender<ThreadEvent>,
    ) -> Self {
        let group = |export| ExportThreads { export, threads: Mutex::default() };
        Self {
            groups: exports.into_iter().map(group).collect(),
            limit: Arc::new(ConnectionLimit::new(options.max_connections)),
            declared: DeclaredUse::default(),
            budget: Budget::new(options.config.buffer_bytes),
            options,
            stopping: AtomicBool::new(false),
            warned: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            idle_count: Arc::default(),
            events,
        }
    }

    /// Starts the threads of the default export; the first of them accepts connections from
    /// `listeners`. Each thread sends its start result through `ready`.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: a thread could not be started; others may run.
    pub(crate) fn start(
        self: &Arc<Self>,
        mut listeners: Vec<Listener>,
        ready: &Sender<Result<(), Error>>,
    ) -> Result<(), Error> {
        let Some(group) = self.groups.first() else {
            return Err(Error::new(libc::EINVAL, Operation::SetUp));
        };
        let mut threads = lock(&group.threads);
        for queue in 0..self.queues() {
            let (listeners, ready) = (std::mem::take(&mut listeners), Some(ready.clone()));
            threads.push(self.spawn(0, queue, group, listeners, ready)?);
        }
        Ok(())
    }

    /// Retires the threads that have been idle longest, so that at most [`MAX_IDLE`] wait for their
    /// idle timeout: clients that visit one export after the other must not use up the process's
    /// descriptors.
    fn retire_longest_idle(&self) {
        let mut idle = Vec::new();
        for group in &self.groups {
            let threads = lock(&group.threads);
            let handles = threads.iter().map(|channel| channel.thread());
            idle.extend(handles.filter(|thread| thread.is_idle()).cloned());
        }
        let too_many = idle.len().saturating_sub(MAX_IDLE);
        idle.sort_by_key(|thread| thread.idle_sequence());
        idle.iter().take(too_many).for_each(|thread| thread.retire_early());
    }

    /// Removes `thread` from its export's threads, unless a connection was assigned to it. A removed
    /// thread ends.
    pub(crate) fn retire(&self, export_index: usize, thread: &Arc<ThreadHandle>) -> Retired {
        let Some(group) = self.groups.get(export_index) else { return Retired::No };
        let mut threads = lock(&group.threads);
        if !thread.is_idle() {
            return Retired::No;
        }
        threads.retain(|channel| !Arc::ptr_eq(channel.thread(), thread));
        if threads.is_empty() { Retired::TheLast } else { Retired::OneOfSeveral }
    }

    fn queues(&self) -> u16 {
        self.options.queues.max(1)
    }

    /// The channel of a thread that is about to start.
    fn channel(&self) -> Result<ConnectionChannel, Error> {
        Ok(ConnectionChannel::new(Arc::new(ThreadHandle::new(self.idle_count.clone())?)))
    }

    /// Starts a thread of `group`. Returns its channel.
    fn spawn(
        self: &Arc<Self>,
        export_index: usize,
        queue: u16,
        group: &ExportThreads,
        listeners: Vec<Listener>,
        ready: Option<Sender<Result<(), Error>>>,
    ) -> Result<Arc<ConnectionChannel>, Error> {
        let channel = Arc::new(self.channel()?);
        let (shared, export) = (self.clone(), group.export.clone());
        let context = ThreadContext {
            shared,
            export_index,
            queue,
            channel: channel.clone(),
            listeners,
            ready,
        };
        self.running.fetch_add(1, Ordering::AcqRel);
        let spawned = std::thread::Builder::new()
            .name(format!("nowait-nbd-{export_index}.{queue}"))
            .spawn(move || context.run(export));
        match spawned {
            Ok(_) => Ok(channel),
            Err(error) => {
                self.running.fetch_sub(1, Ordering::AcqRel);
                Err(Error::new(error.raw_os_error().unwrap_or(libc::EAGAIN), Operation::SetUp))
            }
        }
    }

    /// Stops the server: no more requests are taken.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        for group in &self.groups {
            lock(&group.threads).iter().for_each(|channel| channel.thread().wake());
        }
        // The receiver is gone if the server has ended by itself.
        let _ = self.events.send(ThreadEvent::StopRequested);
    }

    /// From now on, [`ThreadEvent::LastClientLeft`] is reported.
    pub(crate) fn report_last_client_left(&self) {
        let events = self.events.clone();
        // `Server::run` may have returned meanwhile.
        self.limit.on_empty(move || drop(events.send(ThreadEvent::LastClientLeft)));
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Threads that have not ended.
    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }

    /// Requests in flight on all threads.
    pub(crate) fn in_flight(&self) -> usize {
        let of_group = |group: &ExportThreads| -> usize {
            lock(&group.threads).iter().map(|channel| channel.thread().in_flight()).sum()
        };
        self.groups.iter().map(of_group).sum()
    }

    /// Logs the storage failures of every export that were only counted.
    pub(crate) fn summarize_faults(&self) {
        self.groups.iter().for_each(|group| group.export.summarize_faults());
    }

    /// Logs once that there is no io_uring.
    pub(crate) fn warn_no_io_uring(&self, error: Error) {
        if !self.warned.swap(true, Ordering::AcqRel) {
            tracing::warn!("{}: serving with threads", Uring::refusal(error));
        }
    }
}

impl ExportDirectory for Shared {
    fn infos(&self) -> Vec<ExportInfo> {
        self.groups.iter().map(|group| group.export.info()).collect()
    }

    fn name(&self, export: usize) -> String {
        self.groups.get(export).map_or_else(String::new, |group| group.export.name().to_owned())
    }

    /// Assigns a connection to the thread of export `export_index` with the fewest connections. If
    /// none is idle and there are fewer threads than queues, a new thread is started for it. If
    /// there is no thread and none can be started, the connection is closed.
    fn assign(self: Arc<Self>, export_index: usize, arrival: HandoffConnection) {
        let Some(group) = self.groups.get(export_index) else { return };
        let mut threads = lock(&group.threads);
        let wanted = !threads.iter().any(|channel| channel.thread().is_idle())
            && threads.len() < usize::from(self.queues());
        let mut started = false;
        // `stop` waits for the lock, so it cannot miss a thread that is started here.
        if wanted && !self.is_stopping() {
            let queue = threads.len() as u16;
            match self.spawn(export_index, queue, group, Vec::new(), None) {
                Ok(channel) => {
                    threads.push(channel);
                    started = true;
                }
                Err(error) => tracing::error!("export {export_index}, queue {queue}: {error}"),
            }
        }
        let least = threads.iter().min_by_key(|channel| channel.thread().connections());
        if let Some(channel) = least {
            channel.assign(arrival);
        }
        drop(threads);
        if started {
            self.retire_longest_idle();
        }
    }
}

/// Locks `mutex`, ignoring poison: no critical section here can panic half-way through a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::AtomicU64;
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::nbd::handshake::{Handshake, TlsState};
    use crate::nbd::meta_context::Contexts;
    use crate::nbd::tls_config::Tls;
    use crate::nbd::wire;

    /// An export whose size changes while it is served, and whose threads can never start.
    #[derive(Default)]
    struct Growing {
        size: AtomicU64,
        refused: AtomicUsize,
    }

    impl Servable for Growing {
        fn name(&self) -> &str {
            ""
        }

        fn summarize_faults(&self) {}

        fn info(&self) -> ExportInfo {
            ExportInfo {
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
            config: Default::default(),
            tls: Tls::Off,
            max_connections: 1,
            idle: Options::IDLE,
            split_bytes: Options::SPLIT_BYTES,
        };
        let exports: [Arc<dyn Servable>; 1] = [export];
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
            shared.clone().assign(0, HandoffConnection::new(near.into(), TlsState::Off, permit));
            assert!(matches!(events.recv().unwrap(), ThreadEvent::ThreadEnded));
            assert_eq!(far.read(&mut [0]).unwrap(), 0);
            assert_eq!((export.refused.load(Ordering::Relaxed), shared.running()), (tries, 0));
        }
    }

    #[test]
    fn no_thread_is_started_once_the_server_is_stopping() {
        let export = Arc::new(Growing::default());
        let (shared, _events) = serving(export.clone());
        shared.stop();
        let (near, mut far) = UnixStream::pair().unwrap();
        let permit = shared.limit.take().unwrap();
        shared.clone().assign(0, HandoffConnection::new(near.into(), TlsState::Off, permit));
        assert_eq!(far.read(&mut [0]).unwrap(), 0);
        assert_eq!(export.refused.load(Ordering::Relaxed), 0);
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
}
