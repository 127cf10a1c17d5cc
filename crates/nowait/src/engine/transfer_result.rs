//! Classification of a transfer's outcome.
//!
//! Invariant: every outcome that the kernel may report has exactly one class.

use crate::types::transfer::Outcome;

/// The class of a transfer's outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferResult {
    /// All needed bytes were moved.
    Full,
    /// Refused without waiting, at submission or at completion (C34). `EOPNOTSUPP` means that the
    /// file takes no `RWF_NOWAIT` for this operation; if it means more, the worker's call fails
    /// with it too.
    Refused,
    /// Fewer bytes than needed, or interrupted.
    Short,
    /// A negative errno.
    Failed(Outcome),
}

/// Classifies the outcome of a transfer of which `needed` bytes matter.
#[inline]
pub(crate) fn classify(outcome: Outcome, needed: u64) -> TransferResult {
    if i64::from(outcome) >= needed as i64 {
        TransferResult::Full
    } else if outcome >= 0 || outcome == -libc::EINTR {
        TransferResult::Short
    } else if outcome == -libc::EAGAIN || outcome == -libc::EOPNOTSUPP {
        TransferResult::Refused
    } else {
        TransferResult::Failed(outcome)
    }
}
