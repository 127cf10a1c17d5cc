//! Watched descriptors for queues without a ring.
//!
//! Invariant: a descriptor watched for both interests has one epoll entry with the union of their
//! events. Each event is returned under the token of its interest; a watch for writing ends with
//! its event.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{Timespec, epoll};

use super::event_source::{EventSource, Interest, check_fd_token};
use crate::types::error::{Error, Operation};
use crate::types::token::Token;
use crate::types::transfer::Outcome;

/// The greatest number of events that one system call returns.
const BATCH: usize = 64;

#[derive(Clone, Copy, Default)]
struct FdInterests {
    readable: Option<Token>,
    writable: Option<Token>,
}

/// The set of watched descriptors.
pub(crate) struct Epoll {
    epoll: OwnedFd,
    interests: HashMap<RawFd, FdInterests>,
    ready: Vec<(Token, Outcome)>,
}

impl Epoll {
    pub(crate) fn new() -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| Error::from_os(e, Operation::SetUp))?;
        Ok(Self { epoll, interests: HashMap::new(), ready: Vec::with_capacity(2 * BATCH) })
    }

    /// Waits for at most `timeout` and keeps the events for `take`.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        let mut batch = [MaybeUninit::uninit(); BATCH];
        let timeout = timeout.map(|time| Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        let (events, _) = match epoll::wait(&self.epoll, &mut batch, timeout.as_ref()) {
            Ok(events) => events,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(Error::from_os(error, Operation::Wait)),
        };
        for event in events {
            let fd = event.data.u64() as RawFd;
            let Some(watches) = self.interests.get_mut(&fd) else { continue };
            let flags = event.flags;
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

    /// Passes the kept events to `sink`; returns their number.
    pub(crate) fn take(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let count = self.ready.len();
        self.ready.drain(..).for_each(|(token, bits)| sink(token, bits));
        count
    }

    pub(crate) fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The number of watched descriptors.
    pub(crate) fn count(&self) -> usize {
        self.interests.len()
    }
}

impl EventSource for Epoll {
    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error> {
        check_fd_token(token)?;
        let is_watched = self.interests.contains_key(&fd.as_raw_fd());
        let watches = self.interests.entry(fd.as_raw_fd()).or_default();
        match interest {
            Interest::Readable => watches.readable = Some(token),
            Interest::Writable => watches.writable = Some(token),
        }
        let (data, events) = (data(fd.as_raw_fd()), events(*watches));
        let done = if is_watched {
            epoll::modify(&self.epoll, fd, data, events)
        } else {
            epoll::add(&self.epoll, fd, data, events)
        };
        done.map_err(|e| Error::from_os(e, Operation::SetUp))
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        let Some(watches) = self.interests.get_mut(&fd.as_raw_fd()) else { return };
        if watches.readable == Some(token) {
            watches.readable = None;
        }
        if watches.writable == Some(token) {
            watches.writable = None;
        }
        // An error means that the descriptor was closed, which also ends the watch.
        let _ = if watches.readable.is_none() && watches.writable.is_none() {
            self.interests.remove(&fd.as_raw_fd());
            epoll::delete(&self.epoll, fd)
        } else {
            epoll::modify(&self.epoll, fd, data(fd.as_raw_fd()), events(*watches))
        };
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

fn data(fd: RawFd) -> epoll::EventData {
    epoll::EventData::new_u64(fd as u64)
}

/// Edge-triggered: each arrival gives one event, as with a ring's poll.
fn events(watches: FdInterests) -> epoll::EventFlags {
    let mut events = epoll::EventFlags::ET;
    if watches.readable.is_some() {
        events |= epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
    }
    if watches.writable.is_some() {
        events |= epoll::EventFlags::OUT;
    }
    events
}
