//! A request run to its end on a thread that may block: what workers do, and the blocking face.
//!
//! Invariant: memory is only touched through the request's segments, below its count; the range is
//! held for as long as blocks are read and written back (C12, C13); the file never grows.
//! Knows: align, iov, io, buffer, image, map, ranges, storage, disk. Known by: engine, file.
#![allow(unsafe_code)]

use crate::align;
use crate::buffer::Aligned;
use crate::disk::Disk;
use crate::error::{Doing, Error, Range};
use crate::image::{self, Image};
use crate::io::{Flags, Io, Op, Span, Transfer};
use crate::iov::{self, Segment};
use crate::map::{Intent, Map};
use crate::ranges::Hold;
use crate::storage::Storage;

/// Bytes that go through a bounce buffer at once.
const BOUNCE_BYTES: u64 = 256 << 10;
/// Bytes that are discarded or zeroed at once. The file system keeps everyone else off the file
/// meanwhile, and the range locks those who read blocks and write them back; between two steps
/// they get in.
const ZERO_STEP_BYTES: u64 = 1 << 30;
/// Spans that one status request reports at most.
pub(crate) const MAX_SPANS: usize = 4096;

/// C02, which comes before the checks that look at segments.
///
/// # Errors
/// `EROFS` for a change on a read-only device.
pub(crate) fn check_rights<M: Map>(disk: &Disk<M>, op: Op) -> Result<(), Error> {
    if op.changes() && disk.is_read_only() {
        return Err(Error::new(libc::EROFS, Doing::Validate));
    }
    Ok(())
}

/// The checks that need the device (C02, C08, C17, C25); the range comes back cut to what can be
/// done.
///
/// # Errors
/// `EROFS`, `EINVAL` or `ENOSPC`.
pub(crate) fn check<M: Map>(disk: &Disk<M>, io: Io) -> Result<Io, Error> {
    let fail = |errno| Err(Error::new(errno, Doing::Validate).at(io.range));
    let Range { pos, mut len } = io.range;
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
    Ok(Io { range: Range::new(pos, len), ..io })
}

/// Runs `io`. `Ok` holds the bytes done, which are fewer than asked for only where the file ended
/// before the device did or, without [`Flags::WHOLE`], an error came after some bytes (C17, C19).
///
/// # Errors
/// What the system call said.
///
/// # Safety
/// The memory of `segments` is valid, and not touched by anyone else, until this returns.
pub(crate) unsafe fn run<M: Map>(
    disk: &Disk<M>,
    io: Io,
    segments: &[Segment],
    spans: &mut Vec<Span>,
) -> Result<u64, Error> {
    // SAFETY: as promised by the caller.
    let mut done = unsafe { once(disk, io, segments, spans) }?;
    if !io.flags.has(Flags::WHOLE) || !matches!(io.op, Op::Read | Op::Write) {
        return Ok(done);
    }
    while done > 0 && done < io.range.len {
        // What has ended it shows when the rest is asked for.
        let range = Range::new(io.range.pos + done, io.range.len - done);
        let mut rest = Vec::new();
        iov::parts(segments, done, range.len, |part| rest.push(part));
        // SAFETY: parts of the caller's memory.
        match unsafe { once(disk, Io { range, ..io }, &rest, spans) }? {
            0 => break,
            more => done += more,
        }
    }
    Ok(done)
}

/// As `run`, for whom bytes count that came before an error.
///
/// # Safety
/// As for `run`.
unsafe fn once<M: Map>(
    disk: &Disk<M>,
    io: Io,
    segments: &[Segment],
    spans: &mut Vec<Span>,
) -> Result<u64, Error> {
    let Io { op, flags, range } = io;
    let done = match op {
        // SAFETY: as promised by the caller.
        Op::Read => unsafe { fetch(disk, range, segments) }?,
        Op::Write => {
            let aligned = is_aligned(disk, range, segments);
            let hold = if aligned { Hold::Shared } else { Hold::Exclusive };
            // SAFETY: as promised by the caller.
            held(disk, range, hold, || unsafe { put(disk, range, segments) })?
        }
        Op::Flush => {
            disk.flush()?;
            0
        }
        Op::Discard | Op::Zero => {
            zero(disk, io)?;
            range.len
        }
        Op::Status => {
            status(disk, range, spans)?;
            range.len
        }
    };
    if flags.has(Flags::DSYNC) && op.changes() {
        disk.flush()?;
    }
    Ok(done)
}

