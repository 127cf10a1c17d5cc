//! What of the engine's inside is fuzzed by itself: the arithmetic on segments.
//!
//! Invariant: nothing here does anything but call what it is named after.
//! Knows: error, iov. Known by: the fuzz targets, which alone have the feature `fuzz`.

use crate::error::Error;
use crate::iov::{self, Segment};

/// The bytes of `segments` together, at most [`iov::MAX_TRANSFER_BYTES`].
///
/// # Errors
/// `EINVAL` for more than [`iov::MAX_SEGMENTS`] (C04) or a negative length (C05).
pub fn total(segments: &[Segment]) -> Result<u64, Error> {
    iov::total(segments)
}

/// The first `count` bytes of `segments`, those that touch made one (C07, C16).
#[must_use]
pub fn merge(segments: &[Segment], count: u64) -> Vec<Segment> {
    let mut merged = Vec::new();
    iov::merge(segments, count, &mut merged);
    merged
}

/// The parts of `segments` that hold the bytes `start..start + len` of the request.
#[must_use]
pub fn parts(segments: &[Segment], start: u64, len: u64) -> Vec<Segment> {
    let mut parts = Vec::new();
    iov::parts(segments, start, len, |part| parts.push(part));
    parts
}

/// Whether addresses are multiples of `memory` and lengths multiples of `offset` (C11), both
/// powers of two.
#[must_use]
pub fn aligned(segments: &[Segment], memory: u32, offset: u32) -> bool {
    iov::aligned(segments, memory, offset)
}
