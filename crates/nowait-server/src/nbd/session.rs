//! A session: the protocol's state of one connection, without I/O. Received bytes go in; requests,
//! and bytes to send, come out.
//!
//! Invariant: nothing here has a socket, a thread or an engine. Every request taken is answered
//! once, and no more is parsed after the end of the input.

use nowait::{ByteRange, PooledBuffer, Request};
use slab::Slab;

use crate::dirty_bitmaps::dirty_bitmap::DirtyExtent;
use crate::dirty_bitmaps::{BitmapName, DirtyBitmaps};
use crate::export::Export;
use crate::nbd::command::TransmissionMode;
use crate::nbd::handshake::{Exports, Handshake, HandshakeProgress, Negotiated};
use crate::nbd::meta_context::Context;
use crate::nbd::reply::builder::{self, CompletedRequest, RequestContext};
use crate::nbd::reply::send_queue::{ReplyBody, SendQueue};
use crate::nbd::wire;
use crate::nbd::wire::{ChunkPosition, ReplyEncoder};
use crate::nbd::wire::{ReplyMode, RequestHeader};
use crate::nbd::write_split::{IncomingSplitWrite, SplitWrite};

/// Words of dirty bitmaps that are looked at for one block status request: it takes a thread well below a
/// millisecond, and tells of 1 TiB at least with the usual granularity and one bitmap.
const SEARCHED_WORDS: u64 = 1 << 18;

/// The phase of a session.
pub(crate) enum Phase {
    Handshake(Handshake),
    /// The client has chosen an export, which the connection is about to use.
    Chosen(Negotiated),
    Transmission(TransmissionMode),
}

/// Whether more requests are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadState {
    /// Yes.
    Open,
    /// Not before a slot, memory or room in the send queue is free, or the next service.
    Blocked,
    /// No: the client has disconnected or closed its side; requests in flight are still answered.
    Eof,
    /// No, and no reply can reach the client any more.
    Aborted,
}

/// A write whose payload is being received.
pub(crate) struct IncomingWrite {
    pub(crate) request: RequestContext,
    pub(crate) io: Request,
    pub(crate) buf: PooledBuffer,
    /// Bytes received so far.
    pub(crate) filled: usize,
}

impl IncomingWrite {
    /// Copies the missing bytes from the start of `bytes`. Returns how many.
    pub(crate) fn fill(&mut self, bytes: &[u8]) -> usize {
        let missing = self.missing();
        let count = missing.len().min(bytes.len());
        missing[..count].copy_from_slice(&bytes[..count]);
        self.filled += count;
        count
    }

    /// The part of the buffer that is still to be filled.
    pub(crate) fn missing(&mut self) -> &mut [u8] {
        self.buf.get_mut(self.filled..).unwrap_or_default()
    }
}

/// The protocol's state of a connection.
pub(crate) struct Session {
    pub(crate) phase: Phase,
    pub(crate) input: ReadState,
    /// Received bytes that are not parsed: part of a header, or the input of a blocked connection.
    pub(crate) unparsed: Vec<u8>,
    pub(crate) payload: Option<IncomingWrite>,
    /// The split write that `payload` is a fragment of.
    pub(crate) incoming_split: Option<IncomingSplitWrite>,
    /// The split writes that are not answered.
    pub(crate) splits: Slab<SplitWrite>,
    /// Payload bytes of a refused request that are still to be received and discarded.
    pub(crate) discard_bytes: u64,
    pub(crate) send_queue: SendQueue,
    /// Requests in the engine.
    pub(crate) in_flight: u32,
    /// The dirty bitmaps that the client has selected.
    pub(crate) bitmaps: Vec<BitmapName>,
}

impl Session {
    /// A session with input that was received and not parsed, bytes of payload that are to be
    /// discarded, and bytes that were not sent.
    pub(crate) fn new(
        phase: Phase,
        unparsed: Vec<u8>,
        discard_bytes: u64,
        unsent: Vec<u8>,
    ) -> Self {
        let mut send_queue = SendQueue::default();
        if !unsent.is_empty() {
            send_queue.push_bytes(unsent);
        }
        Self {
            phase,
            // Unparsed input is parsed before more is received.
            input: if unparsed.is_empty() { ReadState::Open } else { ReadState::Blocked },
            unparsed,
            payload: None,
            incoming_split: None,
            splits: Slab::new(),
            discard_bytes,
            send_queue,
            in_flight: 0,
            bitmaps: Vec::new(),
        }
    }

    /// Consumes bytes of the handshake, and queues the answer to an option. As
    /// [`Handshake::feed`].
    pub(crate) fn negotiate(
        &mut self,
        input: &[u8],
        exports: Exports<'_>,
    ) -> (usize, HandshakeProgress) {
        let Phase::Handshake(handshake) = &mut self.phase else {
            return (0, HandshakeProgress::More);
        };
        let mut answer = Vec::new();
        let fed = handshake.feed(input, exports, &mut answer);
        if let (_, HandshakeProgress::Transmission(_)) = fed {
            self.bitmaps = handshake.take_bitmaps();
        }
        if !answer.is_empty() {
            self.send_queue.push_bytes(answer);
        }
        fed
    }