/// Whether storage takes the transfer as it is (C11).
pub(crate) fn is_aligned<M: Map>(disk: &Disk<M>, range: Range, segments: &[Segment]) -> bool {
    is_aligned_to(disk, disk.alignment().offset, range, segments)
}

/// The same for positions and lengths that are multiples of `block` bytes.
pub(crate) fn is_aligned_to<M: Map>(
    disk: &Disk<M>,
    block: u32,
    range: Range,
    segments: &[Segment],
) -> bool {
    (range.pos | range.len) & (u64::from(block) - 1) == 0
        && iov::aligned(segments, disk.alignment().memory, block)
}

fn held<M: Map, T>(disk: &Disk<M>, range: Range, hold: Hold, run: impl FnOnce() -> T) -> T {
    let blocks = blocks_of(disk, range);
    disk.ranges.take(blocks, hold);
    let result = run();
    disk.ranges.free(blocks, hold);
    result
}

/// The whole blocks that `range` touches.
pub(crate) fn blocks_of<M: Map>(disk: &Disk<M>, range: Range) -> Range {
    let block = disk.alignment().offset;
    let pos = align::down(range.pos, block);
    Range::new(pos, align::up(range.end(), block) - pos)
}

/// Bytes moved, or the error of a step; an error after some bytes gives those bytes.
fn short(done: u64, error: Error) -> Result<u64, Error> {
    if done > 0 { Ok(done) } else { Err(error) }
}

/// One transfer between `range` and one piece of memory, resumed until it is done or the file
/// ends (C19).
///
/// # Safety
/// `base` is valid for `range.len` bytes.
unsafe fn move_all<M: Map>(
    disk: &Disk<M>,
    write: bool,
    range: Range,
    base: *mut u8,
) -> Result<u64, Error> {
    let mut done = 0;
    while done < range.len {
        let transfer = Transfer {
            base: base.wrapping_add(done as usize),
            pos: range.pos + done,
            len: (range.len - done).min(iov::MAX_TRANSFER_BYTES) as u32,
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
                let doing = if write { Doing::Write } else { Doing::Read };
                return short(done, Error::new(-outcome, doing).at(range));
            }
        }
    }
    Ok(done)
}

/// A read, by the image or from the file.
///
/// # Safety
/// As for `run`.
unsafe fn fetch<M: Map>(disk: &Disk<M>, range: Range, segments: &[Segment]) -> Result<u64, Error> {
    match disk.map.image() {
        // SAFETY: as promised by the caller.
        Some(image) => unsafe { image::read(image, range, segments) },
        // SAFETY: as promised by the caller.
        None => unsafe { read(disk, range, segments) },
    }
}

/// A write, by the image or to the file.
///
/// # Safety
/// As for `run`.
unsafe fn put<M: Map>(disk: &Disk<M>, range: Range, segments: &[Segment]) -> Result<u64, Error> {
    match disk.map.image() {
        // SAFETY: as promised by the caller.
        Some(image) => unsafe { image::write(image, range, segments) },
        // SAFETY: as promised by the caller.
        None => unsafe { write(disk, range, segments) },
    }
}

/// # Safety
/// As for `run`.
unsafe fn read<M: Map>(disk: &Disk<M>, range: Range, segments: &[Segment]) -> Result<u64, Error> {
    let mut done = 0;
    while done < range.len {
        let rest = Range::new(range.pos + done, range.len - done);
        let extent = disk.map.begin_blocking(rest, Intent::Read);
        let part = Range::new(rest.pos, extent.len);
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
            Err(error) => return short(done, error),
        }
    }
    Ok(done)
}

