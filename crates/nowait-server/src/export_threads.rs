//! The threads of a server: their start and end, and the handoff of a connection from one to another.
//!
//! Invariant: only the threads of an export serve its requests; they share the export and their
//! connection channels, nothing else. A connection is in one channel or on one thread. No thread is
//! started once the server is stopping.

pub(crate) mod export_registry;
pub(crate) mod any_export;
pub(crate) mod parking;
#[cfg(test)]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use nowait::{Budget, Error, Operation, Uring, WorkerPool};

use crate::buffer_budget::DeclaredUse;
use crate::export::ExportId;
use crate::export_threads::export_registry::{
    Destination, RegisteredExport, Registry, Servable, ThreadChannels,
};
use crate::locking::lock;
use crate::nbd::connection::HandoffConnection;
use crate::nbd::connection_channel::ConnectionChannel;
use crate::nbd::handshake::ExportInfo;
use crate::nbd::nbd_frontend::NbdFrontend;
use crate::nbd::negotiate::ExportDirectory;
use crate::nbd::write_split::SplitPolicy;
use crate::net::acceptor::Acceptor;
use crate::net::connection_limit::{ConnectionLimit, ConnectionPermit};
use crate::net::listener::Listener;
use crate::refusal_log;
use crate::server_options::Options;
use crate::thread_handle::ThreadHandle;
use crate::ublk::ublk_frontend::UblkFrontend;
use crate::vhost_user::control_thread::{self, ControlHandle, ControlServer, DeviceSocket};
use crate::vhost_user::queue_channel::{QueueChannel, QueueCommand, QueueStart};
use crate::vhost_user::vhost_frontend::VhostFrontend;
use crate::vhost_user::{BlockProperties, QueueThreads};

/// The most threads without connections that wait for their idle timeout, not counting the acceptor
/// thread.
const MAX_IDLE: usize = 16;

/// An event for [`Server::run`](crate::Server::run).
pub(crate) enum ThreadEvent {
    StopRequested,
    ThreadEnded,
    /// Another process serves.
    HandedOver,
    /// A thread's queue has failed; the thread has logged why.
    ThreadFailed,
    /// No connection is left, and at least one client had chosen an export.
    LastClientLeft,
}

/// The context of a thread that starts.
pub(crate) struct ThreadContext {
    pub(crate) shared: Arc<Shared>,
    /// The export.
    pub(crate) registered: Arc<RegisteredExport>,
    /// Index of the thread among the threads of the export.
    pub(crate) queue: u16,
    pub(crate) channels: ThreadChannels,
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
        let channel = self.channels.connections.clone();
        NbdFrontend::new(shared, self.registered.id, channel, acceptor, tls, split_policy)
    }

    /// The frontend of the thread's queue of the export's block device, if it has one.
    pub(crate) fn ublk_frontend(&self) -> Option<UblkFrontend> {
        let device = self.shared.options.ublk.as_ref()?;
        if self.registered.id != Registry::DEFAULT {
            return None;
        }
        let shared = Arc::downgrade(&self.shared);
        let on_removed = move || {
            if let Some(shared) = shared.upgrade() {
                shared.on_ublk_removed();
            }
        };
        UblkFrontend::new(device.clone(), self.queue, Box::new(on_removed))
    }

    /// The vhost-user frontend of the thread.
    pub(crate) fn vhost_frontend(&self) -> VhostFrontend {
        VhostFrontend::new(self.channels.queues.clone())
    }

    /// The thread as the other threads see it.
    pub(crate) fn thread(&self) -> &Arc<ThreadHandle> {
        self.channels.connections.thread()
    }

    /// Reports that the thread has started.
    pub(crate) fn report_started(&mut self) {
        if let Some(ready) = self.ready.take() {
            let _ = ready.send(Ok(()));
        }
    }

    /// Reports that the thread cannot start. Closes the connections assigned to it.
    pub(crate) fn fail_start(self, error: Error) {
        self.registered.withdraw(self.thread());
        drop(self.channels.connections.take_all());
        match self.ready {
            Some(ready) => drop(ready.send(Err(error))),
            None => tracing::error!("export {}, queue {}: {error}", self.registered.id, self.queue),
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
            kind: nowait::QueueKind::Threads,
            config,
            max_connections: 64,
            split_bytes,
            ..Options::default()
        };
        let (events, _) = std::sync::mpsc::channel();
        let shared = Arc::new(Shared::new([(export, false)], options, events));
        let (channels, listeners) = (shared.channels()?, Vec::new());
        let none = Error::new(libc::EINVAL, Operation::SetUp);
        let registered = shared.registry.default_export().ok_or(none)?;
        Ok(Self { shared, registered, queue: 0, channels, listeners, ready: None })
    }

    fn run(self) {
        let (shared, registered) = (self.shared.clone(), self.registered.clone());
        let export = registered.export();
        let event = match catch_unwind(AssertUnwindSafe(|| export.serve(self))) {
            Ok(Ok(())) => ThreadEvent::ThreadEnded,
            // The panic hook has written a message to standard error.
            Ok(Err(_)) | Err(_) => ThreadEvent::ThreadFailed,
        };
        shared.registry.on_thread_ended(&registered);
        // The receiver is gone once the server's shutdown timeout has expired.
        let _ = shared.events.send(event);
    }
}

