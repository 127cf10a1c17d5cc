//! What is left to do when the data has ended (C42): the one place that lists it.
//!
//! Invariant: the thread that reaps finishes the request itself unless this says otherwise.
//! Knows: io, request. Known by: engine. Kernel counterpart: iomap_dio_bio_end_io, which completes
//! inline unless IOMAP_DIO_INLINE_COMP had to be cleared.

use crate::io::{Flags, Outcome};
use crate::request::{Request, Role};

/// What a request needs after its data.
///
/// What else a kernel has to put off is not here, because a queue's transfer includes it: the file
/// system commits the allocation and the size of a file that it writes to, and the kernel drops
/// cached pages around a direct write, before the transfer ends. An image that allocates by itself
/// adds its commit to this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// Nothing: it is finished where it was reaped.
    Nothing,
    /// Its pieces are in place, but were not written with `DSYNC` one by one (C29).
    Sync,
    /// Some of it was refused without waiting, interrupted, or short: a worker does the whole again,
    /// which may allocate, resume, or find the end of the file (C19, C34, C35).
    Again,
    /// An error is the answer, at once: there is nothing more to do for it.
    Error,
}

/// What is left for `request`, all of whose transfers have ended.
pub(crate) fn leftover(request: &Request) -> Leftover {
    if request.result < 0 {
        Leftover::Error
    } else if request.again {
        Leftover::Again
    } else if request.role == Role::Whole
        && request.io.op.changes()
        && request.io.flags.has(Flags::DSYNC)
    {
        Leftover::Sync
    } else {
        Leftover::Nothing
    }
}

/// What one transfer of a request came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// All that was needed.
    Full,
    /// Refused without waiting, at submission or at completion (C34). `EOPNOTSUPP` is how a file
    /// says that it takes no `RWF_NOWAIT` for this operation; a worker learns if it means more.
    Refused,
    /// Less than was needed, or interrupted.
    Short,
    /// An errno, negative.
    Failed(Outcome),
}

/// Judges the outcome of a transfer of which `needed` bytes matter.
#[inline]
pub(crate) fn judge(outcome: Outcome, needed: u64) -> Ended {
    if i64::from(outcome) >= needed as i64 {
        Ended::Full
    } else if outcome >= 0 || outcome == -libc::EINTR {
        Ended::Short
    } else if outcome == -libc::EAGAIN || outcome == -libc::EOPNOTSUPP {
        Ended::Refused
    } else {
        Ended::Failed(outcome)
    }
}
