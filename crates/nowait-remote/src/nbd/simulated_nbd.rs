//! The storage of an export without its thread, its sockets and its clock: a simulation gives it the
//! time and the bytes, and takes bytes and ends.
//!
//! Invariant: what it decides is decided by the code of the real storage ([`Session`]); each request
//! has one end.

use std::sync::Arc;
use std::time::Duration;

use nowait::{ByteRange, ExtentStatus, Op};
use nowait_nbd::client::{Export, ReplyParser};

use crate::nbd::job::{Call, Command, Job};
use crate::nbd::limits::Limits;
use crate::nbd::session::{Next, Session};

/// Requests of which bytes are sent together.
const BATCH: usize = 16;

/// The limits of a simulated storage, much smaller than the real ones.
#[derive(Clone, Copy, Debug)]
pub struct SimLimits {
    /// Jobs with the server, and their bytes.
    pub asked: (usize, u64),
    /// Changes of the replay log, and their bytes, from which on it asks for a flush.
    pub trim: (usize, u64),
    /// Changes of the replay log, and their bytes, from which on no change is begun.
    pub most: (usize, u64),
}

/// A request to a simulated storage.
pub struct SimNbdRequest {
    /// A number of the client's choice, which its end has.
    pub tag: u64,
    /// The operation; a discard promises zeros, as that of the real storage.
    pub op: Op,
    /// The range in bytes, within the export.
    pub range: ByteRange,
    /// A write is durable when it completes.
    pub durable: bool,
    /// The data of a write.
    pub data: Vec<u8>,
}

/// The end of a request.
pub struct SimNbdEnd {
    /// The number of the request.
    pub tag: u64,
    /// Success, or a positive errno.
    pub result: Result<(), i32>,
    /// The bytes that were read.
    pub data: Vec<u8>,
    /// The answer of a status request.
    pub extents: Vec<ExtentStatus>,
}

/// The next step of a simulated storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimNext {
    /// It has a connection. `true`: a job was asked or has ended.
    Exchange(bool),
    /// It connects.
    Connect,
    /// It waits for a job, or for this time.
    Wait(Option<Duration>),
}

/// A simulated storage.
pub struct SimulatedNbd {
    session: Session,
    parser: Option<ReplyParser>,
    calls: Vec<(u64, Arc<Call>)>,
}

impl SimulatedNbd {
    /// The storage of `export`, connected at time zero.
    #[must_use]
    pub fn new(export: Export, reconnect: Duration, limits: SimLimits) -> Self {
        let limits = Limits { asked: limits.asked, trim: limits.trim, most: limits.most };
        let session = Session::new(export, String::new(), reconnect, true, limits);
        Self { session, parser: Some(ReplyParser::new(export.mode)), calls: Vec::new() }
    }

    /// Takes a request.
    pub fn ask(&mut self, request: SimNbdRequest) {
        let SimNbdRequest { tag, op, range, durable, data } = request;
        let command = match op {
            Op::Read => Command::Read,
            Op::Write => Command::Write,
            Op::Flush => Command::Flush,
            Op::Zero => Command::Zero { keep: true },
            Op::Discard => Command::Zero { keep: false },
            Op::Status => Command::Status,
        };
        let (job, call) = Job::of_call(command, range, durable, data);
        self.session.waiting().push_back(job);
        self.calls.push((tag, call));
    }

    /// One iteration of the storage's thread at the time `now`, but for the bytes.
    pub fn poll(&mut self, now: Duration) -> SimNext {
        if self.parser.is_none() {
            return match self.session.next(now) {
                Next::Connect => SimNext::Connect,
                Next::Wait(until) => SimNext::Wait(until),
            };
        }
        let asked = self.session.ask_waiting();
        SimNext::Exchange(self.session.finish_answered(now) || asked)
    }

    /// Whether it has a connection.
    #[must_use]
    pub const fn is_connected(&self) -> bool {
        self.parser.is_some()
    }

    /// It has connected to `export`. Returns whether it uses the connection.
    pub fn connected(&mut self, export: Export, now: Duration) -> bool {
        let used = self.session.connected(export, now);
        self.parser = used.then(|| ReplyParser::new(export.mode));
        used
    }

    /// It could not connect.
    pub fn unreachable(&mut self, now: Duration) {
        self.session.unreachable("nothing listens there", now);
    }

    /// The next bytes for the server, at most `most`; they count as sent.
    ///
    /// # Errors
    /// The connection cannot go on.
    pub fn send(&mut self, most: usize) -> Result<Vec<u8>, String> {
        let mut bytes = self.session.unsent(BATCH)?.iter().flat_map(|part| part.to_vec()).collect();
        Vec::truncate(&mut bytes, most);
        self.session.sent(bytes.len());
        Ok(bytes)
    }

    /// `bytes` have come from the server, received as the real connection receives them: the data of
    /// a read into its memory. What breaks the protocol closes the connection.
    pub fn receive(&mut self, bytes: &[u8], now: Duration) {
        let Some(parser) = &mut self.parser else { return };
        let mut answers = self.session.answers();
        let target = parser.data_target(&mut answers).unwrap_or_default();
        let (direct, rest) = bytes.split_at(target.len().min(bytes.len()));
        target.iter_mut().zip(direct).for_each(|(to, from)| *to = *from);
        let mut taken = Ok(());
        if !direct.is_empty() {
            taken = parser.data_received(direct.len(), &mut answers);
        }
        if let Err(why) = taken.and_then(|()| parser.feed(rest, &mut answers)) {
            self.lose(&why, now);
        }
    }

    /// The connection is lost, `why`.
    pub fn lose(&mut self, why: &str, now: Duration) {
        if self.parser.take().is_some() {
            self.session.lose(why, now);
        }
    }

    /// The requests that have completed.
    pub fn ends(&mut self) -> Vec<SimNbdEnd> {
        let mut ends = Vec::new();
        self.calls.retain(|(tag, call)| match call.take() {
            None => true,
            Some(answer) => {
                let (result, data, extents) = (answer.result, answer.data, answer.extents);
                ends.push(SimNbdEnd { tag: *tag, result, data, extents });
                false
            }
        });
        ends
    }

    /// Whether it has given up a change that had completed: no flush succeeds.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        self.session.log().has_lost()
    }

    /// The changes in the replay log, and their bytes.
    #[must_use]
    pub fn log_size(&self) -> (usize, u64) {
        (self.session.log().len(), self.session.log().bytes())
    }
}
