//! A server's threads, and clients that come and go.
//!
//! Invariant: what a client has asked that is gone may still be done, until the server has closed
//! its connection.
//! Knows: model, scenario, judge, front, client. Known by: run.

use nowait::Error;
use nowait::sim::{Random, Sim, connection};
use nowait_server::Simulated;

use crate::client::Client;
use crate::front::{Front, Health};
use crate::image::{AnyMap, Image};
use crate::judge::{Flight, Judge};
use crate::model::{Time, Wrong};
use crate::scenario::{Action, Asked, Leaving, Scenario};

/// Clients at once.
const CLIENTS: usize = 6;
/// Bytes that are received at once at most.
const RECEIVE_BYTES: usize = 256 << 10;
/// Bytes that most sockets hold.
const ROOM_BYTES: usize = 208 << 10;
/// Bytes that some sockets hold: less than a long reply has.
const NARROW_BYTES: usize = 4096;

/// Threads of a server.
pub struct Server {
    threads: Vec<Simulated<AnyMap>>,
    clients: Vec<Client>,
    /// Requests of clients that are gone, with where they were served.
    orphans: Vec<((usize, u64), Flight)>,
    requests: u64,
    scratch: Vec<u8>,
}

fn threads(image: &Image, scenario: &Scenario) -> Result<Vec<Simulated<AnyMap>>, Error> {
    let thread = |_| {
        let queue = Sim::new(image.device.clone())?;
        Simulated::new(image.disk.clone(), image.workers.clone(), queue, scenario.config)
    };
    (0..scenario.parts).map(thread).collect()
}

fn broken(error: Error) -> Wrong {
    Wrong::new(format!("no socket: {error}"))
}

impl Front for Server {
    fn open(image: &Image, scenario: &Scenario) -> Result<Self, Error> {
        Ok(Self {
            threads: threads(image, scenario)?,
            clients: Vec::new(),
            orphans: Vec::new(),
            requests: 0,
            scratch: vec![0; RECEIVE_BYTES],
        })
    }

    fn reopen(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error> {
        self.clients.clear();
        self.threads = threads(image, scenario)?;
        Ok(())
    }

    fn act(
        &mut self,
        action: Action,
        part: usize,
        judge: &mut Judge,
        random: &mut Random,
    ) -> Result<Health, Wrong> {
        let who = random.below(self.clients.len() as u64) as usize;
        match action {
            Action::Ask(asked) => self.ask(who, part, asked, judge, random)?,
            Action::Connect => self.connect(part, random)?,
            Action::Send => self.send(who, random.below(4000) as usize, judge),
            Action::Receive => {
                let most = 1 << random.below(1 + u64::from(RECEIVE_BYTES.ilog2()));
                self.receive(who, most, judge)?;
            }
            Action::Leave(how) => self.leave(who, how),
            Action::Wait => return self.turn(part, true, judge),
            _ => return self.turn(part, false, judge),
        }
        Ok(Health::Well)
    }

    fn settle(&mut self, judge: &mut Judge) -> Result<Health, Wrong> {
        for who in (0..self.clients.len()).rev() {
            self.send(who, usize::MAX, judge);
            self.receive(who, RECEIVE_BYTES, judge)?;
        }
        for part in 0..self.threads.len() {
            if self.turn(part, true, judge)? == Health::Down {
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

    fn forget(&mut self) -> Vec<Flight> {
        let left = self.clients.iter_mut().flat_map(|client| client.leave(Leaving::Abrupt));
        let orphans = self.orphans.drain(..).map(|(_, flight)| flight);
        let all = left.chain(orphans).collect();
        self.clients.clear();
        all
    }

    fn drain(&mut self) -> Result<(), Error> {
        self.threads.iter_mut().try_for_each(|thread| thread.turn(true))
    }

    fn oldest(&self) -> Time {
        self.clients.iter().map(Client::oldest).min().unwrap_or(Time::MAX)
    }

    fn requests(&self) -> u64 {
        self.requests
    }
}

impl Server {
    fn turn(&mut self, part: usize, waits: bool, judge: &mut Judge) -> Result<Health, Wrong> {
        let Some(thread) = self.threads.get_mut(part) else { return Ok(Health::Well) };
        match thread.turn(waits) {
            // A thread of a server ends with its queue, and the server with the thread.
            Err(error) if judge.expects(&error) => return Ok(Health::Down),
            Err(error) => return Err(Wrong::new(format!("a thread has failed: {error}"))),
            Ok(()) => {}
        }
        let threads = &self.threads;
        self.orphans.retain(|((part, name), flight)| {
            let served = threads.get(*part).is_some_and(|thread| thread.serves(*name));
            if !served {
                judge.unanswered(flight);
            }
            served
        });
        Ok(Health::Well)
    }

    fn connect(&mut self, part: usize, random: &mut Random) -> Result<(), Wrong> {
        let Some(thread) = self.threads.get_mut(part) else { return Ok(()) };
        if self.clients.len() >= CLIENTS {
            return Ok(());
        }
        let mut room = || if random.below(3) == 0 { NARROW_BYTES } else { ROOM_BYTES };
        let (near, far) = connection(room(), room()).map_err(broken)?;
        let Some(name) = thread.connect(near) else {
            return Err(Wrong::new("a client was turned away".to_owned()));
        };
        self.clients.push(Client::new(far, (part, name), random));
        Ok(())
    }

    fn ask(
        &mut self,
        who: usize,
        part: usize,
        asked: Asked,
        judge: &mut Judge,
        random: &mut Random,
    ) -> Result<(), Wrong> {
        let Some(client) = self.clients.get_mut(who) else { return self.connect(part, random) };
        if !client.may_ask() {
            return self.receive(who, RECEIVE_BYTES, judge);
        }
        client.ask(asked, judge, random);
        let most = match random.below(4) {
            0 => random.below(1 + client.unsent() as u64) as usize,
            _ => usize::MAX,
        };
        self.send(who, most, judge);
        Ok(())
    }

    fn send(&mut self, who: usize, most: usize, judge: &mut Judge) {
        let oldest = self.oldest();
        if let Some(client) = self.clients.get_mut(who) {
            self.requests += client.send(most, judge, oldest);
        }
    }

    fn receive(&mut self, who: usize, most: usize, judge: &mut Judge) -> Result<(), Wrong> {
        let Some(client) = self.clients.get_mut(who) else { return Ok(()) };
        let scratch = self.scratch.get_mut(..most).unwrap_or_default();
        client.receive(scratch, judge)?;
        if client.is_over() {
            let home = client.home;
            self.orphans.extend(client.left_behind().into_iter().map(|flight| (home, flight)));
            self.clients.swap_remove(who);
        }
        Ok(())
    }

    fn leave(&mut self, who: usize, how: Leaving) {
        let Some(client) = self.clients.get_mut(who) else { return };
        let (home, left) = (client.home, client.leave(how));
        self.orphans.extend(left.into_iter().map(|flight| (home, flight)));
        if client.is_over() {
            self.clients.swap_remove(who);
        }
    }
}
