//! Engines on a simulated device, their clients and their workers: what a step happens to.
//!
//! Invariant: every request that an engine accepted is given back once, and what it came to is
//! what the model lets pass.
//! Knows: pattern, model, memory, fibers, scenario. Known by: run.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use nowait::sim::{Faults, Random, Sim, SimDevice};
use nowait::{
    Completion, Disk, Engine, Error, Extents, Flags, Io, Op, OpenOptions, Range, Rejected, Storage,
    Workers,
};

use crate::fibers::Fibers;
use crate::memory::Memory;
use crate::model::{Ending, Model, Time, Wrong};
use crate::pattern::{self, Value, ZERO};
use crate::scenario::{Action, Asked, MAX_REQUEST_BYTES, Scenario, Step};

/// Requests in flight at most, of all engines together.
const FLIGHTS: usize = 48;
/// Turns after which what has not ended never will.
const PATIENCE: u32 = 20_000;

/// A request in flight.
struct Flight {
    tag: u64,
    asked: Asked,
    /// The part of its range that is on the device.
    inside: Range,
    began: Time,
}

/// An image that is open: everything that ends with a power cut.
struct Open {
    engines: Vec<Engine<Sim, Extents>>,
    workers: Workers,
}

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
pub struct World {
    scenario: Scenario,
    device: Arc<SimDevice>,
    open: Open,
    fibers: Fibers,
    model: Model,
    flights: Vec<Option<Flight>>,
    /// A flush has failed since the device was opened; when that was told.
    latched: Option<Time>,
    asked: u64,
    values: Value,
    scratch: Vec<u8>,
    counts: Counts,
    /// Last: engines are gone before it is.
    memory: Vec<Memory>,
}

impl Open {
    fn new(scenario: &Scenario, device: &Arc<SimDevice>) -> Result<Self, Error> {
        let no_hint = !scenario.config.hint;
        let options = OpenOptions { read_only: false, direct: scenario.direct, no_hint };
        let storage = Storage::simulated(device, options)?;
        let map = Extents::new(storage.size(), !no_hint);
        let size = storage.size();
        let disk = Arc::new(Disk::mapped(storage, Vec::new(), size, false, map));
        disk.scan();
        let workers = Workers::simulated(&disk);
        let engines = (0..scenario.engines).map(|_| {
            let queue = Sim::new(device.clone())?;
            Engine::new(disk.clone(), workers.clone(), queue, scenario.config)
        });
        let engines = engines.collect::<Result<_, _>>()?;
        Ok(Self { engines, workers })
    }

    fn in_flight(&self) -> usize {
        self.engines.iter().map(Engine::in_flight).sum()
    }
}

fn broken(error: Error) -> Wrong {
    Wrong::new(format!("the engine itself fails: {error}"))
}

impl World {
    /// The world of `scenario`, in which nothing has happened yet.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: no descriptor is left.
    pub fn new(scenario: Scenario) -> Result<Self, Error> {
        let device = Arc::new(SimDevice::new(scenario.device));
        let open = Open::new(&scenario, &device)?;
        device.set_faults(scenario.faults);
        let block = u64::from(scenario.device.align.read_offset);
        let unit = u64::from(scenario.device.unit);
        let model = Model::new(scenario.device.bytes, scenario.grain, block, unit);
        Ok(Self {
            fibers: Fibers::new(scenario.workers),
            device,
            open,
            model,
            flights: (0..FLIGHTS).map(|_| None).collect(),
            latched: None,
            asked: 0,
            values: 0,
            scratch: Vec::new(),
            counts: Counts::default(),
            memory: (0..FLIGHTS).map(|_| Memory::default()).collect(),
            scenario,
        })
    }

