//! Which storage backs a range, and what is remembered about it.
//!
//! Invariant of the hints: a granule is marked a hole only when it was seen to be one after the
//! last write to it was completed, and is none any more when the next one begins; "mapped" may be
//! wrong and then costs only speed. So a hint never hides data (C14, C18, C38).
//! Knows: error, io, image, storage. Known by: disk, blocking, simple, generic, engine. Kernel counterpart:
//! iomap_begin and iomap_end (fs/iomap/iter.c).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Range;
use crate::image::Image;
use crate::io::Span;
use crate::storage::Storage;

/// What a mapping is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// The range will be read.
    Read,
    /// The range will be written.
    Write,
}

/// What backs the first `len` bytes of a range that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Which file it lies in: 0 is the one that is written to.
    pub file: u16,
    /// Where its first byte is in that file, in bytes; if the range that was asked for is
    /// aligned for direct I/O, so is this.
    pub pos: u64,
    /// Bytes, at least 1 and at most what was asked for.
    pub len: u64,
    /// Whether it is known to read as zeros without I/O.
    pub hole: bool,
}

impl Extent {
    /// `range` at the same place of the file.
    #[inline]
    pub(crate) const fn identical(range: Range, len: u64, hole: bool) -> Self {
        Self { file: 0, pos: range.pos, len, hole }
    }
}

/// Why a mapping was not given at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WouldBlock;

/// A mapping of a device's bytes to a file's.
pub trait Map: Send + Sync + 'static {
    /// The extent at the start of `range`, without waiting. A write to a range that is known to
    /// need allocation is `WouldBlock` (C36).
    ///
    /// # Errors
    /// [`WouldBlock`] when only a thread that may block can tell.
    fn begin(&self, range: Range, intent: Intent) -> Result<Extent, WouldBlock>;

    /// As [`Map::begin`], on a thread that may block; for a write, with its range held. A file
    /// system allocates by itself when it is written to; an image format is never asked, because it
    /// serves such requests as a whole.
    fn begin_blocking(&self, range: Range, intent: Intent) -> Extent {
        self.begin(range, intent).unwrap_or(Extent::identical(range, range.len, false))
    }

    /// Whether all of `range` is known to be mapped, so that a write to it allocates nothing.
    fn is_mapped(&self, range: Range) -> bool;

    /// A write to `range` has ended, well or not.
    #[inline]
    fn written(&self, _range: Range) {}

    /// `range` is about to lose its storage.
    fn forget(&self, _range: Range) {}

    /// `range` was seen to be a hole, or made one, and was not written since it was last
    /// forgotten.
    fn hole(&self, _range: Range) {}

    /// Whether [`Map::hole`] is kept. While a hole is being made or remembered, nobody writes there.
    fn remembers_holes(&self) -> bool {
        false
    }

    /// Appends what is known from the start of `range` on, in order and at most `limit` spans;
    /// false when it comes to something that is not known.
    fn known(&self, _range: Range, _limit: usize, _spans: &mut Vec<Span>) -> bool {
        false
    }

    /// What serves requests that must wait, where that is not the file system: an image format
    /// that allocates by itself. [`Map::begin`] then gives out only what is mapped, and nothing
    /// is given out for a range while it is allocated.
    #[inline]
    fn image(&self) -> Option<&dyn Image> {
        None
    }
}

/// Every byte is backed by the byte at the same place: block devices, preallocated files.
#[derive(Clone, Copy, Debug, Default)]
pub struct Identity;

impl Map for Identity {
    #[inline]
    fn begin(&self, range: Range, _: Intent) -> Result<Extent, WouldBlock> {
        Ok(Extent::identical(range, range.len, false))
    }

    fn is_mapped(&self, _: Range) -> bool {
        true
    }

    fn known(&self, range: Range, _: usize, spans: &mut Vec<Span>) -> bool {
        spans.push(Span::on_top(range.len, false));
        true
    }
}

