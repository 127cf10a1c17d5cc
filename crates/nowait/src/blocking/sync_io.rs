//! Synchronous I/O: runs a request to its end on a thread that may block, for workers and the
//! blocking API.
//!
//! Invariant: memory is accessed through the request's segments only, below its count; the range is
//! locked during a read-modify-write of blocks (C12, C13); the file never grows.
#![allow(unsafe_code)]

mod zeros;

use crate::block::block_map::{BlockMap, Intent};
use crate::block::device::BlockDevice;
use crate::block::image_format;
use crate::block::range_lock::LockMode;
use crate::memory::buffer_pool::AlignedBox;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::iovec::IoSegment;
use crate::types::request::{ExtentStatus, Flags, Op, Request};
use crate::types::transfer::Transfer;
use crate::types::{alignment, iovec};

/// The greatest size of a bounce buffer in bytes.
const BOUNCE_BYTES: u64 = 256 << 10;
/// The greatest number of extents that a status request reports.
pub(crate) const MAX_EXTENTS: usize = 4096;

/// The check of C02, which comes before the checks of segments.
///
/// # Errors
/// `EROFS` for a change on a read-only device.
pub(crate) fn check_rights<M: BlockMap>(disk: &BlockDevice<M>, op: Op) -> Result<(), Error> {
    if op.changes() && disk.is_read_only() {
        return Err(Error::new(libc::EROFS, Operation::Validate));
    }
    Ok(())
}

/// The checks against the device (C02, C08, C17, C25). Returns the request with its range cut at
/// the device's end.
///
/// # Errors
/// `EROFS` for a change on a read-only device, `EINVAL` for an end beyond `i64::MAX`, `ENOSPC` for
/// an operation other than a read that begins at or behind the device's end, `EPERM` for a write
/// that [`BlockDevice::with_forbidden_prefix`] refuses.
///
/// # Safety
/// The memory of `segments` is valid, and for a write initialised and not written meanwhile.
pub(crate) unsafe fn check<M: BlockMap>(
    disk: &BlockDevice<M>,
    io: Request,
    segments: &[IoSegment],
) -> Result<Request, Error> {
    let fail = |errno| Err(Error::new(errno, Operation::Validate).at(io.range));
    let ByteRange { pos, mut len } = io.range;
    check_rights(disk, io.op).map_err(|error| error.at(io.range))?;
    if pos.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
        return fail(libc::EINVAL);
    }
    if io.op != Op::Flush {
        let room = disk.size().saturating_sub(pos);
        if room == 0 && len > 0 && io.op != Op::Read {
            return fail(libc::ENOSPC);
        }
        len = len.min(room);
    }
    let (range, forbidden) = (ByteRange::new(pos, len), disk.forbidden_prefix());
    if io.op == Op::Write
        && pos < forbidden.len() as u64
        // SAFETY: as promised by the caller.
        && unsafe { stores_prefix(forbidden, range, segments) }
    {
        return fail(libc::EPERM);
    }
    Ok(Request { range, ..io })
}

/// Whether a write of `range` stores only bytes of `prefix` where the two meet. The last of several
/// writes to the first bytes decides, so it is enough to refuse these. Discarding or zeroing stores
/// none.
///
/// # Safety
/// The memory of `segments` is valid, initialised and not written meanwhile.
unsafe fn stores_prefix(prefix: &[u8], range: ByteRange, segments: &[IoSegment]) -> bool {
    let mut rest = prefix.get(range.pos as usize..).unwrap_or_default();
    let len = range.len.min(rest.len() as u64);
    let mut equal = len > 0;
    iovec::slice_segments(segments, 0, len, |part| {
        // SAFETY: as promised by the caller.
        let bytes = unsafe { std::slice::from_raw_parts(part.base, part.len) };
        equal &= rest.starts_with(bytes);
        rest = rest.get(part.len..).unwrap_or_default();
    });
    equal
}

