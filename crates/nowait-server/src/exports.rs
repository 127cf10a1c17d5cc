//! The exports of a server: what they are and do, and their changes while it runs.
//!
//! Invariant: nothing here waits for a serving thread for long, but [`Exports::remove`] with its
//! timeout.

pub(crate) mod changed_ranges;
pub(crate) mod change_tracker;
pub(crate) mod frozen_changes;
#[cfg(feature = "sim")]
pub(crate) mod sim_changes;
mod export_backups;
mod export_bitmaps;
mod cooling;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait::{BlockDevice, BlockMap, DEFAULT_WEIGHT, WEIGHTS};

use crate::any_export::AnyExport;
use crate::backup::backup_spec::BackupStatus;
use crate::export::ExportId;
use crate::export_error::ExportError;
use crate::frontend_kind::FrontendKind;
use crate::frontends::export_device::NewDevice;
use crate::nbd::connection_state::ConnectionState;
use crate::net::connection_limit::ConnectionStatus;
use crate::net::listener::Listener;
use crate::rate_limit::{Limits, SharedLimits};
use crate::registered_export::RegisteredExport;
use crate::statistics::FrontendTotals;
use crate::threads::Shared;
use crate::threads::pause::{PausedExport, PausedServer};

/// The time in which a thread that was woken up has published its counts.
const PUBLISH_TIME: Duration = Duration::from_millis(2);

/// How often threads that were woken up are asked whether they have answered.
const ANSWER_INTERVAL: Duration = Duration::from_millis(5);

/// How long the clients of an export that is removed by force may take before they are looked for again.
const DISCONNECT_AGAIN: Duration = Duration::from_millis(50);

/// The state of an export at a moment.
#[derive(Clone, Debug)]
pub struct ExportStatus {
    /// Its number; never used again by this server.
    pub id: ExportId,
    /// The name by which clients choose it; empty for a default export without one.
    pub name: String,
    /// A text for people.
    pub description: String,
    /// Size in bytes.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Connections and queues that its threads serve.
    pub members: usize,
    /// Requests in flight, as of a moment ago.
    pub in_flight: usize,
    /// Counts of each frontend since the export was added.
    pub totals: Vec<(FrontendKind, FrontendTotals)>,
    /// How the engines have served the requests: the names and counts of [`nowait::Stats`], and the
    /// bytes that were allocated ahead of writes.
    pub mechanisms: Vec<(&'static str, u64)>,
    /// Limits of the export.
    pub limits: Limits,
    /// Limits of each of its clients.
    pub client_limits: Limits,
    /// Its share of a thread beside other exports, 1 to 10000.
    pub weight: u32,
    /// The backup of it that has not ended.
    pub backup: Option<BackupStatus>,
}

impl ExportStatus {
    fn of(registered: &RegisteredExport) -> Self {
        let export = registered.export();
        let totals = |kind| (kind, registered.statistics.totals(kind));
        Self {
            id: registered.id,
            name: export.name().to_owned(),
            description: export.description().to_owned(),
            size: export.disk().size(),
            read_only: export.is_read_only(),
            members: registered.members(),
            in_flight: registered.statistics.in_flight(),
            totals: FrontendKind::ALL.into_iter().map(totals).collect(),
            mechanisms: {
                let ahead = ("allocated_ahead_bytes", export.disk().allocated_ahead());
                registered.statistics.mechanisms().into_iter().chain([ahead]).collect()
            },
            limits: registered.limits.get(),
            client_limits: registered.limits.of_clients(),
            weight: registered.weight(),
            backup: registered.backup().map(|it| it.status(registered.id, export.name())),
        }
    }
}

/// Settings of an export that can be changed while it is served.
#[derive(Clone, Copy, Debug)]
pub struct ExportChanges {
    /// Limits of the export.
    pub limits: Limits,
    /// Limits of each of its clients.
    pub client_limits: Limits,
    /// Its share of a thread beside other exports.
    pub weight: u32,
    /// Whether changes are refused.
    pub read_only: bool,
}

/// The exports of a server, from any thread.
#[derive(Clone)]
pub struct Exports(pub(crate) Arc<Shared>);

impl Exports {
    /// The weight with which each export begins.
    pub const DEFAULT_WEIGHT: u32 = DEFAULT_WEIGHT;
    /// Weights that an export may have.
    pub const WEIGHTS: RangeInclusive<u32> = WEIGHTS;

