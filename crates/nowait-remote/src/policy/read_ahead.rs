//! Recognises reads one after the other, and says what is read next.
//!
//! Invariant: nothing is proposed twice for one sequence of reads, and never more than a run.

use std::ops::Range;

use nowait::ByteRange;

use super::BLOCK_BYTES;

/// The sequences of reads that are remembered; the oldest one goes first.
const MAX_STREAMS: usize = 8;
/// Bytes that a read may be ahead of the one before it: several are under way at once.
const MAX_GAP: u64 = 128 << 10;
/// Blocks ahead: after the second read of a sequence, doubled with each request, and the most.
const FIRST_BLOCKS: u64 = 4;
const MAX_BLOCKS: u64 = 64;

#[derive(Debug)]
struct Stream {
    /// The byte behind the last read.
    next: u64,
    /// The end of what was proposed.
    ahead: u64,
    blocks: u64,
}

/// The sequences of reads of one object.
#[derive(Debug, Default)]
pub struct ReadAhead {
    streams: Vec<Stream>,
}

impl ReadAhead {
    /// The blocks to read ahead after a read of the bytes of `range`, of an object with `end` blocks.
    pub fn after(&mut self, range: ByteRange, end: u64) -> Range<u64> {
        let next = range.end().div_ceil(BLOCK_BYTES);
        let follows = |s: &Stream| (s.next..=s.next + MAX_GAP).contains(&range.pos);
        let Some(at) = self.streams.iter().position(follows) else {
            if self.streams.len() == MAX_STREAMS {
                self.streams.remove(0);
            }
            self.streams.push(Stream { next: range.end(), ahead: next, blocks: FIRST_BLOCKS });
            return 0..0;
        };
        let mut stream = self.streams.remove(at);
        stream.next = range.end();
        let start = stream.ahead.max(next);
        let mut proposed = 0..0;
        // Large requests instead of one for each block.
        if start < end && start - next <= stream.blocks / 2 {
            proposed = start..(next + stream.blocks).max(start + 1).min(end);
            stream.ahead = proposed.end;
            stream.blocks = (stream.blocks * 2).min(MAX_BLOCKS);
        }
        self.streams.push(stream);
        proposed
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
