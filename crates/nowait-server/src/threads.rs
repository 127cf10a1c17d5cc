//! The threads of a server: their start and end, and the assignment of connections and queues to them.
//!
//! Invariant: a connection is in one channel or on one thread, and stays on the thread that it was
//! assigned to when it was accepted, but for pauses. Threads share exports and channels, nothing else.

pub(crate) mod pause;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use nowait::internal::Budget;
use nowait::{Error, Operation, Uring, WorkerPool};

use crate::any_export::AnyExport;
use crate::buffer_budget::DeclaredUse;
use crate::export::{Export, ExportId};
use crate::export_error::ExportError;
use crate::export_registry::Registry;
use crate::frontends::export_device::{DeviceServer, ExportDevice, NewDevice};
use crate::frontends::{Frontends, ThreadChannels};
use crate::locking::lock;
use crate::nbd::command;
use crate::nbd::connection::HandoffConnection;
use crate::nbd::handshake::{ExportInfo, ExportList};
use crate::nbd::negotiate::ExportDirectory;
use crate::net::connection_limit::{ConnectionLimit, ConnectionPermit};
use crate::net::listener::Listener;
use crate::refusal_log;
use crate::registered_export::RegisteredExport;
use crate::server_options::Options;
use crate::shared_export::{ExportUse, NotServed};
use crate::thread_handle::ThreadHandle;

/// An event for [`Server::run`](crate::Server::run).
pub(crate) enum ThreadEvent {
    StopRequested,
    ThreadExited,
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
    /// Number of the thread.
    pub(crate) number: u16,
    pub(crate) channels: ThreadChannels,
    /// Receives whether the thread has started.
    pub(crate) started: Option<Sender<Result<(), Error>>>,
}

impl ThreadContext {
    /// The frontends of the thread.
    pub(crate) fn frontends(&self) -> Frontends {
        let shared = self.shared.clone();
        Frontends::new(&self.channels, shared, self.shared.limit.clone(), &self.shared.options)
    }

    /// The thread as the other threads see it.
    pub(crate) fn thread(&self) -> &Arc<ThreadHandle> {
        self.channels.thread()
    }

    /// The context of a thread of a server with `exports` that has no thread but this one; `split_bytes`
    /// as in [`Options`].
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn simulated(
        exports: impl IntoIterator<Item = AnyExport>,
        config: nowait::Config,
        split_bytes: u64,
    ) -> Result<Self, Error> {
        let options = Options {
            threads: 1,
            kind: nowait::QueueKind::Threads,
            config,
            max_connections: 64,
            split_bytes,
            ..Options::default()
        };
        let (events, _) = std::sync::mpsc::channel();
        let shared = Arc::new(Shared::new(exports, options, events)?);
        let channels = shared.channels.first().cloned();
        let channels = channels.ok_or(Error::new(libc::EINVAL, Operation::SetUp))?;
        Ok(Self { shared, number: 0, channels, started: None })
    }
}

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

/// State shared by the threads of a server.
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
    /// Held while backups begin or end.
    pub(crate) backups: Mutex<()>,
    /// Ways to the serving threads, of which the first one accepts.
    pub(crate) channels: Vec<ThreadChannels>,
    /// Serving threads that have not exited.
    pub(crate) running: AtomicUsize,
    stopping: AtomicBool,
    end: Mutex<End>,
    /// Clients can connect over NBD.
    listens: AtomicBool,
    /// Threads of devices that have not exited.
    device_threads: AtomicUsize,
    /// The missing io_uring was logged.
    warned: AtomicBool,
    /// A device that stopped polling was logged.
    warned_of_polling: AtomicBool,
    events: Sender<ThreadEvent>,
}

impl Shared {
    /// The state of a server whose threads are not started.
    ///
    /// # Errors
    /// `EINVAL`: there is no export. `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for a thread.
    pub(crate) fn new(
        exports: impl IntoIterator<Item = AnyExport>,
        options: Options,
        events: Sender<ThreadEvent>,
    ) -> Result<Self, Error> {
        let registry = Registry::new(exports)?;
        if registry.default_export().is_none() {
            return Err(Error::new(libc::EINVAL, Operation::SetUp));
        }
        let channels = (0..options.threads.max(1)).map(|_| ThreadChannels::new());
        Ok(Self {
            registry,
            channels: channels.collect::<Result<_, _>>()?,
            limit: Arc::new(ConnectionLimit::new(options.max_connections)),
            declared: DeclaredUse::default(),
            budget: Budget::new(options.config.buffer_bytes),
            workers: WorkerPool::new(options.workers),
            options,
            backups: Mutex::default(),
            running: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            end: Mutex::new(End::Open),
            listens: AtomicBool::new(false),
            device_threads: AtomicUsize::new(0),
            warned: AtomicBool::new(false),
            warned_of_polling: AtomicBool::new(false),
            events,
        })
    }

