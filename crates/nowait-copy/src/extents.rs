//! Which parts of the two disks read as zeros: asked a little ahead, walked through together.
//!
//! Invariant: the pieces of a walk cover the disk exactly, in order and without overlap; a piece is
//! called zero only if all of it was told to read as zeros.
//! Knows: nothing. Known by: transfer, verify.

use std::collections::VecDeque;

use nowait::{Range, Span};

/// When fewer extents than this are left, more are asked for.
const LOW: usize = 64;

/// A stretch of one kind, from where the one before it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stretch {
    end: u64,
    zero: bool,
}

/// What is known of one disk, from where it was not walked yet.
#[derive(Debug)]
pub(crate) struct Extents {
    size: u64,
    /// Stretches begin and end at multiples of this, or at the end of the disk.
    granule: u64,
    stretches: VecDeque<Stretch>,
    /// Where the last stretch ends.
    end: u64,
    /// What was told so far, in bytes from the start.
    told: u64,
    /// Where the zeros begin that what was told ends with.
    zeros_from: u64,
    asked: bool,
}

impl Extents {
    /// Of a disk that tells what it is asked. `granule` is a power of two.
    pub(crate) fn to_be_asked(size: u64, granule: u64) -> Self {
        let stretches = VecDeque::new();
        Self { size, granule, stretches, end: 0, told: 0, zeros_from: 0, asked: false }
    }

    /// Of a disk that is all of one kind as far as anybody knows.
    pub(crate) fn uniform(size: u64, zero: bool) -> Self {
        let stretches = VecDeque::from([Stretch { end: size, zero }]);
        Self { size, granule: 1, stretches, end: size, told: size, zeros_from: 0, asked: false }
    }

    /// What to ask next, if it is time. It must be answered before the next question.
    pub(crate) fn question(&mut self) -> Option<Range> {
        if self.asked || self.told >= self.size || self.stretches.len() >= LOW {
            return None;
        }
        self.asked = true;
        Some(Range::new(self.told, self.size - self.told))
    }

    /// The answer to the last question: spans from its start on.
    pub(crate) fn answer(&mut self, spans: &[Span]) {
        self.asked = false;
        for span in spans {
            self.told = self.told.saturating_add(span.len).min(self.size);
            if !span.hole {
                self.zeros_from = self.told;
                self.push(self.told.next_multiple_of(self.granule).min(self.size), false);
                continue;
            }
            // A block that is only in part zero is data.
            let (from, to) = (self.zeros_from.next_multiple_of(self.granule), self.down(self.told));
            if from < to {
                self.push(from, false);
                self.push(to, true);
            }
        }
        if self.told >= self.size {
            self.push(self.size, false);
        }
    }

    fn down(&self, pos: u64) -> u64 {
        if pos >= self.size { pos } else { pos & !(self.granule - 1) }
    }

    fn push(&mut self, end: u64, zero: bool) {
        if end <= self.end {
            return;
        }
        self.end = end;
        match self.stretches.back_mut() {
            Some(last) if last.zero == zero => last.end = end,
            _ => self.stretches.push_back(Stretch { end, zero }),
        }
    }

    /// The stretch at `pos`, which never decreases, if it is known.
    fn at(&mut self, pos: u64) -> Option<Stretch> {
        while self.stretches.front()?.end <= pos {
            self.stretches.pop_front();
        }
        self.stretches.front().copied()
    }
}

/// A part of the disk that is of one kind on each side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) range: Range,
    pub(crate) source_zero: bool,
    pub(crate) target_zero: bool,
}

/// The way through both disks, from start to end.
#[derive(Debug)]
pub(crate) struct Walk {
    pub(crate) source: Extents,
    pub(crate) target: Extents,
    pos: u64,
    size: u64,
}

impl Walk {
    /// Through the first `size` bytes of both.
    pub(crate) fn new(size: u64, source: Extents, target: Extents) -> Self {
        Self { source, target, pos: 0, size }
    }

