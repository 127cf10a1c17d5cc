//! Which parts of the two disks read as zeros: queried a little ahead and iterated together.
//!
//! Invariant: the pieces of an iterator cover the disk exactly, in order and without overlap; a
//! piece is zero only if all of it was reported to read as zeros.

use std::collections::VecDeque;

use nowait::{ByteRange, ExtentStatus};

/// When fewer runs than this are left, the next query is sent.
const MIN_RUNS: usize = 64;

/// A run of one kind, which begins at the end of the run before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ZeroRun {
    end: u64,
    zero: bool,
}

/// The known runs of one disk, from the iterator's position on.
#[derive(Debug)]
pub(crate) struct ZeroMap {
    size: u64,
    /// Runs begin and end at multiples of this many bytes, or at the end of the disk.
    alignment: u64,
    runs: VecDeque<ZeroRun>,
    /// End of the last run in bytes.
    end: u64,
    /// End of the answers so far, in bytes from the start of the disk.
    answered: u64,
    /// Start of the zeros that the answers so far end with.
    zeros_from: u64,
    query_in_flight: bool,
}

impl ZeroMap {
    /// A disk that answers status queries. `alignment` is a power of two.
    pub(crate) fn unknown(size: u64, alignment: u64) -> Self {
        let runs = VecDeque::new();
        Self { size, alignment, runs, end: 0, answered: 0, zeros_from: 0, query_in_flight: false }
    }

    /// A disk that is all of one kind, as far as can be known.
    pub(crate) fn uniform(size: u64, zero: bool) -> Self {
        let runs = VecDeque::from([ZeroRun { end: size, zero }]);
        Self {
            size,
            alignment: 1,
            runs,
            end: size,
            answered: size,
            zeros_from: 0,
            query_in_flight: false,
        }
    }

    /// A disk that is zero, or clean, outside `ranges`, which are in order and do not touch.
    pub(crate) fn outside(size: u64, ranges: &[ByteRange]) -> Self {
        let mut map = Self { end: 0, runs: VecDeque::new(), ..Self::uniform(size, true) };
        for range in ranges {
            map.push(range.pos.min(size), true);
            map.push(range.pos.saturating_add(range.len).min(size), false);
        }
        map.push(size, true);
        map
    }

    /// The next range to query, if more runs are needed. It must be answered before the next query.
    pub(crate) fn next_query(&mut self) -> Option<ByteRange> {
        if self.query_in_flight || self.answered >= self.size || self.runs.len() >= MIN_RUNS {
            return None;
        }
        self.query_in_flight = true;
        Some(ByteRange::new(self.answered, self.size - self.answered))
    }

    /// The answer to the last query: extents from its start on.
    pub(crate) fn on_extents(&mut self, extents: &[ExtentStatus]) {
        self.query_in_flight = false;
        for extent in extents {
            self.answered = self.answered.saturating_add(extent.len).min(self.size);
            if !extent.hole {
                self.zeros_from = self.answered;
                self.push(self.answered.next_multiple_of(self.alignment).min(self.size), false);
                continue;
            }
            // A block that is only partly zero is data.
            let (from, to) =
                (self.zeros_from.next_multiple_of(self.alignment), self.align_down(self.answered));
            if from < to {
                self.push(from, false);
                self.push(to, true);
            }
        }
        if self.answered >= self.size {
            self.push(self.size, false);
        }
    }

    fn align_down(&self, pos: u64) -> u64 {
        if pos >= self.size { pos } else { pos & !(self.alignment - 1) }
    }

    fn push(&mut self, end: u64, zero: bool) {
        if end <= self.end {
            return;
        }
        self.end = end;
        match self.runs.back_mut() {
            Some(last) if last.zero == zero => last.end = end,
            _ => self.runs.push_back(ZeroRun { end, zero }),
        }
    }

    /// The run at `pos`, if it is known. `pos` never decreases between calls.
    fn at(&mut self, pos: u64) -> Option<ZeroRun> {
        while self.runs.front()?.end <= pos {
            self.runs.pop_front();
        }
        self.runs.front().copied()
    }
}

/// A part of the disk that is of one kind on each endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyExtent {
    pub(crate) range: ByteRange,
    pub(crate) source_zero: bool,
    pub(crate) target_zero: bool,
}

/// Iterates over both disks from start to end.
#[derive(Debug)]
pub(crate) struct ExtentIterator {
    /// In an incremental copy: the clean runs in place of those that are zero.
    pub(crate) source: ZeroMap,
    pub(crate) target: ZeroMap,
    /// Whether the target has already all that is clean on the source, so that runs of one kind on the source are of the
    /// same kind on the target.
    pub(crate) is_incremental: bool,
    pos: u64,
    size: u64,
}

impl ExtentIterator {
    /// Iterates over the first `size` bytes of both.
    pub(crate) fn new(size: u64, source: ZeroMap, target: ZeroMap) -> Self {
        Self { source, target, is_incremental: false, pos: 0, size }
    }

    /// Iterates over `size` bytes, of which what is clean on the source is on the target already.
    pub(crate) fn incremental(size: u64, clean: ZeroMap) -> Self {
        let target = ZeroMap::uniform(size, false);
        Self { is_incremental: true, ..Self::new(size, clean, target) }
    }

