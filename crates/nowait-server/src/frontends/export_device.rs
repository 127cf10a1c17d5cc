//! A device that an export is for clients of another kind than NBD's, and the server as such a device knows it.
//!
//! Invariant: a device that is paused has no request in flight, and takes none until it is resumed or another process
//! has it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait::Error;

use crate::export::{Export, ExportId};
use crate::export_error::ExportError;
use crate::frontends::ThreadChannels;
use crate::net::connection_limit::ConnectionPermit;
use crate::shared_export::{ExportUse, NotServed};
use crate::vhost_user::control_thread::PausedDevice;

/// The server of a device, from any thread.
pub(crate) trait DeviceServer: Send + Sync {
    /// The export that the device is.
    fn id(&self) -> ExportId;

    /// Its present image and checks.
    fn export(&self) -> Arc<Export>;

    /// Begins a use of the export by a queue.
    ///
    /// # Errors
    /// The export is paused or removed.
    fn begin_use(&self) -> Result<ExportUse, NotServed>;

    /// Counts a connection, unless there are too many.
    fn permit(&self) -> Option<ConnectionPermit>;

    /// Ways to the serving threads, of which there is at least one.
    fn threads(&self) -> &[ThreadChannels];

    /// The ways to the thread with the fewest connections and queues.
    fn least_loaded(&self) -> Option<&ThreadChannels>;

    /// Whether the server is stopping.
    fn is_stopping(&self) -> bool;

    /// Runs a thread of the device, which the server waits for at its end.
    ///
    /// # Errors
    /// `EAGAIN`, `ENOMEM`: the thread could not be started.
    fn spawn(&self, name: String, run: Box<dyn FnOnce() + Send>) -> Result<(), Error>;

    /// No client reaches the device any more. A server without another way to it stops.
    fn device_ended(&self);
}

/// A device that an export comes with, for clients of another kind than NBD's. It is made when the export is registered.
pub struct NewDevice(Box<Make>);

/// Makes the device, which is not served yet.
type Make = dyn FnOnce() -> Result<Arc<dyn ExportDevice>, Error> + Send + Sync;

impl NewDevice {
    /// The device that `make` makes.
    pub(crate) fn new(
        make: impl FnOnce() -> Result<Arc<dyn ExportDevice>, Error> + Send + Sync + 'static,
    ) -> Self {
        Self(Box::new(make))
    }

    /// The device, which is not served yet.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for it.
    pub(crate) fn make(self) -> Result<Arc<dyn ExportDevice>, Error> {
        (self.0)()
    }
}

/// A device of an export, from any thread.
pub(crate) trait ExportDevice: Send + Sync {
    /// Begins to serve it; the serving threads run. May take long: to be called on a thread that does not serve.
    ///
    /// # Errors
    /// Errors of the system and of drivers; `ECANCELED`: the server stops.
    fn begin(self: Arc<Self>, server: &Arc<dyn DeviceServer>) -> Result<(), Error>;

    /// Whether it is a device of this host, whose users [`ExportDevice::shut_down`] waits for.
    fn is_local(&self) -> bool {
        false
    }

    /// Whether it keeps a server running that has neither sockets nor threads of devices.
    fn is_reachable(&self) -> bool {
        false
    }

    /// Why its export cannot be removed, if that is so.
    fn removal_refusal(&self) -> Option<ExportError> {
        None
    }

    /// The export has `size` bytes.
    fn tell_size(&self, size: u64);

    /// The export is removed or the server stops: no further client is taken.
    fn stop(&self) {}

    /// The server has stopped: waits at most `timeout` for the users of a local device. The threads, which serve
    /// meanwhile, are woken up by `wake`.
    fn shut_down(&self, _timeout: Duration, _wake: &dyn Fn()) {}

    /// Whether it can be paused.
    fn can_pause(&self) -> bool {
        true
    }

    /// Takes no more requests until [`ExportDevice::resume`], without a wait for those in flight. `wake` wakes the
    /// threads up.
    fn begin_pause(&self, wake: &dyn Fn());

    /// Waits until `deadline` for its queues to leave the threads. Returns whether they have, or will without further
    /// requests.
    fn wait_paused(&self, _deadline: Instant) -> bool {
        true
    }

    /// Its queues have left the threads: gives it back to its driver until `deadline`. Returns whether that has it.
    fn give_back(&self, _deadline: Instant) -> bool {
        true
    }

    /// Whether its queues must have left the threads before it is resumed.
    fn leaves_before_resuming(&self) -> bool {
        false
    }

    /// The export is served again.
    fn resume(self: Arc<Self>, server: &Arc<dyn DeviceServer>);

    /// The paused device for another process, which takes no message any more. The rest of one that has come in part is
    /// waited for until `soon`. `None` for a device that is handed over by its name.
    ///
    /// # Errors
    /// [`ExportError::DoesNotEnd`]: a message was not handled before `deadline`. [`ExportError::System`]: there are no
    /// descriptors for copies.
    fn freeze(
        &self,
        _soon: Instant,
        _deadline: Instant,
    ) -> Result<Option<PausedDevice>, ExportError> {
        Ok(None)
    }

    /// Another process serves the frozen device.
    fn release(&self) {}
}
