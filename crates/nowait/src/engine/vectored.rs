//! The vectored path: a request that is not simple is split into fragments, each served by one
//! transfer or none, and the transfers are in flight together. This saves the sum of their
//! latencies, and a transfer for each segment. The switch [`crate::Config::vectored`] turns it off;
//! a fragment then ends at the end of its segment, and is waited for before the next is submitted.
//!
//! Invariant: the fragments of a plan cover the request exactly, in order and without overlap. A
//! request that needs read-modify-write or allocation has no plan and goes to a worker as a whole,
//! so that it is done once (C33, C35).

use crate::block::block_map::{BlockMap, Extent, Intent};
use crate::block::device::BlockDevice;
use crate::engine::fragment::{Fragment, FragmentKind};
use crate::types::alignment::Alignment;
use crate::types::byte_range::ByteRange;
use crate::types::iovec::IoSegment;
use crate::types::request::{Op, Request};
use crate::types::{alignment, iovec};

/// The largest fragment that goes through a pooled buffer, in bytes from the start of its first
/// block.
const BOUNCE_BYTES: u64 = 512 << 10;

/// How a request is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// By one transfer between all of the request's memory and the extent.
    Single(Extent),
    /// By the fragments of the plan.
    Split,
    /// By a worker.
    Worker,
}

/// Splits `io` into `fragments`, the last one first. `segments` are its memory, merged; `own`
/// returns the engine's buffer that they lie in, if they do; `vectored` is the switch;
/// `separate_sync` says that the request needs a sync after its data.
pub(crate) fn plan<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    io: Request,
    segments: &[IoSegment],
    own: impl Fn() -> Option<IoSegment>,
    vectored: bool,
    separate_sync: bool,
    fragments: &mut Vec<Fragment>,
) -> Path {
    fragments.clear();
    // With `vectored` off, a transfer ends at the end of its segment.
    let may_be_single = !separate_sync && (vectored || segments.len() == 1);
    let path = match io.op {
        Op::Read => plan_read(disk, io.range, segments, &own, may_be_single, fragments),
        Op::Write if disk.appends_with(io.flags) || io.needs_one_call() => Path::Worker,
        Op::Write => plan_write(disk, io.range, segments, may_be_single, fragments),
        _ => Path::Worker,
    };
    match path {
        Path::Single(_) => {}
        Path::Worker => fragments.clear(),
        Path::Split => {
            if !vectored {
                split_per_segment(disk, io.op, segments, fragments);
            }
            // Fragments are popped from the end.
            fragments.reverse();
        }
    }
    path
}

/// Plans a read, as one transfer only if it `may_be_single`.
fn plan_read<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    segments: &[IoSegment],
    own: &impl Fn() -> Option<IoSegment>,
    may_be_single: bool,
    fragments: &mut Vec<Fragment>,
) -> Path {
    let block = disk.alignment().read_offset;
    let mut start = 0;
    while start < range.len {
        let rest = ByteRange::new(range.pos + start, range.len - start);
        let Ok(extent) = disk.extent(rest, Intent::Read) else {
            return Path::Worker;
        };
        if extent.hole {
            fragments.push(Fragment::of(extent, start, FragmentKind::Zero));
        } else if is_direct(disk, block, extent, segments, start) {
            if may_be_single && extent.len == range.len {
                return Path::Single(extent);
            }
            fragments.push(Fragment::of(extent, start, FragmentKind::Direct));
        } else if extent.len == range.len
            && let Some(skip) = room_for(extent, disk.alignment(), segments, own())
        {
            fragments.push(Fragment::of(extent, start, FragmentKind::PaddedRead { skip }));
        } else {
            bounce(extent, start, block, fragments);
        }
        start += extent.len;
    }
    Path::Split
}

