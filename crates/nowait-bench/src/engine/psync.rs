//! Calls that wait: one thread for each request in flight, with pread(2) and pwrite(2) or through
//! the blocking face of the engine.
//!
//! Invariant: every call moves a whole block. Knows: drive, places, scene. Known by: tables.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nowait::{Flags, Map};

use super::drive::{Pace, Stretch};
use super::places::Places;
use super::scene::Scene;
use crate::client::Random;
use crate::workload::{Direction, Workload};

const LOOK: Duration = Duration::from_micros(100);

/// The largest block, and memory that any device takes.
#[repr(align(4096))]
pub(crate) struct Block(pub(crate) [u8; Block::BYTES]);

impl Block {
    pub(crate) const BYTES: usize = 16 << 10;

    pub(crate) fn random() -> Box<Block> {
        let mut block = Box::new(Block([0; Block::BYTES]));
        Random::seeded(1).fill(&mut block.0);
        block
    }
}

/// What the calls go to.
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

impl<M: Map> Calls for nowait::File<M> {
    fn read(&self, data: &mut [u8], pos: u64) -> io::Result<()> {
        whole(self.read_at(data, pos)?, data.len())
    }

    fn write(&self, data: &[u8], pos: u64) -> io::Result<()> {
        whole(self.write_at(data, pos, Flags::NONE)?, data.len())
    }
}

fn whole(done: usize, asked: usize) -> io::Result<()> {
    if done == asked { Ok(()) } else { Err(io::Error::other("a call was cut short")) }
}

/// `load.depth` threads at once.
///
/// # Errors
/// What a call said, or that no thread could be started.
pub(crate) fn run(
    file: &impl Calls,
    load: &Workload,
    scene: &Scene<'_>,
    pace: Pace<'_>,
) -> io::Result<Stretch> {
    in_threads(load.depth, |number, gate| {
        let mut places =
            Places::endless(load.order, scene.region(load.block_bytes), number as u64 + 1);
        let mut block = Block::random();
        let data = &mut block.0[..load.block_bytes];
        gate.wait();
        calls(&mut places, pace, load.block_bytes, |pos| match load.direction {
            Direction::Read => file.read(data, pos),
            Direction::Write => file.write(data, pos),
        })
    })
}

/// Makes `call`, which moves `block_bytes`, at one place after the other, for as long as `pace` says.
///
/// # Errors
/// What a call said.
pub(crate) fn calls(
    places: &mut Places,
    pace: Pace<'_>,
    block_bytes: usize,
    mut call: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<Stretch> {
    let mut stretch = pace.begin();
    let mut now = stretch.begin;
    while let Some(pos) = places.next() {
        call(pos)?;
        let begin = std::mem::replace(&mut now, Instant::now());
        stretch.count(block_bytes as u64, now - begin);
        if pace.is_over(&stretch, now) {
            break;
        }
    }
    stretch.end();
    Ok(stretch)
}

/// Runs `job` on `count` threads at once. It gets its number and a gate at which to wait when its
/// set-up is over, well or not.
///
/// # Errors
/// That of the first job that failed, or that a thread could not be started.
pub(crate) fn in_threads(
    count: usize,
    job: impl Fn(usize, &Gate) -> io::Result<Stretch> + Sync,
) -> io::Result<Stretch> {
    let gate = Gate(AtomicUsize::new(count));
    let all = thread::scope(|scope| {
        let (job, gate) = (&job, &gate);
        let spawn = |number| {
            let spawned = thread::Builder::new().spawn_scoped(scope, move || job(number, gate));
            // Nobody is to wait for a thread that does not exist.
            spawned.inspect_err(|_| gate.arrive())
        };
        let handles: Vec<_> = (0..count).map(spawn).collect();
        let mut all: Option<Stretch> = None;
        for handle in handles {
            let stretch = handle?.join().map_err(|_| io::Error::other("a thread panicked"))??;
            match &mut all {
                Some(all) => all.add(&stretch),
                None => all = Some(stretch),
            }
        }
        io::Result::Ok(all)
    })?;
    all.ok_or_else(|| io::Error::other("no thread"))
}

/// Lets threads whose set-up takes different times begin together: counts those that are not there
/// yet.
pub(crate) struct Gate(AtomicUsize);

impl Gate {
    fn arrive(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    /// Waits until all have arrived.
    pub(crate) fn wait(&self) {
        self.arrive();
        while self.0.load(Ordering::Acquire) > 0 {
            thread::sleep(LOOK);
        }
    }
}
