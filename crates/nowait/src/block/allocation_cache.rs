//! The allocation cache: which granules of a file are holes. A write to a hole must allocate, so it
//! goes to a worker.
//!
//! Invariant: a granule is marked a hole only if it was seen to be one after the last write to it
//! had completed, and the mark is removed before the next write begins. "Mapped" may be wrong and
//! then costs only speed. So the cache never hides data (C14, C18, C38).

mod ahead_granules;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::ahead_map::AheadMap;
use crate::block::block_map::{BlockMap, Extent, Intent, WouldBlock};
use crate::storage::Storage;
use crate::types::byte_range::ByteRange;
use crate::types::request::ExtentStatus;

/// State of a granule, two bits each.
const UNKNOWN: u64 = 0;
const MAPPED: u64 = 1;
const HOLE: u64 = 2;
/// A hole that has storage. The bit of `HOLE` says that it reads as zeros, the bit of `MAPPED` that
/// a write allocates nothing.
const AHEAD: u64 = 3;
const ALL_MAPPED: u64 = 0x5555_5555_5555_5555;
const ALL_HOLES: u64 = ALL_MAPPED << 1;
const GRANULES_PER_WORD: u64 = 32;
const WORDS_PER_LEAF: u64 = 512;
const GRANULES_PER_LEAF: u64 = GRANULES_PER_WORD * WORDS_PER_LEAF;
/// Leaves that the most granules need.
const MOST_LEAVES: u64 = MAX_GRANULES / GRANULES_PER_LEAF + 1;
const MIN_GRANULE_SHIFT: u32 = 12;
/// The greatest number of granules: with two bits each, 16 MiB for the largest device.
/// Beyond it: granules are larger.
const MAX_GRANULES: u64 = 1 << 26;
/// The greatest number of extents that a scan reads; status requests add later ones.
const SCAN_EXTENTS: usize = 1 << 14;

/// The states of [`GRANULES_PER_LEAF`] granules.
#[derive(Default)]
struct Leaf {
    /// `None` as long as all words are `all`.
    words: OnceLock<Box<[AtomicU64]>>,
    /// Only [`AllocationCache::scan`] sets it: a change by others could be lost to a thread that
    /// makes `words` of it.
    all: AtomicU64,
}

impl Leaf {
    #[inline]
    fn word(&self, granule: u64) -> u64 {
        match self.words.get() {
            Some(words) => {
                let word = granule / GRANULES_PER_WORD % WORDS_PER_LEAF;
                words[word as usize].load(Ordering::Acquire)
            }
            None => self.all.load(Ordering::Acquire),
        }
    }

    fn words(&self) -> &[AtomicU64] {
        self.words.get_or_init(|| {
            let all = self.all.load(Ordering::Acquire);
            (0..WORDS_PER_LEAF).map(|_| AtomicU64::new(all)).collect()
        })
    }
}

fn new_leaves(count: u64) -> Box<[Leaf]> {
    (0..count).map(|_| Leaf::default()).collect()
}

/// Which ranges of a file are mapped, holes or unknown: two bits for each granule of 4 KiB or more,
/// in leaves that are allocated when their granules differ.
pub struct AllocationCache {
    /// Leaves that the granules of the device needed at first.
    leaves: Box<[Leaf]>,
    /// Those behind them, up to [`MOST_LEAVES`], once a device has grown. What is behind all stays
    /// unknown.
    later_leaves: OnceLock<Box<[Leaf]>>,
    granule_shift: u32,
    /// Size of the device in bytes: the granule that its end cuts is a hole if its part of it is.
    size: AtomicU64,
    enabled: bool,
    allocates_ahead: bool,
    /// Granules in state `AHEAD`.
    ahead_granules: AtomicU64,
}

impl AllocationCache {
    /// A cache for a device of `size` bytes, in which every granule is unknown. With `enabled`
    /// false it stays so ([`crate::OpenOptions::cache_holes`]).
    #[must_use]
    pub fn new(size: u64, enabled: bool) -> Self {
        let mut granule_shift = MIN_GRANULE_SHIFT;
        while size >> granule_shift > MAX_GRANULES {
            granule_shift += 1;
        }
        let leaves = new_leaves((size >> granule_shift) / GRANULES_PER_LEAF + 1);
        let later_leaves = OnceLock::new();
        let ahead_granules = AtomicU64::new(0);
        let size = AtomicU64::new(size);
        let allocates_ahead = false;
        Self { leaves, later_leaves, granule_shift, size, enabled, allocates_ahead, ahead_granules }
    }

