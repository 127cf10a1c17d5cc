//! A closed loop on an engine: each completed request is replaced by the next one.
//!
//! Invariant: when a loop returns, none of its requests is in flight.

use std::io;
use std::time::{Duration, Instant};

use fastrand::Rng;
use hdrhistogram::Histogram;
use nowait::{BlockMap, ByteRange, Flags, IoQueue, Op, PooledBuffer, Request, SingleDisk};
use rustix::time::ClockId;

use crate::ablation::gain_table::{Sample, latency_of};
use crate::cancel::CancelFlag;
use crate::client::latency_histogram;
use crate::offsets::Offsets;
use crate::process_stats::clock_ns;
use crate::workload::{Direction, Workload};

const MIB: f64 = 1_048_576.0;
/// A loop that measures no latencies reads the clock once in so many iterations.
const ITERATIONS_PER_CLOCK_READ: u32 = 64;
/// The longest time after which a sleeping loop checks whether it has to stop.
const WAIT_SLICE: Duration = Duration::from_millis(100);

/// When a loop stops, and whether it measures latencies.
#[derive(Clone, Copy)]
pub(crate) struct StopCondition<'a> {
    pub(crate) duration: Duration,
    pub(crate) stop: &'a CancelFlag,
    /// Whether latencies are measured: not if reading the clock costs more than a request.
    pub(crate) timed: bool,
}

impl StopCondition<'_> {
    /// The condition for the warm-up, which is a fifth as long.
    pub(crate) fn warm_up(self) -> Self {
        Self { duration: self.duration / 5, ..self }
    }

    pub(crate) fn begin(&self) -> Interval {
        Interval {
            begin: Instant::now(),
            elapsed: Duration::ZERO,
            cpu_ns: [process_ns(); 2],
            requests: 0,
            bytes: 0,
            latencies_ns: self.timed.then(latency_histogram).and_then(Result::ok),
        }
    }

    /// Returns false at least once, so that even a very slow loop completes a request.
    #[inline]
    pub(crate) fn is_over(&self, interval: &Interval, now: Instant) -> bool {
        let late = now - interval.begin >= self.duration && interval.bytes > 0;
        late || self.stop.requested()
    }
}

/// The requests, bytes and latencies of one run of a loop.
pub(crate) struct Interval {
    pub(crate) begin: Instant,
    pub(crate) elapsed: Duration,
    /// Processor time of this process, all of its threads, at the begin and at the end.
    cpu_ns: [u64; 2],
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    pub(crate) latencies_ns: Option<Histogram<u64>>,
}

impl Interval {
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
        self.cpu_ns[1] = process_ns();
    }

    /// Adds the figures of another loop that ran at the same time.
    pub(crate) fn add(&mut self, other: &Interval) {
        let end = (self.begin + self.elapsed).max(other.begin + other.elapsed);
        self.begin = self.begin.min(other.begin);
        self.elapsed = end - self.begin;
        let ([begin, end], [its_begin, its_end]) = (self.cpu_ns, other.cpu_ns);
        self.cpu_ns = [begin.min(its_begin), end.max(its_end)];
        self.requests += other.requests;
        self.bytes += other.bytes;
        if let (Some(all), Some(more)) = (&mut self.latencies_ns, &other.latencies_ns) {
            // This cannot fail: both have the bounds of `latency_histogram`.
            let _ = all.add(more);
        }
    }

    /// The figures per second, and the processor time for `request_bytes`, which a request of the
    /// row transfers.
    ///
    /// # Errors
    /// No request was completed.
    pub(crate) fn sample(&self, request_bytes: usize) -> io::Result<Sample> {
        if self.bytes == 0 {
            return Err(io::Error::other("finished no request in time"));
        }
        let seconds = self.elapsed.as_secs_f64();
        let cpu_ns = (self.cpu_ns[1] - self.cpu_ns[0]) as f64;
        let taken = self.latencies_ns.as_ref().filter(|_| self.requests > 0);
        Ok(Sample {
            per_second: self.requests as f64 / seconds,
            mib_per_second: self.bytes as f64 / MIB / seconds,
            cpu_ns: cpu_ns * request_bytes as f64 / self.bytes as f64,
            latency: taken.map(latency_of),
        })
    }
}

fn process_ns() -> u64 {
    clock_ns(ClockId::ProcessCPUTime)
}

