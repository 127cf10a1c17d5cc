//! Queues of ublk devices that other threads give to a thread.
//!
//! Invariant: a queue is in one channel or on one thread, which tells by `started` whether it serves it.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use nowait::{Error, Operation};

use crate::locking::lock;
use crate::shared_export::ExportUse;
use crate::thread_handle::ThreadHandle;
use crate::ublk::ublk_device::UblkDevice;

/// Called when another process has stopped the device.
pub(crate) type OnRemoved = Box<dyn Fn() + Send>;

/// A queue that starts.
pub(crate) struct UblkStart {
    pub(crate) device: Arc<UblkDevice>,
    /// Number among the queues of the device.
    pub(crate) number: u16,
    /// The use of the export that the device is.
    pub(crate) used: ExportUse,
    pub(crate) on_removed: OnRemoved,
    /// Receives whether the queue has started.
    pub(crate) started: Sender<Result<(), Error>>,
}

/// The queues for a thread.
pub(crate) struct UblkChannel {
    thread: Arc<ThreadHandle>,
    /// `None`: the thread takes no more.
    starts: Mutex<Option<Vec<UblkStart>>>,
}

impl UblkChannel {
    /// The empty channel of `thread`.
    pub(crate) fn new(thread: Arc<ThreadHandle>) -> Self {
        Self { thread, starts: Mutex::new(Some(Vec::new())) }
    }

    /// Has the thread serve a queue. If it takes no more, the queue fails with `ECANCELED`.
    pub(crate) fn start(&self, start: UblkStart) {
        match &mut *lock(&self.starts) {
            Some(starts) => {
                self.thread.add_connection();
                starts.push(start);
            }
            None => {
                let canceled = Error::new(libc::ECANCELED, Operation::SetUp);
                // The receiver may not wait any more.
                let _ = start.started.send(Err(canceled));
            }
        }
        self.thread.wake();
    }

    /// The queues that were given. [`UblkChannel::counted`] is called for each once it has been counted
    /// otherwise.
    pub(crate) fn take(&self) -> Vec<UblkStart> {
        lock(&self.starts).as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// A queue that was given is counted as a member of the thread, or has failed.
    pub(crate) fn counted(&self) {
        self.thread.remove_connection();
    }

    /// Takes no more queues.
    pub(crate) fn close(&self) {
        lock(&self.starts).take();
    }
}
