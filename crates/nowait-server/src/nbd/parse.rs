//! From received bytes to requests of the engine.
//!
//! Invariant: how the bytes were cut by the socket makes no difference; a request is taken whole
//! or stays in the stash, and each one taken gets exactly one reply.
//! Knows: conn, door, extended, respond, handshake, turn. Known by: parts, turn (which calls `parse`).

use std::ops::RangeInclusive;

use nowait::{Io, Map, Op, Queue};

use super::conn::{Conn, Input, Payload, Phase};
use super::door::{self, Dialect};
use super::extended::{self, Trouble};
use super::handshake::Step;
use super::head::{Answer, Place};
use super::reply::Body;
use super::respond::{self, Ended, Request};
use super::turn::{Asked, Thread};
use super::wire::{Mode, RequestHeader};
use crate::device::Device;

/// So many requests received at once are served in halves. With fewer the client would be woken too
/// often, with more it has something to do as it is.
const MANY_REQUESTS: RangeInclusive<u64> = 12..=32;
/// They have at least so many bytes.
const MANY_BYTES: usize = *MANY_REQUESTS.start() as usize * Mode::Simple.request_bytes();

/// What became of the next bytes.
pub(crate) enum Taken {
    /// So many were used up, and more may follow.
    Bytes(usize),
    /// Not enough for anything.
    TooFew,
    /// Understood, but there is no room for it now.
    Stall,
}

/// A request that was just received.
struct Arrived {
    dialect: Dialect,
    request: Request,
    /// Bytes that it was read from.
    taken: usize,
    /// Bytes of payload behind these.
    payload: u64,
}

impl<Q: Queue, M: Map> Thread<Q, M> {
    /// How many bytes of `input`, which was just received, are better taken at first. All of them,
    /// unless it holds many requests and what is handed over ends at once: then the client gets its
    /// first replies, and makes new requests, while the other half is served.
    pub(crate) fn half_of(&self, index: usize, input: &[u8]) -> usize {
        if !self.ends_at_once || input.len() < MANY_BYTES {
            return usize::MAX;
        }
        let phase = self.conns.get(index).map(|conn| &conn.phase);
        let Some(Phase::Transmission(dialect)) = phase else { return usize::MAX };
        // Payload that is passed over may look like a request: a half of it does no harm.
        let Some(header) = RequestHeader::parse(dialect.mode, input) else { return usize::MAX };
        let head = dialect.mode.request_bytes() as u64;
        let one = header.payload(dialect.mode).saturating_add(head);
        let many = MANY_REQUESTS.contains(&(input.len() as u64 / one));
        if many { input.len() / 2 } else { usize::MAX }
    }

    /// Takes what `input` holds, or of its headers and payloads those that begin in the first
    /// `bytes`; the rest goes into the connection's stash.
    pub(crate) fn parse(&mut self, index: usize, mut input: &[u8], bytes: usize) {
        let all = input.len();
        while let Some(conn) = self.conns.get_mut(index) {
            let taken = match (&conn.phase, conn.input) {
                (_, Input::Ended | Input::Broken) => return,
                (Phase::Handshake(_), _) => self.negotiate(index, input),
                // It leaves at the end of this turn, with what it has not parsed.
                (Phase::Chosen(_), _) => Taken::TooFew,
                (Phase::Transmission(dialect), _) => {
                    let dialect = *dialect;
                    self.take(index, dialect, input)
                }
            };
            let Some(conn) = self.conns.get_mut(index) else { return };
            match taken {
                Taken::Bytes(count) => {
                    input = input.get(count..).unwrap_or_default();
                    if all - input.len() >= bytes && conn.input == Input::Open {
                        conn.stash.extend_from_slice(input);
                        conn.input = Input::Stalled;
                        conn.portion.halve();
                        return;
                    }
                }
                Taken::TooFew => {
                    conn.stash.extend_from_slice(input);
                    return;
                }
                Taken::Stall => {
                    conn.stash.extend_from_slice(input);
                    conn.input = Input::Stalled;
                    if !conn.is_busy() && !self.stalled.contains(&index) {
                        self.stalled.push(index);
                    }
                    return;
                }
            }
        }
    }