    /// Has the devices of `export` served. Returns when they are.
    ///
    /// # Errors
    /// Errors of [`ExportDevice::begin`].
    pub(crate) fn begin_devices(
        self: &Arc<Self>,
        export: &Arc<RegisteredExport>,
    ) -> Result<(), Error> {
        let devices = export.devices();
        if devices.is_empty() {
            return Ok(());
        }
        let server = self.for_devices_of(export);
        devices.into_iter().try_for_each(|device| device.begin(&server))
    }

    /// The server, for the devices of `export`.
    pub(crate) fn for_devices_of(
        self: &Arc<Self>,
        export: &Arc<RegisteredExport>,
    ) -> Arc<dyn DeviceServer> {
        Arc::new(ServedBy { shared: self.clone(), registered: export.clone() })
    }

    /// Serves a device more of `export`.
    ///
    /// # Errors
    /// [`ExportError::NotFound`]. [`ExportError::System`]: its thread could not be started.
    pub(crate) fn add_device(
        self: &Arc<Self>,
        export: ExportId,
        device: NewDevice,
    ) -> Result<(), ExportError> {
        let registered = self.registered(export)?;
        let device = device.make().map_err(ExportError::System)?;
        registered.add_device(device.clone());
        device.begin(&self.for_devices_of(&registered)).map_err(ExportError::System)
    }

    /// The serving threads.
    pub(crate) fn threads(&self) -> impl Iterator<Item = &Arc<ThreadHandle>> {
        self.channels.iter().map(ThreadChannels::thread)
    }

    /// The ways to the thread with the fewest connections and queues.
    fn least_loaded(&self) -> Option<&ThreadChannels> {
        self.channels.iter().min_by_key(|channels| channels.thread().connections())
    }

    /// Has the first thread accept the connections of `listeners`.
    pub(crate) fn listen(&self, listeners: Vec<Listener>) {
        if let (Some(first), false) = (self.channels.first(), listeners.is_empty()) {
            self.listens.store(true, Ordering::Relaxed);
            first.nbd.give_listeners(listeners);
        }
    }

    /// Has the thread with the fewest connections serve `connection`, a client of `export`; if that is
    /// paused, the connection waits, and if it was removed, it is closed.
    pub(crate) fn serve_client(
        &self,
        export: &Arc<RegisteredExport>,
        mut connection: HandoffConnection,
    ) {
        loop {
            match export.shared().begin_use() {
                Ok(used) => {
                    connection.used = Some(used);
                    return self.assign(connection);
                }
                Err(NotServed::Removed) => return,
                Err(NotServed::Paused) => {
                    let mut kept = Some(connection);
                    export.with_waiting(|waiting| waiting.connections.extend(kept.take()));
                    match kept {
                        // The pause has ended meanwhile.
                        Some(back) => connection = back,
                        None => return,
                    }
                }
            }
        }
    }

    /// Has the threads look at their exports: some were paused, resumed, removed or limited.
    pub(crate) fn review_exports(&self) {
        self.threads().for_each(|thread| thread.review_exports());
    }

    /// An export.
    ///
    /// # Errors
    /// [`ExportError::NotFound`].
    pub(crate) fn registered(
        &self,
        export: ExportId,
    ) -> Result<Arc<RegisteredExport>, ExportError> {
        self.registry.get(export).ok_or(ExportError::NotFound)
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
        self.registry.all().iter().for_each(|export| export.stop_devices());
        // The receiver is gone if the server has ended by itself.
        let _ = self.events.send(ThreadEvent::StopRequested);
    }

    /// From now on nothing stops the server, because another process is told to serve. False if it stops already.
    pub(crate) fn begin_handing_over(&self) -> bool {
        let mut end = lock(&self.end);
        let begins = *end == End::Open;
        if begins {
            *end = End::HandingOver { is_stop_asked: false };
        }
        begins
    }

