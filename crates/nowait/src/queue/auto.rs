//! The choice of a queue: io_uring(7), or AIO and threads where the process gets no ring.
//!
//! Invariant: a thread that asks for any queue gets one, unless the process has run out of
//! descriptors or memory.

use std::os::fd::BorrowedFd;

use crate::queue::aio_threads::AioThreadQueue;
use crate::queue::remote::{KernelQueue, Reach, RemoteQueue};
use crate::queue::uring::Uring;
use crate::types::error::Error;

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

/// A queue of the kind that [`QueueKind::open`] has chosen. An engine is generic over its queue, so
/// that a request does not pay for the choice.
pub enum AnyQueue {
    /// A ring.
    Uring(Uring),
    /// Linux AIO and threads, with the error of [`Uring::for_files`] if a ring was tried.
    Threads(AioThreadQueue, Option<Error>),
    /// One of these, and storages that make transfers themselves, with the error of
    /// [`Uring::for_files`] if a ring was tried.
    Remote(RemoteQueue, Option<Error>),
}

impl QueueKind {
    /// A queue of this kind on `files`, for the calling thread; `slots` and `cached` as for
    /// [`AioThreadQueue::for_files`].
    ///
    /// # Errors
    /// As [`AioThreadQueue::for_files`]; for [`QueueKind::Uring`] and [`QueueKind::Polled`]
    /// as [`Uring::for_files`].
    pub fn open(
        self,
        files: &[BorrowedFd<'_>],
        slots: u32,
        cached: bool,
    ) -> Result<AnyQueue, Error> {
        let refusal = match self {
            Self::Threads => None,
            Self::Uring => return Uring::for_files(files).map(AnyQueue::Uring),
            Self::Polled => {
                return Uring::for_files(files).map(|ring| AnyQueue::Uring(ring.polling()));
            }
            Self::Auto => match Uring::for_files(files) {
                Ok(ring) => return Ok(AnyQueue::Uring(ring)),
                Err(error) => Some(error),
            },
        };
        let threads = AioThreadQueue::for_files(files, slots, cached)?;
        Ok(AnyQueue::Threads(threads, refusal))
    }

    /// As [`QueueKind::open`], for storages that are reached as `reached` says. Their transfers are
    /// not polled for.
    ///
    /// # Errors
    /// As [`QueueKind::open`].
    pub(crate) fn open_reaching(
        self,
        reached: Vec<Reach<'_>>,
        slots: u32,
        cached: bool,
    ) -> Result<AnyQueue, Error> {
        let files: Vec<_> = reached
            .iter()
            .filter_map(|reach| match reach {
                Reach::Descriptor(file) => Some(*file),
                Reach::Transfers(_) => None,
            })
            .collect();
        let (below, refusal) = match self.open(&files, slots, cached)? {
            AnyQueue::Uring(ring) => (KernelQueue::Uring(ring), None),
            AnyQueue::Threads(threads, refusal) => (KernelQueue::Threads(threads), refusal),
            remote @ AnyQueue::Remote(..) => return Ok(remote),
        };
        let queue = RemoteQueue::new(below, reached, slots)?;
        Ok(AnyQueue::Remote(queue, refusal))
    }
}
