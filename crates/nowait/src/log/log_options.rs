//! How a log is opened, and the bounds of what it takes.
//!
//! Invariant: a record fits into one segment.

use crate::storage::open_options::Direct;
use crate::types::error::{Error, Operation};

/// The smallest and the greatest size of a segment, in bytes.
const SEGMENT_BYTES: std::ops::RangeInclusive<u64> = 64 << 10..=1 << 30;
/// The unit of a segment's size, in bytes.
const SEGMENT_UNIT: u64 = 64 << 10;
/// The most spare segments of a log that can be kept.
/// Beyond it: `EINVAL`.
const MOST_SPARES: u32 = 1024;

/// How a [`crate::Log`] is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// Size of a segment in bytes: 64 KiB to 1 GiB, a multiple of 64 KiB; 64 MiB by default. A log that
    /// exists keeps the size that it was made with.
    pub segment_bytes: u64,
    /// Segments that are kept for reuse when [`crate::Log::truncate_before`] has freed them, 0 to 1024;
    /// further ones are removed. 2 by default.
    pub spares: u32,
    /// When the last segment is half full and there is no spare one, a thread of the library makes one, so that
    /// no append has to wait for that. On by default.
    pub prepare_ahead: bool,
    /// A directory that is missing is made, as is the first segment; else that is `ENOENT`. On by default.
    pub create: bool,
    /// Whether the page cache is bypassed; where the file system can, by default.
    pub direct: Direct,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self {
            segment_bytes: 64 << 20,
            spares: 2,
            prepare_ahead: true,
            create: true,
            direct: Direct::Auto,
        }
    }
}

/// Each method sets the field of its name.
#[allow(missing_docs, reason = "the fields are documented")]
impl LogOptions {
    /// The default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    #[must_use]
    pub const fn segment_bytes(self, segment_bytes: u64) -> Self {
        Self { segment_bytes, ..self }
    }

    #[must_use]
    pub const fn spares(self, spares: u32) -> Self {
        Self { spares, ..self }
    }

    #[must_use]
    pub const fn prepare_ahead(self, prepare_ahead: bool) -> Self {
        Self { prepare_ahead, ..self }
    }

    #[must_use]
    pub const fn create(self, create: bool) -> Self {
        Self { create, ..self }
    }

    #[must_use]
    pub const fn direct(self, direct: Direct) -> Self {
        Self { direct, ..self }
    }

    /// `EINVAL` for options outside their bounds.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match is_segment_size(self.segment_bytes) && self.spares <= MOST_SPARES {
            true => Ok(()),
            false => Err(Error::new(libc::EINVAL, Operation::Open)),
        }
    }
}

/// Whether a segment can have this size.
pub(crate) fn is_segment_size(bytes: u64) -> bool {
    SEGMENT_BYTES.contains(&bytes) && bytes.is_multiple_of(SEGMENT_UNIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_outside_their_bounds_are_refused() {
        let new = LogOptions::new;
        for (options, good) in [
            (new(), true),
            (new().segment_bytes(64 << 10), true),
            (new().segment_bytes((64 << 10) - 4096), false),
            (new().segment_bytes(1 << 30), true),
            (new().segment_bytes((1 << 30) + (64 << 10)), false),
            (new().segment_bytes((1 << 20) + 4096), false),
            (new().spares(0), true),
            (new().spares(1024), true),
            (new().spares(1025), false),
        ] {
            assert_eq!(options.check().is_ok(), good, "{options:?}");
        }
    }
}
