//! One connection: a session and the socket that it is spoken on, plain or by TLS.
//!
//! Invariant: a client makes the server hold at most `MAX_REQUESTS` requests and the connection's
//! part of the payload memory, counted until the reply has been sent. Beyond that its socket is not
//! read.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use nowait::{Interest, IoQueue, Token};
use nowait_nbd::tls_words::tls_message;
use rustix::io::Errno;

use crate::buffer_budget::BufferBudget;
use crate::dirty_bitmaps::BitmapName;
use crate::export::ExportId;
use crate::frontend_kind::FrontendKind;
use crate::injected_bug;
use crate::injected_bug::ServerBug;
use crate::loop_context::{LoopContext, TOKEN_BITS};
use crate::member::Member;
use crate::nbd::handshake::timeout::HANDSHAKE_TIMEOUT;
use crate::nbd::handshake::{Handshake, TlsState};
use crate::nbd::reply::send_queue::{SendQueue, SendResult};
use crate::nbd::session::{Phase, ReadState, Session};
use crate::nbd::tls_config::Credentials;
use crate::nbd::tls_session::{TlsSession, Transport};
use crate::nbd::write_split::{SplitPolicy, SplitRest};
use crate::net::connection_limit::ConnectionPermit;
use crate::net::peer::Peer;
use crate::net::socket::Socket;
use crate::refusal_log::{self, Refusal};
use crate::shared_export::ExportUse;

/// The most requests of one connection, from their arrival until their reply has been sent.
/// Beyond it: its socket is not read.
pub(crate) const MAX_REQUESTS: u32 = 1024;

// A token is the connection's number and generation, and a bit for its kind.
const NUMBER_BITS: u32 = 20;
/// The most connections of a thread, beside the limit of the server.
/// Beyond it: the connection is closed.
pub(crate) const MAX_CONNECTIONS: usize = 1 << NUMBER_BITS;
/// Generations after which the numbers begin again.
pub(crate) const GENERATIONS: u64 = 1 << 34;
/// Set in the token of a writable event.
pub(crate) const WRITABLE: Token = 1 << 54;
/// Set in the token of a listener's event, beside its number.
pub(crate) const LISTENER: Token = 1 << 55;
const _: () = assert!(TOKEN_BITS == 56);

/// The number and the generation of the connection of `token`.
pub(crate) fn connection_of(token: Token) -> (usize, u64) {
    let generation = (token & !WRITABLE) >> NUMBER_BITS;
    (token as usize & (MAX_CONNECTIONS - 1), generation)
}

/// A connection between two threads.
pub(crate) struct HandoffConnection {
    pub(crate) socket: Socket,
    pub(crate) transport: Transport,
    pub(crate) phase: Phase,
    /// Received bytes that are not parsed.
    pub(crate) unparsed: Vec<u8>,
    /// Bytes of a refused request's payload that are still to be received and discarded.
    pub(crate) discard: u64,
    /// The write that is being received, if it is split and some of it was written.
    pub(crate) split: Option<SplitRest>,
    /// Bytes of the handshake or of replies that were not sent.
    pub(crate) unsent: Vec<u8>,
    /// The client has disconnected: it is sent these bytes, and nothing of it is read.
    pub(crate) ended: bool,
    /// Handshake deadline.
    pub(crate) due: Instant,
    pub(crate) peer: Peer,
    pub(crate) permit: ConnectionPermit,
    /// The use of its export, if it comes from a pause.
    pub(crate) used: Option<ExportUse>,
    /// The dirty bitmaps that the client has selected.
    pub(crate) bitmaps: Vec<BitmapName>,
}

impl HandoffConnection {
    /// A connection that was just accepted: the client waits for the greeting.
    pub(crate) fn new(socket: Socket, tls: TlsState, permit: ConnectionPermit) -> Self {
        let (peer, mut unsent) = (Peer::of(&socket), Vec::new());
        permit.describe(FrontendKind::Nbd, peer.address());
        Handshake::greeting(&mut unsent);
        let phase = Phase::Handshake(Handshake::new(tls));
        let due = Instant::now() + HANDSHAKE_TIMEOUT;
        Self {
            socket,
            transport: Transport::Plain,
            phase,
            unparsed: Vec::new(),
            discard: 0,
            split: None,
            unsent,
            ended: false,
            due,
            peer,
            permit,
            used: None,
            bitmaps: Vec::new(),
        }
    }
}

