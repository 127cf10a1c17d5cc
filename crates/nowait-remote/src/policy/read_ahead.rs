//! Recognises reads one after the other, and says what is read next.
//!
//! Invariant: nothing is proposed twice for one sequence of reads, never more than a run, and at most
//! twice what a short sequence has read, or one block, so that small files cost little.

use std::ops::Range;

use nowait::ByteRange;

use super::BLOCK_BYTES;

/// The sequences of reads that are remembered; the oldest one goes first.
/// Beyond it: the one that was used longest ago goes.
const MAX_STREAMS: usize = 8;
/// The most bytes between a read and the end of the sequence that it continues: several reads are under way
/// simultaneously.
/// Beyond it: the read begins a new sequence.
const MAX_GAP_BYTES: u64 = 128 << 10;
/// Bytes ahead for each byte that was read, at first and of a sequence that has read so many bytes.
const GROWTH: u64 = 2;
const LONG: u64 = 1 << 20;
const LONG_GROWTH: u64 = 4;
/// The most blocks ahead.
/// Beyond it: no more is read ahead.
const MAX_BLOCKS: u64 = 64;
/// The most blocks ahead that a read waits for.
const JOINED_BLOCKS: u64 = 16;

#[derive(Debug)]
struct Stream {
    /// The byte where its first read began, and the one behind its last.
    begin: u64,
    next: u64,
    /// The end of the blocks that were read or proposed.
    ahead: u64,
    /// Blocks of the last proposal; 0: none yet.
    proposed: u64,
}

/// The sequences of reads of one object.
#[derive(Debug, Default)]
pub struct ReadAhead {
    streams: Vec<Stream>,
}

impl ReadAhead {
    /// The blocks to read ahead after a read of the bytes of `range`, of an object with `end` blocks.
    /// A sequence has some when it needs a block that it has not brought, and then when half of them
    /// are read.
    pub fn after(&mut self, range: ByteRange, end: u64) -> Range<u64> {
        let next = range.end().div_ceil(BLOCK_BYTES);
        let follows = |s: &Stream| (s.next..=s.next + MAX_GAP_BYTES).contains(&range.pos);
        let Some(at) = self.streams.iter().position(follows) else {
            if self.streams.len() == MAX_STREAMS {
                self.streams.remove(0);
            }
            let (begin, next_byte) = (range.pos, range.end());
            self.streams.push(Stream { begin, next: next_byte, ahead: next, proposed: 0 });
            return 0..0;
        };
        let mut stream = self.streams.remove(at);
        stream.next = range.end();
        let needs = next > stream.ahead;
        let start = stream.ahead.max(next);
        stream.ahead = start;
        let mut proposed = 0..0;
        // Large requests instead of one for each block.
        let is_half_read = stream.proposed > 0 && start - next <= stream.proposed / 2;
        if (needs || is_half_read) && start < end {
            let read = stream.next - stream.begin;
            let growth = if read < LONG { GROWTH } else { LONG_GROWTH };
            let blocks = (read.saturating_mul(growth) / BLOCK_BYTES).clamp(1, MAX_BLOCKS);
            proposed = start..(next + blocks).max(start + 1).min(end);
            (stream.ahead, stream.proposed) = (proposed.end, blocks);
        }
        self.streams.push(stream);
        proposed
    }

    /// Whether `block`, which was proposed, is left out, because what was read before it was at hand: a
    /// short sequence that the cache has may end where the cache has it end. It has some proposed
    /// again when it needs that block; a long one is not held up.
    pub fn leaves_out(&mut self, block: u64) -> bool {
        let wants = |s: &&mut Stream| (s.next.div_ceil(BLOCK_BYTES)..s.ahead).contains(&block);
        let Some(stream) = self.streams.iter_mut().find(wants) else { return true };
        let is_short = stream.next - stream.begin < LONG;
        if is_short {
            (stream.ahead, stream.proposed) = (block, 0);
        }
        is_short
    }

