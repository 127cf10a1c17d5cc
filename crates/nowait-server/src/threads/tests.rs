//! Exports, their names and sizes, and the connections that are assigned to threads.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use nowait::{BlockDevice, OpenOptions};
use tempfile::NamedTempFile;

use crate::export::Export;
use crate::export_error::ExportError;
use crate::nbd::handshake::{Handshake, TlsState};
use crate::nbd::wire;
use crate::threads::*;
use crate::ublk::ublk_cmd::{F_QUIESCE, F_USER_RECOVERY};
use crate::ublk::ublk_device::UblkDevice;

/// An export called `name` of `file`.
fn export(name: &str, file: &NamedTempFile) -> AnyExport {
    let disk = BlockDevice::open(file.path(), OpenOptions::default()).unwrap();
    AnyExport::new(Export::new(Arc::new(disk), name.to_owned(), String::new()))
}

/// A file of a block.
fn file() -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(4096).unwrap();
    file
}

/// A server of `exports` with `threads` threads that are not started.
fn serving(exports: Vec<AnyExport>, threads: u16) -> (Arc<Shared>, Receiver<ThreadEvent>) {
    let kind = nowait::QueueKind::Threads;
    let options = Options { threads, kind, max_connections: 4, ..Options::default() };
    let (sender, events) = channel();
    (Arc::new(Shared::new(exports, options, sender).unwrap()), events)
}

/// A connection that was just accepted, and its client.
fn accepted(shared: &Shared) -> (HandoffConnection, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    let permit = shared.limit.take().unwrap();
    (HandoffConnection::new(near.into(), TlsState::Off, permit), far)
}

#[test]
fn a_connection_goes_to_the_thread_with_the_fewest() {
    let (shared, _events) = serving(vec![export("", &file())], 3);
    let mut clients = Vec::new();
    for _ in 0..4 {
        let (connection, client) = accepted(&shared);
        shared.assign(connection);
        clients.push(client);
    }
    let counts: Vec<_> = shared.threads().map(|thread| thread.connections()).collect();
    assert_eq!(counts, [2, 1, 1]);
}

#[test]
fn a_connection_for_a_thread_that_takes_no_more_is_closed() {
    let (shared, _events) = serving(vec![export("", &file())], 1);
    let (waiting, mut first) = accepted(&shared);
    shared.assign(waiting);
    shared.channels[0].nbd.close();
    let (late, mut second) = accepted(&shared);
    shared.assign(late);
    for client in [&mut first, &mut second] {
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    }
    assert_eq!(shared.channels[0].thread().connections(), 0);
}

#[test]
fn a_client_of_a_removed_export_is_closed_and_one_of_a_paused_export_waits() {
    let (shared, _events) = serving(vec![export("", &file()), export("other", &file())], 1);
    let other = shared.registry.find("other").unwrap();
    assert!(other.begin_pause() && !other.begin_pause());
    let (waiting, _client) = accepted(&shared);
    shared.serve_client(&other, waiting);
    assert_eq!((shared.channels[0].thread().connections(), other.members()), (0, 0));
    let waited = other.end_pause().connections;
    assert_eq!(waited.len(), 1);
    for connection in waited {
        shared.serve_client(&other, connection);
    }
    assert_eq!((shared.channels[0].thread().connections(), other.members()), (1, 1));
    shared.registry.remove(other.id).unwrap();
    let (late, mut client) = accepted(&shared);
    shared.serve_client(&other, late);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    assert!(!other.wait_unused(Duration::ZERO), "the first client uses it");
    shared.channels[0].nbd.close();
    assert!(other.wait_unused(Duration::ZERO));
}

#[test]
fn a_name_leads_to_the_first_export_that_has_it_and_is_free_once_that_is_removed() {
    let file = file();
    let named = || export("twice", &file);
    let registry = Registry::new([export("", &file), named(), named()]).unwrap();
    let found = || registry.find("twice").map(|export| export.id);
    for id in [ExportId(1), ExportId(2)] {
        assert_eq!(found(), Some(id));
        assert_eq!(registry.add(named()).err(), Some(ExportError::NameTaken));
        let removed = registry.remove(id).unwrap();
        registry.wait_removed(&removed, Duration::ZERO).unwrap();
    }
    assert_eq!(found(), None);
    let again = registry.add(named()).unwrap().id;
    assert_eq!((found(), again), (Some(ExportId(3)), ExportId(3)));
}