/// Runs `io`. Returns the bytes done. These are fewer than requested only if the file ends before
/// the device or, without [`Flags::ALL_OR_ERROR`], an error follows some bytes (C17, C19).
///
/// # Errors
/// The errno of the system call.
///
/// # Safety
/// Until this returns, the memory of `segments` is valid and not accessed otherwise.
pub(crate) unsafe fn run<M: BlockMap>(
    disk: &BlockDevice<M>,
    io: Request,
    segments: &[IoSegment],
    extents: &mut Vec<ExtentStatus>,
) -> Result<u64, Error> {
    // SAFETY: as promised by the caller.
    let mut done = unsafe { run_once(disk, io, segments, extents) }?;
    if !io.flags.has(Flags::ALL_OR_ERROR) || !matches!(io.op, Op::Read | Op::Write) {
        return Ok(done);
    }
    while done > 0 && done < io.range.len {
        // A request for the rest returns the error that ended the first one early.
        let range = ByteRange::new(io.range.pos + done, io.range.len - done);
        let mut rest = Vec::new();
        iovec::slice_segments(segments, done, range.len, |part| rest.push(part));
        // SAFETY: parts of the caller's memory.
        match unsafe { run_once(disk, Request { range, ..io }, &rest, extents) }? {
            0 => break,
            more => done += more,
        }
    }
    Ok(done)
}

/// As `run` without [`Flags::ALL_OR_ERROR`].
///
/// # Safety
/// As for `run`.
unsafe fn run_once<M: BlockMap>(
    disk: &BlockDevice<M>,
    io: Request,
    segments: &[IoSegment],
    extents: &mut Vec<ExtentStatus>,
) -> Result<u64, Error> {
    let Request { op, flags, range } = io;
    let done = match op {
        // SAFETY: as promised by the caller.
        Op::Read => unsafe { read_dispatch(disk, range, segments) }?,
        Op::Write => {
            let aligned = is_aligned(disk, range, segments);
            let mode = if aligned { LockMode::Shared } else { LockMode::Exclusive };
            // SAFETY: as promised by the caller.
            with_range_lock(disk, range, mode, || unsafe { write_dispatch(disk, range, segments) })?
        }
        Op::Flush => {
            disk.flush()?;
            0
        }
        Op::Discard | Op::Zero => {
            zeros::zero(disk, io)?;
            range.len
        }
        Op::Status => {
            status(disk, range, extents)?;
            range.len
        }
    };
    if flags.has(Flags::DSYNC) && op.changes() {
        disk.flush()?;
    }
    Ok(done)
}

/// Whether the transfer has the alignment that storage requires (C11).
pub(crate) fn is_aligned<M: BlockMap>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    segments: &[IoSegment],
) -> bool {
    is_aligned_to(disk, disk.alignment().offset, range, segments)
}

/// The same for positions and lengths that are multiples of `block` bytes.
pub(crate) fn is_aligned_to<M: BlockMap>(
    disk: &BlockDevice<M>,
    block: u32,
    range: ByteRange,
    segments: &[IoSegment],
) -> bool {
    (range.pos | range.len) & (u64::from(block) - 1) == 0
        && iovec::aligned(segments, disk.alignment().memory, block)
}

fn with_range_lock<M: BlockMap, T>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    mode: LockMode,
    run: impl FnOnce() -> T,
) -> T {
    disk.ranges.with_lock(blocks_of(disk, range), mode, run)
}

/// The whole blocks that `range` touches.
pub(crate) fn blocks_of<M: BlockMap>(disk: &BlockDevice<M>, range: ByteRange) -> ByteRange {
    let block = disk.alignment().offset;
    let pos = alignment::round_down(range.pos, block);
    ByteRange::new(pos, alignment::round_up(range.end(), block) - pos)
}

/// The result of a transfer that failed after `done` bytes: these bytes, or the error if there are
/// none.
fn partial_or_error(done: u64, error: Error) -> Result<u64, Error> {
    if done > 0 { Ok(done) } else { Err(error) }
}

/// One transfer between `range` and contiguous memory, resumed until it is done or the file ends
/// (C19).
///
/// # Safety
/// `base` is valid for `range.len` bytes.
unsafe fn transfer_fully<M: BlockMap>(
    disk: &BlockDevice<M>,
    write: bool,
    range: ByteRange,
    base: *mut u8,
) -> Result<u64, Error> {
    let mut done = 0;
    while done < range.len {
        let transfer = Transfer {
            base: base.wrapping_add(done as usize),
            pos: range.pos + done,
            len: (range.len - done).min(iovec::MAX_TRANSFER_BYTES) as u32,
            write,
            ..Transfer::NONE
        };
        // SAFETY: the rest of the caller's memory.
        let outcome = unsafe { disk.top().transfer(&transfer) };
        match outcome {
            0 => break,
            1.. => done += outcome as u64,
            // A transfer that ended short inside a block cannot be resumed where it ended.
            _ if done > 0 && -outcome == libc::EINVAL => break,
            _ => {
                let operation = if write { Operation::Write } else { Operation::Read };
                return partial_or_error(done, Error::new(-outcome, operation).at(range));
            }
        }
    }
    Ok(done)
}

