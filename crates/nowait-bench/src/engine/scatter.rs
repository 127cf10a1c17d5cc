//! Requests of many segments, one at a time, through an engine's door for memory of the caller's.
//!
//! Invariant: the memory goes after the engine, whose end waits for what is in flight.
//! Knows: drive, places. Known by: tables.
#![allow(unsafe_code)]

use std::io;
use std::time::{Duration, Instant};

use nowait::{Engine, Flags, Identity, Io, Op, Queue, Range, Segment};

use super::drive::{Pace, Stretch, op};
use super::places::Places;
use crate::client::Random;
use crate::workload::Direction;

const NAP: Duration = Duration::from_millis(100);

/// A page, the unit in which memory for direct I/O is allocated.
#[derive(Clone)]
#[repr(align(4096))]
struct Page([u8; Page::BYTES]);

impl Page {
    const BYTES: usize = 4096;
}

/// What one request looks like.
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

/// How the segments of a request are handed in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hand {
    /// All in one request.
    Together,
    /// Each as a request of its own, after the one before has ended.
    OneByOne,
}

/// Which requests are made in turn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mix {
    Only(Direction),
    /// A read, a write, a read, …
    Both,
}

/// An engine and the memory of the one request that it has at a time.
pub(crate) struct Scatter<Q: Queue> {
    // Before the memory: dropped first.
    engine: Engine<Q, Identity>,
    segments: Vec<Segment>,
    _memory: Vec<Page>,
}

impl<Q: Queue> Scatter<Q> {
    /// With segments in memory that do not touch, so that they are not one without being gathered.
    pub(crate) fn new(engine: Engine<Q, Identity>, shape: Shape) -> Scatter<Q> {
        let stride = 2 * shape.segment_bytes;
        let pages = (shape.segments * stride).div_ceil(Page::BYTES);
        let mut memory = vec![Page([0; Page::BYTES]); pages];
        let mut random = Random::seeded(1);
        memory.iter_mut().for_each(|page| random.fill(&mut page.0));
        let base = memory.as_mut_ptr().cast::<u8>();
        let segment =
            |n: usize| Segment { base: base.wrapping_add(n * stride), len: shape.segment_bytes };
        Scatter { engine, segments: (0..shape.segments).map(segment).collect(), _memory: memory }
    }

    /// Makes requests for as long as `pace` says; one that is handed in one by one may be left
    /// unfinished at the end.
    ///
    /// # Errors
    /// What the engine or a request said.
    pub(crate) fn run(
        &mut self,
        mix: Mix,
        flags: Flags,
        hand: Hand,
        places: &mut Places,
        pace: Pace<'_>,
    ) -> io::Result<Stretch> {
        let mut stretch = pace.begin();
        let mut direction = match mix {
            Mix::Only(direction) => direction,
            Mix::Both => Direction::Read,
        };
        let mut now = stretch.begin;
        while let Some(pos) = places.next() {
            let op = op(direction);
            let flags = if op == Op::Write { flags } else { Flags::NONE };
            let together = self.segments.len();
            let step = if hand == Hand::Together { together } else { 1 };
            let (mut n, mut at, begin) = (0, pos, now);
            while n < together {
                let bytes = self.one(op, flags, at, n..n + step)?;
                (n, at, now) = (n + step, at + bytes, Instant::now());
                stretch.bytes += bytes;
                if pace.is_over(&stretch, now) {
                    break;
                }
            }
            if n == together {
                stretch.count(0, now - begin);
            }
            if pace.is_over(&stretch, now) {
                break;
            }
            if mix == Mix::Both {
                direction = other(direction);
            }
        }
        stretch.end();
        Ok(stretch)
    }

    /// One request with some of the segments, waited for.
    fn one(
        &mut self,
        op: Op,
        flags: Flags,
        pos: u64,
        which: std::ops::Range<usize>,
    ) -> io::Result<u64> {
        let segments = &self.segments[which];
        let len = segments.iter().map(|segment| segment.len as u64).sum();
        let io = Io { op, flags, range: Range::new(pos, len) };
        // SAFETY: the segments lie in `_memory`, which lives until the engine was dropped, and which
        // nothing else looks at; the request before this one has ended, or has failed and this
        // `Scatter` with it.
        let submitted = unsafe { self.engine.submit_segments(io, segments, 0) };
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
            self.engine.wait(Some(NAP), &mut |_, _| {})?;
        }
    }
}

fn other(direction: Direction) -> Direction {
    match direction {
        Direction::Read => Direction::Write,
        Direction::Write => Direction::Read,
    }
}
