//! A server's threads, and clients that connect and disconnect.
//!
//! Invariant: a request of a disconnected client may still be executed until the server has closed
//! its connection.

use std::collections::BTreeMap;

use nowait::Error;
use nowait::sim::{Random, SimQueue, connection};
use nowait_server::{SimChange, Simulated};

use crate::client::Client;
use crate::image::Image;
use crate::model::{Time, Violation};
use crate::oracle::{InFlight, Oracle};
use crate::scenario::{Action, DisconnectKind, RequestSpec, Scenario};
use crate::system_under_test::{Health, SystemUnderTest};

/// The limit of connected clients.
const CLIENTS: usize = 6;
/// The largest number of bytes that one receive takes.
const RECEIVE_BYTES: usize = 256 << 10;
/// The buffer size of most sockets in bytes.
const ROOM_BYTES: usize = 208 << 10;
/// The buffer size of some sockets in bytes: less than a long reply.
const NARROW_BYTES: usize = 4096;

/// The threads of a server and its clients.
pub struct Server {
    threads: Vec<Simulated>,
    clients: Vec<Client>,
    /// Requests of disconnected clients, with the thread and the id of their connection.
    orphans: Vec<((usize, u64), InFlight)>,
    /// Connections are between two threads.
    pauses: bool,
    requests: u64,
    scratch: Vec<u8>,
}

fn threads(image: &Image, scenario: &Scenario) -> Result<Vec<Simulated>, Error> {
    let thread = |_| {
        let queue = SimQueue::new(image.device.clone())?;
        Simulated::new(image.disk.clone(), image.workers.clone(), queue, scenario.config)
    };
    (0..scenario.parts).map(thread).collect()
}

fn broken(error: Error) -> Violation {
    Violation::new(format!("no socket: {error}"))
}

impl SystemUnderTest for Server {
    fn open(image: &Image, scenario: &Scenario) -> Result<Self, Error> {
        Ok(Self {
            threads: threads(image, scenario)?,
            clients: Vec::new(),
            orphans: Vec::new(),
            pauses: false,
            requests: 0,
            scratch: vec![0; RECEIVE_BYTES],
        })
    }

