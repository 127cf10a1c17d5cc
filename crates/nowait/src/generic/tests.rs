//! Plans against what they must be, said extent by extent and run by run.
//!
//! Invariant: what is expected is put together in another way than the plan is.

use std::sync::Arc;

use super::*;
use crate::align::Alignment;
use crate::io::Flags;
use crate::map::WouldBlock;
use crate::sim::{Random, SimDevice, SimOptions};
use crate::storage::{OpenOptions, Storage};

const READ_BLOCK: u64 = 512;
const WRITE_BLOCK: u64 = 4096;
const MEMORY: usize = 16;
const MIB: u64 = 1 << 20;

/// What is behind a stretch of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behind {
    /// Bytes of a file from a position on.
    File(u16, u64),
    Hole,
    /// Nobody knows without waiting.
    Unknown,
}

/// Stretches from the device's start on, each with its length in bytes.
struct Table(Vec<(u64, Behind)>);

impl Table {
    /// The stretch at `pos`: where it begins and ends.
    fn at(&self, pos: u64) -> (u64, u64, Behind) {
        let mut start = 0;
        for &(len, behind) in &self.0 {
            if pos < start + len {
                return (start, start + len, behind);
            }
            start += len;
        }
        panic!("{pos} is behind the end");
    }
}

impl Map for Table {
    fn begin(&self, range: Range, intent: Intent) -> Result<Extent, WouldBlock> {
        let (start, end, behind) = self.at(range.pos);
        let len = range.len.min(end - range.pos);
        match behind {
            Behind::File(file, pos) => {
                Ok(Extent { file, pos: pos + (range.pos - start), len, hole: false })
            }
            Behind::Hole if intent == Intent::Read => {
                Ok(Extent { file: 0, pos: 0, len, hole: true })
            }
            _ => Err(WouldBlock),
        }
    }

    fn is_mapped(&self, _: Range) -> bool {
        false
    }
}

/// 4 MiB: data, a hole, data elsewhere, what nobody knows, data; all at block boundaries.
fn table() -> Table {
    Table(vec![
        (MIB, Behind::File(0, 0)),
        (64 << 10, Behind::Hole),
        (MIB, Behind::File(2, 7 * MIB)),
        (64 << 10, Behind::File(1, 4096)),
        (8192, Behind::Hole),
        (4096, Behind::Unknown),
        (4 * MIB, Behind::File(0, 16 * MIB)),
    ])
}

fn disk() -> Disk<Table> {
    let align = Alignment {
        memory: MEMORY as u32,
        offset: WRITE_BLOCK as u32,
        read_offset: READ_BLOCK as u32,
    };
    let options = SimOptions { align, ..SimOptions::able(4 * MIB) };
    let device = Arc::new(SimDevice::new(options));
    let storage = Storage::simulated(&device, OpenOptions::default()).unwrap();
    Disk::mapped(storage, Vec::new(), 4 * MIB, false, table())
}

fn segment(base: usize, len: u64) -> Segment {
    Segment { base: std::ptr::without_provenance_mut(base), len: len as usize }
}

/// How a request is planned; no plan is left over from an earlier one.
fn planned(disk: &Disk<Table>, asked: &Asked) -> (Route, Vec<Piece>) {
    let io = Io { op: asked.op, flags: Flags::NONE, range: asked.range };
    let mut pieces = vec![Piece::NONE; 3];
    let Asked { segments, own_room, vectored, syncs_apart, .. } = asked;
    let route = plan(disk, io, segments, *own_room, *vectored, *syncs_apart, &mut pieces);
    pieces.reverse();
    (route, pieces)
}

/// All that a plan depends on.
#[derive(Clone, Debug)]
struct Asked {
    op: Op,
    range: Range,
    segments: Vec<Segment>,
    own_room: bool,
    vectored: bool,
    syncs_apart: bool,
}

impl Asked {
    fn new(op: Op, pos: u64, segments: &[Segment]) -> Self {
        let len = segments.iter().map(|segment| segment.len as u64).sum();
        let range = Range::new(pos, len);
        let segments = segments.to_vec();
        Self { op, range, segments, own_room: false, vectored: true, syncs_apart: false }
    }
}

/// What the plan must be; `None` for a worker.
fn expected(asked: &Asked) -> Option<Vec<Piece>> {
    let block = if asked.op == Op::Read { READ_BLOCK } else { WRITE_BLOCK };
    let Range { pos, len } = asked.range;
    if asked.op == Op::Write && (pos % block, len % block) != (0, 0) {
        return None;
    }
    let (table, mut pieces, mut at) = (table(), Vec::new(), pos);
    while at < pos + len {
        let (first, last, behind) = table.at(at);
        let end = last.min(pos + len);
        let piece = |kind| Piece { start: at - pos, len: end - at, pos: 0, file: 0, kind };
        match behind {
            Behind::Unknown => return None,
            Behind::Hole if asked.op == Op::Write => return None,
            Behind::Hole => pieces.push(piece(Kind::Zero)),
            Behind::File(file, base) => {
                let piece = |kind| Piece { pos: base + (at - first), file, ..piece(kind) };
                in_file(asked, block, piece, &mut pieces);
            }
        }
        at = end;
    }
    Some(pieces)
}

/// The parts of memory that hold the bytes `start..end` of the request: place and length.
fn memory(segments: &[Segment], start: u64, end: u64) -> Vec<(usize, u64)> {
    let mut parts = Vec::new();
    let mut before = 0;
    for segment in segments {
        let (from, to) = (start.max(before), end.min(before + segment.len as u64));
        if from < to {
            parts.push((segment.base.addr() + (from - before) as usize, to - from));
        }
        before += segment.len as u64;
    }
    parts
}

