//! Takes a connection off its thread in the middle of transmission, for another thread or process.
//!
//! Invariant: no byte that the client has sent is lost or served twice: what has led to a request in
//! the engine was answered, all else is input of the next thread.

use nowait::{ByteRange, Flags, Op, Request};

use crate::injected_bug::{ServerBug, injected};
use crate::nbd::connection::{Connection, HandoffConnection};
use crate::nbd::meta_context::Contexts;
use crate::nbd::reply::builder::RequestContext;
use crate::nbd::session::{Phase, ReadState, Session};
use crate::nbd::wire::ReplyMode;
use crate::nbd::write_split::{SplitRest, SplitWrite};

impl Session {
    /// Whether the session can leave its thread: nothing of it is in the engine.
    pub(crate) fn can_be_parked(&self) -> bool {
        self.in_flight == 0 && !matches!(self.phase, Phase::Chosen(_))
    }

    /// Answers a split write of which a fragment has failed while another one is being received: what
    /// its client still sends of it is thrown away.
    fn answer_failed_split(&mut self, mode: ReplyMode) {
        if let Some(incoming) = &self.incoming_split
            && let Some(errno) = self.splits.get(incoming.split).and_then(SplitWrite::failure)
        {
            let SplitWrite { request, .. } = self.splits.remove(incoming.split);
            let missing = self.payload.take().map_or(0, |mut fragment| fragment.missing().len());
            self.discard_bytes += missing as u64;
            self.incoming_split = None;
            self.refuse(mode, &request.header, errno);
        }
    }

    /// Takes what has led to no request in the engine: the input, and the rest of a split write.
    /// What was received of a write is input, behind its header if the write is not split.
    fn take_rest(&mut self, mode: ReplyMode) -> (Vec<u8>, Option<SplitRest>) {
        self.answer_failed_split(mode);
        let (payload, incoming) = (self.payload.take(), self.incoming_split.take());
        let mut unparsed = std::mem::take(&mut self.unparsed);
        let (mut input, mut split) = (Vec::new(), None);
        if let Some(incoming) = incoming
            && let Some(write) = self.splits.try_remove(incoming.split)
        {
            let begun = payload.as_ref().map(|fragment| fragment.io.range);
            let ByteRange { pos, len } = incoming.rest.range;
            let range = match begun {
                Some(begun) => ByteRange::new(begun.pos, begun.len + len),
                None => ByteRange::new(pos, len),
            };
            split = Some(SplitRest { header: write.request.header, range });
        } else if let Some(write) = &payload {
            let (bytes, count) = write.request.header.encode(mode);
            input.extend_from_slice(bytes.get(..count).unwrap_or_default());
        }
        if let Some(write) = &payload {
            let received = write.buf.get(..write.filled);
            input.extend_from_slice(received.unwrap_or_default());
        }
        if !injected(ServerBug::LoseParkedInput) {
            input.append(&mut unparsed);
        }
        (input, split)
    }

    /// Goes on with a split write.
    pub(crate) fn resume_split(&mut self, rest: SplitRest, fragment_bytes: u64) {
        let SplitRest { header, range } = rest;
        let request = RequestContext { header, contexts: Contexts::NONE, budget_used: 0 };
        // One that must be durable before it is answered is not split.
        let io = Request { op: Op::Write, flags: Flags::ALL_OR_ERROR, range };
        self.begin_split(request, io, fragment_bytes);
        // The next fragment gets its buffer before more is received.
        self.input = ReadState::Blocked;
    }
}

impl Connection {
    /// Packs the connection, whose session can be parked.
    pub(crate) fn into_parked(mut self) -> HandoffConnection {
        let mode = match &self.session.phase {
            Phase::Transmission(transmission) => transmission.mode,
            Phase::Handshake(_) | Phase::Chosen(_) => ReplyMode::Simple,
        };
        let (input, split) = self.session.take_rest(mode);
        self.session.unparsed = input;
        HandoffConnection { split, ..self.into_handoff() }
    }
}