/// Reads `part`, whose bytes begin at `start` of the request.
///
/// # Safety
/// As for `run`.
unsafe fn read_mapped<M: Map>(
    disk: &Disk<M>,
    part: Range,
    segments: &[Segment],
    start: u64,
) -> Result<u64, Error> {
    let align = disk.alignment();
    if let [one] = segments
        && is_read_aligned(disk, part, one.base.wrapping_add(start as usize))
    {
        // SAFETY: `part` lies in the request, so its bytes lie in the segment.
        return unsafe { move_all(disk, false, part, one.base.wrapping_add(start as usize)) };
    }
    let mut bounce = bounce(part.len + 2 * u64::from(align.read_offset))?;
    let mut done = 0;
    while done < part.len {
        let pos = align::down(part.pos + done, align.read_offset);
        let skip = part.pos + done - pos;
        let len = align::up(part.end() - pos, align.read_offset).min(bounce.len() as u64);
        // SAFETY: `bounce` has at least `len` bytes.
        let got = match unsafe { move_all(disk, false, Range::new(pos, len), bounce.as_mut_ptr()) }
        {
            Ok(got) => got,
            Err(error) => return short(done, error),
        };
        let useful = got.saturating_sub(skip).min(part.len - done);
        // SAFETY: as promised by the caller of `run`; `bounce` was read up to `skip + useful`.
        unsafe { copy_out(&bounce[skip as usize..], segments, start + done, useful) };
        done += useful;
        if got < len {
            break;
        }
    }
    Ok(done)
}

fn is_read_aligned<M: Map>(disk: &Disk<M>, range: Range, base: *mut u8) -> bool {
    let segment = Segment { base, len: range.len as usize };
    is_aligned_to(disk, disk.alignment().read_offset, range, &[segment])
}

/// # Safety
/// As for `run`.
unsafe fn write<M: Map>(disk: &Disk<M>, range: Range, segments: &[Segment]) -> Result<u64, Error> {
    disk.map.begin_blocking(range, Intent::Write);
    // Whole blocks of the file go directly; the rest of its last block goes through the page
    // cache, because a direct write of the whole block would grow the file.
    let tail = align::down(disk.size(), disk.alignment().offset).clamp(range.pos, range.end());
    let body = Range::new(range.pos, tail - range.pos);
    // SAFETY: as promised by the caller of `run`.
    let done = unsafe { write_body(disk, body, segments) };
    let done = match done {
        // SAFETY: as promised by the caller of `run`.
        Ok(done) if done == body.len => unsafe { write_tail(disk, range, done, segments) },
        other => other,
    };
    disk.map.written(range);
    done
}

/// # Safety
/// As for `run`.
unsafe fn write_body<M: Map>(
    disk: &Disk<M>,
    body: Range,
    segments: &[Segment],
) -> Result<u64, Error> {
    let align = disk.alignment();
    if let [one] = segments
        && is_aligned(disk, body, &[Segment { base: one.base, len: body.len as usize }])
    {
        // SAFETY: `body` lies in the request, so its bytes lie in the segment.
        return unsafe { move_all(disk, true, body, one.base) };
    }
    let mut done = 0;
    if body.len == 0 {
        return Ok(0);
    }
    let mut bounce = bounce(body.len + 2 * u64::from(align.offset))?;
    while done < body.len {
        let pos = align::down(body.pos + done, align.offset);
        let skip = body.pos + done - pos;
        let len = align::up(body.end() - pos, align.offset).min(bounce.len() as u64);
        let part = (len - skip).min(body.len - done);
        let blocks = Range::new(pos, len);
        let step = (|| {
            read_edges(disk, blocks, skip, part, &mut bounce)?;
            // SAFETY: as promised by the caller of `run`.
            unsafe { copy_in(segments, done, part, &mut bounce[skip as usize..]) };
            // SAFETY: `bounce` has at least `len` bytes.
            unsafe { move_all(disk, true, blocks, bounce.as_mut_ptr()) }
        })();
        match step {
            Ok(put) if put == len => done += part,
            Ok(put) => return Ok(done + put.saturating_sub(skip).min(part)),
            Err(error) => return short(done, error),
        }
    }
    Ok(done)
}