/// A read, by the image or from the file.
///
/// # Safety
/// As for `run`.
unsafe fn read_dispatch<M: BlockMap>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    segments: &[IoSegment],
) -> Result<u64, Error> {
    match disk.map.image() {
        // SAFETY: as promised by the caller.
        Some(image) => unsafe { image_format::read(image, range, segments) },
        // SAFETY: as promised by the caller.
        None => unsafe { read(disk, range, segments) },
    }
}

/// A write, by the image or to the file.
///
/// # Safety
/// As for `run`.
unsafe fn write_dispatch<M: BlockMap>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    segments: &[IoSegment],
) -> Result<u64, Error> {
    match disk.map.image() {
        // SAFETY: as promised by the caller.
        Some(image) => unsafe { image_format::write(image, range, segments) },
        // SAFETY: as promised by the caller.
        None => unsafe { write(disk, range, segments) },
    }
}

/// # Safety
/// As for `run`.
unsafe fn read<M: BlockMap>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    segments: &[IoSegment],
) -> Result<u64, Error> {
    let mut done = 0;
    while done < range.len {
        let rest = ByteRange::new(range.pos + done, range.len - done);
        let extent = disk.extent_blocking(rest, Intent::Read);
        let part = ByteRange::new(rest.pos, extent.len);
        if extent.hole {
            // SAFETY: as promised by the caller of `run`.
            unsafe { fill_zero(segments, done, extent.len) };
            done += extent.len;
            continue;
        }
        // SAFETY: as promised by the caller of `run`.
        match unsafe { read_mapped(disk, part, segments, done) } {
            Ok(got) if got == part.len => done += got,
            Ok(got) => return Ok(done + got),
            Err(error) => return partial_or_error(done, error),
        }
    }
    Ok(done)
}

/// Reads `part`, whose bytes begin at `start` of the request.
///
/// # Safety
/// As for `run`.
unsafe fn read_mapped<M: BlockMap>(
    disk: &BlockDevice<M>,
    part: ByteRange,
    segments: &[IoSegment],
    start: u64,
) -> Result<u64, Error> {
    let align = disk.alignment();
    if let [one] = segments
        && is_read_aligned(disk, part, one.base.wrapping_add(start as usize))
    {
        // SAFETY: `part` lies in the request, so its bytes lie in the segment.
        return unsafe { transfer_fully(disk, false, part, one.base.wrapping_add(start as usize)) };
    }
    let mut bounce = bounce(part.len + 2 * u64::from(align.read_offset))?;
    let mut done = 0;
    while done < part.len {
        let pos = alignment::round_down(part.pos + done, align.read_offset);
        let skip = part.pos + done - pos;
        let len = alignment::round_up(part.end() - pos, align.read_offset).min(bounce.len() as u64);
        // SAFETY: `bounce` has at least `len` bytes.
        let got = match unsafe {
            transfer_fully(disk, false, ByteRange::new(pos, len), bounce.as_mut_ptr())
        } {
            Ok(got) => got,
            Err(error) => return partial_or_error(done, error),
        };
        let useful = got.saturating_sub(skip).min(part.len - done);
        // SAFETY: as promised by the caller of `run`; `bounce` was read up to `skip + useful`.
        unsafe { scatter(&bounce[skip as usize..], segments, start + done, useful) };
        done += useful;
        if got < len {
            break;
        }
    }
    Ok(done)
}

fn is_read_aligned<M: BlockMap>(disk: &BlockDevice<M>, range: ByteRange, base: *mut u8) -> bool {
    let segment = IoSegment { base, len: range.len as usize };
    is_aligned_to(disk, disk.alignment().read_offset, range, &[segment])
}

