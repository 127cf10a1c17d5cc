//! The choice of a queue: io_uring(7), or AIO and threads where the process gets no ring; and the queue
//! that reaches every storage.
//!
//! Invariant: a thread that asks for any queue gets one, unless the process has run out of
//! descriptors or memory. Waiting ends when the queue of the kernel or a storage has a completion.
#![allow(unsafe_code)]

use std::time::Duration;

use crate::queue::aio_threads::AioThreadQueue;
use crate::queue::event_source::{EventSource, Interest};
use crate::queue::queue_files::QueueFile;
use crate::queue::remote::{RemoteFile, RemoteFiles};
use crate::queue::uring::Uring;
use crate::queue::{IoQueue, QueueFull};
use crate::types::error::Error;
use crate::types::token::{REMOTE_FILE, STORAGES_EVENT, Token};
use crate::types::transfer::{Outcome, Transfer};

/// How transfers are submitted to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// io_uring(7); `AioThreadQueue` for threads that get no ring: the limit on locked memory
    /// (`RLIMIT_MEMLOCK`) may allow only some.
    Auto,
    /// io_uring(7).
    Uring,
    /// io_uring(7); every transfer is polled for, as with [`crate::Flags::HIPRI`], where the device can.
    Polled,
    /// Linux AIO for transfers that need not block, and plain system calls on a bounded thread
    /// pool.
    Threads,
}

/// The queue of the kernel.
enum KernelQueue {
    Uring(Uring),
    Threads(AioThreadQueue),
}

/// Runs `$call` on the queue of the kernel that there is.
macro_rules! on {
    ($kernel:expr, $queue:ident => $call:expr) => {
        match $kernel {
            KernelQueue::Uring($queue) => $call,
            KernelQueue::Threads($queue) => $call,
        }
    };
}

/// A queue of the kernel of the kind that [`QueueKind::open`] has chosen, and the storages that make
/// transfers themselves.
pub struct AnyQueue {
    kernel: KernelQueue,
    refusal: Option<Error>,
    slots: u32,
    /// A file was attached that the kernel reads and writes; without one, memory is not registered.
    has_kernel_files: bool,
    /// Made for the first device that has such a storage.
    remote: Option<RemoteFiles>,
}

impl QueueKind {
    /// A queue of this kind for the calling thread and for tokens below `slots`.
    ///
    /// # Errors
    /// Like [`AioThreadQueue::new`]; for [`QueueKind::Uring`] and [`QueueKind::Polled`] as
    /// [`Uring::new`].
    pub fn open(self, slots: u32) -> Result<AnyQueue, Error> {
        let (kernel, refusal) = match self {
            Self::Threads => (KernelQueue::Threads(AioThreadQueue::new(slots)?), None),
            Self::Uring => (KernelQueue::Uring(Uring::new()?), None),
            Self::Polled => (KernelQueue::Uring(Uring::new()?.polling()), None),
            Self::Auto => match Uring::new() {
                Ok(ring) => (KernelQueue::Uring(ring), None),
                Err(error) => (KernelQueue::Threads(AioThreadQueue::new(slots)?), Some(error)),
            },
        };
        Ok(AnyQueue { kernel, refusal, slots, has_kernel_files: false, remote: None })
    }
}

impl AnyQueue {
    /// The ring, if the queue of the kernel is one.
    #[must_use]
    pub fn ring(&self) -> Option<&Uring> {
        match &self.kernel {
            KernelQueue::Uring(ring) => Some(ring),
            KernelQueue::Threads(_) => None,
        }
    }

    /// The error of [`Uring::new`] if a ring was tried in vain.
    #[must_use]
    pub fn refusal(&self) -> Option<Error> {
        self.refusal
    }

    /// Attaches the files of a device some of whose storages make transfers themselves.
    fn attach_remote(&mut self, files: &[QueueFile<'_>]) -> Result<u32, Error> {
        let Self { kernel, remote, slots, .. } = self;
        let remote = match remote {
            Some(remote) => remote,
            none => {
                let remote = RemoteFiles::new(*slots)?;
                let (fd, readable) = (remote.fd(), Interest::Readable);
                on!(&mut *kernel, queue => queue.events_mut().watch(fd, STORAGES_EVENT, readable))?;
                none.insert(remote)
            }
        };
        let mut attached = Vec::new();
        for file in files {
            let reached = match file {
                QueueFile::Transfers(transfers) => {
                    Ok(RemoteFile::Transfers(transfers.clone(), Vec::new()))
                }
                file => {
                    let file = std::slice::from_ref(file);
                    on!(&mut *kernel, queue => queue.attach(file)).map(RemoteFile::Kernel)
                }
            };
            match reached {
                Ok(file) => attached.push(file),
                Err(error) => {
                    for file in attached {
                        if let RemoteFile::Kernel(number) = file {
                            on!(&mut *kernel, queue => queue.detach(number, 1));
                        }
                    }
                    return Err(error);
                }
            }
        }
        Ok(remote.attach(attached))
    }

    fn begin(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.begin();
        }
    }
}

