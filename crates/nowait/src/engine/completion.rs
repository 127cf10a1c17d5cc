//! The engine's results: completions, rejections, counts.
//!
//! Invariant: a buffer that came with a request goes back with its completion or its rejection.

use crate::engine::back_off::BackOffCounts;
use crate::engine::pool::SlotPoolStats;
use crate::memory::buffer_pool::PooledBuffer;
use crate::types::error::Error;
use crate::types::request::Request;

/// Counts of how requests were served, since the engine was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Requests that took the simple path.
    pub simple: u64,
    /// Requests that took the general path.
    pub general: u64,
    /// Requests that went to a worker immediately.
    pub worker: u64,
    /// Transfers that were tried without waiting and refused (C34).
    pub refused: u64,
    /// Requests that were tried without waiting, refused or cut short, and went to a worker.
    pub retried: u64,
    /// Slots that another thread has ended and returned to their owner (C47).
    pub remote: u64,
    /// Overwrites that were refused in a burst and tried a second time.
    pub deferred: u64,
    /// Requests that neighbours on storage shared one transfer with.
    pub merged: u64,
    /// Times that the engine backed off from trying without waiting (C39).
    pub backed_off: u64,
    /// Bytes of holes that were zero-filled without I/O (C14).
    pub zero_filled: u64,
    /// Transfers with `HIPRI` that were polled for, on a device with polled queues (C48).
    pub polled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// The pool of request slots.
    pub pool: SlotPoolStats,
}

impl Stats {
    pub(crate) fn with_back_off(self, counts: BackOffCounts) -> Self {
        Self { refused: counts.refused, backed_off: counts.backed_off, ..self }
    }

    /// The sum of both, but for the pool's counts, which are those of `self`.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            simple: self.simple + other.simple,
            general: self.general + other.general,
            worker: self.worker + other.worker,
            refused: self.refused + other.refused,
            retried: self.retried + other.retried,
            remote: self.remote + other.remote,
            deferred: self.deferred + other.deferred,
            merged: self.merged + other.merged,
            backed_off: self.backed_off + other.backed_off,
            zero_filled: self.zero_filled + other.zero_filled,
            polled: self.polled + other.polled,
            failed: self.failed + other.failed,
            pool: self.pool,
        }
    }
}

/// A request that has ended.
#[non_exhaustive]
pub struct Completion {
    /// The tag that it was submitted with.
    pub tag: u64,
    /// Device of the request, as [`DeviceHandle::index`](crate::DeviceHandle::index).
    pub device: u32,
    /// The request.
    pub io: Request,
    /// The buffer that it was submitted with.
    pub buf: Option<PooledBuffer>,
    pub(crate) result: i64,
}

impl Completion {
    /// Bytes done. Fewer than requested only past the end of the device, or of a file that another
    /// process has truncated (C17).
    ///
    /// # Errors
    /// The errno that the operation ended with.
    #[inline]
    pub fn result(&self) -> Result<u64, Error> {
        if self.result >= 0 {
            return Ok(self.result as u64);
        }
        let errno = self.result.unsigned_abs() as i32;
        Err(Error::new(errno, self.io.op.operation()).at(self.io.range))
    }
}

/// A request that was not accepted; nothing has changed (C10, C33).
pub struct Rejected {
    /// `EAGAIN` when no slot is free (reap, then try again); `EINVAL`, `EROFS`, `ENOSPC` for a
    /// request that can never be done.
    pub error: Error,
    /// The buffer that it came with.
    pub buf: Option<PooledBuffer>,
}
