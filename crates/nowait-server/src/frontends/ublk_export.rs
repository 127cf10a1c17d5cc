//! An export as a local block device: its queues are spread over the threads, and given back to the driver in a pause.
//!
//! Invariant: a device that waits for another server, or whose node another program has removed, is left alone.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use nowait::{Error, Operation};

use crate::export_error::ExportError;
use crate::frontends::export_device::{DeviceServer, ExportDevice, NewDevice};
use crate::ublk::ublk_channel::UblkStart;
use crate::ublk::ublk_device::UblkDevice;

impl From<Arc<UblkDevice>> for NewDevice {
    fn from(device: Arc<UblkDevice>) -> Self {
        Self::new(move || Ok(device))
    }
}

impl ExportDevice for UblkDevice {
    /// Returns when the threads serve the queues. A device of another server is taken over before.
    fn begin(self: Arc<Self>, server: &Arc<dyn DeviceServer>) -> Result<(), Error> {
        if self.is_lost() {
            return Ok(());
        }
        let failed = |errno| Error::new(errno, Operation::SetUp);
        drop(self.descriptor().map_err(failed)?);
        let (started, all_started) = channel();
        for (number, channels) in (0..self.queues()).zip(server.threads().iter().cycle()) {
            let (of_queue, removed) = (server.clone(), self.clone());
            let on_removed = Box::new(move || {
                tracing::warn!("{} was removed by another program", removed.node());
                of_queue.device_ended();
            });
            let used = server.begin_use().map_err(|_| failed(libc::ECANCELED))?;
            let (device, started) = (self.clone(), started.clone());
            channels.ublk.start(UblkStart { device, number, used, on_removed, started });
        }
        drop(started);
        all_started.iter().collect()
    }

    fn is_local(&self) -> bool {
        true
    }

    fn is_reachable(&self) -> bool {
        self.has_node()
    }

    fn removal_refusal(&self) -> Option<ExportError> {
        self.is_served().then(|| ExportError::HasNode { node: self.node(), id: self.id() })
    }

    fn tell_size(&self, size: u64) {
        self.resize(size);
    }

    fn shut_down(&self, timeout: Duration, wake: &dyn Fn()) {
        self.stop_serving(timeout, wake);
    }

    fn can_pause(&self) -> bool {
        !self.is_served() || self.keeps_requests()
    }

    fn begin_pause(&self, wake: &dyn Fn()) {
        if self.is_served() {
            self.pause(wake);
        }
    }

    fn give_back(&self, deadline: Instant) -> bool {
        !self.is_served() || self.give_to_driver(deadline)
    }

    fn leaves_before_resuming(&self) -> bool {
        self.is_served()
    }

    fn resume(self: Arc<Self>, server: &Arc<dyn DeviceServer>) {
        if !self.is_served() {
            return;
        }
        self.begin_again();
        let begun = self.clone().begin(server).map_err(|error| error.to_string());
        if let Err(why) = begun.and_then(|()| self.start().map_err(|error| error.to_string())) {
            self.lose(&why);
        }
    }
}
