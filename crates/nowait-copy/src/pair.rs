//! The two sides together: moved on, waited for, stopped.
//!
//! Invariant: the thread sleeps only when neither side has anything to move, and never longer than
//! it takes to notice that it is to stop.
//! Knows: error, port, extents. Known by: transfer, verify.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nowait::Range;
use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

use crate::error::{Error, words};
use crate::extents::{Extents, Walk};
use crate::port::{Port, Request, What};

/// How soon a copy that sleeps sees that it is to stop.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// How often progress is told.
const TELL: Duration = Duration::from_millis(100);

/// The tag of questions about the mapping; no piece has it.
pub(crate) const STATUS: u64 = u64::MAX;

/// What a copy is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// From one side to the other.
    Copying,
    /// Making what was written durable.
    Flushing,
    /// Reading both sides again.
    Verifying,
}

/// How far a copy has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What it is doing.
    pub phase: Phase,
    /// Bytes of the disk that are done in this phase, holes included.
    pub done: u64,
    /// Bytes of the disk.
    pub total: u64,
}

/// Both sides, and who wants to know of them.
pub(crate) struct Pair<'a> {
    pub(crate) source: Box<dyn Port>,
    pub(crate) target: Box<dyn Port>,
    /// Bytes that are copied: all of the source.
    pub(crate) size: u64,
    /// The longest read or write in bytes, a multiple of `granule`.
    pub(crate) chunk: u64,
    /// Pieces begin at multiples of this, in bytes.
    pub(crate) granule: u64,
    /// Bytes of memory in use at most.
    pub(crate) memory: usize,
    pub(crate) stop: &'a AtomicBool,
    pub(crate) tell: &'a mut dyn FnMut(Progress),
    pub(crate) told: Option<Instant>,
}

impl Pair<'_> {
    /// The way through both disks; `target_is_zero` where that is known without asking.
    pub(crate) fn walk(&self, target_is_zero: bool) -> Walk {
        let extents = |port: &dyn Port| match port.facts().tells_status {
            true => Extents::to_be_asked(self.size, self.granule),
            false => Extents::uniform(self.size, false),
        };
        let target = match target_is_zero {
            true => Extents::uniform(self.size, true),
            false => extents(&*self.target),
        };
        Walk::new(self.size, extents(&*self.source), target)
    }

    /// Sends the questions that `walk` has.
    pub(crate) fn ask(&mut self, walk: &mut Walk) {
        let question = |range| Request { what: What::Status, range, tag: STATUS, memory: None };
        if let Some(range) = walk.source.question() {
            self.source.submit(question(range));
        }
        if let Some(range) = walk.target.question() {
            self.target.submit(question(self.padded(range)));
        }
    }

    /// `range` as the target takes it: a tail that is no whole block of it is completed.
    pub(crate) fn padded(&self, range: Range) -> Range {
        Range::new(range.pos, range.len.next_multiple_of(self.target.facts().block))
    }

    /// Moves both sides on without waiting.
    pub(crate) fn advance(&mut self) -> Result<(), Error> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        self.source.advance()?;
        self.target.advance()
    }

    /// Sleeps until either side has something to move.
    pub(crate) fn wait(&mut self) -> Result<(), Error> {
        let mut watched = Vec::new();
        self.source.watched(&mut watched);
        self.target.watched(&mut watched);
        let mut fds: Vec<PollFd<'_>> =
            watched.into_iter().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)).collect();
        match poll(&mut fds, Some(&NAP)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::at(&"poll", words(&errno.into()))),
        }
    }

    /// Tells how far it has come, if it is time.
    pub(crate) fn tell(&mut self, phase: Phase, done: u64) {
        let now = Instant::now();
        let due = self.told.is_none_or(|told| now.duration_since(told) >= TELL);
        if due || done == self.size {
            self.told = Some(now);
            (self.tell)(Progress { phase, done, total: self.size });
        }
    }
}
