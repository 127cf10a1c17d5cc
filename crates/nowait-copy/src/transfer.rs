//! The copy itself: reads and writes the source's data, and zeroes the target where the source is
//! zero.
//!
//! Invariant: after success, each byte of the source was written to the target as it was read, or
//! reads as zero there if it is zero; the flush followed all writes.

use nowait::{ByteRange, IoBuffer};

use crate::buffer_pool::BufferPool;
use crate::copy_loop::{Endpoints, Phase, STATUS};
use crate::endpoint::{Completed, CopyOperation, CopyRequest};
use crate::error::Error;
use crate::zero_detection::{DataRun, data_runs};
use crate::zero_map::{CopyExtent, ExtentIterator};

/// The limit on pieces in flight, as a multiple of the number of largest requests that fit the
/// memory: many small pieces can be in flight together.
const PIECES_PER_REQUEST: usize = 8;
/// Runs of zeros within data that are shorter than this many bytes are written as data: zeroing
/// takes a request of its own.
const ZERO_RUN_BYTES: usize = 64 << 10;

/// The byte counts of a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Bytes that were read and written.
    pub(crate) data: u64,
    /// Bytes of the source that were zero.
    pub(crate) zero: u64,
    /// Bytes that an incremental copy left alone.
    pub(crate) unchanged: u64,
}

/// How zeros are handled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Zeros {
    /// Data is searched for zeros in blocks of this many bytes; 0 disables the search.
    pub(crate) block: usize,
    /// Whether all of the target reads as zeros before the copy.
    pub(crate) target_is_zero: bool,
}

struct Transfer<'a, 'b> {
    endpoints: &'a mut Endpoints<'b>,
    extents: ExtentIterator,
    zeros: Zeros,
    memory: BufferPool,
    /// The remainder of a piece that was started in part.
    rest: Option<CopyExtent>,
    /// The pieces in flight, indexed by tag.
    pieces: slab::Slab<CopyExtent>,
    max_pieces: usize,
    counts: Counts,
    done: u64,
}

/// How a copy has ended that has not failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Complete(Counts),
    /// At the deadline, with this many requests in flight.
    Late(usize),
}

/// Copies all of the source to the target and flushes it.
pub(crate) fn run(endpoints: &mut Endpoints<'_>, zeros: Zeros) -> Result<Counts, Error> {
    let extents = endpoints.extents(zeros.target_is_zero);
    let counts = match copy(endpoints, extents, zeros)? {
        Ended::Complete(counts) => counts,
        // There is no deadline.
        Ended::Late(_) => return Err(Error::Interrupted),
    };
    flush(endpoints)?;
    endpoints.target.finish()?;
    Ok(counts)
}

/// Copies what `extents` has to the target.
pub(crate) fn copy(
    endpoints: &mut Endpoints<'_>,
    extents: ExtentIterator,
    zeros: Zeros,
) -> Result<Ended, Error> {
    let memory = BufferPool::new(endpoints.memory);
    let max_pieces =
        (endpoints.memory / endpoints.request_bytes.max(1) as usize).max(1) * PIECES_PER_REQUEST;
    let (pieces, counts) = (slab::Slab::new(), Counts::default());
    let mut transfer = Transfer {
        endpoints,
        extents,
        zeros,
        memory,
        rest: None,
        pieces,
        max_pieces,
        counts,
        done: 0,
    };
    transfer.run()
}

/// Makes all writes durable.
pub(crate) fn flush(endpoints: &mut Endpoints<'_>) -> Result<Ended, Error> {
    let complete = Ended::Complete(Counts::default());
    if !endpoints.target.capabilities().has_flush {
        return Ok(complete);
    }
    endpoints.report(Phase::Flushing, endpoints.size, 0);
    let range = ByteRange::new(0, 0);
    endpoints.target.submit(CopyRequest {
        operation: CopyOperation::Flush,
        range,
        tag: 0,
        memory: None,
    });
    loop {
        endpoints.advance()?;
        if endpoints.target.next().is_some() {
            return Ok(complete);
        }
        if endpoints.is_late() {
            return Ok(Ended::Late(1));
        }
        endpoints.wait()?;
    }
}

/// Waits until `requests` of an earlier copy, which was late, have ended; their results do not matter.
pub(crate) fn settle(endpoints: &mut Endpoints<'_>, requests: usize) -> Result<(), Error> {
    let mut left = requests;
    while left > 0 {
        endpoints.advance()?;
        let before = left;
        while endpoints.source.next().is_some() || endpoints.target.next().is_some() {
            left = left.saturating_sub(1);
        }
        if left == before {
            endpoints.wait()?;
        }
    }
    Ok(())
}

