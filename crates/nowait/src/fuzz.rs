//! Entry points of fuzz targets to the arithmetic on segments.
//!
//! Invariant: no function here has logic of its own; each calls the one that it is named after.

use crate::types::error::Error;
use crate::types::iovec;
use crate::types::iovec::IoSegment;

/// The bytes of `segments` together, at most [`iovec::MAX_TRANSFER_BYTES`].
///
/// # Errors
/// `EINVAL` for more than [`iovec::MAX_SEGMENTS`] (C04) or a negative length (C05).
pub fn total(segments: &[IoSegment]) -> Result<u64, Error> {
    iovec::total(segments)
}

/// The first `count` bytes of `segments`, with adjacent segments merged (C07, C16).
#[must_use]
pub fn merge(segments: &[IoSegment], count: u64) -> Vec<IoSegment> {
    let mut merged = Vec::new();
    iovec::merge(segments, count, &mut merged);
    merged
}

/// The parts of `segments` that hold the bytes `start..start + len` of the request.
#[must_use]
pub fn parts(segments: &[IoSegment], start: u64, len: u64) -> Vec<IoSegment> {
    let mut parts = Vec::new();
    iovec::slice_segments(segments, start, len, |part| parts.push(part));
    parts
}

/// Whether addresses are multiples of `memory` and lengths multiples of `offset` (C11), both
/// powers of two.
#[must_use]
pub fn aligned(segments: &[IoSegment], memory: u32, offset: u32) -> bool {
    iovec::aligned(segments, memory, offset)
}