    fn negotiate(&mut self, index: usize, input: &[u8]) -> Taken {
        let Some(conn) = self.conns.get_mut(index) else { return Taken::TooFew };
        let Phase::Handshake(handshake) = &mut conn.phase else { return Taken::TooFew };
        if input.is_empty() {
            return Taken::TooFew;
        }
        let mut answer = Vec::new();
        let shared = &self.shared;
        let (used, step) = handshake.feed(input, &|| shared.exports(), &mut answer);
        if !answer.is_empty() {
            conn.out.push_bytes(answer);
        }
        match step {
            Step::More => {}
            Step::Close => conn.input = Input::Ended,
            Step::StartTls => {
                match self.shared.options.tls.credentials() {
                    Some(credentials) => {
                        conn.start_tls(credentials, input.get(used..).unwrap_or_default());
                    }
                    None => conn.break_off(),
                }
                return Taken::Bytes(input.len());
            }
            Step::Transmission(agreed) => {
                tracing::debug!("a client has opened export {}", agreed.export);
                conn.phase = match agreed.export == self.export {
                    true => Phase::Transmission(agreed.into()),
                    false => Phase::Chosen(agreed),
                };
                self.handshakes.ended();
            }
        }
        Taken::Bytes(used)
    }

    /// Takes the next part of a request: a header, or some of its payload.
    fn take(&mut self, index: usize, dialect: Dialect, input: &[u8]) -> Taken {
        let Some(conn) = self.conns.get_mut(index) else { return Taken::TooFew };
        if let Some(payload) = &mut conn.payload {
            let count = payload.fill(input);
            let whole = payload.missing().is_empty();
            return match (whole, count) {
                (true, _) => self.submit_payload(index, count),
                (false, 0) => Taken::TooFew,
                (false, _) => Taken::Bytes(count),
            };
        }
        if conn.skip > 0 {
            let count = conn.skip.min(input.len() as u64);
            conn.skip -= count;
            return if count > 0 { Taken::Bytes(count as usize) } else { Taken::TooFew };
        }
        if conn.coming.is_some() {
            return self.begin_part(index);
        }
        match arrived(dialect, input) {
            Ok(arrived) => self.take_request(index, arrived),
            Err(Trouble::TooFew) => Taken::TooFew,
            Err(Trouble::Broken) => {
                tracing::debug!("a client sent what is no request, or no end of one");
                conn.break_off();
                Taken::TooFew
            }
        }
    }

    #[inline(always)]
    fn take_request(&mut self, index: usize, arrived: Arrived) -> Taken {
        let Arrived { dialect, mut request, taken, payload } = arrived;
        let taken = Taken::Bytes(taken);
        let Some(conn) = self.conns.get_mut(index) else { return Taken::TooFew };
        let header = &request.header;
        let io = match door::translate(&self.device, dialect, header) {
            door::Asked::Io(io) => io,
            door::Asked::Goodbye => {
                conn.input = Input::Ended;
                return taken;
            }
            _ if !conn.admits(&self.store, 0) => return Taken::Stall,
            door::Asked::Nothing => {
                conn.refuse(dialect.mode, header, 0);
                return taken;
            }
            door::Asked::Refused(errno) => {
                conn.skip = payload;
                conn.refuse(dialect.mode, header, errno);
                return taken;
            }
        };
        if self.is_to_be_cut(io) {
            self.cut(index, request, io);
            return taken;
        }
        let Some(conn) = self.conns.get_mut(index) else { return Taken::TooFew };
        request.held = respond::held(dialect.mode, io, request.contexts);
        if !conn.admits(&self.store, u64::from(request.held)) || !self.engine.has_room() {
            return Taken::Stall;
        }
        if io.op == Op::Read && conn.portion.has_read_all() {
            return Taken::Stall;
        }
        if !matches!(io.op, Op::Read | Op::Write) {
            return self.submit_bare(index, request, io, taken);
        }
        if respond::answers_with_hole(&self.device, dialect.mode, &request, io) {
            let answer = Answer::to(dialect.mode, &request.header);
            let head = answer.hole(Place::Last, io.range.pos, io.range.len as u32);
            conn.out.push(head, Body::None, 0);
            return taken;
        }
        let Some(buf) = self.engine.buffer(io.range) else { return Taken::Stall };
        // All of the buffer, which may be more than was asked for.
        request.held = buf.len() as u32;
        self.store.take(&mut conn.held, u64::from(request.held));
        if io.op == Op::Write {
            let start = self.engine.start(io.range.pos);
            conn.payload = Some(Payload { request, io, buf, start, filled: 0 });
            return taken;
        }
        conn.portion.read(io.range.len);
        let tag = self.asked.insert(Asked { conn: index, request, cut: None });
        match self.engine.submit(io, buf, tag as u64) {
            Ok(()) => conn.in_flight += 1,
            Err(rejected) => self.rejected(index, tag, io, rejected.error.errno()),
        }
        taken
    }

