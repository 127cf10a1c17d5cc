//! The exports of a server, each with a group of threads of its own, and the way of a connection
//! from one thread to another.
//!
//! Invariant: requests of an export are served by the threads of its group and by no others; a
//! group's threads share the device and nothing else but their inboxes. A connection is in one
//! inbox or on one thread. No thread is started once the server is stopping.
//! Knows: conn, handshake, listener, seats. Known by: turn, mod.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nowait::{Doing, Error};
use rustix::event::{EventfdFlags, eventfd};

use super::Options;
use super::conn::Arrival;
use super::handshake::ExportInfo;
use super::listener::Listener;
use super::seats::Seats;

/// A device of whatever map, as the server knows it.
pub(crate) trait Exported: Send + Sync {
    /// What clients are told about it now.
    fn info(&self) -> ExportInfo;

    /// Serves at `post` until the server stops.
    ///
    /// # Errors
    /// The queue has failed. (One that could not even be made is reported to `post`.)
    fn serve(self: Arc<Self>, post: Post) -> Result<(), Error>;
}

/// What the one who runs a server waits for.
pub(crate) enum Event {
    StopAsked,
    ThreadEnded,
    /// A thread's queue has failed; the thread has said why.
    ThreadFailed,
}

/// Where a thread gets its connections from.
pub(crate) struct Inbox {
    arrivals: Mutex<Vec<Arrival>>,
    wake: OwnedFd,
    connections: AtomicUsize,
    /// Requests in flight, as of the end of the thread's last turn.
    requests: AtomicUsize,
}

impl Inbox {
    fn new() -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::new(e.raw_os_error(), Doing::SetUp))?;
        Ok(Self {
            arrivals: Mutex::default(),
            wake,
            connections: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
        })
    }

    fn give(&self, arrival: Arrival) {
        self.connections.fetch_add(1, Ordering::Relaxed);
        lock(&self.arrivals).push(arrival);
        self.wake();
    }

    pub(crate) fn take(&self) -> Vec<Arrival> {
        let mut count = [0; 8];
        // EAGAIN: nothing was given since.
        let _ = rustix::io::read(&self.wake, &mut count);
        std::mem::take(&mut *lock(&self.arrivals))
    }

    fn wake(&self) {
        // A full counter (EAGAIN) is readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// One connection less.
    pub(crate) fn left(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// So many requests are in flight on the thread.
    pub(crate) fn say_requests(&self, count: usize) {
        self.requests.store(count, Ordering::Release);
    }
}

/// Readable when something was given.
impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// An export and the inboxes of its threads: none as long as no client has chosen it.
struct Group {
    device: Arc<dyn Exported>,
    threads: Mutex<Vec<Arc<Inbox>>>,
}

/// What a thread needs to begin.
pub(crate) struct Post {
    pub(crate) shared: Arc<Shared>,
    /// The number of the export.
    pub(crate) export: usize,
    /// The number of the thread in its group.
    pub(crate) queue: u16,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) listeners: Vec<Listener>,
    /// Who waits to hear whether it has begun.
    ready: Option<Sender<Result<(), Error>>>,
}

impl Post {
    /// The thread has begun.
    pub(crate) fn begun(&mut self) {
        if let Some(ready) = self.ready.take() {
            let _ = ready.send(Ok(()));
        }
    }

    /// The thread cannot begin: the connections given to it are closed.
    pub(crate) fn resign(self, error: Error) {
        if let Some(group) = self.shared.groups.get(self.export) {
            lock(&group.threads).retain(|inbox| !Arc::ptr_eq(inbox, &self.inbox));
        }
        drop(self.inbox.take());
        match self.ready {
            Some(ready) => drop(ready.send(Err(error))),
            None => tracing::error!("export {}, queue {}: {error}", self.export, self.queue),
        }
    }

    /// A post for a thread of which nobody knows, which serves `device` alone.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn simulated(
        device: Arc<dyn Exported>,
        config: nowait::Config,
    ) -> Result<Self, Error> {
        let options = Options {
            queues: 1,
            kind: super::QueueKind::Threads,
            config,
            tls: super::Tls::Off,
            max_connections: 64,
        };
        let (events, _) = std::sync::mpsc::channel();
        let shared = Arc::new(Shared::new([device], options, events));
        let (inbox, listeners) = (Arc::new(Inbox::new()?), Vec::new());
        Ok(Self { shared, export: 0, queue: 0, inbox, listeners, ready: None })
    }

    fn hold(self, device: Arc<dyn Exported>) {
        let shared = self.shared.clone();
        let event = match device.serve(self) {
            Ok(()) => Event::ThreadEnded,
            Err(_) => Event::ThreadFailed,
        };
        shared.running.fetch_sub(1, Ordering::AcqRel);
        // Nobody listens any more when the server's patience has ended.
        let _ = shared.events.send(event);
    }
}

