//! Discarding and zeroing: by the file system, the device or the image, or by writing zeros.
//!
//! Invariant: a zeroed range reads as zeros to its last byte; a discard affects no byte outside the
//! requested range.

use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::block::image_format::ImageFormat;
use crate::block::range_lock::LockMode;
use crate::blocking::sync_io::{with_range_lock, write, write_locked};
use crate::memory::io_buffer::IoBuffer;
use crate::storage::Storage;
use crate::types::alignment;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::io_cursor::WriteCursor;
use crate::types::request::{Flags, Op, Request};

/// Bytes that are discarded or zeroed in one step. During a step the file system blocks other
/// requests on the file, and the range lock blocks writes to the range; they run between two steps.
const ZERO_STEP_BYTES: u64 = 1 << 30;
/// The greatest number of zeros in memory.
const ZEROS_BYTES: u64 = 256 << 10;

/// Discards or zeroes, [`ZERO_STEP_BYTES`] at a time.
pub(crate) fn zero<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, io: Request) -> Result<(), Error> {
    let mut pos = io.range.pos;
    while pos < io.range.end() {
        // Steps end at multiples of the step size, and so at whole blocks of any size.
        let step = ZERO_STEP_BYTES - pos % ZERO_STEP_BYTES;
        let range = ByteRange::new(pos, (io.range.end() - pos).min(step));
        zero_step(disk, Request { range, ..io })?;
        pos = range.end();
    }
    Ok(())
}

fn zero_step<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, io: Request) -> Result<(), Error> {
    let Request { op, flags, range } = io;
    // An image may reuse a deallocated cluster for another range immediately. In a file, a write that
    // ends between the zeroing and its mark in the allocation cache would be hidden by the mark.
    let done = with_range_lock(disk, range, LockMode::Exclusive, || match disk.map.image() {
        Some(image) => zero_image(image, io),
        None => zero_file(disk, io),
    });
    match done {
        Err(error) if error.errno() == libc::EOPNOTSUPP && op == Op::Zero => {
            if flags.contains(Flags::FAST_ZERO) { Err(error) } else { write_zeros(disk, range) }
        }
        other => other,
    }
}

fn zero_image(image: &dyn ImageFormat, io: Request) -> Result<(), Error> {
    match io.op {
        Op::Discard => image.discard(io.range),
        _ => image.zero(io.range, io.flags),
    }
}

/// The file system or the device zeroes whole blocks. Partial blocks at both ends, which exist on a
/// block device only, are written; a discard skips them, because it may do less than requested.
fn zero_file<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, io: Request) -> Result<(), Error> {
    let Request { op, range, .. } = io;
    disk.map.invalidate(range);
    let whole = whole_blocks(range, disk.top().properties().zeroing_block);
    let mut done = Ok(());
    if whole.len > 0 {
        done = zero_whole(disk, Request { range: whole, ..io });
    }
    // The partial blocks come last: a fast zero may fail for the whole blocks, and must have
    // changed nothing then.
    if op == Op::Zero && done.is_ok() {
        let head = ByteRange::new(range.pos, whole.pos - range.pos);
        let tail = ByteRange::new(whole.end(), range.end() - whole.end());
        // They are locked, and written by a read-modify-write.
        let put = |part| write_zeros_by(part, |part, zeros| write(disk, part.pos, false, zeros));
        done = put(head).and_then(|()| put(tail));
    }
    if done.is_err() {
        // The invalidated range may still be mapped.
        disk.map.mark_allocated(range);
    }
    done
}

/// The whole blocks in `range`; an empty range at its end if there are none.
fn whole_blocks(range: ByteRange, block: u32) -> ByteRange {
    let (from, to) =
        (alignment::round_up(range.pos, block), alignment::round_down(range.end(), block));
    match from < to {
        true => ByteRange::new(from, to - from),
        false => ByteRange::new(range.end(), 0),
    }
}

fn zero_whole<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, io: Request) -> Result<(), Error> {
    let Request { op, flags, range } = io;
    let storage = disk.top();
    let keep = op == Op::Zero && flags.contains(Flags::NO_UNMAP);
    let mut done = if keep { zero_allocated(storage, io) } else { storage.punch(range) };
    if op == Op::Zero && !keep && done.is_err_and(|e| e.errno() == libc::EOPNOTSUPP) {
        done = zero_allocated(storage, io);
    }
    // A zeroed range that keeps its storage is not marked as a hole: a write to it allocates
    // nothing.
    if done.is_ok() && !keep {
        disk.map.mark_hole(range);
    }
    done
}

/// Zeroes and keeps the storage. `EOPNOTSUPP` for a fast zero on a block device, where the kernel
/// may write zeros.
fn zero_allocated(storage: &dyn Storage, io: Request) -> Result<(), Error> {
    if io.flags.contains(Flags::FAST_ZERO) && storage.properties().device {
        return Err(Error::new(libc::EOPNOTSUPP, Operation::Zero).at(io.range));
    }
    storage.zero(io.range)
}

/// Writes zeros, for storages that cannot zero otherwise.
fn write_zeros<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, range: ByteRange) -> Result<(), Error> {
    write_zeros_by(range, |part, zeros| {
        let block = u64::from(disk.alignment().offset);
        let aligned = (part.pos | part.len) & (block - 1) == 0;
        // Zeros of a file that was opened to append go to their position, too.
        let io = Request { op: Op::Write, flags: Flags::NO_APPEND, range: part };
        write_locked(disk, io, aligned, zeros)
    })
}

/// Passes each part of `range` to `put`, with as many zeros, which are page-aligned.
fn write_zeros_by(
    range: ByteRange,
    mut put: impl FnMut(ByteRange, &mut WriteCursor<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let zeros = IoBuffer::zeroed(range.len.min(ZEROS_BYTES) as usize)?;
    let mut pos = range.pos;
    while pos < range.end() {
        let len = (range.end() - pos).min(zeros.len() as u64);
        put(ByteRange::new(pos, len), &mut WriteCursor::from(&zeros[..len as usize]))?;
        pos += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c52_whole_blocks_are_rounded_inwards() {
        let whole = |pos, len, block| {
            let ByteRange { pos, len } = whole_blocks(ByteRange::new(pos, len), block);
            (pos, len)
        };
        assert_eq!(whole(8193, 100, 512), (8293, 0));
        assert_eq!(whole(8191, 1026, 512), (8192, 1024));
        assert_eq!(whole(8192, 1024, 512), (8192, 1024));
        assert_eq!(whole(511, 1024, 512), (512, 512));
        assert_eq!(whole(511, 2, 512), (513, 0));
        assert_eq!(whole(3, 5, 1), (3, 5));
    }
}
