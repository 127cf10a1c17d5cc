//! The queue of simulated devices.
//!
//! Invariant: its devices have one clock. A transfer does not start before the submission after its push. In a simulation the
//! queue makes no system call for events, so that the same calls give the same results each time.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::queue::queue_files::NumberedFiles;
use crate::queue::{Epoll, EventSource, Interest, IoQueue, QueueFile, QueueFull, check_fd_token};
use crate::sim::fault::SUBMIT_ERRNO;
use crate::sim::net::Watched;
use crate::sim::sim_commands::{SimCommand, SimCommands};
use crate::sim::sim_device::SimDevice;
use crate::sim_hooks::yield_point;
use crate::types::error::{Error, Operation};
use crate::types::token::Token;
use crate::types::transfer::{Outcome, Transfer};

/// A device that a queue reaches.
struct Reached {
    device: Arc<SimDevice>,
    /// The number of the queue there.
    number: usize,
    pushed: Vec<(Transfer, Token)>,
}

impl Reached {
    fn new(device: Arc<SimDevice>) -> Self {
        let number = device.add_queue();
        Self { device, number, pushed: Vec::with_capacity(64) }
    }
}

impl Drop for Reached {
    fn drop(&mut self) {
        self.device.remove_queue(self.number);
    }
}

/// A queue on one or several [`SimDevice`]s.
pub struct SimQueue {
    first: Reached,
    /// Further devices of which files were attached.
    others: Vec<Reached>,
    /// The attached files: a place in `others`, or [`FIRST`], and the number in the device.
    files: NumberedFiles<(usize, u16)>,
    reports: Vec<(Token, Outcome, (u64, u64))>,
    watched: Epoll,
    sockets: Watched,
    ready: Vec<(Token, Outcome)>,
    commands: SimCommands,
    /// [`yield_point::wake_count`] at the last look.
    wakes_seen: u64,
}

/// In place of a place in [`SimQueue::others`]: the first device.
const FIRST: usize = usize::MAX;

impl SimQueue {
    /// A queue on `device`, and on those whose files are attached later. Faults of the queue itself are
    /// those of `device`.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: no descriptor is left for the watched ones.
    pub fn new(device: Arc<SimDevice>) -> Result<Self, Error> {
        let watched = Epoll::new()?;
        let (sockets, ready, commands) = (Watched::default(), Vec::new(), SimCommands::default());
        Ok(Self {
            first: Reached::new(device),
            others: Vec::new(),
            files: NumberedFiles::new(),
            reports: Vec::with_capacity(64),
            watched,
            sockets,
            ready,
            commands,
            wakes_seen: 0,
        })
    }

    fn devices(&self) -> impl Iterator<Item = &Reached> {
        std::iter::once(&self.first).chain(&self.others)
    }

    fn reached_mut(&mut self, place: usize) -> &mut Reached {
        self.others.get_mut(place).unwrap_or(&mut self.first)
    }

    /// The place of `device`, which is reached from now on.
    fn reach(&mut self, device: &Arc<SimDevice>) -> usize {
        if Arc::ptr_eq(device, &self.first.device) {
            return FIRST;
        }
        let found = self.others.iter().position(|other| Arc::ptr_eq(device, &other.device));
        found.unwrap_or_else(|| {
            self.others.push(Reached::new(device.clone()));
            self.others.len() - 1
        })
    }

    fn has_pushed(&self) -> bool {
        self.devices().any(|reached| !reached.pushed.is_empty())
    }

    fn has_ended(&self) -> bool {
        self.devices().any(|reached| reached.device.has_ended(reached.number))
    }

    /// The time of the device whose clock is ahead.
    fn now(&self) -> u64 {
        self.devices().map(|reached| reached.device.now()).max().unwrap_or_default()
    }

    /// Lets a little time pass, and takes what the devices have completed.
    fn take_reports(&mut self) {
        if !self.others.is_empty() {
            self.first.device.advance(self.now());
        }
        self.first.device.drain(self.first.number, &mut self.reports);
        let mut more = Vec::new();
        for Reached { device, number, .. } in &self.others {
            device.drain_at(self.first.device.now(), *number, &mut more);
            self.reports.append(&mut more);
        }
    }

    /// Advances the time until there is a completion or none is possible.
    fn wait_for_devices(&self) {
        while !self.has_ended()
            && let Some(due) = self.devices().filter_map(|it| it.device.next_due()).min()
        {
            let until = if self.others.is_empty() { due } else { due.max(self.now()) };
            self.devices().for_each(|reached| reached.device.advance(until));
        }
    }

    /// The commands of this queue, for their driver.
    #[must_use]
    pub fn commands(&self) -> SimCommands {
        self.commands.clone()
    }

    /// Whether a watched descriptor is ready, or a slot has returned. In a simulation no descriptor
    /// is polled: the wake-up counter tells that a slot has returned.
    fn has_events(&mut self) -> Result<bool, Error> {
        let Self { sockets, ready, first, .. } = self;
        first.device.draw(|random| sockets.poll(random, ready));
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

// SAFETY: a device completes each transfer once, and does not access its memory after that;
// `watch` refuses tokens without `FD_TOKEN`.
unsafe impl IoQueue for SimQueue {
    fn attach(&mut self, files: &[QueueFile<'_>]) -> Result<u32, Error> {
        let first = self.files.find_free(files.len());
        for (number, file) in (first..).zip(files) {
            let device = match file {
                QueueFile::Simulated(device, file) => {
                    device.clone().downcast::<SimDevice>().ok().map(|device| (device, *file))
                }
                _ => None,
            };
            let Some((device, file)) = device else {
                (first..number).for_each(|before| _ = self.files.take(before));
                return Err(Error::new(libc::EOPNOTSUPP, Operation::SetUp));
            };
            let place = self.reach(&device);
            self.files.put(number, (place, file));
        }
        Ok(first)
    }

    fn detach(&mut self, first: u32, count: u32) {
        (first..first + count).for_each(|number| _ = self.files.take(number));
    }

    // SAFETY: the caller promises what the device needs.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        // After a submission there is room, as with a ring.
        if self.has_pushed() && self.first.device.is_full() {
            return Err(QueueFull);
        }
        let Some(&(place, file)) = self.files.get(transfer.file) else {
            let what = format!("a transfer of a file that is not attached: {transfer:?}");
            self.first.device.note_violation(what);
            return Err(QueueFull);
        };
        self.reached_mut(place).pushed.push((Transfer { file: file.into(), ..*transfer }, token));
        Ok(())
    }

    fn submit(&mut self) -> Result<(), Error> {
        if self.has_pushed() {
            if self.first.device.fails_submit() {
                return Err(Error::new(SUBMIT_ERRNO, Operation::Wait));
            }
            for Reached { device, number, pushed } in
                std::iter::once(&mut self.first).chain(&mut self.others)
            {
                // SAFETY: as promised by the caller of `push`.
                unsafe { device.start(*number, pushed) };
            }
        }
        self.commands.submit();
        Ok(())
    }

    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        self.take_reports();
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

    /// Advances the time until there is a completion; returns immediately if none is possible.
    fn wait(&mut self, _: Option<Duration>) -> Result<(), Error> {
        self.submit()?;
        if !self.has_events()? && !self.commands.has_work() {
            self.wait_for_devices();
        }
        Ok(())
    }

    fn has_completions(&mut self) -> bool {
        self.has_pushed()
            || self.commands.has_work()
            || self.has_ended()
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
