//! The NBD server: exports, threads with a queue each, and the connections spread over them.
//!
//! Invariant: a connection belongs to one thread, and once it has chosen an export, to one of that
//! export's; threads share the device and nothing else but their inboxes.
//! Knows: device, and the modules here. Known by: the command.

mod breaks;
mod wire;
mod head;
mod context;
mod option;
mod credentials;
mod handshake;
mod socket;
mod listener;
mod seats;
mod patience;
mod share;
mod portion;
mod spin;
mod reply;
mod door;
mod extended;
mod respond;
mod cut;
mod tls;
mod conn;
mod entrance;
mod group;
mod turn;
mod parse;
mod parts;
mod receive;
#[cfg(feature = "fuzz")]
pub mod fuzz;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nowait::{Config, Doing, Engine, Error, Map, Queue, Threads, Uring};

use crate::device::Device;
pub use credentials::{Clients, Credentials, Tls, TlsError};
use group::{Event, Exported, Post, Shared};
use handshake::ExportInfo;
pub use listener::Listener;
use turn::Thread;
#[cfg(feature = "sim")]
pub use {
    breaks::{Mistake, make},
    turn::Simulated,
};

/// How transfers get to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// io_uring(7), or as `Threads` for the threads that get no ring: the limit on locked
    /// memory (`RLIMIT_MEMLOCK`) may allow only some.
    Auto,
    /// io_uring(7).
    Uring,
    /// Linux AIO for what need not wait, and plain system calls on a bounded number of threads.
    Threads,
}

/// How a server runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads with a queue each, at least 1.
    pub queues: u16,
    /// What the queues are.
    pub kind: QueueKind,
    /// The engines' switches and sizes.
    pub config: Config,
    /// Whether connections are encrypted.
    pub tls: Tls,
    /// Connections at once, at least 1. One more is closed as soon as it comes.
    pub max_connections: u32,
}

/// What was left when a server stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Stopped {
    /// Requests that had not ended in time.
    pub unfinished: usize,
}

/// A device that clients can choose.
pub struct Export(Arc<dyn Exported>);

impl Export {
    /// Clients know it by the name and the description of `device`.
    #[must_use]
    pub fn new<M: Map>(device: Device<M>) -> Self {
        Self(Arc::new(device))
    }
}

/// A running NBD server.
pub struct Server {
    shared: Arc<Shared>,
    events: Receiver<Event>,
}

/// Ends a server, from any thread.
#[derive(Clone)]
pub struct Stopper(Arc<Shared>);

impl Stopper {
    /// The server takes no more requests; [`Server::run`] returns when those in flight have ended.
    pub fn stop(&self) {
        self.0.stop();
    }
}

impl Server {
    /// Starts serving `exports` to whoever connects to `listeners`. The first is the default
    /// export, which clients get that name none; of several with one name only the first can be
    /// chosen. Its threads are there when this returns, those of another export are started when
    /// a client first chooses it.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: a queue or a thread could not be made; for
    /// [`QueueKind::Uring`] also what [`Uring::new`] says. `EINVAL`: there is no export.
    pub fn start(
        exports: Vec<Export>,
        listeners: Vec<Listener>,
        options: Options,
    ) -> Result<Self, Error> {
        let (sender, events) = channel();
        let devices = exports.into_iter().map(|export| export.0);
        let shared = Arc::new(Shared::new(devices, options, sender));
        let (ready, begun) = channel();
        let started = shared.start(listeners, &ready);
        drop(ready);
        match started.and_then(|()| begun.iter().collect()) {
            Ok(()) => Ok(Self { shared, events }),
            Err(error) => {
                shared.stop();
                Err(error)
            }
        }
    }

    /// What stops this server.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper(self.shared.clone())
    }

    /// Serves until it is stopped, then waits at most `patience` for the requests in flight.
    /// Durability is the caller's next step.
    ///
    /// # Errors
    /// `EIO`: a thread has ended because its queue failed; it has said why in the log.
    pub fn run(self, patience: Duration) -> Result<Stopped, Error> {
        loop {
            match self.events.recv() {
                Ok(Event::StopAsked) | Err(_) => break,
                // It could not begin, or its stop was asked for a moment ago.
                Ok(Event::ThreadEnded) => {}
                Ok(Event::ThreadFailed) => {
                    self.shared.stop();
                    return Err(Error::new(libc::EIO, Doing::Wait));
                }
            }
        }
        let deadline = Instant::now() + patience;
        while self.shared.running() > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(Stopped { unfinished: self.shared.requests() })
    }
}

impl<M: Map> Exported for Device<M> {
    fn info(&self) -> ExportInfo {
        door::export_info(self)
    }

    fn serve(self: Arc<Self>, post: Post) -> Result<(), Error> {
        let disk = self.disk().clone();
        let files = disk.files();
        let Options { kind, config, .. } = post.shared.options;
        let ring = match kind {
            QueueKind::Threads => None,
            QueueKind::Uring => Some(Uring::for_files(&files)),
            QueueKind::Auto => match Uring::for_files(&files) {
                Ok(ring) => Some(Ok(ring)),
                Err(error) => {
                    post.shared.warn_of_no_ring(&error);
                    None
                }
            },
        };
        match ring {
            Some(ring) => serve_on(self, post, ring),
            None => {
                let queue = Threads::for_files(&files, config.slots, !disk.is_direct());
                serve_on(self, post, queue)
            }
        }
    }
}

/// Serves `device` at `post` with `queue`, if it could be made.
fn serve_on<Q: Queue, M: Map>(
    device: Arc<Device<M>>,
    mut post: Post,
    queue: Result<Q, Error>,
) -> Result<(), Error> {
    let (disk, workers) = (device.disk().clone(), device.workers());
    let (export, number) = (post.export, post.queue);
    let engine = queue.and_then(|queue| {
        let mut engine = Engine::new(disk, workers, queue, post.shared.options.config)?;
        turn::watch(&post, &mut engine)?;
        Ok(engine)
    });
    match engine {
        Ok(engine) => {
            post.begun();
            let ran = Thread::new(post, device, engine).run();
            ran.inspect_err(|error| tracing::error!("export {export}, queue {number}: {error}"))
        }
        Err(error) => {
            post.resign(error);
            Ok(())
        }
    }
}
