//! A disk that is written, and the backup of it that is read meanwhile, to which steps are applied.
//!
//! Invariant: nothing is in flight when a backup begins; what it reads from then on is compared with the bytes that the
//! device had at that moment.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use nowait::sim::{Random, SimDevice, SimQueue};
use nowait::{
    BlockDevice, BlockMap, ByteRange, Completion, Error, Flags, Op, OpenOptions, Request,
    SimStorage, SingleDisk, Storage, WorkerPool,
};
use nowait_server::SimBackup;

use crate::backup::backup_scenario::{BLOCK_BYTES, BackupAction, BackupScenario};
use crate::coroutines::Coroutines;
use crate::model::Violation;
use crate::simulation::Counts;

/// Steps within which all that is in flight has to end.
const SETTLE_STEPS: usize = 100_000;

type Disk = Arc<BlockDevice<dyn BlockMap>>;
type Engine = SingleDisk<SimQueue, dyn BlockMap>;

/// A backup, and the engines of its disk and of itself.
struct Running {
    backup: SimBackup,
    writer: Engine,
    reader: Engine,
    /// The bytes of the disk at its instant.
    was: Vec<u8>,
    /// Blocks that may have been released.
    released: BTreeSet<u64>,
}

/// The simulation.
pub struct BackupSimulation {
    scenario: BackupScenario,
    device: Arc<SimDevice>,
    disk: Disk,
    /// Dropped before the threads, which end the simulation.
    running: Running,
    threads: Coroutines,
    workers: WorkerPool,
    requests: u64,
    steps: u64,
}

fn broken(error: Error) -> Violation {
    Violation::new(format!("the engine itself fails: {error}"))
}

/// Blocks that a range touches.
fn blocks_of(range: ByteRange) -> Range<u64> {
    range.pos / BLOCK_BYTES..range.end().div_ceil(BLOCK_BYTES)
}

impl Running {
    /// A backup of `disk` as it is.
    fn begin(
        scenario: &BackupScenario,
        device: &Arc<SimDevice>,
        disk: &Disk,
        workers: &WorkerPool,
    ) -> Result<Self, Error> {
        let beside = Arc::new(SimDevice::new(scenario.scratch));
        let scratch: Arc<dyn Storage> =
            Arc::new(SimStorage::open(&beside, 0, OpenOptions::default()));
        let mut was = vec![0; scenario.disk.bytes as usize];
        device.peek(0, 0, &mut was);
        let backup = SimBackup::new(disk, scratch, scenario.scratch_bytes, BLOCK_BYTES)?;
        beside.set_faults(scenario.faults);
        let engine = |disk: &Disk, device: Arc<SimDevice>| {
            SingleDisk::new(disk.clone(), workers.clone(), SimQueue::new(device)?, scenario.config)
        };
        let writer = engine(&backup.disk, device.clone())?;
        let reader = engine(&backup.backup, beside)?;
        Ok(Self { backup, writer, reader, was, released: BTreeSet::new() })
    }

    /// Checks a completed request of the backup.
    fn check_read(&self, done: &Completion) -> Result<(), Violation> {
        let (range, op) = (done.io.range, done.io.op);
        let wrong =
            |what: &str| Err(Violation::new(format!("{op:?} {range:?} of a backup {what}")));
        match done.result() {
            Ok(len) if op == Op::Read => {
                let read = done.buf.as_ref().and_then(|it| it.get(..len as usize));
                let was = self.was.get(range.pos as usize..range.end() as usize);
                if read == was { Ok(()) } else { wrong("has other bytes than the disk had") }
            }
            Ok(_) => Ok(()),
            Err(_) if self.backup.failure().is_some() => Ok(()),
            Err(error)
                if error.errno() == libc::EIO
                    && blocks_of(range).any(|block| self.released.contains(&block)) =>
            {
                Ok(())
            }
            Err(error) => wrong(&format!("fails: {error}")),
        }
    }

    fn poll(&mut self) -> Result<(), Violation> {
        for engine in [&mut self.writer, &mut self.reader] {
            engine.wait(Some(Duration::ZERO), &mut |_, _| {}).map_err(broken)?;
        }
        while let Some(done) = self.writer.next() {
            if let Err(error) = done.result()
                && (done.io.op, error.errno()) != (Op::Discard, libc::EOPNOTSUPP)
            {
                return Err(Violation::new(format!("{:?} fails: {error}", done.io)));
            }
        }
        while let Some(done) = self.reader.next() {
            self.check_read(&done)?;
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.writer.in_flight() + self.reader.in_flight()
    }
}

impl BackupSimulation {
    /// The simulation of a scenario, with a backup that has begun.
    ///
    /// # Errors
    /// The devices could not be opened.
    pub fn new(scenario: BackupScenario) -> Result<Self, Violation> {
        let device = Arc::new(SimDevice::new(scenario.disk));
        let threads = Coroutines::new(scenario.workers);
        let storage = Arc::new(SimStorage::open(&device, 0, OpenOptions::default()));
        let options = OpenOptions::new().cache_holes(scenario.cache_holes);
        let disk: Disk = Arc::new(BlockDevice::raw(storage, options).map_err(broken)?);
        let workers = WorkerPool::simulated();
        let running = Running::begin(&scenario, &device, &disk, &workers).map_err(broken)?;
        Ok(Self { device, disk, running, threads, workers, requests: 0, steps: 0, scenario })
    }

