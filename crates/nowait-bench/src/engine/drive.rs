//! A closed loop on an engine: as soon as a request has ended, the next one takes its place.
//!
//! Invariant: when a loop returns, nothing of it is in flight. Knows: places, table. Known by:
//! executor, tables, scatter, psync, bare_ring.

use std::io;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use nowait::{Buf, Engine, Flags, Io, Map, Op, Queue, Range};

use super::places::Places;
use super::table::{Latency, Sample};
use crate::client::{Random, latency_histogram};
use crate::stop::Stop;
use crate::workload::{Direction, Workload};

const MIB: f64 = 1_048_576.0;
/// How often a loop that takes no latencies looks at the clock, in passes.
const PASSES_PER_LOOK: u32 = 64;
/// How soon a loop that sleeps sees that it is to stop.
pub(crate) const NAP: Duration = Duration::from_millis(100);

/// How long a loop runs.
#[derive(Clone, Copy)]
pub(crate) struct Pace<'a> {
    pub(crate) duration: Duration,
    pub(crate) stop: &'a Stop,
    /// Whether latencies are taken: not where looking at the clock costs more than a request.
    pub(crate) timed: bool,
}

impl Pace<'_> {
    /// The same for the warm-up, a fifth as long.
    pub(crate) fn warm_up(self) -> Self {
        Self { duration: self.duration / 5, ..self }
    }

    pub(crate) fn begin(&self) -> Stretch {
        Stretch {
            begin: Instant::now(),
            elapsed: Duration::ZERO,
            requests: 0,
            bytes: 0,
            latencies_ns: self.timed.then(latency_histogram).and_then(Result::ok),
        }
    }

    /// Something is always done, however slow it is.
    #[inline]
    pub(crate) fn is_over(&self, stretch: &Stretch, now: Instant) -> bool {
        let late = now - stretch.begin >= self.duration && stretch.bytes > 0;
        late || self.stop.requested()
    }
}

/// What a loop has done.
pub(crate) struct Stretch {
    pub(crate) begin: Instant,
    pub(crate) elapsed: Duration,
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    pub(crate) latencies_ns: Option<Histogram<u64>>,
}

impl Stretch {
    #[inline]
    pub(crate) fn count(&mut self, bytes: u64, latency: Duration) {
        self.requests += 1;
        self.bytes += bytes;
        if let Some(histogram) = &mut self.latencies_ns {
            histogram.saturating_record(latency.as_nanos() as u64);
        }
    }

    pub(crate) fn end(&mut self) {
        self.elapsed = self.begin.elapsed();
    }

    /// Adds what another loop did at the same time.
    pub(crate) fn add(&mut self, other: &Stretch) {
        let end = (self.begin + self.elapsed).max(other.begin + other.elapsed);
        self.begin = self.begin.min(other.begin);
        self.elapsed = end - self.begin;
        self.requests += other.requests;
        self.bytes += other.bytes;
        if let (Some(all), Some(more)) = (&mut self.latencies_ns, &other.latencies_ns) {
            // Both have the bounds of `latency_histogram`.
            let _ = all.add(more);
        }
    }

    /// What it comes to.
    ///
    /// # Errors
    /// Nothing was done.
    pub(crate) fn sample(&self) -> io::Result<Sample> {
        if self.bytes == 0 {
            return Err(io::Error::other("finished no request in time"));
        }
        let seconds = self.elapsed.as_secs_f64();
        let taken = self.latencies_ns.as_ref().filter(|_| self.requests > 0);
        Ok(Sample {
            per_second: self.requests as f64 / seconds,
            mib_per_second: self.bytes as f64 / MIB / seconds,
            latency: taken.map(Latency::of),
        })
    }
}

/// The operation of a direction.
pub(crate) fn op(direction: Direction) -> Op {
    match direction {
        Direction::Read => Op::Read,
        Direction::Write => Op::Write,
    }
}

