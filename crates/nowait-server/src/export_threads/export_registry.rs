//! The registry of a server's exports, and the threads of each.
//!
//! Invariant: an id is never used again. A removed export is chosen by no further client and gets no
//! further thread; its threads end with their last connections, and it stays registered until then.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use nowait::{Error, Operation};

use crate::export::ExportId;
use crate::export_threads::ThreadContext;
use crate::locking::lock;
use crate::nbd::connection::HandoffConnection;
use crate::nbd::connection_channel::ConnectionChannel;
use crate::nbd::handshake::ExportInfo;
use crate::net::listener::Listener;
use crate::rate_limit::SharedLimits;
use crate::statistics::ExportStatistics;
use crate::thread_handle::ThreadHandle;
use crate::vhost_user::BlockProperties;
use crate::vhost_user::control_thread::{ControlHandle, ParkedDevice};
use crate::vhost_user::queue_channel::QueueChannel;

/// An export with any block map.
pub(crate) trait Servable: Send + Sync {
    /// The export's current properties, as told to clients: asked of the device each time.
    fn info(&self, id: ExportId) -> ExportInfo;

    /// The same for virtual machines.
    fn properties(&self) -> BlockProperties;

    /// The export's name.
    fn name(&self) -> &str;

    /// The export's text for people.
    fn description(&self) -> &str;

    /// Whether writes are refused.
    fn is_read_only(&self) -> bool;

    /// Refuses changes, or no more. As [`crate::Exports::set_read_only`].
    ///
    /// # Errors
    /// `EROFS`: the image was opened for reading only.
    fn set_read_only(&self, read_only: bool) -> Result<(), Error>;

    /// As [`nowait::BlockDevice::allocated_ahead`].
    fn allocated_ahead(&self) -> u64;

    /// Size of its device in bytes.
    fn size(&self) -> u64;

    /// The same, asked of the storage. As [`nowait::BlockDevice::refresh`].
    ///
    /// # Errors
    /// Those of `refresh`.
    fn refresh(&self) -> Result<u64, Error>;

    /// Makes the device larger. As [`nowait::BlockDevice::grow`].
    ///
    /// # Errors
    /// Those of `grow`.
    fn grow(&self, size: u64) -> Result<(), Error>;

    /// Makes the completed writes durable. Blocks.
    ///
    /// # Errors
    /// The errno of the flush, which was logged.
    fn flush(&self) -> Result<(), Error>;

    /// Logs the storage failures that were only counted.
    fn summarize_faults(&self);

    /// Serves as the thread of `context` until the server stops.
    ///
    /// # Errors
    /// The queue has failed. (A queue that could not be made is reported to `context`.)
    fn serve(self: Arc<Self>, context: ThreadContext) -> Result<(), Error>;
}

/// What other threads send to a thread.
#[derive(Clone)]
pub(crate) struct ThreadChannels {
    pub(crate) connections: Arc<ConnectionChannel>,
    pub(crate) queues: Arc<QueueChannel>,
}

