//! The place of a record in a log.
//!
//! Invariant: positions grow with the order of the records, and none is used twice in a log.

use std::fmt;

/// The place of a record in a [`crate::Log`], a number of bytes. Later records have greater ones; the
/// differences say nothing else. It stays good when the log is reopened, until the record is truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogPosition(u64);

impl LogPosition {
    /// The position with this number, which [`LogPosition::get`] has returned.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Its number, to be kept elsewhere.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for LogPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
