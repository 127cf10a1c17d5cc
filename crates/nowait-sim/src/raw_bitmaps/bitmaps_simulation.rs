//! A disk with a bitmap that is written to, closed, killed and cut off, to which steps are applied.
//!
//! Invariant: whenever the disk is opened, each granule that is not as it was when the bitmap began is dirty, and after an
//! end in order no other bit is set than those of then. The bitmap is never lost.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nowait::sim::{Faults, Random, SimDevice, SimQueue};
use nowait::{
    BlockDevice, BlockMap, BlockingFile, ByteRange, Completion, Direct, Error, Flags, Op,
    OpenOptions, Request, SimStorage, SingleDisk, WorkerPool,
};
use nowait_image::bitmap_changes::NewBitmap;
use nowait_image::{BitmapBits, RestingRegions, SimRawDisk};

use crate::coroutines::Coroutines;
use crate::model::Violation;
use crate::raw_bitmaps::bitmaps_disk::{BitmapsDisk, OpenDisk};
use crate::raw_bitmaps::bitmaps_scenario::{BitmapsAction, BitmapsScenario, End};
use crate::raw_bitmaps::recorded_bits::{RecordedBits, is_set};
use crate::simulation::Counts;

/// Steps within which all that is in flight has to end.
const SETTLE_STEPS: usize = 100_000;
/// The most steps of an end in order before it is cut off, if it is.
const END_STEPS: u64 = 60;
const NAME: &str = "changes";

type Engine = SingleDisk<SimQueue, dyn BlockMap>;
type Job = Box<dyn FnOnce() -> Result<(), String>>;

/// Facts about the bitmap.
#[derive(Clone, Default)]
struct Known {
    /// The disk when the bitmap began to record, unless it is removed.
    base: Option<Vec<u8>>,
    /// Whether it records no more.
    is_disabled: bool,
    /// The granules that had changed when it last ceased to record.
    changed: Vec<u64>,
    /// The bits on storage, where nothing but these is right.
    exact: Option<Vec<u8>>,
}

/// A process has regions of its bitmaps cool.
enum Cooling {
    /// A worker of its own is at it.
    Busy,
    /// Some may rest.
    Idle(Option<RestingRegions>),
    /// These are closed next, before most of what was in flight when they began to rest completes.
    Due(RestingRegions),
}

/// A process that has the disk open.
struct Running {
    image: OpenDisk,
    engine: Engine,
    bits: Option<Arc<RecordedBits>>,
    cooling: Rc<RefCell<Cooling>>,
}

/// The simulation.
pub struct BitmapsSimulation {
    scenario: BitmapsScenario,
    disk: Arc<SimDevice>,
    file: Arc<SimDevice>,
    /// Dropped before the threads, which end the simulation.
    running: Option<Running>,
    threads: Coroutines,
    workers: WorkerPool,
    known: Known,
    counts: Counts,
}

fn wrong(error: impl std::fmt::Display) -> Violation {
    Violation::new(error.to_string())
}

fn broken(error: Error) -> Violation {
    Violation::new(format!("the engine itself fails: {error}"))
}

impl BitmapsSimulation {
    /// The simulation of a scenario, with a bitmap on a disk of zeros.
    ///
    /// # Errors
    /// The devices could not be opened.
    pub fn new(scenario: BitmapsScenario) -> Result<Self, Violation> {
        let mut simulation = Self {
            disk: BitmapsDisk::device(scenario.disk, scenario.qcow2).map_err(wrong)?,
            file: Arc::new(SimDevice::new(scenario.file)),
            running: None,
            threads: Coroutines::new(scenario.workers),
            workers: WorkerPool::simulated(),
            known: Known::default(),
            counts: Counts::default(),
            scenario,
        };
        simulation.add()?;
        simulation.open()?;
        Ok(simulation)
    }

    /// The counters so far; a worker's step counts as an operation.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// The disk as one process sees it.
    fn process(&self) -> BitmapsDisk {
        match self.scenario.qcow2 {
            Some(_) => BitmapsDisk::Qcow2(self.disk.clone()),
            None => BitmapsDisk::Raw(Box::new(SimRawDisk::new(&self.disk, &self.file))),
        }
    }

