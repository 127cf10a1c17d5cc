//! One stream of reads of a file: what it will read next, and what of that was read ahead.
//!
//! Invariant: what is read ahead of a stream is at most [`MOST_AHEAD`] bytes, and a chunk is dropped when
//! the stream has left it behind.

use std::sync::Arc;
use std::time::Instant;

use crate::read_ahead::access_pattern::Step;
use crate::read_ahead::ahead_chunk::{AheadChunk, ChunkState, MAX_AGE};
use crate::read_ahead::ahead_memory::{AheadMemory, KEPT_BYTES};
use crate::types::byte_range::ByteRange;

/// Bytes that are read ahead of a stream at first, and at most.
const FIRST_AHEAD: u64 = 128 << 10;
const MOST_AHEAD: u64 = 4 << 20;
/// The most pieces that are read ahead of a strided stream.
const MOST_PIECES: u64 = 16;
/// Bytes of the least chunk of a sequential stream, and of the largest; both are multiples of any block.
const LEAST_CHUNK: u64 = 64 << 10;
const MOST_CHUNK: u64 = KEPT_BYTES as u64;
/// Chunks begin at multiples of this, in bytes.
const PAGE: u64 = 4096;
/// Bytes behind the last read for which a chunk is kept: threads that share a scan may be late.
const BEHIND: u64 = 256 << 10;

/// Bytes in the memory of a chunk.
pub(crate) type Part = (Arc<AheadMemory>, std::ops::Range<usize>);

/// Whether a read can be served from memory.
pub(crate) enum Cover {
    /// All of it is there.
    Ready(Vec<Part>),
    /// The chunk with this number has a part of it, and is being read, or will be if it is `queued`.
    Coming { chunk: u64, queued: bool },
    /// A part of it was not read ahead.
    Missing,
}

/// A stream of reads.
pub(crate) struct AheadStream {
    step: Step,
    /// Where the next read is expected.
    next: u64,
    /// Where the next chunk begins.
    planned: u64,
    /// Bytes to be read ahead.
    ahead: u64,
    chunks: Vec<AheadChunk>,
    /// When it was last used, in reads of the file.
    pub(crate) used: u64,
}

impl AheadStream {
    /// A stream that begins with a read of `range`.
    pub(crate) fn new(step: Step, range: ByteRange) -> Self {
        let (next, ahead) = (range.pos, FIRST_AHEAD);
        let mut stream = Self { step, next, planned: next, ahead, chunks: Vec::new(), used: 0 };
        stream.follow(range);
        stream.planned = stream.next;
        stream
    }

    /// Whether a read of `range` is the next one, or one of bytes that were read ahead.
    pub(crate) fn continues(&self, range: ByteRange) -> bool {
        let is_next = range.pos == self.next
            && match self.step {
                Step::Sequential => true,
                Step::Strided { len, .. } => range.len == len,
            };
        is_next || self.chunks.iter().any(|chunk| chunk.has(range.pos))
    }

    /// Takes note of a read that continues the stream.
    pub(crate) fn follow(&mut self, range: ByteRange) {
        match self.step {
            Step::Sequential => {
                self.next = self.next.max(range.end());
                let next = self.next;
                self.chunks.retain(|chunk| chunk.range().end().saturating_add(BEHIND) > next);
            }
            Step::Strided { stride, .. } => {
                // A read that comes late moves nothing back.
                let is_ahead = |chunk: &AheadChunk| {
                    let distance = chunk.range().pos.wrapping_sub(range.pos).cast_signed();
                    distance == 0 || (distance > 0) == (stride > 0)
                };
                self.next = range.pos.saturating_add_signed(stride);
                self.chunks.retain(is_ahead);
            }
        }
        self.chunks.retain(|chunk| !chunk.is_empty());
    }

    /// Plans the chunks that are to be read now, with numbers from `number` on; nothing from `end` on, which
    /// is the end of the file.
    pub(crate) fn plan(&mut self, end: u64, number: &mut u64) -> Vec<(u64, ByteRange)> {
        let first = self.chunks.len();
        match self.step {
            Step::Sequential => self.plan_sequential(end, number),
            Step::Strided { stride, len } => self.plan_strided(end, stride, len, number),
        }
        let planned = &self.chunks[first..];
        if !planned.is_empty() {
            self.ahead = (self.ahead * 2).min(MOST_AHEAD);
        }
        planned.iter().map(|chunk| (chunk.number, chunk.range())).collect()
    }

