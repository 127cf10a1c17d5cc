//! Bits of a part of a disk, one for each granule, that any number of threads set, clear and read without locks.
//!
//! Invariant: a granule is dirty if its own bit is set or that of its chunk. A bit that is set after a clearing has
//! ended stays set. A range of any length is set by at most some thousand stores, whatever a client asks for.

use std::collections::TryReserveError;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Granules of a word.
const WORD: u64 = u64::BITS as u64;
/// Granules of a chunk, which one bit stands for where a long range is set.
pub(super) const CHUNK: u64 = 64 * WORD;

/// The bits of some granules, a multiple of [`CHUNK`].
pub(super) struct GranuleBits {
    words: Box<[AtomicU64]>,
    /// A bit for each chunk, all of whose granules are dirty, whatever their own bits are.
    full: Box<[AtomicU64]>,
}

/// Bytes of memory for the bits of `count` granules, the bits of chunks not counted.
pub(super) const fn bytes_for(count: u64) -> u64 {
    count.div_ceil(CHUNK) * (CHUNK / 8)
}

impl GranuleBits {
    /// Bits of at least `count` granules, none of which is dirty.
    ///
    /// # Errors
    /// There is not enough memory.
    pub(super) fn new(count: u64) -> Result<Self, TryReserveError> {
        let chunks = count.div_ceil(CHUNK);
        Ok(Self { words: zeros(chunks * (CHUNK / WORD))?, full: zeros(chunks.div_ceil(WORD))? })
    }

    /// The number of granules.
    #[inline]
    pub(super) fn len(&self) -> u64 {
        self.words.len() as u64 * WORD
    }

    /// Whether the granule's own bit is set. The usual write finds it so, and has to change no memory that other threads
    /// read. It precedes every clearing that it does not see, in the one order of all these operations.
    #[inline(always)]
    pub(super) fn has(&self, granule: u64) -> bool {
        load(&self.words, granule / WORD) & 1 << (granule % WORD) != 0
    }

    /// Marks the granules of `range`, which is not empty and within these, as dirty.
    pub(super) fn set(&self, range: Range<u64>) {
        let (begin, end) = (range.start.div_ceil(CHUNK), range.end / CHUNK);
        if begin >= end {
            return set(&self.words, range);
        }
        set(&self.full, begin..end);
        set(&self.words, range.start..begin * CHUNK);
        set(&self.words, end * CHUNK..range.end);
    }

    /// Marks all granules from `from` on as clean. Meanwhile none before it is found clean that is not.
    pub(super) fn clear_from(&self, from: u64) {
        let chunk = from / CHUNK;
        if !from.is_multiple_of(CHUNK) && self.is_full(chunk) {
            set(&self.words, chunk * CHUNK..from);
        }
        // First the chunks: a bit that is set meanwhile stays, or was set before.
        clear(&self.full, chunk);
        clear(&self.words, from);
    }

    /// Marks the granules of `range`, which are among these, as clean. Meanwhile none outside it is found clean that is
    /// not.
    pub(super) fn clear_range(&self, range: Range<u64>) {
        for chunk in range.start / CHUNK..range.end.div_ceil(CHUNK) {
            let (begin, end) = (chunk * CHUNK, (chunk + 1) * CHUNK);
            if !self.is_full(chunk) {
                continue;
            }
            set(&self.words, begin..range.start.clamp(begin, end));
            set(&self.words, range.end.clamp(begin, end)..end);
            if let Some(word) = self.full.get((chunk / WORD) as usize) {
                word.fetch_and(!(1 << (chunk % WORD)), SeqCst);
            }
        }
        let mut at = range.start;
        while at < range.end {
            let first = at / WORD * WORD;
            if let Some(word) = self.words.get((at / WORD) as usize) {
                word.fetch_and(!mask(at - first, range.end - first), SeqCst);
            }
            at = first + WORD;
        }
    }

    /// The first granule from `from` on that is dirty, or clean if not `dirty`; the number of granules if there is
    /// none. A search that has looked at more than `words` words ends where it is.
    pub(super) fn find(&self, from: u64, dirty: bool, words: &mut u64) -> u64 {
        let mut at = from;
        while at < self.len() && *words > 0 {
            *words -= 1;
            let chunk = at / CHUNK;
            let is_full = self.is_full(chunk);
            if is_full && !dirty {
                at = (chunk + 1) * CHUNK;
                continue;
            }
            let word = if is_full { u64::MAX } else { load(&self.words, at / WORD) };
            let wanted = if dirty { word } else { !word } & (u64::MAX << (at % WORD));
            if wanted != 0 {
                return at / WORD * WORD + u64::from(wanted.trailing_zeros());
            }
            at = (at / WORD + 1) * WORD;
        }
        at
    }

    /// The number of dirty granules.
    pub(super) fn count(&self) -> u64 {
        self.snapshot(0).map(|word| u64::from(word.count_ones())).sum()
    }