/// # Safety
/// As for `run`.
unsafe fn write<M: BlockMap>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    segments: &[IoSegment],
) -> Result<u64, Error> {
    disk.map.map_extent_blocking(range, Intent::Write);
    // Whole blocks of the file are written with direct I/O; a partial last block goes through the
    // page cache, because a direct write of the whole block would grow the file.
    let tail =
        alignment::round_down(disk.size(), disk.alignment().offset).clamp(range.pos, range.end());
    let body = ByteRange::new(range.pos, tail - range.pos);
    // SAFETY: as promised by the caller of `run`.
    let done = unsafe { write_body(disk, body, segments) };
    let done = match done {
        // SAFETY: as promised by the caller of `run`.
        Ok(done) if done == body.len => unsafe { write_tail(disk, range, done, segments) },
        other => other,
    };
    disk.map.mark_allocated(range);
    done
}

/// # Safety
/// As for `run`.
unsafe fn write_body<M: BlockMap>(
    disk: &BlockDevice<M>,
    body: ByteRange,
    segments: &[IoSegment],
) -> Result<u64, Error> {
    let align = disk.alignment();
    if let [one] = segments
        && is_aligned(disk, body, &[IoSegment { base: one.base, len: body.len as usize }])
    {
        // SAFETY: `body` lies in the request, so its bytes lie in the segment.
        return unsafe { transfer_fully(disk, true, body, one.base) };
    }
    let mut done = 0;
    if body.len == 0 {
        return Ok(0);
    }
    let mut bounce = bounce(body.len + 2 * u64::from(align.offset))?;
    while done < body.len {
        let pos = alignment::round_down(body.pos + done, align.offset);
        let skip = body.pos + done - pos;
        let len = alignment::round_up(body.end() - pos, align.offset).min(bounce.len() as u64);
        let part = (len - skip).min(body.len - done);
        let blocks = ByteRange::new(pos, len);
        let step = (|| {
            read_edges(disk, blocks, skip, part, &mut bounce)?;
            // SAFETY: as promised by the caller of `run`.
            unsafe { gather(segments, done, part, &mut bounce[skip as usize..]) };
            // SAFETY: `bounce` has at least `len` bytes.
            unsafe { transfer_fully(disk, true, blocks, bounce.as_mut_ptr()) }
        })();
        match step {
            Ok(put) if put == len => done += part,
            Ok(put) => return Ok(done + put.saturating_sub(skip).min(part)),
            Err(error) => return partial_or_error(done, error),
        }
    }
    Ok(done)
}

/// Reads the first and the last block of `blocks` into `bounce` if the write covers them partly.
fn read_edges<M: BlockMap>(
    disk: &BlockDevice<M>,
    blocks: ByteRange,
    skip: u64,
    part: u64,
    bounce: &mut AlignedBox,
) -> Result<(), Error> {
    let block = u64::from(disk.alignment().offset);
    let mut edges = [None, None];
    if skip > 0 {
        edges[0] = Some(0);
    }
    let last = blocks.len - block;
    if skip + part < blocks.len && edges[0] != Some(last) {
        edges[1] = Some(last);
    }
    for edge in edges.into_iter().flatten() {
        let memory = &mut bounce[edge as usize..(edge + block) as usize];
        let range = ByteRange::new(blocks.pos + edge, block);
        // SAFETY: `memory` has `block` bytes.
        let got = unsafe { transfer_fully(disk, false, range, memory.as_mut_ptr()) }?;
        if got < block {
            // Another process has truncated the file; the write would grow it again with invented
            // bytes.
            return Err(Error::new(libc::EIO, Operation::Write).at(range));
        }
    }
    Ok(())
}

/// Writes the part of `range` in the partial last block of the file through the page cache, with
/// one call, so that a reader sees all of it or nothing (C54).
///
/// # Safety
/// As for `run`.
unsafe fn write_tail<M: BlockMap>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    done: u64,
    segments: &[IoSegment],
) -> Result<u64, Error> {
    let tail = range.len - done;
    if tail == 0 {
        return Ok(done);
    }
    let no_memory = Error::new(libc::ENOMEM, Operation::SetUp);
    let mut bytes = AlignedBox::zeroed(tail as usize).ok_or(no_memory)?;
    // SAFETY: as promised by the caller of `run`.
    unsafe { gather(segments, done, tail, &mut bytes) };
    match disk.top().write_buffered(&bytes, range.pos + done) {
        Ok(()) => Ok(range.len),
        Err(error) => partial_or_error(done, error.at(range)),
    }
}