    /// The counters so far; a worker's step counts as an operation.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts { requests: self.requests, cuts: 0, operations: self.steps }
    }

    /// Executes an action.
    ///
    /// # Errors
    /// A violation of the contract.
    pub fn step(&mut self, action: BackupAction, mut random: Random) -> Result<(), Violation> {
        let random = &mut random;
        match action {
            BackupAction::Write(range) => self.change(Op::Write, range, random)?,
            BackupAction::Zero(range) => self.change(Op::Zero, range, random)?,
            BackupAction::Discard(range) => self.change(Op::Discard, range, random)?,
            BackupAction::Flush => self.change(Op::Flush, ByteRange::new(0, 0), random)?,
            BackupAction::Read(range) => self.ask(Op::Read, range)?,
            BackupAction::Release(range) => self.ask(Op::Discard, range)?,
            BackupAction::Work => self.work(random)?,
            BackupAction::Poll => self.running.poll()?,
            BackupAction::Again => {
                self.settle(random)?;
                self.running.backup.finish();
                let (device, disk) = (&self.device, &self.disk);
                self.running =
                    Running::begin(&self.scenario, device, disk, &self.workers).map_err(broken)?;
            }
        }
        match self.device.take_violations().first() {
            Some(what) => Err(Violation::new(what.clone())),
            None => Ok(()),
        }
    }

    /// A client of the disk changes it.
    fn change(&mut self, op: Op, range: ByteRange, random: &mut Random) -> Result<(), Violation> {
        let engine = &mut self.running.writer;
        if engine.in_flight() >= self.scenario.depth {
            return Ok(());
        }
        self.requests += 1;
        let io = Request { op, flags: Flags::NONE, range };
        if op != Op::Write {
            return accepted(engine.submit_no_data(io, 0).map_err(|rejected| rejected.error));
        }
        let Some(mut buf) = engine.buffer(range) else { return Ok(()) };
        let fill = random.next() as u8;
        buf.fill(fill);
        accepted(engine.submit(io, buf, 0).map_err(|rejected| rejected.error))
    }

    /// A client of the backup reads or releases a range of it.
    fn ask(&mut self, op: Op, range: ByteRange) -> Result<(), Violation> {
        let Running { reader: engine, released, .. } = &mut self.running;
        if engine.in_flight() >= self.scenario.depth {
            return Ok(());
        }
        self.requests += 1;
        let io = Request { op, flags: Flags::NONE, range };
        if op != Op::Read {
            released.extend(blocks_of(range));
            return accepted(engine.submit_no_data(io, 0).map_err(|rejected| rejected.error));
        }
        let Some(buf) = engine.buffer(range) else { return Ok(()) };
        accepted(engine.submit(io, buf, 0).map_err(|rejected| rejected.error))
    }

    /// Runs a worker, one that is paused or one with a new job.
    fn work(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.steps += 1;
        let choices = self.threads.choices(&self.workers) as u64;
        if choices == 0 {
            return Ok(());
        }
        let ran = self.threads.run(random.below(choices) as usize, &self.workers);
        ran.map_err(|error| Violation::new(error.to_string()))
    }

    /// Runs until nothing is in flight.
    fn settle(&mut self, random: &mut Random) -> Result<(), Violation> {
        for _ in 0..SETTLE_STEPS {
            self.running.poll()?;
            if self.running.in_flight() == 0 {
                return Ok(());
            }
            self.work(random)?;
        }
        Err(Violation::new("a request never completes".to_owned()))
    }

    /// Ends the run: all that is in flight completes, and the whole of the backup is read.
    ///
    /// # Errors
    /// Like [`BackupSimulation::step`].
    pub fn end(&mut self) -> Result<(), Violation> {
        let mut random = Random::part(self.scenario.seed, u64::MAX - 1);
        self.settle(&mut random)?;
        for block in blocks_of(ByteRange::new(0, self.scenario.disk.bytes)) {
            let pos = block * BLOCK_BYTES;
            let len = BLOCK_BYTES.min(self.scenario.disk.bytes - pos);
            self.ask(Op::Read, ByteRange::new(pos, len))?;
            self.settle(&mut random)?;
        }
        Ok(())
    }
}

/// A request that an engine has taken, or for which it had no room.
fn accepted(submitted: Result<(), Error>) -> Result<(), Violation> {
    match submitted {
        Err(error) if error.errno() != libc::EAGAIN => {
            Err(Violation::new(format!("a request is refused: {error}")))
        }
        _ => Ok(()),
    }
}
