//! An export as the device of virtual machines at a vhost-user socket, on the thread of that socket.
//!
//! Invariant: the socket is this device's until its thread has begun, and then the thread's.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use nowait::Error;

use crate::export::ExportId;
use crate::export_error::ExportError;
use crate::frontends::export_device::{DeviceServer, ExportDevice, NewDevice};
use crate::locking::lock;
use crate::net::connection_limit::ConnectionPermit;
use crate::vhost_user::control_thread::{
    self, ControlHandle, ControlServer, DeviceSocket, PausedDevice,
};
use crate::vhost_user::queue_channel::{QueueChannel, QueueCommand, QueueStart};
use crate::vhost_user::{BlockProperties, QueueThreads};

/// The device at a socket.
pub(crate) struct VhostExport {
    control: Arc<ControlHandle>,
    /// For the thread.
    socket: Mutex<Option<DeviceSocket>>,
}

impl VhostExport {
    /// The device at `socket`, whose thread has not begun.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for it.
    pub(crate) fn new(socket: DeviceSocket) -> Result<Self, Error> {
        let control = Arc::new(ControlHandle::new(&socket)?);
        Ok(Self { control, socket: Mutex::new(Some(socket)) })
    }
}

impl From<DeviceSocket> for NewDevice {
    fn from(socket: DeviceSocket) -> Self {
        Self::new(move || Ok(Arc::new(VhostExport::new(socket)?)))
    }
}

/// The device of another process.
impl From<PausedDevice> for NewDevice {
    fn from(device: PausedDevice) -> Self {
        DeviceSocket::Paused(device).into()
    }
}

impl ExportDevice for VhostExport {
    fn begin(self: Arc<Self>, server: &Arc<dyn DeviceServer>) -> Result<(), Error> {
        let Some(socket) = lock(&self.socket).take() else { return Ok(()) };
        let name = server.export().name().to_owned();
        let (control, of_thread) = (self.control.clone(), Arc::new(SocketServer(server.clone())));
        let run = move || control_thread::run(socket, &of_thread, &control, &name);
        server.spawn(format!("nowait-vhost-{}", server.id()), Box::new(run))
    }

    fn tell_size(&self, _: u64) {
        self.control.tell_config_change();
    }

    fn stop(&self) {
        self.control.stop();
    }

    fn begin_pause(&self, _: &dyn Fn()) {
        self.control.begin_suspending();
    }

    fn wait_paused(&self, deadline: Instant) -> bool {
        self.control.wait_suspended(deadline)
    }

    fn resume(self: Arc<Self>, _: &Arc<dyn DeviceServer>) {
        self.control.resume();
    }

    fn freeze(
        &self,
        soon: Instant,
        deadline: Instant,
    ) -> Result<Option<PausedDevice>, ExportError> {
        self.control.freeze(soon, deadline).map(Some)
    }

    fn release(&self) {
        self.control.release();
    }
}

/// The server, for the thread of a socket.
struct SocketServer(Arc<dyn DeviceServer>);

impl QueueThreads for SocketServer {
    fn properties(&self) -> BlockProperties {
        BlockProperties::of(&self.0.export())
    }

    fn start(&self, start: Box<QueueStart>) -> Option<Arc<QueueChannel>> {
        let used = self.0.begin_use().ok()?;
        let channels = self.0.least_loaded().filter(|_| !self.is_stopping())?;
        channels.vhost.send(QueueCommand::Start(used, start));
        Some(channels.vhost.clone())
    }

    fn is_stopping(&self) -> bool {
        self.0.is_stopping()
    }
}

impl ControlServer for SocketServer {
    fn permit(&self) -> Option<ConnectionPermit> {
        self.0.permit()
    }

    fn export(&self) -> ExportId {
        self.0.id()
    }
}
