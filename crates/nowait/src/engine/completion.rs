//! The engine's results: completions, rejections, counts.
//!
//! Invariant: a buffer that came with a request goes back with its completion or its rejection.

use crate::engine::back_off::BackOffCounts;
use crate::engine::pool::SlotPoolStats;
use crate::memory::buffer_pool::PooledBuffer;
use crate::types::counts::Counted;
use crate::types::error::Error;
use crate::types::request::Request;

counts! {
    /// Counts of how requests were served, since the engine was made.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[non_exhaustive]
    pub struct Stats {
        /// Requests that took the simple path.
        pub simple: u64 => Counter "simple",
        /// Requests that took the general path.
        pub general: u64 => Counter "general",
        /// Requests that went to a worker immediately.
        pub worker: u64 => Counter "worker",
        /// Transfers that were tried without waiting and refused (C34).
        pub refused: u64 => Counter "refused",
        /// Requests that were tried without waiting, refused or cut short, and went to a worker.
        pub retried: u64 => Counter "retried",
        /// Slots that another thread has ended and returned to their owner (C47).
        pub remote: u64 => Counter "remote",
        /// Overwrites that were refused in a burst and tried a second time.
        pub deferred: u64 => Counter "deferred",
        /// Requests that neighbours on storage shared one transfer with.
        pub merged: u64 => Counter "merged",
        /// Times that the engine backed off from trying without waiting (C39).
        pub backed_off: u64 => Counter "backed_off",
        /// Bytes of holes that were zero-filled without I/O (C14).
        pub zero_filled: u64 => Counter "zero_filled_bytes",
        /// Transfers with `HIPRI` that were polled for, on a device with polled queues (C48).
        pub polled: u64 => Counter "polled",
        /// Requests that failed.
        pub failed: u64,
        /// The pool of request slots.
        pub pool: SlotPoolStats,
    }
}

impl Stats {
    pub(crate) fn with_back_off(self, counts: BackOffCounts) -> Self {
        Self { refused: counts.refused, backed_off: counts.backed_off, ..self }
    }

    /// The sum of both, but for the pool's counts, which are those of `self`.
    pub(crate) fn plus(mut self, other: Self) -> Self {
        self.add_counts(&other);
        self.failed += other.failed;
        self
    }

    /// The counts of requests by the names of the mechanisms that served them.
    #[doc(hidden)]
    pub fn mechanisms(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let own = Self::COUNTS.iter().map(|count| (count.name, (count.get)(self).integer()));
        let pool = SlotPoolStats::COUNTS.iter();
        own.chain(pool.map(|count| (count.name, (count.get)(&self.pool).integer())))
    }

    /// How many [`Stats::mechanisms`] there are.
    #[doc(hidden)]
    pub const MECHANISMS: usize = Self::COUNTS.len() + SlotPoolStats::COUNTS.len();
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
