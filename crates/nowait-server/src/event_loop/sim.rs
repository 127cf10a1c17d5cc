//! An event loop whose iterations the caller runs one by one, for simulations.
//!
//! Invariant: it runs the code of a real thread except for sources of nondeterminism: it does not
//! accept, sleep, poll adaptively or read the clock, so no handshake ever times out.

use std::sync::Arc;
use std::time::Duration;

use nowait::sim::{ServerEnd, SimQueue};
use nowait::{BlockDevice, BlockMap, Config, Engine, Error, Operation, WorkerPool};

use crate::any_export::AnyExport;
use crate::event_loop::EventLoop;
use crate::event_loop::sim_change::SimChange;
use crate::export::Export;
use crate::frontend::Frontend;
use crate::loop_context::DiskHandle;
use crate::nbd::connection::HandoffConnection;
use crate::nbd::handshake::TlsState;
use crate::nbd::nbd_frontend::NbdFrontend;
use crate::nbd::session::Phase;
use crate::net::socket::Socket;
use crate::registered_export::RegisteredExport;
use crate::threads::ThreadContext;
use crate::threads::pause::PausedExport;

/// Bytes of a fragment of a long write: the clients of a simulation write less than a real one.
const SPLIT_BYTES: u64 = 8192;

/// The event loop of a thread that serves `disk` through `queue`, and the export of the disk. Workers and
/// disk may be shared.
pub(super) fn event_loop<F: Frontend<SimQueue>>(
    disk: Arc<BlockDevice<dyn BlockMap>>,
    workers: WorkerPool,
    queue: SimQueue,
    config: Config,
    frontend: impl FnOnce(&ThreadContext) -> F,
) -> Result<(EventLoop<F, SimQueue>, Arc<RegisteredExport>), Error> {
    let export = AnyExport::new(Export::new(disk, String::new(), String::new()));
    let context = ThreadContext::simulated([export], config, SPLIT_BYTES)?;
    let none = Error::new(libc::EINVAL, Operation::SetUp);
    let registered = context.shared.registry.default_export().ok_or(none)?;
    let engine = Engine::new(queue, workers, config)?;
    let frontend = frontend(&context);
    let mut thread = EventLoop::new(&context, engine, frontend)?;
    thread.context.exports.idle_time = Duration::MAX;
    Ok((thread, registered))
}

impl<F: Frontend<SimQueue>> EventLoop<F, SimQueue> {
    /// Runs one iteration. With `waits`, and if nothing is pending, first lets time pass until
    /// something completes.
    pub(super) fn simulate_once(&mut self, waits: bool) -> Result<(), Error> {
        let Self { frontend, context, events, .. } = self;
        let idle =
            context.run_queues.is_empty() && events.is_empty() && !context.engine.has_completions();
        let waits = waits && idle && !frontend.before_sleep(context);
        let mut watched = |token, bits| events.push((token, bits));
        match waits {
            true => context.engine.wait(Some(Duration::ZERO), &mut watched)?,
            false => context.engine.poll_watched(&mut watched)?,
        }
        self.run_once()
    }
}

/// A thread of a server on simulated devices, whose iterations the caller runs one by one.
pub trait SimThread {
    /// Runs one iteration. With `waits`, and if nothing is pending, first lets time pass until
    /// something completes.
    ///
    /// # Errors
    /// The queue's error; a real thread would end with it.
    fn run_once(&mut self, waits: bool) -> Result<(), Error>;

    /// An operator changes the export of this thread.
    fn change(&mut self, change: SimChange);

    /// Requests that were taken from clients and are not answered yet.
    fn in_flight(&self) -> usize;
}

/// Has a type with an event loop and its export as fields be a [`SimThread`].
macro_rules! sim_thread {
    ($kind:ty) => {
        impl crate::event_loop::sim::SimThread for $kind {
            fn run_once(&mut self, waits: bool) -> Result<(), Error> {
                self.thread.simulate_once(waits)
            }

            fn change(&mut self, change: SimChange) {
                self.thread.change(&self.export, change);
            }

            fn in_flight(&self) -> usize {
                self.thread.context.engine.in_flight()
            }
        }
    };
}
pub(super) use sim_thread;

