//! Tests of the plans of requests against a model, extent by extent.
//!
//! Invariant: the model computes the expected plan in another way than the planner.

use std::sync::Arc;

use crate::block::block_map::WouldBlock;
use crate::engine::vectored::*;
use crate::sim::{Random, SimDevice, SimOptions};
use crate::storage::open_options::OpenOptions;
use crate::storage::sim::SimStorage;
use crate::types::alignment::Alignment;
use crate::types::request::Flags;

const READ_BLOCK: u64 = 512;
const WRITE_BLOCK: u64 = 4096;
const MEMORY: usize = 16;
const MIB: u64 = 1 << 20;

/// The backing of a stretch of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backing {
    /// Bytes of a file from a position on.
    File(u16, u64),
    Hole,
    /// Not known without waiting.
    Unknown,
}

/// Stretches from the device's start on, each with its length in bytes.
struct Table(Vec<(u64, Backing)>);

impl Table {
    /// The stretch at `pos`: where it begins and ends.
    fn at(&self, pos: u64) -> (u64, u64, Backing) {
        let mut start = 0;
        for &(len, backing) in &self.0 {
            if pos < start + len {
                return (start, start + len, backing);
            }
            start += len;
        }
        panic!("{pos} is past the end");
    }
}

impl BlockMap for Table {
    fn map_extent(&self, range: ByteRange, intent: Intent) -> Result<Extent, WouldBlock> {
        let (start, end, backing) = self.at(range.pos);
        let len = range.len.min(end - range.pos);
        match backing {
            Backing::File(file, pos) => {
                Ok(Extent { file, pos: pos + (range.pos - start), len, hole: false })
            }
            Backing::Hole if intent == Intent::Read => {
                Ok(Extent { file: 0, pos: 0, len, hole: true })
            }
            _ => Err(WouldBlock),
        }
    }

    fn is_mapped(&self, _: ByteRange) -> bool {
        false
    }
}

/// 4 MiB: data, a hole, data of two other files, a hole, an unknown stretch, data; all at block
/// boundaries.
fn table() -> Table {
    Table(vec![
        (MIB, Backing::File(0, 0)),
        (64 << 10, Backing::Hole),
        (MIB, Backing::File(2, 7 * MIB)),
        (64 << 10, Backing::File(1, 4096)),
        (8192, Backing::Hole),
        (4096, Backing::Unknown),
        (4 * MIB, Backing::File(0, 16 * MIB)),
    ])
}

fn disk() -> BlockDevice<Table> {
    let align = Alignment {
        memory: MEMORY as u32,
        offset: WRITE_BLOCK as u32,
        read_offset: READ_BLOCK as u32,
    };
    let options = SimOptions { align, ..SimOptions::able(4 * MIB) };
    let device = Arc::new(SimDevice::new(options));
    let storage = SimStorage::open(&device, 0, OpenOptions::default());
    BlockDevice::mapped(Arc::new(storage), Vec::new(), 4 * MIB, false, table())
}

fn segment(base: usize, len: u64) -> IoSegment {
    IoSegment { base: std::ptr::without_provenance_mut(base), len: len as usize }
}

/// A buffer around the memory, with more room than any request here needs.
fn own(segments: &[IoSegment]) -> Option<IoSegment> {
    let base = segments.first()?.base.wrapping_sub(READ_BLOCK as usize);
    Some(IoSegment { base, len: 8 << 20 })
}

/// The path and the plan of a request. The list of fragments is not empty before.
fn planned(disk: &BlockDevice<Table>, input: &PlanInput) -> (Path, Vec<Fragment>) {
    let io = Request { op: input.op, flags: Flags::NONE, range: input.range };
    let mut fragments = vec![Fragment::NONE; 3];
    let PlanInput { segments, own_room, vectored, separate_sync, .. } = input;
    let own = own(segments).filter(|_| *own_room);
    let path = plan(disk, io, segments, || own, *vectored, *separate_sync, &mut fragments);
    fragments.reverse();
    (path, fragments)
}