/// What the threads of a server share.
pub(crate) struct Shared {
    groups: Vec<Group>,
    pub(crate) options: Options,
    pub(crate) seats: Arc<Seats>,
    stopping: AtomicBool,
    /// It was said that there is no ring.
    warned: AtomicBool,
    /// Threads that were started and have not ended.
    running: AtomicUsize,
    events: Sender<Event>,
}

impl Shared {
    pub(crate) fn new(
        devices: impl IntoIterator<Item = Arc<dyn Exported>>,
        options: Options,
        events: Sender<Event>,
    ) -> Self {
        let group = |device| Group { device, threads: Mutex::default() };
        Self {
            groups: devices.into_iter().map(group).collect(),
            seats: Arc::new(Seats::new(options.max_connections)),
            options,
            stopping: AtomicBool::new(false),
            warned: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            events,
        }
    }

    /// What clients are told about each export now.
    pub(crate) fn exports(&self) -> Vec<ExportInfo> {
        self.groups.iter().map(|group| group.device.info()).collect()
    }

    /// Starts the threads of the default export; the first of them takes connections in from
    /// `listeners`. Each says through `ready` whether it has begun.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: a thread could not be made; others may run.
    pub(crate) fn start(
        self: &Arc<Self>,
        mut listeners: Vec<Listener>,
        ready: &Sender<Result<(), Error>>,
    ) -> Result<(), Error> {
        let Some(group) = self.groups.first() else {
            return Err(Error::new(libc::EINVAL, Doing::SetUp));
        };
        let mut threads = lock(&group.threads);
        for queue in 0..self.queues() {
            let (listeners, ready) = (std::mem::take(&mut listeners), Some(ready.clone()));
            threads.push(self.spawn(0, queue, group, listeners, ready)?);
        }
        Ok(())
    }

    /// Gives a connection to the thread of export number `export` that has the fewest. The first
    /// one starts the export's threads; where none can be started, it is closed.
    pub(crate) fn give(self: &Arc<Self>, export: usize, arrival: Arrival) {
        let Some(group) = self.groups.get(export) else { return };
        let mut threads = lock(&group.threads);
        // A thread that is started must not be overlooked by `stop`, which waits for the lock.
        if threads.is_empty() && !self.is_stopping() {
            for queue in 0..self.queues() {
                match self.spawn(export, queue, group, Vec::new(), None) {
                    Ok(inbox) => threads.push(inbox),
                    Err(error) => tracing::error!("export {export}, queue {queue}: {error}"),
                }
            }
        }
        let connections = |inbox: &&Arc<Inbox>| inbox.connections.load(Ordering::Relaxed);
        if let Some(inbox) = threads.iter().min_by_key(connections) {
            inbox.give(arrival);
        }
    }

    fn queues(&self) -> u16 {
        self.options.queues.max(1)
    }

    /// Starts a thread of `group`; what is returned is its inbox.
    fn spawn(
        self: &Arc<Self>,
        export: usize,
        queue: u16,
        group: &Group,
        listeners: Vec<Listener>,
        ready: Option<Sender<Result<(), Error>>>,
    ) -> Result<Arc<Inbox>, Error> {
        let inbox = Arc::new(Inbox::new()?);
        let (shared, device) = (self.clone(), group.device.clone());
        let post = Post { shared, export, queue, inbox: inbox.clone(), listeners, ready };
        self.running.fetch_add(1, Ordering::AcqRel);
        let spawned = std::thread::Builder::new()
            .name(format!("nowait-nbd-{export}.{queue}"))
            .spawn(move || post.hold(device));
        match spawned {
            Ok(_) => Ok(inbox),
            Err(error) => {
                self.running.fetch_sub(1, Ordering::AcqRel);
                Err(Error::new(error.raw_os_error().unwrap_or(libc::EAGAIN), Doing::SetUp))
            }
        }
    }

