//! One connection: its unparsed input, its requests, and its unsent replies.
//!
//! Invariant: a client makes the server hold at most `MAX_REQUESTS` requests and the connection's
//! part of the payload memory, counted until the reply has been sent. Beyond that its socket is not
//! read.

use std::io;
use std::time::Instant;

use nowait::{BlockMap, PooledBuffer};
use rustix::io::Errno;

use crate::buffer_budget::BufferBudget;
use crate::export::Export;
use crate::fairness::Quantum;
use crate::injected_bug;
use crate::injected_bug::ServerBug;
use crate::nbd::command::TransmissionMode;
use crate::nbd::handshake::timeout::HANDSHAKE_TIMEOUT;
use crate::nbd::handshake::{Handshake, Negotiated, TlsState};
use crate::nbd::reply::builder::{self, CompletedRequest, RequestContext};
use crate::nbd::reply::send_queue::{ReplyBody, SendQueue, SendResult};
use crate::nbd::tls_config::Credentials;
use crate::nbd::tls_session::{TlsSession, Transport};
use crate::nbd::wire::{ReplyMode, RequestHeader};
use crate::nbd::write_split::IncomingSplitWrite;
use crate::net::connection_limit::ConnectionPermit;
use crate::net::peer::Peer;
use crate::net::socket::Socket;

/// The most requests of one connection, from their arrival until their reply has been sent.
pub(crate) const MAX_REQUESTS: u32 = 1024;

/// The phase of a connection.
pub(crate) enum Phase {
    Handshake(Handshake),
    /// The client has chosen an export; its requests are for a thread of that export.
    Handoff(Negotiated),
    Transmission(TransmissionMode),
}

/// A connection between two threads.
pub(crate) struct HandoffConnection {
    socket: Socket,
    channel: Transport,
    phase: Phase,
    /// Received bytes that are not parsed.
    unparsed: Vec<u8>,
    /// Unsent bytes of the handshake.
    unsent: Vec<u8>,
    /// Handshake deadline.
    due: Instant,
    peer: Peer,
    permit: ConnectionPermit,
}

impl HandoffConnection {
    /// A connection that was just accepted: the client waits for the greeting.
    pub(crate) fn new(socket: Socket, tls: TlsState, permit: ConnectionPermit) -> Self {
        let (peer, mut unsent) = (Peer::of(&socket), Vec::new());
        Handshake::greeting(&mut unsent);
        let phase = Phase::Handshake(Handshake::new(tls));
        let due = Instant::now() + HANDSHAKE_TIMEOUT;
        Self {
            socket,
            channel: Transport::Plain,
            phase,
            unparsed: Vec::new(),
            unsent,
            due,
            peer,
            permit,
        }
    }
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
    pub(crate) io: nowait::Request,
    pub(crate) buf: PooledBuffer,
    /// Offset of the payload in the buffer.
    pub(crate) start: usize,
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
        let end = self.start + self.io.range.len as usize;
        self.buf.get_mut(self.start + self.filled..end).unwrap_or_default()
    }
}

/// A connection.
pub(crate) struct Connection {
    pub(crate) socket: Socket,
    pub(crate) channel: Transport,
    /// Tells this connection from an earlier one with the same index.
    pub(crate) generation: u64,
    pub(crate) phase: Phase,
    /// Handshake deadline.
    pub(crate) due: Instant,
    pub(crate) peer: Peer,
    pub(crate) input: ReadState,
    /// Received bytes that are not parsed: part of a header, or the input of a blocked connection.
    pub(crate) unparsed: Vec<u8>,
    pub(crate) payload: Option<IncomingWrite>,
    /// The split write that `payload` is a fragment of.
    pub(crate) incoming_split: Option<IncomingSplitWrite>,
    /// Payload bytes of a refused request that are still to be received and discarded.
    pub(crate) discard_bytes: u64,
    pub(crate) send_queue: SendQueue,
    /// Requests in the engine.
    pub(crate) in_flight: u32,
    /// Bytes of payload and of extents held, for requests in flight and unsent replies.
    pub(crate) budget_used: u64,
    /// A writable event is requested.
    pub(crate) waiting_writable: bool,
    /// The socket may have something to read.
    pub(crate) readable: bool,
    /// The peer has closed its side; earlier bytes may still be unread.
    pub(crate) rdhup: bool,
    /// The socket was drained, and whether the end of file followed is unknown.
    pub(crate) eof_unchecked: bool,
    /// It is in the run queues.
    pub(crate) scheduled: bool,
    /// What it may move in this service.
    pub(crate) quantum: Quantum,
    permit: ConnectionPermit,
}