impl ThreadChannels {
    fn thread(&self) -> &Arc<ThreadHandle> {
        self.connections.thread()
    }
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

/// A registered export and its threads: none until a client chooses it.
pub(crate) struct RegisteredExport {
    pub(crate) id: ExportId,
    /// Another one only while the threads are parked.
    export: RwLock<Arc<dyn Servable>>,
    /// It is a disk of virtual machines too: its threads serve queues beside connections.
    pub(crate) has_devices: bool,
    /// The threads of its vhost-user sockets.
    controls: Mutex<Vec<Arc<ControlHandle>>>,
    threads: Mutex<Threads>,
    /// Notified when a thread has ended.
    ended: Condvar,
    /// The size that the guests and the block device of this machine have been told, in bytes.
    told_size: AtomicU64,
    /// What its threads have done.
    pub(crate) statistics: ExportStatistics,
    /// What it may do.
    pub(crate) limits: SharedLimits,
}

/// Where something for an export goes.
pub(crate) enum Destination<'a> {
    Thread(&'a ThreadChannels),
    /// The threads of the export have ended for a while.
    Parking(&'a mut Parking),
}

impl Destination<'_> {
    /// The connection of a client that has chosen the export.
    pub(crate) fn take_connection(self, connection: HandoffConnection) {
        match self {
            Self::Thread(thread) => thread.connections.assign(connection),
            Self::Parking(parking) => parking.connections.push(connection),
        }
    }
}

/// What the threads of an export have left for the next ones.
#[derive(Default)]
pub(crate) struct Parking {
    pub(crate) connections: Vec<HandoffConnection>,
    pub(crate) listeners: Vec<Listener>,
    /// Threads that have members left.
    leaving: Vec<ThreadChannels>,
}

impl Parking {
    /// Wakes the threads that have members left.
    pub(crate) fn wake(&self) {
        self.leaving.iter().for_each(|channels| channels.thread().wake());
    }
}

#[derive(Default)]
struct Threads {
    /// The channels of the threads that take connections.
    channels: Vec<ThreadChannels>,
    /// Instead of threads.
    parking: Option<Parking>,
    /// Threads that were started and have not ended.
    running: usize,
    /// The export is to be served no more.
    removed: bool,
}

impl RegisteredExport {
    fn new(id: ExportId, export: Arc<dyn Servable>, has_devices: bool) -> Self {
        let (controls, threads, ended) = (Mutex::default(), Mutex::default(), Condvar::new());
        let told_size = AtomicU64::new(export.size());
        let statistics = ExportStatistics::default();
        let limits = SharedLimits::default();
        let export = RwLock::new(export);
        Self { id, export, has_devices, controls, threads, ended, told_size, statistics, limits }
    }

