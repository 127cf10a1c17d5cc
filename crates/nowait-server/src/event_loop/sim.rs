//! An event loop whose iterations the caller runs one by one, for simulations.
//!
//! Invariant: it runs the code of a real thread except for sources of nondeterminism: it does not
//! accept, sleep, poll adaptively or read the clock, so no handshake ever times out.

use std::sync::Arc;
use std::time::Duration;

use nowait::sim::{ServerEnd, SimQueue};
use nowait::{BlockDevice, BlockMap, Config, Engine, Error, WorkerPool};

use crate::event_loop::EventLoop;
use crate::export::Export;
use crate::export_threads::ThreadContext;
use crate::frontend::Frontend;
use crate::nbd::connection::HandoffConnection;
use crate::nbd::handshake::TlsState;
use crate::nbd::nbd_frontend::NbdFrontend;
use crate::net::socket::Socket;

/// Bytes of a fragment of a long write: the clients of a simulation write less than a real one.
const SPLIT_BYTES: u64 = 8192;

/// A thread of an NBD server on a simulated device.
pub struct Simulated<M: BlockMap>(EventLoop<NbdFrontend, SimQueue, M>);

impl<M: BlockMap> Simulated<M> {
    /// A thread that serves `disk` through `queue`. Workers and disk may be shared.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: a descriptor could not be made or watched.
    pub fn new(
        disk: Arc<BlockDevice<M>>,
        workers: WorkerPool,
        queue: SimQueue,
        config: Config,
    ) -> Result<Self, Error> {
        let export = Arc::new(Export::with_workers(disk.clone(), workers.clone()));
        let mut context = ThreadContext::simulated(export.clone(), config, SPLIT_BYTES)?;
        let engine = Engine::new(disk, workers, queue, config)?;
        let frontend = context.nbd_frontend();
        Ok(Self(EventLoop::new(&context, export, engine, frontend)?))
    }

    /// Adds a connection of which `near` is the server's end. Returns its name, or `None` at the
    /// connection limit.
    pub fn connect(&mut self, near: ServerEnd) -> Option<u64> {
        let permit = self.0.shared.limit.take()?;
        let connection = HandoffConnection::new(Socket::Simulated(near), TlsState::Off, permit);
        let EventLoop { frontend, context, .. } = &mut self.0;
        frontend.add(context, connection);
        Some(frontend.generation)
    }

    /// Whether the connection of that name is still open.
    #[must_use]
    pub fn serves(&self, name: u64) -> bool {
        self.0.frontend.connections.iter().any(|(_, connection)| connection.generation == name)
    }

    /// Runs one iteration. With `waits`, and if nothing is pending, first lets time pass until
    /// something completes.
    ///
    /// # Errors
    /// The queue's error; a real thread would end with it.
    pub fn run_once(&mut self, waits: bool) -> Result<(), Error> {
        let EventLoop { frontend, context, events, .. } = &mut self.0;
        let idle =
            context.run_queues.is_empty() && events.is_empty() && !context.engine.has_completions();
        let waits = waits && idle && !frontend.before_sleep(context);
        let mut watched = |token, bits| events.push((token, bits));
        match waits {
            true => context.engine.wait(Some(Duration::ZERO), &mut watched)?,
            false => context.engine.poll_watched(&mut watched)?,
        }
        self.0.run_once()
    }

    /// Requests that were taken from clients and are not answered yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.0.context.engine.in_flight()
    }
}
