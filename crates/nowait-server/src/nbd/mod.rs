//! The NBD server: threads with a queue each, and the connections spread over them.
//!
//! Invariant: a connection belongs to one thread; threads share the device and nothing else but
//! their inboxes.
//! Knows: device, and the modules here. Known by: the command.

mod wire;
mod handshake;
mod listener;
mod spin;
mod reply;
mod door;
mod conn;
mod turn;
mod parse;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nowait::{Config, Disk, Doing, Engine, Error, Extents, Queue, Threads, Uring};
use rustix::event::{EventfdFlags, eventfd};

use crate::device::Device;
use handshake::ExportInfo;
pub use listener::Listener;
use turn::Thread;

/// How transfers get to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// io_uring(7), or plain system calls for the threads that get no ring: the limit on locked
    /// memory (`RLIMIT_MEMLOCK`) may allow only some.
    Auto,
    /// io_uring(7).
    Uring,
    /// Plain system calls on a bounded number of threads.
    Threads,
}

/// How a server runs.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads with a queue each, at least 1.
    pub queues: u16,
    /// What the queues are.
    pub kind: QueueKind,
    /// The engines' switches and sizes.
    pub config: Config,
}

/// What was left when a server stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Stopped {
    /// Requests that had not ended in time.
    pub unfinished: usize,
}

/// What the threads of a server share.
struct Shared {
    device: Arc<Device>,
    exports: Vec<ExportInfo>,
    inboxes: Vec<Inbox>,
    stopping: AtomicBool,
    /// It was said that there is no ring.
    warned: AtomicBool,
}

/// Where a thread gets its connections from.
struct Inbox {
    sockets: Mutex<Vec<OwnedFd>>,
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
            sockets: Mutex::default(),
            wake,
            connections: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
        })
    }

    fn give(&self, socket: OwnedFd) {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner).push(socket);
        self.wake();
    }

    fn take(&self) -> Vec<OwnedFd> {
        let mut count = [0; 8];
        // EAGAIN: nothing was given since.
        let _ = rustix::io::read(&self.wake, &mut count);
        std::mem::take(&mut *self.sockets.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn wake(&self) {
        // A full counter (EAGAIN) is readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// A running NBD server.
pub struct Server {
    shared: Arc<Shared>,
    events: Receiver<Event>,
    sender: Sender<Event>,
}

/// What the one who runs a server waits for.
enum Event {
    StopAsked,
    ThreadEnded,
}

/// Ends a server, from any thread.
#[derive(Clone)]
pub struct Stopper {
    shared: Arc<Shared>,
    sender: Sender<Event>,
}

impl Stopper {
    /// The server takes no more requests; [`Server::run`] returns when those in flight have ended.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.inboxes.iter().for_each(Inbox::wake);
        // It is not sent when the server has ended by itself.
        let _ = self.sender.send(Event::StopAsked);
    }
}

impl Server {
    /// Starts serving `device` to whoever connects to `listeners`.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: a queue or a thread could not be made; for
    /// [`QueueKind::Uring`] also what [`Uring::new`] says.
    pub fn start(
        device: Arc<Device>,
        listeners: Vec<Listener>,
        options: Options,
    ) -> Result<Self, Error> {
        let queues = options.queues.max(1);
        let inboxes = (0..queues).map(|_| Inbox::new()).collect::<Result<Vec<_>, _>>()?;
        let exports = vec![door::export_info(&device)];
        let shared = Arc::new(Shared {
            device,
            exports,
            inboxes,
            stopping: AtomicBool::new(false),
            warned: AtomicBool::new(false),
        });
        let (ready, made) = channel();
        let (sender, events) = channel();
        let mut listeners = Some(listeners);
        for index in 0..usize::from(queues) {
            let job = Job {
                shared: shared.clone(),
                index,
                // The first thread takes the connections in and spreads them.
                listeners: listeners.take().unwrap_or_default(),
                options,
                ready: ready.clone(),
                end: sender.clone(),
            };
            std::thread::Builder::new()
                .name(format!("nowait-nbd-{index}"))
                .spawn(move || job.run())
                .map_err(|e| Error::new(e.raw_os_error().unwrap_or(libc::EAGAIN), Doing::SetUp))?;
        }
        drop(ready);
        let server = Self { shared, events, sender };
        for made in made {
            if let Err(error) = made {
                server.stopper().stop();
                return Err(error);
            }
        }
        Ok(server)
    }

    /// What stops this server.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper { shared: self.shared.clone(), sender: self.sender.clone() }
    }

    /// Serves until it is stopped, then waits at most `patience` for the requests in flight.
    /// Durability is the caller's next step.
    ///
    /// # Errors
    /// `EIO`: a thread has ended because its queue failed; it has said why in the log.
    pub fn run(self, patience: Duration) -> Result<Stopped, Error> {
        let failed = match self.events.recv() {
            Ok(Event::StopAsked) => 0,
            // A thread also ends when its stop was asked for a moment ago.
            Ok(Event::ThreadEnded) | Err(_) => 1,
        };
        if failed > 0 && !self.shared.stopping.load(Ordering::Acquire) {
            self.stopper().stop();
            return Err(Error::new(libc::EIO, Doing::Wait));
        }
        let deadline = Instant::now() + patience;
        let mut running = self.shared.inboxes.len() - failed;
        while running > 0 {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::ThreadEnded) => running -= 1,
                Ok(Event::StopAsked) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        let left = |inbox: &Inbox| inbox.requests.load(Ordering::Acquire);
        Ok(Stopped { unfinished: self.shared.inboxes.iter().map(left).sum() })
    }
}

/// What a thread needs to begin.
struct Job {
    shared: Arc<Shared>,
    index: usize,
    listeners: Vec<Listener>,
    options: Options,
    ready: Sender<Result<(), Error>>,
    end: Sender<Event>,
}

impl Job {
    fn run(self) {
        let disk = self.shared.device.disk().clone();
        let end = self.end.clone();
        let slots = self.options.config.slots;
        let ring = match self.options.kind {
            QueueKind::Threads => None,
            QueueKind::Uring => Some(Uring::new(disk.fd())),
            QueueKind::Auto => self.ring_if_possible(&disk).map(Ok),
        };
        match ring {
            Some(ring) => self.serve(ring),
            None => self.serve(Threads::new(disk.fd(), slots, !disk.is_direct())),
        }
        // Nobody listens any more when the server's patience has ended.
        let _ = end.send(Event::ThreadEnded);
    }

    /// A ring, or none with a warning, which is given once.
    fn ring_if_possible(&self, disk: &Disk<Extents>) -> Option<Uring> {
        match Uring::new(disk.fd()) {
            Ok(ring) => Some(ring),
            Err(error) => {
                if !self.shared.warned.swap(true, Ordering::AcqRel) {
                    tracing::warn!("io_uring cannot be used ({error}), serving with threads");
                }
                None
            }
        }
    }

    fn serve<Q: Queue>(self, queue: Result<Q, Error>) {
        let Self { shared, index, listeners, options, ready, .. } = self;
        let made = queue.and_then(|queue| {
            let device = &shared.device;
            let (disk, workers) = (device.disk().clone(), device.workers());
            let engine: Engine<Q, Extents> = Engine::new(disk, workers, queue, options.config)?;
            Thread::new(shared.clone(), index, listeners, engine)
        });
        match made {
            Ok(mut thread) => {
                let _ = ready.send(Ok(()));
                drop(ready);
                if let Err(error) = thread.run() {
                    tracing::error!("queue {index} ends: {error}");
                }
            }
            Err(error) => {
                let _ = ready.send(Err(error));
            }
        }
    }
}
