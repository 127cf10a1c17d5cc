//! The copy itself: reads and writes the source's data, and zeroes the target where the source is
//! zero.
//!
//! Invariant: after success, each byte of the source was written to the target as it was read, or
//! reads as zero there if it is zero, or was found to be the same there; the flush followed all writes.

use nowait::{ByteRange, IoBuffer};

use crate::buffer_pool::BufferPool;
use crate::copy_loop::{Endpoints, Phase, STATUS};
use crate::endpoint::{Completed, CopyOperation, CopyRequest};
use crate::error::Error;
use crate::zero_detection::{DataRun, changed_runs, data_runs};
use crate::zero_map::{CopyExtent, ExtentIterator};

/// The limit on pieces in flight, as a multiple of the number of largest requests that fit the
/// memory: many small pieces can be in flight together.
const PIECES_PER_REQUEST: usize = 8;
/// Runs of zeros within data that are shorter than this many bytes are written as data: zeroing
/// takes a request of its own.
const ZERO_RUN_BYTES: usize = 64 << 10;
/// Differences from an earlier copy are found in blocks of this many bytes.
const COMPARED_BYTES: usize = 4 << 10;

/// The byte counts of a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Bytes that were read and written.
    pub(crate) data: u64,
    /// Bytes of the source that were zero.
    pub(crate) zero: u64,
    /// Bytes that an incremental copy left alone.
    pub(crate) unchanged: u64,
    /// Bytes of the target that were read.
    pub(crate) compared: u64,
}

/// How zeros are handled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Zeros {
    /// Data is searched for zeros in blocks of this many bytes; 0 disables the search.
    pub(crate) block: usize,
    /// Whether all of the target reads as zeros before the copy.
    pub(crate) target_is_zero: bool,
}

/// A part of the disk in flight.
struct Piece {
    extent: CopyExtent,
    /// While it is to be compared: first the memory for the target's bytes, and while these are read the source's bytes.
    other: Option<IoBuffer>,
}

