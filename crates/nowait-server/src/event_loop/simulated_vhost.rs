//! A thread with a queue of a virtual machine, whose iterations the caller runs one by one.
//!
//! Invariant: that of [`crate::event_loop::sim`].

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use nowait::sim::SimQueue;
use nowait::{BlockDevice, BlockMap, Config, Error, FD_TOKEN, Operation, WorkerPool};

use crate::event_loop::EventLoop;
use crate::event_loop::sim::{SimThread, event_loop, sim_thread};
use crate::event_loop::sim_change::SimChange;
use crate::frontend::Frontend;
use crate::registered_export::RegisteredExport;
use crate::vhost_user::queue_channel::{QueueCommand, QueueId};
use crate::vhost_user::sim_guest::{SimGuest, SimRing, SimVhostDevice};
use crate::vhost_user::vhost_frontend::VhostFrontend;

/// A thread with a queue of a virtual machine on a simulated device.
pub struct SimulatedVhost {
    thread: EventLoop<VhostFrontend, SimQueue>,
    export: Arc<RegisteredExport>,
    /// The queue, and the answer to its stop.
    queue: Option<QueueId>,
    stop: Option<Receiver<u16>>,
    /// The entry of the available ring at which the queue has stopped.
    stopped_at: Option<u16>,
}

impl SimulatedVhost {
    /// Like [`crate::Simulated::new`].
    ///
    /// # Errors
    /// Like [`crate::Simulated::new`].
    pub fn new(
        disk: Arc<BlockDevice<dyn BlockMap>>,
        workers: WorkerPool,
        queue: SimQueue,
        config: Config,
    ) -> Result<Self, Error> {
        let parts = event_loop(disk, workers, queue, config, |context| context.frontends().vhost)?;
        let (thread, export) = parts;
        Ok(Self { thread, export, queue: None, stop: None, stopped_at: None })
    }

    /// Starts queue number `index` of `guest`, the only one of this thread, at the entry `base` of its
    /// available ring; without it at the first one that the driver was not told of.
    ///
    /// # Errors
    /// `EINVAL`: the addresses cannot be; what the system refused.
    pub fn start(
        &mut self,
        guest: &SimGuest,
        device: &SimVhostDevice,
        ring: (u16, SimRing, bool),
        base: Option<u16>,
    ) -> Result<(), Error> {
        let start = Box::new(guest.start(device, ring, base)?);
        self.queue = Some(start.id);
        let stopped = |_| Error::new(libc::EINVAL, Operation::SetUp);
        let used = self.export.shared().begin_use().map_err(stopped)?;
        let EventLoop { frontend, context, .. } = &mut self.thread;
        frontend.channel.send(QueueCommand::Start(used, start));
        frontend.on_wake(context);
        Ok(())
    }

    /// The driver kicks the queue. A simulation polls no descriptor, so this is the event itself.
    pub fn kick(&mut self) {
        self.thread.events.push((FD_TOKEN, 1));
    }

    /// Has the queue take no more requests.
    pub fn begin_pause(&mut self) {
        self.export.begin_pause();
        self.thread.review_exports();
        let (sender, stop) = sync_channel(1);
        if let Some(id) = self.queue.take() {
            let EventLoop { frontend, context, .. } = &mut self.thread;
            frontend.channel.send(QueueCommand::Stop(id, sender));
            frontend.on_wake(context);
            self.stop = Some(stop);
        }
    }

    /// Looks whether it has stopped.
    #[must_use]
    pub fn has_paused(&mut self) -> bool {
        if let Some(Ok(base)) = self.stop.as_ref().map(Receiver::try_recv) {
            (self.stop, self.stopped_at) = (None, Some(base));
        }
        self.stop.is_none() && self.in_flight() == 0
    }

    /// Where it has stopped.
    #[must_use]
    pub fn stopped_at(&self) -> Option<u16> {
        self.stopped_at
    }
}

sim_thread!(SimulatedVhost);
