//! A server's threads, and clients that connect and disconnect.
//!
//! Invariant: the threads serve one export, or several ones, whose clients, devices and oracles have
//! nothing in common.

use std::collections::BTreeMap;

use nowait::sim::{Random, SimQueue};
use nowait::{Error, Operation};
use nowait_server::{SimChange, SimThread, Simulated};

use crate::clients::{Clients, RECEIVE_BYTES};
use crate::image::Image;
use crate::model::{Time, Violation};
use crate::neighbours::Neighbour;
use crate::oracle::{InFlight, Oracle};
use crate::scenario::{Action, ExportsChange, Scenario};
use crate::system_under_test::{Health, SystemUnderTest, change_all, drain_all};

/// An action of an operator on one of several exports, by its number: 0 is the first one.
#[derive(Clone, Copy)]
enum Changing {
    Nothing,
    /// Its requests in flight end.
    Pausing(usize),
    /// It is paused, and the requests of the others have to be answered.
    Paused,
    /// The clients of a neighbour have left; it is paused then, or not.
    Leaving(usize, bool),
    /// A neighbour is removed.
    Removing(usize),
}

/// The threads of a server and its clients.
pub struct Server {
    threads: Vec<Simulated>,
    /// Clients of the first export.
    clients: Clients,
    neighbours: Vec<Neighbour>,
    /// Connections are between two threads.
    pauses: bool,
    /// The export that is paused while the others go on.
    paused: Option<usize>,
    changing: Changing,
    /// A thread may be flushing the first export by itself.
    flushes: bool,
    /// Neighbours are removed; their ids change then.
    removes: bool,
}

fn threads(
    image: &Image,
    scenario: &Scenario,
    neighbours: &[Neighbour],
) -> Result<Vec<Simulated>, Error> {
    let thread = |_| {
        let queue = SimQueue::new(image.device.clone())?;
        Simulated::new(image.disk.clone(), image.workers.clone(), queue, scenario.config)
    };
    let mut threads = (0..scenario.parts).map(thread).collect::<Result<Vec<_>, _>>()?;
    let added = neighbours.iter().try_for_each(|neighbour| neighbour.add_to(&mut threads));
    added.map_err(|_| Error::new(libc::EEXIST, Operation::SetUp))?;
    Ok(threads)
}

fn broken(error: impl std::fmt::Display) -> Violation {
    Violation::new(format!("an export cannot be added: {error}"))
}

