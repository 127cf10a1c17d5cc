//! What an engine gives back: completions, refusals, counts.
//!
//! Invariant: a buffer that came with a request goes back with its completion or its refusal.
//! Knows: error, io, map, buffer, pool. Known by: core, engine.

use crate::buffer::Buf;
use crate::error::Error;
use crate::io::Io;
use crate::pool::PoolStats;

/// How requests were served, since the engine was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that took the simple path.
    pub simple: u64,
    /// Requests that took the generic path.
    pub generic: u64,
    /// Requests that went to a worker at once.
    pub worker: u64,
    /// Requests that were tried without waiting, refused or cut short, and went to a worker.
    pub retried: u64,
    /// Slots that another thread has ended and sent home (C47).
    pub remote: u64,
    /// Overwrites that were refused in a burst and tried a second time.
    pub parked: u64,
    /// Times that trying without waiting was given up for a while (C39).
    pub rested: u64,
    /// Bytes of holes that were zero-filled without I/O (C14).
    pub zero_filled: u64,
    /// Transfers that were polled for, because they asked for it (`HIPRI`) and the device can (C48).
    pub polled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// The pool of request slots.
    pub pool: PoolStats,
}

/// A request that has ended.
pub struct Completion {
    /// What the submitter called it.
    pub tag: u64,
    /// What was asked.
    pub io: Io,
    /// The buffer it was submitted with.
    pub buf: Option<Buf>,
    pub(crate) result: i64,
}

impl Completion {
    /// Bytes done. Fewer than asked for only past the end of the device, or of a file that was
    /// cut behind the engine's back (C17).
    ///
    /// # Errors
    /// The errno that the operation ended with.
    #[inline]
    pub fn result(&self) -> Result<u64, Error> {
        if self.result >= 0 {
            return Ok(self.result as u64);
        }
        let errno = self.result.unsigned_abs() as i32;
        Err(Error::new(errno, self.io.op.doing()).at(self.io.range))
    }
}

/// A request that was not accepted; nothing has changed (C10, C33).
pub struct Rejected {
    /// Why: `EAGAIN` when no slot is free (reap, then try again); `EINVAL`, `EROFS`, `ENOSPC` for
    /// a request that can never be done.
    pub error: Error,
    /// The buffer it came with.
    pub buf: Option<Buf>,
}
