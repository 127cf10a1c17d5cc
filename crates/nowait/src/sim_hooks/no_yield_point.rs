//! Yield points without the feature `sim`.
//!
//! Invariant: none does anything: the caller has to sleep by itself.

/// Always false.
#[inline(always)]
pub(crate) const fn notify() -> bool {
    false
}

/// Always false.
#[inline(always)]
#[must_use]
pub const fn is_simulated() -> bool {
    false
}

/// Does nothing.
#[inline(always)]
pub const fn yield_now() {}