/// Reads the first and the last block of `blocks` into `bounce` where the write does not cover
/// them as a whole.
fn read_edges<M: Map>(
    disk: &Disk<M>,
    blocks: Range,
    skip: u64,
    part: u64,
    bounce: &mut Aligned,
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
        let range = Range::new(blocks.pos + edge, block);
        // SAFETY: `memory` has `block` bytes.
        let got = unsafe { move_all(disk, false, range, memory.as_mut_ptr()) }?;
        if got < block {
            // The file was cut behind our back; writing would grow it again with made-up bytes.
            return Err(Error::new(libc::EIO, Doing::Write).at(range));
        }
    }
    Ok(())
}

/// Writes what of `range` lies in the last, partial block of the file, through the page cache: by
/// one call, so that a reader never sees some of it (C54).
///
/// # Safety
/// As for `run`.
unsafe fn write_tail<M: Map>(
    disk: &Disk<M>,
    range: Range,
    done: u64,
    segments: &[Segment],
) -> Result<u64, Error> {
    let tail = range.len - done;
    if tail == 0 {
        return Ok(done);
    }
    let no_memory = Error::new(libc::ENOMEM, Doing::SetUp);
    let mut bytes = Aligned::zeroed(tail as usize).ok_or(no_memory)?;
    // SAFETY: as promised by the caller of `run`.
    unsafe { copy_in(segments, done, tail, &mut bytes) };
    match disk.top().write_buffered(&bytes, range.pos + done) {
        Ok(()) => Ok(range.len),
        Err(error) => short(done, error.at(range)),
    }
}

/// Discards or zeroes, [`ZERO_STEP_BYTES`] at a time.
fn zero<M: Map>(disk: &Disk<M>, io: Io) -> Result<(), Error> {
    let mut pos = io.range.pos;
    while pos < io.range.end() {
        let range = Range::new(pos, (io.range.end() - pos).min(ZERO_STEP_BYTES));
        zero_step(disk, Io { range, ..io })?;
        pos = range.end();
    }
    Ok(())
}

fn zero_step<M: Map>(disk: &Disk<M>, io: Io) -> Result<(), Error> {
    let Io { op, flags, range } = io;
    // What an image gives back may be used for another range at once. In a file, no write may end
    // between the zeros and the hint that tells of them, or the hint would hide its data.
    let done = held(disk, range, Hold::Exclusive, || match disk.map.image() {
        Some(image) => zero_image(image, io),
        None => zero_file(disk, io),
    });
    match done {
        Err(error) if error.errno() == libc::EOPNOTSUPP && op == Op::Zero => {
            if flags.has(Flags::FAST_ZERO) { Err(error) } else { write_zeros(disk, range) }
        }
        other => other,
    }
}

fn zero_image(image: &dyn Image, io: Io) -> Result<(), Error> {
    match io.op {
        Op::Discard => image.discard(io.range),
        _ => image.zero(io.range, io.flags),
    }
}

fn zero_file<M: Map>(disk: &Disk<M>, io: Io) -> Result<(), Error> {
    let Io { op, flags, range } = io;
    let file = disk.top();
    disk.map.forget(range);
    let keep = op == Op::Zero && flags.has(Flags::NO_UNMAP);
    let mut done = if keep { zero_kept(file, io) } else { file.punch(range) };
    if op == Op::Zero && !keep && done.is_err_and(|e| e.errno() == libc::EOPNOTSUPP) {
        done = zero_kept(file, io);
    }
    match done {
        // Zeroed and kept is a hole to a reader, and is written without new blocks.
        Ok(()) if keep => {}
        Ok(()) => disk.map.hole(range),
        // What was forgotten may still be there.
        Err(_) => disk.map.written(range),
    }
    done
}

/// Zeros that keep their storage, unless they were to be fast and may come to writing them.
fn zero_kept(file: &Storage, io: Io) -> Result<(), Error> {
    if io.flags.has(Flags::FAST_ZERO) && file.is_device() {
        return Err(Error::new(libc::EOPNOTSUPP, Doing::Zero).at(io.range));
    }
    file.zero(io.range)
}