impl Connection {
    pub(crate) fn new(arrival: HandoffConnection, generation: u64) -> Self {
        let HandoffConnection { socket, channel, phase, unparsed, unsent, due, peer, permit } =
            arrival;
        let mut out = SendQueue::default();
        if !unsent.is_empty() {
            out.push_bytes(unsent);
        }
        Self {
            socket,
            channel,
            generation,
            phase,
            due,
            peer,
            // Unparsed input is parsed before more is received.
            input: if unparsed.is_empty() { ReadState::Open } else { ReadState::Blocked },
            unparsed,
            payload: None,
            incoming_split: None,
            discard_bytes: 0,
            send_queue: out,
            in_flight: 0,
            budget_used: 0,
            waiting_writable: false,
            readable: true,
            rdhup: false,
            eof_unchecked: false,
            scheduled: false,
            quantum: Quantum::default(),
            permit,
        }
    }

    /// Notes that the client has chosen an export.
    pub(crate) fn mark_transmission(&self) {
        self.permit.mark_transmission();
    }

    /// Packs the connection for a thread of the export that the client has chosen.
    pub(crate) fn into_handoff(self, transmission: TransmissionMode) -> HandoffConnection {
        let Self { socket, channel, unparsed, send_queue: mut out, due, peer, permit, .. } = self;
        let phase = Phase::Transmission(transmission);
        HandoffConnection {
            socket,
            channel,
            phase,
            unparsed,
            unsent: out.take_unsent(),
            due,
            peer,
            permit,
        }
    }

    /// Whether a request with `bytes` of payload is within the limits of the connection and
    /// `budget`.
    #[inline]
    pub(crate) fn has_budget(&self, budget: &BufferBudget, bytes: u64) -> bool {
        self.in_flight + (self.send_queue.len() as u32) < MAX_REQUESTS
            && budget.admits(self.budget_used, bytes)
    }

    /// Whether an own request or reply is pending, whose completion schedules the connection.
    pub(crate) fn is_busy(&self) -> bool {
        self.in_flight > 0 || self.has_unsent()
    }

    /// Whether bytes are waiting to be sent.
    #[inline]
    pub(crate) fn has_unsent(&self) -> bool {
        match &self.channel {
            Transport::Plain => !self.send_queue.is_empty(),
            Transport::Tls(session) => !self.send_queue.is_empty() || session.has_unsent(),
        }
    }

    /// Sends as much as the socket takes and the quantum allows. Adds the budget of what was sent
    /// to `budget`.
    #[inline]
    pub(crate) fn send(&mut self, budget: &mut u64) -> SendResult {
        let (socket, quota) = (&self.socket, &mut self.quantum.send);
        let before = *quota;
        let sent = match &mut self.channel {
            Transport::Plain => self.send_queue.send(socket, quota, budget),
            Transport::Tls(session) => session.send(&mut self.send_queue, socket, quota, budget),
        };
        let count = before - *quota;
        self.quantum.moved(count);
        sent
    }

    /// Records a receive of `got` bytes into buffers of `room` bytes.
    pub(crate) fn received(&mut self, got: usize, room: usize) {
        // An end of file that comes with the last bytes causes no further event.
        self.readable = got == room || self.rdhup;
        self.quantum.moved(got as u64);
    }

