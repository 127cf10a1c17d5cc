//! The queue of a simulated device.
//!
//! Invariant: what was placed since the last hand-over is not started; where others run while a thread
//! would wait, nothing is asked of the system, so that the same calls report the same each time.
//! Knows: device, net, queue, epoll, pause.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use super::device::SimDevice;
use super::fault::KICK_ERRNO;
use super::net::Watched;
use crate::error::{Doing, Error};
use crate::io::{Outcome, Transfer};
use crate::pause;
use crate::queue::{Epoll, Interest, Queue, QueueFull, Token};

/// A queue on a [`SimDevice`].
pub struct Sim {
    device: Arc<SimDevice>,
    number: usize,
    placed: Vec<(Transfer, Token)>,
    reports: Vec<(Token, Outcome, (u64, u64))>,
    watched: Epoll,
    sockets: Watched,
    ready: Vec<(Token, Outcome)>,
    /// What was heard last: [`pause::stirred`].
    heard: u64,
}

impl Sim {
    /// A queue on `device`.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: no descriptor is left for the watched ones.
    pub fn new(device: Arc<SimDevice>) -> Result<Self, Error> {
        let watched = Epoll::new()?;
        let number = device.add_queue();
        let (placed, reports) = (Vec::with_capacity(64), Vec::with_capacity(64));
        let (sockets, ready) = (Watched::default(), Vec::new());
        Ok(Self { device, number, placed, reports, watched, sockets, ready, heard: 0 })
    }

    /// Whether something watched is ready, or a slot has come home. On a thread that is simulated
    /// no descriptor is real, and whoever brings a slot home says so.
    fn hears(&mut self) -> Result<bool, Error> {
        let Self { sockets, ready, .. } = self;
        self.device.draw(|random| sockets.look(random, ready));
        let stirred = match pause::is_possible() {
            true => std::mem::replace(&mut self.heard, pause::stirred()) != self.heard,
            false => {
                self.watched.wait(Some(Duration::ZERO))?;
                self.watched.is_ready()
            }
        };
        Ok(stirred || !self.ready.is_empty())
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        self.device.remove_queue(self.number);
    }
}

impl Queue for Sim {
    // SAFETY: the promise of the caller is the one that the device asks for.
    unsafe fn place(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        // After a hand-over there is room, as with a ring.
        if !self.placed.is_empty() && self.device.is_full() {
            return Err(QueueFull);
        }
        self.placed.push((*transfer, token));
        Ok(())
    }

    fn kick(&mut self) -> Result<(), Error> {
        if !self.placed.is_empty() {
            if self.device.refuses_kick() {
                return Err(Error::new(KICK_ERRNO, Doing::Wait));
            }
            // SAFETY: whoever placed them promised it.
            unsafe { self.device.start(self.number, &mut self.placed) };
        }
        Ok(())
    }

    fn reap(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        self.device.reap(self.number, &mut self.reports);
        let count = self.reports.len();
        self.reports.drain(..).for_each(|(token, outcome, _)| sink(token, outcome));
        // An error shows in `wait`.
        if !self.hears().unwrap_or(false) {
            return count;
        }
        let sockets = self.ready.len();
        self.ready.drain(..).for_each(|(token, bits)| sink(token, bits));
        count + sockets + self.watched.take(sink)
    }

    /// Time passes until something has ended; if nothing will, it returns.
    fn wait(&mut self, _: Option<Duration>) -> Result<(), Error> {
        self.kick()?;
        if !self.hears()? {
            self.device.wait(self.number);
        }
        Ok(())
    }

    fn pending(&mut self) -> bool {
        !self.placed.is_empty()
            || self.device.has_ended(self.number)
            || self.hears().unwrap_or(false)
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error> {
        if self.sockets.watch(fd, token, interest) {
            return Ok(());
        }
        self.watched.watch(fd, token, interest)
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        if !self.sockets.unwatch(fd, token) {
            self.watched.unwatch(fd, token);
        }
    }

    // SAFETY: the memory is not kept.
    unsafe fn register(&mut self, _: *mut u8, _: usize) -> Option<u16> {
        None
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.watched.fd()
    }
}
