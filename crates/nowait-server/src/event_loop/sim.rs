//! An event loop whose iterations the caller runs one by one, for simulations.
//!
//! Invariant: it runs the code of a real thread except for sources of nondeterminism: it does not
//! accept, sleep, poll adaptively or read the clock, so no handshake ever times out.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::time::Duration;

use nowait::sim::{ServerEnd, SimQueue};
use nowait::{BlockDevice, BlockMap, Config, Engine, Error, FD_TOKEN, Operation, WorkerPool};

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
use crate::ublk::sim_ublk::{SimUblkQueue, SimUblkRequest};
use crate::ublk::ublk_channel::UblkStart;
use crate::ublk::ublk_device::UblkDevice;
use crate::ublk::ublk_frontend::UblkFrontend;
use crate::vhost_user::queue_channel::{QueueCommand, QueueId};
use crate::vhost_user::sim_guest::{SimGuest, SimRing, SimVhostDevice};
use crate::vhost_user::vhost_frontend::VhostFrontend;

/// Bytes of a fragment of a long write: the clients of a simulation write less than a real one.
const SPLIT_BYTES: u64 = 8192;

/// The event loop of a thread that serves `disk` through `queue`, and the export of the disk. Workers and
/// disk may be shared.
fn event_loop<F: Frontend<SimQueue>>(
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
    fn simulate_once(&mut self, waits: bool) -> Result<(), Error> {
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

/// An export that is being paused, as the engine of the thread knows it.
pub(super) struct Draining {
    pub(super) name: String,
    pub(super) device: DiskHandle,
}

/// A thread of an NBD server on simulated devices.
pub struct Simulated {
    pub(super) thread: EventLoop<NbdFrontend, SimQueue>,
    /// The default export.
    export: Arc<RegisteredExport>,
    /// Exports that are being paused.
    pub(super) draining: Vec<Draining>,
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
        Ok(Self { thread: parts.0, export: parts.1, draining: Vec::new() })
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

    /// Runs one iteration. With `waits`, and if nothing is pending, first lets time pass until
    /// something completes.
    ///
    /// # Errors
    /// The queue's error; a real thread would end with it.
    pub fn run_once(&mut self, waits: bool) -> Result<(), Error> {
        self.thread.simulate_once(waits)
    }

    /// An operator changes the export of this thread.
    pub fn change(&mut self, change: SimChange) {
        self.thread.change(&self.export, change);
    }

    /// Requests that were taken from clients and are not answered yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.thread.context.engine.in_flight()
    }
}

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

/// A thread with a queue of a virtual machine on a simulated device.
pub struct SimulatedVhost {
    thread: EventLoop<VhostFrontend, SimQueue>,
    export: Arc<RegisteredExport>,
    /// The queue, and the answer to its stop.
    queue: Option<QueueId>,
    stop: Option<Receiver<u16>>,
    /// The entry of the available ring at which the queue has stopped.
    stopped_at: Option<u16>,
}

impl SimulatedVhost {
    /// Like [`Simulated::new`].
    ///
    /// # Errors
    /// Like [`Simulated::new`].
    pub fn new(
        disk: Arc<BlockDevice<dyn BlockMap>>,
        workers: WorkerPool,
        queue: SimQueue,
        config: Config,
    ) -> Result<Self, Error> {
        let parts = event_loop(disk, workers, queue, config, |context| context.frontends().vhost)?;
        let (thread, export) = parts;
        Ok(Self { thread, export, queue: None, stop: None, stopped_at: None })
    }

    /// Starts queue number `index` of `guest`, the only one of this thread, at the entry `base` of its
    /// available ring; without it at the first one that the driver was not told of.
    ///
    /// # Errors
    /// `EINVAL`: the addresses cannot be; what the system refused.
    pub fn start(
        &mut self,
        guest: &SimGuest,
        device: &SimVhostDevice,
        ring: (u16, SimRing, bool),
        base: Option<u16>,
    ) -> Result<(), Error> {
        let start = Box::new(guest.start(device, ring, base)?);
        self.queue = Some(start.id);
        let stopped = |_| Error::new(libc::EINVAL, Operation::SetUp);
        let used = self.export.shared().begin_use().map_err(stopped)?;
        let EventLoop { frontend, context, .. } = &mut self.thread;
        frontend.channel.send(QueueCommand::Start(used, start));
        frontend.on_wake(context);
        Ok(())
    }

    /// The driver kicks the queue. A simulation polls no descriptor, so this is the event itself.
    pub fn kick(&mut self) {
        self.thread.events.push((FD_TOKEN, 1));
    }

    /// Has the queue take no more requests.
    pub fn begin_pause(&mut self) {
        self.export.begin_pause();
        self.thread.review_exports();
        let (sender, stop) = sync_channel(1);
        if let Some(id) = self.queue.take() {
            let EventLoop { frontend, context, .. } = &mut self.thread;
            frontend.channel.send(QueueCommand::Stop(id, sender));
            frontend.on_wake(context);
            self.stop = Some(stop);
        }
    }

    /// Looks whether it has stopped.
    #[must_use]
    pub fn has_paused(&mut self) -> bool {
        if let Some(Ok(base)) = self.stop.as_ref().map(Receiver::try_recv) {
            (self.stop, self.stopped_at) = (None, Some(base));
        }
        self.stop.is_none() && self.in_flight() == 0
    }

    /// Where it has stopped.
    #[must_use]
    pub fn stopped_at(&self) -> Option<u16> {
        self.stopped_at
    }

    /// Like [`Simulated::run_once`].
    ///
    /// # Errors
    /// Like [`Simulated::run_once`].
    pub fn run_once(&mut self, waits: bool) -> Result<(), Error> {
        self.thread.simulate_once(waits)
    }

    /// Like [`Simulated::change`].
    pub fn change(&mut self, change: SimChange) {
        self.thread.change(&self.export, change);
    }

    /// Like [`Simulated::in_flight`].
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.thread.context.engine.in_flight()
    }
}

