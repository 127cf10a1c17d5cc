//! The choice of a queue: io_uring(7), or AIO and threads where the process gets no ring.
//!
//! Invariant: a thread that asks for any queue gets one, unless the process has run out of
//! descriptors or memory.

use std::os::fd::BorrowedFd;

use crate::queue::aio_threads::AioThreadQueue;
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
#[expect(clippy::large_enum_variant, reason = "it is matched at once, never kept")]
pub enum AnyQueue {
    /// A ring.
    Uring(Uring),
    /// Linux AIO and threads, with the error of [`Uring::for_files`] if a ring was tried.
    Threads(AioThreadQueue, Option<Error>),
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
}
