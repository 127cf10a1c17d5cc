//! A file of an image in use: bytes at any position, by transfers that direct I/O takes.
//!
//! Invariant: where the file is open for direct I/O, nothing is written to it in another way, so
//! that no cached page is ever written over what went past the cache. Behind the end of the file
//! there are zeros.
//! Knows: parts. Known by: store, layers, image.

use std::io::{IoSlice, IoSliceMut};

use nowait::{Buffer, Error, Range, Storage};

use super::parts::{Gather, Scatter, gather, scatter};
#[cfg(test)]
use super::tests::{gate, journal};

/// Bytes that go through a buffer of aligned memory at once.
const BOUNCE_BYTES: u64 = 256 << 10;

/// An open file.
pub(crate) struct Medium {
    storage: Storage,
    /// What positions and lengths are multiples of, in bytes.
    block: u64,
    /// What addresses are multiples of, in bytes.
    memory: u64,
}

impl Medium {
    pub(crate) fn new(storage: Storage) -> Self {
        let align = storage.alignment();
        Self { storage, block: u64::from(align.offset), memory: u64::from(align.memory) }
    }

    /// What positions and lengths of direct transfers are multiples of; 1 if there are none.
    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    pub(crate) fn storage(&self) -> &Storage {
        &self.storage
    }

    fn takes(&self, pos: u64, parts: impl Iterator<Item = (u64, u64)>) -> bool {
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
    /// What preadv(2) said; `ENOMEM`.
    pub(crate) fn read(&self, pos: u64, mut parts: Vec<&mut [u8]>) -> Result<(), Error> {
        let total: usize = parts.iter().map(|part| part.len()).sum();
        #[cfg(test)]
        gate::pass(&self.storage, total);
        if self.takes(pos, parts.iter().map(|part| (part.as_ptr() as u64, part.len() as u64))) {
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
            let (skip, room) = self.around(at, end, bounce.len() as u64);
            let blocks = &mut bounce[..room as usize];
            blocks.fill(0);
            self.storage.read_at(&mut [IoSliceMut::new(blocks)], at - skip)?;
            let len = (room - skip).min(end - at);
            scatter(&bounce[skip as usize..(skip + len) as usize], &mut rest.take(len));
            at += len;
        }
        Ok(())
    }

    /// Writes `parts` from `pos` on. Where they do not cover whole blocks, nobody else may write
    /// to these meanwhile.
    ///
    /// # Errors
    /// What pwritev(2) said; `ENOMEM`.
    pub(crate) fn write(&self, pos: u64, parts: &[&[u8]]) -> Result<(), Error> {
        if self.takes(pos, parts.iter().map(|part| (part.as_ptr() as u64, part.len() as u64))) {
            let bufs: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
            return self.put(pos, &bufs);
        }
        let bufs: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut rest = Gather::new(&bufs);
        let end = pos + rest.len();
        let mut bounce = self.bounce(rest.len())?;
        let mut at = pos;
        while at < end {
            let (skip, room) = self.around(at, end, bounce.len() as u64);
            let len = (room - skip).min(end - at);
            self.read_edges(at - skip, skip, len, &mut bounce[..room as usize])?;
            gather(&rest.take(len), &mut bounce[skip as usize..(skip + len) as usize]);
            self.put(at - skip, &[IoSlice::new(&bounce[..room as usize])])?;
            at += len;
        }
        Ok(())
    }

    fn put(&self, pos: u64, bufs: &[IoSlice<'_>]) -> Result<(), Error> {
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

    /// How far before `at` the block begins that it is in, and how many bytes of whole blocks go
    /// from there up to `end`, at most `most`.
    fn around(&self, at: u64, end: u64, most: u64) -> (u64, u64) {
        let skip = at & (self.block - 1);
        (skip, (end - (at - skip)).next_multiple_of(self.block).min(most))
    }

    fn bounce(&self, len: u64) -> Result<Buffer, Error> {
        let most = BOUNCE_BYTES.max(self.block);
        Buffer::zeroed((len + 2 * self.block).min(most).next_multiple_of(self.block) as usize)
    }

    /// Makes everything durable that was written.
    ///
    /// # Errors
    /// What fdatasync(2) said.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        #[cfg(test)]
        let begun = journal::sync(&self.storage);
        let done = self.storage.sync();
        #[cfg(test)]
        journal::ended(&self.storage, begun);
        done
    }

    /// Makes `range` read as zeros: gives its storage back, or keeps it.
    ///
    /// # Errors
    /// What fallocate(2) said; `EOPNOTSUPP`.
    pub(crate) fn clear(&self, range: Range, keep: bool) -> Result<(), Error> {
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
    /// What ftruncate(2) said.
    pub(crate) fn set_len(&self, bytes: u64) -> Result<(), Error> {
        #[cfg(test)]
        let begun = journal::set_len(&self.storage, bytes);
        let done = self.storage.set_len(bytes);
        #[cfg(test)]
        journal::ended(&self.storage, begun);
        done
    }
}
