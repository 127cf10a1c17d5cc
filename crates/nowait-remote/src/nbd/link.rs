//! The thread of an NBD storage: it has the connection, asks for jobs on it, and makes a new one when
//! it is lost.
//!
//! Invariant: what the server has not answered when a connection ends is asked again on the next one,
//! behind all changes of the replay log; a flush succeeds only if no change is lost that had ended
//! before it. Of two changes that overlap, the later one is asked when the earlier one has ended, so
//! that asking again keeps their order.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait::ExtentStatus;
use nowait_nbd as nbd;
use nowait_nbd::client::{ClientError, Connection, Export, failure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use slab::Slab;

use crate::nbd::connector::{Connector, NbdOptions, Refusal};
use crate::nbd::inbox::Inbox;
use crate::nbd::job::{Command, Job, Origin};
use crate::nbd::replay_log::ReplayLog;
use crate::nbd::requests::{Answers, Asked};

/// The limits of the first connection and of its handshake.
pub(super) const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// The limits of a later one: that for the reconnect, but not less or more than these.
const AGAIN_TIMEOUTS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];
/// Between two attempts to connect: the first pause, and the longest one.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];
/// The most jobs that are with the server, and their bytes unless it is one job.
const MAX_ASKED: usize = 512;
const MAX_ASKED_BYTES: u64 = 64 << 20;
/// Requests that one system call sends: each has a header and data.
const BATCH: usize = 16;

/// A request that is to be sent.
struct Outgoing {
    header: [u8; nbd::REQUEST_BYTES],
    /// The job with the data, their offset there, and their bytes.
    data: Option<(usize, usize, usize)>,
}

impl Outgoing {
    fn len(&self) -> usize {
        nbd::REQUEST_BYTES + self.data.map_or(0, |(_, _, len)| len)
    }
}

/// The connection, or since when there is none.
enum State {
    Connected(Connection, Export),
    Lost {
        next_attempt: Instant,
    },
    /// The export is another one now; nothing is asked for any more.
    Changed,
}

/// The time since the last answer of a server whose connection was lost.
#[derive(Clone, Copy)]
struct Outage {
    since: Instant,
    attempts: u32,
    /// The pause before the next attempt but the first.
    pause: Duration,
    /// The time for the reconnect has passed: requests fail until the server is there again.
    gave_up: bool,
}

/// The thread's data.
pub(super) struct Link {
    inbox: Arc<Inbox>,
    connector: Connector,
    /// The export as it was first.
    export: Export,
    /// The URI, for the log.
    place: String,
    reconnect: Duration,
    writes: bool,
    state: State,
    /// Until the server has answered a request: a connection alone proves nothing.
    outage: Option<Outage>,
    waiting: VecDeque<Job>,
    asked: Slab<Asked>,
    asked_bytes: u64,
    next_number: u64,
    outgoing: VecDeque<Outgoing>,
    /// Bytes of the first outgoing request that the socket has taken.
    sent: usize,
    /// Bytes may have come that were not received yet.
    readable: bool,
    ended: Vec<usize>,
    log: ReplayLog,
    /// Changes of the log that are asked again, and are first among the waiting and asked jobs.
    replays: usize,
    /// A flush for the log is with the server.
    trims: bool,
}

impl Link {
    pub(super) fn new(
        inbox: Arc<Inbox>,
        connector: Connector,
        (connection, export): (Connection, Export),
        place: String,
        options: &NbdOptions,
    ) -> Self {
        Self {
            inbox,
            connector,
            export,
            place,
            reconnect: options.reconnect,
            writes: !options.read_only,
            state: State::Connected(connection, export),
            outage: None,
            waiting: VecDeque::new(),
            asked: Slab::new(),
            asked_bytes: 0,
            next_number: 0,
            outgoing: VecDeque::new(),
            sent: 0,
            readable: true,
            ended: Vec::new(),
            log: ReplayLog::new(),
            replays: 0,
            trims: false,
        }
    }

    /// Serves until the storage is closed and its last request has ended.
    pub(super) fn run(mut self) {
        loop {
            let closed = self.inbox.take(&mut self.waiting);
            let idle = self.waiting.is_empty() && self.asked.is_empty();
            match &mut self.state {
                State::Connected(connection, _) if closed && idle => {
                    return connection.disconnect();
                }
                State::Connected(..) => {
                    if let Err(why) = self.advance() {
                        self.lose(&why);
                    }
                }
                State::Lost { .. } | State::Changed if closed => return,
                State::Lost { .. } => self.connect_again(),
                State::Changed => {
                    self.fail_waiting();
                    self.sleep(None);
                }
            }
        }
    }

