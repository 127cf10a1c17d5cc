//! Lists of segments: the arithmetic on them, and requests to a complete engine.
//!
//! Checked: merging and slicing keep the bytes and their order; an engine on a simulated device
//! reads and writes through a list the same bytes as a plain array would, in the given segments and
//! nowhere else.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use arbitrary::{Result as Drawn, Unstructured};
use nowait::internal::MAX_TRANSFER_BYTES;
use nowait::sim::{Random, SimDevice, SimOptions, SimQueue};
use nowait::{
    Alignment, AllocationCache, BlockDevice, ByteRange, Config, Flags, IoSegment, MAX_SEGMENTS, Op,
    OpenOptions, Request, SimStorage, SingleDisk, WorkerPool, fuzz,
};

use crate::target::{Check, Target};

const BLOCK: u32 = 512;
/// Bytes of the device.
const DEVICE_BYTES: u64 = 64 * BLOCK as u64;
/// Bytes of the memory that contains the segments.
const ARENA_BYTES: usize = 40 << 10;
/// The most polls of the engine for one request: far more than any needs.
const MAX_ITERATIONS: u32 = 10_000;
const STEPS: u32 = 12;

pub(crate) const TARGET: Target = Target {
    name: "segments",
    about: "lists of segments, by themselves and through an engine on a simulated device",
    prepare: || Ok(Box::new(check) as Check),
    seeds,
    words: &[&[0; 8], &[0xff; 8], &[2, 0], &[0x10, 0], &[1; 16]],
    longest: 4096,
    memory: 64 << 20,
};

fn check(input: &[u8]) -> Result<(), String> {
    let mut input = Unstructured::new(input);
    // An input that is too short is not a finding.
    let switches: u8 = input.arbitrary().unwrap_or_default();
    if switches & 0x80 != 0 {
        return arithmetic(&mut input).unwrap_or(Ok(()));
    }
    let mut rig = Rig::new(switches)?;
    for _ in 0..STEPS {
        match rig.step(&mut input) {
            Ok(done) => done?,
            Err(_) => break,
        }
    }
    rig.device_is_the_model()
}

/// Arbitrary segments, including those that cannot exist in memory.
fn any_segments(input: &mut Unstructured<'_>) -> Drawn<Vec<IoSegment>> {
    let count = match input.int_in_range(0..=15u8)? {
        15 => input.int_in_range(MAX_SEGMENTS - 1..=MAX_SEGMENTS + 1)?,
        few => usize::from(few),
    };
    let mut list = Vec::with_capacity(count);
    let mut end = 0usize;
    for _ in 0..count {
        let base = match input.int_in_range(0..=2u8)? {
            0 => end,
            _ => input.arbitrary::<u32>()? as usize,
        };
        let len = match input.int_in_range(0..=7u8)? {
            0 => 0,
            1 => input.arbitrary::<usize>()?,
            2 => MAX_TRANSFER_BYTES as usize,
            _ => usize::from(input.arbitrary::<u16>()?),
        };
        end = base.wrapping_add(len);
        list.push(IoSegment { base: std::ptr::without_provenance_mut(base), len });
    }
    Ok(list)
}

/// The bytes of `segments` as address ranges: adjacent ones merged, empty ones left out.
fn runs(segments: &[IoSegment], mut skip: u64, mut left: u64) -> Vec<(usize, u64)> {
    let mut runs: Vec<(usize, u64)> = Vec::new();
    for segment in segments {
        let skipped = skip.min(segment.len as u64);
        let len = (segment.len as u64 - skipped).min(left);
        (skip, left) = (skip - skipped, left - len);
        let base = segment.base.addr().wrapping_add(skipped as usize);
        match runs.last_mut() {
            _ if len == 0 => {}
            Some((start, run)) if start.wrapping_add(*run as usize) == base => *run += len,
            _ => runs.push((base, len)),
        }
    }
    runs
}

