//! Commands of the thread of a socket to a serving thread: to start, change or stop a queue.
//!
//! Invariant: a started queue is in one channel or on one thread, and is stopped by the answer to
//! its stop, or with the thread.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::locking::lock;
use crate::rate_limit::ClientBuckets;
use crate::refusal_log::{self, Refusal};
use crate::shared_export::ExportUse;
use crate::thread_handle::ThreadHandle;
use crate::vhost_user::device_config::Features;
use crate::vhost_user::virtqueue::Virtqueue;

/// Bytes of the name of a device that drivers can ask for.
pub(crate) const ID_BYTES: usize = 20;

/// The id of a queue that was started; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueId(pub(crate) u64);

/// The state that the queues of a device share with its control thread.
pub(crate) struct DeviceState {
    /// The name that drivers are told.
    pub(crate) id: [u8; ID_BYTES],
    /// The socket's path, for messages.
    label: String,
    /// The driver has the device cache writes.
    pub(crate) wce: AtomicBool,
    /// The limits of its queues together.
    pub(crate) client: Arc<ClientBuckets>,
    broken: AtomicBool,
}

impl DeviceState {
    pub(crate) fn new(id: [u8; ID_BYTES], label: String) -> Self {
        let (wce, broken) = (AtomicBool::new(true), AtomicBool::new(false));
        let client = Arc::default();
        Self { id, label, wce, client, broken }
    }

    /// Stops the device because of `reason`. Logs the first of the reasons, as often as the log takes it.
    #[cold]
    pub(crate) fn break_down(&self, reason: &str) {
        let was_broken = self.broken.swap(true, Ordering::AcqRel);
        if !was_broken {
            let label = &self.label;
            refusal_log::note(
                Refusal::Queue,
                format_args!(
                    "{label}: its guest is served no more until it resets the device: {reason}"
                ),
            );
        }
    }

    /// Whether the device has stopped.
    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// The device was stopped before, by another process, which has logged why.
    pub(crate) fn stay_broken(&self) {
        self.broken.store(true, Ordering::Release);
    }

    /// The device is as if new.
    pub(crate) fn reset(&self) {
        self.broken.store(false, Ordering::Release);
    }
}

/// A queue that starts.
pub(crate) struct QueueStart {
    pub(crate) id: QueueId,
    pub(crate) device: Arc<DeviceState>,
    pub(crate) features: Features,
    pub(crate) virtqueue: Virtqueue,
    /// Readable when the driver has made requests available.
    pub(crate) kick: OwnedFd,
    /// Written to when requests have ended.
    pub(crate) call: Option<OwnedFd>,
    /// Written to when the queue cannot go on.
    pub(crate) err: Option<OwnedFd>,
}

/// Adds one to the count of an eventfd.
pub(crate) fn signal(eventfd: &OwnedFd) {
    // A full counter (EAGAIN) is readable already.
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

/// Commands to a thread.
pub(crate) enum QueueCommand {
    /// A queue of a device of the export in use starts.
    Start(ExportUse, Box<QueueStart>),
    /// The queue's ended requests are told by another descriptor.
    SetCall(QueueId, Option<OwnedFd>),
    SetErr(QueueId, Option<OwnedFd>),
    /// The queue takes no more requests. Answered with the next entry of its available ring once
    /// those in flight have ended.
    Stop(QueueId, SyncSender<u16>),
    /// A queue that has not stopped yet goes on, and its stop is not answered.
    Resume(QueueId),
}

/// The commands for a thread.
pub(crate) struct QueueChannel {
    thread: Arc<ThreadHandle>,
    commands: Mutex<VecDeque<QueueCommand>>,
}

impl QueueChannel {
    /// The empty channel of `thread`.
    pub(crate) fn new(thread: Arc<ThreadHandle>) -> Self {
        Self { thread, commands: Mutex::default() }
    }

    /// Sends a command to the thread.
    pub(crate) fn send(&self, command: QueueCommand) {
        if matches!(command, QueueCommand::Start(..)) {
            self.thread.add_connection();
        }
        self.lock().push_back(command);
        self.thread.wake();
    }

    /// Takes the oldest command. [`QueueChannel::counted`] is called for a start once the queue has
    /// been counted otherwise.
    pub(crate) fn take(&self) -> Option<QueueCommand> {
        self.lock().pop_front()
    }

    /// A queue that was started is counted as a member of the thread.
    pub(crate) fn counted(&self) {
        self.thread.remove_connection();
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<QueueCommand>> {
        lock(&self.commands)
    }
}
