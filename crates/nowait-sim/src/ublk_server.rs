//! A server's threads, each with a queue of a local block device, which outlives the
//! server's death: the simulated driver gives a request that was not answered to the next server
//! (`UBLK_F_USER_RECOVERY_REISSUE`).
//!
//! Invariant: a request is with one server at a time, and answered once.

use std::collections::VecDeque;

use nowait::sim::{Random, SimQueue};
use nowait::{Error, Flags, Op};
use nowait_server::{SimChange, SimThread, SimUblkRequest, SimulatedUblk};

use crate::image::Image;
use crate::model::{Time, Violation};
use crate::oracle::{InFlight, Oracle};
use crate::pattern;
use crate::scenario::{Action, MAX_REQUEST_BYTES, RequestSpec, Scenario};
use crate::system_under_test::{Health, SystemUnderTest, change_all, drain_all, run_iteration};

/// Requests of a queue that a server has at the same time.
const DEPTH: u16 = 4;
/// The limit of requests of a queue.
const REQUESTS: usize = 12;

/// A request of the block layer.
struct Asked {
    flight: InFlight,
    /// The data of a write.
    data: Vec<u8>,
}

/// A queue of the block layer.
#[derive(Default)]
struct BlockQueue {
    /// Requests that no server has.
    waiting: VecDeque<Asked>,
    /// By tag, those that a server has.
    with_server: [Option<Asked>; DEPTH as usize],
}

impl BlockQueue {
    fn all(&self) -> impl Iterator<Item = &Asked> {
        self.waiting.iter().chain(self.with_server.iter().flatten())
    }

    /// Gives requests to a server, as many as it takes.
    fn dispatch(&mut self, thread: &mut SimulatedUblk) {
        for (tag, place) in (0..DEPTH).zip(&mut self.with_server) {
            if place.is_some() || !thread.is_free(tag) {
                continue;
            }
            let Some(asked) = self.waiting.pop_front() else { return };
            let RequestSpec { op, flags, range, .. } = asked.flight.spec;
            let request = SimUblkRequest {
                op,
                fua: flags.contains(Flags::DSYNC),
                no_unmap: flags.contains(Flags::NO_UNMAP),
                pos: range.pos,
                len: range.len,
            };
            thread.give(tag, request, &asked.data);
            *place = Some(asked);
        }
    }

    /// Takes the answers of a server.
    fn receive(
        &mut self,
        thread: &mut SimulatedUblk,
        oracle: &mut Oracle,
    ) -> Result<(), Violation> {
        for (tag, result) in thread.take() {
            let asked = self.with_server.get_mut(usize::from(tag)).and_then(Option::take);
            let Some(asked) = asked else {
                return Err(Violation::new(format!("C41: tag {tag} has no request to answer")));
            };
            let RequestSpec { op, range, .. } = asked.flight.spec;
            let data =
                if op == Op::Read { thread.data(tag, range.len as usize) } else { Vec::new() };
            check(&asked.flight, result, &data, oracle)?;
        }
        Ok(())
    }

    /// The server has died: the next one gets what it had.
    fn reissue(&mut self) {
        for asked in self.with_server.iter_mut().rev().filter_map(Option::take) {
            self.waiting.push_front(asked);
        }
    }
}

/// Checks the result of a request.
fn check(
    flight: &InFlight,
    result: i32,
    data: &[u8],
    oracle: &mut Oracle,
) -> Result<(), Violation> {
    let RequestSpec { op, range, .. } = flight.spec;
    let outside = op != Op::Flush && flight.inside.len < range.len;
    let moved = if matches!(op, Op::Read | Op::Write) { range.len as i32 } else { 0 };
    match -result {
        errno if errno > 0 && outside => oracle.refused(flight, errno, true),
        // The next server has opened a device that has shrunk.
        libc::EINVAL if oracle.is_behind_the_end(flight) => oracle.failed(flight, libc::EIO),
        libc::EINVAL => oracle.invalid(flight),
        libc::EPERM => oracle.not_permitted(flight, true),
        errno if errno > 0 => oracle.failed(flight, errno),
        _ if result != moved || outside => {
            Err(Violation::new(format!("{:?} has the result {result}", flight.spec)))
        }
        _ => {
            oracle.done(flight, if op == Op::Flush { 0 } else { range.len })?;
            if op == Op::Read { oracle.found(range.pos, data, flight.began) } else { Ok(()) }
        }
    }
}

/// The threads of a server, and the queues of the device that they serve.
pub struct UblkServer {
    /// Queue number n is on thread number n.
    threads: Vec<SimulatedUblk>,
    queues: Vec<BlockQueue>,
    /// The server has died.
    is_dead: bool,
    /// The driver keeps requests back.
    pauses: bool,
    requests: u64,
}

fn threads(image: &Image, scenario: &Scenario) -> Result<Vec<SimulatedUblk>, Error> {
    let thread = |_| {
        let queue = SimQueue::new(image.device.clone())?;
        let (disk, workers) = (image.disk.clone(), image.workers.clone());
        let size = (DEPTH, MAX_REQUEST_BYTES as u32);
        SimulatedUblk::new(disk, workers, queue, scenario.config, size)
    };
    (0..scenario.parts).map(thread).collect()
}