#[test]
fn an_export_that_is_a_block_device_is_removed_only_once_its_node_is_gone() {
    let (first, second) = (file(), file());
    let opened = std::fs::File::open(second.path()).unwrap();
    let device = Arc::new(UblkDevice::simulated(opened.into(), (1, 4096), 0));
    let node = export("node", &second).with_device(device.clone());
    let (shared, _events) = serving(vec![export("", &first), node], 1);
    let exports = crate::exports::Exports(shared);
    let id = exports.find("node").unwrap();
    for removed in [
        exports.remove(id, Duration::ZERO),
        exports.remove_unused(id, Duration::ZERO),
        exports.remove_by_force(id, Duration::ZERO),
    ] {
        assert!(matches!(removed, Err(ExportError::HasNode { id: 0, .. })), "{removed:?}");
    }
    assert_eq!(exports.find("node"), Some(id));
    // Another program has stopped the device.
    device.queue_begins();
    assert!(device.queue_ends());
    exports.remove(id, Duration::ZERO).unwrap();
    assert_eq!(exports.find("node"), None);
}

#[test]
fn the_status_of_an_export_is_known_until_its_removal() {
    let (first, second) = (file(), file());
    let (shared, _events) = serving(vec![export("", &first), export("other", &second)], 1);
    let exports = crate::exports::Exports(shared);
    let id = exports.find("other").unwrap();
    assert_eq!(exports.status_of(id).unwrap().name, "other");
    assert_eq!(exports.status().len(), 2);
    exports.remove(id, Duration::ZERO).unwrap();
    assert!(exports.status_of(id).is_none() && exports.with_number(id.number()).is_none());
}

#[test]
fn each_option_reports_the_current_size() {
    let file = file();
    let (shared, _events) = serving(vec![export("", &file)], 1);
    let mut handshake = Handshake::new(TlsState::Off);
    let mut input = Vec::from(u32::from(wire::FLAG_FIXED_NEWSTYLE).to_be_bytes());
    for (option, size) in
        [(wire::OPT_INFO, 8192), (wire::OPT_INFO, 1 << 16), (wire::OPT_GO, 1 << 20)]
    {
        file.as_file().set_len(size).unwrap();
        input.extend(wire::OPTION_MAGIC.to_be_bytes());
        input.extend(option.to_be_bytes());
        // An empty name and no further questions.
        input.extend([0, 0, 0, 6, 0, 0, 0, 0, 0, 0]);
        let mut out = Vec::new();
        handshake.feed(&input, &*shared, &mut out);
        // The first reply: 20 bytes of its header, the kind of information, the size.
        assert_eq!(out[22..30], size.to_be_bytes());
        input.clear();
    }
}

#[test]
fn a_thread_that_does_not_answer_a_wake_up_is_noticed() {
    let (shared, _events) = serving(vec![export("", &file())], 1);
    let exports = crate::exports::Exports(shared.clone());
    assert!(!exports.is_responsive(Duration::from_millis(20)));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                shared.channels[0].thread().acknowledge();
            }
        });
        assert!(exports.is_responsive(Duration::from_secs(60)));
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_pause_of_all_exports_that_is_refused_leaves_the_queues_of_a_block_device_alone() {
    let (first, second) = (file(), file());
    let opened = std::fs::File::open(first.path()).unwrap();
    let features = F_QUIESCE | F_USER_RECOVERY;
    let device = Arc::new(UblkDevice::simulated(opened.into(), (1, 4096), features));
    let node = export("", &first).with_device(device);
    let (shared, _events) = serving(vec![node, export("other", &second)], 1);
    let exports = crate::Exports(shared.clone());
    let [(node, _), (other, _)] = exports.list().try_into().unwrap();
    let paused = exports.pause_export(other, Duration::ZERO).unwrap();
    assert_eq!(exports.pause(Duration::ZERO).err(), Some(ExportError::AlreadyPaused));
    // A queue that was begun again would be on its way to the thread.
    assert_eq!(shared.channels[0].thread().connections(), 0);
    assert!(shared.registry.get(node).unwrap().shared().begin_use().is_ok());
    drop(paused);
}