    /// Whether the blocks of `proposed` are asked for in one request with those of the read, whose
    /// last blocks are asked for now and end at block `asked_end`: a few that follow these directly.
    #[must_use]
    pub fn joins(asked_end: Option<u64>, proposed: &Range<u64>) -> bool {
        asked_end == Some(proposed.start) && proposed.end - proposed.start <= JOINED_BLOCKS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_read_of_a_sequence_and_random_ones_propose_nothing() {
        let mut ahead = ReadAhead::default();
        for block in [5, 100, 20, 5, 5, 70, 50, 900, 33, 12] {
            let range = ByteRange::new(block * BLOCK_BYTES, 4096);
            assert!(ahead.after(range, 1000).is_empty(), "{block}");
        }
        assert_eq!(ahead.streams.len(), MAX_STREAMS);
    }

    #[test]
    fn reads_within_a_block_propose_nothing_and_the_first_one_behind_it_a_little() {
        let mut ahead = ReadAhead::default();
        let mut after = |pos, len| ahead.after(ByteRange::new(pos, len), 1000);
        assert!(after(4096, 16 << 10).is_empty());
        assert!(after(20 << 10, 32 << 10).is_empty());
        assert_eq!(after(52 << 10, 60 << 10), 2..5);
    }

    #[test]
    fn a_short_sequence_has_never_more_ahead_than_twice_what_was_read() {
        let mut ahead = ReadAhead::default();
        let mut most = 0;
        for pos in (0..LONG).step_by(16 << 10) {
            let range = ByteRange::new(pos, 16 << 10);
            let proposed = ahead.after(range, 10_000);
            most = most.max(proposed.end * BLOCK_BYTES);
            let limit = (2 * range.end()).max(BLOCK_BYTES);
            let end = range.end().next_multiple_of(BLOCK_BYTES);
            assert!(most <= end + limit, "{pos}: {most}");
        }
    }

    #[test]
    fn what_was_left_out_is_proposed_again_behind_the_read_that_needs_it() {
        let mut ahead = ReadAhead::default();
        ahead.after(ByteRange::new(0, BLOCK_BYTES), 1000);
        assert_eq!(ahead.after(ByteRange::new(BLOCK_BYTES, BLOCK_BYTES), 1000), 2..6);
        assert!(ahead.leaves_out(3) && ahead.leaves_out(4));
        assert!(ahead.after(ByteRange::new(2 * BLOCK_BYTES, BLOCK_BYTES), 1000).is_empty());
        let proposed = ahead.after(ByteRange::new(3 * BLOCK_BYTES, BLOCK_BYTES), 1000);
        assert_eq!(proposed, 4..12);
    }

    #[test]
    fn of_a_long_sequence_nothing_is_left_out() {
        let mut ahead = ReadAhead::default();
        ahead.after(ByteRange::new(0, LONG), 1000);
        let proposed = ahead.after(ByteRange::new(LONG, BLOCK_BYTES), 1000);
        assert!(!proposed.is_empty() && !proposed.into_iter().any(|block| ahead.leaves_out(block)));
    }

    #[test]
    fn a_few_blocks_behind_what_a_read_asks_for_join_its_request() {
        assert!(ReadAhead::joins(Some(5), &(5..5 + JOINED_BLOCKS)));
        assert!(!ReadAhead::joins(Some(5), &(5..6 + JOINED_BLOCKS)));
        assert!(!ReadAhead::joins(Some(5), &(6..7)));
        assert!(!ReadAhead::joins(None, &(5..6)));
    }

    #[test]
    fn a_sequence_is_read_ahead_once_in_growing_parts_to_the_end() {
        let mut ahead = ReadAhead::default();
        let mut proposed = Vec::new();
        for half in 0..600 {
            let range = ByteRange::new(half * BLOCK_BYTES / 2, BLOCK_BYTES / 2);
            proposed.extend(ahead.after(range, 300));
        }
        assert_eq!(proposed, (proposed[0]..300).collect::<Vec<_>>());
        assert!(proposed[0] <= 2);
    }
}