    /// This cache for a device that allocates ahead ([`crate::OpenOptions::allocate_ahead`]) if `on`, and
    /// if the cache is enabled.
    #[must_use]
    pub fn allocating_ahead(self, on: bool) -> Self {
        Self { allocates_ahead: on && self.enabled, ..self }
    }

    /// This cache for a device whose size others may change at any time: a granule that the device's
    /// end cuts is never marked a hole.
    pub(crate) fn without_end(self) -> Self {
        Self { size: AtomicU64::new(u64::MAX), ..self }
    }

    /// Fills the cache from lseek(2) with `SEEK_DATA` and `SEEK_HOLE`, up to a bounded number of
    /// extents. If the file system does not support them, every granule stays unknown.
    pub fn scan(&self, storage: &dyn Storage) {
        if !self.enabled {
            return;
        }
        let mut pos = 0;
        let size = self.size.load(Ordering::Relaxed);
        let mut extents = Vec::new();
        while pos < size {
            extents.clear();
            let range = ByteRange::new(pos, size - pos);
            if storage.extents(range, SCAN_EXTENTS, &mut extents).is_err() {
                return;
            }
            for extent in &extents {
                self.note(ByteRange::new(pos, extent.len), extent.hole);
                pos += extent.len;
            }
            if extents.len() >= SCAN_EXTENTS {
                return;
            }
        }
    }

    /// Notes what a scan has found. Leaves that are all of one kind need no memory.
    fn note(&self, range: ByteRange, hole: bool) {
        let mark = |from: u64, to: u64| {
            let pos = (from << self.granule_shift).max(range.pos);
            let end = to.saturating_mul(1 << self.granule_shift).min(range.end());
            match ByteRange::new(pos, end.saturating_sub(pos)) {
                part if part.len == 0 => {}
                part if hole => self.mark_hole(part),
                part => self.mark_allocated(part),
            }
        };
        let (first, end) = self.contained_granules(range);
        let (begin, last) = self.covering_granules(range);
        let leaves = first.div_ceil(GRANULES_PER_LEAF)..end / GRANULES_PER_LEAF;
        let unused = |index: u64| {
            let leaf = self.leaves.get(index as usize)?;
            let is_unknown = leaf.words.get().is_none() && leaf.all.load(Ordering::Acquire) == 0;
            is_unknown.then_some(leaf)
        };
        let mut from = begin;
        for index in leaves {
            if let Some(leaf) = unused(index) {
                mark(from, index * GRANULES_PER_LEAF);
                leaf.all.store(if hole { ALL_HOLES } else { ALL_MAPPED }, Ordering::Release);
                from = (index + 1) * GRANULES_PER_LEAF;
            }
        }
        mark(from, last);
    }

    /// A leaf that is not among the first ones.
    #[cold]
    fn later_leaf(&self, index: usize) -> Option<&Leaf> {
        self.later_leaves.get()?.get(index - self.leaves.len())
    }

    /// The same, for the first one that is used.
    #[cold]
    fn first_later_leaf(&self, index: usize) -> Option<&Leaf> {
        let count = || MOST_LEAVES.saturating_sub(self.leaves.len() as u64);
        self.later_leaves.get_or_init(|| new_leaves(count())).get(index - self.leaves.len())
    }

    #[inline]
    fn word(&self, granule: u64) -> u64 {
        let index = (granule / GRANULES_PER_LEAF) as usize;
        let leaf = self.leaves.get(index).or_else(|| self.later_leaf(index));
        leaf.map_or(UNKNOWN, |leaf| leaf.word(granule))
    }

    #[inline]
    fn state(&self, granule: u64) -> u64 {
        self.word(granule) >> (granule % GRANULES_PER_WORD * 2) & 3
    }

    /// The end of the run from `from` on whose granules all read as holes, or all do not, as `hole`
    /// says; at most `to`. Granules behind the device are unknown, so they are not holes.
    #[inline]
    fn run_until(&self, from: u64, to: u64, hole: bool) -> u64 {
        let whole = if hole { ALL_HOLES } else { 0 };
        let end = to.min(MOST_LEAVES * GRANULES_PER_LEAF);
        let mut granule = from;
        while granule < end {
            if granule.is_multiple_of(GRANULES_PER_WORD) && self.word(granule) & ALL_HOLES == whole
            {
                granule += GRANULES_PER_WORD;
                continue;
            }
            if reads_as_hole(self.state(granule)) != hole {
                return granule;
            }
            granule += 1;
        }
        if hole { granule.min(to) } else { to }
    }

