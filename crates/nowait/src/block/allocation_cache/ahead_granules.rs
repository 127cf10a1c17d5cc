//! The granules of an allocation cache that are allocated ahead.
//!
//! Invariant: a granule becomes `AHEAD` only from `HOLE`.

use std::sync::atomic::Ordering;

use crate::block::ahead_map::AheadMap;
use crate::block::allocation_cache::{AHEAD, AllocationCache, HOLE, UNKNOWN};
use crate::types::byte_range::ByteRange;

impl AllocationCache {
    /// Sets the granules in `range` that have the state `from` to the state `to`.
    fn change_state(&self, range: ByteRange, from: u64, to: u64) {
        let (first, end) = self.contained_granules(range);
        self.update(first, end, |now, low| {
            let high = if from & 2 != 0 { now >> 1 } else { !(now >> 1) };
            let found = low & high & if from & 1 != 0 { now } else { !now };
            (now & !(found * 3)) | (found * to)
        });
    }

    /// The bytes of the granules `from..to`, up to the end of `range`.
    fn bytes_of(&self, from: u64, to: u64, range: ByteRange) -> ByteRange {
        let pos = from << self.granule_shift;
        ByteRange::new(pos, (to << self.granule_shift).min(range.end()) - pos)
    }
}

impl AheadMap for AllocationCache {
    fn begins_in_hole(&self, range: ByteRange) -> bool {
        self.state(range.pos >> self.granule_shift) == HOLE
    }

    fn written_before(&self, pos: u64, limit: u64) -> u64 {
        let end = pos >> self.granule_shift;
        let granules = (limit >> self.granule_shift).min(end);
        let run = (1..=granules).take_while(|back| self.state(end - back) != HOLE).count();
        (run as u64) << self.granule_shift
    }

    fn mark_ahead(&self, range: ByteRange) {
        self.change_state(range, HOLE, AHEAD);
    }

    fn forget_holes(&self, range: ByteRange) {
        let (from, to) = self.covering_granules(range);
        let whole = self.bytes_of(from, to, ByteRange::new(0, self.size.load(Ordering::Relaxed)));
        self.change_state(whole, HOLE, 0);
    }

    fn next_ahead(&self, range: ByteRange) -> Option<ByteRange> {
        let (first, end) = self.contained_granules(range);
        let from = (first..end).find(|&granule| self.state(granule) == AHEAD)?;
        let to = (from..end).find(|&granule| self.state(granule) != AHEAD).unwrap_or(end);
        Some(self.bytes_of(from, to, range))
    }

    fn unmark_ahead(&self, range: ByteRange) {
        self.change_state(range, AHEAD, HOLE);
    }

    fn forget_ahead(&self, range: ByteRange) {
        self.change_state(range, AHEAD, UNKNOWN);
    }

    fn ahead_bytes(&self) -> u64 {
        self.ahead_granules.load(Ordering::Relaxed) << self.granule_shift
    }
}
