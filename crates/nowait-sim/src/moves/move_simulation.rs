//! A disk that moves between two devices while clients change it, to which steps are applied.
//!
//! Invariant: what was acknowledged is on the device that is served, after each exchange and each kill; after a loss of
//! power at least what it had at the exchange, where nothing has changed it since.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nowait::sim::{Faults, Random, SimDevice, SimQueue};
use nowait::{
    BlockDevice, ByteRange, Completion, Error, Flags, Op, OpenOptions, Request, SimStorage,
    SingleDisk, WorkerPool,
};

use crate::coroutines::Coroutines;
use crate::model::Violation;
use crate::moves::move_scenario::{MoveAction, MoveScenario};
use crate::moves::mover::{Disk, Mover, Stage};
use crate::simulation::Counts;

/// Steps within which all that is in flight has to end.
const SETTLE_STEPS: usize = 100_000;

type Engine = SingleDisk<SimQueue, dyn nowait::BlockMap>;

/// The disk as it is served.
struct Served {
    disk: Disk,
    engine: Engine,
}

/// A request in flight.
struct Flight {
    io: Request,
    /// The bytes that it writes.
    fill: u8,
}

/// The simulation.
pub struct MoveSimulation {
    scenario: MoveScenario,
    devices: [Arc<SimDevice>; 2],
    /// Which device is served.
    at: usize,
    /// Dropped before the threads, which end the simulation.
    served: Served,
    mover: Option<Rc<Mover>>,
    flights: BTreeMap<u64, Flight>,
    threads: Coroutines,
    workers: WorkerPool,
    /// Value that each byte reads as, where that is certain; and the one that it has at least after a loss of power.
    known: Vec<Option<u8>>,
    durable: Vec<Option<u8>>,
    counts: Counts,
    exchanges: u64,
}

fn broken(error: Error) -> Violation {
    Violation::new(format!("the engine itself fails: {error}"))
}

fn disk_on(device: &Arc<SimDevice>, scenario: &MoveScenario) -> Result<Disk, Violation> {
    let storage = Arc::new(SimStorage::open(device, 0, OpenOptions::default()));
    let options = OpenOptions::new().cache_holes(scenario.cache_holes);
    Ok(Arc::new(BlockDevice::raw(storage, options).map_err(broken)?))
}

fn content(device: &SimDevice) -> Vec<u8> {
    let mut bytes = vec![0; device.bytes() as usize];
    device.peek(0, 0, &mut bytes);
    bytes
}

fn overlaps(one: ByteRange, other: ByteRange) -> bool {
    one.pos < other.end() && other.pos < one.end()
}

impl Served {
    fn new(
        disk: Disk,
        device: &Arc<SimDevice>,
        workers: &WorkerPool,
        scenario: &MoveScenario,
    ) -> Result<Self, Violation> {
        let queue = SimQueue::new(device.clone()).map_err(broken)?;
        let engine = SingleDisk::new(disk.clone(), workers.clone(), queue, scenario.config);
        Ok(Self { disk, engine: engine.map_err(broken)? })
    }
}

impl MoveSimulation {
    /// The simulation of a scenario, with a disk of zeros.
    ///
    /// # Errors
    /// The devices could not be opened.
    pub fn new(scenario: MoveScenario) -> Result<Self, Violation> {
        let devices = scenario.devices.map(|options| Arc::new(SimDevice::new(options)));
        let (threads, workers) = (Coroutines::new(scenario.workers), WorkerPool::simulated());
        let disk = disk_on(&devices[0], &scenario)?;
        let served = Served::new(disk, &devices[0], &workers, &scenario)?;
        let zeros = vec![Some(0); scenario.devices[0].bytes as usize];
        Ok(Self {
            scenario,
            devices,
            at: 0,
            served,
            mover: None,
            flights: BTreeMap::new(),
            threads,
            workers,
            known: zeros.clone(),
            durable: zeros,
            counts: Counts::default(),
            exchanges: 0,
        })
    }

    /// The counters so far; a worker's step counts as an operation.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// How often the disk has moved.
    #[must_use]
    pub const fn exchanges(&self) -> u64 {
        self.exchanges
    }