    /// What it serves.
    pub(crate) fn export(&self) -> Arc<dyn Servable> {
        self.export.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Serves `export` from now on; no thread serves meanwhile. Changes are refused as before.
    pub(crate) fn replace(&self, export: Arc<dyn Servable>) {
        let mut current = self.export.write().unwrap_or_else(PoisonError::into_inner);
        current.summarize_faults();
        if current.is_read_only() {
            // It cannot fail: nothing is allowed by it.
            let _ = export.set_read_only(true);
        }
        *current = export;
    }

    /// Notes that the device has `size` bytes. Returns the size before, if it was another one.
    pub(crate) fn tell_size(&self, size: u64) -> Option<u64> {
        let before = self.told_size.swap(size, Ordering::AcqRel);
        (before != size).then_some(before)
    }

    /// Notes the thread of a vhost-user socket, which [`RegisteredExport::stop_controls`] ends.
    pub(crate) fn add_control(&self, handle: Arc<ControlHandle>) {
        lock(&self.controls).push(handle);
    }

    /// Tells the VMMs at the vhost-user sockets that the device has another size.
    pub(crate) fn tell_vmms(&self) {
        let controls = lock(&self.controls);
        controls.iter().for_each(|handle| handle.tell_config_change());
    }

    /// The threads of its vhost-user sockets.
    pub(crate) fn controls(&self) -> Vec<Arc<ControlHandle>> {
        lock(&self.controls).clone()
    }

    /// The devices of virtual machines, which are suspended, for another process. As
    /// [`ControlHandle::freeze`].
    pub(crate) fn freeze_devices(
        &self,
        soon: Instant,
        deadline: Instant,
    ) -> Result<Vec<ParkedDevice>, Error> {
        let controls = lock(&self.controls).clone();
        controls.iter().map(|handle| handle.freeze(soon, deadline)).collect()
    }

    /// Another process serves the frozen devices.
    pub(crate) fn release_devices(&self) {
        lock(&self.controls).iter().for_each(|handle| handle.release());
    }

    /// Starts the queues of the virtual machines again.
    pub(crate) fn resume_devices(&self) {
        let controls = lock(&self.controls).clone();
        controls.iter().for_each(|handle| handle.resume());
    }

    /// Ends the threads of the vhost-user sockets.
    pub(crate) fn stop_controls(&self) {
        let controls = lock(&self.controls);
        controls.iter().for_each(|handle| handle.stop());
    }

    /// Adds the thread that `start` starts as number `n` of this export.
    ///
    /// # Errors
    /// The error of `start`.
    pub(crate) fn add_thread(
        &self,
        n: u16,
        start: impl FnOnce(u16) -> Result<ThreadChannels, Error>,
    ) -> Result<(), Error> {
        let mut threads = self.lock();
        threads.channels.push(start(n)?);
        threads.running += 1;
        Ok(())
    }

    /// Sends something to the thread with the fewest connections and queues, by `send`. If none is
    /// idle and there are fewer than `most`, `start` may start another one for it. If there is no
    /// thread, or the export was removed, `send` is dropped; if it is parked, `send` is told so. Returns whether a thread was started.
    pub(crate) fn assign(
        &self,
        most: u16,
        start: impl FnOnce(u16) -> Option<ThreadChannels>,
        send: impl FnOnce(Destination<'_>),
    ) -> bool {
        let mut threads = self.lock();
        if threads.removed {
            return false;
        }
        if let Some(parking) = &mut threads.parking {
            send(Destination::Parking(parking));
            return false;
        }
        let channels = &mut threads.channels;
        let mut started = false;
        if channels.len() < usize::from(most)
            && !channels.iter().any(|one| one.thread().is_idle())
            && let Some(new) = start(channels.len() as u16)
        {
            channels.push(new);
            started = true;
        }
        if let Some(least) = channels.iter().min_by_key(|one| one.thread().connections()) {
            send(Destination::Thread(least));
        }
        threads.running += usize::from(started);
        started
    }

    /// Takes `thread` off the list, unless a connection was assigned to it. Then it ends.
    pub(crate) fn retire(&self, thread: &Arc<ThreadHandle>) -> Retired {
        let mut threads = self.lock();
        if !thread.is_idle() {
            return Retired::No;
        }
        threads.channels.retain(|one| !Arc::ptr_eq(one.thread(), thread));
        if threads.channels.is_empty() { Retired::TheLast } else { Retired::OneOfSeveral }
    }

    /// Has the threads leave what they have, and end. Until [`RegisteredExport::end_parking`] no
    /// other is started. Returns false if they do so already.
    pub(crate) fn begin_parking(&self) -> bool {
        let mut threads = self.lock();
        if threads.parking.is_some() {
            return false;
        }
        let leaving = std::mem::take(&mut threads.channels);
        leaving.iter().for_each(|channels| channels.thread().set_parking(true));
        threads.parking = Some(Parking { leaving, ..Parking::default() });
        true
    }

    /// What the threads have left, while the export is parked.
    pub(crate) fn with_parking<T>(&self, act: impl FnOnce(&mut Parking) -> T) -> Option<T> {
        self.lock().parking.as_mut().map(act)
    }

    /// Takes `thread`, which has left everything, off those that leave. Then it ends; false if it is
    /// to go on.
    pub(crate) fn leave_parking(&self, thread: &Arc<ThreadHandle>) -> bool {
        let mut threads = self.lock();
        let Some(parking) = &mut threads.parking else { return false };
        let before = parking.leaving.len();
        parking.leaving.retain(|one| !Arc::ptr_eq(one.thread(), thread));
        parking.leaving.len() < before
    }

    /// Threads that have not ended go on, and others can be started. Returns what is for them.
    pub(crate) fn end_parking(&self) -> Parking {
        let mut threads = self.lock();
        let Some(mut parking) = threads.parking.take() else { return Parking::default() };
        parking.leaving.iter().for_each(|channels| channels.thread().set_parking(false));
        threads.channels.append(&mut parking.leaving);
        parking
    }

    /// Takes a thread that could not start off the list.
    pub(crate) fn withdraw(&self, thread: &Arc<ThreadHandle>) {
        self.lock().channels.retain(|one| !Arc::ptr_eq(one.thread(), thread));
    }

    /// A thread has ended.
    fn on_thread_ended(&self) {
        self.lock().running -= 1;
        self.ended.notify_all();
    }

    /// The threads that take connections.
    pub(crate) fn threads(&self) -> Vec<Arc<ThreadHandle>> {
        self.lock().channels.iter().map(|channels| channels.thread().clone()).collect()
    }

    /// Takes no more clients. The threads end when they have no connections.
    fn remove(&self) {
        self.stop_controls();
        let mut threads = self.lock();
        threads.removed = true;
        threads.channels.iter().for_each(|channels| channels.thread().retire_for_good());
    }

    /// Takes no more clients, unless there are some, or `connected`. Returns whether it takes none.
    fn remove_unused(&self, connected: impl FnOnce() -> bool) -> bool {
        let mut threads = self.lock();
        let busy = threads.channels.iter().any(|channels| !channels.thread().is_idle());
        // A connection is listed before it is assigned, which takes the lock.
        if !threads.removed && (busy || connected()) {
            return false;
        }
        threads.removed = true;
        true
    }

    fn is_removed(&self) -> bool {
        self.lock().removed
    }

    /// Waits at most `timeout` until all threads have ended. Returns whether they have.
    pub(crate) fn wait_ended(&self, timeout: Duration) -> bool {
        let is_served = |threads: &mut Threads| threads.running > 0;
        let waited = self.ended.wait_timeout_while(self.lock(), timeout, is_served);
        let (threads, _) = waited.unwrap_or_else(PoisonError::into_inner);
        threads.running == 0
    }

    /// Locks the threads, ignoring poison: no critical section can panic half-way through a change.
    fn lock(&self) -> MutexGuard<'_, Threads> {
        lock(&self.threads)
    }
}

/// All exports of a server. The first one is the default.
pub(crate) struct Registry(RwLock<Exports>);

struct Exports {
    by_id: BTreeMap<ExportId, Arc<RegisteredExport>>,
    /// The first of each name; it may be removed already.
    by_name: HashMap<String, ExportId>,
    next: u64,
}

impl Registry {
    /// The id of the default export.
    pub(crate) const DEFAULT: ExportId = ExportId(0);

