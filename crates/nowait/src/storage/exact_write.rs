//! Writes to a file that may grow: whole pages by direct I/O, the parts of pages at both ends through
//! the page cache.
//!
//! Invariant: no byte is written that is not in the request, so that the file is never padded, also
//! not for a moment, and no writer of the same page loses bytes. The parts are written in their order,
//! so that a write that fails leaves a size that covers only bytes that were written (C23).

use crate::memory::bounce_buffer::BounceBuffer;
use crate::storage::Storage;
use crate::types::alignment::{round_down, round_up};
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::io_cursor::WriteCursor;
use crate::types::request::Flags;

/// The greatest size of a bounce buffer in bytes, unless a block is larger.
const BOUNCE_BYTES: u64 = 256 << 10;

impl dyn Storage + '_ {
    /// Writes `data` from byte `pos` on, beyond the end of the storage as well. The cursor is advanced
    /// by the bytes written, also before an error.
    ///
    /// # Errors
    /// The errno of a write; `ENOMEM`; `EIO` if nothing was written.
    pub(crate) fn write_exact(&self, pos: u64, data: &mut WriteCursor<'_>) -> Result<(), Error> {
        let block = self.properties().align.offset;
        let stop = pos + data.len();
        let (from, to) = (round_up(pos, block), round_down(stop, block));
        if from >= to {
            return self.write_all(pos, data, stop - pos);
        }
        self.write_all(pos, data, from - pos)?;
        self.write_pages(from, data, to - from)?;
        self.write_all(to, data, stop - to)
    }

    /// Writes the first `len` bytes of `data`, by the storage's choice of descriptor.
    fn write_all(&self, pos: u64, data: &mut WriteCursor<'_>, len: u64) -> Result<(), Error> {
        let mut done = 0;
        while done < len {
            let written = data
                .peek(len - done)
                .with_slices(|slices| self.write(slices, pos + done, Flags::NONE))?;
            if written == 0 {
                let range = ByteRange::new(pos + done, len - done);
                return Err(Error::new(libc::EIO, Operation::Write).at(range));
            }
            done += written as u64;
            data.advance(written as u64);
        }
        Ok(())
    }

    /// Writes the first `len` bytes of `data`, whole pages, from memory of any alignment.
    fn write_pages(&self, pos: u64, data: &mut WriteCursor<'_>, len: u64) -> Result<(), Error> {
        let align = self.properties().align;
        if data.peek(len).is_aligned(align.memory, align.offset) {
            return self.write_all(pos, data, len);
        }
        let most = round_up(BOUNCE_BYTES, align.offset);
        let mut bounce = BounceBuffer::new(len.min(most) as usize)?;
        let mut done = 0;
        while done < len {
            let part = (len - done).min(most);
            let bytes = &mut bounce[..part as usize];
            data.peek(part).copy_to(bytes);
            let mut copied = WriteCursor::from(&*bytes);
            let result = self.write_all(pos + done, &mut copied, part);
            data.advance(part - copied.len());
            result?;
            done += part;
        }
        Ok(())
    }
}
