//! Where connections come in.
//!
//! Invariant: a connection is taken in with a seat or closed at once, never left waiting for one.
//! When the process has no descriptor left, accepting rests instead of trying again and again.
//! Knows: conn, handshake, listener, seats. Known by: turn.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::conn::Arrival;
use super::handshake::Secrecy;
use super::listener::Listener;
use super::seats::Seats;

/// How long accepting rests when the process has no descriptor left.
const REST: Duration = Duration::from_millis(100);

/// The listeners of a thread.
pub(crate) struct Entrance {
    listeners: Vec<Listener>,
    seats: Arc<Seats>,
    secrecy: Secrecy,
    rests: bool,
    /// The last connection that came was turned away, and this was said.
    is_full: bool,
}

impl Entrance {
    pub(crate) fn new(listeners: Vec<Listener>, seats: Arc<Seats>, secrecy: Secrecy) -> Self {
        Self { listeners, seats, secrecy, rests: false, is_full: false }
    }

    /// Takes in all that have come to listener number `n`.
    pub(crate) fn accept(&mut self, n: usize, mut take_in: impl FnMut(Arrival)) {
        while let Some(listener) = self.listeners.get(n) {
            match listener.accept() {
                Ok(socket) => match self.seats.take() {
                    Some(seat) => {
                        self.is_full = false;
                        take_in(Arrival::new(socket.into(), self.secrecy, seat));
                    }
                    None => self.turn_away(),
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!("cannot accept a connection: {error}");
                    self.rests = true;
                    return;
                }
            }
        }
    }

    /// Says once for all that come in a row that there is no room.
    fn turn_away(&mut self) {
        if !std::mem::replace(&mut self.is_full, true) {
            let limit = self.seats.limit();
            tracing::warn!("a connection was closed: {limit} are open, the most that are allowed");
        }
    }

    /// When accepting is to be tried again, if it rests.
    pub(crate) fn rest(&self) -> Option<Duration> {
        self.rests.then_some(REST)
    }

    /// Tries again, if accepting rests.
    pub(crate) fn try_again(&mut self, mut take_in: impl FnMut(Arrival)) {
        if std::mem::take(&mut self.rests) {
            (0..self.listeners.len()).for_each(|n| self.accept(n, &mut take_in));
        }
    }

    /// Takes nobody in any more; what is returned is no longer listened on when it is dropped.
    pub(crate) fn close(&mut self) -> Vec<Listener> {
        std::mem::take(&mut self.listeners)
    }
}
