//! Segments: the memory of a request, in the order of the device's bytes.
//!
//! Invariant: the output of `merge` has no empty segment and no two that touch, and has the bytes
//! of its input in the same order.

use crate::types::error::{Error, Operation};

/// A contiguous part of a request's memory; laid out as `struct iovec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct IoSegment {
    /// Address of its first byte.
    pub base: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

impl IoSegment {
    /// No memory.
    pub const EMPTY: Self = Self { base: std::ptr::null_mut(), len: 0 };
}

/// The greatest number of segments of one request (C04), `UIO_MAXIOV` of the kernel.
/// Beyond it: `EINVAL`.
pub const MAX_SEGMENTS: usize = 1024;
/// The greatest number of bytes that one request moves (C06), `MAX_RW_COUNT` of the kernel.
/// Beyond it: fewer bytes are done.
pub const MAX_TRANSFER_BYTES: u64 = 0x7fff_f000;

/// The bytes of `segments` together, at most [`MAX_TRANSFER_BYTES`].
///
/// # Errors
/// `EINVAL` for more than [`MAX_SEGMENTS`] (C04) or a length that is negative as `ssize_t` (C05).
#[inline]
pub(crate) fn total(segments: &[IoSegment]) -> Result<u64, Error> {
    if segments.len() > MAX_SEGMENTS {
        return Err(Error::new(libc::EINVAL, Operation::Validate));
    }
    if segments.iter().any(|segment| segment.len > isize::MAX as usize) {
        return Err(Error::new(libc::EINVAL, Operation::Validate));
    }
    let mut sum = 0u64;
    for segment in segments {
        sum = (sum + segment.len as u64).min(MAX_TRANSFER_BYTES);
    }
    Ok(sum)
}

/// Appends the first `count` bytes of `segments` to `merged`, without empty segments and with
/// adjacent ones merged (C07, C16).
pub(crate) fn merge(segments: &[IoSegment], count: u64, merged: &mut Vec<IoSegment>) {
    let mut left = count as usize;
    for segment in segments {
        let len = segment.len.min(left);
        if len == 0 {
            continue;
        }
        left -= len;
        match merged.last_mut() {
            Some(last) if last.base.wrapping_add(last.len) == segment.base => last.len += len,
            _ => merged.push(IoSegment { base: segment.base, len }),
        }
    }
}

/// Whether every segment's address is a multiple of `memory` and every length one of `offset`, as
/// storage requires of a vectored transfer (C11).
pub(crate) fn aligned(segments: &[IoSegment], memory: u32, offset: u32) -> bool {
    let (memory, offset) = (memory as usize - 1, offset as usize - 1);
    segments.iter().all(|s| (s.base as usize) & memory == 0 && s.len & offset == 0)
}

/// Calls `each` for the parts of `segments` that hold the bytes `start..start + len` of the
/// request.
pub(crate) fn slice_segments(
    segments: &[IoSegment],
    start: u64,
    len: u64,
    mut each: impl FnMut(IoSegment),
) {
    let (mut skip, mut left) = (start as usize, len as usize);
    for segment in segments {
        if left == 0 {
            return;
        }
        if skip >= segment.len {
            skip -= segment.len;
            continue;
        }
        let part = (segment.len - skip).min(left);
        each(IoSegment { base: segment.base.wrapping_add(skip), len: part });
        (skip, left) = (0, left - part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(base: usize, len: usize) -> IoSegment {
        IoSegment { base: base as *mut u8, len }
    }

    #[test]
    fn c04_more_than_1024_segments_is_einval() {
        assert_eq!(total(&vec![segment(0, 1); 1025]).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(total(&vec![segment(0, 1); 1024]).unwrap(), 1024);
    }

    #[test]
    fn c05_a_negative_length_is_einval() {
        assert_eq!(total(&[segment(0, usize::MAX)]).unwrap_err().errno(), libc::EINVAL);
    }

    #[test]
    fn c06_the_total_is_clamped() {
        assert_eq!(total(&[segment(0, 1 << 40), segment(0, 1 << 40)]).unwrap(), 0x7fff_f000);
    }

    #[test]
    fn c07_empty_segments_are_skipped() {
        let mut merged = Vec::new();
        merge(&[segment(0, 0), segment(64, 8), segment(9, 0)], 8, &mut merged);
        assert_eq!(merged, [segment(64, 8)]);
    }

    #[test]
    fn c16_1024_touching_pages_are_one_segment() {
        let pages: Vec<_> = (0..1024).map(|n| segment(n * 4096, 4096)).collect();
        let mut merged = Vec::new();
        merge(&pages, 1024 * 4096, &mut merged);
        assert_eq!(merged, [segment(0, 1024 * 4096)]);
    }

    #[test]
    fn parts_of_a_range_are_the_bytes_of_that_range() {
        let segments = [segment(100, 10), segment(200, 10), segment(300, 10)];
        let mut seen = Vec::new();
        slice_segments(&segments, 8, 14, |part| seen.push(part));
        assert_eq!(seen, [segment(108, 2), segment(200, 10), segment(300, 2)]);
    }
}
