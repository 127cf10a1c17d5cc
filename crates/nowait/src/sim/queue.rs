//! The queue of a simulated device.
//!
//! Invariant: what was placed since the last hand-over is not started; watched descriptors are
//! real ones, asked for without waiting, so that on one thread they too report the same each time.
//! Knows: device, queue, epoll.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use super::device::SimDevice;
use super::fault::KICK_ERRNO;
use crate::error::{Doing, Error};
use crate::io::{Outcome, Transfer};
use crate::queue::{Epoll, Interest, Queue, QueueFull, Token};

/// Looks at the queue of which one asks for watched descriptors too, if others bring something.
const LOOKS_PER_POLL: u32 = 8;

/// A queue on a [`SimDevice`].
pub struct Sim {
    device: Arc<SimDevice>,
    number: usize,
    placed: Vec<(Transfer, Token)>,
    reports: Vec<(Token, Outcome, (u64, u64))>,
    watched: Epoll,
    looks: u32,
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
        Ok(Self { device, number, placed, reports, watched, looks: 0 })
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
        self.looks = self.looks.wrapping_add(1);
        if count == 0 || self.looks.is_multiple_of(LOOKS_PER_POLL) {
            // An error shows in `wait`.
            let _ = self.watched.wait(Some(Duration::ZERO));
        }
        self.reports.drain(..).for_each(|(token, outcome, _)| sink(token, outcome));
        if self.watched.is_ready() { count + self.watched.take(sink) } else { count }
    }

    /// Time passes until something has ended; if nothing will, it returns.
    fn wait(&mut self, _: Option<Duration>) -> Result<(), Error> {
        self.kick()?;
        self.watched.wait(Some(Duration::ZERO))?;
        if !self.watched.is_ready() {
            self.device.wait(self.number);
        }
        Ok(())
    }

    fn pending(&mut self) -> bool {
        !self.placed.is_empty()
            || self.device.has_ended(self.number)
            || self.watched.is_ready()
            || self.watched.wait(Some(Duration::ZERO)).is_ok() && self.watched.is_ready()
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error> {
        self.watched.watch(fd, token, interest)
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        self.watched.unwatch(fd, token);
    }

    // SAFETY: the memory is not kept.
    unsafe fn register(&mut self, _: *mut u8, _: usize) -> Option<u16> {
        None
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.watched.fd()
    }
}