    /// The exports of `exports`, each with whether it is a disk of virtual machines too.
    pub(crate) fn new(exports: impl IntoIterator<Item = (Arc<dyn Servable>, bool)>) -> Self {
        let mut all = Exports { by_id: BTreeMap::new(), by_name: HashMap::new(), next: 0 };
        for (export, has_devices) in exports {
            all.add(export, has_devices);
        }
        Self(RwLock::new(all))
    }

    /// Adds an export. Its threads start when clients choose it, or when a queue starts.
    ///
    /// # Errors
    /// `EEXIST`: there is one of that name.
    pub(crate) fn add(
        &self,
        export: Arc<dyn Servable>,
        has_devices: bool,
    ) -> Result<ExportId, Error> {
        let mut exports = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if exports.find(export.name()).is_some() {
            return Err(Error::new(libc::EEXIST, Operation::SetUp));
        }
        Ok(exports.add(export, has_devices))
    }

    /// An export, unless it was removed and has no thread any more.
    pub(crate) fn get(&self, id: ExportId) -> Option<Arc<RegisteredExport>> {
        self.read().by_id.get(&id).cloned()
    }

    /// The export that clients choose by `name`.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<RegisteredExport>> {
        self.read().find(name).cloned()
    }

    /// An export that clients can choose.
    pub(crate) fn served_export(&self, id: ExportId) -> Option<Arc<RegisteredExport>> {
        self.get(id).filter(|export| !export.is_removed())
    }

    /// The export of clients that name none, whose threads accept all connections.
    pub(crate) fn default_export(&self) -> Option<Arc<RegisteredExport>> {
        self.get(Self::DEFAULT)
    }

    /// All exports in the order of their ids, those included that were removed and have threads yet.
    pub(crate) fn all(&self) -> Vec<Arc<RegisteredExport>> {
        self.read().by_id.values().cloned().collect()
    }

