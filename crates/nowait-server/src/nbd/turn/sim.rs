//! A thread of the server whose turns somebody else takes, one by one: for simulations.
//!
//! Invariant: it runs what a real one runs, but for what would make two runs differ: it neither
//! accepts, sleeps nor spins, and looks at no clock, so that no client is ever late.
//! Knows: turn, conn, group, handshake, device. Known by: simulations.

use std::sync::Arc;
use std::time::Duration;

use nowait::sim::{Near, Sim};
use nowait::{Config, Disk, Engine, Error, Map, Workers};

use super::super::conn::Arrival;
use super::super::group::Post;
use super::super::handshake::Secrecy;
use super::super::socket::Socket;
use super::Thread;
use crate::device::Device;

/// A thread of an NBD server on a simulated device.
pub struct Simulated<M: Map>(Thread<Sim, M>);

impl<M: Map> Simulated<M> {
    /// A thread that serves `disk` through `queue`. Workers and disk may be those of others, too.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: a descriptor could not be made or watched.
    pub fn new(
        disk: Arc<Disk<M>>,
        workers: Workers,
        queue: Sim,
        config: Config,
    ) -> Result<Self, Error> {
        let device = Arc::new(Device::with_workers(disk.clone(), workers.clone()));
        let post = Post::simulated(device.clone(), config)?;
        let mut engine = Engine::new(disk, workers, queue, config)?;
        super::watch(&post, &mut engine)?;
        Ok(Self(Thread::new(post, device, engine)))
    }

    /// A client has connected, and `near` is the server's end. Returns a name
    /// for the connection, or `None` when all seats are taken.
    pub fn connect(&mut self, near: Near) -> Option<u64> {
        let seat = self.0.shared.seats.take()?;
        self.0.add(Arrival::new(Socket::Simulated(near), Secrecy::Off, seat));
        Some(self.0.generation)
    }

    /// Whether the connection of that name is not closed yet.
    #[must_use]
    pub fn serves(&self, name: u64) -> bool {
        self.0.conns.iter().any(|(_, conn)| conn.generation == name)
    }

    /// Takes a turn; before that, if there is nothing to do and `waits`, lets time pass until
    /// something has ended.
    ///
    /// # Errors
    /// What the queue said; a real thread would end with it.
    pub fn turn(&mut self, waits: bool) -> Result<(), Error> {
        let Thread { events, lines, engine, .. } = &mut self.0;
        let idle = lines.is_empty() && events.is_empty() && !engine.pending();
        let waits = waits && idle && !self.0.read_once_more();
        let Thread { events, engine, .. } = &mut self.0;
        let mut watched = |token, bits| events.push((token, bits));
        match waits {
            true => engine.wait(Some(Duration::ZERO), &mut watched)?,
            false => engine.poll_watched(&mut watched)?,
        }
        self.0.take_turn()
    }

    /// Requests that were taken from clients and are not answered.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.0.engine.in_flight()
    }
}
