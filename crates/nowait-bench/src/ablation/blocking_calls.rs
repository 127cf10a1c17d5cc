//! Blocking calls: one thread for each request in flight, with pread(2) and pwrite(2) or through
//! the blocking interface of the engine.
//!
//! Invariant: every call transfers a whole block.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{io, thread};

use fastrand::Rng;
use nowait::{BlockMap, Flags};

use crate::ablation::closed_loop::{Interval, StopCondition};
use crate::ablation::fixture::Fixture;
use crate::ablation::gain_table::Sample;
use crate::offsets::{Offsets, Region};
use crate::workload::{Direction, Order, Workload};

/// A loop that measures no latencies reads the clock once in so many calls.
const CALLS_PER_CLOCK_READ: u64 = 64;
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// A buffer of the largest block size, aligned for direct I/O on any device.
#[repr(align(4096))]
pub(crate) struct Block(pub(crate) [u8; Block::BYTES]);

impl Block {
    pub(crate) const BYTES: usize = 16 << 10;

    pub(crate) fn zeros() -> Box<Block> {
        Box::new(Block([0; Block::BYTES]))
    }

    pub(crate) fn random() -> Box<Block> {
        let mut block = Block::zeros();
        Rng::with_seed(1).fill(&mut block.0);
        block
    }
}

/// A target of blocking calls.
pub(crate) trait Calls: Sync {
    /// Reads all of `data`.
    fn read(&self, data: &mut [u8], pos: u64) -> io::Result<()>;
    /// Writes all of `data`.
    fn write(&self, data: &[u8], pos: u64) -> io::Result<()>;
}

impl Calls for File {
    fn read(&self, data: &mut [u8], pos: u64) -> io::Result<()> {
        self.read_exact_at(data, pos)
    }

    fn write(&self, data: &[u8], pos: u64) -> io::Result<()> {
        self.write_all_at(data, pos)
    }
}

impl<M: BlockMap> Calls for nowait::BlockingFile<M> {
    fn read(&self, data: &mut [u8], pos: u64) -> io::Result<()> {
        whole(self.read_at(data, pos)?, data.len())
    }

    fn write(&self, data: &[u8], pos: u64) -> io::Result<()> {
        whole(self.write_at(data, pos, Flags::NONE)?, data.len())
    }
}

/// An error unless all that was asked for is done.
fn whole<T: Eq>(done: T, asked: T) -> io::Result<()> {
    if done == asked { Ok(()) } else { Err(io::Error::other("a call was cut short")) }
}

/// Measures `load` with `load.depth` concurrent threads.
///
/// # Errors
/// The error of a call, or that no thread could be started.
pub(crate) fn run(file: &impl Calls, load: &Workload, fixture: &Fixture<'_>) -> io::Result<Sample> {
    fixture.measure(load, true, |_, stop_condition| {
        in_threads(load.depth, |number, gate| {
            let mut offsets =
                Offsets::endless(load.order, fixture.region(load.block_bytes), number as u64);
            let mut block = Block::random();
            let data = &mut block.0[..load.block_bytes];
            gate.wait();
            calls(&mut offsets, stop_condition, load.block_bytes, |pos| match load.direction {
                Direction::Read => file.read(data, pos),
                Direction::Write => file.write(data, pos),
            })
        })
    })
}

/// Calls `call`, which transfers `block_bytes`, for one offset after the other until
/// `stop_condition` ends the loop.
///
/// # Errors
/// The error of a call.
pub(crate) fn calls(
    offsets: &mut Offsets,
    stop_condition: StopCondition<'_>,
    block_bytes: usize,
    mut call: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<Interval> {
    let mut interval = stop_condition.begin();
    let mut now = interval.begin;
    while let Some(pos) = offsets.next() {
        call(pos)?;
        let is_read =
            stop_condition.timed || interval.requests.is_multiple_of(CALLS_PER_CLOCK_READ);
        let next = if is_read { Instant::now() } else { now };
        let begin = std::mem::replace(&mut now, next);
        interval.count(block_bytes as u64, now - begin);
        if stop_condition.is_over(&interval, now) {
            break;
        }
    }
    interval.end();
    Ok(interval)
}

/// Runs `job` on `count` threads concurrently. Each job gets its number and a gate, at which it
/// must arrive when its set-up has succeeded or failed.
///
/// # Errors
/// The error of the first job that failed, or that a thread could not be started.
pub(crate) fn in_threads(
    count: usize,
    job: impl Fn(usize, &Gate) -> io::Result<Interval> + Sync,
) -> io::Result<Interval> {
    let gate = Gate(AtomicUsize::new(count));
    let all = thread::scope(|scope| {
        let (job, gate) = (&job, &gate);
        let spawn = |number| {
            let spawned = thread::Builder::new().spawn_scoped(scope, move || job(number, gate));
            // No other thread may wait for a thread that does not exist.
            spawned.inspect_err(|_| gate.arrive())
        };
        let handles: Vec<_> = (0..count).map(spawn).collect();
        let mut all: Option<Interval> = None;
        for handle in handles {
            let interval = handle?.join().map_err(|_| io::Error::other("a thread panicked"))??;
            match &mut all {
                Some(all) => all.add(&interval),
                None => all = Some(interval),
            }
        }
        io::Result::Ok(all)
    })?;
    all.ok_or_else(|| io::Error::other("no thread"))
}

/// The loops of several jobs, each on its own part of a region.
#[derive(Clone, Copy)]
pub(crate) struct Jobs {
    pub(crate) count: usize,
    pub(crate) order: Order,
    pub(crate) all: Region,
    /// Whether each block is used once, without a warm-up.
    pub(crate) once: bool,
}

impl Jobs {
    /// Runs the loops that `set_up` returns, one in each job.
    ///
    /// # Errors
    /// Like [`in_threads`]; no request was completed.
    pub(crate) fn run<L>(
        self,
        stop_condition: StopCondition<'_>,
        set_up: impl Fn() -> io::Result<L> + Sync,
    ) -> io::Result<Sample>
    where
        L: FnMut(&mut Offsets, StopCondition<'_>) -> io::Result<Interval>,
    {
        let job = |job: usize, gate: &Gate| {
            let region = self.all.part(job as u64, self.count as u64);
            let run = set_up();
            let mut offsets = match self.once {
                true => Offsets::once(self.order, region, region.start),
                false => Offsets::endless(self.order, region, 0),
            };
            gate.wait();
            let mut run = run?;
            if !self.once {
                run(&mut offsets, stop_condition.warm_up())?;
            }
            run(&mut offsets, stop_condition)
        };
        in_threads(self.count, job)?.sample(self.all.block as usize)
    }
}

/// Lets threads start together although their set-up times differ: counts the threads that have not
/// arrived yet.
pub(crate) struct Gate(AtomicUsize);

impl Gate {
    fn arrive(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    /// Waits until all have arrived.
    pub(crate) fn wait(&self) {
        self.arrive();
        while self.0.load(Ordering::Acquire) > 0 {
            thread::sleep(POLL_INTERVAL);
        }
    }
}
