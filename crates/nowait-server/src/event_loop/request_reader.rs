//! Parses received bytes into requests for the engine.
//!
//! Invariant: how the socket cuts the stream makes no difference. A request header is taken whole
//! or stays in the unparsed input, and each request taken gets exactly one reply.

use std::ops::RangeInclusive;

use nowait::{BlockMap, IoQueue, Op, Request, injected_panic};

use crate::event_loop::{EventLoop, InFlight, tag};
use crate::nbd::command::TransmissionMode;
use crate::nbd::connection::{IncomingWrite, Phase, ReadState};
use crate::nbd::extended_headers::ParseError;
use crate::nbd::handshake::HandshakeProgress;
use crate::nbd::reply::builder;
use crate::nbd::reply::builder::RequestContext;
use crate::nbd::reply::header::{ChunkPosition, ReplyEncoder};
use crate::nbd::reply::send_queue::ReplyBody;
use crate::nbd::wire::{ReplyMode, RequestHeader};
use crate::nbd::{command, extended_headers};

/// A batch of this many requests is served in halves. A smaller one would wake the client too
/// often; with a larger one the client is busy anyway.
const HALF_BATCH_REQUESTS: RangeInclusive<u64> = 12..=32;
/// The fewest bytes that such a batch has.
const HALF_BATCH_BYTES: usize =
    *HALF_BATCH_REQUESTS.start() as usize * ReplyMode::Simple.request_bytes();

/// Result of one parse step.
pub(crate) enum ParseProgress {
    /// This many bytes were consumed, and more may follow.
    Bytes(usize),
    /// The input ends within a header or a payload.
    NeedMore,
    /// The request cannot be accepted now: a limit is reached or memory is short.
    Blocked,
}

/// A request that was just received.
struct ParsedRequest {
    transmission: TransmissionMode,
    request: RequestContext,
    /// Bytes of the header and, for block status with extended headers, of its payload.
    taken: usize,
    /// Bytes of payload that follow.
    payload: u64,
}

impl<Q: IoQueue, M: BlockMap> EventLoop<Q, M> {
    /// How many bytes of the received `input` to parse first. `usize::MAX` (all), unless it holds
    /// many requests and requests complete inline: then the client gets its first replies, and
    /// makes new requests, while the second half is served.
    pub(crate) fn half_batch_len(&self, index: usize, input: &[u8]) -> usize {
        if !self.completes_inline || input.len() < HALF_BATCH_BYTES {
            return usize::MAX;
        }
        let phase = self.connections.get(index).map(|connection| &connection.phase);
        let Some(Phase::Transmission(transmission)) = phase else { return usize::MAX };
        // A discarded payload may look like a request; halving it does no harm.
        let Some(header) = RequestHeader::parse(transmission.mode, input) else {
            return usize::MAX;
        };
        let head = transmission.mode.request_bytes() as u64;
        let one = header.payload(transmission.mode).saturating_add(head);
        let many = HALF_BATCH_REQUESTS.contains(&(input.len() as u64 / one));
        if many { input.len() / 2 } else { usize::MAX }
    }

    /// Parses `input`. After `bytes` bytes it stops at the next boundary of a header or a payload;
    /// the rest goes into the connection's unparsed input.
    pub(crate) fn parse(&mut self, index: usize, mut input: &[u8], bytes: usize) {
        let all = input.len();
        while let Some(connection) = self.connections.get_mut(index) {
            let taken = match (&connection.phase, connection.input) {
                (_, ReadState::Eof | ReadState::Aborted) => return,
                (Phase::Handshake(_), _) => self.negotiate(index, input),
                // Migrates at the end of this service, with its unparsed input.
                (Phase::Handoff(_), _) => ParseProgress::NeedMore,
                (Phase::Transmission(transmission), _) => {
                    let transmission = *transmission;
                    self.parse_next(index, transmission, input)
                }
            };
            let Some(connection) = self.connections.get_mut(index) else { return };
            match taken {
                ParseProgress::Bytes(count) => {
                    input = input.get(count..).unwrap_or_default();
                    if all - input.len() >= bytes && connection.input == ReadState::Open {
                        connection.unparsed.extend_from_slice(input);
                        connection.input = ReadState::Blocked;
                        connection.quantum.halve();
                        return;
                    }
                }
                ParseProgress::NeedMore => {
                    connection.unparsed.extend_from_slice(input);
                    return;
                }
                ParseProgress::Blocked => {
                    connection.unparsed.extend_from_slice(input);
                    connection.input = ReadState::Blocked;
                    if !connection.is_busy() && !self.blocked.contains(&index) {
                        self.blocked.push(index);
                    }
                    return;
                }
            }
        }
    }

