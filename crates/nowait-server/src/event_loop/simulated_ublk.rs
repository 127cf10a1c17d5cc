//! A thread with a queue of a ublk device, whose iterations the caller runs one by one.
//!
//! Invariant: that of [`crate::event_loop::sim`].

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use nowait::sim::SimQueue;
use nowait::{BlockDevice, BlockMap, Config, Error, Operation, WorkerPool};

use crate::event_loop::EventLoop;
use crate::event_loop::sim::{SimThread, event_loop, sim_thread};
use crate::event_loop::sim_change::SimChange;
use crate::registered_export::RegisteredExport;
use crate::ublk::sim_ublk::{SimUblkQueue, SimUblkRequest};
use crate::ublk::ublk_channel::UblkStart;
use crate::ublk::ublk_device::UblkDevice;
use crate::ublk::ublk_frontend::UblkFrontend;

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
    /// Like [`crate::Simulated::new`], with `depth` tags and requests of at most `max_io_bytes` bytes.
    ///
    /// # Errors
    /// Like [`crate::Simulated::new`].
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
}

sim_thread!(SimulatedUblk);