// SAFETY: a transfer goes to one of two places: to the queue of the kernel, which keeps the rules, or
// into a `PendingTransfer`, which ends once and returns its token by the list then. The descriptor of
// the list has a token of its own, which is not passed on.
unsafe impl IoQueue for AnyQueue {
    fn attach(&mut self, files: &[QueueFile<'_>]) -> Result<u32, Error> {
        self.has_kernel_files |= files.iter().any(|file| file.descriptor().is_ok());
        match files.iter().any(|file| matches!(file, QueueFile::Transfers(_))) {
            true => self.attach_remote(files),
            false => on!(&mut self.kernel, queue => queue.attach(files)),
        }
    }

    fn detach(&mut self, first: u32, count: u32) {
        if first & REMOTE_FILE == 0 {
            return on!(&mut self.kernel, queue => queue.detach(first, count));
        }
        for number in first..first + count {
            let kernel = self.remote.as_mut().and_then(|remote| remote.detach(number));
            if let Some(number) = kernel {
                on!(&mut self.kernel, queue => queue.detach(number, 1));
            }
        }
    }

    fn polling_refusal(&self, file: u32) -> Option<&'static str> {
        let number = match &self.remote {
            Some(remote) if file & REMOTE_FILE != 0 => remote.kernel_number(file),
            _ => Some(file),
        };
        match number {
            Some(number) => on!(&self.kernel, queue => queue.polling_refusal(number)),
            None => Some("its storage makes transfers itself"),
        }
    }

    // SAFETY: as promised by the caller.
    #[inline]
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        let mut transfer = *transfer;
        if transfer.file & REMOTE_FILE != 0
            && let Some(remote) = &mut self.remote
        {
            // SAFETY: as promised by the caller.
            match unsafe { remote.push(&transfer, token) } {
                Some(local) => transfer = local,
                None => return Ok(()),
            }
        }
        // SAFETY: as promised by the caller.
        on!(&mut self.kernel, queue => unsafe { queue.push(&transfer, token) })
    }

    fn cancel(&mut self, token: Token) {
        if self.remote.as_mut().is_some_and(|remote| remote.cancel(token)) {
            return;
        }
        on!(&mut self.kernel, queue => queue.cancel(token));
    }

    #[inline]
    fn submit(&mut self) -> Result<(), Error> {
        self.begin();
        on!(&mut self.kernel, queue => queue.submit())
    }

    #[inline]
    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let Some(remote) = &self.remote else {
            return on!(&mut self.kernel, queue => queue.drain_completions(sink));
        };
        let mut own = 0;
        let mut pass = |token, outcome| match token {
            STORAGES_EVENT => {
                own += 1;
                remote.clear_wake();
            }
            _ => sink(token, outcome),
        };
        let count = on!(&mut self.kernel, queue => queue.drain_completions(&mut pass));
        count - own + remote.drain(sink)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.begin();
        let is_ready = self.remote.as_ref().is_some_and(RemoteFiles::has_completions);
        let timeout = if is_ready { Some(Duration::ZERO) } else { timeout };
        on!(&mut self.kernel, queue => queue.wait(timeout))
    }

    #[inline]
    fn has_completions(&mut self) -> bool {
        self.remote.as_ref().is_some_and(RemoteFiles::has_completions)
            || on!(&mut self.kernel, queue => queue.has_completions())
    }

    fn events(&self) -> &dyn EventSource {
        on!(&self.kernel, queue => queue.events())
    }

    fn events_mut(&mut self) -> &mut dyn EventSource {
        on!(&mut self.kernel, queue => queue.events_mut())
    }

    // SAFETY: as promised by the caller.
    unsafe fn register(&mut self, base: *mut u8, bytes: usize) -> Option<u16> {
        if !self.has_kernel_files {
            return None;
        }
        // SAFETY: as promised by the caller.
        on!(&mut self.kernel, queue => unsafe { queue.register(base, bytes) })
    }

    fn reserve_buffers(&mut self, count: u16) -> Option<u16> {
        on!(&mut self.kernel, queue => queue.reserve_buffers(count))
    }

    fn release_buffers(&mut self, first: u16) {
        on!(&mut self.kernel, queue => queue.release_buffers(first));
    }

    fn polled(&self) -> u64 {
        on!(&self.kernel, queue => queue.polled())
    }

    fn has_stopped_polling(&self) -> bool {
        on!(&self.kernel, queue => queue.has_stopped_polling())
    }
}
