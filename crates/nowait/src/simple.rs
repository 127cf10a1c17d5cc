//! The simple path: one extent, one segment, aligned, so one slot and one transfer.
//!
//! Invariant: the decision is made before anything is touched; a request that is not simple goes
//! to the generic path as it came.
//! Knows: align, io, map, disk. Known by: engine. Kernel counterpart: the single-bio path of
//! iomap_dio_rw (fs/iomap/direct-io.c).

use crate::disk::Disk;
use crate::io::{Flags, Io, Op};
use crate::iov::MAX_TRANSFER_BYTES;
use crate::map::{Intent, Map};

/// Whether `io`, with all of its memory at `base`, is served by one transfer. A read of a known
/// hole is not: it needs none.
#[inline]
pub(crate) fn decide<M: Map>(disk: &Disk<M>, io: Io, base: *mut u8) -> bool {
    let align = disk.alignment();
    let range = io.range;
    let (intent, offset) = match io.op {
        Op::Read => (Intent::Read, align.read_offset),
        Op::Write => (Intent::Write, align.offset),
        _ => return false,
    };
    if (range.pos | range.len) & (u64::from(offset) - 1) != 0
        || base as usize & (align.memory as usize - 1) != 0
        || range.len.wrapping_sub(1) >= MAX_TRANSFER_BYTES
        || range.pos > disk.size()
        || range.len > disk.size() - range.pos
    {
        return false;
    }
    match disk.map.begin(range, intent) {
        Ok(extent) => extent.len == range.len && !extent.hole && extent.pos == range.pos,
        Err(_) => false,
    }
}

/// The `RWF_*` flags of a request's transfer.
#[inline]
pub(crate) fn rw_flags<M: Map>(disk: &Disk<M>, flags: Flags) -> i32 {
    let nowait = if disk.takes_nowait() { libc::RWF_NOWAIT } else { 0 };
    let dsync = if flags.has(Flags::DSYNC) { libc::RWF_DSYNC } else { 0 };
    nowait | dsync
}
