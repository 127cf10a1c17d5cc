//! A queue that completes at once and moves nothing: for measuring the engine alone.
//!
//! Invariant: every transfer ends with its full length.
//! Knows: queue, epoll.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::epoll::Epoll;
use super::{Interest, Queue, QueueFull, Token};
use crate::error::Error;
use crate::io::{Outcome, Transfer};

/// The queue that does nothing.
pub struct Null {
    ended: Vec<(Token, Outcome)>,
    watched: Epoll,
}

impl Null {
    /// A queue with room for any number of transfers.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: no descriptor is left for the watched ones.
    pub fn new() -> Result<Self, Error> {
        Ok(Self { ended: Vec::with_capacity(64), watched: Epoll::new()? })
    }
}

impl Queue for Null {
    // SAFETY: the memory is never looked at.
    #[inline]
    unsafe fn place(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        self.ended.push((token, transfer.len as Outcome));
        Ok(())
    }

    #[inline]
    fn kick(&mut self) -> Result<(), Error> {
        Ok(())
    }

    #[inline]
    fn reap(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let count = self.ended.len();
        if count == 0 && !self.watched.is_ready() {
            // Whoever only polls hears of watched descriptors too. An error shows in `wait`.
            let _ = self.watched.wait(Some(Duration::ZERO));
        }
        for &(token, outcome) in &self.ended {
            sink(token, outcome);
        }
        self.ended.clear();
        if self.watched.is_ready() { count + self.watched.take(sink) } else { count }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        let timeout = if self.ended.is_empty() { timeout } else { Some(Duration::ZERO) };
        self.watched.wait(timeout)
    }

    fn pending(&mut self) -> bool {
        !self.ended.is_empty() || self.watched.is_ready()
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error> {
        self.watched.watch(fd, token, interest)
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        self.watched.unwatch(fd, token);
    }

    // SAFETY: the memory is never looked at.
    unsafe fn register(&mut self, _: *mut u8, _: usize) -> Option<u16> {
        None
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.watched.fd()
    }
}