    fn plan_sequential(&mut self, end: u64, number: &mut u64) {
        let chunk = (self.ahead / 4).clamp(LEAST_CHUNK, MOST_CHUNK);
        if self.planned < self.next || self.planned - self.next > MOST_AHEAD {
            self.planned = self.next;
        }
        while self.planned < end && self.planned + chunk <= self.next.saturating_add(self.ahead) {
            // Chunks end at multiples of their length, and so of a block.
            let start = self.planned - self.planned % PAGE;
            let stop = (start + chunk) / chunk * chunk;
            self.push(ByteRange::new(start, stop - start), number);
            self.planned = stop;
        }
    }

    fn plan_strided(&mut self, end: u64, stride: i64, len: u64, number: &mut u64) {
        let pieces = (self.ahead / len).clamp(1, MOST_PIECES) as usize;
        if self.chunks.is_empty() {
            self.planned = self.next;
        }
        while self.chunks.len() < pieces && self.planned.saturating_add(len) <= end {
            self.push(ByteRange::new(self.planned, len), number);
            let Some(next) = self.planned.checked_add_signed(stride) else {
                // There is no further piece.
                self.planned = u64::MAX;
                return;
            };
            self.planned = next;
        }
    }

    fn push(&mut self, range: ByteRange, number: &mut u64) {
        self.chunks.push(AheadChunk::new(*number, range));
        *number += 1;
    }

    /// Whether `range` can be served at `now`.
    pub(crate) fn cover(&self, range: ByteRange, now: Instant) -> Cover {
        let (mut pos, mut parts) = (range.pos, Vec::new());
        while pos < range.end() {
            let Some(chunk) = self.chunks.iter().find(|chunk| chunk.has(pos)) else {
                return Cover::Missing;
            };
            let ChunkState::Ready { memory, since } = &chunk.state else {
                let queued = matches!(chunk.state, ChunkState::Queued);
                return Cover::Coming { chunk: chunk.number, queued };
            };
            if now.saturating_duration_since(*since) > MAX_AGE {
                return Cover::Missing;
            }
            let part = chunk.part(pos, range.end() - pos);
            pos += part.len() as u64;
            parts.push((memory.clone(), part));
        }
        Cover::Ready(parts)
    }

    pub(crate) fn chunk(&mut self, number: u64) -> Option<&mut AheadChunk> {
        self.chunks.iter_mut().find(|chunk| chunk.number == number)
    }

    pub(crate) fn remove(&mut self, number: u64) {
        self.chunks.retain(|chunk| chunk.number != number);
    }

    /// Forgets what was read of `changed`.
    pub(crate) fn forget(&mut self, changed: ByteRange) {
        self.chunks.iter_mut().for_each(|chunk| chunk.forget(changed));
        self.chunks.retain(|chunk| !chunk.is_empty());
    }

