//! The regions of a disk that are dirty on storage in every bitmap, so that a write to them has to store no bit first.
//!
//! Invariant: a region is open only after all of its bits are on storage, and stays so as long as the image is written to.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nowait::ByteRange;
use nowait::internal::is_simulated;

/// The logarithm of the bytes of a region: 16 MiB; small in simulations and tests, so that their disks have several.
const SHIFT: u32 = 24;
/// The logarithm of the bytes of a small one.
pub(crate) const SMALL_SHIFT: u32 = 15;
const WORD: u64 = u64::BITS as u64;

/// Which regions of a disk are open.
pub(crate) struct Regions {
    /// Whether a bitmap records; without one, all regions are open.
    is_recording: AtomicBool,
    open: Box<[AtomicU64]>,
    shift: u32,
}

impl Regions {
    /// The regions of a disk of `size` bytes, none of which is open.
    pub(crate) fn new(size: u64) -> Self {
        let shift = if cfg!(test) || is_simulated() { SMALL_SHIFT } else { SHIFT };
        let words = size.div_ceil(1 << shift).div_ceil(WORD);
        let open = (0..words).map(|_| AtomicU64::new(0)).collect();
        Self { is_recording: AtomicBool::new(false), open, shift }
    }

    /// Whether `range` may be written to.
    #[inline(always)]
    pub(crate) fn admit(&self, range: ByteRange) -> bool {
        !self.is_recording.load(Ordering::Acquire) || self.are_open(range)
    }

    /// The first and the last region of `range`, which is not empty.
    #[inline(always)]
    fn numbers(&self, range: ByteRange) -> (u64, u64) {
        let last = range.pos.saturating_add(range.len.saturating_sub(1));
        (range.pos >> self.shift, last >> self.shift)
    }

    /// Whether all regions of `range` are open.
    #[inline]
    fn are_open(&self, range: ByteRange) -> bool {
        let (first, last) = self.numbers(range);
        (first..=last).all(|region| self.is_open(region))
    }

    #[inline]
    fn is_open(&self, region: u64) -> bool {
        let word = self.open.get((region / WORD) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) & 1 << (region % WORD) != 0)
    }

    /// The first run of regions of `range` that are not open, as a range of bytes.
    pub(crate) fn first_closed(&self, range: ByteRange) -> Option<ByteRange> {
        let (first, last) = self.numbers(range);
        let begin = (first..=last).find(|&region| !self.is_open(region))?;
        let end = (begin..=last).find(|&region| self.is_open(region)).unwrap_or(last + 1);
        Some(ByteRange::new(begin << self.shift, (end - begin) << self.shift))
    }

    /// The regions of `range` are open from now on.
    pub(crate) fn open(&self, range: ByteRange) {
        let (first, last) = self.numbers(range);
        for region in first..=last {
            if let Some(word) = self.open.get((region / WORD) as usize) {
                word.fetch_or(1 << (region % WORD), Ordering::Release);
            }
        }
    }

    /// No region is open any more. No request is in flight.
    pub(crate) fn close_all(&self, is_recording: bool) {
        self.open.iter().for_each(|word| word.store(0, Ordering::Release));
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
}