impl Transfer<'_, '_> {
    fn run(&mut self) -> Result<Ended, Error> {
        loop {
            self.endpoints.query(&mut self.extents);
            let mut progressed = self.start_pieces()?;
            self.endpoints.advance()?;
            while let Some(done) = self.endpoints.source.next() {
                progressed = true;
                self.on_read(done);
            }
            while let Some(done) = self.endpoints.target.next() {
                progressed = true;
                self.on_written(done);
            }
            let moved = self.counts.data + self.counts.zero;
            self.endpoints.report(Phase::Copying, self.done, moved);
            if self.extents.is_over() && self.rest.is_none() && self.pieces.is_empty() {
                return Ok(Ended::Complete(self.counts));
            }
            if self.endpoints.is_late() {
                return Ok(Ended::Late(self.pieces.len()));
            }
            if !progressed {
                self.endpoints.wait()?;
            }
        }
    }

    /// Starts as many pieces as the memory allows; returns whether any was started.
    fn start_pieces(&mut self) -> Result<bool, Error> {
        let mut started = false;
        while self.pieces.len() < self.max_pieces {
            if !self.endpoints.may_move() {
                break;
            }
            let Some(piece) = self.rest.take().or_else(|| self.extents.next()) else { break };
            let max_zero = self.endpoints.target.capabilities().max_zero_bytes;
            let limit = match (piece.source_zero, piece.target_zero) {
                (true, true) => piece.range.len,
                (true, false) if max_zero > 0 => max_zero,
                _ => self.endpoints.request_bytes - piece.range.pos % self.endpoints.request_bytes,
            };
            let len = piece.range.len.min(limit);
            let part = CopyExtent { range: ByteRange::new(piece.range.pos, len), ..piece };
            let memory = if piece.source_zero && (piece.target_zero || max_zero > 0) {
                None
            } else {
                match self.memory.take(self.endpoints.padded(part.range).len as usize)? {
                    Some(memory) => Some(memory),
                    None => {
                        self.rest = Some(piece);
                        break;
                    }
                }
            };
            self.submit(part, memory);
            started = true;
            if len < piece.range.len {
                let rest = ByteRange::new(piece.range.pos + len, piece.range.len - len);
                self.rest = Some(CopyExtent { range: rest, ..piece });
            }
        }
        Ok(started)
    }

    fn submit(&mut self, piece: CopyExtent, memory: Option<IoBuffer>) {
        let CopyExtent { range, source_zero, target_zero } = piece;
        if source_zero && self.extents.is_incremental {
            self.counts.unchanged += range.len;
            self.done += range.len;
            return;
        }
        if source_zero {
            self.counts.zero += range.len;
            if target_zero {
                self.done += range.len;
                return;
            }
        }
        self.endpoints.timing.rate.iter_mut().for_each(|rate| rate.count(range.len));
        let tag = self.pieces.insert(piece) as u64;
        match memory {
            Some(mut memory) if source_zero => {
                memory.fill(0);
                let len = self.endpoints.padded(range).len as usize;
                self.write(range, tag, memory, vec![DataRun { start: 0, len, zero: false }]);
            }
            Some(memory) => {
                let memory = Some(memory);
                self.endpoints.source.submit(CopyRequest {
                    operation: CopyOperation::Read,
                    range,
                    tag,
                    memory,
                });
            }
            None => {
                let range = self.endpoints.padded(range);
                self.endpoints.has_written = true;
                self.endpoints.target.submit(CopyRequest {
                    operation: CopyOperation::Zero,
                    range,
                    tag,
                    memory: None,
                });
            }
        }
    }

    fn write(&mut self, range: ByteRange, tag: u64, memory: IoBuffer, runs: Vec<DataRun>) {
        let (range, memory) = (self.endpoints.padded(range), Some(memory));
        self.endpoints.has_written = true;
        self.endpoints.target.submit(CopyRequest {
            operation: CopyOperation::Write(runs),
            range,
            tag,
            memory,
        });
    }

    /// Handles a completion of the source.
    fn on_read(&mut self, done: Completed) {
        let Completed { tag, range, memory, extents, .. } = done;
        if tag == STATUS {
            self.extents.source.on_extents(&extents);
            return;
        }
        let (Some(&piece), Some(mut memory)) = (self.pieces.get(tag as usize), memory) else {
            return;
        };
        let (len, padded) = (range.len as usize, self.endpoints.padded(range).len as usize);
        if let Some(tail) = memory.get_mut(len..padded) {
            tail.fill(0);
        }
        let bytes = memory.get(..padded).unwrap_or_default();
        let mut runs = match self.zeros.block {
            0 => vec![DataRun { start: 0, len: padded, zero: false }],
            block if piece.target_zero => data_runs(bytes, block),
            block => data_runs(bytes, block.max(ZERO_RUN_BYTES)),
        };
        if piece.target_zero {
            runs.retain(|run| !run.zero);
        }
        let data: usize = runs.iter().filter(|run| !run.zero).map(|run| run.len).sum();
        self.counts.data += data as u64;
        self.counts.zero += (len as u64).saturating_sub(data as u64);
        self.write(range, tag, memory, runs);
    }

    /// Handles a completion of the target.
    fn on_written(&mut self, done: Completed) {
        if done.tag == STATUS {
            self.extents.target.on_extents(&done.extents);
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