    /// No more requests are taken.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        for group in &self.groups {
            lock(&group.threads).iter().for_each(|inbox| inbox.wake());
        }
        // Nobody listens when the server has ended by itself.
        let _ = self.events.send(Event::StopAsked);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Threads that have not ended.
    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }

    /// Requests in flight on all threads.
    pub(crate) fn requests(&self) -> usize {
        let of_group = |group: &Group| -> usize {
            let requests = |inbox: &Arc<Inbox>| inbox.requests.load(Ordering::Acquire);
            lock(&group.threads).iter().map(requests).sum()
        };
        self.groups.iter().map(of_group).sum()
    }

    /// Says that there is no ring, once.
    pub(crate) fn warn_of_no_ring(&self, error: &Error) {
        if !self.warned.swap(true, Ordering::AcqRel) {
            tracing::warn!("io_uring cannot be used ({error}), serving with threads");
        }
    }
}

/// What is in `mutex`. A thread that panicked with it has left it whole: nothing here can fail
/// half-way.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::AtomicU64;
    use std::sync::mpsc::{Receiver, channel};

    use super::super::context::Contexts;
    use super::super::handshake::{Handshake, Secrecy};
    use super::super::{QueueKind, Tls, wire};
    use super::*;

    /// A device whose size changes while it is served, and whose threads can never begin.
    #[derive(Default)]
    struct Growing {
        size: AtomicU64,
        refused: AtomicUsize,
    }

    impl Exported for Growing {
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

        fn serve(self: Arc<Self>, post: Post) -> Result<(), Error> {
            self.refused.fetch_add(1, Ordering::Relaxed);
            post.resign(Error::new(libc::ENOMEM, Doing::SetUp));
            Ok(())
        }
    }

    fn serving(device: Arc<Growing>) -> (Arc<Shared>, Receiver<Event>) {
        let options = Options {
            queues: 2,
            kind: QueueKind::Threads,
            config: Default::default(),
            tls: Tls::Off,
            max_connections: 1,
        };
        let devices: [Arc<dyn Exported>; 1] = [device];
        let (sender, events) = channel();
        (Arc::new(Shared::new(devices, options, sender)), events)
    }

    #[test]
    fn threads_that_cannot_begin_close_their_connection_and_the_next_one_is_another_try() {
        let device = Arc::new(Growing::default());
        let (shared, events) = serving(device.clone());
        for tries in [1, 2] {
            let (near, mut far) = UnixStream::pair().unwrap();
            let seat = shared.seats.take().unwrap();
            shared.give(0, Arrival::new(near.into(), Secrecy::Off, seat));
            for _ in 0..2 {
                assert!(matches!(events.recv().unwrap(), Event::ThreadEnded));
            }
            assert_eq!(far.read(&mut [0]).unwrap(), 0);
            assert_eq!((device.refused.load(Ordering::Relaxed), shared.running()), (2 * tries, 0));
        }
    }

    #[test]
    fn no_thread_is_started_once_the_server_is_stopping() {
        let device = Arc::new(Growing::default());
        let (shared, _events) = serving(device.clone());
        shared.stop();
        let (near, mut far) = UnixStream::pair().unwrap();
        let seat = shared.seats.take().unwrap();
        shared.give(0, Arrival::new(near.into(), Secrecy::Off, seat));
        assert_eq!(far.read(&mut [0]).unwrap(), 0);
        assert_eq!(device.refused.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_size_is_that_of_the_moment_of_the_question() {
        let device = Arc::new(Growing::default());
        let (shared, _events) = serving(device.clone());
        let mut handshake = Handshake::new(Secrecy::Off);
        let mut input = Vec::from(u32::from(wire::FLAG_FIXED_NEWSTYLE).to_be_bytes());
        for (option, size) in [(wire::OPT_INFO, 1 << 30), (wire::OPT_INFO, 5), (wire::OPT_GO, 7)] {
            device.size.store(size, Ordering::Relaxed);
            input.extend(wire::OPTION_MAGIC.to_be_bytes());
            input.extend(option.to_be_bytes());
            // An empty name and no further questions.
            input.extend([0, 0, 0, 6, 0, 0, 0, 0, 0, 0]);
            let mut out = Vec::new();
            handshake.feed(&input, &|| shared.exports(), &mut out);
            // The first reply: 20 bytes of its head, the kind of information, the size.
            assert_eq!(out[22..30], size.to_be_bytes());
            input.clear();
        }
    }
}