    /// The content of the disk, which is not open, or not in an image.
    fn content(&self) -> Result<Vec<u8>, Violation> {
        self.without_faults();
        let BitmapsScenario { disk, qcow2, .. } = &self.scenario;
        BitmapsDisk::content(&self.disk, disk.bytes, qcow2.is_some()).map_err(wrong)
    }

    fn without_faults(&self) {
        for device in [&self.disk, &self.file] {
            device.set_faults(Faults::default());
        }
    }

    /// Adds the bitmap, without faults.
    fn add(&mut self) -> Result<(), Violation> {
        let granularity = self.scenario.granularity;
        let new = NewBitmap { name: NAME.into(), granularity, enabled: true };
        self.process().add(&new).map_err(wrong)?;
        self.known = Known { base: Some(self.content()?), ..Known::default() };
        Ok(())
    }

    /// Opens the disk, and checks the bitmap.
    fn open(&mut self) -> Result<(), Violation> {
        self.without_faults();
        let content = self.content()?;
        let options = OpenOptions::new().cache_holes(self.scenario.cache_holes);
        let image = self.process().open(options).map_err(wrong)?;
        let bits = self.stored_bits(&image)?.map(Arc::new);
        self.check(bits.as_deref(), &content)?;
        if let (Some(bits), Some(store)) = (&bits, image.store()) {
            let bits: Arc<dyn BitmapBits> = bits.clone();
            store.attach(NAME, &bits);
        }
        let queue = SimQueue::new(self.disk.clone()).map_err(broken)?;
        let device = image.device().clone();
        let engine = SingleDisk::new(device, self.workers.clone(), queue, self.scenario.config);
        let engine = engine.map_err(broken)?;
        let cooling = Rc::new(RefCell::new(Cooling::Idle(None)));
        self.running = Some(Running { image, engine, bits, cooling });
        self.disk.set_faults(self.scenario.faults[0]);
        self.file.set_faults(self.scenario.faults[1]);
        Ok(())
    }

    /// The page cache is dropped: what a failed flush has lost is not taken for what is stored.
    fn drop_caches(&self) {
        for device in [&self.disk, &self.file] {
            device.drop_cache();
        }
    }

    /// The bits of the bitmap of `image`, if it is there.
    fn stored_bits(&self, image: &OpenDisk) -> Result<Option<RecordedBits>, Violation> {
        let Some(store) = image.store() else { return Ok(None) };
        let Some(bitmap) = store.bitmaps().into_iter().next() else { return Ok(None) };
        let Some(stored) = store.stored_bits(NAME) else {
            return Err(Violation::new(format!("C75: a bitmap is lost: {bitmap:?}")));
        };
        let (size, granularity) = (self.scenario.disk.bytes, self.scenario.granularity);
        let bits = RecordedBits::from_stored(stored, size, granularity, bitmap.auto);
        bits.map(Some).map_err(wrong)
    }

    /// The granules that are not in `now` as they were in `before`.
    fn changed(&self, before: &[u8], now: &[u8]) -> Vec<u64> {
        let granularity = self.scenario.granularity as usize;
        let granules = now.chunks(granularity).zip(before.chunks(granularity)).zip(0..);
        granules.filter(|((now, before), _)| now != before).map(|(_, granule)| granule).collect()
    }

