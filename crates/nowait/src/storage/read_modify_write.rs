//! Reads and writes of any position, length and memory, by transfers that are aligned for direct
//! I/O: whole blocks, through a bounce buffer where the request does not cover them.
//!
//! Invariant: a storage that is open for direct I/O is written to in no other way, so that no
//! cached page overwrites bytes that bypassed the cache. The only exception is the block in which a
//! file ends: a direct write of the whole block would grow the file.

use crate::memory::bounce_buffer::BounceBuffer;
use crate::storage::Storage;
use crate::types::alignment::{round_down, round_up};
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::io_cursor::{ReadCursor, WriteCursor};
use crate::types::request::Flags;

/// The greatest size of a bounce buffer in bytes, unless a block is larger.
const BOUNCE_BYTES: u64 = 256 << 10;

impl dyn Storage + '_ {
    /// Fills `memory` with the bytes from `pos` on. The cursor is advanced by the bytes read, also
    /// before an error; without an error some are left only where the storage ends.
    ///
    /// # Errors
    /// The errno of a read; `ENOMEM`.
    pub fn read_at(&self, pos: u64, memory: &mut ReadCursor<'_>) -> Result<(), Error> {
        let align = self.properties().align;
        let block = align.read_offset;
        if round_down(pos, block) == pos && memory.is_aligned(align.memory, block) {
            return self.read_blocks(pos, memory);
        }
        let mut bounce = bounce_for(memory.len(), block)?;
        let mut pos = pos;
        while !memory.is_empty() {
            let (skip, len) = blocks_around(pos, memory.len(), block, bounce.len());
            let mut blocks = ReadCursor::from(&mut bounce[..len as usize]);
            let result = self.read_blocks(pos - skip, &mut blocks);
            let got = len - blocks.len();
            let useful = got.saturating_sub(skip).min(memory.len());
            memory.copy_from(&bounce[skip.min(got) as usize..][..useful as usize]);
            pos += useful;
            result?;
            if got < len {
                break;
            }
        }
        Ok(())
    }

    /// Writes `data` from byte `pos` on. The cursor is advanced by the bytes written, also before
    /// an error. Blocks that it does not cover are read and written back: meanwhile no other call
    /// may write to them. A storage that keeps its size has `end` bytes. Without an `end` it may
    /// grow, to the end of a block; the bytes behind its end are zeros.
    ///
    /// # Errors
    /// The errno of a read or write; `ENOMEM`; `EIO` if nothing was written, or if `end` is given
    /// and the storage ends before.
    pub fn write_at(
        &self,
        pos: u64,
        data: &mut WriteCursor<'_>,
        end: Option<u64>,
    ) -> Result<(), Error> {
        let block = self.properties().align.offset;
        let stop = pos + data.len();
        let tail = end.map_or(stop, |end| round_down(end, block).clamp(pos, stop));
        let mut body = data.peek(tail - pos);
        let result = self.write_body(pos, &mut body, end.is_some());
        let left = body.len();
        data.advance(tail - pos - left);
        result?;
        if tail < stop {
            // One call, so that a reader sees all of it or nothing (C54).
            let mut bytes = BounceBuffer::new(data.len() as usize)?;
            data.peek(u64::MAX).copy_to(&mut bytes);
            let mut rest = WriteCursor::from(&bytes[..]);
            let result = self.write_blocks(tail, &mut rest);
            data.advance(data.len() - rest.len());
            result?;
        }
        Ok(())
    }

    /// Like `write_at`, for bytes before the block in which the storage ends.
    fn write_body(
        &self,
        pos: u64,
        data: &mut WriteCursor<'_>,
        keeps_size: bool,
    ) -> Result<(), Error> {
        let align = self.properties().align;
        let block = align.offset;
        let aligned = round_down(pos, block) == pos && data.is_aligned(align.memory, block);
        if aligned || data.is_empty() {
            return self.write_blocks(pos, data);
        }
        let mut bounce = bounce_for(data.len(), block)?;
        let mut pos = pos;
        while !data.is_empty() {
            let (skip, len) = blocks_around(pos, data.len(), block, bounce.len());
            let part = (len - skip).min(data.len());
            let blocks = &mut bounce[..len as usize];
            self.read_edges(pos - skip, skip, part, blocks, keeps_size)?;
            data.peek(part).copy_to(&mut blocks[skip as usize..]);
            let mut rest = WriteCursor::from(&*blocks);
            let result = self.write_blocks(pos - skip, &mut rest);
            data.advance((len - rest.len()).saturating_sub(skip).min(part));
            pos += part;
            result?;
        }
        Ok(())
    }

    /// Reads the first and the last of `blocks`, which begin at `pos`, where the `part` bytes behind
    /// the first `skip` do not cover them.
    fn read_edges(
        &self,
        pos: u64,
        skip: u64,
        part: u64,
        blocks: &mut [u8],
        keeps_size: bool,
    ) -> Result<(), Error> {
        let block = u64::from(self.properties().align.offset);
        let last = blocks.len() as u64 - block;
        let is_first = skip > 0;
        let is_last = skip + part < blocks.len() as u64 && !(is_first && last == 0);
        for edge in [is_first.then_some(0), is_last.then_some(last)].into_iter().flatten() {
            let mut memory = ReadCursor::from(&mut blocks[edge as usize..][..block as usize]);
            self.read_blocks(pos + edge, &mut memory)?;
            if keeps_size && !memory.is_empty() {
                // Another process has truncated the file; the write would grow it again with
                // invented bytes.
                let range = ByteRange::new(pos + edge, block);
                return Err(Error::new(libc::EIO, Operation::Write).at(range));
            }
            memory.fill(0);
        }
        Ok(())
    }

    /// Reads aligned memory, resumed until it is full or the storage ends.
    fn read_blocks(&self, pos: u64, memory: &mut ReadCursor<'_>) -> Result<(), Error> {
        let block = self.properties().align.read_offset;
        let mut pos = pos;
        while !memory.is_empty() {
            let count = match memory.only_slice() {
                Some(slice) => self.read(&mut [slice], pos),
                None => self.read(&mut memory.slices(), pos),
            }? as u64;
            let whole = whole_blocks(count, memory.len(), block);
            pos += whole;
            memory.advance(whole);
            if whole == 0 {
                memory.advance(count);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Writes aligned memory, resumed until all of it is written.
    fn write_blocks(&self, pos: u64, data: &mut WriteCursor<'_>) -> Result<(), Error> {
        let block = self.properties().align.offset;
        let mut pos = pos;
        while !data.is_empty() {
            let count = match data.only_slice() {
                Some(slice) => self.write(&[slice], pos, Flags::NONE),
                None => data.with_slices(|slices| self.write(slices, pos, Flags::NONE)),
            }? as u64;
            let whole = whole_blocks(count, data.len(), block);
            pos += whole;
            data.advance(whole);
            if whole == 0 {
                data.advance(count);
                let range = ByteRange::new(pos, data.len());
                return Err(Error::new(libc::EIO, Operation::Write).at(range));
            }
        }
        Ok(())
    }
}

/// Of a transfer of `len` bytes that has moved `count`: the bytes up to the block from which it can
/// be resumed. 0 if it ended in its first block, as at the end of a file.
fn whole_blocks(count: u64, len: u64, block: u32) -> u64 {
    if count >= len { len } else { round_down(count, block) }
}

/// The offset of `pos` in its block, and the bytes of the blocks around the `len` bytes from `pos`
/// on, at most `room`.
fn blocks_around(pos: u64, len: u64, block: u32, room: usize) -> (u64, u64) {
    let skip = pos - round_down(pos, block);
    (skip, round_up(skip + len, block).min(room as u64))
}

fn bounce_for(len: u64, block: u32) -> Result<BounceBuffer, Error> {
    let most = BOUNCE_BYTES.max(u64::from(block));
    BounceBuffer::new(round_up((len + u64::from(block)).min(most), block) as usize)
}