/// Keeps `load.depth` requests with `flags`, or durable ones, in flight until `stop_condition` ends the loop or the offsets run
/// out.
///
/// # Errors
/// The error of the engine or of a request.
pub(crate) fn drive<Q: IoQueue, M: BlockMap>(
    engine: &mut SingleDisk<Q, M>,
    load: &Workload,
    flags: Flags,
    offsets: &mut Offsets,
    stop_condition: StopCondition<'_>,
) -> io::Result<Interval> {
    let mut slots = Slots::new(engine, load, flags)?;
    let mut interval = stop_condition.begin();
    let mut now = interval.begin;
    let mut pass = 0u32;
    loop {
        pass = pass.wrapping_add(1);
        if stop_condition.timed || pass.is_multiple_of(ITERATIONS_PER_CLOCK_READ) {
            now = Instant::now();
            if stop_condition.is_over(&interval, now) {
                break;
            }
        }
        slots.fill(offsets, now)?;
        if slots.engine.in_flight() == 0 {
            break;
        }
        slots.engine.poll()?;
        if !slots.engine.has_done() {
            slots.engine.wait(Some(WAIT_SLICE), &mut |_, _| {})?;
        }
        slots.take(&mut interval)?;
    }
    interval.end();
    // Requests that complete from here on are not counted.
    let mut rest = StopCondition { timed: false, ..stop_condition }.begin();
    while slots.engine.in_flight() > 0 {
        slots.engine.wait(Some(WAIT_SLICE), &mut |_, _| {})?;
        slots.take(&mut rest)?;
    }
    Ok(interval)
}

/// One slot for each request in flight; the tag of a request is the index of its slot.
struct Slots<'a, Q: IoQueue, M: BlockMap> {
    engine: &'a mut SingleDisk<Q, M>,
    free: Vec<(u64, PooledBuffer)>,
    started: Vec<Instant>,
    op: Op,
    flags: Flags,
    block: u64,
}

impl<'a, Q: IoQueue, M: BlockMap> Slots<'a, Q, M> {
    fn new(engine: &'a mut SingleDisk<Q, M>, load: &Workload, flags: Flags) -> io::Result<Self> {
        let block = load.block_bytes as u64;
        let mut random = Rng::with_seed(block);
        let mut free = Vec::with_capacity(load.depth);
        for slot in 0..load.depth as u64 {
            let buf = engine.buffer(ByteRange::new(0, block));
            let mut buf = buf.ok_or_else(|| io::Error::other("no buffer is left"))?;
            if load.direction == Direction::Write {
                random.fill(&mut buf);
            }
            free.push((slot, buf));
        }
        let started = vec![Instant::now(); load.depth];
        let flags = if load.durable { Flags::DSYNC } else { flags };
        let op = match load.direction {
            Direction::Read => Op::Read,
            Direction::Write => Op::Write,
        };
        Ok(Slots { engine, free, started, op, flags, block })
    }

    #[inline]
    fn fill(&mut self, offsets: &mut Offsets, now: Instant) -> io::Result<()> {
        while let Some((slot, buf)) = self.free.pop() {
            let Some(pos) = offsets.next() else {
                self.free.push((slot, buf));
                break;
            };
            self.started[slot as usize] = now;
            let range = ByteRange::new(pos, self.block);
            let io = Request { op: self.op, flags: self.flags, range };
            self.engine.submit(io, buf, slot).map_err(|rejected| rejected.error)?;
        }
        Ok(())
    }

    #[inline]
    fn take(&mut self, interval: &mut Interval) -> io::Result<()> {
        let now = if interval.latencies_ns.is_some() { Instant::now() } else { interval.begin };
        while let Some(completion) = self.engine.next() {
            let bytes = completion.result()?;
            let (slot, Some(buf)) = (completion.tag, completion.buf) else { continue };
            if bytes != self.block {
                return Err(io::Error::other("a request was cut short"));
            }
            interval.count(bytes, now.saturating_duration_since(self.started[slot as usize]));
            self.free.push((slot, buf));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_that_of_all_loops_for_the_bytes_of_one_request() {
        let stop = CancelFlag::default();
        let stop_condition = StopCondition { duration: Duration::ZERO, stop: &stop, timed: false };
        let interval = |cpu_ns, requests: u64| Interval {
            elapsed: Duration::from_secs(1),
            cpu_ns,
            requests,
            bytes: requests * 4096,
            ..stop_condition.begin()
        };
        let mut all = interval([1000, 3000], 10);
        all.add(&interval([2000, 7000], 20));
        assert_eq!(all.sample(4096).map(|sample| sample.cpu_ns).ok(), Some(200.0));
        assert_eq!(all.sample(8192).map(|sample| sample.cpu_ns).ok(), Some(400.0));
    }
}