fn arithmetic(input: &mut Unstructured<'_>) -> Drawn<Result<(), String>> {
    let list = any_segments(input)?;
    let sum: u128 = list.iter().map(|segment| segment.len as u128).sum();
    let sound = list.len() <= MAX_SEGMENTS && list.iter().all(|s| s.len <= isize::MAX as usize);
    let total = match (fuzz::total(&list), sound) {
        (Ok(total), true) if u128::from(total) == sum.min(u128::from(MAX_TRANSFER_BYTES)) => total,
        (Err(error), false) if error.errno() == libc::EINVAL => return Ok(Ok(())),
        (total, _) => return Ok(Err(format!("{list:?} have {total:?}, not {sum}"))),
    };
    let count = input.arbitrary::<u64>()?.min(total);
    let merged = fuzz::merge(&list, count);
    if runs(&merged, 0, u64::MAX) != runs(&list, 0, count) || merged.len() > list.len() {
        return Ok(Err(format!("the first {count} bytes of {list:?} merged are {merged:?}")));
    }
    let distinct = runs(&merged, 0, u64::MAX).len();
    if distinct != merged.len() {
        return Ok(Err(format!("{merged:?} has empty segments, or some that touch")));
    }
    let start = input.arbitrary::<u64>()? % (total + 1);
    let len = input.arbitrary::<u64>()? % (total - start + 1);
    let parts = fuzz::parts(&list, start, len);
    if runs(&parts, 0, u64::MAX) != runs(&list, start, len) {
        return Ok(Err(format!("bytes {start}, {len} of {list:?} are {parts:?}")));
    }
    let (memory, offset) =
        (1 << input.int_in_range(0..=12u32)?, 1 << input.int_in_range(0..=16u32)?);
    let multiple = |s: &IoSegment| {
        s.base.addr().is_multiple_of(memory as usize) && s.len.is_multiple_of(offset as usize)
    };
    if fuzz::aligned(&list, memory, offset) != list.iter().all(multiple) {
        return Ok(Err(format!("{list:?} aligned to {memory}, {offset}?")));
    }
    Ok(Ok(()))
}

/// An engine on a simulated device, and the expected content of the device.
struct Rig {
    device: Arc<SimDevice>,
    workers: WorkerPool,
    engine: SingleDisk<SimQueue, AllocationCache>,
    model: Vec<u8>,
    arena: Box<[u8]>,
    random: Random,
}

impl Rig {
    fn new(switches: u8) -> Result<Self, String> {
        let on = |bit: u8| switches >> bit & 1 == 0;
        let config = Config {
            simple: on(0),
            inline_completion: on(1),
            vectored: on(2),
            pool: on(3),
            nowait_first: on(4),
            slots: 16,
            ..Config::default()
        };
        let options = SimOptions {
            align: Alignment { memory: 4, offset: BLOCK, read_offset: BLOCK },
            unit: BLOCK,
            nowait: on(5),
            ..SimOptions::able(DEVICE_BYTES)
        };
        let device = Arc::new(SimDevice::new(options));
        let failed = |error: nowait::Error| format!("no engine: {error}");
        let storage = SimStorage::open(&device, 0, OpenOptions::default());
        let map = AllocationCache::new(device.bytes(), on(6));
        let disk =
            Arc::new(BlockDevice::mapped(Arc::new(storage), Vec::new(), DEVICE_BYTES, false, map));
        let workers = WorkerPool::simulated();
        let queue = SimQueue::new(device.clone()).map_err(failed)?;
        let engine = SingleDisk::new(disk, workers.clone(), queue, config).map_err(failed)?;
        let model = vec![0; DEVICE_BYTES as usize];
        let arena = vec![0; ARENA_BYTES].into();
        Ok(Self { device, workers, engine, model, arena, random: Random::new(7) })
    }

    /// Segments inside the arena that do not overlap, and the offset of each.
    fn segments(&mut self, input: &mut Unstructured<'_>) -> Drawn<Vec<(usize, IoSegment)>> {
        let (mut list, mut at) = (Vec::new(), 0usize);
        // Long lists are slow, so they are rare.
        let count = match input.arbitrary::<u8>()? {
            0xff => input.int_in_range(MAX_SEGMENTS - 1..=MAX_SEGMENTS + 1)?,
            few => usize::from(few % 16),
        };
        for _ in 0..count {
            at += match input.int_in_range(0..=7u8)? {
                0..=3 => 0,
                4 => BLOCK as usize - at % BLOCK as usize,
                _ => usize::from(input.arbitrary::<u8>()?),
            };
            let len = match input.int_in_range(0..=7u8)? {
                0 => 0,
                1..=3 => usize::from(input.int_in_range(1..=8u8)?) * BLOCK as usize,
                _ => usize::from(input.arbitrary::<u16>()? % 700),
            };
            if at + len > self.arena.len() {
                break;
            }
            let base = self.arena.as_mut_ptr().wrapping_add(at);
            list.push((at, IoSegment { base, len }));
            at += len;
        }
        Ok(list)
    }