/// A thread with a queue of a ublk device on a simulated device, and the driver's side of the queue.
pub struct SimulatedUblk {
    /// Before the thread, whose buffers it accesses.
    queue: SimUblkQueue,
    thread: EventLoop<UblkFrontend, SimQueue>,
    export: Arc<RegisteredExport>,
    device: Arc<UblkDevice>,
}

impl Drop for SimulatedUblk {
    fn drop(&mut self) {
        self.thread.frontend.end_driver();
    }
}

impl SimulatedUblk {
    /// Like [`Simulated::new`], with `depth` tags and requests of at most `max_io_bytes` bytes.
    ///
    /// # Errors
    /// Like [`Simulated::new`].
    pub fn new(
        disk: Arc<BlockDevice<dyn BlockMap>>,
        workers: WorkerPool,
        queue: SimQueue,
        config: Config,
        (depth, max_io_bytes): (u16, u32),
    ) -> Result<Self, Error> {
        let (driver, device) = SimUblkQueue::new(queue.commands(), depth, max_io_bytes)?;
        let parts = event_loop(disk, workers, queue, config, |context| context.frontends().ublk)?;
        let (mut thread, export) = parts;
        let none = Error::new(libc::EINVAL, Operation::SetUp);
        let used = export.shared().begin_use().map_err(|_| none)?;
        let (started, begun) = channel();
        let (device, on_removed) = (Arc::new(device), Box::new(|| {}));
        let start = UblkStart { device: device.clone(), number: 0, used, on_removed, started };
        thread.frontend.add(&mut thread.context, start);
        begun.recv().map_err(|_| none)??;
        Ok(Self { queue: driver, thread, export, device })
    }

    /// Takes the commands of the server. Returns the tags whose requests were answered, with the
    /// results.
    pub fn take(&mut self) -> Vec<(u16, i32)> {
        self.queue.take()
    }

    /// Whether `tag` waits for a request.
    #[must_use]
    pub fn is_free(&self, tag: u16) -> bool {
        self.queue.is_free(tag)
    }

    /// Gives a request to the server, with the data of a write.
    pub fn give(&mut self, tag: u16, request: SimUblkRequest, data: &[u8]) {
        self.queue.give(tag, request, data);
    }

    /// The first `len` bytes of what the server has read for `tag`, until its next request.
    #[must_use]
    pub fn data(&self, tag: u16, len: usize) -> Vec<u8> {
        self.queue.data(tag, len)
    }

    /// The driver keeps requests back from now on.
    pub fn begin_pause(&mut self) {
        self.export.begin_pause();
        self.thread.review_exports();
        self.device.keep_back();
    }

    /// The driver ends the commands of tags that have no request.
    pub fn abort_idle(&mut self) {
        self.queue.abort_idle();
    }

    /// Whether the queue has ended.
    #[must_use]
    pub fn has_paused(&self) -> bool {
        self.export.wait_unused(Duration::ZERO) && self.in_flight() == 0
    }

    /// The server has died, and only the first `reach` of the commands that it has not submitted
    /// reach the driver.
    pub fn die(&mut self, reach: usize) {
        self.queue.die(reach);
    }

    /// Like [`Simulated::run_once`].
    ///
    /// # Errors
    /// Like [`Simulated::run_once`].
    pub fn run_once(&mut self, waits: bool) -> Result<(), Error> {
        self.thread.simulate_once(waits)
    }

    /// Like [`Simulated::change`].
    pub fn change(&mut self, change: SimChange) {
        self.thread.change(&self.export, change);
    }

    /// Like [`Simulated::in_flight`].
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.thread.context.engine.in_flight()
    }
}