    /// The ids and the names of the exports that clients can choose; the default export is the first.
    #[must_use]
    pub fn list(&self) -> Vec<(ExportId, String)> {
        let exports = self.0.registry.served();
        exports.iter().map(|export| (export.id, export.export().name().to_owned())).collect()
    }

    /// The states of the exports that clients can choose. Waits for some milliseconds, in which the
    /// threads publish what they have counted.
    #[must_use]
    pub fn status(&self) -> Vec<ExportStatus> {
        self.publish();
        self.0.registry.served().iter().map(|export| ExportStatus::of(export)).collect()
    }

    /// Status of one export; `None` if clients cannot choose it.
    #[must_use]
    pub fn status_of(&self, id: ExportId) -> Option<ExportStatus> {
        let export = self.0.registry.served_export(id)?;
        self.publish();
        Some(ExportStatus::of(&export))
    }

    /// Has the threads publish what they have counted, and gives them the time for it.
    fn publish(&self) {
        self.0.threads().for_each(|thread| thread.publish());
        std::thread::sleep(PUBLISH_TIME);
    }

    /// The export that clients choose by `name`.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<ExportId> {
        self.0.registry.find(name).map(|export| export.id)
    }

    /// The disk of an export, as it is served; `None` if clients cannot choose it. For reading beside its clients.
    #[must_use]
    pub fn device(&self, id: ExportId) -> Option<Arc<BlockDevice<dyn BlockMap>>> {
        self.0.registry.served_export(id).map(|export| export.export().disk().clone())
    }

    /// The export with this [`ExportId::number`], if clients can choose it.
    #[must_use]
    pub fn with_number(&self, number: u64) -> Option<ExportId> {
        self.0.registry.served_export(ExportId(number)).map(|export| export.id)
    }

    /// Present settings of an export, without a wait. `None` if clients cannot choose it.
    #[must_use]
    pub fn changes_of(&self, id: ExportId) -> Option<ExportChanges> {
        let export = self.0.registry.served_export(id)?;
        Some(ExportChanges {
            limits: export.limits.get(),
            client_limits: export.limits.of_clients(),
            weight: export.weight(),
            read_only: export.export().is_read_only(),
        })
    }

    /// The connections of clients, in the order of their acceptance.
    #[must_use]
    pub fn connections(&self) -> Vec<ConnectionStatus> {
        self.0.limit.connections()
    }

    /// Closes a connection once its requests in flight have ended, without their answers. A virtual
    /// machine finds what was not answered in its rings, and has it done again by the server that its
    /// VMM connects to next, which may be this one. Returns whether there is a connection with this
    /// [`ConnectionStatus::id`].
    #[must_use]
    pub fn disconnect(&self, id: u64) -> bool {
        let is_there = self.0.limit.request_close(id);
        if is_there {
            self.0.wake_threads();
        }
        is_there
    }

    /// Adds an export.
    ///
    /// # Errors
    /// [`ExportError::NameTaken`]. [`ExportError::System`]: a device of it could not be served; then there is no such export.
    pub fn add(&self, export: AnyExport) -> Result<ExportId, ExportError> {
        let export = self.0.registry.add(export)?;
        self.0.begin_devices(&export).map_err(ExportError::System).inspect_err(|_| {
            // It has no client; one that came this moment ends it later.
            let _ = self.remove(export.id, Duration::ZERO);
        })?;
        Ok(export.id)
    }

    /// Removes an export: no further client can choose it. Those that have are served until they
    /// leave. Waits at most `timeout` for that, and until all writes are durable.
    ///
    /// # Errors
    /// [`ExportError::NotFound`], [`ExportError::IsDefault`], [`ExportError::HasNode`].
    /// [`ExportError::ClientsLeft`]: another call goes on waiting.
    pub fn remove(&self, id: ExportId, timeout: Duration) -> Result<(), ExportError> {
        let export = self.0.registry.remove(id)?;
        self.wait_removed(&export, timeout)
    }

    /// Has the threads look at `export`, which was removed, and waits.
    fn wait_removed(
        &self,
        export: &RegisteredExport,
        timeout: Duration,
    ) -> Result<(), ExportError> {
        self.0.review_exports();
        self.0.registry.wait_removed(export, timeout)
    }