    /// Executes an action.
    ///
    /// # Errors
    /// A violation of the contract.
    pub fn step(&mut self, action: MoveAction, mut random: Random) -> Result<(), Violation> {
        let random = &mut random;
        self.devices.iter().for_each(|device| device.reseed(random.next()));
        match action {
            MoveAction::Write(range) => self.ask(Op::Write, range, random)?,
            MoveAction::Zero(range) => self.ask(Op::Zero, range, random)?,
            MoveAction::Discard(range) => self.ask(Op::Discard, range, random)?,
            MoveAction::Read(range) => self.ask(Op::Read, range, random)?,
            MoveAction::Flush => self.ask(Op::Flush, ByteRange::new(0, 0), random)?,
            MoveAction::Work => self.work(random)?,
            MoveAction::Poll => self.poll()?,
            MoveAction::Begin => self.begin(random)?,
            MoveAction::Cancel => self.mover.iter().for_each(|mover| mover.cancel()),
            MoveAction::Pivot => self.pivot(random)?,
            MoveAction::Kill => self.end_process(false, random)?,
            MoveAction::Cut => self.end_process(true, random)?,
        }
        self.forget_ended();
        let violations = self.devices.iter().map(|device| device.take_violations());
        violations.flatten().next().map_or(Ok(()), |what| Err(Violation::new(what)))
    }

    /// A move that has ended leaves the disk where it is.
    fn forget_ended(&mut self) {
        if self.mover.as_ref().is_some_and(|mover| mover.stage() == Stage::Ended) {
            self.mover = None;
            self.devices[1 - self.at].set_faults(Faults::default());
        }
    }

