//! A piece of a file that is read ahead.
//!
//! Invariant: the bytes `from..to` of the file are those that were there when the chunk was read; a change
//! narrows them, and so does the end of the file.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::read_ahead::ahead_memory::AheadMemory;
use crate::types::byte_range::ByteRange;

/// How long bytes that were read ahead may be served: a change by another process, by a buffered writer or
/// by a mapping is missed for no longer.
pub(crate) const MAX_AGE: Duration = Duration::from_secs(1);

/// How far a chunk has come.
pub(crate) enum ChunkState {
    /// A thread will read it.
    Queued,
    /// A thread reads it.
    Reading,
    /// It was read.
    Ready {
        memory: Arc<AheadMemory>,
        /// When the read began.
        since: Instant,
    },
}

/// A chunk of a stream.
pub(crate) struct AheadChunk {
    /// Its number among the chunks of the file.
    pub(crate) number: u64,
    /// Position of the first byte of its memory.
    start: u64,
    from: u64,
    to: u64,
    pub(crate) state: ChunkState,
}

impl AheadChunk {
    pub(crate) fn new(number: u64, range: ByteRange) -> Self {
        let ByteRange { pos: start, len } = range;
        Self { number, start, from: start, to: start + len, state: ChunkState::Queued }
    }

    /// The bytes that it has, or will have.
    pub(crate) fn range(&self) -> ByteRange {
        ByteRange::new(self.from, self.to - self.from)
    }

    pub(crate) fn has(&self, pos: u64) -> bool {
        (self.from..self.to).contains(&pos)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.from >= self.to
    }

    /// Records that only `count` bytes of it are in the file.
    pub(crate) fn cut(&mut self, count: u64) {
        self.to = self.to.min(self.start + count);
    }

    /// Forgets the bytes of `changed`, and what is behind them where bytes before them are left.
    pub(crate) fn forget(&mut self, changed: ByteRange) {
        if changed.pos >= self.to || changed.end() <= self.from {
            return;
        }
        match changed.pos <= self.from {
            true => self.from = changed.end().min(self.to),
            false => self.to = changed.pos,
        }
    }

    /// Where the bytes from `pos` on are in its memory, at most `len` of them.
    pub(crate) fn part(&self, pos: u64, len: u64) -> std::ops::Range<usize> {
        let first = (pos - self.start) as usize;
        first..first + len.min(self.to - pos) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_leaves_the_bytes_beside_it_and_only_those() {
        let left = |pos, len| {
            let mut chunk = AheadChunk::new(1, ByteRange::new(100, 100));
            chunk.forget(ByteRange::new(pos, len));
            (chunk.from, chunk.to)
        };
        for (changed, expected) in [
            ((0, 100), (100, 200)),
            ((0, 101), (101, 200)),
            ((100, 100), (200, 200)),
            ((0, u64::MAX), (200, 200)),
            ((199, 1), (100, 199)),
            ((200, 1), (100, 200)),
            ((150, 10), (100, 150)),
            ((150, u64::MAX), (100, 150)),
        ] {
            assert_eq!(left(changed.0, changed.1), expected, "{changed:?}");
        }
        let mut chunk = AheadChunk::new(1, ByteRange::new(100, 100));
        chunk.cut(50);
        assert_eq!((chunk.part(149, 9), chunk.has(150), chunk.is_empty()), (49..50, false, false));
        chunk.cut(0);
        assert!(chunk.is_empty());
    }
}