impl UblkServer {
    fn in_flight(&self) -> impl Iterator<Item = &InFlight> {
        self.queues.iter().flat_map(BlockQueue::all).map(|asked| &asked.flight)
    }

    fn ask(
        &mut self,
        part: usize,
        spec: RequestSpec,
        oracle: &mut Oracle,
    ) -> Result<(), Violation> {
        let oldest = self.oldest();
        let Some(queue) = self.queues.get_mut(part) else { return Ok(()) };
        if queue.all().count() >= REQUESTS {
            return self.exchange(part, oracle);
        }
        let op = if spec.op == Op::Status { Op::Read } else { spec.op };
        let mut flags = Flags::NONE;
        for (flag, fits) in [(Flags::DSYNC, op.changes()), (Flags::NO_UNMAP, op == Op::Zero)] {
            if fits && spec.flags.contains(flag) {
                flags |= flag;
            }
        }
        let spec = RequestSpec { op, flags, ..spec };
        let value = oracle.value_for(op);
        let mut data = Vec::new();
        if op == Op::Write {
            data.resize(spec.range.len as usize, 0);
            pattern::fill(&mut data, spec.range.pos, value);
        }
        let flight = oracle.begin(spec, value, oldest);
        queue.waiting.push_back(Asked { flight, data });
        self.requests += 1;
        self.exchange(part, oracle)
    }

    /// The driver takes a server's answers, and gives it requests.
    fn exchange(&mut self, part: usize, oracle: &mut Oracle) -> Result<(), Violation> {
        let parts = self.queues.get_mut(part).zip(self.threads.get_mut(part));
        let Some((queue, thread)) = parts else { return Ok(()) };
        queue.receive(thread, oracle)?;
        if self.pauses {
            thread.abort_idle();
        } else {
            queue.dispatch(thread);
        }
        Ok(())
    }

    /// The server dies after an iteration of a thread; what it has submitted is answered.
    fn die(
        &mut self,
        part: usize,
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<Health, Violation> {
        let health = run_iteration(&mut self.threads, part, random.below(2) == 0, oracle)?;
        for (queue, thread) in self.queues.iter_mut().zip(&mut self.threads) {
            thread.die(random.below(4) as usize);
            queue.receive(thread, oracle)?;
            queue.reissue();
        }
        self.is_dead = true;
        self.in_flight().for_each(|flight| oracle.interrupted(flight));
        Ok(if health == Health::Down { health } else { Health::Dead })
    }
}

impl SystemUnderTest for UblkServer {
    fn open(image: &Image, scenario: &Scenario) -> Result<Self, Error> {
        let queues = (0..scenario.parts).map(|_| BlockQueue::default()).collect();
        Ok(Self {
            threads: threads(image, scenario)?,
            queues,
            is_dead: false,
            pauses: false,
            requests: 0,
        })
    }

    fn reopen(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error> {
        self.threads = threads(image, scenario)?;
        (self.is_dead, self.pauses) = (false, false);
        Ok(())
    }

    fn begin_pause(&mut self) -> bool {
        self.threads.iter_mut().for_each(SimulatedUblk::begin_pause);
        self.pauses = true;
        true
    }

    fn has_paused(&mut self) -> bool {
        self.threads.iter().all(SimulatedUblk::has_paused)
    }

    fn act(
        &mut self,
        action: Action,
        part: usize,
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<Health, Violation> {
        match action {
            Action::Ask(spec) => self.ask(part, spec, oracle)?,
            Action::Receive => self.exchange(part, oracle)?,
            Action::Die => return self.die(part, oracle, random),
            Action::Change(change) => {
                change_all(&mut self.threads, change);
                oracle.changed(change);
            }
            Action::Wait => {
                if self.pauses {
                    self.exchange(part, oracle)?;
                }
                return run_iteration(&mut self.threads, part, true, oracle);
            }
            _ => return run_iteration(&mut self.threads, part, false, oracle),
        }
        Ok(Health::Well)
    }

    fn settle(&mut self, oracle: &mut Oracle) -> Result<Health, Violation> {
        change_all(&mut self.threads, SimChange::LiftLimits);
        for part in 0..self.threads.len() {
            self.exchange(part, oracle)?;
            if run_iteration(&mut self.threads, part, true, oracle)? == Health::Down {
                return Ok(Health::Down);
            }
        }
        Ok(Health::Well)
    }

    fn is_idle(&self) -> bool {
        (self.is_dead || self.in_flight().next().is_none())
            && self.threads.iter().all(|thread| thread.in_flight() == 0)
    }

    fn forget(&mut self) -> Vec<InFlight> {
        self.threads.iter_mut().for_each(|thread| thread.die(0));
        self.is_dead = true;
        let all = self.in_flight().copied().collect();
        self.queues.iter_mut().for_each(|queue| *queue = BlockQueue::default());
        all
    }

    fn drain(&mut self) -> Result<(), Error> {
        drain_all(&mut self.threads)
    }

    fn oldest(&self) -> Time {
        self.in_flight().map(|flight| flight.began).min().unwrap_or(Time::MAX)
    }

    fn requests(&self) -> u64 {
        self.requests
    }
}
