//! The regions of a disk that are dirty on storage in every bitmap, so that a write to them has to store no bit first.
//!
//! Invariant: a region is open or resting only while all of its bits are on storage. A write to an open one looks at nothing but
//! that; a resting one, to which none was admitted for a while, is opened by the next one without I/O, or closed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nowait::ByteRange;
use nowait::internal::is_simulated;

/// The logarithm of the bytes of a region: 16 MiB; small in simulations and tests, so that their disks have several.
const SHIFT: u32 = 24;
/// The logarithm of the bytes of a small one.
pub(crate) const SMALL_SHIFT: u32 = 15;
const WORD: u64 = u64::BITS as u64;
/// Words of regions that are closed together: 1024 regions.
const BATCH_WORDS: usize = 16;

/// Which regions of a disk are open.
pub(crate) struct Regions {
    /// Whether a bitmap records; without one, all regions are open.
    is_recording: AtomicBool,
    open: Box<[AtomicU64]>,
    /// Changed only by the holder of the lock for writing bits.
    resting: Box<[AtomicU64]>,
    shift: u32,
}

/// Some regions, by their numbers.
pub(crate) struct SomeRegions {
    /// Ascending.
    words: Vec<(usize, u64)>,
    shift: u32,
}

impl SomeRegions {
    pub(crate) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Takes out those that `range` touches.
    pub(crate) fn take_out(&mut self, range: ByteRange) {
        if range.len == 0 {
            return;
        }
        let (first, last) = numbers(range, self.shift);
        let from = self.words.partition_point(|(word, _)| (*word as u64) < first / WORD);
        for (word, bits) in self.words.iter_mut().skip(from) {
            let begin = *word as u64 * WORD;
            if begin > last {
                break;
            }
            (first.max(begin)..=last.min(begin + WORD - 1))
                .for_each(|it| *bits &= !(1 << (it - begin)));
        }
    }

    /// Takes some of the first ones; `None` if there are no more.
    pub(crate) fn split_batch(&mut self) -> Option<Self> {
        let count = self.words.len().min(BATCH_WORDS);
        let words: Vec<_> = self.words.drain(..count).collect();
        (count > 0).then_some(Self { words, shift: self.shift })
    }

    /// Their ranges of the disk, adjacent ones as one.
    pub(crate) fn ranges(&self) -> Vec<ByteRange> {
        let mut ranges: Vec<ByteRange> = Vec::new();
        for (word, bits) in &self.words {
            for bit in (0..WORD).filter(|bit| bits & 1 << bit != 0) {
                let pos = (*word as u64 * WORD + bit) << self.shift;
                match ranges.last_mut() {
                    Some(last) if last.end() == pos => last.len += 1 << self.shift,
                    _ => ranges.push(ByteRange::new(pos, 1 << self.shift)),
                }
            }
        }
        ranges
    }
}

/// The first and the last region of `range`, which is not empty.
#[inline(always)]
fn numbers(range: ByteRange, shift: u32) -> (u64, u64) {
    let last = range.pos.saturating_add(range.len.saturating_sub(1));
    (range.pos >> shift, last >> shift)
}

impl Regions {
    /// The regions of a disk of `size` bytes, none of which is open.
    pub(crate) fn new(size: u64) -> Self {
        let shift = if cfg!(test) || is_simulated() { SMALL_SHIFT } else { SHIFT };
        let words = size.div_ceil(1 << shift).div_ceil(WORD);
        let none = || (0..words).map(|_| AtomicU64::new(0)).collect();
        Self { is_recording: AtomicBool::new(false), open: none(), resting: none(), shift }
    }

    /// Whether `range` may be written to.
    #[inline(always)]
    pub(crate) fn admit(&self, range: ByteRange) -> bool {
        !self.is_recording.load(Ordering::Acquire) || self.are_open(range)
    }

    /// Bytes of a region.
    pub(crate) const fn bytes(&self) -> u64 {
        1 << self.shift
    }

    /// Whether a bitmap records.
    pub(crate) fn is_recording(&self) -> bool {
        self.is_recording.load(Ordering::Acquire)
    }

    /// Whether all regions of `range` are open.
    #[inline]
    fn are_open(&self, range: ByteRange) -> bool {
        let (first, last) = numbers(range, self.shift);
        (first..=last).all(|region| self.is_open(region))
    }