/// The input of the planner.
#[derive(Clone, Debug)]
struct PlanInput {
    op: Op,
    range: ByteRange,
    segments: Vec<IoSegment>,
    own_room: bool,
    vectored: bool,
    separate_sync: bool,
}

impl PlanInput {
    fn new(op: Op, pos: u64, segments: &[IoSegment]) -> Self {
        let len = segments.iter().map(|segment| segment.len as u64).sum();
        let range = ByteRange::new(pos, len);
        let segments = segments.to_vec();
        Self { op, range, segments, own_room: false, vectored: true, separate_sync: false }
    }
}

/// The expected plan; `None` for a worker.
fn expected(input: &PlanInput) -> Option<Vec<Fragment>> {
    let block = if input.op == Op::Read { READ_BLOCK } else { WRITE_BLOCK };
    let ByteRange { pos, len } = input.range;
    if input.op == Op::Write && (pos % block, len % block) != (0, 0) {
        return None;
    }
    let (table, mut fragments, mut at) = (table(), Vec::new(), pos);
    while at < pos + len {
        let (first, last, backing) = table.at(at);
        let end = last.min(pos + len);
        let fragment = |kind| Fragment { start: at - pos, len: end - at, pos: 0, file: 0, kind };
        match backing {
            Backing::Unknown => return None,
            Backing::Hole if input.op == Op::Write => return None,
            Backing::Hole => fragments.push(fragment(FragmentKind::Zero)),
            Backing::File(file, base) => {
                let fragment = |kind| Fragment { pos: base + (at - first), file, ..fragment(kind) };
                in_file(input, block, fragment, &mut fragments);
            }
        }
        at = end;
    }
    Some(fragments)
}

