//! Requests of many segments, one at a time, through the interface of the engine for the memory of
//! the caller.
//!
//! Invariant: the memory is dropped after the engine, whose drop waits for the requests in flight.
#![allow(unsafe_code)]

use std::io;
use std::time::Instant;

use nowait::{ByteRange, Flags, IoQueue, IoSegment, LinearMap, Op, Request, SingleDisk};

use crate::ablation::blocking_calls::{Block, whole};
use crate::ablation::closed_loop::{Interval, StopCondition, WAIT_SLICE, op};
use crate::offsets::Offsets;
use crate::workload::{Direction, Order};

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

/// Requests of many segments.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    /// The directions of the requests, in turn.
    pub(crate) directions: &'static [Direction],
    pub(crate) order: Order,
    pub(crate) shape: Shape,
    /// The flags of writes.
    pub(crate) flags: Flags,
    /// Whether all segments are in one request. Otherwise each is a separate one, after the previous
    /// one has completed.
    pub(crate) together: bool,
}

/// An engine and the memory of its only request in flight.
pub(crate) struct VectoredIo<Q: IoQueue> {
    engine: SingleDisk<Q, LinearMap>,
    segments: Vec<IoSegment>,
    memory: Vec<Block>,
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
    pub(crate) fn new(engine: SingleDisk<Q, LinearMap>, shape: Shape) -> VectoredIo<Q> {
        let stride = 2 * shape.segment_bytes;
        let blocks = (shape.segments * stride).div_ceil(Block::BYTES);
        let mut memory: Vec<Block> = (0..blocks).map(|_| *Block::random()).collect();
        let base = memory.as_mut_ptr().cast::<u8>();
        let segment =
            |n: usize| IoSegment { base: base.wrapping_add(n * stride), len: shape.segment_bytes };
        let segments = (0..shape.segments).map(segment).collect();
        VectoredIo { engine, segments, memory }
    }

    /// Makes requests until `stop_condition` ends the loop; if they are not `together`, the last one
    /// may remain incomplete.
    ///
    /// # Errors
    /// The error of the engine or of a request.
    pub(crate) fn run(
        &mut self,
        load: &Load,
        offsets: &mut Offsets,
        stop_condition: StopCondition<'_>,
    ) -> io::Result<Interval> {
        let mut interval = stop_condition.begin();
        let mut now = interval.begin;
        let all = self.segments.len();
        let step = if load.together { all } else { 1 };
        for &direction in load.directions.iter().cycle() {
            let Some(pos) = offsets.next() else { break };
            let flags = if direction == Direction::Write { load.flags } else { Flags::NONE };
            let (mut n, mut at, begin) = (0, pos, now);
            while n < all {
                let bytes = self.one(op(direction), flags, at, n..n + step)?;
                (n, at, now) = (n + step, at + bytes, Instant::now());
                interval.bytes += bytes;
                if stop_condition.is_over(&interval, now) {
                    break;
                }
            }
            if n == all {
                interval.count(0, now - begin);
            }
            if stop_condition.is_over(&interval, now) {
                break;
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
                whole(bytes, len)?;
                return Ok(bytes);
            }
            self.engine.wait(Some(WAIT_SLICE), &mut |_, _| {})?;
        }
    }
}