    /// Asks for jobs, sends and receives; sleeps if there was nothing to do.
    fn advance(&mut self) -> Result<(), String> {
        let mut progress = self.ask_waiting();
        self.send()?;
        self.receive()?;
        for index in std::mem::take(&mut self.ended) {
            let asked = self.asked.remove(index);
            self.asked_bytes -= asked.job.range.len;
            self.finish(asked);
            progress = true;
        }
        if !progress {
            self.sleep(None);
        }
        Ok(())
    }

    /// Asks for the first of the waiting jobs, as far as that is allowed now. Returns whether there
    /// was one.
    fn ask_waiting(&mut self) -> bool {
        let mut any = false;
        while let Some(job) = self.waiting.pop_front() {
            if !self.may_ask(&job) {
                self.waiting.push_front(job);
                break;
            }
            self.ask(job);
            any = true;
        }
        if self.log.wants_flush() && !self.trims && self.replays == 0 {
            self.trims = true;
            self.ask(Job::trim());
            any = true;
        }
        any
    }

    fn may_ask(&self, job: &Job) -> bool {
        let bytes = self.asked_bytes.saturating_add(job.range.len);
        if !self.asked.is_empty() && (self.asked.len() >= MAX_ASKED || bytes > MAX_ASKED_BYTES) {
            return false;
        }
        let replay = matches!(job.origin, Origin::Replay);
        if self.replays > 0 && !replay {
            return false;
        }
        !job.command.changes()
            || (replay || !self.log.is_full())
                && !self.asked.iter().any(|(_, asked)| asked.conflicts(job))
    }

    fn ask(&mut self, mut job: Job) {
        let State::Connected(_, export) = &self.state else { return self.waiting.push_front(job) };
        let room = self.export.size.saturating_sub(job.range.pos);
        match job.command {
            // As a device answers them.
            Command::Read if room == 0 => return job.end(Ok(()), Vec::new()),
            Command::Read => job.range.len = job.range.len.min(room),
            Command::Write if job.range.len > room => {
                return job.end(Err(libc::ENOSPC), Vec::new());
            }
            Command::Status if export.context.is_none() => {
                let all = vec![ExtentStatus::top(job.range.len, false)];
                return job.end(Ok(()), all);
            }
            Command::Flush if !self.has(nbd::FLAG_SEND_FLUSH) => {
                return job.end(Ok(()), Vec::new());
            }
            _ => job.load(),
        }
        let part_bytes = u64::from(export.max_bytes);
        self.asked_bytes += job.range.len;
        let asked = Asked::new(job, self.next_number, self.log.next(), part_bytes);
        self.next_number += 1;
        let has_fua = self.has(nbd::FLAG_SEND_FUA);
        let entry = self.asked.vacant_entry();
        let index = entry.key();
        let asked = entry.insert(asked);
        for (header, data) in asked.headers(index, has_fua) {
            let data = data.map(|(start, len)| (index, start, len));
            self.outgoing.push_back(Outgoing { header: header.compact(), data });
        }
    }

    fn has(&self, flag: u16) -> bool {
        self.export.flags & flag != 0
    }

    /// Ends a job that the server has answered, and keeps a change that no flush covers.
    fn finish(&mut self, asked: Asked) {
        if let Some(outage) = self.outage.take() {
            let lost = outage.since.elapsed().as_millis();
            tracing::warn!("{}: the server answers again, after {lost} ms", self.place);
        }
        let Asked { mut job, covers, errno, extents, .. } = asked;
        let replay = matches!(job.origin, Origin::Replay);
        self.replays -= usize::from(replay);
        match (job.command, errno) {
            (Command::Flush, 0) => self.log.forget(covers),
            (Command::Write | Command::Zero { .. }, 0) => {
                let durable = job.durable && self.has(nbd::FLAG_SEND_FUA);
                // A durable write is kept behind others: those may be asked again, and it may overlap
                // one of them.
                if self.has(nbd::FLAG_SEND_FLUSH) && (!durable || !self.log.is_empty()) {
                    self.log.push(job.command, job.range, std::mem::take(&mut job.data));
                }
                if job.durable && !durable {
                    job.command = Command::Flush;
                    return self.waiting.push_front(job);
                }
            }
            (_, errno) if replay => {
                let what = "a write that had ended is lost: no flush succeeds from now on";
                tracing::error!(
                    "{}: the server answered error {errno} to it again, {what}",
                    self.place
                );
                self.log.lose();
            }
            (Command::Flush, _) if matches!(job.origin, Origin::Trim) => {
                tracing::error!("{}: a flush has failed with error {errno}", self.place);
                self.log.lose();
            }
            _ => {}
        }
        self.trims &= !matches!(job.origin, Origin::Trim);
        let errno = match job.command {
            Command::Flush if self.log.has_lost() => libc::EIO,
            _ => errno,
        };
        job.end(if errno == 0 { Ok(()) } else { Err(errno) }, extents);
    }