/// A connection.
pub(crate) struct Connection {
    /// Its number among the members of the frontend.
    pub(crate) number: usize,
    pub(crate) socket: Socket,
    pub(crate) transport: Transport,
    pub(crate) session: Session,
    /// Its part of the run queues and of the buffer budget, which it holds for requests in flight
    /// and unsent replies.
    pub(crate) member: Member,
    /// Tells this connection from an earlier one with the same number.
    pub(crate) generation: u64,
    /// Handshake deadline.
    pub(crate) due: Instant,
    pub(crate) peer: Peer,
    /// A writable event is requested.
    pub(crate) waiting_writable: bool,
    /// The socket may have something to read.
    pub(crate) readable: bool,
    /// The peer has closed its side; earlier bytes may still be unread.
    pub(crate) rdhup: bool,
    /// Bytes that were received and sent.
    pub(crate) moved: u64,
    /// These when it had more memory than it is guaranteed and was looked at last.
    pub(crate) moved_before: Option<u64>,
    /// The socket was drained, and whether the end of file followed is unknown.
    pub(crate) eof_unchecked: bool,
    /// The paused export that its client has chosen.
    pub(crate) waits_for: Option<ExportId>,
    pub(crate) permit: ConnectionPermit,
}

impl Connection {
    pub(crate) fn new(
        arrival: HandoffConnection,
        number: usize,
        generation: u64,
        policy: SplitPolicy,
    ) -> Self {
        let HandoffConnection { socket, transport, phase, unparsed, unsent, due, .. } = arrival;
        let HandoffConnection { discard, split, ended, peer, permit, bitmaps, .. } = arrival;
        let mut session = Session::new(phase, unparsed, discard, unsent);
        session.bitmaps = bitmaps;
        if let Some(rest) = split {
            session.resume_split(rest, policy.fragment_bytes);
        }
        if ended {
            session.end_input();
        }
        Self {
            number,
            socket,
            transport,
            session,
            member: Member::of(permit.client.clone()),
            generation,
            due,
            peer,
            waiting_writable: false,
            readable: true,
            rdhup: false,
            moved: 0,
            moved_before: None,
            eof_unchecked: false,
            waits_for: None,
            permit,
        }
    }

    /// The token of its readable events.
    pub(crate) fn readable_token(&self) -> Token {
        token(self.number, self.generation)
    }

    /// The token of its writable events.
    pub(crate) fn writable_token(&self) -> Token {
        WRITABLE | token(self.number, self.generation)
    }

    /// Notes that the client has chosen `export`.
    pub(crate) fn mark_transmission(&self, export: ExportId) {
        self.permit.mark_transmission(export, matches!(self.transport, Transport::Tls(_)));
    }

    /// Whether an operator wants it closed; true once.
    pub(crate) fn takes_close_request(&self) -> bool {
        self.permit.takes_close_request()
    }

    /// Packs the connection for another thread. No request of it may be in the engine.
    pub(crate) fn into_handoff(self) -> HandoffConnection {
        let Self { socket, mut transport, session, due, peer, permit, .. } = self;
        let Session { phase, input, unparsed, mut send_queue, discard_bytes, bitmaps, .. } =
            session;
        let unsent = send_queue.take_unsent();
        if let Transport::Tls(session) = &mut transport {
            session.forget_budget();
        }
        let (split, ended) = (None, input == ReadState::Eof);
        HandoffConnection {
            socket,
            transport,
            phase,
            unparsed,
            discard: discard_bytes,
            split,
            unsent,
            ended,
            due,
            peer,
            permit,
            used: None,
            bitmaps,
        }
    }

    /// Whether a request with `bytes` of payload is within the limits of the connection and
    /// `budget`.
    #[inline]
    pub(crate) fn has_budget(&self, budget: &mut BufferBudget, bytes: u64) -> bool {
        self.session.in_flight + (self.session.send_queue.len() as u32) < MAX_REQUESTS
            && budget.admits(self.member.budget_used, bytes)
    }

    /// Whether an own request or reply is pending, whose completion schedules the connection.
    pub(crate) fn is_busy(&self) -> bool {
        self.session.in_flight > 0 || self.has_unsent()
    }

    /// Whether bytes are waiting to be sent.
    #[inline]
    pub(crate) fn has_unsent(&self) -> bool {
        !self.session.send_queue.is_empty()
            || matches!(&self.transport, Transport::Tls(session) if session.has_unsent())
    }

