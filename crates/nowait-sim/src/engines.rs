//! Engines on a device, and clients that call them.
//!
//! Invariant: every request that an engine accepted is given back once (C41), and judged.
//! Knows: pattern, model, memory, scenario, judge, front. Known by: run.
#![allow(unsafe_code)]

use std::time::Duration;

use nowait::sim::{Random, Sim};
use nowait::{Completion, Engine, Error, Io, Op, Rejected};

use crate::front::{Front, Health};
use crate::image::{AnyMap, Image};
use crate::judge::{Flight, Judge};
use crate::memory::Memory;
use crate::model::{Time, Wrong};
use crate::pattern::{self, Value};
use crate::scenario::{Action, Asked, Scenario};

/// Requests in flight at most, of all engines together.
const FLIGHTS: usize = 48;

/// Engines, each of which could be a thread's.
pub struct Engines {
    engines: Vec<Engine<Sim, AnyMap>>,
    /// What is in flight, with its tag.
    flights: Vec<Option<(u64, Flight)>>,
    requests: u64,
    tags: u64,
    scratch: Vec<u8>,
    /// Last: engines are gone before it is.
    memory: Vec<Memory>,
}

fn broken(error: Error) -> Wrong {
    Wrong::new(format!("the engine itself fails: {error}"))
}

fn engines(image: &Image, scenario: &Scenario) -> Result<Vec<Engine<Sim, AnyMap>>, Error> {
    let engine = |_| {
        let queue = Sim::new(image.device.clone())?;
        Engine::new(image.disk.clone(), image.workers.clone(), queue, scenario.config)
    };
    (0..scenario.parts).map(engine).collect()
}

impl Front for Engines {
    fn open(image: &Image, scenario: &Scenario) -> Result<Self, Error> {
        Ok(Self {
            engines: engines(image, scenario)?,
            flights: (0..FLIGHTS).map(|_| None).collect(),
            requests: 0,
            tags: 0,
            scratch: Vec::new(),
            memory: (0..FLIGHTS).map(|_| Memory::default()).collect(),
        })
    }

    fn reopen(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error> {
        self.engines = engines(image, scenario)?;
        Ok(())
    }

    fn act(
        &mut self,
        action: Action,
        part: usize,
        judge: &mut Judge,
        random: &mut Random,
    ) -> Result<Health, Wrong> {
        match action {
            Action::Ask(asked) => self.ask(part, asked, judge, random)?,
            Action::Wait => self.look(part, true, judge)?,
            _ => self.look(part, false, judge)?,
        }
        Ok(Health::Well)
    }

    fn settle(&mut self, judge: &mut Judge) -> Result<Health, Wrong> {
        for engine in 0..self.engines.len() {
            self.look(engine, true, judge)?;
        }
        match self.flights.iter().flatten().next() {
            Some((_, lost)) if self.engines.iter().all(|engine| engine.in_flight() == 0) => {
                Err(Wrong::new(format!("C41: lost: {:?}", lost.asked)))
            }
            _ => Ok(Health::Well),
        }
    }

    fn is_idle(&self) -> bool {
        self.engines.iter().all(|engine| engine.in_flight() == 0)
            && self.flights.iter().all(Option::is_none)
    }

    fn forget(&mut self) -> Vec<Flight> {
        self.flights.iter_mut().filter_map(|flight| flight.take().map(|(_, it)| it)).collect()
    }

    fn drain(&mut self) -> Result<(), Error> {
        for engine in &mut self.engines {
            engine.wait(Some(Duration::ZERO), &mut |_, _| {})?;
            while engine.next().is_some() {}
        }
        Ok(())
    }

    fn oldest(&self) -> Time {
        self.flights.iter().flatten().map(|(_, it)| it.began).min().unwrap_or(Time::MAX)
    }

    fn requests(&self) -> u64 {
        self.requests
    }
}

impl Engines {
    fn ask(
        &mut self,
        engine: usize,
        asked: Asked,
        judge: &mut Judge,
        random: &mut Random,
    ) -> Result<(), Wrong> {
        let free = self.flights.iter().position(Option::is_none);
        let Some(place) = free else { return self.look(engine, true, judge) };
        self.tags += 1;
        let tag = place as u64 | self.tags << 16;
        let value = judge.value_for(asked.op);
        let flight = judge.begin(asked, value, self.oldest());
        match self.submit(engine, place, tag, asked, value, random)? {
            Ok(()) => {
                self.requests += 1;
                if let Some(place) = self.flights.get_mut(place) {
                    *place = Some((tag, flight));
                }
                Ok(())
            }
            Err(libc::EAGAIN) => {
                judge.never_began(&flight);
                self.look(engine, false, judge)
            }
            Err(errno) => judge.refused(&flight, errno, false),
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
            (self.engines.get_mut(engine), self.memory.get_mut(place))
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
    fn look(&mut self, engine: usize, wait: bool, judge: &mut Judge) -> Result<(), Wrong> {
        let Some(own) = self.engines.get_mut(engine) else { return Ok(()) };
        let looked = match wait {
            true => own.wait(Some(Duration::ZERO), &mut |_, _| {}),
            false => own.poll(),
        };
        match looked {
            // Nothing is lost: the next look goes on.
            Err(error) if judge.expects(&error) => {}
            looked => looked.map_err(broken)?,
        }
        while let Some(own) = self.engines.get_mut(engine)
            && let Some(completion) = own.next()
        {
            let place = (completion.tag & 0xffff) as usize;
            let flight = self.flights.get_mut(place).and_then(Option::take);
            let Some((_, flight)) = flight.filter(|(tag, _)| *tag == completion.tag) else {
                let io = completion.io;
                return Err(Wrong::new(format!("C41: {io:?} was given back, but not in flight")));
            };
            self.judge(engine, place, &flight, &completion, judge)?;
        }
        Ok(())
    }

    fn judge(
        &mut self,
        engine: usize,
        place: usize,
        flight: &Flight,
        completion: &Completion,
        judge: &mut Judge,
    ) -> Result<(), Wrong> {
        let count = match completion.result() {
            Ok(count) => count,
            Err(error) => return judge.failed(flight, error.errno()),
        };
        judge.done(flight, count)?;
        let Some(engine) = self.engines.get_mut(engine) else { return Ok(()) };
        let Asked { op, range, .. } = flight.asked;
        match (op, &completion.buf, self.memory.get(place)) {
            (Op::Status, ..) => judge.status(flight, engine.take_spans(completion.tag)),
            (Op::Read, Some(buf), _) => {
                let start = engine.start(range.pos);
                let bytes = buf.get(start..start + count as usize).unwrap_or_default();
                judge.found(range.pos, bytes, flight.began)
            }
            (Op::Read, None, Some(memory)) => {
                memory.gather(count, &mut self.scratch);
                // Where something went wrong a worker may have found more than it could answer for.
                if !judge.is_disturbed(flight) && !memory.is_untouched_beyond(count) {
                    let asked = flight.asked;
                    return Err(Wrong::new(format!("C18: {asked:?}: memory beyond {count} bytes")));
                }
                judge.found(range.pos, &self.scratch, flight.began)
            }
            _ => Ok(()),
        }
    }
}
