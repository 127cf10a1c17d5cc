//! One connection: what was received and not understood yet, and what was not sent yet.
//!
//! Invariant: what a client makes the server hold is bounded: `MAX_REQUESTS` requests and
//! `MAX_BYTES` of payload (one request may be larger), counted until the reply has left. Beyond
//! that its socket is not read.
//! Knows: wire, handshake, reply, door. Known by: group, turn, parse.

use std::os::fd::OwnedFd;

use nowait::Buf;

use super::door::Dialect;
use super::handshake::{Handshake, Negotiated};
use super::reply::Out;
use super::wire::RequestHeader;

/// Requests of one connection at most, from their arrival until their reply has left.
pub(crate) const MAX_REQUESTS: u32 = 1024;
/// Payload of one connection's requests at most, in bytes, if it has more than one.
pub(crate) const MAX_BYTES: u64 = 32 << 20;

/// Where a connection stands.
pub(crate) enum Phase {
    Handshake(Handshake),
    /// The client has chosen an export, and what follows is for a thread of that one.
    Chosen(Negotiated),
    Transmission(Dialect),
}

/// A connection on its way to a thread.
pub(crate) struct Arrival {
    socket: OwnedFd,
    phase: Phase,
    /// Received bytes that are not parsed.
    stash: Vec<u8>,
    /// Bytes of the handshake that are not sent.
    unsent: Vec<u8>,
}

impl Arrival {
    /// A connection that was just accepted: the client waits for the greeting.
    pub(crate) fn new(socket: OwnedFd) -> Self {
        let mut unsent = Vec::new();
        Handshake::greeting(&mut unsent);
        Self { socket, phase: Phase::Handshake(Handshake::new()), stash: Vec::new(), unsent }
    }
}

/// Whether more requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    /// Yes.
    Open,
    /// Not before something of what is held has left.
    Stalled,
    /// No: the client said goodbye, or closed its side; what is in flight is still answered.
    Ended,
    /// No, and nobody is there to be answered.
    Broken,
}

/// A write whose payload is on its way.
pub(crate) struct Payload {
    pub(crate) header: RequestHeader,
    pub(crate) io: nowait::Io,
    pub(crate) buf: Buf,
    /// Where the payload begins in the buffer.
    pub(crate) start: usize,
    /// Bytes received so far.
    pub(crate) filled: usize,
}

impl Payload {
    /// The memory that is still to be filled.
    pub(crate) fn missing(&mut self) -> &mut [u8] {
        let end = self.start + self.header.length as usize;
        self.buf.get_mut(self.start + self.filled..end).unwrap_or_default()
    }
}

/// A connection.
pub(crate) struct Conn {
    pub(crate) socket: OwnedFd,
    /// Tells this connection from an earlier one in the same place.
    pub(crate) generation: u64,
    pub(crate) phase: Phase,
    pub(crate) input: Input,
    /// Received bytes that are not parsed: part of a header, or what came before a stall.
    pub(crate) stash: Vec<u8>,
    pub(crate) payload: Option<Payload>,
    /// Payload bytes of a refused write that are still to come.
    pub(crate) skip: u64,
    pub(crate) out: Out,
    /// Requests that the engine has.
    pub(crate) in_flight: u32,
    /// Payload bytes held, for requests in flight and replies not sent.
    pub(crate) held: u64,
    /// A report is to come when the socket has room.
    pub(crate) awaits_room: bool,
    /// The socket may have something to read.
    pub(crate) readable: bool,
    /// The peer has closed its side; what it sent before may still be there to read.
    pub(crate) hung_up: bool,
    /// It is in the list of those that are to be looked at before the turn ends.
    pub(crate) touched: bool,
}

impl Conn {
    pub(crate) fn new(arrival: Arrival, generation: u64) -> Self {
        let Arrival { socket, phase, stash, unsent } = arrival;
        let mut out = Out::default();
        if !unsent.is_empty() {
            out.push_bytes(unsent);
        }
        Self {
            socket,
            generation,
            phase,
            // What is in the stash is parsed before more is received.
            input: if stash.is_empty() { Input::Open } else { Input::Stalled },
            stash,
            payload: None,
            skip: 0,
            out,
            in_flight: 0,
            held: 0,
            awaits_room: false,
            readable: true,
            hung_up: false,
            touched: false,
        }
    }

    /// Sends it on its way to a thread that serves what the client has chosen.
    pub(crate) fn depart(self, dialect: Dialect) -> Arrival {
        let Self { socket, stash, out, .. } = self;
        Arrival { socket, phase: Phase::Transmission(dialect), stash, unsent: out.into_bytes() }
    }

    /// Whether a request with `bytes` of payload fits under the bounds.
    #[inline]
    pub(crate) fn admits(&self, bytes: u64) -> bool {
        self.in_flight + (self.out.len() as u32) < MAX_REQUESTS
            && (self.held == 0 || self.held + bytes <= MAX_BYTES)
    }

    /// Whether nothing is left to do but to close it.
    pub(crate) fn is_over(&self) -> bool {
        match self.input {
            Input::Open | Input::Stalled => false,
            Input::Ended => self.in_flight == 0 && self.out.is_empty(),
            Input::Broken => self.in_flight == 0,
        }
    }

    /// Nobody is there any more: what was received or is to be sent is dropped.
    pub(crate) fn break_off(&mut self) {
        self.input = Input::Broken;
        self.stash = Vec::new();
        self.payload = None;
        self.out.clear();
    }
}