    /// Sends as much as the socket takes.
    fn send(&mut self) -> Result<(), String> {
        let Self { state: State::Connected(connection, _), asked, outgoing, sent, .. } = self
        else {
            return Ok(());
        };
        while !outgoing.is_empty() {
            let mut slices = Vec::with_capacity(2 * BATCH);
            for request in outgoing.iter().take(BATCH) {
                slices.push(IoSlice::new(&request.header));
                if let Some((index, start, len)) = request.data {
                    let data =
                        asked.get(index).and_then(|asked| asked.job.data.get(start..)?.get(..len));
                    slices.push(IoSlice::new(data.ok_or("a write without data")?));
                }
            }
            let mut rest = slices.as_mut_slice();
            IoSlice::advance_slices(&mut rest, *sent);
            match connection.send(rest) {
                Ok(count) => *sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(failure(&error.into(), "")),
            }
            while let Some(len) = outgoing.front().map(Outgoing::len).filter(|len| len <= sent) {
                *sent -= len;
                outgoing.pop_front();
            }
        }
        match connection.flush() {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(failure(&error.into(), "")),
            _ => Ok(()),
        }
    }

    /// Receives what has come.
    fn receive(&mut self) -> Result<(), String> {
        let Self { state: State::Connected(connection, export), asked, ended, readable, .. } = self
        else {
            return Ok(());
        };
        if !*readable {
            return Ok(());
        }
        let mut answers = Answers { asked, context: export.context, ended };
        loop {
            match connection.receive(&mut answers) {
                // Jobs that have ended are told of first.
                Ok(true) if answers.ended.is_empty() => {}
                Ok(true) => return Ok(()),
                Ok(false) => break,
                Err(ClientError::Lost(error)) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(failure(&error, "")),
            }
        }
        *readable = false;
        Ok(())
    }

    /// Sleeps until there is a job, the socket is ready, or the time has come.
    fn sleep(&mut self, until: Option<Instant>) {
        if !self.inbox.prepare_sleep() {
            return;
        }
        let mut fds = vec![PollFd::from_borrowed_fd(self.inbox.fd(), PollFlags::IN)];
        if let Some((socket, events)) = self.socket() {
            fds.push(PollFd::from_borrowed_fd(socket, events));
        }
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        // EINTR: the caller looks again at what is to be done.
        let _ = poll(&mut fds, left.as_ref());
        let [woken, ready] =
            [0, 1].map(|at| fds.get(at).is_some_and(|fd| !fd.revents().is_empty()));
        self.inbox.awake(woken);
        self.readable |= ready;
    }

