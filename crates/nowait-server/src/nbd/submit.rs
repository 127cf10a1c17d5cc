//! Passes input to the session, and the requests that come out to the engine, as far as the limits
//! of the connection allow.
//!
//! Invariant: a request is taken off the input when it can be submitted or answered, not before.
//! Each request taken gets exactly one reply.

use nowait::{IoQueue, Op, PooledBuffer, Request, injected_panic};
use slab::Slab;

use crate::frontend_kind::FrontendKind;
use crate::loop_context::LoopContext;
use crate::nbd::command;
use crate::nbd::command::TransmissionMode;
use crate::nbd::connection::Connection;
use crate::nbd::reply::builder;
use crate::nbd::reply::builder::RequestContext;
use crate::nbd::request_reader::{Parsed, ParsedRequest};
use crate::nbd::session::{IncomingWrite, Phase, ReadState};
use crate::nbd::wire::{ReplyMode, RequestHeader};
use crate::nbd::write_split::SplitPolicy;
use crate::refusal_log::{self, Refusal};

/// A request that the engine has accepted.
pub(crate) struct InFlight {
    pub(crate) request: RequestContext,
    /// The split write that the request is a fragment of.
    pub(crate) split: Option<usize>,
}

/// The requests of all connections of a thread.
pub(crate) struct Requests {
    pub(crate) in_flight: Slab<InFlight>,
    pub(crate) split_policy: SplitPolicy,
}

/// Result of one parse step.
pub(crate) enum ParseProgress {
    /// This many bytes were consumed, and more may follow.
    Bytes(usize),
    /// The input ends within a header or a payload.
    NeedMore,
    /// The request cannot be accepted now: a limit is reached or memory is short.
    Blocked,
}

impl Connection {
    /// Takes the next piece of input in the transmission phase: a header, or some payload.
    pub(crate) fn take_next<Q: IoQueue>(
        &mut self,
        requests: &mut Requests,
        context: &mut LoopContext<Q>,
        transmission: TransmissionMode,
        input: &[u8],
    ) -> ParseProgress {
        match self.session.parse_next(transmission, input) {
            Parsed::Request(request) => self.take_request(requests, context, transmission, request),
            Parsed::Bytes(count) => ParseProgress::Bytes(count),
            Parsed::Write(count) => self.submit_write(requests, context, count),
            Parsed::Fragment => self.begin_fragment(context),
            Parsed::NeedMore => ParseProgress::NeedMore,
            Parsed::Malformed => {
                refusal_log::note(
                    Refusal::Protocol,
                    format_args!(
                        "{} sent something that is not a request, or not the end of one",
                        self.peer
                    ),
                );
                self.session.abort();
                ParseProgress::NeedMore
            }
        }
    }

    #[inline(always)]
    fn take_request<Q: IoQueue>(
        &mut self,
        requests: &mut Requests,
        context: &mut LoopContext<Q>,
        transmission: TransmissionMode,
        parsed: ParsedRequest,
    ) -> ParseProgress {
        let ParsedRequest { mut request, taken, payload } = parsed;
        injected_panic::panic_at("event loop");
        let taken = ParseProgress::Bytes(taken);
        let (mode, header) = (transmission.mode, &request.header);
        let Some(served) = &self.member.served else {
            return ParseProgress::NeedMore;
        };
        let io = match command::translate(&served.export, transmission, header) {
            command::Command::Io(io) => io,
            command::Command::Disconnect => {
                self.session.input = ReadState::Eof;
                return taken;
            }
            _ if !self.has_budget(&mut context.budget, 0) => return ParseProgress::Blocked,
            command::Command::NoOp => {
                self.session.refuse(mode, header, 0);
                return taken;
            }
            command::Command::Error(errno) => {
                self.session.discard_bytes = payload;
                self.refuse(context, mode, header, errno);
                return taken;
            }
        };
        if requests.split_policy.applies(io, context.members() == 1) {
            self.session.begin_split(request, io, requests.split_policy.fragment_bytes);
            return taken;
        }
        request.budget_used = builder::budget_needed(mode, io, request.contexts);
        if !self.has_budget(&mut context.budget, u64::from(request.budget_used))
            || !context.has_free_slot(self.member.served())
            || self.member.quantum.holds_back(io.op)
        {
            return ParseProgress::Blocked;
        }
        if !matches!(io.op, Op::Read | Op::Write) {
            self.submit_no_data(requests, context, request, io);
            return taken;
        }
        let served = self.member.served.as_ref();
        if served.is_some_and(|it| builder::is_hole_reply(&it.export, mode, &request, io)) {
            self.session.reply_hole(mode, &request.header, io.range);
            context.count_hole(FrontendKind::Nbd, &mut self.member, io);
            return taken;
        }
        let Some(buf) = self.take_buffer(context, &mut request, io) else {
            return ParseProgress::Blocked;
        };
        if io.op == Op::Write {
            self.session.payload = Some(IncomingWrite { request, io, buf, filled: 0 });
            return taken;
        }
        self.member.quantum.read(io.range.len);
        let in_flight = InFlight { request, split: None };
        self.submit(requests, context, in_flight, io, Some(buf));
        taken
    }