    /// A client asks for something that overlaps nothing in flight.
    fn ask(&mut self, op: Op, range: ByteRange, random: &mut Random) -> Result<(), Violation> {
        let engine = &mut self.served.engine;
        let is_free = !self.flights.values().any(|flight| overlaps(flight.io.range, range));
        if !is_free || engine.in_flight() >= self.scenario.depth {
            return Ok(());
        }
        self.counts.requests += 1;
        let (tag, fill) = (self.counts.requests, random.next() as u8);
        let io = Request { op, flags: Flags::NONE, range };
        let submitted = if matches!(op, Op::Write | Op::Read) {
            let Some(mut buf) = engine.buffer(range) else { return Ok(()) };
            buf.fill(fill);
            engine.submit(io, buf, tag).map_err(|rejected| rejected.error)
        } else {
            engine.submit_no_data(io, tag).map_err(|rejected| rejected.error)
        };
        match submitted {
            Err(error) if error.errno() == libc::EAGAIN => return Ok(()),
            Err(error) => return Err(Violation::new(format!("a request is refused: {error}"))),
            Ok(()) => {}
        }
        self.flights.insert(tag, Flight { io, fill });
        if op.changes() {
            for bytes in [&mut self.known, &mut self.durable] {
                set(bytes, range, None);
            }
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<(), Violation> {
        self.served.engine.wait(Some(Duration::ZERO), &mut |_, _| {}).map_err(broken)?;
        while let Some(done) = self.served.engine.next() {
            self.complete(&done)?;
        }
        Ok(())
    }

    /// A request has ended: it is noted as a change, and then its client is told.
    fn complete(&mut self, done: &Completion) -> Result<(), Violation> {
        if let Some(mover) = &self.mover {
            mover.changes.mark(done.io);
        }
        let Some(Flight { io, fill }) = self.flights.remove(&done.tag) else { return Ok(()) };
        let Ok(len) = done.result() else { return Ok(()) };
        match io.op {
            Op::Write => set(&mut self.known, io.range, Some(fill)),
            Op::Zero => set(&mut self.known, io.range, Some(0)),
            Op::Read => {
                let read = done.buf.as_ref().and_then(|it| it.get(..len as usize));
                self.compare(io.range.pos, read.unwrap_or_default(), "a read")?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Compares `bytes`, which are at `pos` of the disk, with what is known.
    fn compare(&self, pos: u64, bytes: &[u8], what: &str) -> Result<(), Violation> {
        compare(&self.known, pos, bytes, what)
    }

    /// Runs a worker or the copy, one that is paused or one with a new job.
    fn work(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.counts.operations += 1;
        let choices = self.threads.choices(&self.workers) as u64;
        if choices == 0 {
            return Ok(());
        }
        let ran = self.threads.run(random.below(choices) as usize, &self.workers);
        ran.map_err(|error| Violation::new(error.to_string()))
    }

    /// Runs until `is_over`.
    fn run_until(
        &mut self,
        random: &mut Random,
        is_over: impl Fn(&Self) -> bool,
    ) -> Result<(), Violation> {
        for _ in 0..SETTLE_STEPS {
            self.poll()?;
            if is_over(self) {
                return Ok(());
            }
            self.work(random)?;
        }
        Err(Violation::new("a request, or a move, never ends".to_owned()))
    }

    /// Begins to move the disk to the other device, whatever that has.
    fn begin(&mut self, random: &mut Random) -> Result<(), Violation> {
        if self.mover.is_some() {
            return Ok(());
        }
        let target = &self.devices[1 - self.at];
        let disk = disk_on(target, &self.scenario)?;
        target.set_faults(self.scenario.faults);
        let random = Random::new(random.next());
        let mover = Mover::new(self.served.disk.clone(), disk, self.scenario.late, random);
        let mover = Rc::new(mover.ok_or_else(|| Violation::new("no memory".to_owned()))?);
        self.mover = Some(mover.clone());
        let started = self.threads.start(move || mover.run());
        started.map_err(|error| Violation::new(error.to_string()))
    }

    /// Holds the clients back, and exchanges the disk if the rest is copied.
    fn pivot(&mut self, random: &mut Random) -> Result<(), Violation> {
        let Some(mover) = self.mover.clone().filter(|it| it.stage() == Stage::Following) else {
            return Ok(());
        };
        self.run_until(random, |it| it.flights.is_empty())?;
        // It may have failed meanwhile.
        if mover.stage() != Stage::Following {
            return Ok(());
        }
        mover.on_paused();
        self.run_until(random, |_| mover.stage() != Stage::Paused)?;
        if mover.stage() != Stage::Complete {
            return Ok(());
        }
        self.mover = None;
        drop(mover);
        let [from, to] = [self.at, 1 - self.at].map(|at| self.devices[at].clone());
        to.set_faults(Faults::default());
        let (before, now) = (content(&from), content(&to));
        if let Some(at) = before.iter().zip(&now).position(|(before, now)| before != now) {
            return Err(Violation::new(format!("C96: byte {at} is another one in the new place")));
        }
        self.at = 1 - self.at;
        self.exchanges += 1;
        self.reopen()?;
        self.durable = now.into_iter().map(Some).collect();
        Ok(())
    }

    fn reopen(&mut self) -> Result<(), Violation> {
        let device = &self.devices[self.at];
        let disk = disk_on(device, &self.scenario)?;
        self.served = Served::new(disk, device, &self.workers, &self.scenario)?;
        Ok(())
    }

    /// The process is killed, or the power fails, and the disk is served again from where it was last.
    fn end_process(&mut self, is_cut: bool, random: &mut Random) -> Result<(), Violation> {
        for device in &self.devices {
            if is_cut {
                let _ = device.cut_power();
            } else {
                device.kill();
            }
        }
        self.counts.cuts += u64::from(is_cut);
        if let Some(mover) = &self.mover {
            mover.cancel();
        }
        self.run_until(random, |it| {
            let has_ended = |mover: &Rc<Mover>| mover.stage() == Stage::Ended;
            it.served.engine.in_flight() == 0 && it.mover.as_ref().is_none_or(has_ended)
        })?;
        self.flights.clear();
        self.forget_ended();
        self.devices.iter().for_each(|device| device.power_on());
        let now = content(&self.devices[self.at]);
        if is_cut {
            compare(&self.durable, 0, &now, "after a loss of power the disk")?;
            self.known = now.iter().copied().map(Some).collect();
            self.durable.clone_from(&self.known);
        } else {
            self.compare(0, &now, "after a kill the disk")?;
        }
        self.reopen()
    }

    /// Ends the run: all that is in flight ends, and the whole disk is compared.
    ///
    /// # Errors
    /// Like [`MoveSimulation::step`].
    pub fn end(&mut self) -> Result<(), Violation> {
        let mut random = Random::part(self.scenario.seed, u64::MAX - 1);
        self.run_until(&mut random, |it| it.flights.is_empty())?;
        self.end_process(false, &mut random)
    }
}

/// Sets each of the bytes in `range` to `value`.
fn set(bytes: &mut [Option<u8>], range: ByteRange, value: Option<u8>) {
    let part = bytes.get_mut(range.pos as usize..range.end() as usize);
    part.unwrap_or_default().fill(value);
}

/// Compares `bytes`, which are at `pos` of the disk, with `known`.
fn compare(known: &[Option<u8>], pos: u64, bytes: &[u8], what: &str) -> Result<(), Violation> {
    let known = known.get(pos as usize..).unwrap_or_default();
    let is_wrong = |(known, found): (&Option<u8>, &u8)| known.is_some_and(|it| it != *found);
    match known.iter().zip(bytes).position(is_wrong) {
        Some(at) => {
            Err(Violation::new(format!("C96: {what} has another byte {}", pos + at as u64)))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_move_in_most_runs() {
        let exchanges = (0..20).map(|seed| {
            let scenario = MoveScenario::of(seed);
            let mut simulation = MoveSimulation::new(scenario.clone()).unwrap();
            for n in 0..1000 {
                let (action, random) = scenario.step(n);
                simulation.step(action, random).unwrap();
            }
            simulation.end().unwrap();
            simulation.exchanges()
        });
        let with_some = exchanges.filter(|count| *count > 0).count();
        assert!(with_some > 10, "{with_some} of 20");
    }
}