/// Zeros by writing them, for file systems that cannot do it otherwise.
fn write_zeros<M: Map>(disk: &Disk<M>, range: Range) -> Result<(), Error> {
    let zeros = bounce(range.len)?;
    let mut done = 0;
    while done < range.len {
        let len = (range.len - done).min(zeros.len() as u64);
        let part = Range::new(range.pos + done, len);
        let segment = [Segment { base: zeros.as_ptr().cast_mut(), len: len as usize }];
        let hold = if is_aligned(disk, part, &segment) { Hold::Shared } else { Hold::Exclusive };
        // SAFETY: `zeros` has `len` bytes, which a write only reads.
        let done_now = held(disk, part, hold, || unsafe { put(disk, part, &segment) })?;
        if done_now == 0 {
            return Err(Error::new(libc::EIO, Doing::Zero).at(part));
        }
        // The next write tells why this one ended early.
        done += done_now;
    }
    Ok(())
}

fn status<M: Map>(disk: &Disk<M>, range: Range, spans: &mut Vec<Span>) -> Result<(), Error> {
    spans.clear();
    if let Some(image) = disk.map.image() {
        return image.status(range, MAX_SPANS, spans);
    }
    if disk.map.known(range, MAX_SPANS, spans) {
        return Ok(());
    }
    learn(disk, range, spans);
    Ok(())
}

/// Asks the file system, and remembers the holes.
fn learn<M: Map>(disk: &Disk<M>, range: Range, spans: &mut Vec<Span>) {
    spans.clear();
    if disk.top().spans(range, MAX_SPANS, spans).is_err() || spans.is_empty() {
        // Where the file system cannot tell, everything counts as data.
        spans.clear();
        spans.push(Span::on_top(range.len, false));
        return;
    }
    let mut pos = range.pos;
    for span in spans.iter() {
        if span.hole {
            remember(disk, Range::new(pos, span.len));
        }
        pos += span.len;
    }
}

/// Remembers a hole that was seen, unless somebody writes to it or zeroes it just now: data that
/// has landed since, but was not told of yet, would be hidden from then until it is. What was
/// written before is known to be mapped, and stays so.
fn remember<M: Map>(disk: &Disk<M>, hole: Range) {
    let blocks = blocks_of(disk, hole);
    if disk.ranges.try_take(blocks, Hold::Exclusive) {
        disk.map.hole(hole);
        disk.ranges.free(blocks, Hold::Exclusive);
    }
}

fn bounce(len: u64) -> Result<Aligned, Error> {
    let len = len.clamp(1, BOUNCE_BYTES).next_multiple_of(4096);
    Aligned::zeroed(len as usize).ok_or(Error::new(libc::ENOMEM, Doing::SetUp))
}

/// Zeros the bytes `start..start + len` of a request's memory.
///
/// # Safety
/// The memory of `segments` is valid and nobody else touches it.
pub(crate) unsafe fn fill_zero(segments: &[Segment], start: u64, len: u64) {
    iov::parts(segments, start, len, |part| {
        // SAFETY: the part lies in the caller's memory.
        unsafe { part.base.write_bytes(0, part.len) };
    });
}

/// Copies `len` bytes of `from` to the request's bytes from `start` on.
///
/// # Safety
/// As for `fill_zero`.
pub(crate) unsafe fn copy_out(from: &[u8], segments: &[Segment], start: u64, len: u64) {
    let mut from = &from[..len as usize];
    iov::parts(segments, start, len, |part| {
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
pub(crate) unsafe fn copy_in(segments: &[Segment], start: u64, len: u64, to: &mut [u8]) {
    let mut to = &mut to[..len as usize];
    iov::parts(segments, start, len, |part| {
        let (now, later) = std::mem::take(&mut to).split_at_mut(part.len);
        // SAFETY: the part lies in the caller's memory, which is not `to`.
        unsafe { part.base.copy_to_nonoverlapping(now.as_mut_ptr(), now.len()) };
        to = later;
    });
}