    fn reopen(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error> {
        self.clients.clear();
        self.pauses = false;
        self.threads = threads(image, scenario)?;
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
        let mut next = threads(image, scenario)?;
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
        self.clients.iter_mut().for_each(|client| client.owner = owner(client.owner));
        self.orphans.iter_mut().for_each(|(before, _)| *before = owner(*before));
        (self.threads, self.pauses) = (next, false);
        Ok(())
    }

    fn act(
        &mut self,
        action: Action,
        part: usize,
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<Health, Violation> {
        let client_index = random.below(self.clients.len() as u64) as usize;
        match action {
            Action::Ask(spec) => self.ask(client_index, part, spec, oracle, random)?,
            Action::Connect => self.connect(part, random)?,
            Action::Send => self.send(client_index, random.below(4000) as usize, oracle),
            Action::Receive => {
                let limit = 1 << random.below(1 + u64::from(RECEIVE_BYTES.ilog2()));
                self.receive(client_index, limit, oracle)?;
            }
            Action::Leave(how) => self.disconnect(client_index, how),
            Action::Change(change) => {
                self.threads.iter_mut().for_each(|thread| thread.change(change));
                oracle.changed(change);
            }
            Action::Wait => return self.run_iteration(part, true, oracle),
            _ => return self.run_iteration(part, false, oracle),
        }
        Ok(Health::Well)
    }

    fn settle(&mut self, oracle: &mut Oracle) -> Result<Health, Violation> {
        self.threads.iter_mut().for_each(|thread| thread.change(SimChange::LiftLimits));
        for client_index in (0..self.clients.len()).rev() {
            self.send(client_index, usize::MAX, oracle);
            self.receive(client_index, RECEIVE_BYTES, oracle)?;
        }
        for part in 0..self.threads.len() {
            if self.run_iteration(part, true, oracle)? == Health::Down {
                return Ok(Health::Down);
            }
        }
        Ok(Health::Well)
    }

    fn is_idle(&self) -> bool {
        self.clients.iter().all(Client::is_idle)
            && self.orphans.is_empty()
            && self.threads.iter().all(|thread| thread.in_flight() == 0)
    }

    fn forget(&mut self) -> Vec<InFlight> {
        let left =
            self.clients.iter_mut().flat_map(|client| client.disconnect(DisconnectKind::Abrupt));
        let orphans = self.orphans.drain(..).map(|(_, flight)| flight);
        let all = left.chain(orphans).collect();
        self.clients.clear();
        all
    }

    fn drain(&mut self) -> Result<(), Error> {
        self.threads.iter_mut().for_each(|thread| thread.change(SimChange::LiftLimits));
        self.threads.iter_mut().try_for_each(|thread| thread.run_once(true))
    }

    fn oldest(&self) -> Time {
        self.clients.iter().map(Client::oldest).min().unwrap_or(Time::MAX)
    }

    fn requests(&self) -> u64 {
        self.requests
    }
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
        if self.pauses {
            return Ok(Health::Well);
        }
        let threads = &self.threads;
        self.orphans.retain(|((part, id), flight)| {
            let served = threads.get(*part).is_some_and(|thread| thread.serves(*id));
            if !served {
                oracle.unanswered(flight);
            }
            served
        });
        Ok(Health::Well)
    }

    fn connect(&mut self, part: usize, random: &mut Random) -> Result<(), Violation> {
        let Some(thread) = self.threads.get_mut(part) else { return Ok(()) };
        if self.clients.len() >= CLIENTS {
            return Ok(());
        }
        let mut buffer_bytes = || if random.below(3) == 0 { NARROW_BYTES } else { ROOM_BYTES };
        let (server_end, client_end) =
            connection(buffer_bytes(), buffer_bytes()).map_err(broken)?;
        let Some(id) = thread.connect(server_end) else {
            return Err(Violation::new("a client was turned away".to_owned()));
        };
        self.clients.push(Client::new(client_end, (part, id), random));
        Ok(())
    }

    fn ask(
        &mut self,
        client_index: usize,
        part: usize,
        spec: RequestSpec,
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<(), Violation> {
        let Some(client) = self.clients.get_mut(client_index) else {
            return self.connect(part, random);
        };
        if !client.may_ask() {
            return self.receive(client_index, RECEIVE_BYTES, oracle);
        }
        client.ask(spec, oracle, random);
        let limit = match random.below(4) {
            0 => random.below(1 + client.unsent() as u64) as usize,
            _ => usize::MAX,
        };
        self.send(client_index, limit, oracle);
        Ok(())
    }

    fn send(&mut self, client_index: usize, limit: usize, oracle: &mut Oracle) {
        let oldest = self.oldest();
        if let Some(client) = self.clients.get_mut(client_index) {
            self.requests += client.send(limit, oracle, oldest);
        }
    }

    fn receive(
        &mut self,
        client_index: usize,
        limit: usize,
        oracle: &mut Oracle,
    ) -> Result<(), Violation> {
        let Some(client) = self.clients.get_mut(client_index) else { return Ok(()) };
        let scratch = self.scratch.get_mut(..limit).unwrap_or_default();
        client.receive(scratch, oracle)?;
        if client.is_over() {
            let owner = client.owner;
            self.orphans.extend(client.take_unanswered().into_iter().map(|flight| (owner, flight)));
            self.clients.swap_remove(client_index);
        }
        Ok(())
    }

    fn disconnect(&mut self, client_index: usize, how: DisconnectKind) {
        let Some(client) = self.clients.get_mut(client_index) else { return };
        let (owner, left) = (client.owner, client.disconnect(how));
        self.orphans.extend(left.into_iter().map(|flight| (owner, flight)));
        if client.is_over() {
            self.clients.swap_remove(client_index);
        }
    }
}
