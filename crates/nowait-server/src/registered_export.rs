//! An export as the server knows it: what its threads share, its sockets and devices, and what waits for
//! the end of a pause.
//!
//! Invariant: what waits for an export that is paused is in its list, or on a thread; the list ends with
//! the pause.

use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::any_export::AnyExport;
use crate::export::ExportId;
use crate::export_error::ExportError;
use crate::locking::lock;
use crate::nbd::connection::HandoffConnection;
use crate::net::listener::Listener;
use crate::shared_export::SharedExport;
use crate::ublk::ublk_device::UblkDevice;
use crate::vhost_user::control_thread::{ControlHandle, DeviceSocket, PausedDevice};

/// A registered export.
pub(crate) struct RegisteredExport {
    shared: Arc<SharedExport>,
    /// Threads of its vhost-user sockets.
    controls: Mutex<Vec<Arc<ControlHandle>>>,
    /// The local block device that it is.
    pub(crate) ublk: Option<Arc<UblkDevice>>,
    /// Connections and listeners that wait for the end of a pause.
    waiting: Mutex<Option<Waiting>>,
}

/// Connections and listeners that wait for the end of a pause.
#[derive(Default)]
pub(crate) struct Waiting {
    pub(crate) connections: Vec<HandoffConnection>,
    /// Listeners of the server, if all of its exports are paused.
    pub(crate) listeners: Vec<Listener>,
}

impl RegisteredExport {
    /// The export, and the sockets that it comes with.
    pub(crate) fn new(id: ExportId, export: AnyExport) -> (Self, Vec<DeviceSocket>) {
        let AnyExport { export, vhost_user, ublk, bitmaps } = export;
        let shared = Arc::new(SharedExport::new(id, export, bitmaps));
        let (controls, waiting) = Default::default();
        (Self { shared, controls, ublk, waiting }, vhost_user)
    }

    /// The part that its threads share.
    pub(crate) fn shared(&self) -> &Arc<SharedExport> {
        &self.shared
    }

    /// The local block device that it is, unless that waits for another server.
    pub(crate) fn live_ublk(&self) -> Option<&Arc<UblkDevice>> {
        self.ublk.as_ref().filter(|device| !device.is_lost())
    }

    /// Its local block device, unless another process has removed the node.
    pub(crate) fn ublk_with_node(&self) -> Option<&Arc<UblkDevice>> {
        self.live_ublk().filter(|device| device.has_node())
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

    /// Threads of its vhost-user sockets.
    pub(crate) fn controls(&self) -> Vec<Arc<ControlHandle>> {
        lock(&self.controls).clone()
    }

    /// The devices of virtual machines, which are suspended, for another process. As
    /// [`ControlHandle::freeze`].
    pub(crate) fn freeze_devices(
        &self,
        soon: Instant,
        deadline: Instant,
    ) -> Result<Vec<PausedDevice>, ExportError> {
        self.controls().iter().map(|handle| handle.freeze(soon, deadline)).collect()
    }

    /// Another process serves the frozen devices.
    pub(crate) fn release_devices(&self) {
        lock(&self.controls).iter().for_each(|handle| handle.release());
    }

    /// Starts the queues of the virtual machines again.
    pub(crate) fn resume_devices(&self) {
        self.controls().iter().for_each(|handle| handle.resume());
    }

    /// Ends the threads of the vhost-user sockets.
    pub(crate) fn stop_controls(&self) {
        let controls = lock(&self.controls);
        controls.iter().for_each(|handle| handle.stop());
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