    /// The words from number `first` on, those of whole chunks filled in: as bits of a file, the lowest bit first.
    pub(super) fn snapshot(&self, first: u64) -> impl Iterator<Item = u64> {
        let words = self.words.get(first as usize..).unwrap_or_default();
        words.iter().zip(first..).map(|(word, number)| {
            let is_full = self.is_full(number * WORD / CHUNK);
            if is_full { u64::MAX } else { word.load(SeqCst) }
        })
    }

    /// Marks the granules of word `number` as dirty whose bits are set in `bits`.
    pub(super) fn set_word(&self, number: u64, bits: u64) {
        if let Some(word) = self.words.get(number as usize) {
            word.fetch_or(bits, SeqCst);
        }
    }

    fn is_full(&self, chunk: u64) -> bool {
        load(&self.full, chunk / WORD) & 1 << (chunk % WORD) != 0
    }
}

fn zeros(count: u64) -> Result<Box<[AtomicU64]>, TryReserveError> {
    let mut words = Vec::new();
    words.try_reserve_exact(count as usize)?;
    words.resize_with(count as usize, AtomicU64::default);
    Ok(words.into_boxed_slice())
}

#[inline(always)]
fn load(words: &[AtomicU64], number: u64) -> u64 {
    words.get(number as usize).map_or(0, |word| word.load(SeqCst))
}

/// The bits of a word from `from` on, before `to` if that is in it.
const fn mask(from: u64, to: u64) -> u64 {
    let up_to = if to >= WORD { u64::MAX } else { (1 << to) - 1 };
    up_to & u64::MAX << from
}

/// Sets the bits of `range`.
fn set(words: &[AtomicU64], range: Range<u64>) {
    let mut at = range.start;
    while at < range.end {
        let first = at / WORD * WORD;
        let mask = mask(at - first, range.end - first);
        // Order of the loads: see `has`.
        if let Some(word) = words.get((at / WORD) as usize)
            && word.load(SeqCst) & mask != mask
        {
            word.fetch_or(mask, SeqCst);
        }
        at = first + WORD;
    }
}

/// Clears all bits from `from` on.
fn clear(words: &[AtomicU64], from: u64) {
    let first = (from / WORD) as usize;
    if let Some(word) = words.get(first) {
        word.fetch_and(!mask(from % WORD, WORD), SeqCst);
    }
    words.iter().skip(first + 1).for_each(|word| word.store(0, SeqCst));
}

#[cfg(test)]
mod tests {
    use nowait_testkit::Random;

    use super::*;

    const ALL: u64 = 70 * CHUNK;

    fn dirty(bits: &GranuleBits) -> Vec<bool> {
        let word = |word: u64| (0..WORD).map(move |bit| word & 1 << bit != 0);
        bits.snapshot(0).flat_map(word).collect()
    }

    #[test]
    fn bits_are_those_of_a_list_of_booleans() {
        let mut random = Random::from_seed(nowait_testkit::seed());
        let bits = GranuleBits::new(ALL - 5).unwrap();
        assert_eq!(bits.len(), ALL);
        let mut model = vec![false; ALL as usize];
        for step in 0..300 {
            let from = random.below(ALL);
            let near = [3, CHUNK, 3 * CHUNK, ALL][random.below(4) as usize];
            let to = (from + 1 + random.below(near)).min(ALL);
            match step % 10 {
                9 => {
                    bits.clear_from(from);
                    model[from as usize..].fill(false);
                }
                6..9 => {
                    bits.clear_range(from..to);
                    model[from as usize..to as usize].fill(false);
                }
                _ => {
                    bits.set(from..to);
                    model[from as usize..to as usize].fill(true);
                }
            }
            let wanted = random.below(2) == 0;
            let after = model[from as usize..].iter().position(|dirty| *dirty == wanted);
            let after = after.map_or(ALL, |after| from + after as u64);
            assert_eq!(bits.find(from, wanted, &mut u64::MAX.clone()), after);
            assert_eq!(bits.count(), model.iter().filter(|dirty| **dirty).count() as u64);
        }
        assert_eq!(dirty(&bits), model);
        for first in [0, 1, CHUNK / WORD, ALL / WORD, ALL / WORD + 1] {
            assert!(bits.snapshot(first).eq(bits.snapshot(0).skip(first as usize)), "from {first}");
        }
    }

    #[test]
    fn a_search_ends_after_the_words_that_it_may_look_at() {
        let bits = GranuleBits::new(ALL).unwrap();
        assert_eq!(bits.find(7, true, &mut 2), 128);
        assert_eq!(bits.find(7, true, &mut 0), 7);
        bits.set(0..ALL);
        assert_eq!(bits.find(7, false, &mut 2), 2 * CHUNK);
        assert_eq!(bits.find(0, false, &mut 1000), ALL);
    }

    #[test]
    fn the_bits_before_a_cleared_part_of_a_whole_chunk_stay_set() {
        let bits = GranuleBits::new(2 * CHUNK).unwrap();
        bits.set(0..2 * CHUNK);
        bits.clear_from(CHUNK + 70);
        assert_eq!(bits.count(), CHUNK + 70);
        assert_eq!(bits.find(0, false, &mut 1000), CHUNK + 70);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        assert!(GranuleBits::new(u64::MAX / 2).is_err());
    }
}
