//! One connection: what was received and not understood yet, and what was not sent yet.
//!
//! Invariant: what a client makes the server hold is bounded: `MAX_REQUESTS` requests and its share
//! of the thread's memory for payload, counted until the reply has left. Beyond that its socket is
//! not read.
//! Knows: breaks, credentials, handshake, socket, seats, patience, share,
//! portion, reply, door, respond, cut, tls.
//! Known by: entrance, group, turn, parse, parts.

use std::time::Instant;

use nowait::Buf;

use super::breaks::{self, Mistake};
use super::credentials::Credentials;
use super::cut::Coming;
use super::door::Dialect;
use super::handshake::{Handshake, Negotiated, Secrecy};
use super::patience::HANDSHAKE;
use super::portion::Portion;
use super::reply::{Out, Sent};
use super::respond::Request;
use super::seats::Seat;
use super::share::Store;
use super::socket::Socket;
use super::tls::{Channel, Session};

/// Requests of one connection at most, from their arrival until their reply has left.
pub(crate) const MAX_REQUESTS: u32 = 1024;

/// Where a connection stands.
pub(crate) enum Phase {
    Handshake(Handshake),
    /// The client has chosen an export, and what follows is for a thread of that one.
    Chosen(Negotiated),
    Transmission(Dialect),
}

/// A connection on its way to a thread.
pub(crate) struct Arrival {
    socket: Socket,
    channel: Channel,
    phase: Phase,
    /// Received bytes that are not parsed.
    stash: Vec<u8>,
    /// Bytes of the handshake that are not sent.
    unsent: Vec<u8>,
    /// When the handshake is late.
    due: Instant,
    seat: Seat,
}

impl Arrival {
    /// A connection that was just accepted: the client waits for the greeting.
    pub(crate) fn new(socket: Socket, secrecy: Secrecy, seat: Seat) -> Self {
        let mut unsent = Vec::new();
        Handshake::greeting(&mut unsent);
        let phase = Phase::Handshake(Handshake::new(secrecy));
        let due = Instant::now() + HANDSHAKE;
        Self { socket, channel: Channel::Plain, phase, stash: Vec::new(), unsent, due, seat }
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
    pub(crate) request: Request,
    pub(crate) io: nowait::Io,
    pub(crate) buf: Buf,
    /// Where the payload begins in the buffer.
    pub(crate) start: usize,
    /// Bytes received so far.
    pub(crate) filled: usize,
}

impl Payload {
    /// Takes the first of `bytes`, as many as are missing. Returns how many.
    pub(crate) fn fill(&mut self, bytes: &[u8]) -> usize {
        let missing = self.missing();
        let count = missing.len().min(bytes.len());
        missing[..count].copy_from_slice(&bytes[..count]);
        self.filled += count;
        count
    }

    /// The memory that is still to be filled.
    pub(crate) fn missing(&mut self) -> &mut [u8] {
        let end = self.start + self.io.range.len as usize;
        self.buf.get_mut(self.start + self.filled..end).unwrap_or_default()
    }
}

/// A connection.
pub(crate) struct Conn {
    pub(crate) socket: Socket,
    pub(crate) channel: Channel,
    /// Tells this connection from an earlier one in the same place.
    pub(crate) generation: u64,
    pub(crate) phase: Phase,
    /// When the handshake is late.
    pub(crate) due: Instant,
    pub(crate) input: Input,
    /// Received bytes that are not parsed: part of a header, or what came before a stall.
    pub(crate) stash: Vec<u8>,
    pub(crate) payload: Option<Payload>,
    /// The write that the payload is a part of, if it was cut.
    pub(crate) coming: Option<Coming>,
    /// Payload bytes of a refused request that are still to come.
    pub(crate) skip: u64,
    pub(crate) out: Out,
    /// Requests that the engine has.
    pub(crate) in_flight: u32,
    /// Bytes of payload and of extents held, for requests in flight and replies not sent.
    pub(crate) held: u64,
    /// A report is to come when the socket has room.
    pub(crate) awaits_room: bool,
    /// The socket may have something to read.
    pub(crate) readable: bool,
    /// The peer has closed its side; what it sent before may still be there to read.
    pub(crate) hung_up: bool,
    /// All that was there was read, and whether that was the end is not known.
    pub(crate) may_have_ended: bool,
    /// It is in the list of those that are to be looked at before the turn ends.
    pub(crate) touched: bool,
    /// What may be moved in this look at it.
    pub(crate) portion: Portion,
    seat: Seat,
}

impl Conn {
    pub(crate) fn new(arrival: Arrival, generation: u64) -> Self {
        let Arrival { socket, channel, phase, stash, unsent, due, seat } = arrival;
        let mut out = Out::default();
        if !unsent.is_empty() {
            out.push_bytes(unsent);
        }
        Self {
            socket,
            channel,
            generation,
            phase,
            due,
            // What is in the stash is parsed before more is received.
            input: if stash.is_empty() { Input::Open } else { Input::Stalled },
            stash,
            payload: None,
            coming: None,
            skip: 0,
            out,
            in_flight: 0,
            held: 0,
            awaits_room: false,
            readable: true,
            hung_up: false,
            may_have_ended: false,
            touched: false,
            portion: Portion::default(),
            seat,
        }
    }