struct Transfer<'a, 'b> {
    endpoints: &'a mut Endpoints<'b>,
    extents: ExtentIterator,
    zeros: Zeros,
    memory: BufferPool,
    /// The remainder of a piece that was started in part.
    rest: Option<CopyExtent>,
    /// The pieces in flight, indexed by tag.
    pieces: slab::Slab<Piece>,
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
    // A piece that is compared takes two buffers, and the memory must suffice for at least one piece.
    let least = if endpoints.compares { 4 * endpoints.request_bytes as usize } else { 0 };
    let memory = BufferPool::new(endpoints.memory.max(least));
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
            let compares = self.endpoints.compares && !piece.target_zero;
            let limit = match (piece.source_zero, piece.target_zero) {
                (true, true) => piece.range.len,
                (true, false) if max_zero > 0 && !compares => max_zero,
                _ => self.endpoints.request_bytes - piece.range.pos % self.endpoints.request_bytes,
            };
            let len = piece.range.len.min(limit);
            let part = CopyExtent { range: ByteRange::new(piece.range.pos, len), ..piece };
            let needs_none = piece.source_zero && (piece.target_zero || max_zero > 0);
            let (memory, other) = match needs_none && !compares {
                true => (None, None),
                false => match self.buffers(part.range, compares)? {
                    Some((memory, other)) => (Some(memory), other),
                    None => {
                        self.rest = Some(piece);
                        break;
                    }
                },
            };
            self.submit(part, memory, other);
            started = true;
            if len < piece.range.len {
                let rest = ByteRange::new(piece.range.pos + len, piece.range.len - len);
                self.rest = Some(CopyExtent { range: rest, ..piece });
            }
        }
        Ok(started)
    }

    /// Memory for a piece of `range`, and for the target's bytes if it is compared; or for neither.
    fn buffers(
        &mut self,
        range: ByteRange,
        compares: bool,
    ) -> Result<Option<(IoBuffer, Option<IoBuffer>)>, Error> {
        let len = self.endpoints.padded(range).len as usize;
        let Some(first) = self.memory.take(len)? else { return Ok(None) };
        if !compares {
            return Ok(Some((first, None)));
        }
        let second = self.memory.take(len)?;
        if second.is_none() {
            self.memory.give(first);
            return Ok(None);
        }
        Ok(Some((first, second)))
    }

    fn submit(&mut self, extent: CopyExtent, memory: Option<IoBuffer>, other: Option<IoBuffer>) {
        let CopyExtent { range, source_zero, target_zero } = extent;
        let is_same = self.extents.is_incremental || (self.endpoints.compares && target_zero);
        if source_zero && is_same {
            self.counts.unchanged += range.len;
            self.done += range.len;
            return;
        }
        let compares = other.is_some();
        if source_zero && !compares {
            self.counts.zero += range.len;
            if target_zero {
                self.done += range.len;
                return;
            }
        }
        self.endpoints.timing.rate.iter_mut().for_each(|rate| rate.count(range.len));
        let tag = self.pieces.insert(Piece { extent, other }) as u64;
        match memory {
            Some(mut memory) if source_zero => {
                memory.fill(0);
                if compares {
                    return self.read_target(tag, memory);
                }
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

    /// Reads from the target what piece `tag` has there, to compare it with the source's bytes in `memory`.
    fn read_target(&mut self, tag: u64, memory: IoBuffer) {
        let Some(piece) = self.pieces.get_mut(tag as usize) else { return };
        let (operation, memory) = (CopyOperation::Read, piece.other.replace(memory));
        let range = self.endpoints.padded(piece.extent.range);
        self.counts.compared += piece.extent.range.len;
        self.endpoints.target.submit(CopyRequest { operation, range, tag, memory });
    }

    /// Writes what differs between the source's bytes of piece `tag` and those of the target, which were read.
    fn on_target_read(&mut self, tag: u64, range: ByteRange, from: IoBuffer, to: IoBuffer) {
        let len = self.endpoints.padded(range).len as usize;
        let zero_block = match self.zeros.block {
            0 => 0,
            block => block.max(ZERO_RUN_BYTES),
        };
        let (new, old) = (from.get(..len), to.get(..len));
        let block = self.compared_bytes();
        let runs =
            changed_runs(new.unwrap_or_default(), old.unwrap_or_default(), block, zero_block);
        self.memory.give(to);
        self.write_changes(range, tag, from, runs);
    }

    /// Writes the parts of a piece that differ; the rest is the same on the target.
    fn write_changes(&mut self, range: ByteRange, tag: u64, memory: IoBuffer, runs: Vec<DataRun>) {
        self.count_changes(range, &runs);
        if !runs.is_empty() {
            return self.write(range, tag, memory, runs);
        }
        self.memory.give(memory);
        self.pieces.try_remove(tag as usize);
        self.done += range.len;
    }

    /// The unit in which differences are found.
    fn compared_bytes(&self) -> usize {
        COMPARED_BYTES.max(self.endpoints.alignment as usize)
    }

    /// Counts the parts of `range` that are written, and the rest, which is the same on the target.
    fn count_changes(&mut self, range: ByteRange, runs: &[DataRun]) {
        let bytes =
            |zero| -> usize { runs.iter().filter(|run| run.zero == zero).map(|run| run.len).sum() };
        let data = range.len.min(bytes(false) as u64);
        let zero = (range.len - data).min(bytes(true) as u64);
        self.counts.data += data;
        self.counts.zero += zero;
        self.counts.unchanged += range.len - data - zero;
    }

    /// Handles a completion of the source.
    fn on_read(&mut self, done: Completed) {
        let Completed { tag, range, memory, extents, .. } = done;
        if tag == STATUS {
            self.extents.source.on_extents(&extents);
            return;
        }
        let (Some(piece), Some(mut memory)) = (self.pieces.get(tag as usize), memory) else {
            return;
        };
        let (target_zero, compares) = (piece.extent.target_zero, piece.other.is_some());
        let (len, padded) = (range.len as usize, self.endpoints.padded(range).len as usize);
        if let Some(tail) = memory.get_mut(len..padded) {
            tail.fill(0);
        }
        if compares {
            return self.read_target(tag, memory);
        }
        let bytes = memory.get(..padded).unwrap_or_default();
        let mut runs = match self.zeros.block {
            _ if self.endpoints.compares => data_runs(bytes, self.compared_bytes()),
            0 => vec![DataRun { start: 0, len: padded, zero: false }],
            block if target_zero => data_runs(bytes, block),
            block => data_runs(bytes, block.max(ZERO_RUN_BYTES)),
        };
        if target_zero {
            runs.retain(|run| !run.zero);
        }
        if self.endpoints.compares {
            return self.write_changes(range, tag, memory, runs);
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
        let piece = self.pieces.get_mut(done.tag as usize);
        let compared = piece.and_then(|it| Some((it.extent.range, it.other.take()?)));
        match (compared, done.memory) {
            (Some((range, from)), Some(to)) => {
                return self.on_target_read(done.tag, range, from, to);
            }
            (_, Some(memory)) => self.memory.give(memory),
            (_, None) => {}
        }
        if let Some(piece) = self.pieces.try_remove(done.tag as usize) {
            self.done += piece.extent.range.len;
        }
    }
}