    /// The end of the run from `from` on whose granules have `state`, or are holes like it; at most
    /// `to`.
    fn same_state_run(&self, from: u64, to: u64, state: u64) -> u64 {
        if reads_as_hole(state) {
            return self.run_until(from, to, true);
        }
        let whole = ALL_MAPPED * state;
        let mut granule = from;
        while granule < to {
            if granule.is_multiple_of(GRANULES_PER_WORD) && self.word(granule) == whole {
                granule += GRANULES_PER_WORD;
            } else if self.state(granule) == state {
                granule += 1;
            } else {
                return granule;
            }
        }
        to
    }

    /// The granules that `range` touches.
    #[inline]
    fn covering_granules(&self, range: ByteRange) -> (u64, u64) {
        let last = range.end().max(range.pos.saturating_add(1)) - 1;
        (range.pos >> self.granule_shift, (last >> self.granule_shift) + 1)
    }

    /// The granules that lie in `range` completely; the device's end may cut the last one.
    fn contained_granules(&self, range: ByteRange) -> (u64, u64) {
        let granule = 1u64 << self.granule_shift;
        let from = range.pos.div_ceil(granule);
        let size = self.size.load(Ordering::Relaxed);
        let to = if range.end() >= size {
            size.div_ceil(granule)
        } else {
            range.end() >> self.granule_shift
        };
        (from, to.max(from))
    }

    /// `map_extent` for a range of more than one granule.
    #[inline(never)]
    fn map_long_extent(&self, range: ByteRange, intent: Intent) -> Result<Extent, WouldBlock> {
        let (from, to) = self.covering_granules(range);
        // Looked up once: another thread may change it at any time.
        let hole = reads_as_hole(self.state(from));
        let end = self.run_until(from + 1, to, hole);
        match intent {
            Intent::Write if (hole || end < to) && (from..to).any(|at| self.state(at) == HOLE) => {
                Err(WouldBlock)
            }
            Intent::Write if hole || end < to => Ok(self.map_ahead(range)),
            Intent::Write => Ok(Extent::identical(range, range.len, false)),
            Intent::Read => {
                // The end of the last granule may exceed u64::MAX.
                let len = match end < to {
                    true => (end << self.granule_shift) - range.pos,
                    false => range.len,
                };
                Ok(Extent::identical(range, len, hole))
            }
        }
    }

    /// The extent of a write to a range that was, at least in part, allocated ahead; its range is
    /// locked. From now on reads go to the file.
    #[inline(never)]
    fn map_ahead(&self, range: ByteRange) -> Extent {
        self.mark_allocated(range);
        Extent::identical(range, range.len, false)
    }

    /// Applies `change` to each word of the granules `from..to`; its arguments are the word and a
    /// mask with the low bit of each granule concerned.
    fn update(&self, from: u64, to: u64, change: impl Fn(u64, u64) -> u64) {
        let mut granule = from;
        while granule < to {
            let word_end = (granule / GRANULES_PER_WORD + 1) * GRANULES_PER_WORD;
            let end = word_end.min(to);
            let count = end - granule;
            let low = if count == GRANULES_PER_WORD {
                ALL_MAPPED
            } else {
                (ALL_MAPPED & ((1 << (count * 2)) - 1)) << (granule % GRANULES_PER_WORD * 2)
            };
            let index = (granule / GRANULES_PER_LEAF) as usize;
            if index as u64 >= MOST_LEAVES {
                return;
            }
            let leaf = self.leaves.get(index).or_else(|| self.later_leaf(index));
            let all = leaf.map_or(0, |leaf| leaf.all.load(Ordering::Acquire));
            if leaf.is_none_or(|leaf| leaf.words.get().is_none()) && change(all, low) == all {
                // All of it is the same, and stays so.
                granule = (granule / GRANULES_PER_LEAF + 1) * GRANULES_PER_LEAF;
                continue;
            }
            let Some(leaf) = leaf.or_else(|| self.first_later_leaf(index)) else { return };
            let word = &leaf.words()[(granule / GRANULES_PER_WORD % WORDS_PER_LEAF) as usize];
            // An update without a change writes nothing, so CPU caches keep sharing the word.
            let before = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                let then = change(now, low);
                (then != now).then_some(then)
            });
            if self.allocates_ahead
                && let Ok(before) = before
            {
                let grown = ahead_in(change(before, low)).wrapping_sub(ahead_in(before));
                self.ahead_granules.fetch_add(grown, Ordering::Relaxed);
            }
            granule = end;
        }
    }
}

