//! Writes that touch and wait for a worker, as one: a file system or an image then allocates once
//! for all of them. The switch [`crate::Config::merge`] turns it off.
//!
//! Invariant: only writes of whole blocks are joined, none of them durable, and they count as done
//! only if all of their bytes were written.
#![allow(unsafe_code)]

use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::blocking::sync_io;
use crate::types::byte_range::ByteRange;
use crate::types::error::Error;
use crate::types::iovec::IoSegment;
use crate::types::request::{Flags, Op, Request};

/// The greatest number of bytes of merged requests. The first one is answered with the last one,
/// so more would cost latency; and a device serves several transfers simultaneously.
pub(crate) const MAX_BYTES: u32 = 256 << 10;
/// The greatest number of bytes of a request that is merged: moving more costs so much that the
/// transfer itself hardly counts.
pub(crate) const MAX_PART_BYTES: u32 = 64 << 10;
/// The greatest number of writes that are joined.
const MAX_PARTS: usize = 64;

/// Whether `next` is joined to the `count` writes from `first` to `last`, which are joined already
/// or only one.
pub(crate) fn joins(first: Request, last: Request, next: Request, count: usize) -> bool {
    let is_small = |io: Request| {
        io.op == Op::Write
            && io.flags == Flags::NONE
            && io.range.len.wrapping_sub(1) < u64::from(MAX_PART_BYTES)
    };
    is_small(last)
        && is_small(next)
        && next.range.pos == last.range.end()
        && next.range.end() - first.range.pos <= u64::from(MAX_BYTES)
        && count < MAX_PARTS
}

/// Writes `parts`, which are joined, as one request. False if one of them needs a write of its own.
///
/// # Errors
/// That of the write; a part of the bytes may be written.
///
/// # Safety
/// As for [`sync_io::run`], for each part.
pub(crate) unsafe fn run<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    parts: impl Iterator<Item = (Request, *const [IoSegment])>,
) -> Result<bool, Error> {
    let mut list = [IoSegment { base: std::ptr::null_mut(), len: 0 }; MAX_PARTS];
    let (mut count, mut range) = (0, None);
    for (io, segments) in parts {
        // SAFETY: as promised by the caller.
        let segments = unsafe { &*segments };
        let (&[one], Some(place)) = (segments, list.get_mut(count)) else { return Ok(false) };
        if !sync_io::is_aligned_to(disk, disk.alignment().offset, io.range, segments) {
            return Ok(false);
        }
        *place = IoSegment { len: io.range.len as usize, ..one };
        count += 1;
        let all = range.get_or_insert(ByteRange::new(io.range.pos, 0));
        all.len += io.range.len;
    }
    let Some(range) = range else { return Ok(false) };
    let io = Request { op: Op::Write, flags: Flags::NONE, range };
    // SAFETY: as promised by the caller; the segments are those of the parts, in their order.
    let done = unsafe { sync_io::run(disk, io, &list[..count], &mut Vec::new()) }?;
    Ok(done == range.len)
}