/// State shared by the threads of a server.
/// How the server ends: the first reason wins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    Stopping,
    /// Another process is told to serve. If it cannot be told, the server stops if that was asked for meanwhile.
    HandingOver {
        is_stop_asked: bool,
    },
    /// Another process serves.
    HandedOver,
}

pub(crate) struct Shared {
    pub(crate) registry: Registry,
    pub(crate) options: Options,
    pub(crate) limit: Arc<ConnectionLimit>,
    /// Buffer bytes that the connections of all threads hold.
    pub(crate) declared: DeclaredUse,
    /// The buffer memory of all engines.
    pub(crate) budget: Budget,
    /// The threads that may block, for all exports.
    pub(crate) workers: WorkerPool,
    stopping: AtomicBool,
    end: Mutex<End>,
    /// Clients can connect over NBD.
    listens: AtomicBool,
    /// Threads of vhost-user sockets that have not ended.
    controls: AtomicUsize,
    /// The missing io_uring was logged.
    warned: AtomicBool,
    /// A device that stopped polling was logged.
    warned_of_polling: AtomicBool,
    /// How many times a thread has become idle.
    idle_count: Arc<AtomicU64>,
    events: Sender<ThreadEvent>,
}

impl Shared {
    pub(crate) fn new(
        exports: impl IntoIterator<Item = (Arc<dyn Servable>, bool)>,
        options: Options,
        events: Sender<ThreadEvent>,
    ) -> Self {
        Self {
            registry: Registry::new(exports),
            limit: Arc::new(ConnectionLimit::new(options.max_connections)),
            declared: DeclaredUse::default(),
            budget: Budget::new(options.config.buffer_bytes),
            workers: WorkerPool::new(options.config.workers),
            options,
            stopping: AtomicBool::new(false),
            end: Mutex::new(End::Open),
            listens: AtomicBool::new(false),
            controls: AtomicUsize::new(0),
            warned: AtomicBool::new(false),
            warned_of_polling: AtomicBool::new(false),
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
        let Some(export) = self.registry.default_export() else {
            return Err(Error::new(libc::EINVAL, Operation::SetUp));
        };
        self.listens.store(!listeners.is_empty(), Ordering::Relaxed);
        for queue in 0..self.queues() {
            let (listeners, ready) = (std::mem::take(&mut listeners), Some(ready.clone()));
            export.add_thread(queue, |queue| self.spawn(&export, queue, listeners, ready))?;
        }
        Ok(())
    }

    /// Retires the threads that have been idle longest, so that at most [`MAX_IDLE`] wait for their
    /// idle timeout: clients that visit one export after the other must not use up the process's
    /// descriptors.
    fn retire_longest_idle(&self) {
        let mut idle: Vec<_> = self.threads().filter(|thread| thread.is_idle()).collect();
        let too_many = idle.len().saturating_sub(MAX_IDLE);
        idle.sort_by_key(|thread| thread.idle_sequence());
        idle.iter().take(too_many).for_each(|thread| thread.retire_early());
    }

    /// The threads of all exports.
    pub(crate) fn threads(&self) -> impl Iterator<Item = Arc<ThreadHandle>> {
        self.registry.all().into_iter().flat_map(|export| export.threads())
    }

    fn queues(&self) -> u16 {
        let ublk = self.options.ublk.as_ref().map_or(1, |device| device.queues());
        self.options.queues.max(ublk)
    }

    /// The channels of a thread that is about to start.
    fn channels(&self) -> Result<ThreadChannels, Error> {
        let thread = Arc::new(ThreadHandle::new(self.idle_count.clone())?);
        Ok(ThreadChannels {
            connections: Arc::new(ConnectionChannel::new(thread.clone())),
            queues: Arc::new(QueueChannel::new(thread)),
        })
    }

    /// Starts thread number `queue` of an export. Returns its channels.
    fn spawn(
        self: &Arc<Self>,
        registered: &Arc<RegisteredExport>,
        queue: u16,
        listeners: Vec<Listener>,
        ready: Option<Sender<Result<(), Error>>>,
    ) -> Result<ThreadChannels, Error> {
        let channels = self.channels()?;
        let (shared, registered) = (self.clone(), registered.clone());
        let name = format!("nowait-nbd-{}.{queue}", registered.id);
        let context = ThreadContext {
            shared,
            registered,
            queue,
            channels: channels.clone(),
            listeners,
            ready,
        };
        let spawned = std::thread::Builder::new().name(name).spawn(move || context.run());
        spawned.map_err(|error| Error::from_io(&error, Operation::SetUp))?;
        Ok(channels)
    }

    /// Sends something to a thread of `export` by `send`, to a new one if none is idle.
    fn assign_to(
        self: &Arc<Self>,
        export: &Arc<RegisteredExport>,
        send: impl FnOnce(Destination<'_>),
    ) {
        if self.send_to(export, send) {
            self.retire_longest_idle();
        }
    }

    /// The same, and leaves idle threads of all exports as they are. Returns whether a thread was
    /// started.
    fn send_to(
        self: &Arc<Self>,
        export: &Arc<RegisteredExport>,
        send: impl FnOnce(Destination<'_>),
    ) -> bool {
        let start = |queue| {
            // `stop` wakes up the threads of the list after it, so it cannot miss this one.
            let starts = !self.is_stopping();
            let started = starts.then(|| self.spawn(export, queue, Vec::new(), None))?;
            let log =
                |error: &Error| tracing::error!("export {}, queue {queue}: {error}", export.id);
            started.inspect_err(log).ok()
        };
        export.assign(self.queues(), start, send)
    }

    /// Sends a connection to a thread of `export`, as [`Shared::send_to`]: one of many that come back
    /// together.
    fn bring_back(self: &Arc<Self>, export: &Arc<RegisteredExport>, arrival: HandoffConnection) {
        self.send_to(export, |destination| destination.take_connection(arrival));
    }

    /// Starts the thread of a vhost-user socket for `export`, which was registered with devices.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: the thread could not be started.
    pub(crate) fn serve_devices(
        self: &Arc<Self>,
        export: ExportId,
        socket: DeviceSocket,
    ) -> Result<(), Error> {
        let registered = self.registered(export)?;
        let handle = Arc::new(ControlHandle::new()?);
        registered.add_control(handle.clone());
        let name = registered.export().name().to_owned();
        let server = Arc::new(DeviceExport { shared: self.clone(), registered });
        let run = move || {
            control_thread::run(socket, &server, &handle, &name);
            server.shared.controls.fetch_sub(1, Ordering::AcqRel);
            server.shared.stop_without_sockets();
            // As in `ThreadContext::run`.
            let _ = server.shared.events.send(ThreadEvent::ThreadEnded);
        };
        self.controls.fetch_add(1, Ordering::AcqRel);
        let thread = std::thread::Builder::new().name(format!("nowait-vhost-{export}"));
        if let Err(error) = thread.spawn(run) {
            self.controls.fetch_sub(1, Ordering::AcqRel);
            return Err(Error::from_io(&error, Operation::SetUp));
        }
        Ok(())
    }

    /// An export.
    ///
    /// # Errors
    /// `ENOENT`: there is no such export.
    pub(crate) fn registered(&self, export: ExportId) -> Result<Arc<RegisteredExport>, Error> {
        self.registry.get(export).ok_or(Error::new(libc::ENOENT, Operation::SetUp))
    }

    /// Stops the server: no more requests are taken. Without effect while another process takes over, and after that.
    pub(crate) fn stop(&self) {
        match &mut *lock(&self.end) {
            End::HandingOver { is_stop_asked } => return *is_stop_asked = true,
            End::HandedOver => return,
            end => *end = End::Stopping,
        }
        self.stopping.store(true, Ordering::Release);
        self.wake_threads();
        self.registry.all().iter().for_each(|export| export.stop_controls());
        // The receiver is gone if the server has ended by itself.
        let _ = self.events.send(ThreadEvent::StopRequested);
    }

    /// From now on nothing stops the server, because another process is told to serve. False if it stops already.
    fn begin_handing_over(&self) -> bool {
        let mut end = lock(&self.end);
        let begins = *end == End::Open;
        if begins {
            *end = End::HandingOver { is_stop_asked: false };
        }
        begins
    }

    /// The other process serves, if it `could` be told; if not, the server goes on, or stops if that was asked for.
    fn end_handing_over(&self, could: bool) {
        let before = std::mem::replace(
            &mut *lock(&self.end),
            if could { End::HandedOver } else { End::Open },
        );
        if !could && before == (End::HandingOver { is_stop_asked: true }) {
            self.stop();
        }
    }

    /// Wakes all threads up.
    pub(crate) fn wake_threads(&self) {
        self.threads().for_each(|thread| thread.wake());
    }

    /// The device of `export` has `size` bytes.
    pub(crate) fn tell_size(&self, export: &RegisteredExport, size: u64) {
        if let Some(before) = export.tell_size(size) {
            let served = export.export();
            let name = served.name();
            tracing::info!("export {name:?} has {size} bytes now, it had {before}");
            if export.id == Registry::DEFAULT
                && let Some(device) = &self.options.ublk
            {
                device.resize(size);
            }
            export.tell_vmms();
        }
    }

    /// Another program has taken the export's block device away. Without a socket there is nothing
    /// left to serve.
    fn on_ublk_removed(&self) {
        if let Some(device) = &self.options.ublk {
            tracing::warn!("{} was removed by another program", device.node());
        }
        self.stop_without_sockets();
    }

    /// Stops the server if no client can reach it any more.
    fn stop_without_sockets(&self) {
        let has_sockets =
            self.listens.load(Ordering::Relaxed) || self.controls.load(Ordering::Relaxed) > 0;
        let has_node = self.options.ublk.as_ref().is_some_and(|device| device.has_node());
        if !has_sockets && !has_node {
            self.stop();
        }
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

    /// Threads that were started and have not ended, of all exports and sockets.
    pub(crate) fn running(&self) -> usize {
        self.registry.running() + self.controls.load(Ordering::Acquire)
    }

    /// Requests in flight on all threads.
    pub(crate) fn in_flight(&self) -> usize {
        self.threads().map(|thread| thread.in_flight()).sum()
    }

    /// Logs the storage failures of every export that were only counted.
    pub(crate) fn summarize_faults(&self) {
        self.registry.all().iter().for_each(|export| export.export().summarize_faults());
        refusal_log::summarize();
    }

    /// Logs once that a device which could be polled refuses it.
    #[cold]
    pub(crate) fn warn_stopped_polling(&self) {
        if !self.warned_of_polling.swap(true, Ordering::AcqRel) {
            tracing::warn!("a device refuses to be polled: its requests complete by interrupt");
        }
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
        self.registry.served().iter().map(|export| export.export().info(export.id)).collect()
    }

    fn name(&self, export: ExportId) -> String {
        let export = self.registry.get(export);
        export.map_or_else(String::new, |export| export.export().name().to_owned())
    }

    fn assign(self: Arc<Self>, export: ExportId, arrival: HandoffConnection) {
        let Some(export) = self.registry.get(export) else { return };
        self.assign_to(&export, |destination| destination.take_connection(arrival));
    }

    fn park_listeners(&self, export: ExportId, listeners: Vec<Listener>) {
        let Some(export) = self.registry.get(export) else { return };
        export.with_parking(|parking| parking.listeners.extend(listeners));
    }
}

/// An export and the server, for the threads of vhost-user sockets.
struct DeviceExport {
    shared: Arc<Shared>,
    registered: Arc<RegisteredExport>,
}

impl QueueThreads for DeviceExport {
    fn properties(&self) -> BlockProperties {
        self.registered.export().properties()
    }

    fn start(&self, start: Box<QueueStart>) -> Option<Arc<QueueChannel>> {
        let mut channel = None;
        self.shared.assign_to(&self.registered, |destination| {
            let Destination::Thread(thread) = destination else { return };
            thread.queues.send(QueueCommand::Start(start));
            channel = Some(thread.queues.clone());
        });
        channel
    }

    fn is_stopping(&self) -> bool {
        self.shared.is_stopping()
    }
}

impl ControlServer for DeviceExport {
    fn permit(&self) -> Option<ConnectionPermit> {
        self.shared.limit.take()
    }

    fn export(&self) -> ExportId {
        self.registered.id
    }
}
