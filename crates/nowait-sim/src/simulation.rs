//! A simulated device with its workers and the system under test, to which steps are applied.
//!
//! Invariant: no request is in flight when a device is reopened, and the result of each earlier
//! request was checked.

mod operator;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nowait::sim::{Faults, Random, SimDevice, SimQueue};
use nowait::{BlockMap, ByteRange, Completion, Error, Flags, Op, Request, SingleDisk};

use crate::coroutines::Coroutines;
use crate::count_damage;
use crate::image;
use crate::image::{Image, Opening};
use crate::model::Violation;
use crate::oracle::Oracle;
use crate::scenario::{Action, MAX_REQUEST_BYTES, Scenario, Step};
use crate::system_under_test::{Health, SystemUnderTest};

/// Iterations after which a request that has not completed is considered stuck.
const MAX_ITERATIONS: u32 = 20_000;

/// Counters of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests of clients.
    pub requests: u64,
    /// Power cuts.
    pub cuts: u64,
    /// Operations of the device.
    pub operations: u64,
}

/// The state of a damaged image.
#[derive(Clone, Copy, Debug)]
struct Damaged {
    /// Corruptions when it was damaged: its use must not add any.
    corruptions: u64,
    /// A repair leaves a table that two entries name.
    lasts: bool,
}

/// The state of a run.
pub struct Simulation<S> {
    scenario: Scenario,
    device: Arc<SimDevice>,
    oracle: Oracle,
    coroutines: Coroutines,
    /// Whether a background write-back of metadata is running.
    is_writing_back: Rc<Cell<bool>>,
    cuts: u64,
    /// The power has failed since the image was created: it may have leaked clusters beyond the end
    /// of its file, which the check does not see.
    torn: bool,
    /// The damage of a qcow2 image that was not repaired since.
    damaged: Option<Damaged>,
    /// Declared before the image, which it uses, so that it is dropped first.
    system: S,
    /// The engine that reads all of the device, while it does.
    reader: Option<SingleDisk<SimQueue, dyn BlockMap>>,
    image: Image,
}

fn no_stack(error: std::io::Error) -> Violation {
    Violation::new(format!("no stack: {error}"))
}

fn broken(error: Error) -> Violation {
    Violation::new(format!("the engine itself fails: {error}"))
}

impl<S: SystemUnderTest> Simulation<S> {
    /// A new simulation of `scenario`.
    ///
    /// # Errors
    /// The device could not be opened.
    pub fn new(scenario: Scenario) -> Result<Self, Violation> {
        let (device, bytes) = image::device(&scenario)?;
        let image = Image::open(&scenario, &device, Opening::Consistent)?;
        let system = S::open(&image, &scenario).map_err(broken)?;
        device.set_faults(scenario.faults);
        Ok(Self {
            coroutines: Coroutines::new(scenario.workers),
            is_writing_back: Rc::default(),
            oracle: Oracle::new(&scenario, &device, &bytes),
            cuts: 0,
            torn: false,
            damaged: None,
            device,
            system,
            reader: None,
            image,
            scenario,
        })
    }

    /// The counters so far.
    pub fn counts(&self) -> Counts {
        Counts { requests: self.system.requests(), cuts: self.cuts, operations: self.operations() }
    }

    /// Operations of the device so far.
    pub fn operations(&self) -> u64 {
        self.device.operations()
    }

    /// Runs a worker until it would block, if there is one.
    fn work(&mut self, random: &mut Random) -> Result<(), Violation> {
        let workers = &self.image.workers;
        let choices = self.coroutines.choices(workers);
        if choices == 0 {
            return Ok(());
        }
        let choice = random.below(choices as u64) as usize;
        self.coroutines.run(choice, workers).map_err(no_stack)
    }

    /// Starts a background write-back of metadata, if there is any.
    fn write_back(&mut self) -> Result<(), Violation> {
        let Some(write) = self.image.pending_writeback().filter(|_| !self.is_writing_back.get())
        else {
            return Ok(());
        };
        self.is_writing_back.set(true);
        let is_writing_back = self.is_writing_back.clone();
        let job = move || {
            write();
            is_writing_back.set(false);
        };
        self.coroutines.start(job).map_err(no_stack)
    }

