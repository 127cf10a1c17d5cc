//! Watched descriptors for queues that have no ring.
//!
//! Invariant: a descriptor watched for both interests has one epoll entry, whose events are the
//! union, and each report goes to the token of its own interest; interest in writing ends with its
//! report.
//! Knows: error. Known by: queue/threads, queue/null.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{Timespec, epoll};

use super::{Interest, Token};
use crate::error::{Doing, Error};
use crate::io::Outcome;

/// Reports that are taken with one system call.
const BATCH: usize = 64;

#[derive(Clone, Copy, Default)]
struct Watches {
    readable: Option<Token>,
    writable: Option<Token>,
}

/// The set of watched descriptors.
pub(crate) struct Epoll {
    epoll: OwnedFd,
    watches: HashMap<RawFd, Watches>,
    ready: Vec<(Token, Outcome)>,
}

impl Epoll {
    pub(crate) fn new() -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| Error::from_os(e, Doing::SetUp))?;
        Ok(Self { epoll, watches: HashMap::new(), ready: Vec::with_capacity(2 * BATCH) })
    }

    pub(crate) fn watch(
        &mut self,
        fd: BorrowedFd<'_>,
        token: Token,
        interest: Interest,
    ) -> Result<(), Error> {
        let known = self.watches.contains_key(&fd.as_raw_fd());
        let watches = self.watches.entry(fd.as_raw_fd()).or_default();
        match interest {
            Interest::Readable => watches.readable = Some(token),
            Interest::Writable => watches.writable = Some(token),
        }
        let (data, events) = (data(fd.as_raw_fd()), events(*watches));
        let done = if known {
            epoll::modify(&self.epoll, fd, data, events)
        } else {
            epoll::add(&self.epoll, fd, data, events)
        };
        done.map_err(|e| Error::from_os(e, Doing::SetUp))
    }

    pub(crate) fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        let Some(watches) = self.watches.get_mut(&fd.as_raw_fd()) else { return };
        if watches.readable == Some(token) {
            watches.readable = None;
        }
        if watches.writable == Some(token) {
            watches.writable = None;
        }
        // An error means that the descriptor was closed, which ends the watch as well.
        let _ = if watches.readable.is_none() && watches.writable.is_none() {
            self.watches.remove(&fd.as_raw_fd());
            epoll::delete(&self.epoll, fd)
        } else {
            epoll::modify(&self.epoll, fd, data(fd.as_raw_fd()), events(*watches))
        };
    }

    /// Waits for at most `timeout` and keeps what is ready for `take`.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        let mut batch = [MaybeUninit::uninit(); BATCH];
        let timeout = timeout.map(|time| Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        let (reports, _) = match epoll::wait(&self.epoll, &mut batch, timeout.as_ref()) {
            Ok(reports) => reports,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(Error::from_os(error, Doing::Wait)),
        };
        for report in reports {
            let fd = report.data.u64() as RawFd;
            let Some(watches) = self.watches.get_mut(&fd) else { continue };
            let flags = report.flags;
            let gone = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
            if let Some(token) = watches.readable
                && flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::RDHUP | gone)
            {
                self.ready.push((token, flags.bits() as Outcome));
            }
            if let Some(token) = watches.writable
                && flags.intersects(epoll::EventFlags::OUT | gone)
            {
                self.ready.push((token, flags.bits() as Outcome));
                watches.writable = None;
            }
        }
        Ok(())
    }

    pub(crate) fn take(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let count = self.ready.len();
        self.ready.drain(..).for_each(|(token, bits)| sink(token, bits));
        count
    }

    pub(crate) fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Descriptors that are watched.
    pub(crate) fn count(&self) -> usize {
        self.watches.len()
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

fn data(fd: RawFd) -> epoll::EventData {
    epoll::EventData::new_u64(fd as u64)
}

/// Edge-triggered: a report is for what arrived, as with a ring's poll.
fn events(watches: Watches) -> epoll::EventFlags {
    let mut events = epoll::EventFlags::ET;
    if watches.readable.is_some() {
        events |= epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
    }
    if watches.writable.is_some() {
        events |= epoll::EventFlags::OUT;
    }
    events
}
