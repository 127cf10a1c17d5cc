//! A file of a served image: bytes at any position, by transfers that are aligned for direct I/O.
//!
//! Invariant: a file that is open for direct I/O is written to in no other way, so that no cached
//! page ever overwrites bytes that bypassed the cache. Behind the end of the file there are zeros.

use std::io::{IoSlice, IoSliceMut};

use nowait::{ByteRange, Error, FileStorage, IoBuffer};

use crate::qcow2_disk::iovec_cursor::{Gather, Scatter, gather, scatter};
#[cfg(test)]
use crate::qcow2_disk::tests::{gate, journal};

/// Most bytes that go through a bounce buffer of aligned memory at once.
const BOUNCE_BYTES: u64 = 256 << 10;

/// An open file.
pub(crate) struct AlignedFile {
    storage: FileStorage,
    /// Positions and lengths are multiples of this many bytes.
    block: u64,
    /// Addresses are multiples of this many bytes.
    memory: u64,
}

impl AlignedFile {
    pub(crate) fn new(storage: FileStorage) -> Self {
        let align = storage.alignment();
        Self { storage, block: u64::from(align.offset), memory: u64::from(align.memory) }
    }

    /// Alignment in bytes of the positions and lengths of direct transfers; 1 without direct I/O.
    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    pub(crate) fn storage(&self) -> &FileStorage {
        &self.storage
    }

    fn is_aligned(&self, pos: u64, parts: impl Iterator<Item = (u64, u64)>) -> bool {
        let mut all = pos;
        let mut bases = 0;
        for (base, len) in parts {
            all |= len;
            bases |= base;
        }
        all & (self.block - 1) == 0 && bases & (self.memory - 1) == 0
    }

    /// Fills `parts` with the bytes from `pos` on.
    ///
    /// # Errors
    /// Those of preadv(2); `ENOMEM`.
    pub(crate) fn read(&self, pos: u64, mut parts: Vec<&mut [u8]>) -> Result<(), Error> {
        let total: usize = parts.iter().map(|part| part.len()).sum();
        #[cfg(test)]
        gate::pass(&self.storage, total);
        if self.is_aligned(pos, parts.iter().map(|part| (part.as_ptr() as u64, part.len() as u64)))
        {
            let mut bufs: Vec<_> = parts.iter_mut().map(|part| IoSliceMut::new(part)).collect();
            if self.storage.read_at(&mut bufs, pos)? == total {
                return Ok(());
            }
        }
        let mut bounce = self.bounce(total as u64)?;
        let mut bufs: Vec<_> = parts.into_iter().map(IoSliceMut::new).collect();
        let mut rest = Scatter::new(&mut bufs);
        let end = pos + total as u64;
        let mut at = pos;
        while at < end {
            let (skip, room) = self.block_span(at, end, bounce.len() as u64);
            let blocks = &mut bounce[..room as usize];
            blocks.fill(0);
            self.storage.read_at(&mut [IoSliceMut::new(blocks)], at - skip)?;
            let len = (room - skip).min(end - at);
            scatter(&bounce[skip as usize..(skip + len) as usize], &mut rest.take(len));
            at += len;
        }
        Ok(())
    }

    /// Writes `parts` from `pos` on. Where they do not cover whole blocks, no other thread may
    /// write to these blocks meanwhile.
    ///
    /// # Errors
    /// Those of pwritev(2); `ENOMEM`.
    pub(crate) fn write(&self, pos: u64, parts: &[&[u8]]) -> Result<(), Error> {
        let bufs: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        if self.is_aligned(pos, parts.iter().map(|part| (part.as_ptr() as u64, part.len() as u64)))
        {
            return self.write_all(pos, &bufs);
        }
        let mut rest = Gather::new(&bufs);
        let end = pos + rest.len();
        let mut bounce = self.bounce(rest.len())?;
        let mut at = pos;
        while at < end {
            let (skip, room) = self.block_span(at, end, bounce.len() as u64);
            let len = (room - skip).min(end - at);
            self.read_edges(at - skip, skip, len, &mut bounce[..room as usize])?;
            gather(&rest.take(len), &mut bounce[skip as usize..(skip + len) as usize]);
            self.write_all(at - skip, &[IoSlice::new(&bounce[..room as usize])])?;
            at += len;
        }
        Ok(())
    }

    fn write_all(&self, pos: u64, bufs: &[IoSlice<'_>]) -> Result<(), Error> {
        #[cfg(test)]
        let begun = journal::write(&self.storage, pos, bufs);
        let done = self.storage.write_at(bufs, pos);
        #[cfg(test)]
        journal::ended(&self.storage, begun);
        done
    }

    /// Reads the first and the last block of `blocks`, which begins at `pos`, where the `len`
    /// bytes behind the first `skip` do not cover them.
    fn read_edges(&self, pos: u64, skip: u64, len: u64, blocks: &mut [u8]) -> Result<(), Error> {
        let all = blocks.len() as u64;
        let last = all - self.block;
        let first = (skip > 0).then_some(0);
        let last = (skip + len < all && (last > 0 || first.is_none())).then_some(last);
        for edge in [first, last].into_iter().flatten() {
            let block = &mut blocks[edge as usize..(edge + self.block) as usize];
            block.fill(0);
            self.storage.read_at(&mut [IoSliceMut::new(block)], pos + edge)?;
        }
        Ok(())
    }

    /// The offset of `at` in its block, and how many bytes of whole blocks cover the range from
    /// that block's beginning to `end`, at most `max`.
    fn block_span(&self, at: u64, end: u64, max: u64) -> (u64, u64) {
        let skip = at & (self.block - 1);
        (skip, (end - (at - skip)).next_multiple_of(self.block).min(max))
    }

    fn bounce(&self, len: u64) -> Result<IoBuffer, Error> {
        let max = BOUNCE_BYTES.max(self.block);
        IoBuffer::zeroed((len + 2 * self.block).min(max).next_multiple_of(self.block) as usize)
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// Those of fdatasync(2).
    pub(crate) fn sync(&self) -> Result<(), Error> {
        #[cfg(test)]
        let begun = journal::sync(&self.storage);
        let done = self.storage.sync();
        #[cfg(test)]
        journal::ended(&self.storage, begun);
        done
    }

    /// Makes `range` read as zeros: gives its storage back, or keeps it if `keep` is set.
    ///
    /// # Errors
    /// Those of fallocate(2), such as `EOPNOTSUPP`.
    pub(crate) fn clear(&self, range: ByteRange, keep: bool) -> Result<(), Error> {
        #[cfg(test)]
        let begun = journal::clear(&self.storage, range);
        let mut done = if keep { self.storage.zero(range) } else { self.storage.punch(range) };
        if !keep && done.is_err_and(|error| error.errno() == libc::EOPNOTSUPP) {
            done = self.storage.zero(range);
        }
        #[cfg(test)]
        journal::ended(&self.storage, begun);
        done
    }

    /// Makes the file `bytes` long.
    ///
    /// # Errors
    /// Those of ftruncate(2).
    pub(crate) fn set_len(&self, bytes: u64) -> Result<(), Error> {
        #[cfg(test)]
        let begun = journal::set_len(&self.storage, bytes);
        let done = self.storage.set_len(bytes);
        #[cfg(test)]
        journal::ended(&self.storage, begun);
        done
    }
}
