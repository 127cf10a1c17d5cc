//! Compares source and target after a copy by reading both again.
//!
//! Invariant: after success, every byte was either read from both endpoints and found equal, or is
//! reported as zero by both.

use nowait::{ByteRange, IoBuffer};

use crate::buffer_pool::BufferPool;
use crate::copy_loop::{Endpoints, Phase, STATUS};
use crate::endpoint::{Completed, CopyOperation, CopyRequest, Endpoint};
use crate::error::Error;
use crate::zero_map::{CopyExtent, ExtentIterator};

/// A piece that is read from both endpoints.
struct ReadPair {
    range: ByteRange,
    source: Option<IoBuffer>,
    target: Option<IoBuffer>,
}

struct Verify<'a, 'b> {
    endpoints: &'a mut Endpoints<'b>,
    extents: ExtentIterator,
    memory: BufferPool,
    rest: Option<CopyExtent>,
    pieces: slab::Slab<ReadPair>,
    done: u64,
}

/// Compares the source with the target, which is called `name` in errors.
///
/// # Errors
/// The first difference that was found, with its byte offset; a read failed.
pub(crate) fn run(endpoints: &mut Endpoints<'_>, name: &impl ToString) -> Result<(), Error> {
    let extents = endpoints.extents(false);
    // Each piece takes two buffers, and the memory must suffice for at least one piece.
    let memory = BufferPool::new(endpoints.memory.max(4 * endpoints.request_bytes as usize));
    let pieces = slab::Slab::new();
    Verify { endpoints, extents, memory, rest: None, pieces, done: 0 }.run(name)
}

impl Verify<'_, '_> {
    fn run(&mut self, name: &impl ToString) -> Result<(), Error> {
        loop {
            self.endpoints.query(&mut self.extents);
            let mut progressed = self.start_pieces()?;
            self.endpoints.advance()?;
            while let Some(done) = self.endpoints.source.next() {
                progressed = true;
                self.on_read(done, true, name)?;
            }
            while let Some(done) = self.endpoints.target.next() {
                progressed = true;
                self.on_read(done, false, name)?;
            }
            self.endpoints.report(Phase::Verifying, self.done, 0);
            if self.extents.is_over() && self.rest.is_none() && self.pieces.is_empty() {
                return Ok(());
            }
            if !progressed {
                self.endpoints.wait()?;
            }
        }
    }

    fn start_pieces(&mut self) -> Result<bool, Error> {
        let mut started = false;
        while let Some(piece) = self.rest.take().or_else(|| self.extents.next()) {
            let CopyExtent { range, source_zero, target_zero } = piece;
            if source_zero && target_zero {
                self.done += range.len;
                started = true;
                continue;
            }
            let len = range
                .len
                .min(self.endpoints.request_bytes - range.pos % self.endpoints.request_bytes);
            let part = ByteRange::new(range.pos, len);
            let Some((source, target)) =
                self.buffer_pair(self.endpoints.padded(part).len as usize)?
            else {
                self.rest = Some(piece);
                break;
            };
            let tag =
                self.pieces.insert(ReadPair { range: part, source: None, target: None }) as u64;
            read(&mut *self.endpoints.source, part, tag, source);
            let padded = self.endpoints.padded(part);
            read(&mut *self.endpoints.target, padded, tag, target);
            started = true;
            if len < range.len {
                let rest = ByteRange::new(range.pos + len, range.len - len);
                self.rest = Some(CopyExtent { range: rest, ..piece });
            }
        }
        Ok(started)
    }

    /// Memory for both endpoints, or for neither.
    fn buffer_pair(&mut self, len: usize) -> Result<Option<(IoBuffer, IoBuffer)>, Error> {
        let Some(first) = self.memory.take(len)? else { return Ok(None) };
        match self.memory.take(len)? {
            Some(second) => Ok(Some((first, second))),
            None => {
                self.memory.give(first);
                Ok(None)
            }
        }
    }

    fn on_read(
        &mut self,
        done: Completed,
        source: bool,
        name: &impl ToString,
    ) -> Result<(), Error> {
        let Completed { tag, memory, extents, .. } = done;
        if tag == STATUS {
            let map = if source { &mut self.extents.source } else { &mut self.extents.target };
            map.on_extents(&extents);
            return Ok(());
        }
        let Some(reads) = self.pieces.get_mut(tag as usize) else { return Ok(()) };
        *(if source { &mut reads.source } else { &mut reads.target }) = memory;
        if reads.source.is_none() || reads.target.is_none() {
            return Ok(());
        }
        let ReadPair { range, source, target } = self.pieces.remove(tag as usize);
        let (Some(source), Some(target)) = (source, target) else { return Ok(()) };
        let len = range.len as usize;
        let (left, right) = (source.get(..len), target.get(..len));
        if left != right {
            let differs = left.unwrap_or_default().iter().zip(right.unwrap_or_default());
            let at = differs.take_while(|(left, right)| left == right).count() as u64;
            let what = format!("it differs from the source at byte {}", range.pos + at);
            return Err(Error::at(name, what));
        }
        self.memory.give(source);
        self.memory.give(target);
        self.done += range.len;
        Ok(())
    }
}

fn read(endpoint: &mut dyn Endpoint, range: ByteRange, tag: u64, memory: IoBuffer) {
    endpoint.submit(CopyRequest {
        operation: CopyOperation::Read,
        range,
        tag,
        memory: Some(memory),
    });
}
