//! The simple path: one extent, one segment, aligned, so one slot and one transfer.
//!
//! Invariant: the decision is made before anything is touched; a request that is not simple goes
//! to the generic path as it came, and holds nothing.
//! Knows: align, io, map, ranges, disk. Known by: core, file. Kernel counterpart: the single-bio path of
//! iomap_dio_rw (fs/iomap/direct-io.c).

use crate::disk::Disk;
use crate::error::Range;
use crate::io::{Flags, Io, Op, Transfer};
use crate::iov::MAX_TRANSFER_BYTES;
use crate::map::{Extent, Intent, Map};
use crate::ranges::Hold;

/// What decides, in one place: masks of the device's alignment, and its size.
#[derive(Clone, Copy)]
pub(crate) struct Gate {
    read_mask: u64,
    write_mask: u64,
    memory_mask: usize,
    size: u64,
    /// `RWF_NOWAIT` where the file takes it.
    rw_flags: i32,
    read_only: bool,
    /// A write keeps others away from its range, and they it ([`Disk::locks`]).
    locks: bool,
    /// A transfer with `DSYNC` is not enough: it makes data durable, but not the metadata of an image
    /// that allocates by itself. And of a lost page of the cache only one of several transfers is
    /// told, which need not be the one whose page it was (C28); only a flush remembers (C51).
    apart: bool,
}

impl Gate {
    pub(crate) fn new<M: Map>(disk: &Disk<M>) -> Self {
        let align = disk.alignment();
        Self {
            read_mask: u64::from(align.read_offset) - 1,
            write_mask: u64::from(align.offset) - 1,
            memory_mask: align.memory as usize - 1,
            size: disk.size(),
            rw_flags: if disk.takes_nowait() { libc::RWF_NOWAIT } else { 0 },
            read_only: disk.is_read_only(),
            locks: disk.locks(),
            apart: disk.map.image().is_some() || !disk.is_direct(),
        }
    }

    /// The extent that serves all of `io`, with its memory at `base`, by one transfer, if one does.
    /// A read of a known hole needs none. A write that [`Gate::holds`] its range does so from then
    /// on: until then, what is known of it may change.
    #[inline]
    pub(crate) fn admits<M: Map>(&self, disk: &Disk<M>, io: Io, base: *mut u8) -> Option<Extent> {
        let range = io.range;
        let (intent, mask) = match io.op {
            Op::Read => (Intent::Read, self.read_mask),
            Op::Write if !self.read_only => (Intent::Write, self.write_mask),
            _ => return None,
        };
        if (range.pos | range.len) & mask != 0
            || base as usize & self.memory_mask != 0
            || range.len.wrapping_sub(1) >= MAX_TRANSFER_BYTES
            || self.size.checked_sub(range.len).is_none_or(|last| range.pos > last)
            || self.syncs_apart(io)
        {
            return None;
        }
        let extent = match self.holds(io) {
            true => hold(disk, range)?,
            false => disk.map.begin(range, intent).ok()?,
        };
        (extent.len == range.len && !extent.hole).then_some(extent)
    }

    /// Whether `io` is a write that keeps others away from its range, and they it.
    #[inline]
    pub(crate) fn holds(&self, io: Io) -> bool {
        self.locks && io.op == Op::Write
    }

    /// Whether what makes `io` durable comes after its data, as a step of its own.
    #[inline]
    pub(crate) fn syncs_apart(&self, io: Io) -> bool {
        self.apart && io.flags.has(Flags::DSYNC)
    }

    /// The one transfer that serves `io` at `extent`: `base` is its memory, or with `segments` above 0 the
    /// list of it.
    #[inline]
    pub(crate) fn transfer(
        &self,
        io: Io,
        extent: Extent,
        base: *mut u8,
        segments: u16,
        buffer: u16,
    ) -> Transfer {
        Transfer {
            base,
            pos: extent.pos,
            file: extent.file,
            len: io.range.len as u32,
            rw_flags: self.rw_flags(io.flags),
            segments,
            buffer,
            write: io.op == Op::Write,
            must_not_wait: io.flags.has(Flags::NOWAIT),
        }
    }

    /// The `RWF_*` flags of a request's transfer.
    #[inline]
    pub(crate) fn rw_flags(&self, flags: Flags) -> i32 {
        let dsync = if flags.has(Flags::DSYNC) { libc::RWF_DSYNC } else { 0 };
        let hipri = if flags.has(Flags::HIPRI) { libc::RWF_HIPRI } else { 0 };
        self.rw_flags | dsync | hipri
    }
}

/// Holds `range`, all of which can then be written at the extent.
fn hold<M: Map>(disk: &Disk<M>, range: Range) -> Option<Extent> {
    if !disk.ranges.try_take(range, Hold::Shared) {
        return None;
    }
    let extent = disk.map.begin(range, Intent::Write).ok().filter(|it| it.len == range.len);
    if extent.is_none() {
        disk.ranges.free(range, Hold::Shared);
    }
    extent
}
