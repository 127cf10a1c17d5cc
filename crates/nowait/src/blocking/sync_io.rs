//! Synchronous I/O: runs a request to its end on a thread that may block, for workers and the
//! blocking API.
//!
//! Invariant: the range is locked during a read-modify-write of blocks (C12, C13); only a file that
//! was opened as one grows.
#![allow(unsafe_code)]

mod zeros;

use crate::block::block_map::{BlockMap, Intent};
use crate::block::device::BlockDevice;
use crate::block::range_lock::LockMode;
use crate::read_ahead::ahead_reads::Served;
use crate::threads::thread_priority::ThreadPriority;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::io_cursor::{ReadCursor, WriteCursor};
use crate::types::iovec::IoSegment;
use crate::types::request::{ExtentStatus, Flags, Op, Request};
use crate::types::{alignment, iovec};

/// The greatest number of extents that a status request reports.
/// Beyond it: the status ends there.
pub(crate) const MAX_EXTENTS: usize = 4096;

/// The check of C02, which comes before the checks of segments.
///
/// # Errors
/// `EROFS` for a change on a read-only device.
pub(crate) fn check_rights<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    op: Op,
) -> Result<(), Error> {
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
pub(crate) unsafe fn check<M: BlockMap + ?Sized>(
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
        let room = disk.room(io.op, pos, len);
        if room == 0 && len > 0 && io.op != Op::Read {
            return fail(libc::ENOSPC);
        }
        len = len.min(room);
    }
    if io.op == Op::Write && io.flags.contains(Flags::UNTORN) {
        check_untorn(disk, io, len, segments).map_err(|error| error.at(io.range))?;
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

/// The check of an untorn write, of which `len` bytes are inside the device (C27).
///
/// # Errors
/// `EOPNOTSUPP` where there are no such writes; `EINVAL` for one that is not within their limits, or has
/// several segments.
fn check_untorn<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    io: Request,
    len: u64,
    segments: &[IoSegment],
) -> Result<(), Error> {
    let failed = |errno| Err(Error::new(errno, Operation::Validate));
    let Some(limits) = disk.untorn_limits() else { return failed(libc::EOPNOTSUPP) };
    let is_whole = len == io.range.len
        && limits.admit(io.range)
        && segments.len() == 1
        && is_aligned_to(disk, disk.alignment().offset, io.range, segments)
        && !disk.appends_with(io.flags);
    if is_whole { Ok(()) } else { failed(libc::EINVAL) }
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
/// Until this returns, the memory of `segments` is valid, initialised and not accessed otherwise.
pub(crate) unsafe fn run<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    io: Request,
    segments: &[IoSegment],
    extents: &mut Vec<ExtentStatus>,
) -> Result<u64, Error> {
    let Request { op, flags, range } = io;
    let _priority = ThreadPriority::set(flags.priority_number())
        .map_err(|errno| Error::new(errno, op.operation()).at(range))?;
    let partial = !flags.contains(Flags::ALL_OR_ERROR);
    if op.changes()
        && let Some(guard) = disk.map.guard()
    {
        guard.before_change(range, &|pos, memory| read_all(disk, pos, memory))?;
    }
    let done = match op {
        Op::Read => {
            let range = disk.cut(range);
            // SAFETY: as promised by the caller.
            let mut memory = unsafe { ReadCursor::new(segments, 0, range.len) };
            if let Some(ahead) = disk.read_ahead()
                && ahead.serve(range, &mut memory, false) == Served::All
            {
                return Ok(range.len);
            }
            let result = read(disk, range.pos, &mut memory);
            moved(result, range.len - memory.len(), partial)?
        }
        Op::Write => {
            // SAFETY: as promised by the caller.
            let mut data = unsafe { WriteCursor::new(segments, 0, range.len) };
            let aligned = is_aligned_to(disk, disk.alignment().offset, range, segments);
            let result = match flags.contains(Flags::UNTORN) {
                true => write_untorn(disk, io, &mut data),
                false => write_locked(disk, io, aligned, &mut data),
            };
            moved(result, range.len - data.len(), partial)?
        }
        Op::Flush => {
            disk.flush()?;
            0
        }
        Op::Discard | Op::Zero => {
            let range = disk.cut(range);
            zeros::zero(disk, Request { range, ..io })?;
            io.range.len
        }
        Op::Status => {
            let inside = disk.cut(range);
            status(disk, inside, extents)?;
            if inside.len < range.len {
                extents.retain(|extent| extent.len > 0);
                extents.push(ExtentStatus::top(range.len - inside.len, true));
            }
            range.len
        }
    };
    if op.changes() {
        sync_as_asked(disk, flags)?;
    }
    Ok(done)
}

/// Makes a write durable as its flags ask for.
fn sync_as_asked<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, flags: Flags) -> Result<(), Error> {
    match flags {
        _ if flags.contains(Flags::SYNC) => disk.sync_all(),
        _ if flags.contains(Flags::DSYNC) => disk.flush(),
        _ => Ok(()),
    }
}

/// Writes all of `data` by one call, which storage does not tear.
fn write_untorn<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    io: Request,
    data: &mut WriteCursor<'_>,
) -> Result<(), Error> {
    let failed = |errno| Error::new(errno, Operation::Write).at(io.range);
    with_range_lock(disk, io.range, LockMode::Shared, || {
        disk.map.map_extent_blocking(io.range, Intent::Write);
        let written =
            data.with_slices(|slices| disk.top().write(slices, io.range.pos, io.flags))?;
        disk.map.mark_allocated(io.range);
        data.advance(written as u64);
        if data.is_empty() { Ok(()) } else { Err(failed(libc::EIO)) }
    })
}