    /// Starts writing an image's tables before a power cut.
    fn work_on_tables(&mut self, random: &mut Random) -> Result<(), Violation> {
        if self.scenario.qcow2.is_none() {
            return Ok(());
        }
        self.write_back()?;
        (0..random.below(12)).try_for_each(|_| self.work(random))
    }

    /// Whether nothing is in flight.
    fn is_idle(&self) -> bool {
        self.system.is_idle() && !self.is_writing_back.get()
    }

    /// Executes a step.
    pub fn step(&mut self, step: Step) -> Result<(), Violation> {
        let Step { action, part, mut random } = step;
        self.device.reseed(random.next());
        match action {
            Action::Work => self.work(&mut random)?,
            Action::Keep => self.write_back()?,
            Action::Cut => {
                self.work_on_tables(&mut random)?;
                self.cut(&mut random)?;
            }
            Action::Reopen => self.reopen(&mut random)?,
            Action::Damage => self.damage(&mut random)?,
            Action::FallSilent => self.device.fall_silent(),
            Action::Answer => self.device.answer(),
            Action::Shrink => self.shrink(&mut random),
            Action::Pause => self.pause(None, &mut random)?,
            Action::Resize => self.resize(&mut random)?,
            Action::Remove => self.remove(&mut random)?,
            Action::ChangeExports(change) => self.change_exports(change, &mut random)?,
            action => match self.system.act(action, part, &mut self.oracle, &mut random)? {
                Health::Well => {}
                Health::Down => self.crash(&mut random)?,
                Health::Dead => self.restart(&mut random)?,
            },
        }
        self.violations()
    }

    fn violations(&self) -> Result<(), Violation> {
        match self.device.take_violations().first() {
            Some(what) => Err(Violation::new(what.clone())),
            None => Ok(()),
        }
    }

    /// Runs until all requests have completed, and checks them.
    fn settle(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.device.answer();
        for _ in 0..MAX_ITERATIONS {
            if self.is_idle() {
                return Ok(());
            }
            if self.system.settle(&mut self.oracle)? == Health::Down {
                return self.crash(random);
            }
            self.work(random)?;
        }
        let left = self.system.forget().first().map(|flight| flight.spec);
        Err(Violation::new(format!("never completes: {left:?}")))
    }

    /// Runs until all requests whose results are discarded have completed.
    fn drain(&mut self, random: &mut Random) -> Result<(), Violation> {
        for _ in 0..MAX_ITERATIONS {
            if self.is_idle() {
                return Ok(());
            }
            match self.system.drain() {
                // No completion is lost: the next iteration continues.
                Err(error) if self.oracle.expects(&error) => {}
                drained => drained.map_err(broken)?,
            }
            self.work(random)?;
        }
        Err(Violation::new("C46: abandoned requests never end".to_owned()))
    }

    /// The system under test has failed with all its clients; the device has not.
    fn crash(&mut self, random: &mut Random) -> Result<(), Violation> {
        if self.scenario.qcow2.is_some() {
            // The cached metadata of the image is lost, as in a power cut.
            return self.cut(random);
        }
        self.device.answer();
        self.device.set_faults(Faults::default());
        let flights = self.system.forget();
        self.drain(random)?;
        flights.iter().for_each(|flight| self.oracle.unanswered(flight));
        self.reopen_device(random)
    }

    /// The system under test has died; its clients and the device have not.
    fn restart(&mut self, random: &mut Random) -> Result<(), Violation> {
        if self.scenario.qcow2.is_some() {
            // The cached metadata of the image is lost, as in a power cut.
            return self.cut(random);
        }
        self.device.answer();
        self.device.set_faults(Faults::default());
        self.drain(random)?;
        self.reopen_device(random)
    }

    fn cut(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.cuts += 1;
        self.torn = true;
        let rotten = self.device.cut_power();
        self.system.cut_power();
        self.device.set_faults(Faults::default());
        self.system.forget();
        self.drain(random)?;
        self.device.power_on();
        self.system.power_on()?;
        self.reopen_device(random)?;
        let bytes = self.contents(random)?;
        self.oracle.power_cut(&bytes, &rotten)?;
        self.stack(random)
    }

