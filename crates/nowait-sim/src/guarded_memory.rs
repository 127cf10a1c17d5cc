//! The memory of a request in flight, surrounded by poison.
//!
//! Invariant: the pieces of a request do not overlap, and the bytes around them are poison, so that
//! a stray write is detected.

use nowait::IoSegment;
use nowait::sim::Random;

use crate::pattern;
use crate::pattern::Value;
use crate::scenario::MAX_REQUEST_BYTES;

/// The fill byte of memory that no request has written to.
const POISON: u8 = 0xee;
const PAGE_BYTES: usize = 4096;
/// The limit of pieces of one request.
const MAX_PIECES: usize = 8;
/// The largest number of bytes in the gaps around a request's pieces.
const GAPS_BYTES: usize = (2 * MAX_PIECES + 2) * PAGE_BYTES;
const POISONED: [u8; PAGE_BYTES] = [POISON; PAGE_BYTES];

/// The offset and the length of a piece.
type Piece = (usize, usize);

/// The memory of one request at a time.
#[derive(Default)]
pub struct GuardedMemory {
    bytes: Vec<u8>,
    start: usize,
    pieces: Vec<Piece>,
}

impl GuardedMemory {
    /// Cuts `len` bytes into `pieces`, at most 8, at random: at offsets that storage accepts
    /// (multiples of `block`, at addresses of `align`) or anywhere. False if `len` is too large.
    pub fn cut(
        &mut self,
        len: u64,
        pieces: u8,
        block: u64,
        align: u32,
        random: &mut Random,
    ) -> bool {
        if len > MAX_REQUEST_BYTES {
            return false;
        }
        self.poison();
        self.pieces.clear();
        let room = len as usize + GAPS_BYTES;
        if self.bytes.len() < room + PAGE_BYTES {
            self.bytes = vec![POISON; room + PAGE_BYTES];
            self.start = self.bytes.as_ptr().align_offset(PAGE_BYTES);
        }
        let fine = random.below(3) == 0;
        let (unit, step) = if fine { (1, 1) } else { (block as usize, align as usize) };
        let (mut left, mut at) = (len as usize, 0);
        for n in (0..pieces.clamp(1, MAX_PIECES as u8)).rev() {
            let max_units = left / unit;
            let len =
                if n == 0 { left } else { random.below(max_units as u64 + 1) as usize * unit };
            // A gap, or none: then the pieces are adjacent.
            at = (at + random.below(2) as usize * PAGE_BYTES).next_multiple_of(step);
            at += usize::from(fine) * random.below(2) as usize;
            self.pieces.push((self.start + at, len));
            (left, at) = (left - len, at + len);
        }
        true
    }

    /// The pieces as segments for an engine.
    pub fn segments(&mut self) -> Vec<IoSegment> {
        let base = self.bytes.as_mut_ptr();
        let segment = |&(at, len): &Piece| IoSegment { base: base.wrapping_add(at), len };
        self.pieces.iter().map(segment).collect()
    }

    /// Fills the pieces with the bytes of `value` from `pos` on.
    pub fn fill(&mut self, mut pos: u64, value: Value) {
        for &(at, len) in &self.pieces {
            if let Some(bytes) = self.bytes.get_mut(at..at + len) {
                pattern::fill(bytes, pos, value);
            }
            pos += len as u64;
        }
    }

    fn poison(&mut self) {
        for &(at, len) in &self.pieces {
            if let Some(bytes) = self.bytes.get_mut(at..at + len) {
                bytes.fill(POISON);
            }
        }
    }

    /// The first `count` bytes of the pieces.
    pub fn gather(&self, count: u64, to: &mut Vec<u8>) {
        to.clear();
        for &(at, len) in &self.pieces {
            let len = len.min(count as usize - to.len());
            to.extend_from_slice(self.bytes.get(at..at + len).unwrap_or_default());
        }
    }

    /// Whether only the first `count` bytes of the pieces were written, up to 64 bytes beyond the
    /// last written piece (C18).
    pub fn is_untouched_beyond(&self, count: u64) -> bool {
        let (mut left, mut from) = (count as usize, self.start);
        let poisoned = |from: usize, to: usize| {
            let gap = self.bytes.get(from..to);
            gap.is_some_and(|gap| gap.chunks(PAGE_BYTES).all(|part| POISONED.starts_with(part)))
        };
        for &(at, len) in &self.pieces {
            let written = len.min(left);
            left -= written;
            // Adjacent pieces have no gap.
            if at > from && !poisoned(from, at) {
                return false;
            }
            from = at + written;
        }
        poisoned(from, from + 64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_hold_all_bytes_and_a_stray_write_is_detected() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut memory = GuardedMemory::default();
            assert!(memory.cut(8192, 1 + (seed % 8) as u8, 512, 4, &mut random));
            assert_eq!(memory.segments().iter().map(|s| s.len).sum::<usize>(), 8192);
            assert!(memory.is_untouched_beyond(0));
            memory.fill(512, 7);
            let mut all = Vec::new();
            memory.gather(8192, &mut all);
            assert!(pattern::matches(&all, 512, 7));
            assert!(memory.is_untouched_beyond(8192) && !memory.is_untouched_beyond(8000));
            let (at, len) = memory.pieces[memory.pieces.len() - 1];
            memory.bytes[at + len] = 1;
            assert!(!memory.is_untouched_beyond(8192));
        }
    }
}