    #[inline]
    fn is_open(&self, region: u64) -> bool {
        let word = self.open.get((region / WORD) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) & 1 << (region % WORD) != 0)
    }

    /// The first run of regions of `range` that are not open, as a range of bytes.
    pub(crate) fn first_closed(&self, range: ByteRange) -> Option<ByteRange> {
        let (first, last) = numbers(range, self.shift);
        let begin = (first..=last).find(|&region| !self.is_open(region))?;
        let end = (begin..=last).find(|&region| self.is_open(region)).unwrap_or(last + 1);
        Some(ByteRange::new(begin << self.shift, (end - begin) << self.shift))
    }

    /// The regions of `range` are open from now on.
    pub(crate) fn open(&self, range: ByteRange) {
        let (first, last) = numbers(range, self.shift);
        for region in first..=last {
            let (number, bit) = ((region / WORD) as usize, 1 << (region % WORD));
            if let (Some(open), Some(resting)) = (self.open.get(number), self.resting.get(number)) {
                resting.fetch_and(!bit, Ordering::Relaxed);
                open.fetch_or(bit, Ordering::Release);
            }
        }
    }

    /// Opens those regions of `range` that rest.
    pub(crate) fn open_resting(&self, range: ByteRange) {
        let (first, last) = numbers(range, self.shift);
        let rests = |region: &u64| {
            let word = self.resting.get((region / WORD) as usize);
            word.is_some_and(|word| word.load(Ordering::Relaxed) & 1 << (region % WORD) != 0)
        };
        for region in (first..=last).filter(rests) {
            self.open(ByteRange::new(region << self.shift, 1 << self.shift));
        }
    }

    /// All open regions rest from now on: the next write to one is admitted by [`Regions::open_resting`] only.
    pub(crate) fn rest(&self) {
        for (open, resting) in self.open.iter().zip(&self.resting) {
            let bits = open.swap(0, Ordering::AcqRel);
            resting.fetch_or(bits, Ordering::Relaxed);
        }
    }

    /// The regions that rest.
    pub(crate) fn resting(&self) -> SomeRegions {
        let words = self.resting.iter().map(|word| word.load(Ordering::Relaxed));
        let words = (0..).zip(words).filter(|(_, bits)| *bits != 0).collect();
        SomeRegions { words, shift: self.shift }
    }

    /// Closes those of `some` that rest still, and takes the others out.
    pub(crate) fn close(&self, some: &mut SomeRegions) {
        for (number, bits) in &mut some.words {
            let Some(resting) = self.resting.get(*number) else { continue };
            *bits &= resting.fetch_and(!*bits, Ordering::Relaxed);
        }
        some.words.retain(|(_, bits)| *bits != 0);
    }

    /// No region is open any more. No request is in flight.
    pub(crate) fn close_all(&self, is_recording: bool) {
        let all = self.open.iter().chain(&self.resting);
        all.for_each(|word| word.store(0, Ordering::Release));
        self.is_recording.store(is_recording, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION: u64 = 1 << SMALL_SHIFT;

    #[test]
    fn a_range_is_admitted_when_all_of_its_regions_are_open() {
        let regions = Regions::new(100 * REGION + 1);
        let range = |first: u64, end: u64| ByteRange::new(first, end - first);
        assert!(regions.admit(range(0, 100 * REGION)), "nothing records");
        regions.close_all(true);
        assert!(!regions.admit(range(0, 1)));
        assert_eq!(regions.first_closed(range(5, 6)), Some(range(0, REGION)));
        regions.open(range(63 * REGION, 65 * REGION));
        assert!(regions.admit(range(63 * REGION, 65 * REGION)));
        assert!(!regions.admit(range(63 * REGION - 1, 65 * REGION)));
        assert!(!regions.admit(range(63 * REGION, 65 * REGION + 1)));
        let found = regions.first_closed(range(62 * REGION + 1, 70 * REGION));
        assert_eq!(found, Some(range(62 * REGION, 63 * REGION)));
        let found = regions.first_closed(range(64 * REGION, 65 * REGION + 1));
        assert_eq!(found, Some(range(65 * REGION, 66 * REGION)));
        regions.open(range(100 * REGION, 100 * REGION + 1));
        assert!(regions.admit(range(100 * REGION, 100 * REGION + 1)), "the last one is short");
        regions.close_all(true);
        assert!(!regions.admit(range(64 * REGION, 64 * REGION + 1)));
        regions.close_all(false);
        assert!(regions.admit(range(0, 1)));
    }
    #[test]
    fn a_region_that_no_write_was_admitted_to_since_it_rests_is_closed() {
        let regions = Regions::new(200 * REGION);
        let range = |first: u64, end: u64| ByteRange::new(first * REGION, (end - first) * REGION);
        regions.close_all(true);
        regions.open(range(1, 4));
        regions.open(range(63, 130));
        regions.rest();
        assert!(!regions.admit(range(2, 3)));
        let mut resting = regions.resting();
        // A write to region 2, and one to 64 that is in flight.
        regions.open_resting(range(0, 3));
        resting.take_out(ByteRange::new(64 * REGION + 1, 1));
        assert!(regions.admit(range(1, 3)) && !regions.admit(range(3, 4)));
        regions.close(&mut resting);
        assert_eq!(resting.ranges(), [range(3, 4), range(63, 64), range(65, 130)]);
        assert_eq!(
            resting.split_batch().map(|batch| batch.ranges()),
            Some(vec![range(3, 4), range(63, 64), range(65, 130)])
        );
        assert!(resting.is_empty() && resting.split_batch().is_none());
        // The one in flight rests still, the closed ones do not.
        regions.open_resting(range(0, 200));
        assert!(regions.admit(range(64, 65)) && !regions.admit(range(65, 66)));
        regions.rest();
        regions.close_all(true);
        assert!(regions.resting().is_empty());
    }
}