/// Each error that [`crate::Exports`] tells of an export with this id, beside those of removals and pauses.
fn refusals(exports: &crate::Exports, id: ExportId, wrong: u32) -> Vec<ExportError> {
    let none = crate::TokenBucket { size: 0, ..crate::TokenBucket::per_second(1) };
    let limits = crate::Limits { requests: Some(none), bytes: None };
    [
        exports.set_limits(id, limits),
        exports.set_client_limits(id, limits),
        exports.set_weight(id, wrong),
        exports.set_read_only(id, false),
        exports.grow(id, 512),
        exports.grow(id, i64::MAX as u64),
    ]
    .map(|refused| refused.unwrap_err())
    .into()
}

#[test]
fn a_change_of_an_export_that_is_refused_says_why() {
    let (writable, read_only) = (file(), file());
    let options = OpenOptions::new().read_only(true);
    let disk = Arc::new(BlockDevice::open(read_only.path(), options).unwrap());
    let of_reads = AnyExport::new(Export::new(disk, "reads".to_owned(), String::new()));
    let (shared, _events) = serving(vec![export("", &writable), of_reads], 1);
    let exports = crate::Exports(shared);
    let [(default, _), (reads, _)] = exports.list().try_into().unwrap();
    let expected = [ExportError::InvalidLimits, ExportError::InvalidLimits];
    let expected = [&expected[..], &[ExportError::InvalidWeight, ExportError::ReadOnly]].concat();
    let of_read_only = refusals(&exports, reads, 0);
    assert_eq!(of_read_only[..4], expected);
    assert_eq!(of_read_only[4..], [ExportError::FixedSize, ExportError::ReadOnly]);
    exports.set_read_only(default, true).unwrap();
    exports.set_read_only(default, false).unwrap();
    assert_eq!(exports.set_weight(default, 10_001), Err(ExportError::InvalidWeight));
    assert_eq!(exports.grow(default, 512), Err(ExportError::FixedSize));
    assert!(matches!(exports.grow(default, i64::MAX as u64), Err(ExportError::Storage(_))));
    assert_eq!(refusals(&exports, ExportId(7), 1), [(); 6].map(|()| ExportError::NotFound));
    assert_eq!(exports.flush(ExportId(7)), Err(ExportError::NotFound));
}

#[test]
fn a_pause_that_is_refused_says_why() {
    let (first, second) = (file(), file());
    let opened = std::fs::File::open(second.path()).unwrap();
    // A driver without the features for it.
    let device = Arc::new(UblkDevice::simulated(opened.into(), (1, 4096), 0));
    let node = export("node", &second).with_device(device);
    let (shared, _events) = serving(vec![export("", &first), node], 1);
    let exports = crate::Exports(shared.clone());
    let [(default, _), (node, _)] = exports.list().try_into().unwrap();
    let refused = |id| exports.pause_export(id, Duration::ZERO).err();
    assert_eq!(refused(node), Some(ExportError::CannotKeepBack));
    assert_eq!(exports.pause(Duration::ZERO).err(), Some(ExportError::CannotKeepBack));
    assert_eq!(refused(ExportId(7)), Some(ExportError::NotFound));
    let paused = exports.pause_export(default, Duration::ZERO).unwrap();
    assert_eq!(refused(default), Some(ExportError::AlreadyPaused));
    assert_eq!(paused.replace(export("other", &first)), Err(ExportError::OtherName));
    paused.replace(export("", &first)).unwrap();
    drop(paused);
    let used = shared.registry.get(default).unwrap().shared().begin_use();
    assert_eq!(refused(default), Some(ExportError::DoesNotEnd));
    drop(used);
    shared.stop();
    assert_eq!(refused(default), Some(ExportError::Stopping));
}
