//! The simple path: a read or write that lies in one extent and has one aligned segment takes one
//! slot and one transfer. This saves the planning of the general path (`vectored.rs`): the list of
//! segments and the fragments. The switch [`crate::Config::simple`] turns it off; every request
//! then takes the general path.
//!
//! Invariant: the decision is made before anything is changed; a request that is not simple goes
//! to the general path unchanged, and holds no range lock.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::block_map::{BlockMap, Extent, Intent, WouldBlock};
use crate::block::device::BlockDevice;
use crate::block::range_lock::LockMode;
use crate::engine::slot::Place;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::iovec::MAX_TRANSFER_BYTES;
use crate::types::request::{Flags, Op, Request};
use crate::types::token::Target;
use crate::types::transfer::Transfer;

/// The bits that are 0 in every multiple of `block` that can be a position or a length.
const fn bits_below(block: u32) -> u64 {
    1 << 63 | (block as u64 - 1)
}

/// The bits that are 0 in the position and the length of every simple read. With read-ahead no read is
/// simple: its bytes may be in memory.
fn read_mask<M: BlockMap + ?Sized>(disk: &BlockDevice<M>) -> u64 {
    match disk.read_ahead() {
        Some(_) => u64::MAX,
        None => bits_below(disk.alignment().read_offset),
    }
}

/// The constants of one device that decide whether a request is simple.
pub(crate) struct SimplePath {
    /// The bits that are 0 in the position and the length of a simple read and of a simple write,
    /// the uppermost among them, so that their sum does not wrap; all of them while no request is
    /// simple, so that only an empty one would pass.
    read_mask: AtomicU64,
    write_mask: AtomicU64,
    memory_mask: usize,
    /// `RWF_NOWAIT` where the file takes it.
    rw_flags: i32,
    /// Flags of a request that its transfers have.
    passed: Flags,
    /// The position from which on a write may be simple: 0, or the end of a forbidden prefix, whose
    /// bytes have to be looked at; `u64::MAX` for a device that is read-only or appends.
    writes_from: u64,
    /// A write takes the range lock of its range ([`BlockDevice::locks`]).
    locks: bool,
    /// It does so after it is mapped ([`BlockMap::keeps_write_extents`]).
    maps_before_lock: bool,
    /// A transfer with `DSYNC` is not enough ([`BlockDevice::syncs_separately`]).
    separate_sync: bool,
    /// A transfer with `DSYNC` costs a sync, so that several of them share one
    /// ([`crate::Config::group_syncs`]).
    groups_syncs: bool,
}

/// The finding of the simple path about a request.
pub(crate) enum Verdict {
    /// One transfer to or from this extent serves the request. If
    /// [`SimplePath::needs_range_lock`], its range is locked.
    Simple(Extent),
    /// Only a worker can serve the request: the map has no answer without waiting, or another
    /// request holds the range.
    MustWait,
    /// The request needs a plan.
    General,
}

impl Verdict {
    /// The verdict of the map for all of `range`.
    #[inline(always)]
    fn of(extent: Result<Extent, WouldBlock>, range: ByteRange) -> Self {
        match extent {
            Ok(extent) if extent.len == range.len && !extent.hole => Self::Simple(extent),
            Ok(_) => Self::General,
            Err(WouldBlock) => Self::MustWait,
        }
    }
}