    /// The next piece, or `None` when the end is reached or a question must be answered first.
    pub(crate) fn next(&mut self) -> Option<Piece> {
        if self.is_over() {
            return None;
        }
        let (source, target) = (self.source.at(self.pos)?, self.target.at(self.pos)?);
        let end = source.end.min(target.end).min(self.size);
        let range = Range::new(self.pos, end - self.pos);
        self.pos = end;
        Some(Piece { range, source_zero: source.zero, target_zero: target.zero })
    }

    /// Whether every piece was given out.
    pub(crate) fn is_over(&self) -> bool {
        self.pos >= self.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1024;

    fn span(len: u64, hole: bool) -> Span {
        Span::on_top(len, hole)
    }

    fn pieces(walk: &mut Walk) -> Vec<(u64, u64, bool, bool)> {
        std::iter::from_fn(|| walk.next())
            .map(|p| (p.range.pos, p.range.len, p.source_zero, p.target_zero))
            .collect()
    }

    fn told(size: u64, spans: &[Span]) -> Extents {
        let mut extents = Extents::to_be_asked(size, 4 * KIB);
        assert_eq!(extents.question(), Some(Range::new(0, size)));
        extents.answer(spans);
        extents
    }

    #[test]
    fn pieces_are_cut_where_either_side_changes() {
        let source = told(40 * KIB, &[span(16 * KIB, false), span(24 * KIB, true)]);
        let target = told(40 * KIB, &[span(8 * KIB, true), span(32 * KIB, false)]);
        let mut walk = Walk::new(40 * KIB, source, target);
        let wanted = [
            (0, 8 * KIB, false, true),
            (8 * KIB, 8 * KIB, false, false),
            (16 * KIB, 24 * KIB, true, false),
        ];
        assert_eq!(pieces(&mut walk), wanted);
        assert!(walk.is_over());
    }

    #[test]
    fn a_block_that_is_zero_in_part_is_data() {
        let spans = [span(5000, true), span(10, false), span(20_000, true), span(14_990, true)];
        let mut extents = told(40_000, &spans);
        assert_eq!(extents.at(0), Some(Stretch { end: 4096, zero: true }));
        assert_eq!(extents.at(4096), Some(Stretch { end: 8192, zero: false }));
        assert_eq!(extents.at(8192), Some(Stretch { end: 40_000, zero: true }));
    }

    #[test]
    fn alternating_spans_smaller_than_a_block_are_all_data() {
        let spans: Vec<Span> = (0..64).map(|n| span(1000, n % 2 == 0)).collect();
        let mut extents = told(64_000, &spans);
        assert_eq!(extents.at(0), Some(Stretch { end: 64_000, zero: false }));
    }

    #[test]
    fn a_walk_waits_for_the_answer_and_goes_on_with_it() {
        let mut extents = Extents::to_be_asked(16 * KIB, 4 * KIB);
        assert!(extents.question().is_some() && extents.question().is_none());
        let mut walk = Walk::new(16 * KIB, extents, Extents::uniform(16 * KIB, true));
        assert_eq!(walk.next(), None);
        assert!(!walk.is_over());
        walk.source.answer(&[span(6 * KIB, true)]);
        assert_eq!(pieces(&mut walk), [(0, 4 * KIB, true, true)]);
        assert_eq!(walk.source.question(), Some(Range::new(6 * KIB, 10 * KIB)));
        walk.source.answer(&[span(100 * KIB, true)]);
        assert_eq!(pieces(&mut walk), [(4 * KIB, 12 * KIB, true, true)]);
        assert!(walk.is_over() && walk.source.question().is_none());
    }

    #[test]
    fn a_tail_that_is_no_whole_block_keeps_its_kind() {
        let mut extents = told(10_000, &[span(4096, false), span(5904, true)]);
        assert_eq!(extents.at(4096), Some(Stretch { end: 10_000, zero: true }));
    }
}