fn status<M: BlockMap>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    extents: &mut Vec<ExtentStatus>,
) -> Result<(), Error> {
    extents.clear();
    if let Some(image) = disk.map.image() {
        image.status(range, MAX_EXTENTS, extents)?;
    } else if !disk.map.cached_extents(range, MAX_EXTENTS, extents) {
        query_extents(disk, range, extents);
    }
    fit(range, extents);
    Ok(())
}

/// Cuts the extents that a map, a format or a file system has reported to `range`, and removes
/// empty ones.
fn fit(range: ByteRange, extents: &mut Vec<ExtentStatus>) {
    let mut left = range.len;
    extents.retain_mut(|extent| {
        extent.len = extent.len.min(left);
        left -= extent.len;
        extent.len > 0
    });
    if extents.is_empty() {
        extents.push(ExtentStatus::top(range.len, false));
    }
}

/// Queries the file system, and caches the holes that it reports.
fn query_extents<M: BlockMap>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    extents: &mut Vec<ExtentStatus>,
) {
    extents.clear();
    if disk.top().extents(range, MAX_EXTENTS, extents).is_err() || extents.is_empty() {
        // If the file system cannot report extents, all of the range counts as data.
        extents.clear();
        extents.push(ExtentStatus::top(range.len, false));
        return;
    }
    let mut pos = range.pos;
    for extent in extents.iter() {
        if extent.hole {
            cache_hole(disk, ByteRange::new(pos, extent.len));
        }
        pos += extent.len;
    }
}

/// Caches a hole that was seen, unless a request writes or zeroes its blocks at this moment: the
/// data of a write that has not marked its range yet would be hidden until it does. Ranges of
/// earlier writes are marked as mapped already, and stay so.
fn cache_hole<M: BlockMap>(disk: &BlockDevice<M>, hole: ByteRange) {
    let blocks = blocks_of(disk, hole);
    if disk.ranges.try_lock(blocks, LockMode::Exclusive) {
        disk.map.mark_hole(hole);
        disk.ranges.unlock(blocks, LockMode::Exclusive);
    }
}

fn bounce(len: u64) -> Result<AlignedBox, Error> {
    let len = len.clamp(1, BOUNCE_BYTES).next_multiple_of(4096);
    AlignedBox::zeroed(len as usize).ok_or(Error::new(libc::ENOMEM, Operation::SetUp))
}

/// Zeros the bytes `start..start + len` of a request's memory.
///
/// # Safety
/// The memory of `segments` is valid and not accessed otherwise.
pub(crate) unsafe fn fill_zero(segments: &[IoSegment], start: u64, len: u64) {
    iovec::slice_segments(segments, start, len, |part| {
        // SAFETY: the part lies in the caller's memory.
        unsafe { part.base.write_bytes(0, part.len) };
    });
}

/// Copies `len` bytes of `from` to the request's bytes from `start` on.
///
/// # Safety
/// As for `fill_zero`.
pub(crate) unsafe fn scatter(from: &[u8], segments: &[IoSegment], start: u64, len: u64) {
    let mut from = &from[..len as usize];
    iovec::slice_segments(segments, start, len, |part| {
        let (now, later) = from.split_at(part.len);
        // SAFETY: the part lies in the caller's memory, which is not `from`.
        unsafe { part.base.copy_from_nonoverlapping(now.as_ptr(), now.len()) };
        from = later;
    });
}

/// Copies the request's bytes from `start` on to `to`.
///
/// # Safety
/// As for `fill_zero`.
pub(crate) unsafe fn gather(segments: &[IoSegment], start: u64, len: u64, to: &mut [u8]) {
    let mut to = &mut to[..len as usize];
    iovec::slice_segments(segments, start, len, |part| {
        let (now, later) = std::mem::take(&mut to).split_at_mut(part.len);
        // SAFETY: the part lies in the caller's memory, which is not `to`.
        unsafe { part.base.copy_to_nonoverlapping(now.as_mut_ptr(), now.len()) };
        to = later;
    });
}