    /// Submits a request without data, whose answer is charged to the connection.
    fn submit_no_data<Q: IoQueue>(
        &mut self,
        requests: &mut Requests,
        context: &mut LoopContext<Q>,
        request: RequestContext,
        io: Request,
    ) {
        let held = u64::from(request.budget_used);
        context.budget.charge(&mut self.member.budget_used, held);
        let in_flight = InFlight { request, split: None };
        self.submit(requests, context, in_flight, io, None);
    }

    /// A buffer for the data of `io`, charged to the connection; `None` if memory is short.
    #[inline(always)]
    fn take_buffer<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        request: &mut RequestContext,
        io: Request,
    ) -> Option<PooledBuffer> {
        let buf = context.buffer(&self.member, io.range)?;
        // All of its memory, which may be larger than the request.
        request.budget_used = buf.capacity() as u32;
        context.budget.charge(&mut self.member.budget_used, u64::from(request.budget_used));
        Some(buf)
    }

    /// Makes room for the next fragment of the write that is being received.
    pub(crate) fn begin_fragment<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
    ) -> ParseProgress {
        let Some((mut request, io)) = self.session.next_fragment() else {
            return ParseProgress::NeedMore;
        };
        if !self.has_budget(&mut context.budget, io.range.len)
            || !context.has_free_slot(self.member.served())
        {
            return ParseProgress::Blocked;
        }
        let Some(buf) = self.take_buffer(context, &mut request, io) else {
            return ParseProgress::Blocked;
        };
        self.session.begin_fragment(IncomingWrite { request, io, buf, filled: 0 });
        ParseProgress::Bytes(0)
    }

    /// Submits a write whose payload is complete; `count` bytes of it came last.
    fn submit_write<Q: IoQueue>(
        &mut self,
        requests: &mut Requests,
        context: &mut LoopContext<Q>,
        count: usize,
    ) -> ParseProgress {
        if !context.has_free_slot(self.member.served()) {
            // The complete payload waits in its buffer until a slot is free.
            return if count > 0 { ParseProgress::Bytes(count) } else { ParseProgress::Blocked };
        }
        let Some((write, split)) = self.session.take_write() else {
            return ParseProgress::NeedMore;
        };
        let IncomingWrite { request, io, buf, .. } = write;
        self.submit(requests, context, InFlight { request, split }, io, Some(buf));
        ParseProgress::Bytes(count)
    }

    /// Submits a request with the buffer for its data, if it has some.
    #[inline(always)]
    fn submit<Q: IoQueue>(
        &mut self,
        requests: &mut Requests,
        context: &mut LoopContext<Q>,
        in_flight: InFlight,
        io: Request,
        buf: Option<PooledBuffer>,
    ) {
        let key = requests.in_flight.insert(in_flight);
        let (served, number, tag_key) = (self.member.served(), self.number, key as u32);
        let submitted = match buf {
            Some(buf) => context.submit_buffer(served, number, tag_key, (io, buf)),
            None => context.submit(served, number, tag_key, |engine, device, tag| {
                engine.submit_no_data(device, io, tag)
            }),
        };
        match submitted {
            Ok(()) => {
                self.session.in_flight += 1;
                self.member.quantum.count(io);
            }
            Err(rejected) => {
                if let Some(in_flight) = requests.in_flight.try_remove(key) {
                    self.on_rejected(context, &in_flight, io, rejected.error.errno());
                }
            }
        }
    }

    /// Answers a request that is not valid here, and counts it.
    #[cold]
    fn refuse<Q: IoQueue>(
        &mut self,
        context: &LoopContext<Q>,
        mode: ReplyMode,
        header: &RequestHeader,
        errno: i32,
    ) {
        if let Some(op) = command::counted_as(header) {
            context.count_error(FrontendKind::Nbd, &self.member, op, errno);
        }
        self.session.refuse(mode, header, errno);
    }

    /// Answers a request that the engine has not accepted.
    #[cold]
    pub(crate) fn on_rejected<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        rejected: &InFlight,
        io: Request,
        errno: i32,
    ) {
        let InFlight { request, split } = rejected;
        // The slot was checked before, so EAGAIN can only mean that the queue itself is stuck.
        let errno = if errno == libc::EAGAIN { libc::EIO } else { errno };
        if let Some(split) = *split {
            return self.on_fragment_done(context, split, request, io.range.len, errno);
        }
        context.release(&mut self.member, u64::from(request.budget_used));
        if let Phase::Transmission(transmission) = self.session.phase {
            self.session.refuse(transmission.mode, &request.header, errno);
        }
    }

    /// A fragment of `bytes` of a split write has completed with `errno` (0: success).
    pub(crate) fn on_fragment_done<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        split: usize,
        fragment: &RequestContext,
        bytes: u64,
        errno: i32,
    ) {
        context.release(&mut self.member, u64::from(fragment.budget_used));
        self.session.on_fragment_done(split, bytes, errno);
    }
}