impl BlockMap for AllocationCache {
    #[inline]
    fn map_extent(&self, range: ByteRange, intent: Intent) -> Result<Extent, WouldBlock> {
        let (from, to) = self.covering_granules(range);
        if to - from == 1 {
            let state = self.state(from);
            return match intent {
                Intent::Write if state == HOLE => Err(WouldBlock),
                Intent::Write if state == AHEAD => Ok(self.map_ahead(range)),
                Intent::Write => Ok(Extent::identical(range, range.len, false)),
                Intent::Read => Ok(Extent::identical(range, range.len, reads_as_hole(state))),
            };
        }
        self.map_long_extent(range, intent)
    }

    /// Invalidates a hole before it is written. Otherwise one read could return the new bytes of
    /// the file, and a later one the cached hole's zeros (C18).
    fn map_extent_blocking(&self, range: ByteRange, intent: Intent) -> Extent {
        self.map_extent(range, intent).unwrap_or_else(|WouldBlock| {
            self.invalidate(range);
            Extent::identical(range, range.len, false)
        })
    }

    fn is_mapped(&self, range: ByteRange) -> bool {
        let (from, to) = self.covering_granules(range);
        (from..to).all(|granule| self.state(granule) & MAPPED != 0)
    }

    #[inline]
    fn mark_allocated(&self, range: ByteRange) {
        let (from, to) = self.covering_granules(range);
        let one_word = (from ^ (to - 1)) / GRANULES_PER_WORD == 0;
        if one_word && self.run_mapped(from, to) || !self.enabled {
            return;
        }
        self.update(from, to, |now, low| (now & !(low * 3)) | (low * MAPPED));
    }

    fn invalidate(&self, range: ByteRange) {
        if self.enabled {
            let (from, to) = self.covering_granules(range);
            self.update(from, to, |now, low| now & !(low * 3));
        }
    }

    fn mark_hole(&self, range: ByteRange) {
        if self.enabled {
            let (from, to) = self.contained_granules(range);
            self.update(from, to, |now, low| {
                let unknown = low & !(now & low) & !(now >> 1 & low);
                now | (unknown * HOLE)
            });
        }
    }

    fn resize(&self, size: u64) {
        if self.size.load(Ordering::Relaxed) != u64::MAX {
            self.size.store(size, Ordering::Relaxed);
        }
        self.invalidate(ByteRange::new(0, u64::MAX));
    }

    fn caches_holes(&self) -> bool {
        self.enabled
    }

    fn cached_extents(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> bool {
        let (from, to) = self.covering_granules(range);
        let (mut granule, mut pos) = (from, range.pos);
        let end = extents.len() + limit;
        while granule < to && extents.len() < end {
            let state = self.state(granule);
            if state == UNKNOWN {
                return false;
            }
            granule = self.same_state_run(granule + 1, to, state);
            let end_pos = (granule << self.granule_shift).min(range.end());
            extents.push(ExtentStatus::top(end_pos - pos, reads_as_hole(state)));
            pos = end_pos;
        }
        true
    }

    fn ahead(&self) -> Option<&dyn AheadMap> {
        self.allocates_ahead.then_some(self as &dyn AheadMap)
    }
}

/// Whether a granule of this state reads as zeros without I/O.
#[inline]
fn reads_as_hole(state: u64) -> bool {
    state & HOLE != 0
}

/// The number of granules in state `AHEAD` in a word.
fn ahead_in(word: u64) -> u64 {
    (word & (word >> 1) & ALL_MAPPED).count_ones().into()
}

impl AllocationCache {
    /// Whether the granules, all in one word, are marked mapped.
    #[inline]
    fn run_mapped(&self, from: u64, to: u64) -> bool {
        let count = to - from;
        let bits = self.word(from) >> (from % GRANULES_PER_WORD * 2);
        let mask = if count == GRANULES_PER_WORD { u64::MAX } else { (1 << (count * 2)) - 1 };
        bits & mask == ALL_MAPPED & mask
    }
}

#[cfg(test)]
mod tests;