    /// The next piece, or `None` when the end is reached or a query must be answered first.
    pub(crate) fn next(&mut self) -> Option<CopyExtent> {
        if self.is_over() {
            return None;
        }
        let (source, target) = (self.source.at(self.pos)?, self.target.at(self.pos)?);
        let end = source.end.min(target.end).min(self.size);
        let range = ByteRange::new(self.pos, end - self.pos);
        self.pos = end;
        let target_zero = if self.is_incremental { source.zero } else { target.zero };
        Some(CopyExtent { range, source_zero: source.zero, target_zero })
    }

    /// Whether all pieces were returned.
    pub(crate) fn is_over(&self) -> bool {
        self.pos >= self.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1024;

    fn extent(len: u64, hole: bool) -> ExtentStatus {
        ExtentStatus::top(len, hole)
    }

    fn pieces(iterator: &mut ExtentIterator) -> Vec<(u64, u64, bool, bool)> {
        std::iter::from_fn(|| iterator.next())
            .map(|p| (p.range.pos, p.range.len, p.source_zero, p.target_zero))
            .collect()
    }

    fn answered(size: u64, extents: &[ExtentStatus]) -> ZeroMap {
        let mut map = ZeroMap::unknown(size, 4 * KIB);
        assert_eq!(map.next_query(), Some(ByteRange::new(0, size)));
        map.on_extents(extents);
        map
    }

    #[test]
    fn a_map_of_ranges_is_clean_outside_them() {
        let range = |pos, len| ByteRange::new(pos * KIB, len * KIB);
        for (ranges, wanted) in [
            (vec![], vec![(0, 40, true)]),
            (vec![range(0, 40)], vec![(0, 40, false)]),
            (
                vec![range(4, 4), range(12, 28)],
                vec![(0, 4, true), (4, 4, false), (8, 4, true), (12, 28, false)],
            ),
        ] {
            let map = ZeroMap::outside(40 * KIB, &ranges);
            let mut iterator = ExtentIterator::incremental(40 * KIB, map);
            let pieces = pieces(&mut iterator).into_iter();
            let found = pieces.map(|(pos, len, clean, _)| (pos / KIB, len / KIB, clean));
            assert_eq!(found.collect::<Vec<_>>(), wanted);
        }
    }

    #[test]
    fn pieces_are_cut_where_either_side_changes() {
        let source = answered(40 * KIB, &[extent(16 * KIB, false), extent(24 * KIB, true)]);
        let target = answered(40 * KIB, &[extent(8 * KIB, true), extent(32 * KIB, false)]);
        let mut iterator = ExtentIterator::new(40 * KIB, source, target);
        let wanted = [
            (0, 8 * KIB, false, true),
            (8 * KIB, 8 * KIB, false, false),
            (16 * KIB, 24 * KIB, true, false),
        ];
        assert_eq!(pieces(&mut iterator), wanted);
        assert!(iterator.is_over());
    }

    #[test]
    fn what_is_clean_is_left_alone_and_what_is_dirty_is_not_known_to_be_zero() {
        let clean = answered(24 * KIB, &[extent(8 * KIB, true), extent(2 * KIB, false)]);
        let mut iterator = ExtentIterator::incremental(24 * KIB, clean);
        let wanted = [(0, 8 * KIB, true, true), (8 * KIB, 4 * KIB, false, false)];
        assert_eq!(pieces(&mut iterator), wanted);
        iterator.source.on_extents(&[extent(14 * KIB, true)]);
        assert_eq!(pieces(&mut iterator), [(12 * KIB, 12 * KIB, true, true)]);
    }

    #[test]
    fn a_partly_zero_block_is_data() {
        let extents =
            [extent(5000, true), extent(10, false), extent(20_000, true), extent(14_990, true)];
        let mut map = answered(40_000, &extents);
        assert_eq!(map.at(0), Some(ZeroRun { end: 4096, zero: true }));
        assert_eq!(map.at(4096), Some(ZeroRun { end: 8192, zero: false }));
        assert_eq!(map.at(8192), Some(ZeroRun { end: 40_000, zero: true }));
    }

    #[test]
    fn alternating_extents_smaller_than_a_block_are_all_data() {
        let extents: Vec<ExtentStatus> = (0..64).map(|n| extent(1000, n % 2 == 0)).collect();
        let mut map = answered(64_000, &extents);
        assert_eq!(map.at(0), Some(ZeroRun { end: 64_000, zero: false }));
    }

    #[test]
    fn an_iterator_waits_for_the_answer_and_continues_with_it() {
        let mut map = ZeroMap::unknown(16 * KIB, 4 * KIB);
        assert!(map.next_query().is_some() && map.next_query().is_none());
        let mut iterator = ExtentIterator::new(16 * KIB, map, ZeroMap::uniform(16 * KIB, true));
        assert_eq!(iterator.next(), None);
        assert!(!iterator.is_over());
        iterator.source.on_extents(&[extent(6 * KIB, true)]);
        assert_eq!(pieces(&mut iterator), [(0, 4 * KIB, true, true)]);
        assert_eq!(iterator.source.next_query(), Some(ByteRange::new(6 * KIB, 10 * KIB)));
        iterator.source.on_extents(&[extent(100 * KIB, true)]);
        assert_eq!(pieces(&mut iterator), [(4 * KIB, 12 * KIB, true, true)]);
        assert!(iterator.is_over() && iterator.source.next_query().is_none());
    }

    #[test]
    fn a_partial_block_at_the_end_keeps_its_kind() {
        let mut map = answered(10_000, &[extent(4096, false), extent(5904, true)]);
        assert_eq!(map.at(4096), Some(ZeroRun { end: 10_000, zero: true }));
    }
}