    fn socket(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let State::Connected(connection, _) = &self.state else { return None };
        let unsent = connection.has_unsent() || !self.outgoing.is_empty();
        let events = if unsent { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        Some((connection.as_fd(), events))
    }

    /// The connection has ended: everything that is not answered waits again, behind the changes of
    /// the replay log.
    fn lose(&mut self, why: &str) {
        if self.outage.is_none() {
            tracing::warn!("{}: {why}; connecting again", self.place);
        }
        let mut asked: Vec<_> = self.asked.drain().collect();
        asked.sort_by_key(|asked| asked.number);
        // What is answered on the next connection is received anew; a flush for the log comes anew.
        let (replays, others): (Vec<_>, Vec<_>) = asked
            .into_iter()
            .map(|asked| asked.job)
            .filter(|job| !matches!(job.origin, Origin::Trim))
            .partition(|job| matches!(job.origin, Origin::Replay));
        others.into_iter().rev().for_each(|job| self.insert_behind_replays(job));
        replays.into_iter().rev().for_each(|job| self.waiting.push_front(job));
        let log: Vec<_> = self.log.take_jobs().collect();
        log.into_iter().rev().for_each(|job| self.waiting.push_front(job));
        let is_replay = |job: &&Job| matches!(job.origin, Origin::Replay);
        self.replays = self.waiting.iter().filter(is_replay).count();
        self.trims = false;
        self.asked_bytes = 0;
        self.outgoing.clear();
        self.sent = 0;
        self.ended.clear();
        let now = Instant::now();
        let new = Outage { since: now, attempts: 0, pause: PAUSES[0], gave_up: false };
        let outage = self.outage.get_or_insert(new);
        let pause = if outage.attempts == 0 { Duration::ZERO } else { outage.pause };
        self.state = State::Lost { next_attempt: now + pause };
    }

    /// Puts a job behind the replays that wait, before all others.
    fn insert_behind_replays(&mut self, job: Job) {
        let is_replay = |job: &&Job| matches!(job.origin, Origin::Replay);
        let at = self.waiting.iter().take_while(is_replay).count();
        self.waiting.insert(at, job);
    }

    /// Ends the flushes that wait, if every change that has ended is durable: they need no server.
    fn end_idle_flushes(&mut self) {
        if !self.log.is_empty() || self.log.has_lost() || self.replays > 0 {
            return;
        }
        let is_flush = |job: &Job| job.command == Command::Flush;
        let (flushes, others): (VecDeque<_>, _) =
            std::mem::take(&mut self.waiting).into_iter().partition(is_flush);
        self.waiting = others;
        flushes.into_iter().for_each(|job| job.end(Ok(()), Vec::new()));
    }

    /// One attempt to connect, or a sleep until it is time for it.
    fn connect_again(&mut self) {
        self.end_idle_flushes();
        let (State::Lost { next_attempt }, Some(outage)) = (&self.state, &mut self.outage) else {
            return;
        };
        let (now, next_attempt) = (Instant::now(), *next_attempt);
        let deadline = outage.since + self.reconnect;
        if now >= deadline && outage.attempts > 0 && !outage.gave_up {
            outage.gave_up = true;
            let seconds = self.reconnect.as_secs();
            let until = "requests fail until it is";
            tracing::error!("{}: the server is not there for {seconds} s: {until}", self.place);
        }
        let gave_up = outage.gave_up;
        if gave_up {
            self.fail_waiting();
        }
        if now >= next_attempt {
            return self.attempt();
        }
        self.sleep(Some(if gave_up { next_attempt } else { next_attempt.min(deadline) }));
    }

    fn attempt(&mut self) {
        let Some(outage) = &mut self.outage else { return };
        let first = outage.attempts == 0;
        outage.attempts = outage.attempts.saturating_add(1);
        let timeout = self.reconnect.clamp(AGAIN_TIMEOUTS[0], AGAIN_TIMEOUTS[1]);
        match self.connector.connect_again(&self.export, self.writes, timeout) {
            Ok((connection, export)) => {
                let lost = outage.since.elapsed().as_millis();
                let (place, again) = (&self.place, self.replays);
                let what = "unflushed writes are made again";
                tracing::info!("{place}: connected after {lost} ms, {again} {what}");
                self.state = State::Connected(connection, export);
                self.readable = true;
            }
            Err(Refusal::Unreachable(why)) => {
                tracing::trace!("{}: {why}", self.place);
                self.state = State::Lost { next_attempt: Instant::now() + outage.pause };
            }
            Err(Refusal::Changed(why)) => {
                tracing::error!("{}: {why}: it is not used any more", self.place);
                self.state = State::Changed;
            }
        }
        if !first {
            outage.pause = (outage.pause * 2).min(PAUSES[1]);
        }
    }

    /// Ends the jobs that wait with `EIO`, but for those of the replay log, which are asked when the
    /// server is there again.
    fn fail_waiting(&mut self) {
        let changed = matches!(self.state, State::Changed);
        for job in std::mem::take(&mut self.waiting) {
            match job.origin {
                Origin::Replay if !changed => self.waiting.push_back(job),
                _ => job.end(Err(libc::EIO), Vec::new()),
            }
        }
    }
}
