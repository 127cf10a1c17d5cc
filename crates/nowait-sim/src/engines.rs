//! Engines on a simulated device, with callers that submit requests directly.
//!
//! Invariant: every request that an engine accepted completes once (C41), and its result is checked
//! by the oracle.
#![allow(unsafe_code)]

use std::time::Duration;

use nowait::sim::{Random, SimQueue};
use nowait::{BlockMap, Completion, Error, Op, Rejected, Request, SingleDisk};

use crate::guarded_memory::GuardedMemory;
use crate::image::Image;
use crate::model::{Time, Violation};
use crate::oracle::{InFlight, Oracle};
use crate::pattern;
use crate::pattern::Value;
use crate::scenario::{Action, RequestSpec, Scenario};
use crate::system_under_test::{Health, SystemUnderTest};

/// The limit of requests in flight of all engines together.
const SLOTS: usize = 48;

/// Several engines on one device, as one per thread.
pub struct Engines {
    engines: Vec<SingleDisk<SimQueue, dyn BlockMap>>,
    /// The requests in flight with their tags, indexed by slot.
    in_flight: Vec<Option<(u64, InFlight)>>,
    requests: u64,
    tags: u64,
    scratch: Vec<u8>,
    /// The last field: it is dropped after the engines.
    memory: Vec<GuardedMemory>,
}

fn broken(error: Error) -> Violation {
    Violation::new(format!("the engine itself fails: {error}"))
}

fn engines(
    image: &Image,
    scenario: &Scenario,
) -> Result<Vec<SingleDisk<SimQueue, dyn BlockMap>>, Error> {
    let engine = |_| {
        let queue = SimQueue::new(image.device.clone())?;
        SingleDisk::new(image.disk.clone(), image.workers.clone(), queue, scenario.config)
    };
    (0..scenario.parts).map(engine).collect()
}

