//! From received bytes to requests of the engine.
//!
//! Invariant: how the bytes were cut by the socket makes no difference; a request is taken whole
//! or stays in the stash, and each one taken gets exactly one reply.
//! Knows: conn, door, handshake, turn. Known by: turn (which calls `parse`).

use nowait::{Io, Map, Op, Queue, Span};

use super::conn::{Conn, Input, Payload, Phase};
use super::door::{self, Dialect};
use super::handshake::Step;
use super::reply::Body;
use super::turn::{Asked, Thread};
use super::wire::{self, ReplyHead, RequestHeader};

/// What became of the next bytes.
enum Taken {
    /// So many were used up, and more may follow.
    Bytes(usize),
    /// Not enough for anything.
    TooFew,
    /// Understood, but there is no room for it now.
    Stall,
}

impl<Q: Queue, M: Map> Thread<Q, M> {
    /// Takes what `input` holds; the rest goes into the connection's stash.
    pub(crate) fn parse(&mut self, index: usize, mut input: &[u8]) {
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
                Taken::Bytes(count) => input = input.get(count..).unwrap_or_default(),
                Taken::TooFew => {
                    conn.stash.extend_from_slice(input);
                    return;
                }
                Taken::Stall => {
                    conn.stash.extend_from_slice(input);
                    conn.input = Input::Stalled;
                    self.stalled.push(index);
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
            }
        }
        Taken::Bytes(used)
    }

    /// Takes the next part of a request: a header, or some of its payload.
    fn take(&mut self, index: usize, dialect: Dialect, input: &[u8]) -> Taken {
        let Some(conn) = self.conns.get_mut(index) else { return Taken::TooFew };
        if conn.skip > 0 {
            let count = conn.skip.min(input.len() as u64);
            conn.skip -= count;
            return if count > 0 { Taken::Bytes(count as usize) } else { Taken::TooFew };
        }
        if let Some(payload) = &mut conn.payload {
            let count = payload.fill(input);
            let whole = payload.missing().is_empty();
            return match (whole, count) {
                (true, _) => self.submit_payload(index, count),
                (false, 0) => Taken::TooFew,
                (false, _) => Taken::Bytes(count),
            };
        }
        let Some(bytes) = input.first_chunk::<{ RequestHeader::LEN }>() else {
            return Taken::TooFew;
        };
        let Some(header) = RequestHeader::parse(bytes) else {
            tracing::debug!("a client sent no request magic");
            conn.break_off();
            return Taken::TooFew;
        };
        self.take_request(index, dialect, header)
    }

    fn take_request(&mut self, index: usize, dialect: Dialect, header: RequestHeader) -> Taken {
        const TAKEN: Taken = Taken::Bytes(RequestHeader::LEN);
        let Some(conn) = self.conns.get_mut(index) else { return Taken::TooFew };
        let with_status = dialect.base_allocation.is_some();
        let io = match door::translate(&self.device, &header, with_status) {
            door::Asked::Io(io) => io,
            door::Asked::Goodbye => {
                conn.input = Input::Ended;
                return TAKEN;
            }
            _ if !conn.admits(0) => return Taken::Stall,
            door::Asked::Nothing => {
                conn.refuse(dialect, &header, 0);
                return TAKEN;
            }
            door::Asked::Refused(errno) => {
                if header.command == wire::CMD_WRITE {
                    conn.skip = u64::from(header.length);
                }
                conn.refuse(dialect, &header, errno);
                return TAKEN;
            }
        };
        let data = matches!(io.op, Op::Read | Op::Write);
        let bytes = if data { io.range.len } else { 0 };
        if !conn.admits(bytes) || !self.engine.has_room() {
            return Taken::Stall;
        }
        if !data {
            return self.submit_bare(index, dialect, header, io);
        }
        if door::answers_with_hole(&self.device, dialect, &header, io) {
            let RequestHeader { cookie, offset, length, .. } = header;
            conn.out.push(ReplyHead::offset_hole(cookie, offset, length, true), Body::None, 0);
            return TAKEN;
        }
        let Some(buf) = self.engine.buffer(io.range) else { return Taken::Stall };
        conn.held += bytes;
        if io.op == Op::Write {
            let start = self.engine.start(io.range.pos);
            conn.payload = Some(Payload { header, io, buf, start, filled: 0 });
            return TAKEN;
        }
        let tag = self.asked.insert(Asked { conn: index, header });
        match self.engine.submit(io, buf, tag as u64) {
            Ok(()) => conn.in_flight += 1,
            Err(rejected) => self.rejected(index, dialect, tag, rejected.error.errno()),
        }
        TAKEN
    }

    fn submit_bare(
        &mut self,
        index: usize,
        dialect: Dialect,
        header: RequestHeader,
        io: Io,
    ) -> Taken {
        let tag = self.asked.insert(Asked { conn: index, header });
        match self.engine.submit_bare(io, tag as u64) {
            Ok(()) => {
                if let Some(conn) = self.conns.get_mut(index) {
                    conn.in_flight += 1;
                }
            }
            Err(rejected) => self.rejected(index, dialect, tag, rejected.error.errno()),
        }
        Taken::Bytes(RequestHeader::LEN)
    }

    /// Submits a write whose payload, of which `count` bytes came last, is complete.
    fn submit_payload(&mut self, index: usize, count: usize) -> Taken {
        let Some(conn) = self.conns.get_mut(index) else { return Taken::TooFew };
        if !self.engine.has_room() {
            // The payload stays where it is, and is complete when the stall ends.
            return if count > 0 { Taken::Bytes(count) } else { Taken::Stall };
        }
        let Phase::Transmission(dialect) = conn.phase else { return Taken::TooFew };
        let Some(Payload { header, io, buf, .. }) = conn.payload.take() else {
            return Taken::TooFew;
        };
        let tag = self.asked.insert(Asked { conn: index, header });
        match self.engine.submit(io, buf, tag as u64) {
            Ok(()) => conn.in_flight += 1,
            Err(rejected) => self.rejected(index, dialect, tag, rejected.error.errno()),
        }
        Taken::Bytes(count)
    }

    /// The engine has not accepted a request: it is answered at once.
    #[cold]
    fn rejected(&mut self, index: usize, dialect: Dialect, tag: usize, errno: i32) {
        let Some(asked) = self.asked.try_remove(tag) else { return };
        if let Some(conn) = self.conns.get_mut(index) {
            // `has_room` was asked before, so EAGAIN can only mean that the queue itself is stuck.
            let errno = if errno == libc::EAGAIN { libc::EIO } else { errno };
            conn.held = conn.held.saturating_sub(u64::from(asked.header.length));
            conn.refuse(dialect, &asked.header, errno);
        }
    }
}

impl Conn {
    /// Answers a request without data: an errno, or 0 for success.
    fn refuse(&mut self, dialect: Dialect, header: &RequestHeader, errno: i32) {
        let head = door::plain_reply(dialect, header.command, header.cookie, errno);
        self.out.push(head, Body::None, 0);
    }

    /// Answers a request that the engine has completed.
    pub(crate) fn reply(
        &mut self,
        header: &RequestHeader,
        completion: nowait::Completion,
        start: usize,
        spans: &[Span],
    ) {
        let Phase::Transmission(dialect) = self.phase else { return };
        let data = matches!(completion.io.op, Op::Read | Op::Write);
        let budget = if data { header.length } else { 0 };
        let (head, body) = door::reply(dialect, header, completion, start, spans);
        self.out.push(head, body, budget);
    }
}