    /// Makes one request and checks its result.
    fn step(&mut self, input: &mut Unstructured<'_>) -> Drawn<Result<(), String>> {
        let op = if input.arbitrary()? { Op::Read } else { Op::Write };
        let pos = match input.int_in_range(0..=3u8)? {
            0 => input.int_in_range(0..=DEVICE_BYTES + 600)?,
            _ => input.int_in_range(0..=DEVICE_BYTES / u64::from(BLOCK))? * u64::from(BLOCK),
        };
        let list = self.segments(input)?;
        let total: u64 = list.iter().map(|(_, segment)| segment.len as u64).sum();
        let asked = match input.int_in_range(0..=3u8)? {
            0 => input.arbitrary::<u16>()?.into(),
            _ => total,
        };
        for word in self.arena.as_chunks_mut().0 {
            *word = self.random.next().to_ne_bytes();
        }
        let memory = self.arena.to_vec();
        let segments: Vec<IoSegment> = list.iter().map(|(_, segment)| *segment).collect();
        let io = Request { op, flags: Flags::NONE, range: ByteRange::new(pos, asked) };
        let result = match self.request(io, &segments) {
            Ok(result) => result,
            Err(stuck) => return Ok(Err(stuck)),
        };
        let room = DEVICE_BYTES.saturating_sub(pos);
        let len = asked.min(total);
        let expected = match () {
            () if list.len() > MAX_SEGMENTS => Err(libc::EINVAL),
            () if op == Op::Write && room == 0 && len > 0 => Err(libc::ENOSPC),
            () => Ok(len.min(room)),
        };
        let memory = self.model_of(op, pos, expected.unwrap_or(0), &list, memory);
        let wrong = if result != expected {
            format!("{result:?} instead of {expected:?}")
        } else if *self.arena != *memory {
            "memory is not what it should be".to_owned()
        } else {
            return Ok(Ok(()));
        };
        Ok(Err(format!("{op:?} of {asked} at {pos} through {list:?}: {wrong}")))
    }

    /// Applies a request of `len` bytes to the model; returns the expected content of the memory,
    /// given its previous content `memory`.
    fn model_of(
        &mut self,
        op: Op,
        pos: u64,
        len: u64,
        list: &[(usize, IoSegment)],
        mut memory: Vec<u8>,
    ) -> Vec<u8> {
        let named = list.iter().flat_map(|(at, segment)| *at..*at + segment.len);
        let model = self.model.iter_mut().skip(pos as usize).take(len as usize);
        for (byte, at) in model.zip(named) {
            match (op, memory.get_mut(at)) {
                (Op::Read, Some(place)) => *place = *byte,
                (_, place) => *byte = place.copied().unwrap_or_default(),
            }
        }
        memory
    }

    /// The result of a request, with no other request in flight.
    ///
    /// # Errors
    /// The request does not complete, or not exactly once.
    fn request(&mut self, io: Request, segments: &[IoSegment]) -> Result<Result<u64, i32>, String> {
        const TAG: u64 = 5;
        // SAFETY: the memory is the arena, which nothing accesses before the request has completed.
        // A request that never completes is an error that drops the rig, and with it the engine
        // before the arena; a dropped simulated queue accesses no memory.
        if let Err(rejected) = unsafe { self.engine.submit_user_memory(io, segments, TAG) } {
            return Ok(Err(rejected.error.errno()));
        }
        for _ in 0..MAX_ITERATIONS {
            let waited = self.engine.wait(Some(Duration::ZERO), &mut |_, _| {});
            waited.map_err(|error| format!("the queue: {error}"))?;
            while let Some(job) = self.workers.take_simulated(0) {
                self.workers.run(job);
            }
            if let Some(done) = self.engine.next() {
                let again = self.engine.next().is_some() || self.engine.in_flight() > 0;
                if done.tag != TAG || again {
                    return Err(format!("{io:?} was given back more than once"));
                }
                return Ok(done.result().map_err(|error| error.errno()));
            }
        }
        Err(format!("{io:?} does not end"))
    }

    /// Reads the whole device and compares it with the model.
    fn device_is_the_model(&mut self) -> Result<(), String> {
        let segment = IoSegment { base: self.arena.as_mut_ptr(), len: DEVICE_BYTES as usize };
        let range = ByteRange::new(0, DEVICE_BYTES);
        let read = self.request(Request { op: Op::Read, flags: Flags::NONE, range }, &[segment])?;
        if read != Ok(DEVICE_BYTES) || self.arena.get(..self.model.len()) != Some(&self.model) {
            return Err(format!("the device ({read:?}) holds something else than was written"));
        }
        match self.device.take_violations().first() {
            Some(violation) => Err(format!("the device complains: {violation}")),
            None => Ok(()),
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    // The target interprets the numbers; random ones make all kinds of lists.
    let bytes = |seed: u64, switches: u8| -> Vec<u8> {
        let mut random = Random::new(seed);
        let rest = (0..600).map(|_| random.next() as u8);
        std::iter::once(switches).chain(rest).collect()
    };
    [0, 1, 2, 4, 8, 16, 32, 64, 0x80, 0xff].into_iter().zip(1..).map(|(s, n)| bytes(n, s)).collect()
}