    /// Checks the bitmap of a disk with this content.
    fn check(&mut self, bits: Option<&RecordedBits>, content: &[u8]) -> Result<(), Violation> {
        let exact = self.known.exact.take();
        let (Some(base), Some(bits)) = (&self.known.base, bits) else {
            return match (&self.known.base, bits) {
                (None, None) => Ok(()),
                (base, _) => Err(Violation::new(match base {
                    Some(_) => "C75: a bitmap is not there any more".to_owned(),
                    None => "a bitmap is there again that was removed".to_owned(),
                })),
            };
        };
        if bits.is_enabled() == self.known.is_disabled {
            return Err(Violation::new("C77: a bitmap records again, or no more".to_owned()));
        }
        let bits = bits.all();
        let mut changed = self.known.changed.clone();
        if !self.known.is_disabled {
            changed.extend(self.changed(base, content));
        }
        if let Some(granule) = changed.iter().find(|granule| !is_set(&bits, **granule)) {
            let what = format!("C74, C93: granule {granule} has changed and is clean");
            return Err(Violation::new(what));
        }
        match exact {
            Some(exact) if exact != bits => {
                Err(Violation::new("C93: an end in order has left other bits".to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Executes an action.
    ///
    /// # Errors
    /// A violation of the contract.
    pub fn step(&mut self, action: BitmapsAction, mut random: Random) -> Result<(), Violation> {
        let random = &mut random;
        for device in [&self.disk, &self.file] {
            device.reseed(random.next());
        }
        match action {
            BitmapsAction::Write(range) => self.change(Op::Write, range, random)?,
            BitmapsAction::Zero(range) => self.change(Op::Zero, range, random)?,
            BitmapsAction::Discard(range) => self.change(Op::Discard, range, random)?,
            BitmapsAction::Flush => self.change(Op::Flush, ByteRange::new(0, 0), random)?,
            BitmapsAction::Work => self.work(random)?,
            BitmapsAction::Poll => self.poll()?,
            BitmapsAction::Reopen(end) => {
                self.end_process(end, random)?;
                self.open()?;
            }
            BitmapsAction::Foreign(range) => {
                // A program that does not know bitmaps clears the bits by which it is noticed in an image.
                if self.end_process(End::Close, random)? && self.scenario.qcow2.is_none() {
                    self.write_elsewhere(range, random)?;
                    self.known.exact = None;
                }
                self.open()?;
            }
            BitmapsAction::Clear => self.clear(random)?,
            BitmapsAction::Remove => self.remove(random)?,
            BitmapsAction::Switch => self.switch(random)?,
            BitmapsAction::Cool => self.cool(random.below(2) == 0)?,
        }
        let violations = [&self.disk, &self.file].map(|device| device.take_violations());
        violations.into_iter().flatten().next().map_or(Ok(()), |what| Err(Violation::new(what)))
    }

    /// A client of the disk changes it.
    fn change(&mut self, op: Op, range: ByteRange, random: &mut Random) -> Result<(), Violation> {
        let Some(Running { engine, .. }) = &mut self.running else { return Ok(()) };
        if engine.in_flight() >= self.scenario.depth {
            return Ok(());
        }
        self.counts.requests += 1;
        let io = Request { op, flags: Flags::NONE, range };
        let submitted = if op == Op::Write {
            let Some(mut buf) = engine.buffer(range) else { return Ok(()) };
            buf.fill(random.next() as u8);
            engine.submit(io, buf, 0).map_err(|rejected| rejected.error)
        } else {
            engine.submit_no_data(io, 0).map_err(|rejected| rejected.error)
        };
        match submitted {
            Err(error) if error.errno() != libc::EAGAIN => {
                Err(Violation::new(format!("a request is refused: {error}")))
            }
            _ => Ok(()),
        }
    }

    /// Takes what has completed, and marks it; what an error has left behind, the content of the disk tells.
    fn poll(&mut self) -> Result<(), Violation> {
        let Some(Running { engine, bits, .. }) = &mut self.running else { return Ok(()) };
        engine.wait(Some(Duration::ZERO), &mut |_, _| {}).map_err(broken)?;
        while let Some(Completion { io, .. }) = engine.next() {
            if let Some(bits) = bits.as_ref().filter(|_| io.op.changes() && io.range.len > 0) {
                bits.mark(io.range);
            }
        }
        Ok(())
    }

    /// Has open regions rest, or closes those that do, while requests go on; `soon` after each other, or at the next call.
    fn cool(&mut self, soon: bool) -> Result<(), Violation> {
        let Some(Running { image, engine, cooling, .. }) = &self.running else { return Ok(()) };
        let Some(store) = image.store().cloned() else { return Ok(()) };
        let before = std::mem::replace(&mut *cooling.borrow_mut(), Cooling::Busy);
        let resting = match before {
            Cooling::Busy => return Ok(()),
            Cooling::Idle(resting) => resting,
            Cooling::Due(resting) => Some(resting),
        };
        let in_flight = engine.changes_in_flight(engine.device());
        let cooling = cooling.clone();
        let job = move || {
            let then = match resting {
                None => {
                    let resting = store.rest();
                    // Those that have begun to rest just now.
                    let due = if soon { store.rest() } else { None };
                    due.map_or(Cooling::Idle(resting), Cooling::Due)
                }
                Some(resting) => {
                    // After an error the bits are more than those of the changes.
                    let _ = store.cool(resting, &in_flight);
                    Cooling::Idle(None)
                }
            };
            *cooling.borrow_mut() = then;
        };
        self.threads.start(job).map_err(wrong)
    }

    fn is_cooling(&self) -> bool {
        self.running.as_ref().is_some_and(|it| matches!(*it.cooling.borrow(), Cooling::Busy))
    }

    /// Runs a worker, one that is paused or one with a new job.
    fn work(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.counts.operations += 1;
        let choices = self.threads.choices(&self.workers) as u64;
        if choices == 0 {
            return Ok(());
        }
        self.threads.run(random.below(choices) as usize, &self.workers).map_err(wrong)?;
        let is_due = |it: &Running| matches!(*it.cooling.borrow(), Cooling::Due(_));
        if self.running.as_ref().is_some_and(is_due) { self.cool(false) } else { Ok(()) }
    }

    /// Runs until nothing is in flight.
    fn settle(&mut self, random: &mut Random) -> Result<(), Violation> {
        for _ in 0..SETTLE_STEPS {
            self.poll()?;
            let is_idle =
                self.running.as_ref().is_none_or(|running| running.engine.in_flight() == 0);
            if is_idle && !self.is_cooling() {
                return Ok(());
            }
            self.work(random)?;
        }
        Err(Violation::new("a request never completes".to_owned()))
    }

    /// The use of the disk ends. Returns whether it has ended in order.
    fn end_process(&mut self, end: End, random: &mut Random) -> Result<bool, Violation> {
        if end != End::Close {
            self.die(end, random)?;
            return Ok(false);
        }
        self.settle(random)?;
        let Some(Running { image, engine, bits, .. }) = self.running.take() else {
            return Ok(false);
        };
        drop(engine);
        let closed = self.run_job(Box::new(|| image.close()), random)?;
        if closed == Some(Ok(())) {
            self.known.exact = bits.map(|bits| bits.all());
            if random.below(4) == 0 {
                self.lose(End::Cut);
                self.power_on();
            }
            return Ok(true);
        }
        Ok(false)
    }

    /// The process ends now.
    fn die(&mut self, end: End, random: &mut Random) -> Result<(), Violation> {
        self.lose(end);
        self.settle(random)?;
        self.running = None;
        self.drop_caches();
        self.power_on();
        Ok(())
    }

    fn lose(&mut self, end: End) {
        for device in [&self.disk, &self.file] {
            if end == End::Cut {
                let _ = device.cut_power();
            } else {
                device.kill();
            }
        }
        self.counts.cuts += u64::from(end == End::Cut);
    }

    fn power_on(&self) {
        for device in [&self.disk, &self.file] {
            device.power_on();
        }
    }

    /// Runs `job` as the only one, and sometimes ends the process in the middle of it; `None` then.
    fn run_job(
        &mut self,
        job: Job,
        random: &mut Random,
    ) -> Result<Option<Result<(), String>>, Violation> {
        let result = Rc::new(RefCell::new(None));
        let told = result.clone();
        self.threads.start(move || *told.borrow_mut() = Some(job())).map_err(wrong)?;
        let mut left = if random.below(3) == 0 { random.below(END_STEPS) } else { u64::MAX };
        let mut is_lost = false;
        for _ in 0..SETTLE_STEPS {
            if let Some(result) = result.take() {
                if is_lost {
                    self.power_on();
                }
                self.drop_caches();
                return Ok(Some(result).filter(|_| !is_lost));
            }
            if left == 0 && !is_lost {
                self.lose(if random.below(2) == 0 { End::Cut } else { End::Kill });
                is_lost = true;
            }
            left -= u64::from(left > 0 && left < u64::MAX);
            self.work(random)?;
        }
        Err(Violation::new("a change never ends".to_owned()))
    }

    /// Another program writes `range`, durably.
    fn write_elsewhere(&self, range: ByteRange, random: &mut Random) -> Result<(), Violation> {
        self.without_faults();
        let options = OpenOptions::new().direct(Direct::Off);
        let storage = Arc::new(SimStorage::open(&self.disk, 0, options));
        let device = Arc::new(BlockDevice::raw(storage, options).map_err(broken)?);
        let file = BlockingFile::new(device);
        let bytes = vec![random.next() as u8; range.len as usize];
        file.write_at(&bytes, range.pos, Flags::NONE).map_err(broken)?;
        file.flush().map_err(broken)
    }

    /// Clears the bitmap.
    fn clear(&mut self, random: &mut Random) -> Result<(), Violation> {
        let is_closed = self.end_process(End::Close, random)?;
        if !is_closed || self.known.base.is_none() {
            return self.open();
        }
        let (process, before) = (self.process(), self.known.clone());
        let cleared = self.run_job(Box::new(move || process.clear(NAME)), random)?;
        let (base, none) = (Some(self.content()?), vec![0; self.bits_bytes()]);
        let after = Known { base, changed: Vec::new(), exact: None, ..before.clone() };
        if cleared == Some(Ok(())) {
            self.known = Known { exact: Some(none), ..after };
            return self.open();
        }
        // It is cleared or not.
        self.known = Known { exact: None, ..before };
        let Err(not_before) = self.open() else { return Ok(()) };
        self.die(End::Kill, random)?;
        self.known = after;
        self.open()?;
        let bits = self.running.as_ref().and_then(|running| running.bits.as_ref());
        if bits.is_some_and(|bits| bits.all() == none) { Ok(()) } else { Err(not_before) }
    }

    /// Has the bitmap record no more, or again.
    fn switch(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.settle(random)?;
        let Some(Running { image, bits: Some(bits), .. }) = &self.running else { return Ok(()) };
        let Some(store) = image.store().cloned() else { return Ok(()) };
        let is_disabled = !self.known.is_disabled;
        bits.enable(!is_disabled);
        let file = BlockingFile::new(image.device().clone());
        // A write that is not durable may be lost, and is not in a bitmap that did not record.
        let job: Job = Box::new(move || {
            let done = file.flush().and_then(|()| store.store());
            done.map_err(|error| error.to_string())
        });
        let is_done = self.run_job(job, random)? == Some(Ok(()));
        let goes_on = is_done && self.scenario.qcow2.is_none();
        if !goes_on {
            // The content of an image is seen when it is not open.
            self.die(End::Kill, random)?;
        }
        self.known.exact = None;
        let before = self.known.clone();
        self.switched(is_disabled)?;
        if goes_on {
            return Ok(());
        }
        match self.open() {
            Err(_) if !is_done => {
                self.known = before;
                self.open()
            }
            opened => opened,
        }
    }

    /// The bitmap records no more from now on, or again.
    fn switched(&mut self, is_disabled: bool) -> Result<(), Violation> {
        let content = self.content()?;
        let base = self.known.base.clone().unwrap_or_default();
        let changed = if is_disabled { self.changed(&base, &content) } else { Vec::new() };
        self.known.changed.extend(changed);
        self.known.is_disabled = is_disabled;
        self.known.base = Some(content);
        Ok(())
    }

    fn bits_bytes(&self) -> usize {
        self.scenario.disk.bytes.div_ceil(self.scenario.granularity).div_ceil(8) as usize
    }

    /// Removes the bitmap, or adds it again.
    fn remove(&mut self, random: &mut Random) -> Result<(), Violation> {
        if !self.end_process(End::Close, random)? {
            return self.open();
        }
        let process = self.process();
        let is_there = self.known.base.is_some();
        let granularity = self.scenario.granularity;
        let new = NewBitmap { name: NAME.into(), granularity, enabled: true };
        let job: Job =
            Box::new(move || if is_there { process.remove(NAME) } else { process.add(&new) });
        let done = self.run_job(job, random)?;
        let content = self.content()?;
        let after = Known { base: Some(content).filter(|_| !is_there), ..Known::default() };
        if done == Some(Ok(())) {
            self.known = after;
            return self.open();
        }
        // It is there or not.
        self.known.exact = None;
        if self.open().is_err() {
            self.known = after;
            return self.open();
        }
        Ok(())
    }

    /// Ends the run: the disk is closed and opened once more.
    ///
    /// # Errors
    /// Like [`BitmapsSimulation::step`].
    pub fn end(&mut self) -> Result<(), Violation> {
        let mut random = Random::part(self.scenario.seed, u64::MAX - 1);
        self.end_process(End::Close, &mut random)?;
        self.open()?;
        self.end_process(End::Cut, &mut random).map(drop)
    }
}