    /// How much has happened so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts { operations: self.device.operations(), ..self.counts }
    }

    /// Lets a worker go on, if there is one.
    fn work(&mut self, random: &mut Random) -> Result<(), Wrong> {
        let workers = &self.open.workers;
        let choices = self.fibers.choices(workers);
        if choices == 0 {
            return Ok(());
        }
        let choice = random.below(choices as u64) as usize;
        self.fibers.run(choice, workers).map_err(|e| Wrong::new(format!("no stack: {e}")))
    }

    /// Does a step.
    ///
    /// # Errors
    /// What is not as it may be.
    pub fn step(&mut self, step: Step) -> Result<(), Wrong> {
        let Step { action, engine, mut random } = step;
        self.device.reseed(random.next());
        match action {
            Action::Ask(asked) => self.ask(engine, asked, &mut random)?,
            Action::Poll => self.look(engine, false)?,
            Action::Wait => self.look(engine, true)?,
            Action::Work => self.work(&mut random)?,
            Action::Cut => self.cut(&mut random)?,
            Action::Reopen => self.reopen(&mut random)?,
            Action::FallSilent => self.device.fall_silent(),
            Action::Answer => self.device.answer(),
        }
        self.violations()
    }

    fn violations(&self) -> Result<(), Wrong> {
        match self.device.take_violations().first() {
            Some(what) => Err(Wrong::new(what.clone())),
            None => Ok(()),
        }
    }

    fn inside(&self, range: Range) -> Range {
        let size = self.scenario.device.bytes;
        let pos = range.pos.min(size);
        Range::new(pos, range.end().min(size) - pos)
    }

    /// When the oldest request in flight began.
    fn oldest(&self) -> Time {
        self.flights.iter().flatten().map(|flight| flight.began).min().unwrap_or(Time::MAX)
    }

    fn ask(&mut self, engine: usize, asked: Asked, random: &mut Random) -> Result<(), Wrong> {
        let free = self.flights.iter().position(Option::is_none);
        let Some(place) = free else { return self.look(engine, true) };
        let Asked { op, range, .. } = asked;
        let inside = self.inside(range);
        self.asked += 1;
        let tag = place as u64 | self.asked << 16;
        let value = if op == Op::Write {
            self.values += 1;
            self.values
        } else {
            ZERO
        };
        let began = match op.changes() {
            true => self.model.begin_write(inside, value, self.oldest()),
            false => self.model.begin(),
        };
        match self.submit(engine, place, tag, asked, value, random)? {
            Ok(()) => {
                self.counts.requests += 1;
                let flight = Flight { tag, asked, inside, began };
                if let Some(place) = self.flights.get_mut(place) {
                    *place = Some(flight);
                }
                Ok(())
            }
            Err(errno) => {
                if op.changes() {
                    self.model.end_write(inside, began, Ending::Never);
                }
                let behind = inside.len == 0 && op != Op::Read && op != Op::Flush;
                match errno {
                    libc::EAGAIN => self.look(engine, false),
                    libc::EINVAL if self.scenario.config.strict => Ok(()),
                    libc::ENOSPC if behind => Ok(()),
                    _ => Err(Wrong::new(format!("{asked:?} was refused with errno {errno}"))),
                }
            }
        }
    }

    /// Hands a request in. The inner result is the engine's.
    fn submit(
        &mut self,
        engine: usize,
        place: usize,
        tag: u64,
        asked: Asked,
        value: Value,
        random: &mut Random,
    ) -> Result<Result<(), i32>, Wrong> {
        let Asked { op, flags, range, segments } = asked;
        let io = Io { op, flags, range };
        let refused = |rejected: Rejected| rejected.error.errno();
        let (Some(engine), Some(memory)) =
            (self.open.engines.get_mut(engine), self.memory.get_mut(place))
        else {
            return Err(Wrong::new("there is no such engine".to_owned()));
        };
        if !matches!(op, Op::Read | Op::Write) {
            return Ok(engine.submit_bare(io, tag).map_err(refused));
        }
        let align = engine.disk().alignment();
        let block = u64::from(align.offset);
        if segments > 0 && memory.cut(range.len, segments, block, align.memory, random) {
            if op == Op::Write {
                memory.fill(range.pos, value);
            }
            let segments = memory.segments();
            // SAFETY: the memory is this request's until it was given back; it is dropped after
            // the engines.
            return Ok(unsafe { engine.submit_segments(io, &segments, tag) }.map_err(refused));
        }
        let start = engine.start(range.pos);
        let Some(mut buf) = engine.buffer(range) else { return Ok(Err(libc::EAGAIN)) };
        if op == Op::Write
            && let Some(bytes) = buf.get_mut(start..start + range.len as usize)
        {
            pattern::fill(bytes, range.pos, value);
        }
        Ok(engine.submit(io, buf, tag).map_err(refused))
    }

    /// An engine looks at its queue, or waits, and what it gives back is judged.
    fn look(&mut self, engine: usize, wait: bool) -> Result<(), Wrong> {
        let Some(own) = self.open.engines.get_mut(engine) else { return Ok(()) };
        let looked = match wait {
            true => own.wait(Some(Duration::ZERO), &mut |_, _| {}),
            false => own.poll(),
        };
        looked.map_err(broken)?;
        while let Some(own) = self.open.engines.get_mut(engine)
            && let Some(completion) = own.next()
        {
            let place = (completion.tag & 0xffff) as usize;
            let flight = self.flights.get_mut(place).and_then(Option::take);
            let Some(flight) = flight.filter(|flight| flight.tag == completion.tag) else {
                let io = completion.io;
                return Err(Wrong::new(format!("C41: {io:?} was given back, but not in flight")));
            };
            self.judge(engine, place, flight, completion)?;
        }
        Ok(())
    }

    fn judge(
        &mut self,
        engine: usize,
        place: usize,
        flight: Flight,
        completion: Completion,
    ) -> Result<(), Wrong> {
        let Flight { asked, inside, began, tag } = flight;
        let done = completion.result().map_err(|error| error.errno());
        let fail = |what: &str| Err(Wrong::new(format!("{asked:?}: {what}: {done:?}")));
        let Ok(count) = done else {
            return self.judge_failure(flight, done.err().unwrap_or_default());
        };
        let expected = if asked.op == Op::Flush { 0 } else { inside.len };
        if count > expected {
            return fail("more was done than there is");
        }
        let full = asked.op == Op::Write && self.scenario.device.capacity < u64::MAX;
        if count < expected && !full && !self.device.has_failed() {
            return fail("cut short for no reason");
        }
        let durable = asked.flags.has(Flags::DSYNC);
        match asked.op {
            Op::Read => self.judge_read(engine, place, &asked, began, count, &completion),
            Op::Write | Op::Zero => {
                let (part, rest) = split(inside, count);
                self.model.end_write(part, began, Ending::Done { durable });
                self.model.end_write(rest, began, Ending::Maybe);
                Ok(())
            }
            Op::Discard => {
                self.model.end_write(inside, began, Ending::Maybe);
                Ok(())
            }
            Op::Flush => {
                if self.latched.is_some_and(|when| began > when) {
                    return fail("C51: a flush after a failed one");
                }
                self.model.end_flush(began);
                Ok(())
            }
            Op::Status => self.judge_status(engine, tag, inside, began),
        }
    }

    fn judge_failure(&mut self, flight: Flight, errno: i32) -> Result<(), Wrong> {
        let Flight { asked, inside, began, .. } = flight;
        let like = self.scenario.device;
        let allowed = match errno {
            libc::EAGAIN => asked.flags.has(Flags::NOWAIT),
            libc::EIO => self.device.has_failed(),
            libc::ENOSPC => self.device.has_injected(errno) || like.capacity < u64::MAX,
            libc::EOPNOTSUPP => match asked.op {
                Op::Discard => !like.punches,
                Op::Zero => asked.flags.has(Flags::FAST_ZERO) && !(like.punches && like.zeroes),
                _ => false,
            },
            libc::EINTR => false,
            _ => self.device.has_injected(errno),
        };
        if asked.op.changes() {
            self.model.end_write(inside, began, Ending::Maybe);
        }
        if asked.op == Op::Flush && self.latched.is_none() {
            self.latched = Some(self.model.begin());
        }
        match allowed {
            true => Ok(()),
            false => Err(Wrong::new(format!("{asked:?} failed with errno {errno}"))),
        }
    }

    fn judge_read(
        &mut self,
        engine: usize,
        place: usize,
        asked: &Asked,
        began: Time,
        count: u64,
        completion: &Completion,
    ) -> Result<(), Wrong> {
        let pos = asked.range.pos;
        let own = self.open.engines.get(engine).map_or(0, |engine| engine.start(pos));
        if let Some(buf) = &completion.buf {
            let bytes = buf.get(own..own + count as usize).unwrap_or_default();
            return self.model.check(pos, bytes, began);
        }
        let Some(memory) = self.memory.get(place) else { return Ok(()) };
        memory.gather(count, &mut self.scratch);
        // Where something went wrong a worker may have found more than it could answer for.
        if !self.device.has_failed() && !memory.is_untouched_beyond(count) {
            return Err(Wrong::new(format!("C18: {asked:?}: memory beyond {count} bytes")));
        }
        self.model.check(pos, &self.scratch, began)
    }

    fn judge_status(
        &mut self,
        engine: usize,
        tag: u64,
        inside: Range,
        began: Time,
    ) -> Result<(), Wrong> {
        let Some(own) = self.open.engines.get_mut(engine) else { return Ok(()) };
        let mut pos = inside.pos;
        for span in own.take_spans(tag) {
            if span.hole {
                self.model.check_zeros(Range::new(pos, span.len), began)?;
            }
            pos += span.len;
        }
        if pos > inside.end() || pos == inside.pos && inside.len > 0 {
            return Err(Wrong::new(format!("the status of {inside:?} ends at byte {pos}")));
        }
        Ok(())
    }

    /// Lets everything in flight end, and judges it.
    ///
    /// # Errors
    /// What is not as it may be, or never ends.
    fn settle(&mut self, random: &mut Random) -> Result<(), Wrong> {
        self.device.answer();
        for _ in 0..PATIENCE {
            if self.open.in_flight() == 0 {
                return match self.flights.iter().flatten().next() {
                    Some(lost) => Err(Wrong::new(format!("C41: lost: {:?}", lost.asked))),
                    None => Ok(()),
                };
            }
            for engine in 0..self.open.engines.len() {
                self.look(engine, true)?;
            }
            self.work(random)?;
        }
        let left = self.flights.iter().flatten().next().map(|flight| flight.asked);
        Err(Wrong::new(format!("never ends: {left:?}")))
    }

    /// Lets everything in flight end while there is no power, and forgets it.
    fn abandon(&mut self, random: &mut Random) -> Result<(), Wrong> {
        self.flights.fill_with(|| None);
        for _ in 0..PATIENCE {
            if self.open.in_flight() == 0 {
                return Ok(());
            }
            for engine in &mut self.open.engines {
                engine.wait(Some(Duration::ZERO), &mut |_, _| {}).map_err(broken)?;
                while engine.next().is_some() {}
            }
            self.work(random)?;
        }
        Err(Wrong::new("C46: requests of a device without power never end".to_owned()))
    }

    fn cut(&mut self, random: &mut Random) -> Result<(), Wrong> {
        self.counts.cuts += 1;
        let rotten = self.device.cut_power();
        self.abandon(random)?;
        self.device.power_on();
        self.open_anew()?;
        let mut bytes = Vec::with_capacity(self.scenario.device.bytes as usize);
        self.read_all(random, |_, _, part| {
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        self.model.power_cut(&bytes, &rotten)
    }

    fn reopen(&mut self, random: &mut Random) -> Result<(), Wrong> {
        self.settle(random)?;
        self.open_anew()
    }

    fn open_anew(&mut self) -> Result<(), Wrong> {
        self.device.set_faults(Faults::default());
        self.open = Open::new(&self.scenario, &self.device).map_err(broken)?;
        self.latched = None;
        self.device.set_faults(self.scenario.faults);
        Ok(())
    }

    /// Reads the device from start to end while nothing goes wrong; hands over each part with its
    /// place.
    fn read_all(
        &mut self,
        random: &mut Random,
        mut each: impl FnMut(&mut Self, u64, &[u8]) -> Result<(), Wrong>,
    ) -> Result<(), Wrong> {
        self.device.set_faults(Faults::default());
        let strict = self.scenario.config.strict;
        let mut pos = 0;
        while let rest = self.scenario.device.bytes - pos
            && rest > 0
        {
            let len = if strict { MAX_REQUEST_BYTES } else { MAX_REQUEST_BYTES.min(rest) };
            let range = Range::new(pos, len);
            let io = Io { op: Op::Read, flags: Flags::NONE, range };
            let completion = self.run_one(io, random)?;
            let count = completion.result().map_err(broken)?;
            let start = self.open.engines.first().map_or(0, |engine| engine.start(pos));
            let bytes = completion.buf.as_ref().and_then(|buf| buf.get(start..));
            let bytes = bytes.and_then(|bytes| bytes.get(..count as usize)).unwrap_or_default();
            if count < len.min(rest) {
                return Err(Wrong::new(format!("C17: {range:?} is cut short at {count}")));
            }
            each(self, pos, bytes)?;
            pos += count;
        }
        self.device.set_faults(self.scenario.faults);
        Ok(())
    }

    /// Runs a read on the first engine, on which nothing else is in flight.
    fn run_one(&mut self, io: Io, random: &mut Random) -> Result<Completion, Wrong> {
        let stuck = || Wrong::new(format!("never ends: {io:?}"));
        let Some(engine) = self.open.engines.first_mut() else { return Err(stuck()) };
        let buf = engine.buffer(io.range).ok_or_else(stuck)?;
        engine.submit(io, buf, 0).map_err(|rejected| broken(rejected.error))?;
        for _ in 0..PATIENCE {
            let Some(engine) = self.open.engines.first_mut() else { break };
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
        self.settle(&mut random)?;
        let began = self.model.begin();
        self.read_all(&mut random, |world, pos, part| world.model.check(pos, part, began))?;
        self.violations()
    }

    /// Ends without a look at anything, so that nothing is in flight when this is dropped. False
    /// when that does not succeed.
    pub fn give_up(&mut self) -> bool {
        let _ = self.device.cut_power();
        self.abandon(&mut Random::new(0)).is_ok()
    }
}

/// The first `count` bytes of `range`, and the others.
fn split(range: Range, count: u64) -> (Range, Range) {
    (Range::new(range.pos, count), Range::new(range.pos + count, range.len - count))
}
