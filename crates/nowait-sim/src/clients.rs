//! The clients of one export of a server, on all of its threads.
//!
//! Invariant: a request of a disconnected client may still be executed until the server has closed
//! its connection.

use nowait::Error;
use nowait::sim::{Random, connection};
use nowait_server::Simulated;

use crate::client::Client;
use crate::model::{Time, Violation};
use crate::oracle::{InFlight, Oracle};
use crate::scenario::{DisconnectKind, RequestSpec};

/// The limit of connected clients.
const CLIENTS: usize = 6;
/// The largest number of bytes that one receive takes.
pub const RECEIVE_BYTES: usize = 256 << 10;
/// The buffer size of most sockets in bytes.
const ROOM_BYTES: usize = 208 << 10;
/// The buffer size of some sockets in bytes: less than a long reply.
const NARROW_BYTES: usize = 4096;

/// The clients of an export.
pub struct Clients {
    /// The name of the export.
    export: String,
    clients: Vec<Client>,
    /// Requests of disconnected clients, with the thread and the id of their connection.
    orphans: Vec<((usize, u64), InFlight)>,
    /// Requests so far.
    pub requests: u64,
    scratch: Vec<u8>,
}

fn broken(error: Error) -> Violation {
    Violation::new(format!("no socket: {error}"))
}

impl Clients {
    /// No clients of the export of that name.
    pub fn new(export: &str) -> Self {
        let (clients, orphans) = (Vec::new(), Vec::new());
        let scratch = vec![0; RECEIVE_BYTES];
        Self { export: export.to_owned(), clients, orphans, requests: 0, scratch }
    }

    /// The number of connected clients.
    pub fn count(&self) -> usize {
        self.clients.len()
    }

    /// Whether nothing of them is in flight.
    pub fn is_idle(&self) -> bool {
        self.clients.iter().all(Client::is_idle) && self.orphans.is_empty()
    }

    /// Whether the server has left all disconnected clients.
    pub fn has_no_orphans(&self) -> bool {
        self.orphans.is_empty()
    }

    /// The begin time of the oldest request in flight; `Time::MAX` if there is none.
    pub fn oldest(&self) -> Time {
        self.clients.iter().map(Client::oldest).min().unwrap_or(Time::MAX)
    }

    /// All clients are gone, with the server's sides of their connections.
    pub fn clear(&mut self) {
        self.clients.clear();
    }

    /// Disconnects all clients, and returns the requests in flight of these and earlier ones.
    pub fn forget(&mut self) -> Vec<InFlight> {
        let left =
            self.clients.iter_mut().flat_map(|client| client.disconnect(DisconnectKind::Abrupt));
        let orphans = self.orphans.drain(..).map(|(_, flight)| flight);
        let all = left.chain(orphans).collect();
        self.clients.clear();
        all
    }

    /// Other threads serve the connections: `owner` says which one, and by which id.
    pub fn change_owners(&mut self, owner: impl Fn((usize, u64)) -> (usize, u64)) {
        self.clients.iter_mut().for_each(|client| client.owner = owner(client.owner));
        self.orphans.iter_mut().for_each(|(before, _)| *before = owner(*before));
    }

    /// Ends the requests of disconnected clients whose connections are closed.
    pub fn end_orphans(&mut self, threads: &[Simulated], oracle: &mut Oracle) {
        self.orphans.retain(|((part, id), flight)| {
            let served = threads.get(*part).is_some_and(|thread| thread.serves(*id));
            if !served {
                oracle.unanswered(flight);
            }
            served
        });
    }

    /// Adds a client on a thread.
    ///
    /// # Errors
    /// The server does not take it.
    pub fn connect(
        &mut self,
        threads: &mut [Simulated],
        part: usize,
        random: &mut Random,
    ) -> Result<(), Violation> {
        let Some(thread) = threads.get_mut(part) else { return Ok(()) };
        if self.clients.len() >= CLIENTS {
            return Ok(());
        }
        let mut buffer_bytes = || if random.below(3) == 0 { NARROW_BYTES } else { ROOM_BYTES };
        let (server_end, client_end) =
            connection(buffer_bytes(), buffer_bytes()).map_err(broken)?;
        let Some(id) = thread.connect(server_end) else {
            return Err(Violation::new("a client was turned away".to_owned()));
        };
        self.clients.push(Client::new(client_end, (part, id), &self.export, random));
        Ok(())
    }

    /// A client queues a request and sends it or a part, or a new client connects on a thread.
    ///
    /// # Errors
    /// Like [`Clients::connect`] and [`Clients::receive`].
    pub fn ask(
        &mut self,
        client_index: usize,
        (threads, part): (&mut [Simulated], usize),
        spec: RequestSpec,
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<(), Violation> {
        let Some(client) = self.clients.get_mut(client_index) else {
            return self.connect(threads, part, random);
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

    /// A client sends at most `limit` bytes.
    pub fn send(&mut self, client_index: usize, limit: usize, oracle: &mut Oracle) {
        let oldest = self.oldest();
        if let Some(client) = self.clients.get_mut(client_index) {
            self.requests += client.send(limit, oracle, oldest);
        }
    }

    /// A client receives at most `limit` bytes.
    ///
    /// # Errors
    /// An answer violates the contract or the protocol.
    pub fn receive(
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

    /// All clients send and receive what they can.
    ///
    /// # Errors
    /// Like [`Clients::receive`].
    pub fn exchange(&mut self, oracle: &mut Oracle) -> Result<(), Violation> {
        for client_index in (0..self.clients.len()).rev() {
            self.send(client_index, usize::MAX, oracle);
            self.receive(client_index, RECEIVE_BYTES, oracle)?;
        }
        Ok(())
    }

    /// A client disconnects.
    pub fn disconnect(&mut self, client_index: usize, how: DisconnectKind) {
        let Some(client) = self.clients.get_mut(client_index) else { return };
        let (owner, left) = (client.owner, client.disconnect(how));
        self.orphans.extend(left.into_iter().map(|flight| (owner, flight)));
        if client.is_over() {
            self.clients.swap_remove(client_index);
        }
    }

    /// All clients disconnect without a word.
    pub fn leave(&mut self) {
        for client_index in (0..self.clients.len()).rev() {
            self.disconnect(client_index, DisconnectKind::Abrupt);
        }
    }
}