    fn negotiate(&mut self, index: usize, input: &[u8]) -> ParseProgress {
        let Some(connection) = self.connections.get_mut(index) else {
            return ParseProgress::NeedMore;
        };
        if input.is_empty() {
            return ParseProgress::NeedMore;
        }
        // Otherwise a client that never reads could pile up replies to its options here.
        if connection.has_unsent() {
            return ParseProgress::Blocked;
        }
        let Phase::Handshake(handshake) = &mut connection.phase else {
            return ParseProgress::NeedMore;
        };
        let mut answer = Vec::new();
        let shared = &self.shared;
        let (used, step) = handshake.feed(input, &|| shared.exports(), &mut answer);
        if !answer.is_empty() {
            connection.send_queue.push_bytes(answer);
        }
        match step {
            HandshakeProgress::More | HandshakeProgress::Answered => {}
            HandshakeProgress::Close => connection.input = ReadState::Eof,
            HandshakeProgress::StartTls => {
                match self.shared.options.tls.credentials() {
                    Some(credentials) => {
                        connection.start_tls(credentials, input.get(used..).unwrap_or_default());
                    }
                    None => connection.abort(),
                }
                return ParseProgress::Bytes(input.len());
            }
            HandshakeProgress::Transmission(negotiated) => {
                if tracing::enabled!(tracing::Level::INFO) {
                    connection.log_opened(self.shared.export_name(negotiated.export));
                }
                connection.mark_transmission();
                connection.phase = match negotiated.export == self.export_index {
                    true => Phase::Transmission(negotiated.into()),
                    false => Phase::Handoff(negotiated),
                };
                self.handshakes.end();
            }
        }
        ParseProgress::Bytes(used)
    }

    /// Takes the next piece of input: a header, or some payload.
    fn parse_next(
        &mut self,
        index: usize,
        transmission: TransmissionMode,
        input: &[u8],
    ) -> ParseProgress {
        let Some(connection) = self.connections.get_mut(index) else {
            return ParseProgress::NeedMore;
        };
        if let Some(payload) = &mut connection.payload {
            let count = payload.fill(input);
            let whole = payload.missing().is_empty();
            return match (whole, count) {
                (true, _) => self.submit_payload(index, count),
                (false, 0) => ParseProgress::NeedMore,
                (false, _) => ParseProgress::Bytes(count),
            };
        }
        if connection.discard_bytes > 0 {
            let count = connection.discard_bytes.min(input.len() as u64);
            connection.discard_bytes -= count;
            return if count > 0 {
                ParseProgress::Bytes(count as usize)
            } else {
                ParseProgress::NeedMore
            };
        }
        if connection.incoming_split.is_some() {
            return self.begin_fragment(index);
        }
        match parse_request(transmission, input) {
            Ok(arrived) => self.take_request(index, arrived),
            Err(ParseError::NeedMore) => ParseProgress::NeedMore,
            Err(ParseError::Malformed) => {
                tracing::info!("{} sent what is no request, or no end of one", connection.peer);
                connection.abort();
                ParseProgress::NeedMore
            }
        }
    }

    #[inline(always)]
    fn take_request(&mut self, index: usize, arrived: ParsedRequest) -> ParseProgress {
        let ParsedRequest { transmission, mut request, taken, payload } = arrived;
        injected_panic::panic_at("event loop");
        let taken = ParseProgress::Bytes(taken);
        let Some(connection) = self.connections.get_mut(index) else {
            return ParseProgress::NeedMore;
        };
        let header = &request.header;
        let io = match command::translate(&self.export, transmission, header) {
            command::Command::Io(io) => io,
            command::Command::Disconnect => {
                connection.input = ReadState::Eof;
                return taken;
            }
            _ if !connection.has_budget(&self.budget, 0) => return ParseProgress::Blocked,
            command::Command::NoOp => {
                connection.refuse(transmission.mode, header, 0);
                return taken;
            }
            command::Command::Error(errno) => {
                connection.discard_bytes = payload;
                connection.refuse(transmission.mode, header, errno);
                return taken;
            }
        };
        if self.should_split(io) {
            self.begin_split(index, request, io);
            return taken;
        }
        let Some(connection) = self.connections.get_mut(index) else {
            return ParseProgress::NeedMore;
        };
        request.budget_used = builder::budget_needed(transmission.mode, io, request.contexts);
        if !connection.has_budget(&self.budget, u64::from(request.budget_used))
            || !self.engine.has_free_slot()
        {
            return ParseProgress::Blocked;
        }
        if io.op == Op::Read && connection.quantum.reads_exhausted() {
            return ParseProgress::Blocked;
        }
        if !matches!(io.op, Op::Read | Op::Write) {
            return self.submit_no_data(index, request, io, taken);
        }
        if builder::is_hole_reply(&self.export, transmission.mode, &request, io) {
            let answer = ReplyEncoder::to(transmission.mode, &request.header);
            let head = answer.hole(ChunkPosition::Last, io.range.pos, io.range.len as u32);
            connection.send_queue.push(head, ReplyBody::None, 0);
            return taken;
        }
        let Some(buf) = self.engine.buffer(io.range) else { return ParseProgress::Blocked };
        // The whole buffer, which alignment may make larger than the request.
        request.budget_used = buf.len() as u32;
        self.budget.charge(&mut connection.budget_used, u64::from(request.budget_used));
        if io.op == Op::Write {
            let start = self.engine.buffer_offset(io.range.pos);
            connection.payload = Some(IncomingWrite { request, io, buf, start, filled: 0 });
            return taken;
        }
        connection.quantum.read(io.range.len);
        let key = self.in_flight.insert(InFlight { connection: index, request, split: None });
        match self.engine.submit(io, buf, tag(index, key)) {
            Ok(()) => connection.in_flight += 1,
            Err(rejected) => self.on_rejected(index, key, io, rejected.error.errno()),
        }
        taken
    }