impl SystemUnderTest for Server {
    fn open(image: &Image, scenario: &Scenario) -> Result<Self, Error> {
        let neighbours = (1..=scenario.neighbours).map(|n| Neighbour::open(scenario, n));
        let neighbours = neighbours.collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            threads: threads(image, scenario, &neighbours)?,
            clients: Clients::new(""),
            neighbours,
            pauses: false,
            paused: None,
            changing: Changing::Nothing,
            flushes: false,
            removes: !scenario.has_pauses(),
        })
    }

    fn reopen(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error> {
        self.clients.clear();
        (self.pauses, self.paused, self.flushes) = (false, None, false);
        self.changing = Changing::Nothing;
        for neighbour in &mut self.neighbours {
            neighbour.clients.clear();
            neighbour.keeps_writes = true;
            neighbour.reopen()?;
        }
        self.threads = threads(image, scenario, &self.neighbours)?;
        Ok(())
    }

    fn begin_pause(&mut self) -> bool {
        self.threads.iter_mut().for_each(Simulated::begin_pause);
        self.pauses = true;
        true
    }

    fn has_paused(&mut self) -> bool {
        self.threads.iter().all(Simulated::has_paused)
    }

    fn resume(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error> {
        let mut next = threads(image, scenario, &self.neighbours)?;
        let mut owners = BTreeMap::new();
        for (part, thread) in self.threads.iter_mut().enumerate() {
            for parked in thread.take_parked() {
                let before = (part, parked.name());
                let to = owners.len() % next.len();
                if let Some(name) = next.get_mut(to).and_then(|thread| thread.adopt(parked)) {
                    owners.insert(before, (to, name));
                }
            }
        }
        // A connection that was closed is on no thread.
        let owner = |before: (usize, u64)| owners.get(&before).copied().unwrap_or((usize::MAX, 0));
        self.clients.change_owners(owner);
        self.neighbours.iter_mut().for_each(|it| it.clients.change_owners(owner));
        (self.threads, self.pauses, self.paused) = (next, false, None);
        Ok(())
    }

    fn begin_change(&mut self, change: ExportsChange, random: &mut Random) -> bool {
        let count = self.neighbours.len() as u64;
        let place = random.below(count) as usize;
        match change {
            _ if count == 0 => return false,
            ExportsChange::Pause if self.paused.is_some() => {
                self.resume_paused();
                return false;
            }
            ExportsChange::Pause => {
                self.begin_pause_of(random.below(1 + count) as usize);
            }
            ExportsChange::Idle | ExportsChange::Remove if self.paused == Some(place + 1) => {
                return false;
            }
            ExportsChange::Remove if self.removes => self.begin_removal(place),
            ExportsChange::Idle | ExportsChange::Remove => {
                self.neighbours.get_mut(place).into_iter().for_each(|it| it.clients.leave());
                self.changing = Changing::Leaving(place, random.below(2) == 0);
            }
        }
        true
    }

    fn has_changed(&mut self) -> Result<bool, Violation> {
        let is_over = match self.changing {
            Changing::Nothing => true,
            Changing::Pausing(export) => {
                if self.has_drained(export)? {
                    self.changing = Changing::Paused;
                }
                false
            }
            Changing::Paused => {
                let first = self.paused == Some(0) || self.clients.is_idle();
                let others = self.neighbours.iter().zip(1..);
                let mut others = others.filter(|(_, export)| self.paused != Some(*export));
                first && others.all(|(neighbour, _)| neighbour.clients.is_idle())
            }
            Changing::Leaving(place, pauses) if self.have_left(place) => {
                self.threads.iter_mut().for_each(Simulated::pass_idle_time);
                self.flushes = true;
                let pauses = pauses && self.paused.is_none();
                if pauses {
                    // With its flush in flight.
                    self.begin_pause_of(place + 1);
                }
                !pauses
            }
            Changing::Leaving(..) => false,
            Changing::Removing(place) => self.is_removed(place) && self.add_again(place)?,
        };
        if is_over {
            self.changing = Changing::Nothing;
        }
        Ok(is_over)
    }

    fn settle_others(&mut self, oracle: &mut Oracle) -> Result<Health, Violation> {
        change_all(&mut self.threads, SimChange::LiftLimits);
        if self.paused != Some(0) {
            self.clients.exchange(oracle)?;
        }
        for (neighbour, export) in self.neighbours.iter_mut().zip(1..) {
            if self.paused != Some(export) {
                let exchanged = neighbour.clients.exchange(&mut neighbour.oracle);
                exchanged.map_err(|wrong| neighbour.wrong(&wrong))?;
            }
        }
        for part in 0..self.threads.len() {
            if self.run_iteration(part, true, oracle)? == Health::Down {
                return Ok(Health::Down);
            }
        }
        Ok(Health::Well)
    }

    fn cut_power(&mut self) {
        self.neighbours.iter_mut().for_each(Neighbour::cut_power);
    }

    fn power_on(&mut self) -> Result<(), Violation> {
        self.neighbours.iter_mut().try_for_each(Neighbour::power_on)
    }

    fn check(&mut self) -> Result<(), Violation> {
        self.neighbours.iter_mut().try_for_each(Neighbour::check)
    }

    fn act(
        &mut self,
        action: Action,
        part: usize,
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<Health, Violation> {
        let first = random.below(self.clients.count() as u64) as usize;
        match action {
            Action::Change(change) => {
                change_all(&mut self.threads, change);
                oracle.changed(change);
                return Ok(Health::Well);
            }
            Action::Wait => return self.run_iteration(part, true, oracle),
            Action::Ask(_)
            | Action::Connect
            | Action::Send
            | Action::Receive
            | Action::Leave(_) => {}
            _ => return self.run_iteration(part, false, oracle),
        }
        match self.draw_neighbour(random) {
            Some(place) => self.act_beside(place, action, part, random)?,
            None => {
                let threads = &mut self.threads;
                let client = (&mut self.clients, first);
                act_as_client(client, action, (threads, part), oracle, random)?;
            }
        }
        Ok(Health::Well)
    }

    fn settle(&mut self, oracle: &mut Oracle) -> Result<Health, Violation> {
        self.resume_paused();
        self.settle_others(oracle)
    }

    fn is_idle(&self) -> bool {
        self.clients.is_idle()
            && self.neighbours.iter().all(|it| it.clients.is_idle())
            && self.threads.iter().all(|thread| thread.in_flight() == 0)
    }

    fn forget(&mut self) -> Vec<InFlight> {
        for Neighbour { clients, oracle, .. } in &mut self.neighbours {
            clients.forget().iter().for_each(|flight| oracle.unanswered(flight));
        }
        self.clients.forget()
    }

    fn drain(&mut self) -> Result<(), Error> {
        drain_all(&mut self.threads)
    }

    fn oldest(&self) -> Time {
        self.clients.oldest()
    }

    fn requests(&self) -> u64 {
        self.clients.requests + self.neighbours.iter().map(|it| it.clients.requests).sum::<u64>()
    }
}

/// Executes an action of a client of an export, or connects one.
fn act_as_client(
    (clients, client_index): (&mut Clients, usize),
    action: Action,
    (threads, part): (&mut [Simulated], usize),
    oracle: &mut Oracle,
    random: &mut Random,
) -> Result<(), Violation> {
    match action {
        Action::Ask(spec) => clients.ask(client_index, (threads, part), spec, oracle, random)?,
        Action::Connect => clients.connect(threads, part, random)?,
        Action::Send => clients.send(client_index, random.below(4000) as usize, oracle),
        Action::Receive => {
            let limit = 1 << random.below(1 + u64::from(RECEIVE_BYTES.ilog2()));
            clients.receive(client_index, limit, oracle)?;
        }
        Action::Leave(how) => clients.disconnect(client_index, how),
        _ => {}
    }
    Ok(())
}

impl Server {
    fn run_iteration(
        &mut self,
        part: usize,
        waits: bool,
        oracle: &mut Oracle,
    ) -> Result<Health, Violation> {
        let Some(thread) = self.threads.get_mut(part) else { return Ok(Health::Well) };
        if Health::after_iteration(thread.run_once(waits), oracle)? == Health::Down {
            return Ok(Health::Down);
        }
        if let Some((name, own, engine)) = thread.miscounted() {
            let what = format!("{name:?}: {own} requests are in flight, {engine} in the engine");
            return Err(Violation::new(what));
        }
        self.neighbours.iter().try_for_each(Neighbour::violations)?;
        if self.flushes {
            oracle.flushed_by_server();
            self.flushes = self.threads.iter().any(|thread| thread.in_flight() > 0);
        }
        if self.pauses {
            return Ok(Health::Well);
        }
        if self.paused != Some(0) {
            self.clients.end_orphans(&self.threads, oracle);
        }
        for (Neighbour { clients, oracle, .. }, export) in self.neighbours.iter_mut().zip(1..) {
            if self.paused != Some(export) {
                clients.end_orphans(&self.threads, oracle);
            }
        }
        Ok(Health::Well)
    }

    /// The neighbour whose clients act; the first export has half of the load.
    fn draw_neighbour(&mut self, random: &mut Random) -> Option<usize> {
        let count = self.neighbours.len();
        if count == 0 {
            return None;
        }
        self.neighbours.iter().for_each(|neighbour| neighbour.reseed(random));
        Some(random.below(2 * count as u64) as usize).filter(|&place| place < count)
    }

    fn act_beside(
        &mut self,
        place: usize,
        action: Action,
        part: usize,
        random: &mut Random,
    ) -> Result<(), Violation> {
        let Some(neighbour) = self.neighbours.get_mut(place) else { return Ok(()) };
        let Neighbour { scenario, clients, oracle, .. } = neighbour;
        let action = match action {
            Action::Ask(_) => Action::Ask(scenario.request(random)),
            action => action,
        };
        let index = random.below(clients.count() as u64) as usize;
        act_as_client((clients, index), action, (&mut self.threads, part), oracle, random)
            .map_err(|wrong| neighbour.wrong(&wrong))
    }

    /// The name of export number `export`.
    fn name(&self, export: usize) -> &str {
        let neighbour = export.checked_sub(1).and_then(|place| self.neighbours.get(place));
        neighbour.map_or("", |neighbour| &neighbour.name)
    }

    /// Whether the pause of one export has begun.
    ///
    /// # Errors
    /// It has begun with a request in flight.
    fn has_drained(&self, export: usize) -> Result<bool, Violation> {
        let name = self.name(export);
        for thread in self.threads.iter().filter(|thread| thread.has_paused_of(name)) {
            let count = thread.draining(name);
            if count > 0 {
                let what = format!("{name:?} is paused with {count} requests in flight");
                return Err(Violation::new(what));
            }
        }
        Ok(self.threads.iter().all(|thread| thread.has_paused_of(name)))
    }

    fn resume_paused(&mut self) {
        let Some(export) = self.paused.take() else { return };
        let name = self.name(export).to_owned();
        self.threads.iter_mut().for_each(|thread| thread.resume_of(&name));
    }

    /// Whether the server has left all clients of a neighbour.
    fn have_left(&self, place: usize) -> bool {
        self.neighbours.get(place).is_none_or(|it| {
            let used = self.threads.iter().any(|thread| thread.members_of(&it.name) > 0);
            it.clients.has_no_orphans() && !used
        })
    }

    fn begin_pause_of(&mut self, export: usize) {
        let name = self.name(export).to_owned();
        self.threads.iter_mut().for_each(|thread| thread.begin_pause_of(&name));
        self.neighbours.iter_mut().for_each(|neighbour| neighbour.keeps_writes = true);
        self.paused = Some(export);
        self.changing = Changing::Pausing(export);
    }

    fn begin_removal(&mut self, place: usize) {
        let Some(neighbour) = self.neighbours.get_mut(place) else { return };
        neighbour.clients.leave();
        for thread in &mut self.threads {
            // It is there.
            let _ = thread.remove_export(&neighbour.name);
        }
        self.changing = Changing::Removing(place);
    }

    fn is_removed(&self, place: usize) -> bool {
        let Some(neighbour) = self.neighbours.get(place) else { return true };
        let is_there = self.threads.iter().any(|thread| thread.has_export(&neighbour.name));
        neighbour.clients.has_no_orphans() && !is_there
    }

    fn add_again(&mut self, place: usize) -> Result<bool, Violation> {
        let Some(neighbour) = self.neighbours.get_mut(place) else { return Ok(true) };
        neighbour.removed()?;
        neighbour.reopen().map_err(broken)?;
        neighbour.add_to(&mut self.threads).map_err(broken)?;
        Ok(true)
    }
}
