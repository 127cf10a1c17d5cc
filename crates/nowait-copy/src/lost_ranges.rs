//! The unreadable ranges of a source, merged and bounded in number.
//!
//! Invariant: ranges neither overlap nor are adjacent; each byte is counted once.

use std::collections::BTreeMap;

use nowait::ByteRange;

/// Ranges that are kept at most; bytes beyond are counted only.
const MAX_RANGES: usize = 10_000;

/// The ranges of the source that could not be read and are zeros in the target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// In ascending order, not adjacent; at most 10,000.
    pub ranges: Vec<ByteRange>,
    /// All lost bytes, including those of ranges that are not kept.
    pub bytes: u64,
    /// Whether ranges were left out of `ranges`.
    pub truncated: bool,
}

/// Collects lost ranges as they are found, in any order.
#[derive(Debug, Default)]
pub(crate) struct LostRanges {
    /// The end of each range by its start.
    ranges: BTreeMap<u64, u64>,
    bytes: u64,
    truncated: bool,
}

impl LostRanges {
    /// Adds a range; bytes that were added before are not counted again.
    pub(crate) fn add(&mut self, range: ByteRange) {
        let (mut start, mut end) = (range.pos, range.end());
        if start >= end {
            return;
        }
        let (mut known, mut merged) = (0, Vec::new());
        // Ranges do not overlap, so their ends ascend as their starts do.
        for (&from, &to) in self.ranges.range(..=end).rev() {
            if to < start {
                break;
            }
            known += to.min(range.end()).saturating_sub(from.max(range.pos));
            (start, end) = (start.min(from), end.max(to));
            merged.push(from);
        }
        self.bytes += range.len - known;
        if merged.is_empty() && self.ranges.len() >= MAX_RANGES {
            self.truncated = true;
            return;
        }
        for from in merged {
            self.ranges.remove(&from);
        }
        self.ranges.insert(start, end);
    }

    /// All ranges added so far.
    pub(crate) fn lost(&self) -> Lost {
        let ranges = self.ranges.iter().map(|(&start, &end)| ByteRange::new(start, end - start));
        Lost { ranges: ranges.collect(), bytes: self.bytes, truncated: self.truncated }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_and_overlapping_ranges_are_merged_and_bytes_are_counted_once() {
        let mut losses = LostRanges::default();
        for (pos, len) in [(40, 10), (0, 10), (20, 10), (10, 10), (25, 10), (20, 5), (60, 0)] {
            losses.add(ByteRange::new(pos, len));
        }
        let ranges = vec![ByteRange::new(0, 35), ByteRange::new(40, 10)];
        assert_eq!(losses.lost(), Lost { ranges, bytes: 45, truncated: false });
        losses.add(ByteRange::new(5, 100));
        let ranges = vec![ByteRange::new(0, 105)];
        assert_eq!(losses.lost(), Lost { ranges, bytes: 105, truncated: false });
    }

    #[test]
    fn ranges_beyond_the_bound_are_counted_in_bytes_and_reported_as_truncated() {
        let mut losses = LostRanges::default();
        for n in 0..MAX_RANGES as u64 {
            losses.add(ByteRange::new(n * 8, 4));
        }
        assert!(!losses.lost().truncated);
        losses.add(ByteRange::new(4, 4));
        losses.add(ByteRange::new(1 << 40, 4));
        losses.add(ByteRange::new((1 << 40) + 8, 4));
        losses.add(ByteRange::new((1 << 40) + 16, 4));
        let lost = losses.lost();
        assert_eq!((lost.ranges.len(), lost.truncated), (MAX_RANGES, true));
        assert_eq!(lost.bytes, 4 * (MAX_RANGES as u64 + 4));
    }
}
