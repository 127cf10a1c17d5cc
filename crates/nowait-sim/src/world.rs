//! A device, a front to it and its workers: what a step happens to.
//!
//! Invariant: nothing is in flight when a device is opened anew, and whatever was there is judged.
//! Knows: model, judge, front, fibers, scenario. Known by: run.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nowait::sim::{Faults, Random, Sim, SimDevice};
use nowait::{Completion, Engine, Error, Flags, Io, Op, Range};

use crate::fibers::Fibers;
use crate::front::{Front, Health};
use crate::image::{self, AnyMap, Image};
use crate::judge::Judge;
use crate::model::Wrong;
use crate::scenario::{Action, MAX_REQUEST_BYTES, Scenario, Step};

/// Turns after which what has not ended never will.
const PATIENCE: u32 = 20_000;

/// How much has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that clients made.
    pub requests: u64,
    /// Power cuts.
    pub cuts: u64,
    /// Operations of the device.
    pub operations: u64,
}

/// What a run happens to.
pub struct World<F> {
    scenario: Scenario,
    device: Arc<SimDevice>,
    judge: Judge,
    fibers: Fibers,
    /// Whether metadata is being written that nobody has asked to flush.
    keeping: Rc<Cell<bool>>,
    cuts: u64,
    /// The power has failed since an image was new: it may have lost clusters that nobody sees, behind
    /// the end of its file.
    torn: bool,
    /// Before the image, which is used by it.
    front: F,
    /// What reads all of the device, while it does.
    reader: Option<Engine<Sim, AnyMap>>,
    image: Image,
}

fn no_stack(error: std::io::Error) -> Wrong {
    Wrong::new(format!("no stack: {error}"))
}

fn broken(error: Error) -> Wrong {
    Wrong::new(format!("the engine itself fails: {error}"))
}

impl<F: Front> World<F> {
    /// The world of `scenario`, in which nothing has happened yet.
    ///
    /// # Errors
    /// What the system said.
    pub fn new(scenario: Scenario) -> Result<Self, Wrong> {
        let (device, bytes) = image::device(&scenario)?;
        let image = Image::open(&scenario, &device)?;
        let front = F::open(&image, &scenario).map_err(broken)?;
        device.set_faults(scenario.faults);
        Ok(Self {
            fibers: Fibers::new(scenario.workers),
            keeping: Rc::default(),
            judge: Judge::new(&scenario, &device, &bytes),
            cuts: 0,
            torn: false,
            device,
            front,
            reader: None,
            image,
            scenario,
        })
    }

