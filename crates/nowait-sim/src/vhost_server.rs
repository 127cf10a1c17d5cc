//! A server's threads, each with a queue of a virtual machine, which outlives the server's death.
//!
//! Invariant: what a server that has died still has in flight changes storage at most, or the data
//! of requests that are unanswered; the next server does these requests again.

use nowait::Error;
use nowait::sim::{Random, SimQueue};
use nowait_server::{SimChange, SimThread, SimVhostDevice, SimulatedVhost, die_after};

use crate::image::Image;
use crate::model::{Time, Violation};
use crate::oracle::{InFlight, Oracle};
use crate::scenario::{Action, Scenario};
use crate::system_under_test::{Health, SystemUnderTest, change_all, drain_all, run_iteration};
use crate::virtio_driver::Driver;

/// Steps that others can see, within which a server dies.
const STEPS: u64 = 12;

/// The threads of a server, and the driver that uses them.
pub struct VhostServer {
    /// Queue number n is on thread number n.
    threads: Vec<SimulatedVhost>,
    device: SimVhostDevice,
    driver: Driver,
    /// The server has died.
    is_dead: bool,
    /// The queues stop, or have stopped.
    pauses: bool,
    /// The guest has ended, too.
    ends_guest: bool,
    requests: u64,
}

/// Whether the device makes each change durable before it answers.
fn writes_through(scenario: &Scenario) -> bool {
    scenario.seed.is_multiple_of(5)
}

fn driver(scenario: &Scenario) -> Result<Driver, Error> {
    Driver::new(scenario.parts, writes_through(scenario), scenario.seed.is_multiple_of(2))
}

impl VhostServer {
    /// Starts a server's threads with the queues of the guest.
    fn start(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error> {
        self.device = SimVhostDevice::new(writes_through(scenario));
        self.threads.clear();
        self.start_queues(image, scenario, &[])
    }

    /// Starts the queues at the entries `bases`, where they have stopped.
    fn start_queues(
        &mut self,
        image: &Image,
        scenario: &Scenario,
        bases: &[Option<u16>],
    ) -> Result<(), Error> {
        for part in 0..scenario.parts as usize {
            let queue = SimQueue::new(image.device.clone())?;
            let (disk, workers) = (image.disk.clone(), image.workers.clone());
            let mut thread = SimulatedVhost::new(disk, workers, queue, scenario.config)?;
            if let Some(queue) = self.driver.ring(part) {
                let base = bases.get(part).copied().flatten();
                thread.start(self.driver.guest(), &self.device, queue, base)?;
            }
            self.threads.push(thread);
        }
        (self.is_dead, self.pauses) = (false, false);
        Ok(())
    }

    /// Like [`run_iteration`], of a server that is not dying: its device goes on.
    fn serve(
        &mut self,
        part: usize,
        waits: bool,
        oracle: &mut Oracle,
    ) -> Result<Health, Violation> {
        let health = run_iteration(&mut self.threads, part, waits, oracle)?;
        match self.device.is_broken() {
            true => Err(Violation::new("the guest is served no more".to_owned())),
            false => Ok(health),
        }
    }

    /// The server dies in the next iteration of a thread, or after it.
    fn die(
        &mut self,
        part: usize,
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<Health, Violation> {
        die_after(Some(random.below(STEPS) as u32));
        let health = run_iteration(&mut self.threads, part, random.below(2) == 0, oracle);
        die_after(None);
        self.device.kill();
        self.is_dead = true;
        self.driver.server_died()?;
        self.driver.in_flight().for_each(|flight| oracle.interrupted(flight));
        Ok(if health? == Health::Down { Health::Down } else { Health::Dead })
    }
}

impl SystemUnderTest for VhostServer {
    fn open(image: &Image, scenario: &Scenario) -> Result<Self, Error> {
        let mut server = Self {
            threads: Vec::new(),
            device: SimVhostDevice::new(false),
            driver: driver(scenario)?,
            is_dead: false,
            pauses: false,
            ends_guest: false,
            requests: 0,
        };
        server.start(image, scenario)?;
        Ok(server)
    }

    fn reopen(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error> {
        if std::mem::take(&mut self.ends_guest) {
            self.threads.clear();
            self.driver = driver(scenario)?;
        }
        self.start(image, scenario)
    }

    fn begin_pause(&mut self) -> bool {
        self.threads.iter_mut().for_each(SimulatedVhost::begin_pause);
        self.pauses = true;
        true
    }

    fn has_paused(&mut self) -> bool {
        self.threads.iter_mut().all(SimulatedVhost::has_paused)
    }

    fn resume(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error> {
        let threads = std::mem::take(&mut self.threads);
        let bases: Vec<_> = threads.iter().map(SimulatedVhost::stopped_at).collect();
        self.start_queues(image, scenario, &bases)
    }

    fn act(
        &mut self,
        action: Action,
        part: usize,
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<Health, Violation> {
        match action {
            Action::Ask(spec) => match self.driver.ask(part, spec, oracle, random)? {
                None => self.driver.receive(part, oracle)?,
                Some(kicks) => {
                    self.requests += 1;
                    self.threads.get_mut(part).filter(|_| kicks).map(SimulatedVhost::kick);
                }
            },
            Action::Receive => self.driver.receive(part, oracle)?,
            Action::Die => return self.die(part, oracle, random),
            Action::Change(change) => {
                change_all(&mut self.threads, change);
                oracle.changed(change);
            }
            Action::Wait => return self.serve(part, true, oracle),
            _ => return self.serve(part, false, oracle),
        }
        Ok(Health::Well)
    }

    fn settle(&mut self, oracle: &mut Oracle) -> Result<Health, Violation> {
        change_all(&mut self.threads, SimChange::LiftLimits);
        for part in 0..self.threads.len() {
            self.driver.receive(part, oracle)?;
            if self.serve(part, true, oracle)? == Health::Down {
                return Ok(Health::Down);
            }
        }
        Ok(Health::Well)
    }

    fn is_idle(&self) -> bool {
        (self.is_dead || self.driver.is_idle())
            && self.threads.iter().all(|thread| thread.in_flight() == 0)
    }

    fn forget(&mut self) -> Vec<InFlight> {
        self.device.kill();
        (self.is_dead, self.ends_guest) = (true, true);
        self.driver.in_flight().copied().collect()
    }

    fn drain(&mut self) -> Result<(), Error> {
        drain_all(&mut self.threads)
    }

    fn oldest(&self) -> Time {
        self.driver.oldest()
    }

    fn requests(&self) -> u64 {
        self.requests
    }
}