    /// The client sends nothing more.
    pub(crate) fn end_input(&mut self) {
        self.input = ReadState::Eof;
        self.payload = None;
    }

    /// The client is gone: drops its input and its unsent replies.
    pub(crate) fn abort(&mut self) {
        self.input = ReadState::Aborted;
        self.unparsed = Vec::new();
        self.payload = None;
        self.send_queue.clear();
    }

    /// The write whose payload is complete, and the split write that it is a fragment of.
    pub(crate) fn take_write(&mut self) -> Option<(IncomingWrite, Option<usize>)> {
        let write = self.payload.take()?;
        let split = self.incoming_split.as_ref().map(|incoming| incoming.split);
        self.incoming_split.take_if(|incoming| !incoming.has_more());
        Some((write, split))
    }

    /// Answers a request without data: an errno, or 0 for success.
    pub(crate) fn refuse(&mut self, mode: ReplyMode, header: &RequestHeader, errno: i32) {
        self.send_queue.push(builder::status_reply(mode, header, errno), ReplyBody::None, 0);
    }

    /// Answers a read of `range`, which is a hole.
    pub(crate) fn reply_hole(&mut self, mode: ReplyMode, header: &RequestHeader, range: ByteRange) {
        let answer = ReplyEncoder::to(mode, header);
        let head = answer.hole(ChunkPosition::Last, range.pos, range.len as u32);
        self.send_queue.push(head, ReplyBody::None, 0);
    }

    /// Answers a request that the engine has completed.
    #[inline]
    pub(crate) fn reply(
        &mut self,
        export: &Export,
        request: &RequestContext,
        completed: CompletedRequest<'_>,
    ) {
        let Phase::Transmission(transmission) = self.phase else { return };
        builder::build_reply(&mut self.send_queue, export, transmission.mode, request, completed);
    }

    /// The extents of each of `all` bitmaps that the block status request `io` asks for, in the order of its contexts;
    /// `None` for one that was removed. There are at most [`builder::MAX_EXTENTS`] extents together.
    #[cold]
    pub(crate) fn dirty_extents(
        &self,
        all: &DirtyBitmaps,
        (request, io): (&RequestContext, Request),
        block: u64,
    ) -> Vec<Option<Vec<DirtyExtent>>> {
        let is_one = request.header.flags & wire::CMD_FLAG_REQ_ONE != 0;
        // All bitmaps together have as many extents, and take as long, as one alone.
        let count = request.contexts.bitmaps().max(1);
        let most = if is_one { 1 } else { builder::MAX_EXTENTS / count };
        let words = SEARCHED_WORDS / count as u64;
        let numbers = request.contexts.iter().filter_map(|context| match context {
            Context::DirtyBitmap(number) => Some(usize::from(number)),
            _ => None,
        });
        let extents = |number: usize| {
            let bitmap = all.get(self.bitmaps.get(number)?.id)?;
            Some(bitmap.extents(io.range, block, most, words))
        };
        numbers.map(extents).collect()
    }

    /// Begins a split write with the range of `io`.
    pub(crate) fn begin_split(
        &mut self,
        request: RequestContext,
        io: Request,
        fragment_bytes: u64,
    ) {
        let split = self.splits.insert(SplitWrite::new(request, io));
        self.incoming_split = Some(IncomingSplitWrite { split, rest: io, fragment_bytes });
    }

    /// The next fragment of the write that is being received, and the request it is a part of.
    pub(crate) fn next_fragment(&self) -> Option<(RequestContext, Request)> {
        let incoming = self.incoming_split.as_ref()?;
        Some((self.splits.get(incoming.split)?.request, incoming.next()))
    }

    /// The next fragment has a buffer.
    pub(crate) fn begin_fragment(&mut self, fragment: IncomingWrite) {
        self.payload = Some(fragment);
        if let Some(incoming) = &mut self.incoming_split {
            incoming.begin_next();
        }
    }

    /// A fragment of `bytes` of split write `split_id` has completed with `errno` (0: success).
    pub(crate) fn on_fragment_done(&mut self, split_id: usize, bytes: u64, errno: i32) {
        let Some(split) = self.splits.get_mut(split_id) else { return };
        if split.on_fragment_done(bytes, errno)
            && let Some(incoming) =
                self.incoming_split.as_mut().filter(|incoming| incoming.split == split_id)
        {
            self.discard_bytes = incoming.cancel();
            split.drop_bytes(self.discard_bytes);
            if self.payload.is_none() {
                self.incoming_split = None;
            }
        }
        if let Some(errno) = split.result() {
            let SplitWrite { request, .. } = self.splits.remove(split_id);
            if let (&Phase::Transmission(transmission), false) =
                (&self.phase, self.input == ReadState::Aborted)
            {
                self.refuse(transmission.mode, &request.header, errno);
            }
        }
    }
}