    fn submit_bare(&mut self, index: usize, request: Request, io: Io, taken: Taken) -> Taken {
        let Some(conn) = self.conns.get_mut(index) else { return Taken::TooFew };
        self.store.take(&mut conn.held, u64::from(request.held));
        let tag = self.asked.insert(Asked { conn: index, request, cut: None });
        match self.engine.submit_bare(io, tag as u64) {
            Ok(()) => conn.in_flight += 1,
            Err(rejected) => self.rejected(index, tag, io, rejected.error.errno()),
        }
        taken
    }

    /// Submits a write whose payload, of which `count` bytes came last, is complete.
    fn submit_payload(&mut self, index: usize, count: usize) -> Taken {
        let Some(conn) = self.conns.get_mut(index) else { return Taken::TooFew };
        if !self.engine.has_room() {
            // The payload stays where it is, and is complete when the stall ends.
            return if count > 0 { Taken::Bytes(count) } else { Taken::Stall };
        }
        let Some(Payload { request, io, buf, start, .. }) = conn.payload.take() else {
            return Taken::TooFew;
        };
        let cut = conn.part_came();
        let tag = self.asked.insert(Asked { conn: index, request, cut });
        let bytes = buf.get(start..start + io.range.len as usize).unwrap_or_default();
        if self.device.forbids(io.range.pos, bytes) {
            self.rejected(index, tag, io, libc::EPERM);
            return Taken::Bytes(count);
        }
        match self.engine.submit(io, buf, tag as u64) {
            Ok(()) => conn.in_flight += 1,
            Err(rejected) => self.rejected(index, tag, io, rejected.error.errno()),
        }
        Taken::Bytes(count)
    }

    /// The engine has not accepted a request: it is answered at once.
    #[cold]
    pub(crate) fn rejected(&mut self, index: usize, tag: usize, io: Io, errno: i32) {
        let Some(Asked { request, cut, .. }) = self.asked.try_remove(tag) else { return };
        if let Some(conn) = self.conns.get_mut(index)
            && let Phase::Transmission(dialect) = conn.phase
        {
            // `has_room` was asked before, so EAGAIN can only mean that the queue itself is stuck.
            let errno = if errno == libc::EAGAIN { libc::EIO } else { errno };
            if let Some(cut) = cut {
                return self.part_ended(index, cut, &request, io.range.len, errno);
            }
            self.store.give_back(&mut conn.held, u64::from(request.held));
            conn.refuse(dialect.mode, &request.header, errno);
        }
    }
}

/// The request that `input` begins with.
#[inline(always)]
fn arrived(dialect: Dialect, input: &[u8]) -> Result<Arrived, Trouble> {
    let Dialect { mode, mut contexts } = dialect;
    let mut taken = mode.request_bytes();
    if input.len() < taken {
        return Err(Trouble::TooFew);
    }
    let mut header = RequestHeader::parse(mode, input).ok_or(Trouble::Broken)?;
    let mut payload = header.payload(mode);
    if mode == Mode::Extended {
        let rest = input.get(taken..).unwrap_or_default();
        let used = extended::unwrap(&mut header, &mut contexts, rest)?;
        taken += used;
        payload -= used as u64;
    }
    let request = Request { header, contexts, held: 0 };
    Ok(Arrived { dialect, request, taken, payload })
}

impl Conn {
    /// Answers a request without data: an errno, or 0 for success.
    pub(crate) fn refuse(&mut self, mode: Mode, header: &RequestHeader, errno: i32) {
        self.out.push(respond::plain(mode, header, errno), Body::None, 0);
    }

    /// Answers a request that the engine has completed.
    pub(crate) fn reply<M: Map>(
        &mut self,
        device: &Device<M>,
        request: &Request,
        ended: Ended<'_>,
    ) {
        let Phase::Transmission(dialect) = self.phase else { return };
        respond::ended(&mut self.out, device, dialect.mode, request, ended);
    }
}