impl SystemUnderTest for Engines {
    fn open(image: &Image, scenario: &Scenario) -> Result<Self, Error> {
        Ok(Self {
            engines: engines(image, scenario)?,
            in_flight: (0..SLOTS).map(|_| None).collect(),
            requests: 0,
            tags: 0,
            scratch: Vec::new(),
            memory: (0..SLOTS).map(|_| GuardedMemory::default()).collect(),
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
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<Health, Violation> {
        match action {
            Action::Ask(spec) => self.ask(part, spec, oracle, random)?,
            Action::Wait => self.poll(part, true, oracle)?,
            _ => self.poll(part, false, oracle)?,
        }
        Ok(Health::Well)
    }

    fn settle(&mut self, oracle: &mut Oracle) -> Result<Health, Violation> {
        for engine in 0..self.engines.len() {
            self.poll(engine, true, oracle)?;
        }
        match self.in_flight.iter().flatten().next() {
            Some((_, lost)) if self.engines.iter().all(|engine| engine.in_flight() == 0) => {
                Err(Violation::new(format!("C41: lost: {:?}", lost.spec)))
            }
            _ => Ok(Health::Well),
        }
    }

    fn is_idle(&self) -> bool {
        self.engines.iter().all(|engine| engine.in_flight() == 0)
            && self.in_flight.iter().all(Option::is_none)
    }

    fn forget(&mut self) -> Vec<InFlight> {
        self.in_flight.iter_mut().filter_map(|flight| flight.take().map(|(_, it)| it)).collect()
    }

    fn drain(&mut self) -> Result<(), Error> {
        for engine in &mut self.engines {
            engine.wait(Some(Duration::ZERO), &mut |_, _| {})?;
            while engine.next().is_some() {}
        }
        Ok(())
    }

    fn oldest(&self) -> Time {
        self.in_flight.iter().flatten().map(|(_, it)| it.began).min().unwrap_or(Time::MAX)
    }

    fn requests(&self) -> u64 {
        self.requests
    }
}

impl Engines {
    fn ask(
        &mut self,
        engine: usize,
        spec: RequestSpec,
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<(), Violation> {
        let free = self.in_flight.iter().position(Option::is_none);
        let Some(slot) = free else { return self.poll(engine, true, oracle) };
        self.tags += 1;
        let tag = slot as u64 | self.tags << 16;
        let value = oracle.value_for(spec.op);
        let flight = oracle.begin(spec, value, self.oldest());
        match self.submit(engine, slot, tag, spec, value, random)? {
            Ok(()) => {
                self.requests += 1;
                if let Some(slot) = self.in_flight.get_mut(slot) {
                    *slot = Some((tag, flight));
                }
                Ok(())
            }
            Err(libc::EAGAIN) => {
                oracle.never_began(&flight);
                self.poll(engine, false, oracle)
            }
            Err(errno) => oracle.refused(&flight, errno, false),
        }
    }

    /// Submits a request. The inner result is the engine's, with its errno.
    fn submit(
        &mut self,
        engine: usize,
        slot: usize,
        tag: u64,
        spec: RequestSpec,
        value: Value,
        random: &mut Random,
    ) -> Result<Result<(), i32>, Violation> {
        let RequestSpec { op, flags, range, segments } = spec;
        let io = Request { op, flags, range };
        let refused = |rejected: Rejected| rejected.error.errno();
        let (Some(engine), Some(memory)) =
            (self.engines.get_mut(engine), self.memory.get_mut(slot))
        else {
            return Err(Violation::new("there is no such engine".to_owned()));
        };
        if !matches!(op, Op::Read | Op::Write) {
            return Ok(engine.submit_no_data(io, tag).map_err(refused));
        }
        let align = engine.disk().alignment();
        let block = u64::from(align.offset);
        if segments > 0 && memory.cut(range.len, segments, block, align.memory, random) {
            if op == Op::Write {
                memory.fill(range.pos, value);
            }
            let segments = memory.segments();
            // SAFETY: the memory belongs to this request until it completes; it is dropped after
            // the engines, and a dropped simulated queue accesses no memory.
            return Ok(unsafe { engine.submit_user_memory(io, &segments, tag) }.map_err(refused));
        }
        let Some(mut buf) = engine.buffer(range) else { return Ok(Err(libc::EAGAIN)) };
        if op == Op::Write {
            pattern::fill(&mut buf, range.pos, value);
        }
        Ok(engine.submit(io, buf, tag).map_err(refused))
    }

    /// Polls an engine, or waits, and checks its completions.
    fn poll(&mut self, engine: usize, wait: bool, oracle: &mut Oracle) -> Result<(), Violation> {
        let Some(owned) = self.engines.get_mut(engine) else { return Ok(()) };
        let polled = match wait {
            true => owned.wait(Some(Duration::ZERO), &mut |_, _| {}),
            false => owned.poll(),
        };
        match polled {
            // No completion is lost: the next poll continues.
            Err(error) if oracle.expects(&error) => {}
            polled => polled.map_err(broken)?,
        }
        while let Some(owned) = self.engines.get_mut(engine)
            && let Some(completion) = owned.next()
        {
            let slot = (completion.tag & 0xffff) as usize;
            let flight = self.in_flight.get_mut(slot).and_then(Option::take);
            let Some((_, flight)) = flight.filter(|(tag, _)| *tag == completion.tag) else {
                let io = completion.io;
                return Err(Violation::new(format!(
                    "C41: {io:?} was given back, but not in flight"
                )));
            };
            self.check(engine, slot, &flight, &completion, oracle)?;
        }
        Ok(())
    }

    fn check(
        &mut self,
        engine: usize,
        slot: usize,
        flight: &InFlight,
        completion: &Completion,
        oracle: &mut Oracle,
    ) -> Result<(), Violation> {
        let count = match completion.result() {
            Ok(count) => count,
            Err(error) => return oracle.failed(flight, error.errno()),
        };
        oracle.done(flight, count)?;
        let Some(engine) = self.engines.get_mut(engine) else { return Ok(()) };
        let RequestSpec { op, range, .. } = flight.spec;
        match (op, &completion.buf, self.memory.get(slot)) {
            (Op::Status, ..) => oracle.status(flight, engine.take_extents(completion.tag)),
            (Op::Read, Some(buf), _) => {
                let bytes = buf.get(..count as usize).unwrap_or_default();
                oracle.found(range.pos, bytes, flight.began)
            }
            (Op::Read, None, Some(memory)) => {
                memory.gather(count, &mut self.scratch);
                // After a fault, a worker may have read more bytes than it could report.
                if !oracle.is_disturbed(flight) && !memory.is_untouched_beyond(count) {
                    let spec = flight.spec;
                    return Err(Violation::new(format!(
                        "C18: {spec:?}: memory beyond {count} bytes"
                    )));
                }
                oracle.found(range.pos, &self.scratch, flight.began)
            }
            _ => Ok(()),
        }
    }
}