/// Warms up, then measures.
///
/// # Errors
/// What the engine or a request said.
pub(crate) fn warm_and_drive<Q: Queue, M: Map>(
    engine: &mut Engine<Q, M>,
    load: &Workload,
    places: &mut Places,
    pace: Pace<'_>,
) -> io::Result<Stretch> {
    drive(engine, load, places, pace.warm_up())?;
    drive(engine, load, places, pace)
}

/// Keeps `load.depth` requests in flight for as long as `pace` says or there are places.
///
/// # Errors
/// What the engine or a request said.
pub(crate) fn drive<Q: Queue, M: Map>(
    engine: &mut Engine<Q, M>,
    load: &Workload,
    places: &mut Places,
    pace: Pace<'_>,
) -> io::Result<Stretch> {
    let mut lanes = Lanes::new(engine, load)?;
    let mut stretch = pace.begin();
    let mut now = stretch.begin;
    let mut pass = 0u32;
    loop {
        pass = pass.wrapping_add(1);
        if pace.timed || pass.is_multiple_of(PASSES_PER_LOOK) {
            now = Instant::now();
            if pace.is_over(&stretch, now) {
                break;
            }
        }
        lanes.fill(engine, places, now)?;
        if engine.in_flight() == 0 {
            break;
        }
        engine.poll()?;
        if !engine.has_done() {
            engine.wait(Some(NAP), &mut |_, _| {})?;
        }
        lanes.take(engine, &mut stretch)?;
    }
    stretch.end();
    // What ends from here on is not counted.
    let mut rest = Pace { timed: false, ..pace }.begin();
    while engine.in_flight() > 0 {
        engine.wait(Some(NAP), &mut |_, _| {})?;
        lanes.take(engine, &mut rest)?;
    }
    Ok(stretch)
}

/// One for each request in flight; the tag is its number.
struct Lanes {
    free: Vec<(u64, Buf)>,
    started: Vec<Instant>,
    op: Op,
    block: u64,
}

impl Lanes {
    fn new<Q: Queue, M: Map>(engine: &mut Engine<Q, M>, load: &Workload) -> io::Result<Lanes> {
        let block = load.block_bytes as u64;
        let mut random = Random::seeded(block);
        let mut free = Vec::with_capacity(load.depth);
        for lane in 0..load.depth as u64 {
            let buf = engine.buffer(Range::new(0, block));
            let mut buf = buf.ok_or_else(|| io::Error::other("no buffer is left"))?;
            if load.direction == Direction::Write {
                random.fill(&mut buf);
            }
            free.push((lane, buf));
        }
        let started = vec![Instant::now(); load.depth];
        Ok(Lanes { free, started, op: op(load.direction), block })
    }

    #[inline]
    fn fill<Q: Queue, M: Map>(
        &mut self,
        engine: &mut Engine<Q, M>,
        places: &mut Places,
        now: Instant,
    ) -> io::Result<()> {
        while let Some((lane, buf)) = self.free.pop() {
            let Some(pos) = places.next() else {
                self.free.push((lane, buf));
                break;
            };
            self.started[lane as usize] = now;
            let io = Io { op: self.op, flags: Flags::NONE, range: Range::new(pos, self.block) };
            engine.submit(io, buf, lane).map_err(|rejected| rejected.error)?;
        }
        Ok(())
    }

    #[inline]
    fn take<Q: Queue, M: Map>(
        &mut self,
        engine: &mut Engine<Q, M>,
        stretch: &mut Stretch,
    ) -> io::Result<()> {
        let now = if stretch.latencies_ns.is_some() { Instant::now() } else { stretch.begin };
        while let Some(completion) = engine.next() {
            let bytes = completion.result()?;
            let (lane, Some(buf)) = (completion.tag, completion.buf) else { continue };
            if bytes != self.block {
                return Err(io::Error::other("a request was cut short"));
            }
            stretch.count(bytes, now.saturating_duration_since(self.started[lane as usize]));
            self.free.push((lane, buf));
        }
        Ok(())
    }
}
