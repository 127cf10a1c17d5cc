//! An export as the server knows it: what its threads share, its devices, and what waits for
//! the end of a pause.
//!
//! Invariant: what waits for an export that is paused is in its list, or on a thread; the list ends with
//! the pause.

use std::ops::Deref;
use std::sync::{Arc, Mutex};

use nowait::Error;

use crate::any_export::AnyExport;
use crate::backup::running_backup::RunningBackup;
use crate::export::ExportId;
use crate::frontends::export_device::{ExportDevice, NewDevice};
use crate::locking::lock;
use crate::nbd::connection::HandoffConnection;
use crate::net::listener::Listener;
use crate::shared_export::SharedExport;

/// A registered export.
pub(crate) struct RegisteredExport {
    shared: Arc<SharedExport>,
    /// The devices that it is for other clients than NBD's.
    devices: Mutex<Vec<Arc<dyn ExportDevice>>>,
    /// Connections and listeners that wait for the end of a pause.
    waiting: Mutex<Option<Waiting>>,
    /// The backup of it that has not ended.
    backup: Mutex<Option<Arc<RunningBackup>>>,
    backup_of: Option<ExportId>,
}

/// Connections and listeners that wait for the end of a pause.
#[derive(Default)]
pub(crate) struct Waiting {
    pub(crate) connections: Vec<HandoffConnection>,
    /// Listeners of the server, if all of its exports are paused.
    pub(crate) listeners: Vec<Listener>,
}

impl RegisteredExport {
    /// The export with its devices, which are not served yet.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for a device.
    pub(crate) fn new(id: ExportId, export: AnyExport) -> Result<Self, Error> {
        let AnyExport { export, devices, bitmaps, backup_of } = export;
        let devices = devices.into_iter().map(NewDevice::make).collect::<Result<_, _>>()?;
        let shared = Arc::new(SharedExport::new(id, export, bitmaps));
        let (waiting, backup) = Default::default();
        Ok(Self { shared, devices: Mutex::new(devices), waiting, backup, backup_of })
    }

    /// The part that its threads share.
    pub(crate) fn shared(&self) -> &Arc<SharedExport> {
        &self.shared
    }

    /// The backup of it that has not ended.
    pub(crate) fn backup(&self) -> Option<Arc<RunningBackup>> {
        lock(&self.backup).clone()
    }

    /// A backup of it has begun, or the one that it had has ended.
    pub(crate) fn set_backup(&self, backup: Option<Arc<RunningBackup>>) {
        *lock(&self.backup) = backup;
    }

    /// The export whose backup it is.
    pub(crate) fn backup_of(&self) -> Option<ExportId> {
        self.backup_of
    }

    /// The devices that it is.
    pub(crate) fn devices(&self) -> Vec<Arc<dyn ExportDevice>> {
        lock(&self.devices).clone()
    }

    /// It is one device more.
    pub(crate) fn add_device(&self, device: Arc<dyn ExportDevice>) {
        lock(&self.devices).push(device);
    }

    /// Its devices take no further client.
    pub(crate) fn stop_devices(&self) {
        self.devices().iter().for_each(|device| device.stop());
    }

    /// No use begins until [`RegisteredExport::end_pause`]; connections wait. The threads have to look at
    /// their exports. Returns false if it is paused already.
    pub(crate) fn begin_pause(&self) -> bool {
        let mut waiting = lock(&self.waiting);
        let begins = self.shared.pause();
        if begins {
            *waiting = Some(Waiting::default());
        }
        begins
    }

    /// Calls `act` with what waits for the end of the pause; `None` if there is none.
    pub(crate) fn with_waiting<T>(&self, act: impl FnOnce(&mut Waiting) -> T) -> Option<T> {
        lock(&self.waiting).as_mut().map(act)
    }

    /// Uses begin again. Returns what has waited. The threads have to look at their exports.
    pub(crate) fn end_pause(&self) -> Waiting {
        let mut waiting = lock(&self.waiting);
        self.shared.resume();
        waiting.take().unwrap_or_default()
    }
}

impl Deref for RegisteredExport {
    type Target = SharedExport;

    fn deref(&self) -> &SharedExport {
        &self.shared
    }
}