fn in_file(asked: &Asked, block: u64, piece: impl Fn(Kind) -> Piece, pieces: &mut Vec<Piece>) {
    let whole = piece(Kind::Direct);
    let parts = memory(&asked.segments, whole.start, whole.start + whole.len);
    let is_placed = whole.pos.is_multiple_of(block) && whole.len.is_multiple_of(block);
    if is_placed && parts.iter().all(|(base, len)| base % MEMORY == 0 && len % block == 0) {
        let mut start = whole.start;
        let cuts: Vec<u64> = match asked.vectored {
            true => vec![whole.len],
            false => parts.iter().map(|part| part.1).collect(),
        };
        for len in cuts {
            pieces.push(Piece { start, len, pos: whole.pos + (start - whole.start), ..whole });
            start += len;
        }
    } else if asked.op == Op::Read && asked.own_room && whole.len == asked.range.len {
        pieces.push(piece(Kind::Widened { skip: (whole.pos % block) as u32 }));
    } else {
        // Each buffer holds whole blocks, and all but the last one is full.
        let (mut at, end) = (whole.pos, whole.pos + whole.len);
        while at < end {
            let skip = at % block;
            let next = end.min(at - skip + BOUNCE_BYTES);
            let kind = Kind::Bounce { skip: skip as u32 };
            let start = whole.start + (at - whole.pos);
            pieces.push(Piece { start, len: next - at, pos: at, file: whole.file, kind });
            at = next;
        }
    }
}

fn check(disk: &Disk<Table>, asked: &Asked) {
    let (route, pieces) = planned(disk, asked);
    match expected(asked) {
        None => assert_eq!(route, Route::Worker, "{asked:?}"),
        Some(plan) => match plan.as_slice() {
            &[Piece { kind: Kind::Direct, len, pos, file, .. }] if !asked.syncs_apart => {
                let extent = Extent { file, pos, len, hole: false };
                assert_eq!(route, Route::Single(extent), "{asked:?}");
                assert!(pieces.is_empty(), "{asked:?}: {pieces:?}");
            }
            _ => {
                assert_eq!(route, Route::Pieces, "{asked:?}");
                assert_eq!(pieces, plan, "{asked:?}");
            }
        },
    }
}

/// Memory for `len` bytes, in up to four segments that do not touch.
fn segments(random: &mut Random, mut len: u64) -> Vec<Segment> {
    let (mut list, mut base) = (Vec::new(), 1 << 30);
    let unit = [1, READ_BLOCK, WRITE_BLOCK][random.below(3) as usize];
    for left in (0..4).rev() {
        let part = if left == 0 { len } else { len.min(random.below(len / unit + 1) * unit) };
        base += [0, 0, 8, MEMORY][random.below(4) as usize];
        if part > 0 {
            list.push(segment(base, part));
        }
        len -= part;
        base = (base + part as usize).next_multiple_of(WRITE_BLOCK as usize) + 4096;
    }
    list
}

#[test]
fn c11_c14_c35_every_plan_covers_its_request_in_order_by_what_each_part_allows() {
    let disk = disk();
    let mut random = Random::new(11);
    let mut seen = [0; 3];
    for _ in 0..30_000 {
        let unit = [1, READ_BLOCK, WRITE_BLOCK][random.below(3) as usize];
        let longest = [3 * WRITE_BLOCK, 3 * MIB / 2][random.below(2) as usize];
        let pos = random.below(5 * MIB / 2 / unit) * unit;
        let len = (1 + random.below(longest / unit)) * unit;
        let asked = Asked {
            op: [Op::Read, Op::Write][random.below(2) as usize],
            range: Range::new(pos, len),
            segments: segments(&mut random, len),
            own_room: random.below(2) == 0,
            vectored: random.below(4) > 0,
            syncs_apart: random.below(4) == 0,
        };
        check(&disk, &asked);
        seen[match planned(&disk, &asked).0 {
            Route::Single(_) => 0,
            Route::Pieces => 1,
            Route::Worker => 2,
        }] += 1;
    }
    assert!(seen.iter().all(|count| *count > 1000), "{seen:?}");
}

#[test]
fn c11_a_transfer_that_is_out_of_place_by_one_goes_through_a_buffer_of_its_blocks() {
    let disk = disk();
    let one = [segment(4096, 1024)];
    let direct = Extent { file: 0, pos: 512, len: 1024, hole: false };
    assert_eq!(planned(&disk, &Asked::new(Op::Read, 512, &one)).0, Route::Single(direct));
    let (route, pieces) = planned(&disk, &Asked::new(Op::Read, 513, &one));
    let kind = Kind::Bounce { skip: 1 };
    let bounced = Piece { start: 0, len: 1024, pos: 513, file: 0, kind };
    assert_eq!((route, pieces), (Route::Pieces, vec![bounced]));
    let (_, pieces) = planned(&disk, &Asked::new(Op::Read, 512, &[segment(4097, 1024)]));
    assert_eq!(pieces, [Piece { pos: 512, kind: Kind::Bounce { skip: 0 }, ..bounced }]);
}

#[test]
fn what_is_neither_read_nor_written_is_a_workers() {
    for op in [Op::Flush, Op::Discard, Op::Zero, Op::Status] {
        let asked = Asked::new(op, 0, &[segment(4096, 4096)]);
        assert_eq!(planned(&disk(), &asked), (Route::Worker, Vec::new()), "{op:?}");
    }
}