/// State of a granule, two bits each.
const UNKNOWN: u64 = 0;
const MAPPED: u64 = 1;
const HOLE: u64 = 2;
const ALL_MAPPED: u64 = 0x5555_5555_5555_5555;
const ALL_HOLES: u64 = ALL_MAPPED << 1;
const GRANULES_PER_WORD: u64 = 32;
const WORDS_PER_CHUNK: u64 = 512;
const GRANULES_PER_CHUNK: u64 = GRANULES_PER_WORD * WORDS_PER_CHUNK;
const MIN_GRANULE_SHIFT: u32 = 12;
/// Granules at most: with two bits each, 16 MiB of hints for the largest device.
const MAX_GRANULES: u64 = 1 << 26;
/// Extents that are asked for at open; what lies behind them is learnt later.
const SCAN_EXTENTS: usize = 1 << 14;

type Chunk = Box<[AtomicU64]>;

/// The hint cache of a file: two bits for each granule of 4 KiB or more, in chunks that are
/// allocated when something in them becomes known.
pub struct Extents {
    chunks: Box<[OnceLock<Chunk>]>,
    granule_shift: u32,
    size: u64,
    enabled: bool,
}

impl Extents {
    /// For a device of `size` bytes of which nothing is known. With `enabled` false it never
    /// learns (the switch `hint`).
    #[must_use]
    pub fn new(size: u64, enabled: bool) -> Self {
        let mut granule_shift = MIN_GRANULE_SHIFT;
        while size >> granule_shift > MAX_GRANULES {
            granule_shift += 1;
        }
        let chunks = (size >> granule_shift) / GRANULES_PER_CHUNK + 1;
        let chunks = (0..chunks).map(|_| OnceLock::new()).collect();
        Self { chunks, granule_shift, size, enabled }
    }

    /// Learns what lseek(2) with `SEEK_DATA` and `SEEK_HOLE` tells, up to a bounded number of
    /// extents. A file system that cannot tell leaves everything unknown.
    pub fn scan(&self, file: &Storage) {
        if !self.enabled {
            return;
        }
        let mut pos = 0;
        let mut spans = Vec::new();
        while pos < self.size {
            spans.clear();
            let range = Range::new(pos, self.size - pos);
            if file.spans(range, SCAN_EXTENTS, &mut spans).is_err() {
                return;
            }
            for span in &spans {
                let range = Range::new(pos, span.len);
                if span.hole {
                    self.hole(range)
                } else {
                    self.written(range)
                }
                pos += span.len;
            }
            if spans.len() >= SCAN_EXTENTS {
                return;
            }
        }
    }

    #[inline]
    fn word(&self, granule: u64) -> u64 {
        let chunk =
            self.chunks.get((granule / GRANULES_PER_CHUNK) as usize).and_then(OnceLock::get);
        chunk.map_or(UNKNOWN, |chunk| {
            let word = granule / GRANULES_PER_WORD % WORDS_PER_CHUNK;
            chunk[word as usize].load(Ordering::Acquire)
        })
    }

    #[inline]
    fn state(&self, granule: u64) -> u64 {
        self.word(granule) >> (granule % GRANULES_PER_WORD * 2) & 3
    }

    /// The first granule from `from` on, below `to`, whose being a hole is not `hole`.
    #[inline]
    fn run(&self, from: u64, to: u64, hole: bool) -> u64 {
        let whole = if hole { ALL_HOLES } else { ALL_MAPPED };
        let mut granule = from;
        while granule < to {
            if granule.is_multiple_of(GRANULES_PER_WORD) && self.word(granule) == whole {
                granule += GRANULES_PER_WORD;
                continue;
            }
            if (self.state(granule) == HOLE) != hole {
                return granule;
            }
            granule += 1;
        }
        to
    }