    /// Drops what is too old to be served.
    pub(crate) fn drop_old(&mut self, now: Instant) {
        self.chunks.retain(|chunk| match chunk.state {
            ChunkState::Ready { since, .. } => now.saturating_duration_since(since) <= MAX_AGE,
            ChunkState::Queued | ChunkState::Reading => true,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_by_8k(stream: &mut AheadStream, from: u64, to: u64) -> Vec<ByteRange> {
        let mut number = 0;
        let mut planned = Vec::new();
        for pos in (from..to).step_by(8192) {
            let range = ByteRange::new(pos, 8192);
            assert!(stream.continues(range), "{pos}");
            stream.follow(range);
            planned.extend(stream.plan(u64::MAX >> 2, &mut number).into_iter().map(|it| it.1));
            assert!(stream.planned - stream.next <= MOST_AHEAD, "{pos}");
            assert!(stream.chunks.len() as u64 <= (MOST_AHEAD + BEHIND) / LEAST_CHUNK, "{pos}");
        }
        planned
    }

    #[test]
    fn a_sequential_stream_is_read_ahead_once_and_without_gaps_in_larger_and_larger_chunks() {
        let mut stream = AheadStream::new(Step::Sequential, ByteRange::new(100, 8192));
        let planned = read_by_8k(&mut stream, 8292, 64 << 20);
        assert_eq!(planned[0].len / PAGE, 12, "up to a multiple of {LEAST_CHUNK}");
        let touch = planned.windows(2).all(|two| two[0].end() == two[1].pos);
        assert!(touch && planned.last().unwrap().len == MOST_CHUNK);
        assert!(planned.iter().all(|range| range.pos % 4096 == 0 && range.len % 4096 == 0));
    }

    #[test]
    fn nothing_is_planned_behind_the_end_and_what_is_added_there_later_is() {
        let mut stream = AheadStream::new(Step::Sequential, ByteRange::new(0, 8192));
        let mut number = 0;
        let planned = stream.plan(8193, &mut number);
        assert_eq!((planned.len(), planned[0].1.pos), (1, 8192));
        assert!(stream.plan(8193, &mut number).is_empty());
        stream.follow(ByteRange::new(8192, 8192));
        assert!(stream.plan(16_384, &mut number).is_empty(), "it is there already");
        stream.follow(ByteRange::new(16_384, 200 << 10));
        assert_eq!(
            stream.plan(1 << 20, &mut number)[0].1.pos,
            (16_384 + (200 << 10)) / 4096 * 4096
        );
    }

    #[test]
    fn a_strided_stream_has_at_most_sixteen_pieces_ahead_inside_the_file() {
        for stride in [65_536, -65_536] {
            let step = Step::Strided { stride, len: 8192 };
            let start = 100 * 65_536u64;
            let mut stream = AheadStream::new(step, ByteRange::new(start, 8192));
            let (mut number, mut planned) = (0, Vec::new());
            for n in 1..90 {
                let range = ByteRange::new(start.saturating_add_signed(n * stride), 8192);
                planned
                    .extend(stream.plan(190 * 65_536 + 1, &mut number).into_iter().map(|it| it.1));
                assert!(stream.chunks.len() <= MOST_PIECES as usize);
                assert!(stream.continues(range), "{n}");
                stream.follow(range);
            }
            let expected = |n: usize| start.saturating_add_signed((n as i64 + 1) * stride);
            assert!(planned.iter().enumerate().all(|(n, range)| range.pos == expected(n)));
            assert_eq!(planned.len(), if stride > 0 { 89 } else { 100 }, "to an end of the file");
        }
    }

    #[test]
    fn a_read_is_covered_by_several_chunks_until_they_change_or_are_too_old() {
        let mut stream = AheadStream::new(Step::Sequential, ByteRange::new(0, 4096));
        let mut number = 0;
        let planned = stream.plan(1 << 30, &mut number);
        assert!(planned.len() > 1 && planned[0].1.end() == planned[1].1.pos);
        let across = ByteRange::new(planned[1].1.pos - 4096, 8192);
        let now = Instant::now();
        let queued = stream.cover(across, now);
        assert!(matches!(queued, Cover::Coming { chunk: 0, queued: true }));
        for (number, _) in &planned {
            let memory = Arc::new(AheadMemory::new(LEAST_CHUNK as usize).unwrap());
            stream.chunk(*number).unwrap().state = ChunkState::Ready { memory, since: now };
        }
        let parts = |stream: &AheadStream, now| match stream.cover(across, now) {
            Cover::Ready(parts) => parts.len(),
            Cover::Coming { .. } | Cover::Missing => 0,
        };
        assert_eq!(parts(&stream, now + MAX_AGE), 2);
        assert_eq!(parts(&stream, now + MAX_AGE + std::time::Duration::from_nanos(1)), 0);
        stream.forget(ByteRange::new(0, across.pos));
        stream.forget(ByteRange::new(across.end(), 1 << 30));
        assert_eq!(parts(&stream, now), 2, "the bytes beside it have changed");
        stream.forget(ByteRange::new(across.end() - 1, 1));
        assert_eq!(parts(&stream, now), 0);
    }
}
