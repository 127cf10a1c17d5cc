//! The queue of a simulated device.
//!
//! Invariant: a transfer does not start before the submission after its push. In a simulation the
//! queue makes no system call for events, so that the same calls give the same results each time.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::queue::{Epoll, EventSource, Interest, IoQueue, QueueFile, QueueFull, check_fd_token};
use crate::sim::fault::SUBMIT_ERRNO;
use crate::sim::net::Watched;
use crate::sim::sim_commands::{SimCommand, SimCommands};
use crate::sim::sim_device::SimDevice;
use crate::sim_hooks::yield_point;
use crate::types::error::{Error, Operation};
use crate::types::token::Token;
use crate::types::transfer::{Outcome, Transfer};

/// A queue on a [`SimDevice`].
pub struct SimQueue {
    device: Arc<SimDevice>,
    number: usize,
    pushed: Vec<(Transfer, Token)>,
    reports: Vec<(Token, Outcome, (u64, u64))>,
    watched: Epoll,
    sockets: Watched,
    ready: Vec<(Token, Outcome)>,
    commands: SimCommands,
    /// [`yield_point::wake_count`] at the last look.
    wakes_seen: u64,
}

impl SimQueue {
    /// A queue on `device`.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: no descriptor is left for the watched ones.
    pub fn new(device: Arc<SimDevice>) -> Result<Self, Error> {
        let watched = Epoll::new()?;
        let number = device.add_queue();
        let (pushed, reports) = (Vec::with_capacity(64), Vec::with_capacity(64));
        let (sockets, ready, commands) = (Watched::default(), Vec::new(), SimCommands::default());
        let wakes_seen = 0;
        Ok(Self { device, number, pushed, reports, watched, sockets, ready, commands, wakes_seen })
    }

    /// The commands of this queue, for their driver.
    #[must_use]
    pub fn commands(&self) -> SimCommands {
        self.commands.clone()
    }

    /// Whether a watched descriptor is ready, or a slot has returned. In a simulation no descriptor
    /// is polled: the wake-up counter tells that a slot has returned.
    fn has_events(&mut self) -> Result<bool, Error> {
        let Self { sockets, ready, .. } = self;
        self.device.draw(|random| sockets.poll(random, ready));
        let woken = match yield_point::is_simulated() {
            true => {
                std::mem::replace(&mut self.wakes_seen, yield_point::wake_count())
                    != self.wakes_seen
            }
            false => {
                self.watched.wait(Some(Duration::ZERO))?;
                self.watched.is_ready()
            }
        };
        Ok(woken || !self.ready.is_empty())
    }
}

impl Drop for SimQueue {
    fn drop(&mut self) {
        self.device.remove_queue(self.number);
    }
}

// SAFETY: the device completes each transfer once, and does not access its memory after that;
// `watch` refuses tokens without `FD_TOKEN`.
unsafe impl IoQueue for SimQueue {
    /// The files have the numbers that they have in the simulated device.
    fn attach(&mut self, _: &[QueueFile<'_>]) -> Result<u32, Error> {
        Ok(0)
    }

    fn detach(&mut self, _: u32, _: u32) {}

    // SAFETY: the caller promises what the device needs.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        // After a submission there is room, as with a ring.
        if !self.pushed.is_empty() && self.device.is_full() {
            return Err(QueueFull);
        }
        self.pushed.push((*transfer, token));
        Ok(())
    }

    fn submit(&mut self) -> Result<(), Error> {
        if !self.pushed.is_empty() {
            if self.device.fails_submit() {
                return Err(Error::new(SUBMIT_ERRNO, Operation::Wait));
            }
            // SAFETY: as promised by the caller of `push`.
            unsafe { self.device.start(self.number, &mut self.pushed) };
        }
        self.commands.submit();
        Ok(())
    }

    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        self.device.drain(self.number, &mut self.reports);
        let ended = self.commands.take_ended();
        let count = self.reports.len() + ended.len();
        self.reports.drain(..).for_each(|(token, outcome, _)| sink(token, outcome));
        ended.into_iter().for_each(|(token, outcome)| sink(token, outcome));
        // `wait` returns errors.
        if !self.has_events().unwrap_or(false) {
            return count;
        }
        let sockets = self.ready.len();
        self.ready.drain(..).for_each(|(token, bits)| sink(token, bits));
        count + sockets + self.watched.take(sink)
    }

    /// Advances the time until there is a completion; returns at once if none is possible.
    fn wait(&mut self, _: Option<Duration>) -> Result<(), Error> {
        self.submit()?;
        if !self.has_events()? && !self.commands.has_work() {
            self.device.wait(self.number);
        }
        Ok(())
    }

    fn has_completions(&mut self) -> bool {
        !self.pushed.is_empty()
            || self.commands.has_work()
            || self.device.has_ended(self.number)
            || self.has_events().unwrap_or(false)
    }

    fn events(&self) -> &dyn EventSource {
        self
    }

    fn events_mut(&mut self) -> &mut dyn EventSource {
        self
    }
}

impl EventSource for SimQueue {
    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error> {
        check_fd_token(token)?;
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

    // SAFETY: the caller promises what the driver of a simulation needs.
    unsafe fn command(
        &mut self,
        _: BorrowedFd<'_>,
        op: u32,
        _: u64,
        arguments: [u8; 16],
        token: Token,
    ) -> Result<(), Error> {
        check_fd_token(token)?;
        self.commands.push(SimCommand { op, arguments, token });
        Ok(())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.watched.fd()
    }
}