    fn submit_no_data(
        &mut self,
        index: usize,
        request: RequestContext,
        io: Request,
        taken: ParseProgress,
    ) -> ParseProgress {
        let Some(connection) = self.connections.get_mut(index) else {
            return ParseProgress::NeedMore;
        };
        self.budget.charge(&mut connection.budget_used, u64::from(request.budget_used));
        let key = self.in_flight.insert(InFlight { connection: index, request, split: None });
        match self.engine.submit_no_data(io, tag(index, key)) {
            Ok(()) => connection.in_flight += 1,
            Err(rejected) => self.on_rejected(index, key, io, rejected.error.errno()),
        }
        taken
    }

    /// Submits a write whose payload is complete; `count` bytes of it came last.
    fn submit_payload(&mut self, index: usize, count: usize) -> ParseProgress {
        let Some(connection) = self.connections.get_mut(index) else {
            return ParseProgress::NeedMore;
        };
        if !self.engine.has_free_slot() {
            // The complete payload waits in its buffer until a slot is free.
            return if count > 0 { ParseProgress::Bytes(count) } else { ParseProgress::Blocked };
        }
        let Some(IncomingWrite { request, io, buf, .. }) = connection.payload.take() else {
            return ParseProgress::NeedMore;
        };
        let split = connection.take_split_id();
        let key = self.in_flight.insert(InFlight { connection: index, request, split });
        match self.engine.submit(io, buf, tag(index, key)) {
            Ok(()) => connection.in_flight += 1,
            Err(rejected) => self.on_rejected(index, key, io, rejected.error.errno()),
        }
        ParseProgress::Bytes(count)
    }

    /// Answers a request that the engine has not accepted.
    #[cold]
    pub(crate) fn on_rejected(&mut self, index: usize, tag: usize, io: Request, errno: i32) {
        let Some(InFlight { request, split, .. }) = self.in_flight.try_remove(tag) else {
            return;
        };
        if let Some(connection) = self.connections.get_mut(index)
            && let Phase::Transmission(transmission) = connection.phase
        {
            // The slot was checked before, so EAGAIN can only mean that the queue itself is stuck.
            let errno = if errno == libc::EAGAIN { libc::EIO } else { errno };
            if let Some(split) = split {
                return self.on_fragment_done(index, split, &request, io.range.len, errno);
            }
            self.budget.release(&mut connection.budget_used, u64::from(request.budget_used));
            connection.refuse(transmission.mode, &request.header, errno);
        }
    }
}

/// Parses the request at the start of `input`.
#[inline(always)]
fn parse_request(
    transmission: TransmissionMode,
    input: &[u8],
) -> Result<ParsedRequest, ParseError> {
    let TransmissionMode { mode, mut contexts } = transmission;
    let mut taken = mode.request_bytes();
    if input.len() < taken {
        return Err(ParseError::NeedMore);
    }
    let mut header = RequestHeader::parse(mode, input).ok_or(ParseError::Malformed)?;
    let mut payload = header.payload(mode);
    if mode == ReplyMode::Extended {
        let rest = input.get(taken..).unwrap_or_default();
        let used = extended_headers::normalize(&mut header, &mut contexts, rest)?;
        taken += used;
        payload -= used as u64;
    }
    let request = RequestContext { header, contexts, budget_used: 0 };
    Ok(ParsedRequest { transmission, request, taken, payload })
}
