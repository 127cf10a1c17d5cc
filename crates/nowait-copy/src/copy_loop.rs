//! Both endpoints of a copy: advances them, waits for them, and stops when cancelled.
//!
//! Invariant: the thread sleeps only when neither endpoint can make progress, and at most
//! `WAIT_SLICE` at a time, so that it notices a cancellation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nowait::ByteRange;
use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

use crate::endpoint::{CopyOperation, CopyRequest, Endpoint};
use crate::error::{Error, os_message};
use crate::zero_map::{ExtentIterator, ZeroMap};

/// The longest sleep: a cancelled copy ends within this time.
const WAIT_SLICE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// The shortest time between two reports of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// The tag of block-status requests; no piece has it.
pub(crate) const STATUS: u64 = u64::MAX;

/// The phase of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Data moves from the source to the target.
    Copying,
    /// Written data is made durable.
    Flushing,
    /// Both endpoints are read again and compared.
    Verifying,
}

/// The progress of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The current phase.
    pub phase: Phase,
    /// Bytes of the disk that this phase has completed, holes included.
    pub done: u64,
    /// Bytes of the disk.
    pub total: u64,
    /// Bytes of that that were not known to be the same on both sides: they are read, or made zero.
    pub moved: u64,
}

/// Both endpoints of a copy and the callback for its progress.
pub(crate) struct Endpoints<'a> {
    pub(crate) source: Box<dyn Endpoint>,
    pub(crate) target: Box<dyn Endpoint>,
    /// Bytes that are copied: all of the source.
    pub(crate) size: u64,
    /// The longest read or write in bytes, a multiple of `alignment`.
    pub(crate) request_bytes: u64,
    /// Pieces begin at multiples of this many bytes.
    pub(crate) alignment: u64,
    /// Bytes of memory in use at most.
    pub(crate) memory: usize,
    pub(crate) cancel: &'a AtomicBool,
    pub(crate) report_progress: &'a mut dyn FnMut(Progress),
    pub(crate) timing: Timing,
    /// Whether a request that changes the target was submitted.
    pub(crate) has_written: bool,
    /// Whether the source tells what is dirty, and the rest is on the target already.
    pub(crate) is_incremental: bool,
    /// Whether only what differs is written: what is not zero on the target is read there, too.
    pub(crate) compares: bool,
}

/// When a copy ends, goes on, and reports.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timing {
    /// When it ends, complete or not, without waiting for what is in flight.
    pub(crate) deadline: Option<Instant>,
    pub(crate) rate: Option<Rate>,
    pub(crate) last_report: Option<Instant>,
}

/// The most bytes a second that are moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    bytes_per_second: u64,
    /// When what has begun so far is within the rate.
    next: Instant,
}

impl Rate {
    /// `bytes_per_second`, at least 1, from now on.
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second: bytes_per_second.max(1), next: Instant::now() }
    }

    /// Counts `bytes` that begin to be moved.
    pub(crate) fn count(&mut self, bytes: u64) {
        let seconds = bytes as f64 / self.bytes_per_second as f64;
        self.next = self.next.max(Instant::now()) + Duration::from_secs_f64(seconds);
    }

    /// Whether more may begin now.
    pub(crate) fn allows(&self) -> bool {
        self.next <= Instant::now()
    }
}

impl Endpoints<'_> {
    /// The iterator over both disks; `target_is_zero` where that is known without a query.
    pub(crate) fn extents(&self, target_is_zero: bool) -> ExtentIterator {
        let zero_map = |endpoint: &dyn Endpoint| match endpoint.capabilities().has_status {
            true => ZeroMap::unknown(self.size, self.alignment),
            false => ZeroMap::uniform(self.size, false),
        };
        if self.is_incremental {
            return ExtentIterator::incremental(self.size, zero_map(&*self.source));
        }
        let target = match target_is_zero {
            true => ZeroMap::uniform(self.size, true),
            false => zero_map(&*self.target),
        };
        ExtentIterator::new(self.size, zero_map(&*self.source), target)
    }

    /// Submits the block-status queries that `extents` needs next.
    pub(crate) fn query(&mut self, extents: &mut ExtentIterator) {
        let query = |range| CopyRequest {
            operation: CopyOperation::Status,
            range,
            tag: STATUS,
            memory: None,
        };
        if let Some(range) = extents.source.next_query() {
            self.source.submit(query(range));
        }
        if let Some(range) = extents.target.next_query() {
            self.target.submit(query(self.padded(range)));
        }
    }

    /// `range` rounded up to whole blocks of the target.
    pub(crate) fn padded(&self, range: ByteRange) -> ByteRange {
        ByteRange::new(range.pos, range.len.next_multiple_of(self.target.capabilities().block))
    }

    /// Advances both endpoints without waiting.
    pub(crate) fn advance(&mut self) -> Result<(), Error> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        self.source.advance()?;
        self.target.advance()
    }

    /// Sleeps until either endpoint can make progress, at most `WAIT_SLICE`.
    pub(crate) fn wait(&mut self) -> Result<(), Error> {
        wait_for(&[&*self.source, &*self.target])
    }

    /// Whether the copy has to end although it is not complete.
    pub(crate) fn is_late(&self) -> bool {
        self.timing.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Whether more may begin to be moved now.
    pub(crate) fn may_move(&self) -> bool {
        self.timing.rate.is_none_or(|rate| rate.allows())
    }

    /// Reports progress, if `PROGRESS_INTERVAL` has passed or the phase is complete.
    pub(crate) fn report(&mut self, phase: Phase, done: u64, moved: u64) {
        let now = Instant::now();
        let due = self
            .timing
            .last_report
            .is_none_or(|last| now.duration_since(last) >= PROGRESS_INTERVAL);
        if due || done == self.size {
            self.timing.last_report = Some(now);
            (self.report_progress)(Progress { phase, done, total: self.size, moved });
        }
    }
}

/// Sleeps until one of `endpoints` can make progress, at most `WAIT_SLICE`.
pub(crate) fn wait_for(endpoints: &[&dyn Endpoint]) -> Result<(), Error> {
    let mut poll_fds = Vec::new();
    endpoints.iter().for_each(|endpoint| endpoint.poll_fds(&mut poll_fds));
    let mut fds: Vec<PollFd<'_>> =
        poll_fds.into_iter().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)).collect();
    match poll(&mut fds, Some(&WAIT_SLICE)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(Error::at(&"poll", os_message(&errno.into()))),
    }
}
