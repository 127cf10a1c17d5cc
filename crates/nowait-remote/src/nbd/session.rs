//! Session of an NBD storage with its server, from one connection to the next: which job is asked when,
//! what its answer means, and what is asked again.
//!
//! Invariant: what the server has not answered when a connection closes is asked again on the next one,
//! behind all changes of the replay log; a flush succeeds only if no change is lost that had completed
//! before it. Of two changes that overlap, the later one is asked when the earlier one has completed, so
//! that asking again keeps their order; and so is a read behind a change that is asked again. It does
//! no I/O and reads no clock: bytes and the time are given to it, so that a simulation runs it as the
//! thread does.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Duration;

use nowait::ExtentStatus;
use nowait_nbd as nbd;
use nowait_nbd::client::Export;
use slab::Slab;

use crate::fault_log::{FaultLog, LONG};
use crate::nbd::injected_bug::{RemoteBug, injected};
use crate::nbd::job::{Command, Job, Origin};
use crate::nbd::limits::Limits;
use crate::nbd::replay_log::ReplayLog;
use crate::nbd::requests::{Answers, Asked};

/// Between two attempts to connect: the first pause, and the longest one.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];
/// The abilities of an export that it must not lose.
const ABILITIES: u16 = nbd::FLAG_SEND_FLUSH | nbd::FLAG_SEND_FUA | nbd::FLAG_SEND_WRITE_ZEROES;

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

/// The connection.
enum State {
    /// There is one, to this export.
    Connected(Export),
    /// There is none; the time of the next attempt to connect.
    Lost { next_attempt: Duration },
    /// The export is another one now; nothing is asked for any more.
    Changed,
}

/// The next step without a connection.
pub(super) enum Next {
    /// An attempt to connect, whose outcome [`Session::connected`] or [`Session::unreachable`] takes.
    Connect,
    /// Nothing before this time, or before there is a job.
    Wait(Option<Duration>),
}

/// The time since the last answer of a server whose connection was lost.
#[derive(Clone, Copy)]
struct Outage {
    since: Duration,
    attempts: u32,
    /// The pause before the next attempt but the first.
    pause: Duration,
    /// The log has a line of its begin.
    told: bool,
    /// The time for the reconnect has passed: requests fail until the server is there again.
    gave_up: bool,
}

/// The jobs of a storage. All times count from its start.
pub(super) struct Session {
    /// The export as it was first.
    export: Export,
    /// The URI, for the log.
    place: String,
    reconnect: Duration,
    writes: bool,
    state: State,
    /// Until the server has answered a request: a connection alone proves nothing.
    outage: Option<Outage>,
    faults: FaultLog,
    waiting: VecDeque<Job>,
    asked: Slab<Asked>,
    asked_bytes: u64,
    next_number: u64,
    outgoing: VecDeque<Outgoing>,
    /// Bytes of the first outgoing request that the socket has taken.
    sent: usize,
    completed: Vec<usize>,
    log: ReplayLog,
    limits: Limits,
    /// Changes of the log that are asked again, and are first among the waiting and asked jobs.
    replays: usize,
    /// Changes with the server that were so on an earlier connection.
    repeats: usize,
    /// A flush for the log is with the server.
    trims: bool,
}

impl Session {
    /// The jobs of a storage that is connected to `export`, of `place` in the log.
    pub(super) fn new(
        export: Export,
        place: String,
        reconnect: Duration,
        writes: bool,
        limits: Limits,
    ) -> Self {
        Self {
            export,
            faults: FaultLog::new(place.clone()),
            place,
            reconnect,
            writes,
            state: State::Connected(export),
            outage: None,
            waiting: VecDeque::new(),
            asked: Slab::new(),
            asked_bytes: 0,
            next_number: 0,
            outgoing: VecDeque::new(),
            sent: 0,
            completed: Vec::new(),
            log: ReplayLog::new(limits),
            limits,
            replays: 0,
            repeats: 0,
            trims: false,
        }
    }

    /// The jobs that are not with the server; new ones come behind the others.
    pub(super) const fn waiting(&mut self) -> &mut VecDeque<Job> {
        &mut self.waiting
    }