    /// All bytes of the device.
    fn contents(&mut self, random: &mut Random) -> Result<Vec<u8>, Violation> {
        let mut bytes = Vec::with_capacity(self.scenario.device.bytes as usize);
        self.read_all(random, |_, _, part| {
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Sometimes puts a new image with empty tables on top of the present image or of a raw copy of
    /// the disk.
    fn stack(&mut self, random: &mut Random) -> Result<(), Violation> {
        if self.scenario.qcow2.is_none() || random.below(2) == 0 {
            return Ok(());
        }
        let disk = match u64::from(self.device.files()) > 1 + random.below(3) {
            true => Some(self.contents(random)?),
            false => None,
        };
        let size = self.oracle.size();
        self.device.set_faults(Faults::default());
        image::stack(&self.scenario, &self.device, disk.as_deref(), size, random)?;
        self.torn = false;
        self.damaged = None;
        self.oracle.set_refuses_changes(false);
        self.reopen_device(random)
    }

    fn reopen(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.settle(random)?;
        let quiet = random.below(2) == 0;
        if quiet {
            self.device.set_faults(Faults::default());
        }
        let before = self.image.leaks;
        let began = self.oracle.now();
        match self.image.close() {
            None => return self.reopen_device(random),
            Some(Ok(())) => self.oracle.closed(began)?,
            Some(Err(error)) => {
                self.oracle.not_closed(&error)?;
                // The cached metadata of the image is lost.
                return self.cut(random);
            }
        }
        let damaged = self.damaged.is_some();
        self.reopen_device(random)?;
        if damaged {
            self.check_all(random)?;
        }
        match self.image.leaks {
            leaks if leaks > before && quiet && !self.torn => Err(Violation::new(format!(
                "clusters are lost at closing: {leaks}, {before} before"
            ))),
            _ => self.stack(random),
        }
    }

    /// The image is closed, its refcounts are damaged, and it is opened as if they were not.
    fn damage(&mut self, random: &mut Random) -> Result<(), Violation> {
        match random.below(2) {
            0 => self.cut(random)?,
            _ => self.reopen(random)?,
        }
        if self.damaged.is_some() {
            return Ok(());
        }
        let mut disk = self.contents(random)?;
        self.device.set_faults(Faults::default());
        // The counts of its clusters are relied on.
        image::remove_bitmap(&self.device)?;
        let failed = |error| Violation::new(format!("no damage can be done: {error}"));
        let damage = count_damage::damage(&self.device, random).map_err(failed)?;
        for (range, from) in damage.copies {
            let changed = ByteRange::new(range.start as u64, range.len() as u64);
            disk.copy_within(from..from + range.len(), range.start);
            self.oracle.replaced(changed, &disk);
        }
        self.oracle.set_refuses_changes(damage.refuses_changes);
        self.torn = true;
        self.open_image(Opening::Damaged)?;
        let corruptions = self.image.corruptions;
        self.damaged = Some(Damaged { corruptions, lasts: damage.lasts });
        Ok(())
    }

    /// Repairs the image on the device if it was damaged, and opens it. Its use has made the damage
    /// no worse, and the repair changes no byte of the disk.
    fn reopen_device(&mut self, random: &mut Random) -> Result<(), Violation> {
        let Some(damaged) = self.damaged.take() else {
            return self.open_image(Opening::Consistent);
        };
        self.device.set_faults(Faults::default());
        let image = Image::open(&self.scenario, &self.device, Opening::ReadOnly)?;
        let found = image.corruptions;
        if found > damaged.corruptions {
            let before = damaged.corruptions;
            let what =
                format!("a damaged image was made worse: {found} corruptions, {before} before");
            return Err(Violation::new(what));
        }
        let closed = std::mem::replace(&mut self.image, image);
        let before = self.contents(random)?;
        self.device.set_faults(Faults::default());
        image::mend(&self.device)?;
        if damaged.lasts {
            self.damaged = Some(Damaged { corruptions: 0, ..damaged });
        }
        self.oracle.set_refuses_changes(damaged.lasts);
        self.open_image(Opening::Consistent)?;
        drop(closed);
        match before == self.contents(random)? {
            true => Ok(()),
            false => Err(Violation::new("a repair has changed bytes of the disk".to_owned())),
        }
    }

    fn open_image(&mut self, opening: Opening) -> Result<(), Violation> {
        self.device.set_faults(Faults::default());
        let image = Image::open(&self.scenario, &self.device, opening)?;
        self.system.reopen(&image, &self.scenario).map_err(broken)?;
        self.image = image;
        self.oracle.opened();
        self.device.set_faults(self.scenario.faults);
        Ok(())
    }

    /// The device loses its end.
    fn shrink(&mut self, random: &mut Random) {
        let block = 4096;
        let bytes = block * (1 + random.below(self.device.bytes() / block));
        self.device.shrink(bytes);
        self.oracle.shrunk(self.device.bytes(), self.system.oldest());
    }

    /// Reads the device from start to end without faults and without other requests in flight;
    /// calls `each` with each part and its offset.
    fn read_all(
        &mut self,
        random: &mut Random,
        mut each: impl FnMut(&mut Self, u64, &[u8]) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        self.device.set_faults(Faults::default());
        let queue = SimQueue::new(self.device.clone()).map_err(broken)?;
        let (disk, workers) = (self.image.disk.clone(), self.image.workers.clone());
        let config = self.scenario.config;
        self.reader = Some(SingleDisk::new(disk, workers, queue, config).map_err(broken)?);
        let mut pos = 0;
        while let rest = self.oracle.size() - pos
            && rest > 0
        {
            let len = if config.strict { MAX_REQUEST_BYTES } else { MAX_REQUEST_BYTES.min(rest) };
            let range = ByteRange::new(pos, len);
            let io = Request { op: Op::Read, flags: Flags::NONE, range };
            let completion = self.run_one(io, random)?;
            let count = completion.result().map_err(broken)?;
            let bytes = completion.buf.as_ref().and_then(|buf| buf.get(..count as usize));
            let bytes = bytes.unwrap_or_default();
            if count < len.min(rest) {
                return Err(Violation::new(format!("C17: {range:?} is cut short at {count}")));
            }
            each(self, pos, bytes)?;
            pos += count;
        }
        self.reader = None;
        self.device.set_faults(self.scenario.faults);
        Ok(())
    }

    /// Runs a read on the reader, which has no other request in flight.
    fn run_one(&mut self, io: Request, random: &mut Random) -> Result<Completion, Violation> {
        let stuck = || Violation::new(format!("never completes: {io:?}"));
        let Some(engine) = &mut self.reader else { return Err(stuck()) };
        let buf = engine.buffer(io.range).ok_or_else(stuck)?;
        engine.submit(io, buf, 0).map_err(|rejected| broken(rejected.error))?;
        for _ in 0..MAX_ITERATIONS {
            let Some(engine) = &mut self.reader else { break };
            engine.wait(Some(Duration::ZERO), &mut |_, _| {}).map_err(broken)?;
            if let Some(completion) = engine.next() {
                return Ok(completion);
            }
            self.work(random)?;
        }
        Err(stuck())
    }

    /// Ends the run: all requests end, and all content is checked.
    pub fn end(&mut self) -> Result<(), Violation> {
        let mut random = Random::part(self.scenario.seed, u64::MAX - 1);
        self.device.reseed(random.next());
        match self.oracle.has_shrunk() {
            // After a reopen, the lost part of the device is not read.
            true => self.reopen(&mut random)?,
            false => self.settle(&mut random)?,
        }
        self.check_all(&mut random)?;
        if self.scenario.qcow2.is_some() {
            self.reopen(&mut random)?;
            self.check_all(&mut random)?;
        }
        self.violations()
    }

    /// Reads and checks all content.
    fn check_all(&mut self, random: &mut Random) -> Result<(), Violation> {
        let began = self.oracle.now();
        self.read_all(random, |simulation, pos, part| simulation.oracle.found(pos, part, began))?;
        self.system.check()
    }

    /// Ends without checks, so that no request is in flight when the simulation is dropped. False
    /// if requests are still in flight.
    pub fn abort(&mut self) -> bool {
        let _ = self.device.cut_power();
        self.system.cut_power();
        self.device.set_faults(Faults::default());
        self.system.forget();
        self.reader.is_none() && self.drain(&mut Random::new(0)).is_ok()
    }
}
