//! The copy itself: what is data on the source is read and written, what is zeros is made so.
//!
//! Invariant: when it has ended well, each byte of the source was written to the target as it was
//! read, or reads as zero there if it is zero; the flush came after all of it.
//! Knows: error, zeros, memory, port, extents, pair. Known by: job.

use nowait::{Buffer, Range};

use crate::error::Error;
use crate::extents::{Piece, Walk};
use crate::memory::Memory;
use crate::pair::{Pair, Phase, STATUS};
use crate::port::{Done, Request, What};
use crate::zeros::{Run, runs};

/// Requests in flight at most, for each of the largest that fit the memory: many small pieces are
/// under way together.
const PIECES_PER_CHUNK: usize = 8;
/// Zeros found in data are written like data unless so many lie together, in bytes, where to make
/// them zero takes a request of its own.
const ZERO_RUN_BYTES: usize = 64 << 10;

/// What a copy came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Bytes that were read and written.
    pub(crate) data: u64,
    /// Bytes that were zero on the source.
    pub(crate) zero: u64,
}

/// How zeros are treated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Zeros {
    /// Data is searched for zeros in blocks of so many bytes; 0 for not at all.
    pub(crate) block: usize,
    /// Whether all of the target reads as zeros before the copy.
    pub(crate) target_is_zero: bool,
}

struct Transfer<'a, 'b> {
    pair: &'a mut Pair<'b>,
    walk: Walk,
    zeros: Zeros,
    memory: Memory,
    /// What is left of the piece that was begun.
    rest: Option<Piece>,
    /// By tag: the pieces under way.
    pieces: slab::Slab<Piece>,
    max_pieces: usize,
    counts: Counts,
    done: u64,
}

/// Copies all of the source to the target and flushes it.
pub(crate) fn run(pair: &mut Pair<'_>, zeros: Zeros) -> Result<Counts, Error> {
    let walk = pair.walk(zeros.target_is_zero);
    let memory = Memory::new(pair.memory);
    let max_pieces = (pair.memory / pair.chunk.max(1) as usize).max(1) * PIECES_PER_CHUNK;
    let (pieces, counts) = (slab::Slab::new(), Counts::default());
    let mut transfer =
        Transfer { pair, walk, zeros, memory, rest: None, pieces, max_pieces, counts, done: 0 };
    transfer.run()?;
    let counts = transfer.counts;
    flush(pair)?;
    pair.target.finish()?;
    Ok(counts)
}

/// Makes what was written durable.
fn flush(pair: &mut Pair<'_>) -> Result<(), Error> {
    if !pair.target.facts().flushes {
        return Ok(());
    }
    pair.tell(Phase::Flushing, pair.size);
    let range = Range::new(0, 0);
    pair.target.submit(Request { what: What::Flush, range, tag: 0, memory: None });
    loop {
        pair.advance()?;
        if pair.target.next().is_some() {
            return Ok(());
        }
        pair.wait()?;
    }
}

impl Transfer<'_, '_> {
    fn run(&mut self) -> Result<(), Error> {
        loop {
            self.pair.ask(&mut self.walk);
            let mut moved = self.begin()?;
            self.pair.advance()?;
            while let Some(done) = self.pair.source.next() {
                moved = true;
                self.came(done);
            }
            while let Some(done) = self.pair.target.next() {
                moved = true;
                self.went(done);
            }
            self.pair.tell(Phase::Copying, self.done);
            if self.walk.is_over() && self.rest.is_none() && self.pieces.is_empty() {
                return Ok(());
            }
            if !moved {
                self.pair.wait()?;
            }
        }
    }

    /// Begins as many pieces as there is room for; tells whether any.
    fn begin(&mut self) -> Result<bool, Error> {
        let mut begun = false;
        while self.pieces.len() < self.max_pieces {
            let Some(piece) = self.rest.take().or_else(|| self.walk.next()) else { break };
            let max_zero = self.pair.target.facts().max_zero_bytes;
            let limit = match (piece.source_zero, piece.target_zero) {
                (true, true) => piece.range.len,
                (true, false) if max_zero > 0 => max_zero,
                _ => self.pair.chunk - piece.range.pos % self.pair.chunk,
            };
            let len = piece.range.len.min(limit);
            let now = Piece { range: Range::new(piece.range.pos, len), ..piece };
            let memory = if piece.source_zero && (piece.target_zero || max_zero > 0) {
                None
            } else {
                match self.memory.take(self.pair.padded(now.range).len as usize)? {
                    Some(memory) => Some(memory),
                    None => {
                        self.rest = Some(piece);
                        break;
                    }
                }
            };
            self.submit(now, memory);
            begun = true;
            if len < piece.range.len {
                let rest = Range::new(piece.range.pos + len, piece.range.len - len);
                self.rest = Some(Piece { range: rest, ..piece });
            }
        }
        Ok(begun)
    }

    fn submit(&mut self, piece: Piece, memory: Option<Buffer>) {
        let Piece { range, source_zero, target_zero } = piece;
        if source_zero {
            self.counts.zero += range.len;
            if target_zero {
                self.done += range.len;
                return;
            }
        }
        let tag = self.pieces.insert(piece) as u64;
        match memory {
            Some(mut memory) if source_zero => {
                memory.fill(0);
                let len = self.pair.padded(range).len as usize;
                self.write(range, tag, memory, vec![Run { start: 0, len, zero: false }]);
            }
            Some(memory) => {
                let memory = Some(memory);
                self.pair.source.submit(Request { what: What::Read, range, tag, memory });
            }
            None => {
                let range = self.pair.padded(range);
                self.pair.target.submit(Request { what: What::Zero, range, tag, memory: None });
            }
        }
    }

    fn write(&mut self, range: Range, tag: u64, memory: Buffer, runs: Vec<Run>) {
        let (range, memory) = (self.pair.padded(range), Some(memory));
        self.pair.target.submit(Request { what: What::Write(runs), range, tag, memory });
    }

    /// Something came from the source.
    fn came(&mut self, done: Done) {
        let Done { tag, range, memory, spans } = done;
        if tag == STATUS {
            self.walk.source.answer(&spans);
            return;
        }
        let (Some(&piece), Some(mut memory)) = (self.pieces.get(tag as usize), memory) else {
            return;
        };
        let (len, padded) = (range.len as usize, self.pair.padded(range).len as usize);
        if let Some(tail) = memory.get_mut(len..padded) {
            tail.fill(0);
        }
        let bytes = memory.get(..padded).unwrap_or_default();
        let mut runs = match self.zeros.block {
            0 => vec![Run { start: 0, len: padded, zero: false }],
            block if piece.target_zero => runs(bytes, block),
            block => runs(bytes, block.max(ZERO_RUN_BYTES)),
        };
        if piece.target_zero {
            runs.retain(|run| !run.zero);
        }
        let data: usize = runs.iter().filter(|run| !run.zero).map(|run| run.len).sum();
        self.counts.data += data as u64;
        self.counts.zero += (len as u64).saturating_sub(data as u64);
        self.write(range, tag, memory, runs);
    }

    /// Something has ended on the target.
    fn went(&mut self, done: Done) {
        if done.tag == STATUS {
            self.walk.target.answer(&done.spans);
            return;
        }
        if let Some(memory) = done.memory {
            self.memory.give(memory);
        }
        if let Some(piece) = self.pieces.try_remove(done.tag as usize) {
            self.done += piece.range.len;
        }
    }
}