    /// The first granule from `from` on, below `to`, whose state is not that of `from`.
    fn alike(&self, from: u64, to: u64) -> u64 {
        let state = self.state(from);
        let whole = ALL_MAPPED * state;
        let mut granule = from + 1;
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
    fn touched(&self, range: Range) -> (u64, u64) {
        let last = range.end().max(range.pos + 1) - 1;
        (range.pos >> self.granule_shift, (last >> self.granule_shift) + 1)
    }

    /// The granules that lie in `range` as a whole; the last one may end at the device's end.
    fn inside(&self, range: Range) -> (u64, u64) {
        let granule = 1u64 << self.granule_shift;
        let from = range.pos.div_ceil(granule);
        let to = if range.end() >= self.size {
            self.size.div_ceil(granule)
        } else {
            range.end() >> self.granule_shift
        };
        (from, to.max(from))
    }

    /// `begin` for a range of more than one granule.
    #[inline(never)]
    fn begin_long(&self, range: Range, intent: Intent) -> Result<Extent, WouldBlock> {
        let (from, to) = self.touched(range);
        let hole = self.state(from) == HOLE;
        let end = self.run(from, to, hole);
        match intent {
            Intent::Write if hole || end < to => Err(WouldBlock),
            Intent::Write => Ok(Extent::identical(range, range.len, false)),
            Intent::Read => {
                let len = (end << self.granule_shift).min(range.end()) - range.pos;
                Ok(Extent::identical(range, len, hole))
            }
        }
    }

    /// Applies `change` to each word of the granules `from..to`; it gets the word and a mask with
    /// the low bit of each granule concerned.
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
            let Some(chunk) = self.chunks.get((granule / GRANULES_PER_CHUNK) as usize) else {
                return;
            };
            let chunk =
                chunk.get_or_init(|| (0..WORDS_PER_CHUNK).map(|_| AtomicU64::new(0)).collect());
            let word = &chunk[(granule / GRANULES_PER_WORD % WORDS_PER_CHUNK) as usize];
            // An update that changes nothing writes nothing: the word stays shared in the caches.
            let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                let then = change(now, low);
                (then != now).then_some(then)
            });
            granule = end;
        }
    }
}

impl Map for Extents {
    #[inline]
    fn begin(&self, range: Range, intent: Intent) -> Result<Extent, WouldBlock> {
        let (from, to) = self.touched(range);
        let hole = self.state(from) == HOLE;
        if to - from == 1 {
            return match intent {
                Intent::Write if hole => Err(WouldBlock),
                _ => Ok(Extent::identical(range, range.len, hole)),
            };
        }
        self.begin_long(range, intent)
    }

    /// A hole that is about to be written is forgotten first: a read that finds the new bytes in the
    /// file would otherwise come before one that takes the hint's word for zeros (C18).
    fn begin_blocking(&self, range: Range, intent: Intent) -> Extent {
        self.begin(range, intent).unwrap_or_else(|WouldBlock| {
            self.forget(range);
            Extent::identical(range, range.len, false)
        })
    }

    fn is_mapped(&self, range: Range) -> bool {
        let (from, to) = self.touched(range);
        (from..to).all(|granule| self.state(granule) == MAPPED)
    }

    #[inline]
    fn written(&self, range: Range) {
        let (from, to) = self.touched(range);
        let one_word = (from ^ (to - 1)) / GRANULES_PER_WORD == 0;
        if one_word && self.run_mapped(from, to) || !self.enabled {
            return;
        }
        self.update(from, to, |now, low| (now & !(low * 3)) | (low * MAPPED));
    }

    fn forget(&self, range: Range) {
        if self.enabled {
            let (from, to) = self.touched(range);
            self.update(from, to, |now, low| now & !(low * 3));
        }
    }

    fn hole(&self, range: Range) {
        if self.enabled {
            let (from, to) = self.inside(range);
            self.update(from, to, |now, low| {
                let unknown = low & !(now & low) & !(now >> 1 & low);
                now | (unknown * HOLE)
            });
        }
    }

    fn remembers_holes(&self) -> bool {
        self.enabled
    }

    fn known(&self, range: Range, limit: usize, spans: &mut Vec<Span>) -> bool {
        let (from, to) = self.touched(range);
        let (mut granule, mut pos) = (from, range.pos);
        let end = spans.len() + limit;
        while granule < to && spans.len() < end {
            let state = self.state(granule);
            if state == UNKNOWN {
                return false;
            }
            granule = self.alike(granule, to);
            let end_pos = (granule << self.granule_shift).min(range.end());
            spans.push(Span::on_top(end_pos - pos, state == HOLE));
            pos = end_pos;
        }
        true
    }
}

impl Extents {
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