/// The pause of an export.
pub(super) struct Pause {
    pub(super) name: String,
    pub(super) paused: PausedExport,
    /// The device of the export, as the engine of the thread knows it.
    pub(super) device: Option<DiskHandle>,
}

/// A thread of an NBD server on simulated devices.
pub struct Simulated {
    pub(super) thread: EventLoop<NbdFrontend, SimQueue>,
    /// The default export.
    export: Arc<RegisteredExport>,
    /// Pauses of single exports.
    pub(super) pauses: Vec<Pause>,
}

impl Simulated {
    /// A thread that serves `disk` through `queue`. Workers and disk may be shared.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: a descriptor could not be made or watched.
    pub fn new(
        disk: Arc<BlockDevice<dyn BlockMap>>,
        workers: WorkerPool,
        queue: SimQueue,
        config: Config,
    ) -> Result<Self, Error> {
        let parts = event_loop(disk, workers, queue, config, |context| context.frontends().nbd)?;
        Ok(Self { thread: parts.0, export: parts.1, pauses: Vec::new() })
    }

    /// Adds a connection of which `near` is the server's end. Returns its name, or `None` at the
    /// connection limit.
    pub fn connect(&mut self, near: ServerEnd) -> Option<u64> {
        let permit = self.thread.shared.limit.take()?;
        Some(self.add(HandoffConnection::new(Socket::Simulated(near), TlsState::Off, permit)))
    }

    fn add(&mut self, connection: HandoffConnection) -> u64 {
        let name = connection.permit.id();
        let EventLoop { frontend, context, .. } = &mut self.thread;
        frontend.add(context, connection);
        name
    }

    /// Whether the connection of that name is still open.
    #[must_use]
    pub fn serves(&self, name: u64) -> bool {
        self.thread
            .frontend
            .connections
            .iter()
            .any(|(_, connection)| connection.permit.id() == name)
    }

    /// Has the thread take no more requests and leave its connections.
    pub fn begin_pause(&mut self) {
        let exports = self.thread.shared.registry.all();
        exports.iter().for_each(|export| _ = export.begin_pause());
        self.thread.review_exports();
    }

    /// Whether it has left all of them.
    #[must_use]
    pub fn has_paused(&self) -> bool {
        let exports = self.thread.shared.registry.all();
        exports.iter().all(|export| export.wait_unused(Duration::ZERO)) && self.in_flight() == 0
    }

    /// The budget that is left.
    pub fn take_parked(&mut self) -> Vec<SimParked> {
        let EventLoop { frontend, context, shared, .. } = &mut self.thread;
        // A real thread goes on with those that have not chosen an export.
        let others = frontend.take_all(context);
        let exports = shared.registry.all();
        let paused = exports.iter().flat_map(|export| {
            let name = export.export().name().to_owned();
            let all = export.end_pause().connections.into_iter();
            all.map(move |connection| SimParked { connection, export: name.clone() })
        });
        let unchosen = |connection| SimParked { connection, export: String::new() };
        paused.chain(others.into_iter().map(unchosen)).collect()
    }

    /// Serves a connection that another thread has left. Returns its name, or `None` as
    /// [`Simulated::connect`].
    pub fn adopt(&mut self, parked: SimParked) -> Option<u64> {
        let permit = self.thread.shared.limit.take()?;
        let is_client = matches!(parked.connection.phase, Phase::Transmission(_));
        let export = self.registered(&parked.export).filter(|_| is_client);
        let used = export.and_then(|export| export.shared().begin_use().ok());
        Some(self.add(HandoffConnection { permit, used, ..parked.connection }))
    }
}

sim_thread!(Simulated);

/// A connection between two threads.
pub struct SimParked {
    connection: HandoffConnection,
    /// The name of the export that its client has chosen.
    export: String,
}

impl SimParked {
    /// Its name on the thread that has left it.
    #[must_use]
    pub fn name(&self) -> u64 {
        self.connection.permit.id()
    }
}