    /// Switches to TLS, for the bytes in `input` too, which followed the client's STARTTLS.
    pub(crate) fn start_tls(&mut self, credentials: &Credentials, input: &[u8]) {
        match TlsSession::new(credentials, &mut self.send_queue) {
            Ok(session) => {
                self.channel = Transport::Tls(Box::new(session));
                // The client has nothing to send before it has the server's side of the handshake.
                self.decrypt(input, &mut Vec::new());
            }
            Err(error) => {
                tracing::warn!("no TLS for {}: {error}", self.peer);
                self.abort();
            }
        }
    }

    /// Decrypts bytes from the socket of a TLS connection. An awaited payload gets its bytes, the
    /// rest is appended to `plaintext`.
    pub(crate) fn decrypt(&mut self, ciphertext: &[u8], plaintext: &mut Vec<u8>) {
        let Transport::Tls(session) = &mut self.channel else { return };
        let mut payload = self.payload.as_mut();
        let result = session.decrypt(ciphertext, |piece| {
            let count = payload.as_mut().map_or(0, |payload| payload.fill(piece));
            plaintext.extend_from_slice(piece.get(count..).unwrap_or_default());
        });
        if let Err(error) = result {
            tracing::info!("{}: TLS has failed: {error}", self.peer);
            // Sends the TLS alert, if the socket has room for it.
            session.send(&mut SendQueue::default(), &self.socket, &mut 0, &mut 0);
            self.abort();
        }
        // The close_notify is handled by the next read.
        self.readable |= self.channel.has_ended();
    }

    /// Logs that the client has opened the export called `name`.
    pub(crate) fn log_opened(&self, name: &str) {
        let how = match &self.channel {
            Transport::Plain => String::new(),
            Transport::Tls(session) => match session.subject() {
                Some(subject) => format!(" by TLS, with the certificate of {subject}"),
                None => " by TLS".to_owned(),
            },
        };
        tracing::info!("{} has opened export {name:?}{how}", self.peer);
    }

    /// The split write of a payload that is complete, if it is a fragment.
    pub(crate) fn take_split_id(&mut self) -> Option<usize> {
        let split = self.incoming_split.as_ref().map(|incoming| incoming.split);
        self.incoming_split.take_if(|incoming| !incoming.has_more());
        split
    }

    /// Whether the connection has nothing left to do.
    pub(crate) fn can_close(&self) -> bool {
        match self.input {
            ReadState::Open | ReadState::Blocked => false,
            ReadState::Eof => {
                let done =
                    self.in_flight == 0 || injected_bug::injected(ServerBug::LoseAtDisconnect);
                done && !self.has_unsent()
            }
            ReadState::Aborted => self.in_flight == 0,
        }
    }

    /// Sends close_notify on a TLS connection.
    pub(crate) fn send_close_notify(&mut self) {
        if let Transport::Tls(session) = &mut self.channel
            && self.input != ReadState::Aborted
        {
            session.send_close_notify(&self.socket);
        }
    }

    /// A call on the socket has failed with `error`: the client is gone.
    #[cold]
    pub(crate) fn lose(&mut self, error: Errno) {
        tracing::info!("{}: the connection is lost: {}", self.peer, io::Error::from(error));
        self.abort();
    }

    /// The client is gone: drops its input and its unsent replies.
    pub(crate) fn abort(&mut self) {
        self.input = ReadState::Aborted;
        self.unparsed = Vec::new();
        self.payload = None;
        self.send_queue.clear();
    }

    /// Answers a request without data: an errno, or 0 for success.
    pub(crate) fn refuse(&mut self, mode: ReplyMode, header: &RequestHeader, errno: i32) {
        self.send_queue.push(builder::status_reply(mode, header, errno), ReplyBody::None, 0);
    }

    /// Answers a request that the engine has completed.
    pub(crate) fn reply<M: BlockMap>(
        &mut self,
        export: &Export<M>,
        request: &RequestContext,
        completed: CompletedRequest<'_>,
    ) {
        let Phase::Transmission(transmission) = self.phase else { return };
        builder::build_reply(&mut self.send_queue, export, transmission.mode, request, completed);
    }
}