    /// Sends as much as the socket takes and the quantum allows; asks for a writable event if the
    /// socket is full.
    pub(crate) fn send<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>) {
        if !self.has_unsent() || self.waiting_writable || self.session.input == ReadState::Aborted {
            return;
        }
        let (sent, freed) = self.send_some();
        context.release(&mut self.member, freed);
        match sent {
            // The connection may have been blocked by its own unsent replies.
            SendResult::Drained if self.session.input != ReadState::Blocked => {}
            SendResult::Drained | SendResult::QuotaUsed => {
                context.schedule(self.number, &mut self.member);
            }
            SendResult::Closed(error) => self.lose(error),
            SendResult::WouldBlock => {
                self.waiting_writable = true;
                let (socket, token) = (self.socket.as_fd(), self.writable_token());
                if let Err(error) = context.watch(socket, token, Interest::Writable) {
                    tracing::warn!("cannot watch a connection: {error}");
                    self.session.abort();
                }
            }
        }
    }

    /// Sends as much as the socket takes and the quantum allows. Also returns the budget of what was
    /// sent.
    #[inline]
    fn send_some(&mut self) -> (SendResult, u64) {
        let (socket, quota) = (&self.socket, &mut self.member.quantum.send);
        let (before, mut freed) = (*quota, 0);
        let out = &mut self.session.send_queue;
        let sent = match &mut self.transport {
            Transport::Plain => out.send(|pieces| socket.send(pieces), quota, &mut freed),
            Transport::Tls(session) => session.send(out, socket, quota, &mut freed),
        };
        let count = before - *quota;
        self.member.quantum.moved(count);
        self.moved += count;
        (sent, freed)
    }

    /// Records a receive of `got` bytes into buffers of `room` bytes.
    pub(crate) fn received(&mut self, got: usize, room: usize) {
        // An end of file that comes with the last bytes causes no further event.
        self.readable = got == room || self.rdhup;
        self.member.quantum.moved(got as u64);
        self.moved += got as u64;
    }

    /// Switches to TLS, for the bytes in `input` too, which followed the client's STARTTLS.
    pub(crate) fn start_tls(&mut self, credentials: &Credentials, input: &[u8]) {
        match TlsSession::new(credentials, &mut self.session.send_queue) {
            Ok(session) => {
                self.transport = Transport::Tls(Box::new(session));
                // The client has nothing to send before it has the server's side of the handshake.
                self.decrypt(input, &mut Vec::new());
            }
            Err(error) => {
                let why = tls_message(&error, "the client");
                refusal_log::note(Refusal::Tls, format_args!("no TLS for {}: {why}", self.peer));
                self.session.abort();
            }
        }
    }

    /// Decrypts bytes from the socket of a TLS connection. An awaited payload gets its bytes, the
    /// rest is appended to `plaintext`.
    pub(crate) fn decrypt(&mut self, ciphertext: &[u8], plaintext: &mut Vec<u8>) {
        let Transport::Tls(session) = &mut self.transport else { return };
        let mut payload = self.session.payload.as_mut();
        let result = session.decrypt(ciphertext, |piece| {
            let count = payload.as_mut().map_or(0, |payload| payload.fill(piece));
            plaintext.extend_from_slice(piece.get(count..).unwrap_or_default());
        });
        if let Err(error) = result {
            let why = tls_message(&error, "the client");
            let message = format_args!("{}: TLS has failed: {why}", self.peer);
            refusal_log::note(Refusal::Tls, message);
            // Sends the TLS alert, if the socket has room for it.
            session.send(&mut SendQueue::default(), &self.socket, &mut 0, &mut 0);
            self.session.abort();
        }
        // The close_notify is handled by the next read.
        self.readable |= self.transport.has_ended();
    }

    /// Logs that the client has opened the export called `name`.
    pub(crate) fn log_opened(&self, name: &str) {
        let how = match &self.transport {
            Transport::Plain => String::new(),
            Transport::Tls(session) => match session.subject() {
                Some(subject) => format!(" by TLS, with the certificate of {subject}"),
                None => " by TLS".to_owned(),
            },
        };
        tracing::info!("{} has opened export {name:?}{how}", self.peer);
    }

    /// Whether the connection has nothing left to do.
    pub(crate) fn can_close(&self) -> bool {
        match self.session.input {
            ReadState::Open | ReadState::Blocked => false,
            ReadState::Eof => {
                let done = self.session.in_flight == 0
                    || injected_bug::injected(ServerBug::LoseAtDisconnect);
                done && !self.has_unsent()
            }
            ReadState::Aborted => self.session.in_flight == 0,
        }
    }

    /// Sends close_notify on a TLS connection.
    pub(crate) fn send_close_notify(&mut self) {
        if let Transport::Tls(session) = &mut self.transport
            && self.session.input != ReadState::Aborted
        {
            session.send_close_notify(&self.socket);
        }
    }

    /// A call on the socket has failed with `error`: the client is gone.
    #[cold]
    pub(crate) fn lose(&mut self, error: Errno) {
        tracing::info!("{}: the connection is lost: {}", self.peer, io::Error::from(error));
        self.session.abort();
    }
}

/// The token of the readable events of connection `number`.
fn token(number: usize, generation: u64) -> Token {
    generation << NUMBER_BITS | number as u64
}