/// The bytes from the start of the first block to `extent`, which is all of a request, if `own` has
/// aligned room for all blocks around it. It may have none: the file position may differ from the device's
/// modulo the block, and the buffer may come from an engine with smaller blocks, or for another range.
fn room_for(
    extent: Extent,
    align: Alignment,
    segments: &[IoSegment],
    own: Option<IoSegment>,
) -> Option<u32> {
    let (own, one) = (own?, segments.first()?);
    let block = align.read_offset;
    let skip = extent.pos - alignment::round_down(extent.pos, block);
    let before = (one.base as u64).wrapping_sub(own.base as u64);
    let after = (own.len as u64).checked_sub(before)?;
    let is_aligned = (one.base as u64).wrapping_sub(skip) & (u64::from(align.memory) - 1) == 0;
    (is_aligned && skip <= before && alignment::round_up(skip + extent.len, block) - skip <= after)
        .then_some(skip as u32)
}

/// Plans a write, as one transfer only if it `may_be_single`.
fn plan_write<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    segments: &[IoSegment],
    may_be_single: bool,
    fragments: &mut Vec<Fragment>,
) -> Path {
    let block = disk.alignment().offset;
    if (range.pos | range.len) & (u64::from(block) - 1) != 0 {
        return Path::Worker;
    }
    let mut start = 0;
    while start < range.len {
        let rest = ByteRange::new(range.pos + start, range.len - start);
        let Ok(extent) = disk.extent(rest, Intent::Write) else {
            return Path::Worker;
        };
        if is_direct(disk, block, extent, segments, start) {
            if may_be_single && extent.len == range.len {
                return Path::Single(extent);
            }
            fragments.push(Fragment::of(extent, start, FragmentKind::Direct));
        } else {
            bounce(extent, start, block, fragments);
        }
        start += extent.len;
    }
    Path::Split
}

/// Whether `part`, which begins at byte `start` of the request, and its memory are aligned.
fn is_direct<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    block: u32,
    part: Extent,
    segments: &[IoSegment],
    start: u64,
) -> bool {
    let memory = disk.alignment().memory;
    if let &[one] = segments {
        let base = (one.base as u64).wrapping_add(start);
        return (part.pos | part.len) & (u64::from(block) - 1) == 0
            && base & (u64::from(memory) - 1) == 0;
    }
    // The part's length is the sum of its segments' lengths, so it is checked with them.
    let mut direct = part.pos & (u64::from(block) - 1) == 0;
    iovec::slice_segments(segments, start, part.len, |segment| {
        direct &= iovec::aligned(&[segment], memory, block);
    });
    direct
}

/// Cuts `part` into fragments that fit a pooled buffer, at block boundaries.
fn bounce(part: Extent, start: u64, block: u32, fragments: &mut Vec<Fragment>) {
    let mut done = 0;
    while done < part.len {
        let pos = part.pos.wrapping_add(done);
        let skip = pos - alignment::round_down(pos, block);
        let len = (BOUNCE_BYTES - skip).min(part.len - done);
        let kind = FragmentKind::Bounce { skip: skip as u32 };
        fragments.push(Fragment { start: start + done, len, pos, file: part.file, kind });
        done += len;
    }
}

/// With `vectored` off: cuts direct fragments at the ends of their segments.
fn split_per_segment<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    op: Op,
    segments: &[IoSegment],
    fragments: &mut Vec<Fragment>,
) {
    let align = disk.alignment();
    let block = if op == Op::Read { align.read_offset } else { align.offset };
    let all = std::mem::take(fragments);
    for fragment in all {
        if fragment.kind != FragmentKind::Direct {
            fragments.push(fragment);
            continue;
        }
        let mut start = fragment.start;
        iovec::slice_segments(segments, fragment.start, fragment.len, |segment| {
            debug_assert!(iovec::aligned(&[segment], align.memory, block));
            let len = segment.len as u64;
            fragments.push(Fragment {
                start,
                len,
                pos: fragment.pos.wrapping_add(start - fragment.start),
                ..fragment
            });
            start += len;
        });
    }
}

#[cfg(test)]
#[cfg(feature = "sim")]
mod tests;
