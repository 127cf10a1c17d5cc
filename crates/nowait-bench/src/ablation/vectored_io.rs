//! Requests of many segments, one at a time, through the interface of the engine for the memory of
//! the caller.
//!
//! Invariant: the memory is dropped after the engine, whose drop waits for the requests in flight.
#![allow(unsafe_code)]

use std::io;
use std::time::{Duration, Instant};

use nowait::{ByteRange, Engine, Flags, IoQueue, IoSegment, LinearMap, Op, Request};

use crate::ablation::closed_loop::{Interval, StopCondition, op};
use crate::ablation::offsets::Offsets;
use crate::client::Random;
use crate::workload::Direction;

const WAIT_SLICE: Duration = Duration::from_millis(100);

/// A page, the unit in which memory for direct I/O is allocated.
#[derive(Clone)]
#[repr(align(4096))]
struct Page([u8; Page::BYTES]);

impl Page {
    const BYTES: usize = 4096;
}

/// The shape of one request.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) segments: usize,
    pub(crate) segment_bytes: usize,
}

impl Shape {
    pub(crate) fn bytes(self) -> u64 {
        (self.segments * self.segment_bytes) as u64
    }
}

/// How the segments of a request are submitted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SubmitMode {
    /// All segments in one request.
    Together,
    /// Each segment as a separate request, after the previous one has completed.
    OneByOne,
}

/// The sequence of requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OperationMix {
    Only(Direction),
    /// Reads and writes alternately.
    Both,
}

/// An engine and the memory of its only request in flight.
pub(crate) struct VectoredIo<Q: IoQueue> {
    engine: Engine<Q, LinearMap>,
    segments: Vec<IoSegment>,
    memory: Vec<Page>,
}

impl<Q: IoQueue> Drop for VectoredIo<Q> {
    /// Leaks the memory if the queue has failed, because the kernel may still use it then.
    fn drop(&mut self) {
        if self.engine.settle().is_err() {
            std::mem::forget(std::mem::take(&mut self.memory));
        }
    }
}

impl<Q: IoQueue> VectoredIo<Q> {
    /// Allocates segments that do not touch, so that they cannot be merged into one.
    pub(crate) fn new(engine: Engine<Q, LinearMap>, shape: Shape) -> VectoredIo<Q> {
        let stride = 2 * shape.segment_bytes;
        let pages = (shape.segments * stride).div_ceil(Page::BYTES);
        let mut memory = vec![Page([0; Page::BYTES]); pages];
        let mut random = Random::seeded(1);
        memory.iter_mut().for_each(|page| random.fill(&mut page.0));
        let base = memory.as_mut_ptr().cast::<u8>();
        let segment =
            |n: usize| IoSegment { base: base.wrapping_add(n * stride), len: shape.segment_bytes };
        VectoredIo { engine, segments: (0..shape.segments).map(segment).collect(), memory }
    }

    /// Makes requests until `stop_condition` ends the loop; with [`SubmitMode::OneByOne`] the last
    /// request may remain incomplete.
    ///
    /// # Errors
    /// The error of the engine or of a request.
    pub(crate) fn run(
        &mut self,
        mix: OperationMix,
        flags: Flags,
        submit_mode: SubmitMode,
        offsets: &mut Offsets,
        stop_condition: StopCondition<'_>,
    ) -> io::Result<Interval> {
        let mut interval = stop_condition.begin();
        let mut direction = match mix {
            OperationMix::Only(direction) => direction,
            OperationMix::Both => Direction::Read,
        };
        let mut now = interval.begin;
        while let Some(pos) = offsets.next() {
            let op = op(direction);
            let flags = if op == Op::Write { flags } else { Flags::NONE };
            let together = self.segments.len();
            let step = if submit_mode == SubmitMode::Together { together } else { 1 };
            let (mut n, mut at, begin) = (0, pos, now);
            while n < together {
                let bytes = self.one(op, flags, at, n..n + step)?;
                (n, at, now) = (n + step, at + bytes, Instant::now());
                interval.bytes += bytes;
                if stop_condition.is_over(&interval, now) {
                    break;
                }
            }
            if n == together {
                interval.count(0, now - begin);
            }
            if stop_condition.is_over(&interval, now) {
                break;
            }
            if mix == OperationMix::Both {
                direction = other(direction);
            }
        }
        interval.end();
        Ok(interval)
    }

    /// Makes one request with some of the segments and waits for it.
    fn one(
        &mut self,
        op: Op,
        flags: Flags,
        pos: u64,
        which: std::ops::Range<usize>,
    ) -> io::Result<u64> {
        let segments = &self.segments[which];
        let len = segments.iter().map(|segment| segment.len as u64).sum();
        let io = Request { op, flags, range: ByteRange::new(pos, len) };
        // SAFETY: the segments lie in `memory`, which nothing else accesses, and which lives until
        // the engine is drained; the previous request has completed, or has failed and this
        // `VectoredIo` with it.
        let submitted = unsafe { self.engine.submit_user_memory(io, segments, 0) };
        submitted.map_err(|rejected| rejected.error)?;
        self.engine.poll()?;
        loop {
            if let Some(completion) = self.engine.next() {
                let bytes = completion.result()?;
                return if bytes == len {
                    Ok(bytes)
                } else {
                    Err(io::Error::other("a request was cut short"))
                };
            }
            self.engine.wait(Some(WAIT_SLICE), &mut |_, _| {})?;
        }
    }
}

fn other(direction: Direction) -> Direction {
    match direction {
        Direction::Read => Direction::Write,
        Direction::Write => Direction::Read,
    }
}
