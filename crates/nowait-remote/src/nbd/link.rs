//! The thread of an NBD storage: it has the connection, moves the bytes of its [`Session`], and makes
//! a new connection when one is lost.
//!
//! Invariant: the thread sleeps only when there is nothing to do; it ends when the storage is closed
//! and its last request has completed, or cannot complete.

use std::io::{ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use nowait_nbd::client::{ClientError, Connection, Export, failure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::nbd::connector::{Connector, NbdOptions};
use crate::nbd::inbox::Inbox;
use crate::nbd::limits::Limits;
use crate::nbd::link_counters::LinkCounters;
use crate::nbd::session::{Next, Session};

/// How long the first connection to an NBD server, and its handshake, may take.
/// Beyond it: the image is not opened.
pub(super) const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// The limits of a later one: that for the reconnect, but not less or more than these.
const AGAIN_TIMEOUTS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];
/// Requests that one system call sends.
const BATCH: usize = 16;

/// The thread's data.
pub(super) struct Link {
    inbox: Arc<Inbox>,
    connector: Connector,
    connection: Option<Connection>,
    session: Session,
    /// The times of the session count from here.
    began: Instant,
    reconnect: Duration,
    counters: Arc<LinkCounters>,
    /// Bytes may have come that were not received yet.
    readable: bool,
}

impl Link {
    pub(super) fn new(
        inbox: Arc<Inbox>,
        connector: Connector,
        (connection, export): (Connection, Export),
        place: String,
        options: &NbdOptions,
    ) -> Self {
        let reconnect = options.reconnect;
        let counters = LinkCounters::listed(place.clone());
        Self {
            inbox,
            connector,
            connection: Some(connection),
            session: Session::new(export, place, reconnect, !options.read_only, Limits::DEFAULT),
            began: Instant::now(),
            reconnect,
            counters,
            readable: true,
        }
    }

    /// Whether a change that had completed was lost: no flush succeeds any more.
    pub(super) fn lost(&self) -> Arc<AtomicBool> {
        self.session.log().lost()
    }

    /// Serves until the storage is closed and its last request has completed.
    pub(super) fn run(mut self) {
        loop {
            let closed = self.inbox.take(self.session.waiting());
            match &mut self.connection {
                Some(connection) if closed && self.session.is_idle() => {
                    return connection.disconnect();
                }
                Some(_) => {
                    if let Err(why) = self.advance() {
                        self.connection = None;
                        self.counters.lost(self.session.repeatable());
                        self.session.lose(&why, self.began.elapsed());
                    }
                }
                None if closed => return,
                None => match self.session.next(self.began.elapsed()) {
                    Next::Connect => self.connect(),
                    Next::Wait(until) => self.sleep(until),
                },
            }
        }
    }

    /// Asks for jobs, sends and receives; sleeps if there was nothing to do.
    fn advance(&mut self) -> Result<(), String> {
        let asked = self.session.ask_waiting();
        self.send()?;
        self.receive()?;
        let answered = self.session.finish_answered(self.began.elapsed());
        self.counters.unflushed(self.session.unflushed_bytes());
        if !answered && !asked {
            self.sleep(None);
        }
        Ok(())
    }

    /// Sends as much as the socket takes.
    fn send(&mut self) -> Result<(), String> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        while self.session.has_unsent() {
            let slices: Vec<IoSlice<'_>> = self.session.unsent(BATCH)?;
            match connection.send(&slices) {
                Ok(count) => self.session.sent(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(failure(&error.into(), "")),
            }
        }
        match connection.flush() {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(failure(&error.into(), "")),
            _ => Ok(()),
        }
    }

    /// Receives what has come.
    fn receive(&mut self) -> Result<(), String> {
        let Some(connection) = self.connection.as_mut().filter(|_| self.readable) else {
            return Ok(());
        };
        let mut answers = self.session.answers();
        loop {
            match connection.receive(&mut answers) {
                // Jobs that have completed are told of first.
                Ok(true) if answers.completed.is_empty() => {}
                Ok(true) => return Ok(()),
                Ok(false) => break,
                Err(ClientError::Lost(error)) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(failure(&error, "")),
            }
        }
        self.readable = false;
        Ok(())
    }

    /// Sleeps until there is a job, the socket is ready, or the time has come.
    fn sleep(&mut self, until: Option<Duration>) {
        if !self.inbox.prepare_sleep() {
            return;
        }
        let mut fds = vec![PollFd::from_borrowed_fd(self.inbox.fd(), PollFlags::IN)];
        if let Some((socket, events)) = self.socket() {
            fds.push(PollFd::from_borrowed_fd(socket, events));
        }
        let left = until.map(|until| until.saturating_sub(self.began.elapsed()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        // EINTR: the caller looks again at what is to be done.
        let _ = poll(&mut fds, left.as_ref());
        let [woken, ready] =
            [0, 1].map(|at| fds.get(at).is_some_and(|fd| !fd.revents().is_empty()));
        self.inbox.awake(woken);
        self.readable |= ready;
    }

    fn socket(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let connection = self.connection.as_ref()?;
        let unsent = connection.has_unsent() || self.session.has_unsent();
        let events = if unsent { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        Some((connection.as_fd(), events))
    }

    /// One attempt to connect.
    fn connect(&mut self) {
        let timeout = self.reconnect.clamp(AGAIN_TIMEOUTS[0], AGAIN_TIMEOUTS[1]);
        match self.connector.connect(timeout) {
            Ok((connection, export)) => {
                if self.session.connected(export, self.began.elapsed()) {
                    self.connection = Some(connection);
                    self.readable = true;
                    self.counters.reconnected();
                }
            }
            Err(why) => self.session.unreachable(&why, self.began.elapsed()),
        }
    }
}
