//! The generic path: a request is cut into pieces, each served by one transfer or none.
//!
//! Invariant: the pieces of a plan cover the request exactly, in order and without overlap; a
//! request that needs read-modify-write or allocation has no plan and goes to a worker whole, so
//! that it is done once (C33, C35).
//! Knows: align, io, iov, map, disk. Known by: request, engine.

use crate::align;
use crate::disk::Disk;
use crate::error::Range;
use crate::io::{Io, Op};
use crate::iov::{self, Segment};
use crate::map::{Extent, Intent, Map};

/// How a piece is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Zero-filled in place, no transfer (C14).
    Zero,
    /// Between the request's own memory and storage.
    Direct,
    /// A read of the enclosing blocks into the request's own buffer, which has room around the
    /// bytes asked for: `skip` of them come before.
    Widened {
        /// Bytes before the first one asked for.
        skip: u32,
    },
    /// Through a pooled buffer that holds the enclosing blocks.
    Bounce {
        /// Bytes before the first one asked for.
        skip: u32,
    },
}

/// A part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Where it begins, in bytes from the start of the request.
    pub(crate) start: u64,
    /// Its length in bytes.
    pub(crate) len: u64,
    /// Where its first byte is in `file`.
    pub(crate) pos: u64,
    /// As [`crate::Extent::file`].
    pub(crate) file: u16,
    pub(crate) kind: Kind,
}

impl Piece {
    pub(crate) const NONE: Self = Self { start: 0, len: 0, pos: 0, file: 0, kind: Kind::Zero };

    /// The bytes from `start` of the request on, which lie in `extent`.
    const fn of(extent: Extent, start: u64, kind: Kind) -> Self {
        Self { start, len: extent.len, pos: extent.pos, file: extent.file, kind }
    }
}

/// The largest piece that goes through a pooled buffer, in bytes.
const BOUNCE_BYTES: u64 = 512 << 10;

/// Who serves a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// The queue, by one transfer between all of the request's memory and the extent.
    Single(Extent),
    /// The queue, by the pieces of the plan.
    Pieces,
    /// A worker.
    Worker,
}

/// Cuts `io` into `pieces`. `segments` are its memory, merged; `own_room` says that they are one
/// buffer of the engine's with room for the enclosing blocks; `vectored` is the switch;
/// `syncs_apart` that the request is not over when its data has ended.
pub(crate) fn plan<M: Map>(
    disk: &Disk<M>,
    io: Io,
    segments: &[Segment],
    own_room: bool,
    vectored: bool,
    syncs_apart: bool,
    pieces: &mut Vec<Piece>,
) -> Route {
    pieces.clear();
    match io.op {
        Op::Read if plan_read(disk, io.range, segments, own_room, pieces) => {}
        Op::Write if plan_write(disk, io.range, segments, pieces) => {}
        _ => return Route::Worker,
    }
    if !vectored {
        one_by_one(disk, io.op, segments, pieces);
    }
    if let &[Piece { kind: Kind::Direct, len, pos, file, .. }] = pieces.as_slice()
        && !syncs_apart
    {
        pieces.clear();
        return Route::Single(Extent { file, pos, len, hole: false });
    }
    // The last piece is taken first.
    pieces.reverse();
    Route::Pieces
}

/// False when only a worker can do it.
fn plan_read<M: Map>(
    disk: &Disk<M>,
    range: Range,
    segments: &[Segment],
    own_room: bool,
    pieces: &mut Vec<Piece>,
) -> bool {
    let block = disk.alignment().read_offset;
    let mut start = 0;
    while start < range.len {
        let rest = Range::new(range.pos + start, range.len - start);
        let Ok(extent) = disk.map.begin(rest, Intent::Read) else {
            return false;
        };
        if extent.hole {
            pieces.push(Piece::of(extent, start, Kind::Zero));
        } else if is_direct(disk, block, extent, segments, start) {
            pieces.push(Piece::of(extent, start, Kind::Direct));
        } else if own_room && extent.len == range.len {
            let skip = (extent.pos - align::down(extent.pos, block)) as u32;
            pieces.push(Piece::of(extent, start, Kind::Widened { skip }));
        } else {
            bounce(extent, start, block, pieces);
        }
        start += extent.len;
    }
    true
}

/// False when only a worker can do it.
fn plan_write<M: Map>(
    disk: &Disk<M>,
    range: Range,
    segments: &[Segment],
    pieces: &mut Vec<Piece>,
) -> bool {
    let block = disk.alignment().offset;
    if (range.pos | range.len) & (u64::from(block) - 1) != 0 {
        return false;
    }
    let mut start = 0;
    while start < range.len {
        let rest = Range::new(range.pos + start, range.len - start);
        let Ok(extent) = disk.map.begin(rest, Intent::Write) else {
            return false;
        };
        if is_direct(disk, block, extent, segments, start) {
            pieces.push(Piece::of(extent, start, Kind::Direct));
        } else {
            bounce(extent, start, block, pieces);
        }
        start += extent.len;
    }
    true
}

fn is_direct<M: Map>(
    disk: &Disk<M>,
    block: u32,
    part: Extent,
    segments: &[Segment],
    start: u64,
) -> bool {
    // Its length is made of those of its segments.
    let mut direct = part.pos & (u64::from(block) - 1) == 0;
    iov::parts(segments, start, part.len, |segment| {
        direct &= iov::aligned(&[segment], disk.alignment().memory, block);
    });
    direct
}

/// Cuts `part` into pieces that fit a pooled buffer, at block boundaries.
fn bounce(part: Extent, start: u64, block: u32, pieces: &mut Vec<Piece>) {
    let mut done = 0;
    while done < part.len {
        let pos = part.pos + done;
        let skip = pos - align::down(pos, block);
        let len = (BOUNCE_BYTES - skip).min(part.len - done);
        let kind = Kind::Bounce { skip: skip as u32 };
        pieces.push(Piece { start: start + done, len, pos, file: part.file, kind });
        done += len;
    }
}

/// With `vectored` off: a direct piece is cut at its segments, which are waited for one by one.
fn one_by_one<M: Map>(disk: &Disk<M>, op: Op, segments: &[Segment], pieces: &mut Vec<Piece>) {
    let align = disk.alignment();
    let block = if op == Op::Read { align.read_offset } else { align.offset };
    let all = std::mem::take(pieces);
    for piece in all {
        if piece.kind != Kind::Direct {
            pieces.push(piece);
            continue;
        }
        let mut start = piece.start;
        iov::parts(segments, piece.start, piece.len, |segment| {
            debug_assert!(iov::aligned(&[segment], align.memory, block));
            let len = segment.len as u64;
            pieces.push(Piece { start, len, pos: piece.pos + (start - piece.start), ..piece });
            start += len;
        });
    }
}

#[cfg(test)]
#[cfg(feature = "sim")]
mod tests;