/// The parts of memory that hold the bytes `start..end` of the request: address and length.
fn memory(segments: &[IoSegment], start: u64, end: u64) -> Vec<(usize, u64)> {
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

fn in_file(
    input: &PlanInput,
    block: u64,
    fragment: impl Fn(FragmentKind) -> Fragment,
    fragments: &mut Vec<Fragment>,
) {
    let direct = fragment(FragmentKind::Direct);
    let parts = memory(&input.segments, direct.start, direct.start + direct.len);
    let is_aligned = direct.pos.is_multiple_of(block) && direct.len.is_multiple_of(block);
    if is_aligned && parts.iter().all(|(base, len)| base % MEMORY == 0 && len % block == 0) {
        let mut start = direct.start;
        let lengths: Vec<u64> = match input.vectored {
            true => vec![direct.len],
            false => parts.iter().map(|part| part.1).collect(),
        };
        for len in lengths {
            fragments.push(Fragment {
                start,
                len,
                pos: direct.pos + (start - direct.start),
                ..direct
            });
            start += len;
        }
    } else if input.op == Op::Read
        && input.own_room
        && direct.len == input.range.len
        && parts[0].0.wrapping_sub((direct.pos % block) as usize).is_multiple_of(MEMORY)
    {
        fragments.push(fragment(FragmentKind::PaddedRead { skip: (direct.pos % block) as u32 }));
    } else {
        // Each bounce buffer holds whole blocks, and all but the last one is full.
        let (mut at, end) = (direct.pos, direct.pos + direct.len);
        while at < end {
            let skip = at % block;
            let next = end.min(at - skip + BOUNCE_BYTES);
            let kind = FragmentKind::Bounce { skip: skip as u32 };
            let start = direct.start + (at - direct.pos);
            fragments.push(Fragment { start, len: next - at, pos: at, file: direct.file, kind });
            at = next;
        }
    }
}

fn check(disk: &BlockDevice<Table>, input: &PlanInput) {
    let (path, fragments) = planned(disk, input);
    match expected(input) {
        None => assert_eq!(path, Path::Worker, "{input:?}"),
        Some(plan) => match plan.as_slice() {
            &[Fragment { kind: FragmentKind::Direct, len, pos, file, .. }]
                if !input.separate_sync =>
            {
                let extent = Extent { file, pos, len, hole: false };
                assert_eq!(path, Path::Single(extent), "{input:?}");
                assert!(fragments.is_empty(), "{input:?}: {fragments:?}");
            }
            _ => {
                assert_eq!(path, Path::Split, "{input:?}");
                assert_eq!(fragments, plan, "{input:?}");
            }
        },
    }
}

/// Memory for `len` bytes, in up to four segments that do not touch.
fn segments(random: &mut Random, mut len: u64) -> Vec<IoSegment> {
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
fn c11_c14_c35_every_plan_covers_its_request_in_order_with_the_kind_that_each_part_allows() {
    let disk = disk();
    let mut random = Random::new(11);
    let mut seen = [0; 3];
    for _ in 0..30_000 {
        let unit = [1, READ_BLOCK, WRITE_BLOCK][random.below(3) as usize];
        let longest = [3 * WRITE_BLOCK, 3 * MIB / 2][random.below(2) as usize];
        let pos = random.below(5 * MIB / 2 / unit) * unit;
        let len = (1 + random.below(longest / unit)) * unit;
        let input = PlanInput {
            op: [Op::Read, Op::Write][random.below(2) as usize],
            range: ByteRange::new(pos, len),
            segments: segments(&mut random, len),
            own_room: random.below(2) == 0,
            vectored: random.below(4) > 0,
            separate_sync: random.below(4) == 0,
        };
        check(&disk, &input);
        seen[match planned(&disk, &input).0 {
            Path::Single(_) => 0,
            Path::Split => 1,
            Path::Worker => 2,
        }] += 1;
    }
    assert!(seen.iter().all(|count| *count > 1000), "{seen:?}");
}

#[test]
fn c11_a_transfer_that_is_out_of_place_by_one_goes_through_a_buffer_of_its_blocks() {
    let disk = disk();
    let one = [segment(4096, 1024)];
    let direct = Extent { file: 0, pos: 512, len: 1024, hole: false };
    assert_eq!(planned(&disk, &PlanInput::new(Op::Read, 512, &one)).0, Path::Single(direct));
    let (path, fragments) = planned(&disk, &PlanInput::new(Op::Read, 513, &one));
    let kind = FragmentKind::Bounce { skip: 1 };
    let bounced = Fragment { start: 0, len: 1024, pos: 513, file: 0, kind };
    assert_eq!((path, fragments), (Path::Split, vec![bounced]));
    let (_, fragments) = planned(&disk, &PlanInput::new(Op::Read, 512, &[segment(4097, 1024)]));
    assert_eq!(
        fragments,
        [Fragment { pos: 512, kind: FragmentKind::Bounce { skip: 0 }, ..bounced }]
    );
}

#[test]
fn requests_other_than_reads_and_writes_go_to_a_worker() {
    for op in [Op::Flush, Op::Discard, Op::Zero, Op::Status] {
        let input = PlanInput::new(op, 0, &[segment(4096, 4096)]);
        assert_eq!(planned(&disk(), &input), (Path::Worker, Vec::new()), "{op:?}");
    }
}

#[test]
fn a_read_is_widened_only_into_a_buffer_that_has_room_for_its_blocks() {
    let disk = disk();
    let range = ByteRange::new(READ_BLOCK + 100, 300);
    let segments = [segment(1 << 20 | 100, 300)];
    let kind = |before, after| {
        let base = segments[0].base.wrapping_sub(before);
        let (mut fragments, own) = (Vec::new(), Some(IoSegment { base, len: before + after }));
        let io = Request { op: Op::Read, flags: Flags::NONE, range };
        assert_eq!(plan(&disk, io, &segments, || own, true, false, &mut fragments), Path::Split);
        fragments[0].kind
    };
    assert_eq!(kind(100, 412), FragmentKind::PaddedRead { skip: 100 });
    assert_eq!(
        kind(99, 412),
        FragmentKind::Bounce { skip: 100 },
        "the first block begins before it"
    );
    assert_eq!(kind(100, 411), FragmentKind::Bounce { skip: 100 }, "the last block ends after it");
}
