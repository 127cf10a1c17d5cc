//! Reading both sides again after a copy and comparing them.
//!
//! Invariant: when it has ended well, every byte was either read on both sides and found equal, or
//! is told by both sides to be zero.
//! Knows: error, memory, port, extents, pair. Known by: job.

use nowait::{Buffer, Range};

use crate::error::Error;
use crate::extents::{Piece, Walk};
use crate::memory::Memory;
use crate::pair::{Pair, Phase, STATUS};
use crate::port::{Done, Port, Request, What};

/// A piece that is read on both sides.
struct Both {
    range: Range,
    source: Option<Buffer>,
    target: Option<Buffer>,
}

struct Verify<'a, 'b> {
    pair: &'a mut Pair<'b>,
    walk: Walk,
    memory: Memory,
    rest: Option<Piece>,
    pieces: slab::Slab<Both>,
    done: u64,
}

/// Compares the source to the target, called `name`.
///
/// # Errors
/// The first difference that was found, by its byte; what reading said.
pub(crate) fn run(pair: &mut Pair<'_>, name: &impl ToString) -> Result<(), Error> {
    let walk = pair.walk(false);
    // Each piece takes two buffers, and one that was begun must be able to end.
    let memory = Memory::new(pair.memory.max(4 * pair.chunk as usize));
    let pieces = slab::Slab::new();
    Verify { pair, walk, memory, rest: None, pieces, done: 0 }.run(name)
}

impl Verify<'_, '_> {
    fn run(&mut self, name: &impl ToString) -> Result<(), Error> {
        loop {
            self.pair.ask(&mut self.walk);
            let mut moved = self.begin()?;
            self.pair.advance()?;
            while let Some(done) = self.pair.source.next() {
                moved = true;
                self.came(done, true, name)?;
            }
            while let Some(done) = self.pair.target.next() {
                moved = true;
                self.came(done, false, name)?;
            }
            self.pair.tell(Phase::Verifying, self.done);
            if self.walk.is_over() && self.rest.is_none() && self.pieces.is_empty() {
                return Ok(());
            }
            if !moved {
                self.pair.wait()?;
            }
        }
    }

    fn begin(&mut self) -> Result<bool, Error> {
        let mut begun = false;
        while let Some(piece) = self.rest.take().or_else(|| self.walk.next()) {
            let Piece { range, source_zero, target_zero } = piece;
            if source_zero && target_zero {
                self.done += range.len;
                begun = true;
                continue;
            }
            let len = range.len.min(self.pair.chunk - range.pos % self.pair.chunk);
            let now = Range::new(range.pos, len);
            let Some((source, target)) = self.two(self.pair.padded(now).len as usize)? else {
                self.rest = Some(piece);
                break;
            };
            let tag = self.pieces.insert(Both { range: now, source: None, target: None }) as u64;
            read(&mut *self.pair.source, now, tag, source);
            let padded = self.pair.padded(now);
            read(&mut *self.pair.target, padded, tag, target);
            begun = true;
            if len < range.len {
                let rest = Range::new(range.pos + len, range.len - len);
                self.rest = Some(Piece { range: rest, ..piece });
            }
        }
        Ok(begun)
    }

    /// Memory for both sides, or for neither.
    fn two(&mut self, len: usize) -> Result<Option<(Buffer, Buffer)>, Error> {
        let Some(first) = self.memory.take(len)? else { return Ok(None) };
        match self.memory.take(len)? {
            Some(second) => Ok(Some((first, second))),
            None => {
                self.memory.give(first);
                Ok(None)
            }
        }
    }

    fn came(&mut self, done: Done, source: bool, name: &impl ToString) -> Result<(), Error> {
        let Done { tag, memory, spans, .. } = done;
        if tag == STATUS {
            let extents = if source { &mut self.walk.source } else { &mut self.walk.target };
            extents.answer(&spans);
            return Ok(());
        }
        let Some(both) = self.pieces.get_mut(tag as usize) else { return Ok(()) };
        *(if source { &mut both.source } else { &mut both.target }) = memory;
        if both.source.is_none() || both.target.is_none() {
            return Ok(());
        }
        let Both { range, source, target } = self.pieces.remove(tag as usize);
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

fn read(port: &mut dyn Port, range: Range, tag: u64, memory: Buffer) {
    port.submit(Request { what: What::Read, range, tag, memory: Some(memory) });
}