    /// Whether there is no job.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.asked.is_empty()
    }

    /// Requests that are asked again if the connection closes now.
    pub(super) fn repeatable(&self) -> usize {
        self.asked.len() + self.log.len()
    }

    /// Bytes that were written and are covered by no flush.
    pub(super) const fn unflushed_bytes(&self) -> u64 {
        self.log.bytes()
    }

    pub(super) const fn log(&self) -> &ReplayLog {
        &self.log
    }

    /// Whether bytes wait to be sent.
    pub(super) fn has_unsent(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Ends the jobs that the server has answered; `now` is the time. Returns whether there was one.
    pub(super) fn finish_answered(&mut self, now: Duration) -> bool {
        let completed = std::mem::take(&mut self.completed);
        let any = !completed.is_empty();
        for index in completed {
            let asked = self.asked.remove(index);
            self.asked_bytes -= asked.job.range.len;
            self.repeats -= usize::from(asked.job.is_repeat());
            self.finish(asked, now);
        }
        any
    }

    /// Asks for the first of the waiting jobs, as far as that is allowed now. Returns whether there
    /// was one.
    pub(super) fn ask_waiting(&mut self) -> bool {
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
        let (most, most_bytes) = self.limits.asked;
        if !self.asked.is_empty() && (self.asked.len() >= most || bytes > most_bytes) {
            return false;
        }
        let replay = matches!(job.origin, Origin::Replay);
        if self.replays > 0 && !replay {
            return false;
        }
        let change = job.command.changes();
        if change && !replay && self.log.is_full() {
            return false;
        }
        // A change that is asked again may have been read before, and must not be missing from a later
        // read.
        let waits = |asked: &Asked| {
            let orders = match change {
                true => !injected(RemoteBug::ForgetOverlap),
                false => asked.job.is_repeat() && !injected(RemoteBug::ReadBesideRepeated),
            };
            orders && asked.conflicts(job)
        };
        let none = job.command == Command::Flush || !change && self.repeats == 0;
        none || !self.asked.iter().any(|(_, asked)| waits(asked))
    }

    fn ask(&mut self, mut job: Job) {
        let State::Connected(export) = &self.state else { return self.waiting.push_front(job) };
        let room = self.export.size.saturating_sub(job.range.pos);
        match job.command {
            // A device answers them like this.
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
        if job.command == Command::Flush && injected(RemoteBug::TrimWhenAsked) {
            self.log.forget(self.log.next());
        }
        let part_bytes = u64::from(export.max_bytes);
        self.asked_bytes += job.range.len;
        self.repeats += usize::from(job.is_repeat());
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
    fn finish(&mut self, asked: Asked, now: Duration) {
        if let Some(outage) = self.outage.take().filter(|outage| outage.told) {
            let lost = now.saturating_sub(outage.since).as_millis();
            tracing::warn!("{}: the server answers again, after {lost} ms", self.place);
        }
        self.faults.pass(now);
        let Asked { mut job, covers, errno, extents, .. } = asked;
        let replay = matches!(job.origin, Origin::Replay);
        self.replays -= usize::from(replay);
        match (job.command, errno) {
            (Command::Flush, 0) if injected(RemoteBug::TrimTooMuch) => {
                self.log.forget(self.log.next());
            }
            (Command::Flush, 0) => self.log.forget(covers),
            (Command::Write | Command::Zero { .. }, 0) => {
                let durable = job.durable && self.has(nbd::FLAG_SEND_FUA);
                // A durable write is kept behind others: those may be asked again, and it may overlap
                // one of them.
                let earlier = !self.log.is_empty() && !injected(RemoteBug::ForgetDurable);
                if self.has(nbd::FLAG_SEND_FLUSH) && (!durable || earlier) {
                    self.log.push(job.command, job.range, std::mem::take(&mut job.data));
                }
                if job.durable && !durable {
                    job.command = Command::Flush;
                    return self.waiting.push_front(job);
                }
            }
            (_, errno) if replay => {
                let what = "a write that had completed is lost: no flush succeeds until nowait is \
                            started again";
                tracing::error!(
                    "{}: the server answered error {errno} to it again, {what}",
                    self.place
                );
                self.log.lose();
            }
            (Command::Flush, _) if !injected(RemoteBug::ForgetFailedFlush) => {
                tracing::error!(
                    "{}: the server has refused a flush with error {errno}: none succeeds until \
                     nowait is started again",
                    self.place
                );
                self.log.lose();
            }
            _ => {}
        }
        self.trims &= !matches!(job.origin, Origin::Trim);
        let errno = match job.command {
            Command::Flush if errno == 0 && self.log.has_lost() => libc::EIO,
            _ => errno,
        };
        job.end(if errno == 0 { Ok(()) } else { Err(errno) }, extents);
    }

    /// Bytes to be sent next, of at most `requests` requests; each has a header and may have data.
    ///
    /// # Errors
    /// The connection cannot go on.
    pub(super) fn unsent(&self, requests: usize) -> Result<Vec<IoSlice<'_>>, String> {
        let mut slices = Vec::with_capacity(2 * requests);
        let mut skip = self.sent;
        for request in self.outgoing.iter().take(requests) {
            let data = match request.data {
                None => &[],
                Some((index, start, len)) => {
                    let asked = self.asked.get(index);
                    let data = asked.and_then(|asked| asked.job.data.get(start..)?.get(..len));
                    data.ok_or("a write without data")?
                }
            };
            for part in [&request.header, data] {
                let skipped = skip.min(part.len());
                skip -= skipped;
                let rest = part.get(skipped..).unwrap_or_default();
                if !rest.is_empty() {
                    slices.push(IoSlice::new(rest));
                }
            }
        }
        Ok(slices)
    }

    /// The first `count` of the unsent bytes were sent.
    pub(super) fn sent(&mut self, count: usize) {
        self.sent += count;
        while let Some(len) =
            self.outgoing.front().map(Outgoing::len).filter(|len| *len <= self.sent)
        {
            self.sent -= len;
            self.outgoing.pop_front();
        }
    }

    /// The receiver of the server's replies.
    pub(super) fn answers(&mut self) -> Answers<'_> {
        let context = match &self.state {
            State::Connected(export) => export.context,
            State::Lost { .. } | State::Changed => None,
        };
        Answers { asked: &mut self.asked, context, completed: &mut self.completed }
    }

    /// The connection is closed: everything that is not answered waits again, behind the changes of
    /// the replay log.
    pub(super) fn lose(&mut self, why: &str, now: Duration) {
        let outage = self.outage.get_or_insert_with(|| {
            let told = self.faults.begins(why, now);
            if told {
                tracing::warn!("{}: {why}; connecting again", self.place);
            }
            Outage { since: now, attempts: 0, pause: PAUSES[0], told, gave_up: false }
        });
        let pause = if outage.attempts == 0 { Duration::ZERO } else { outage.pause };
        self.state = State::Lost { next_attempt: now + pause };
        let mut asked: Vec<_> = self.asked.drain().collect();
        asked.sort_by_key(|asked| asked.number);
        if injected(RemoteBug::AnswerUnanswered) {
            asked.drain(..).for_each(|asked| asked.job.end(Ok(()), asked.extents));
        }
        // Data that are answered on the next connection are received again; a flush for the log comes again.
        let (replays, others): (Vec<_>, Vec<_>) = asked
            .into_iter()
            .map(|asked| Job { was_asked: true, ..asked.job })
            .filter(|job| !matches!(job.origin, Origin::Trim))
            .partition(|job| matches!(job.origin, Origin::Replay));
        others.into_iter().rev().for_each(|job| self.insert_behind_replays(job));
        replays.into_iter().rev().for_each(|job| self.waiting.push_front(job));
        let mut log = self.log.take_jobs();
        if injected(RemoteBug::ForgetReplay) {
            log.clear();
        }
        log.into_iter().rev().for_each(|job| self.waiting.push_front(job));
        let is_replay = |job: &&Job| matches!(job.origin, Origin::Replay);
        self.replays = self.waiting.iter().filter(is_replay).count();
        self.trims = false;
        self.asked_bytes = 0;
        self.repeats = 0;
        self.outgoing.clear();
        self.sent = 0;
        self.completed.clear();
    }

    /// Puts a job behind the replays that wait, before all others.
    fn insert_behind_replays(&mut self, job: Job) {
        let is_replay = |job: &&Job| matches!(job.origin, Origin::Replay);
        let at = self.waiting.iter().take_while(is_replay).count();
        self.waiting.insert(at, job);
    }

    /// Ends the flushes that wait, if every change that has completed is durable: they need no server.
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

    /// The next step without a connection, at the time `now`. Completes the jobs that wait no longer.
    pub(super) fn next(&mut self, now: Duration) -> Next {
        if matches!(self.state, State::Changed) {
            self.fail_waiting();
            return Next::Wait(None);
        }
        self.end_idle_flushes();
        let (State::Lost { next_attempt }, Some(outage)) = (&self.state, &mut self.outage) else {
            return Next::Wait(None);
        };
        let (next_attempt, deadline) = (*next_attempt, outage.since + self.reconnect);
        let lasts = now.saturating_sub(outage.since);
        if !outage.told && lasts >= LONG {
            outage.told = true;
            let seconds = lasts.as_secs();
            tracing::warn!("{}: no answer for {seconds} s; connecting again", self.place);
        }
        if now >= deadline && outage.attempts > 0 && !outage.gave_up {
            outage.gave_up = true;
            let seconds = self.reconnect.as_secs();
            if outage.told {
                let until = "requests fail until it is";
                tracing::error!("{}: the server is not there for {seconds} s: {until}", self.place);
            }
        }
        let gave_up = outage.gave_up;
        if gave_up {
            self.fail_waiting();
        }
        match () {
            () if now >= next_attempt => Next::Connect,
            () if gave_up => Next::Wait(Some(next_attempt)),
            () => Next::Wait(Some(next_attempt.min(deadline))),
        }
    }

    /// An attempt has led to `export` at the time `now`. Returns whether the connection is used: not
    /// if the export has become another one.
    pub(super) fn connected(&mut self, export: Export, now: Duration) -> bool {
        let lost = self.attempted().filter(|outage| outage.told);
        let lost = lost.map(|outage| now.saturating_sub(outage.since).as_millis());
        if let Err(why) = check_same(&self.export, &export, self.writes) {
            tracing::error!("{}: {why}: it is not used any more", self.place);
            self.state = State::Changed;
            return false;
        }
        if let Some(lost) = lost {
            let (place, again) = (&self.place, self.replays);
            let what = "unflushed writes are made again";
            tracing::info!("{place}: connected after {lost} ms, {again} {what}");
        }
        self.state = State::Connected(export);
        true
    }

    /// An attempt has failed, `why`, at the time `now`.
    pub(super) fn unreachable(&mut self, why: &str, now: Duration) {
        tracing::trace!("{}: {why}", self.place);
        let pause = self.outage.as_ref().map_or(PAUSES[1], |outage| outage.pause);
        self.state = State::Lost { next_attempt: now + pause };
        self.attempted();
    }

    /// Counts an attempt, and doubles the pause after each but the first.
    fn attempted(&mut self) -> Option<&Outage> {
        let outage = self.outage.as_mut()?;
        if outage.attempts > 0 {
            outage.pause = (outage.pause * 2).min(PAUSES[1]);
        }
        outage.attempts = outage.attempts.saturating_add(1);
        Some(outage)
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

/// Whether `export` is still the one that was there `before`.
fn check_same(before: &Export, export: &Export, writes: bool) -> Result<(), String> {
    if export.size != before.size {
        let (now, before) = (export.size, before.size);
        return Err(format!("the export has {now} bytes now, it had {before}"));
    }
    if export.min_block > before.min_block {
        return Err(format!("the export has blocks of {} bytes now", export.min_block));
    }
    if writes && export.flags & nbd::FLAG_READ_ONLY != 0 {
        return Err("the export is read-only now".into());
    }
    if before.flags & ABILITIES & !export.flags != 0 {
        return Err("the server can do less with the export than before".into());
    }
    Ok(())
}