impl SimplePath {
    pub(crate) fn new<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, config: &Config) -> Self {
        let align = disk.alignment();
        Self {
            read_mask: AtomicU64::new(read_mask(disk)),
            write_mask: AtomicU64::new(bits_below(align.offset)),
            memory_mask: align.memory as usize - 1,
            rw_flags: if disk.supports_nowait() { libc::RWF_NOWAIT } else { 0 },
            passed: match disk.drops_cached() {
                true => Flags::OF_TRANSFERS | Flags::DONT_CACHE,
                false => Flags::OF_TRANSFERS,
            },
            writes_from: match disk.is_read_only() || disk.appends() {
                true => u64::MAX,
                false => disk.forbidden_prefix().len() as u64,
            },
            locks: disk.locks(),
            maps_before_lock: disk.map.keeps_write_extents(),
            separate_sync: disk.syncs_separately(),
            groups_syncs: config.group_syncs && !disk.shares_syncs(),
        }
    }

    /// Makes requests of `disk` simple from now on, or none.
    pub(crate) fn set_on<M: BlockMap + ?Sized>(&self, disk: &BlockDevice<M>, on: bool) {
        let align = disk.alignment();
        let mask = |mask| if on { mask } else { u64::MAX };
        self.read_mask.store(mask(read_mask(disk)), Ordering::Relaxed);
        self.write_mask.store(mask(bits_below(align.offset)), Ordering::Relaxed);
    }

    /// Whether `io`, with its memory at `base`, is simple. A read of a cached hole is not: it needs
    /// no transfer.
    #[inline(always)]
    pub(crate) fn map_for_simple_path<M: BlockMap + ?Sized>(
        &self,
        disk: &BlockDevice<M>,
        io: Request,
        base: *mut u8,
    ) -> Verdict {
        let range = io.range;
        let (intent, mask) = match io.op {
            Op::Read => (Intent::Read, self.read_mask.load(Ordering::Relaxed)),
            Op::Write if range.pos >= self.writes_from => {
                (Intent::Write, self.write_mask.load(Ordering::Relaxed))
            }
            _ => return Verdict::General,
        };
        if (range.pos | range.len) & mask != 0
            || base as usize & self.memory_mask != 0
            || range.len.wrapping_sub(1) >= MAX_TRANSFER_BYTES
            || range.pos.wrapping_add(range.len) > disk.limit()
            || self.may_need_sync(io)
        {
            return Verdict::General;
        }
        match self.locks && matches!(intent, Intent::Write) {
            true => self.lock_and_map(disk, range),
            false => Verdict::of(disk.map.map_extent(range, intent), range),
        }
    }

    /// Whether `io` is a write that takes the range lock.
    #[inline(always)]
    pub(crate) fn needs_range_lock(&self, io: Request) -> bool {
        self.locks && io.op == Op::Write
    }

    /// Whether a sync may have to follow the data of `io`, to make them durable.
    #[inline(always)]
    fn may_need_sync(&self, io: Request) -> bool {
        io.flags.contains(Flags::DSYNC) && (self.separate_sync || self.groups_syncs)
    }

    /// Whether a sync follows the data of `io`, to make them durable. `others` says that other
    /// durable writes are in flight, which can share it.
    #[inline]
    pub(crate) fn needs_separate_sync(&self, io: Request, others: bool) -> bool {
        (self.separate_sync || self.groups_syncs && others) && io.flags.contains(Flags::DSYNC)
    }

    /// Whether `io` is a durable write with which others could share a sync.
    #[inline]
    pub(crate) fn can_share_sync(&self, io: Request) -> bool {
        self.groups_syncs && io.op == Op::Write && io.flags.contains(Flags::DSYNC)
    }

    /// The one transfer that serves `io` at `place` in the file of `target`.
    #[inline]
    pub(crate) fn transfer(&self, io: Request, target: Target, place: Place) -> Transfer {
        let Place { base, pos, segments, buffer } = place;
        Transfer {
            base,
            pos,
            file: target.file(),
            len: io.range.len as u32,
            rw_flags: self.rw_flags(io.flags),
            segments,
            buffer,
            priority: io.flags.priority_number(),
            write: io.op == Op::Write,
            must_not_wait: io.flags.contains(Flags::NOWAIT),
        }
    }

    /// The `RWF_*` flags of a request's transfers.
    #[inline(always)]
    pub(crate) fn rw_flags(&self, flags: Flags) -> i32 {
        self.rw_flags | flags.rw_flags(self.passed)
    }

    /// Locks `range` and maps it for a write. Unless all of it is in one mapped extent, the range
    /// is not locked when this returns.
    #[inline(always)]
    fn lock_and_map<M: BlockMap + ?Sized>(
        &self,
        disk: &BlockDevice<M>,
        range: ByteRange,
    ) -> Verdict {
        let lock = || disk.ranges.try_lock(range, LockMode::Shared);
        let map = || Verdict::of(disk.map.map_extent(range, Intent::Write), range);
        if self.maps_before_lock {
            return match map() {
                Verdict::Simple(_) if !lock() => Verdict::MustWait,
                verdict => verdict,
            };
        }
        if !lock() {
            return Verdict::MustWait;
        }
        match map() {
            simple @ Verdict::Simple(_) => simple,
            verdict => {
                disk.ranges.unlock(range, LockMode::Shared);
                verdict
            }
        }
    }
}

#[cfg(test)]
mod tests;
