//! Reads and writes of whole blocks, until all of them are done.
//!
//! Invariant: each transfer begins and ends at a block, also after one that was cut short.

use std::io::{IoSlice, IoSliceMut};

use crate::log::log_format::{BLOCK, BLOCK_BYTES};
use crate::memory::io_buffer::IoBuffer;
use crate::storage::Storage;
use crate::types::alignment::round_down;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::request::Flags;

/// Bytes that are written with zeros at a time.
const ZEROS: u64 = 1 << 20;

/// Writes the blocks of `bytes`, which are aligned in memory, from `pos` on.
///
/// # Errors
/// The errno of a write; `EIO` if nothing was written.
pub(crate) fn write(
    storage: &dyn Storage,
    bytes: &[u8],
    pos: u64,
    flags: Flags,
) -> Result<(), Error> {
    let mut done = 0;
    while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
        let at = pos + done as u64;
        let written = storage.write(&[IoSlice::new(rest)], at, flags)?;
        if (written as u64) < BLOCK_BYTES {
            let range = ByteRange::new(at, rest.len() as u64);
            return Err(Error::new(libc::EIO, Operation::Write).at(range));
        }
        done += round_down(written as u64, BLOCK) as usize;
    }
    Ok(())
}

/// Reads blocks into `bytes`, which are aligned in memory, from `pos` on. Returns the bytes read, fewer
/// only at the end.
///
/// # Errors
/// The errno of a read.
pub(crate) fn read(storage: &dyn Storage, bytes: &mut [u8], pos: u64) -> Result<usize, Error> {
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let at = pos + done as u64;
        let count = storage.read(&mut [IoSliceMut::new(rest)], at)? as u64;
        if count < BLOCK_BYTES {
            return Ok(done + count as usize);
        }
        done += round_down(count, BLOCK) as usize;
    }
    Ok(done)
}

/// Writes zeros to the first `len` bytes, so that later writes there change no metadata.
///
/// # Errors
/// The errors of [`write`]; `ENOMEM`.
pub(crate) fn fill_with_zeros(storage: &dyn Storage, len: u64) -> Result<(), Error> {
    let zeros = IoBuffer::zeroed(len.min(ZEROS) as usize)?;
    let mut pos = 0;
    while pos < len {
        let part = (len - pos).min(ZEROS);
        write(storage, zeros.get(..part as usize).unwrap_or_default(), pos, Flags::NONE)?;
        pos += part;
    }
    Ok(())
}
