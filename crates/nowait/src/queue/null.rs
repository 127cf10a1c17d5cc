//! A queue that completes immediately and moves no bytes, for benchmarks of the engine alone.
//!
//! Invariant: every transfer ends with its full length.
#![allow(unsafe_code)]

use std::time::Duration;

use super::epoll::Epoll;
use super::event_source::EventSource;
use super::{IoQueue, QueueFile, QueueFull};
use crate::types::error::Error;
use crate::types::token::Token;
use crate::types::transfer::{Outcome, Transfer};

/// A queue that moves no bytes; every transfer completes immediately with its full length.
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

// SAFETY: a token is returned once, from the list that `push` has added it to; `Epoll` returns
// tokens of watched descriptors only.
unsafe impl IoQueue for Null {
    /// Every file is number 0: no transfer reaches it.
    fn attach(&mut self, _: &[QueueFile<'_>]) -> Result<u32, Error> {
        Ok(0)
    }

    fn detach(&mut self, _: u32, _: u32) {}

    // SAFETY: the memory is never accessed.
    #[inline]
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        self.ended.push((token, transfer.len as Outcome));
        Ok(())
    }

    #[inline]
    fn submit(&mut self) -> Result<(), Error> {
        Ok(())
    }

    #[inline]
    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let count = self.ended.len();
        if count == 0 && !self.watched.is_ready() {
            // A caller that only polls gets events of watched descriptors, too. `wait` returns
            // errors.
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

    fn has_completions(&mut self) -> bool {
        !self.ended.is_empty() || self.watched.is_ready()
    }

    fn events(&self) -> &dyn EventSource {
        &self.watched
    }

    fn events_mut(&mut self) -> &mut dyn EventSource {
        &mut self.watched
    }
}