    /// How much has happened so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts { requests: self.front.requests(), cuts: self.cuts, operations: self.operations() }
    }

    /// Operations of the device so far.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.device.operations()
    }

    /// Lets a worker go on, if there is one.
    fn work(&mut self, random: &mut Random) -> Result<(), Wrong> {
        let workers = &self.image.workers;
        let choices = self.fibers.choices(workers);
        if choices == 0 {
            return Ok(());
        }
        let choice = random.below(choices as u64) as usize;
        self.fibers.run(choice, workers).map_err(no_stack)
    }

    /// Begins to write metadata that nobody has asked to flush, if there is any.
    fn keep(&mut self) -> Result<(), Wrong> {
        let Some(write) = self.image.due().filter(|_| !self.keeping.get()) else { return Ok(()) };
        self.keeping.set(true);
        let keeping = self.keeping.clone();
        let job = move || {
            write();
            keeping.set(false);
        };
        self.fibers.begin(job).map_err(no_stack)
    }

    /// Tables of an image are being written when the power fails.
    fn work_on_tables(&mut self, random: &mut Random) -> Result<(), Wrong> {
        if self.scenario.qcow2.is_none() {
            return Ok(());
        }
        self.keep()?;
        (0..random.below(12)).try_for_each(|_| self.work(random))
    }

    /// Whether nothing is in flight.
    fn is_idle(&self) -> bool {
        self.front.is_idle() && !self.keeping.get()
    }

    /// Does a step.
    ///
    /// # Errors
    /// What is not as it may be.
    pub fn step(&mut self, step: Step) -> Result<(), Wrong> {
        let Step { action, part, mut random } = step;
        self.device.reseed(random.next());
        match action {
            Action::Work => self.work(&mut random)?,
            Action::Keep => self.keep()?,
            Action::Cut => {
                self.work_on_tables(&mut random)?;
                self.cut(&mut random)?;
            }
            Action::Reopen => self.reopen(&mut random)?,
            Action::FallSilent => self.device.fall_silent(),
            Action::Answer => self.device.answer(),
            Action::Shrink => self.shrink(&mut random),
            action => {
                if self.front.act(action, part, &mut self.judge, &mut random)? == Health::Down {
                    self.crash(&mut random)?;
                }
            }
        }
        self.violations()
    }

    fn violations(&self) -> Result<(), Wrong> {
        match self.device.take_violations().first() {
            Some(what) => Err(Wrong::new(what.clone())),
            None => Ok(()),
        }
    }

    /// Lets everything in flight end, and judges it.
    fn settle(&mut self, random: &mut Random) -> Result<(), Wrong> {
        self.device.answer();
        for _ in 0..PATIENCE {
            if self.is_idle() {
                return Ok(());
            }
            if self.front.settle(&mut self.judge)? == Health::Down {
                return self.crash(random);
            }
            self.work(random)?;
        }
        let left = self.front.forget().first().map(|flight| flight.asked);
        Err(Wrong::new(format!("never ends: {left:?}")))
    }

    /// Lets everything in flight end that nobody waits for any more.
    fn drain(&mut self, random: &mut Random) -> Result<(), Wrong> {
        for _ in 0..PATIENCE {
            if self.is_idle() {
                return Ok(());
            }
            self.front.drain().map_err(broken)?;
            self.work(random)?;
        }
        Err(Wrong::new("C46: requests that nobody waits for never end".to_owned()))
    }

    /// The front has failed, and everybody with it; the device has not.
    fn crash(&mut self, random: &mut Random) -> Result<(), Wrong> {
        if self.scenario.qcow2.is_some() {
            // What it knew of the image is lost, as if the power had failed.
            return self.cut(random);
        }
        self.device.answer();
        self.device.set_faults(Faults::default());
        let flights = self.front.forget();
        self.drain(random)?;
        flights.iter().for_each(|flight| self.judge.unanswered(flight));
        self.open_anew()
    }

    fn cut(&mut self, random: &mut Random) -> Result<(), Wrong> {
        self.cuts += 1;
        self.torn = true;
        let rotten = self.device.cut_power();
        self.device.set_faults(Faults::default());
        self.front.forget();
        self.drain(random)?;
        self.device.power_on();
        self.open_anew()?;
        let bytes = self.contents(random)?;
        self.judge.power_cut(&bytes, &rotten)?;
        self.stack(random)
    }

    /// All bytes of the device.
    fn contents(&mut self, random: &mut Random) -> Result<Vec<u8>, Wrong> {
        let mut bytes = Vec::with_capacity(self.scenario.device.bytes as usize);
        self.read_all(random, |_, _, part| {
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Sometimes a disk that is in an image goes on in a new one, whose tables are empty, on top of
    /// the one that it was in or of a raw one.
    fn stack(&mut self, random: &mut Random) -> Result<(), Wrong> {
        if self.scenario.qcow2.is_none() || random.below(2) == 0 {
            return Ok(());
        }
        let disk = match u64::from(self.device.files()) > 1 + random.below(3) {
            true => Some(self.contents(random)?),
            false => None,
        };
        image::stack(&self.scenario, &self.device, disk.as_deref(), random)?;
        self.torn = false;
        self.open_anew()
    }

    fn reopen(&mut self, random: &mut Random) -> Result<(), Wrong> {
        self.settle(random)?;
        let quiet = random.below(2) == 0;
        if quiet {
            self.device.set_faults(Faults::default());
        }
        let before = self.image.leaks;
        let began = self.judge.now();
        match self.image.close() {
            None => return self.open_anew(),
            Some(Ok(())) => self.judge.closed(began)?,
            Some(Err(error)) => {
                self.judge.not_closed(&error)?;
                // What it knew of the image is lost.
                return self.cut(random);
            }
        }
        self.open_anew()?;
        match self.image.leaks {
            leaks if leaks > before && quiet && !self.torn => {
                Err(Wrong::new(format!("clusters are lost at closing: {leaks}, {before} before")))
            }
            _ => self.stack(random),
        }
    }

    fn open_anew(&mut self) -> Result<(), Wrong> {
        self.device.set_faults(Faults::default());
        let image = Image::open(&self.scenario, &self.device)?;
        self.front.reopen(&image, &self.scenario).map_err(broken)?;
        self.image = image;
        self.judge.opened();
        self.device.set_faults(self.scenario.faults);
        Ok(())
    }

    /// The device loses its end.
    fn shrink(&mut self, random: &mut Random) {
        let block = 4096;
        let bytes = block * (1 + random.below(self.device.bytes() / block));
        self.device.shrink(bytes);
        self.judge.shrunk(self.device.bytes(), self.front.oldest());
    }

    /// Reads the device from start to end while nothing goes wrong and nothing is in flight; hands
    /// over each part with its place.
    fn read_all(
        &mut self,
        random: &mut Random,
        mut each: impl FnMut(&mut Self, u64, &[u8]) -> Result<(), Wrong>,
    ) -> Result<(), Wrong> {
        self.device.set_faults(Faults::default());
        let queue = Sim::new(self.device.clone()).map_err(broken)?;
        let (disk, workers) = (self.image.disk.clone(), self.image.workers.clone());
        let config = self.scenario.config;
        self.reader = Some(Engine::new(disk, workers, queue, config).map_err(broken)?);
        let mut pos = 0;
        while let rest = self.judge.size() - pos
            && rest > 0
        {
            let len = if config.strict { MAX_REQUEST_BYTES } else { MAX_REQUEST_BYTES.min(rest) };
            let range = Range::new(pos, len);
            let io = Io { op: Op::Read, flags: Flags::NONE, range };
            let completion = self.run_one(io, random)?;
            let count = completion.result().map_err(broken)?;
            let start = self.reader.as_ref().map_or(0, |reader| reader.start(pos));
            let bytes = completion.buf.as_ref().and_then(|buf| buf.get(start..));
            let bytes = bytes.and_then(|bytes| bytes.get(..count as usize)).unwrap_or_default();
            if count < len.min(rest) {
                return Err(Wrong::new(format!("C17: {range:?} is cut short at {count}")));
            }
            each(self, pos, bytes)?;
            pos += count;
        }
        self.reader = None;
        self.device.set_faults(self.scenario.faults);
        Ok(())
    }

    /// Runs a read on the reader, on which nothing else is in flight.
    fn run_one(&mut self, io: Io, random: &mut Random) -> Result<Completion, Wrong> {
        let stuck = || Wrong::new(format!("never ends: {io:?}"));
        let Some(engine) = &mut self.reader else { return Err(stuck()) };
        let buf = engine.buffer(io.range).ok_or_else(stuck)?;
        engine.submit(io, buf, 0).map_err(|rejected| broken(rejected.error))?;
        for _ in 0..PATIENCE {
            let Some(engine) = &mut self.reader else { break };
            engine.wait(Some(Duration::ZERO), &mut |_, _| {}).map_err(broken)?;
            if let Some(completion) = engine.next() {
                return Ok(completion);
            }
            self.work(random)?;
        }
        Err(stuck())
    }

    /// The run is over: everything ends, and all that is there is looked at.
    ///
    /// # Errors
    /// What is not as it may be.
    pub fn end(&mut self) -> Result<(), Wrong> {
        let mut random = Random::part(self.scenario.seed, u64::MAX - 1);
        self.device.reseed(random.next());
        match self.judge.has_shrunk() {
            // What is gone is not asked for.
            true => self.reopen(&mut random)?,
            false => self.settle(&mut random)?,
        }
        let began = self.judge.now();
        self.read_all(&mut random, |world, pos, part| world.judge.found(pos, part, began))?;
        if self.scenario.qcow2.is_some() {
            self.reopen(&mut random)?;
            let began = self.judge.now();
            self.read_all(&mut random, |world, pos, part| world.judge.found(pos, part, began))?;
        }
        self.violations()
    }

    /// Ends without a look at anything, so that nothing is in flight when this is dropped. False
    /// when that does not succeed.
    pub fn give_up(&mut self) -> bool {
        let _ = self.device.cut_power();
        self.device.set_faults(Faults::default());
        self.front.forget();
        self.reader.is_none() && self.drain(&mut Random::new(0)).is_ok()
    }
}