    /// Removes an export, but refuses it if there are clients.
    ///
    /// # Errors
    /// Like [`Exports::remove`]. [`ExportError::HasClients`]: nothing has changed.
    pub fn remove_unused(&self, id: ExportId, timeout: Duration) -> Result<(), ExportError> {
        let connected = || self.connections_of(id).count();
        let export = self.0.registry.remove_unused(id, connected)?;
        export.stop_devices();
        self.wait_removed(&export, timeout)
    }

    /// Removes an export and disconnects its clients: their requests in flight end, without their
    /// answers. Waits at most `timeout` for that, and until all writes are durable.
    ///
    /// # Errors
    /// Like [`Exports::remove`].
    pub fn remove_by_force(&self, id: ExportId, timeout: Duration) -> Result<(), ExportError> {
        let deadline = Instant::now() + timeout;
        let export = self.0.registry.remove(id)?;
        self.disconnect_clients(&export, deadline)
    }

    /// Closes the connections of a removed export. Waits until `deadline` at most until it is not used any more.
    fn disconnect_clients(
        &self,
        export: &RegisteredExport,
        deadline: Instant,
    ) -> Result<(), ExportError> {
        loop {
            // First no more clients, then those that there are. One that has just chosen the export
            // may be listed a moment later.
            let left = deadline.saturating_duration_since(Instant::now());
            let removed = self.wait_removed(export, left.min(DISCONNECT_AGAIN));
            if removed.is_ok() || left == Duration::ZERO {
                return removed;
            }
            for client in self.connections_of(export.id) {
                // It may have left meanwhile.
                let _ = self.disconnect(client.id);
            }
        }
    }

    /// The connections of clients that have chosen an export.
    fn connections_of(&self, id: ExportId) -> impl Iterator<Item = ConnectionStatus> {
        self.connections().into_iter().filter(move |status| status.export == Some(id))
    }

    /// Refuses changes of an export from the next request on, with `EPERM`; or no more. Requests in
    /// flight end. What clients are told of the export they learn when they connect again.
    ///
    /// # Errors
    /// [`ExportError::NotFound`], [`ExportError::ReadOnly`].
    pub fn set_read_only(&self, id: ExportId, read_only: bool) -> Result<(), ExportError> {
        self.0.registered(id)?.export().set_read_only(read_only)
    }

    /// Makes an export `size` bytes large, at least as many as it has. Its requests go on. Virtual
    /// machines and the local block device are told; NBD has no message for it, so a
    /// client sees the new size when it connects again. Blocks; when it returns, the new size is
    /// durable.
    ///
    /// # Errors
    /// [`ExportError::NotFound`], [`ExportError::ReadOnly`], [`ExportError::HasBackup`]. [`ExportError::FixedSize`]: it would become
    /// smaller, or it is a block device of another size. [`ExportError::Storage`]: the other errnos of
    /// [`nowait::BlockDevice::grow`].
    pub fn grow(&self, id: ExportId, size: u64) -> Result<(), ExportError> {
        let export = self.0.registered(id)?;
        without_backup(&export)?;
        export.export().disk().grow(size).map_err(|error| match error.errno() {
            libc::EINVAL => ExportError::FixedSize,
            libc::EROFS => ExportError::ReadOnly,
            _ => ExportError::Storage(error),
        })?;
        self.0.tell_size(&export, size);
        Ok(())
    }

    /// Replaces the limits of an export. They hold for all its frontends and clients together, from
    /// the next request on.
    ///
    /// # Errors
    /// [`ExportError::NotFound`], [`ExportError::InvalidLimits`].
    pub fn set_limits(&self, id: ExportId, limits: Limits) -> Result<(), ExportError> {
        self.limit(id, limits, SharedLimits::set)
    }

    /// Replaces the limits of each client of an export: of each connection of NBD, of each virtual
    /// machine with all its queues, of the local block device. They hold beside those of
    /// the export.
    ///
    /// # Errors
    /// Like [`Exports::set_limits`].
    pub fn set_client_limits(&self, id: ExportId, limits: Limits) -> Result<(), ExportError> {
        self.limit(id, limits, SharedLimits::set_of_clients)
    }