    /// Sends it on its way to a thread that serves what the client has chosen.
    pub(crate) fn depart(self, dialect: Dialect) -> Arrival {
        let Self { socket, channel, stash, mut out, due, seat, .. } = self;
        let phase = Phase::Transmission(dialect);
        Arrival { socket, channel, phase, stash, unsent: out.take_unsent(), due, seat }
    }

    /// Whether a request with `bytes` of payload in `store` fits under the bounds.
    #[inline]
    pub(crate) fn admits(&self, store: &Store, bytes: u64) -> bool {
        self.in_flight + (self.out.len() as u32) < MAX_REQUESTS && store.admits(self.held, bytes)
    }

    /// Whether something of its own is under way, so that it will be looked at again.
    pub(crate) fn is_busy(&self) -> bool {
        self.in_flight > 0 || self.has_unsent()
    }

    /// Whether there is something to be sent.
    #[inline]
    pub(crate) fn has_unsent(&self) -> bool {
        match &self.channel {
            Channel::Plain => !self.out.is_empty(),
            Channel::Tls(session) => !self.out.is_empty() || session.has_unsent(),
        }
    }

    /// Sends as much as the socket takes and the portion allows. Adds up the budget of what was
    /// sent.
    #[inline]
    pub(crate) fn send(&mut self, budget: &mut u64) -> Sent {
        let (socket, most) = (&self.socket, &mut self.portion.send);
        let before = *most;
        let sent = match &mut self.channel {
            Channel::Plain => self.out.send(socket, most, budget),
            Channel::Tls(session) => session.send(&mut self.out, socket, most, budget),
        };
        let count = before - *most;
        self.portion.moved(count);
        sent
    }

    /// `got` bytes have come from the socket, of which `room` would have been taken.
    pub(crate) fn received(&mut self, got: usize, room: usize) {
        // The end that comes with the last bytes is not reported again.
        self.readable = got == room || self.hung_up;
        self.portion.moved(got as u64);
    }

    /// From here on all is TLS, `input` too, which came behind the client's wish for it.
    pub(crate) fn start_tls(&mut self, credentials: &Credentials, input: &[u8]) {
        match Session::new(credentials, &mut self.out) {
            Ok(session) => {
                self.channel = Channel::Tls(Box::new(session));
                // A client cannot have anything to say before it has heard from our side of TLS.
                self.open(input, &mut Vec::new());
            }
            Err(error) => {
                tracing::warn!("no TLS for a client: {error}");
                self.break_off();
            }
        }
    }

    /// Opens what came from the socket, if it is TLS. A payload that is awaited gets its share,
    /// the rest goes to the end of `opened`.
    pub(crate) fn open(&mut self, sealed: &[u8], opened: &mut Vec<u8>) {
        let Channel::Tls(session) = &mut self.channel else { return };
        let mut payload = self.payload.as_mut();
        let result = session.open(sealed, |piece| {
            let count = payload.as_mut().map_or(0, |payload| payload.fill(piece));
            opened.extend_from_slice(piece.get(count..).unwrap_or_default());
        });
        if let Err(error) = result {
            tracing::debug!("TLS with a client has failed: {error}");
            // It tells the client why, if there is room for it.
            session.send(&mut Out::default(), &self.socket, &mut 0, &mut 0);
            self.break_off();
        }
        // What ends is noticed by reading on.
        self.readable |= self.channel.has_ended();
    }

    /// The number of the cut write that a payload, which is complete, is a part of.
    pub(crate) fn part_came(&mut self) -> Option<usize> {
        let cut = self.coming.as_ref().map(|coming| coming.cut);
        self.coming.take_if(|coming| !coming.has_more());
        cut
    }

    /// Whether nothing is left to do but to close it.
    pub(crate) fn is_over(&self) -> bool {
        match self.input {
            Input::Open | Input::Stalled => false,
            Input::Ended => {
                let done = self.in_flight == 0 || breaks::makes(Mistake::LoseAtDisconnect);
                done && !self.has_unsent()
            }
            Input::Broken => self.in_flight == 0,
        }
    }

    /// The last thing that is sent, where the channel has one.
    pub(crate) fn say_goodbye(&mut self) {
        if let Channel::Tls(session) = &mut self.channel
            && self.input != Input::Broken
        {
            session.say_goodbye(&self.socket);
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