    /// The exports that clients can choose, the default first.
    pub(crate) fn served(&self) -> Vec<Arc<RegisteredExport>> {
        let mut all = self.all();
        all.retain(|export| !export.is_removed());
        all
    }

    /// An export that can be removed.
    ///
    /// # Errors
    /// `ENOENT`: there is no such export. `EBUSY`: it is the default export.
    fn removable(&self, id: ExportId) -> Result<Arc<RegisteredExport>, Error> {
        let failed = |errno| Error::new(errno, Operation::SetUp);
        let export = self.get(id).ok_or(failed(libc::ENOENT))?;
        if id == Self::DEFAULT { Err(failed(libc::EBUSY)) } else { Ok(export) }
    }

    /// Lets no further client choose an export without clients; [`Registry::remove`] does the rest.
    /// `connected` says whether a client is connected whose requests no thread serves yet.
    ///
    /// # Errors
    /// `ENOENT`, `EBUSY` as there. `EUSERS`: it has clients.
    pub(crate) fn remove_unused(
        &self,
        id: ExportId,
        connected: impl FnOnce() -> bool,
    ) -> Result<(), Error> {
        match self.removable(id)?.remove_unused(connected) {
            true => Ok(()),
            false => Err(Error::new(libc::EUSERS, Operation::SetUp)),
        }
    }

    /// Removes an export: no further client can choose it. Waits at most `timeout` until the last
    /// connection has left and all writes are durable.
    ///
    /// # Errors
    /// `ENOENT`: there is no such export. `EBUSY`: it is the default export. `ETIMEDOUT`: it has
    /// connections yet, and ends with the last one; another call goes on waiting.
    pub(crate) fn remove(&self, id: ExportId, timeout: Duration) -> Result<(), Error> {
        let export = self.removable(id)?;
        export.remove();
        if !export.wait_ended(timeout) {
            return Err(Error::new(libc::ETIMEDOUT, Operation::SetUp));
        }
        self.forget_if_over(&export);
        Ok(())
    }

    /// A thread of `export` has ended.
    pub(crate) fn on_thread_ended(&self, export: &RegisteredExport) {
        export.on_thread_ended();
        self.forget_if_over(export);
    }

    /// Threads that were started and have not ended.
    pub(crate) fn running(&self) -> usize {
        self.all().iter().map(|export| export.lock().running).sum()
    }

    fn forget_if_over(&self, export: &RegisteredExport) {
        let is_over = {
            let threads = export.lock();
            threads.removed && threads.running == 0
        };
        let mut exports = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if is_over && exports.by_id.remove(&export.id).is_some() {
            exports.forget_name(export);
            export.export().summarize_faults();
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Exports> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exports {
    fn add(&mut self, export: Arc<dyn Servable>, has_devices: bool) -> ExportId {
        let id = ExportId(self.next);
        self.next += 1;
        if self.find(export.name()).is_none() {
            self.by_name.insert(export.name().to_owned(), id);
        }
        self.by_id.insert(id, Arc::new(RegisteredExport::new(id, export, has_devices)));
        id
    }

    /// The first export called `name` that clients can choose.
    fn find(&self, name: &str) -> Option<&Arc<RegisteredExport>> {
        let first = self.by_id.get(self.by_name.get(name)?)?;
        if !first.is_removed() {
            return Some(first);
        }
        // Only exports that were there from the start can have one name.
        self.by_id.values().find(|other| !other.is_removed() && other.export().name() == name)
    }

    /// Another export that has the name of `removed` is the first one of that name now.
    fn forget_name(&mut self, removed: &RegisteredExport) {
        let export = removed.export();
        if self.by_name.get(export.name()) != Some(&removed.id) {
            return;
        }
        let is_next = |other: &&Arc<RegisteredExport>| other.export().name() == export.name();
        match self.by_id.values().find(is_next).map(|next| next.id) {
            Some(next) => drop(self.by_name.insert(export.name().to_owned(), next)),
            None => drop(self.by_name.remove(export.name())),
        }
    }
}