    /// The other process serves, if it `could` be told; if not, the server goes on, or stops if that was asked for.
    pub(crate) fn end_handing_over(&self, could: bool) {
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
            export.devices().iter().for_each(|device| device.tell_size(size));
        }
    }

    /// The devices of this host that exports are.
    pub(crate) fn local_devices(&self) -> Vec<Arc<dyn ExportDevice>> {
        let devices = self.registry.all().into_iter().flat_map(|export| export.devices());
        devices.filter(|device| device.is_local()).collect()
    }

    /// Stops the server if no client can reach it any more.
    fn stop_without_sockets(&self) {
        let has_sockets =
            self.listens.load(Ordering::Relaxed) || self.device_threads.load(Ordering::Relaxed) > 0;
        let has_device = |export: &Arc<RegisteredExport>| {
            export.devices().iter().any(|device| device.is_reachable())
        };
        if !has_sockets && !self.registry.all().iter().any(has_device) {
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

    /// Threads that were started and have not exited, those of devices included.
    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::Acquire) + self.device_threads.load(Ordering::Acquire)
    }

    /// Tells [`Server::run`](crate::Server::run) of `event`.
    pub(crate) fn send(&self, event: ThreadEvent) {
        // The receiver is gone if the server has stopped meanwhile.
        let _ = self.events.send(event);
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

impl ExportList for Shared {
    fn infos(&self) -> Vec<ExportInfo> {
        self.registry.served().iter().map(|export| info_of(export)).collect()
    }

    fn info(&self, name: &str) -> Option<ExportInfo> {
        let export = match name {
            "" => self.registry.default_export(),
            _ => self.registry.find(name),
        };
        export.map(|export| info_of(&export))
    }
}

/// The current properties of an export, as told to clients.
fn info_of(export: &RegisteredExport) -> ExportInfo {
    command::export_info(export.id, &export.export(), export.bitmaps.names())
}

impl ExportDirectory for Shared {
    fn name(&self, export: ExportId) -> String {
        let export = self.registry.get(export);
        export.map_or_else(String::new, |export| export.export().name().to_owned())
    }

    fn begin_use(&self, export: ExportId) -> Result<ExportUse, NotServed> {
        self.registry.get(export).ok_or(NotServed::Removed)?.shared().begin_use()
    }

    fn assign(&self, connection: HandoffConnection) {
        if let Some(channels) = self.least_loaded() {
            channels.nbd.assign(connection);
        }
    }

    fn keep(&self, export: ExportId, connection: HandoffConnection) {
        if let Some(export) = self.registry.get(export) {
            self.serve_client(&export, connection);
        }
    }
}

/// An export and its server, for its devices.
struct ServedBy {
    shared: Arc<Shared>,
    registered: Arc<RegisteredExport>,
}

impl DeviceServer for ServedBy {
    fn id(&self) -> ExportId {
        self.registered.id
    }

    fn export(&self) -> Arc<Export> {
        self.registered.export()
    }

    fn begin_use(&self) -> Result<ExportUse, NotServed> {
        self.registered.shared().begin_use()
    }

    fn permit(&self) -> Option<ConnectionPermit> {
        self.shared.limit.take()
    }

    fn threads(&self) -> &[ThreadChannels] {
        &self.shared.channels
    }

    fn least_loaded(&self) -> Option<&ThreadChannels> {
        self.shared.least_loaded()
    }

    fn is_stopping(&self) -> bool {
        self.shared.is_stopping()
    }

    fn spawn(&self, name: String, run: Box<dyn FnOnce() + Send>) -> Result<(), Error> {
        let shared = self.shared.clone();
        let counted = move || {
            run();
            shared.device_threads.fetch_sub(1, Ordering::AcqRel);
            shared.stop_without_sockets();
            // The receiver may be gone; see `ThreadContext::run`.
            let _ = shared.events.send(ThreadEvent::ThreadExited);
        };
        self.shared.device_threads.fetch_add(1, Ordering::AcqRel);
        std::thread::Builder::new().name(name).spawn(counted).map(drop).map_err(|error| {
            self.shared.device_threads.fetch_sub(1, Ordering::AcqRel);
            Error::from_io(&error, Operation::SetUp)
        })
    }

    fn device_ended(&self) {
        self.shared.stop_without_sockets();
    }
}