/// The result of a request that has moved `done` bytes: an error only if there are none, or if a
/// `partial` result is not wanted.
fn moved(result: Result<(), Error>, done: u64, partial: bool) -> Result<u64, Error> {
    match result {
        Err(error) if done == 0 || !partial => Err(error),
        _ => Ok(done),
    }
}

/// Whether the transfer has the alignment that storage requires, with positions and lengths that
/// are multiples of `block` bytes (C11).
pub(crate) fn is_aligned_to<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    block: u32,
    range: ByteRange,
    segments: &[IoSegment],
) -> bool {
    (range.pos | range.len) & (u64::from(block) - 1) == 0
        && iovec::aligned(segments, disk.alignment().memory, block)
}

fn with_range_lock<M: BlockMap + ?Sized, T>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    mode: LockMode,
    run: impl FnOnce() -> T,
) -> T {
    disk.ranges.with_lock(blocks_of(disk, range), mode, run)
}

/// The whole blocks that `range` touches.
pub(crate) fn blocks_of<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    range: ByteRange,
) -> ByteRange {
    let block = disk.alignment().offset;
    let pos = alignment::round_down(range.pos, block);
    ByteRange::new(pos, alignment::round_up(range.end(), block) - pos)
}

/// Fills `memory` from byte `pos` on, by the image or from the storage. The cursor is advanced by
/// the bytes read.
fn read<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    pos: u64,
    memory: &mut ReadCursor<'_>,
) -> Result<(), Error> {
    if let Some(image) = disk.map.image() {
        image.read(pos, memory.peek(u64::MAX))?;
        memory.advance(u64::MAX);
        return Ok(());
    }
    let mut pos = pos;
    while !memory.is_empty() {
        let extent = disk.extent_blocking(ByteRange::new(pos, memory.len()), Intent::Read);
        if extent.hole {
            memory.take(extent.len).fill(0);
        } else {
            let mut part = memory.peek(extent.len);
            let result = disk.top().read_at(pos, &mut part);
            let left = part.len();
            memory.advance(extent.len - left);
            result?;
            if left > 0 {
                break;
            }
        }
        pos += extent.len;
    }
    Ok(())
}

/// Fills all of `memory` from byte `pos` on.
///
/// # Errors
/// Like [`read`]; `EIO` where storage ends before the device.
fn read_all<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    pos: u64,
    memory: &mut [u8],
) -> Result<(), Error> {
    let range = ByteRange::new(pos, memory.len() as u64);
    let mut left = ReadCursor::from(memory);
    read(disk, pos, &mut left)?;
    match left.is_empty() {
        true => Ok(()),
        false => Err(Error::new(libc::EIO, Operation::Read).at(range)),
    }
}

/// Like [`write`], with the range locked: shared if the request is `aligned`, so that it needs no
/// read-modify-write.
fn write_locked<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    io: Request,
    aligned: bool,
    data: &mut WriteCursor<'_>,
) -> Result<(), Error> {
    let mode = if aligned { LockMode::Shared } else { LockMode::Exclusive };
    let appends = disk.appends_with(io.flags);
    let (range, mode) = match appends {
        true => (ByteRange::new(disk.size(), io.range.len), LockMode::Exclusive),
        false => (io.range, mode),
    };
    with_range_lock(disk, range, mode, || write(disk, range.pos, appends, data))
}

/// Writes all of `data` at the end of a file, and returns the position of its first byte.
///
/// # Errors
/// `EINVAL` for a device that keeps its size, `EROFS`; the errno of pwritev2(2) or fdatasync(2).
pub(crate) fn append<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    data: &mut WriteCursor<'_>,
    flags: Flags,
) -> Result<u64, Error> {
    let file = disk.changeable()?;
    let range = ByteRange::new(disk.size(), data.len());
    let pos = with_range_lock(disk, range, LockMode::Exclusive, || file.append(data))?;
    sync_as_asked(disk, flags)?;
    Ok(pos)
}

/// Writes `data` from byte `pos` on, by the image or to the storage. The cursor is advanced by the
/// bytes written.
fn write<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    pos: u64,
    appends: bool,
    data: &mut WriteCursor<'_>,
) -> Result<(), Error> {
    if let Some(image) = disk.map.image() {
        image.write(pos, data.peek(u64::MAX))?;
        data.advance(u64::MAX);
        return Ok(());
    }
    if let Some(file) = disk.growing() {
        return match appends {
            true => file.append(data).map(|_| ()),
            false => disk.top().write_exact(pos, data),
        };
    }
    let range = ByteRange::new(pos, data.len());
    disk.allocate_ahead(range);
    disk.map.map_extent_blocking(range, Intent::Write);
    let mut done = disk.top().write_at(pos, data, Some(disk.limit()));
    if done.is_err_and(|e| matches!(e.errno(), libc::ENOSPC | libc::EDQUOT))
        && disk.give_up_allocate_ahead()
    {
        let left = range.end() - data.len();
        done = disk.top().write_at(left, data, Some(disk.limit()));
    }
    disk.map.mark_allocated(range);
    done
}

fn status<M: BlockMap + ?Sized>(
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
fn query_extents<M: BlockMap + ?Sized>(
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
fn cache_hole<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, hole: ByteRange) {
    let blocks = blocks_of(disk, hole);
    if disk.ranges.try_lock(blocks, LockMode::Exclusive) {
        disk.map.mark_hole(hole);
        disk.ranges.unlock(blocks, LockMode::Exclusive);
    }
}