    fn limit(
        &self,
        id: ExportId,
        limits: Limits,
        set: impl FnOnce(&SharedLimits, Limits),
    ) -> Result<(), ExportError> {
        let export = self.0.registered(id)?;
        if !limits.is_valid() {
            return Err(ExportError::InvalidLimits);
        }
        set(&export.limits, limits);
        self.0.review_exports();
        Ok(())
    }

    /// Gives an export another weight, 1 to 10000: beside other exports on a thread that always have much
    /// to move, it moves bytes in proportion to it, and its requests that wait have turns on the workers in
    /// proportion to it. Each begins with 100.
    ///
    /// # Errors
    /// [`ExportError::NotFound`], [`ExportError::InvalidWeight`].
    pub fn set_weight(&self, id: ExportId, weight: u32) -> Result<(), ExportError> {
        match self.0.registered(id)?.set_weight(weight) {
            true => Ok(()),
            false => Err(ExportError::InvalidWeight),
        }
    }

    /// Makes the completed writes of an export durable (C49). Blocks.
    ///
    /// # Errors
    /// [`ExportError::NotFound`]. [`ExportError::Storage`]: the errno of the flush; every later one fails,
    /// too (C51).
    pub fn flush(&self, id: ExportId) -> Result<(), ExportError> {
        self.0.registered(id)?.export().flush().map_err(ExportError::Storage)
    }

    /// Whether every serving thread answers within `timeout`. Blocks until all have answered, for `timeout`
    /// at most.
    #[must_use]
    pub fn is_responsive(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut waiting: Vec<_> = self
            .0
            .threads()
            .map(|thread| {
                let before = thread.answers();
                (thread, before)
            })
            .collect();
        self.0.wake_threads();
        loop {
            waiting.retain(|(thread, before)| thread.answers() == *before);
            if waiting.is_empty() {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(ANSWER_INTERVAL);
        }
    }

    /// Stops serving: takes no more requests, waits at most `timeout` for those in flight, and keeps
    /// the connections with all that was received and not sent. The server goes on when the result
    /// is dropped.
    ///
    /// # Errors
    /// [`ExportError::DoesNotEnd`], [`ExportError::AlreadyPaused`], [`ExportError::Stopping`],
    /// [`ExportError::CannotKeepBack`], [`ExportError::HasBackup`]. In each case it goes on.
    pub fn pause(&self, timeout: Duration) -> Result<PausedServer, ExportError> {
        self.0.registry.all().iter().try_for_each(|export| without_backup(export))?;
        self.0.pause(timeout)
    }

    /// Stops serving one export, as [`Exports::pause`]; also to virtual machines. The others go on.
    ///
    /// # Errors
    /// As there. [`ExportError::NotFound`].
    pub fn pause_export(
        &self,
        id: ExportId,
        timeout: Duration,
    ) -> Result<PausedExport, ExportError> {
        without_backup(&*self.0.registered(id)?)?;
        self.0.pause_export(id, timeout)
    }

    /// Accepts the connections of more listeners.
    pub fn listen(&self, listeners: Vec<Listener>) {
        self.0.listen(listeners);
    }

    /// Serves a connection of another process, whose client has chosen export `id`.
    pub fn restore(&self, id: ExportId, connection: ConnectionState) {
        self.0.restore(id, connection);
    }

    /// Serves export `id` as one device more, as that of another process ([`crate::PausedDevice`]).
    ///
    /// # Errors
    /// [`ExportError::NotFound`]. [`ExportError::System`]: its thread could not be started.
    pub fn restore_device(
        &self,
        id: ExportId,
        device: impl Into<NewDevice>,
    ) -> Result<(), ExportError> {
        self.0.add_device(id, device.into())
    }

    /// Asks the storage of every export for its size, and tells virtual machines and the block device
    /// of this host, as [`Exports::grow`] does: other programs may have made a block device or a
    /// raw image larger.
    pub fn refresh_sizes(&self) {
        for export in self.0.registry.served() {
            match export.export().disk().refresh() {
                Ok(size) => self.0.tell_size(&export, size),
                Err(error) => {
                    tracing::warn!("export {:?}: its size: {error}", export.export().name());
                }
            }
        }
    }
}

/// Refuses what a backup of `export` forbids.
fn without_backup(export: &RegisteredExport) -> Result<(), ExportError> {
    match export.backup() {
        Some(backup) => Err(ExportError::HasBackup { backup: backup.name.clone() }),
        None => Ok(()),
    }
}
