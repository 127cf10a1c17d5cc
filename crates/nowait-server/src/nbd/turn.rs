//! A thread of the server: one turn after the other, each of which receives, submits, reaps and
//! sends for all of its connections.
//!
//! Invariant: the only place where it sleeps is the queue's `wait`, where sockets, transfers,
//! workers and control are waited for together. A connection that breaks a rule of the protocol
//! loses itself, never another one.
//! Knows: every module here. Known by: mod.

#[cfg(feature = "sim")]
mod sim;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use nowait::{Engine, Error, Interest, Map, Queue, Token, WATCHED};
use slab::Slab;

use super::conn::{Arrival, Conn, Input, Phase};
use super::cut::Cut;
use super::entrance::Entrance;
use super::group::{Inbox, Post, Shared};
use super::handshake::{Negotiated, Secrecy};
use super::patience::Handshakes;
use super::portion::{Lines, portion_among};
use super::reply::Sent;
use super::respond::{Ended, Request};
use super::share::Store;
use super::spin::Spin;
use crate::device::{Device, verdict};

#[cfg(feature = "sim")]
pub use sim::Simulated;

/// Bytes received with one system call, beside the payload of a large write.
pub(crate) const RECEIVE_BYTES: usize = 256 << 10;

/// The peer sends nothing more.
const HANG_UP: i32 = (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) as i32;

/// Tokens: what a report of the queue is about.
const INBOX: Token = WATCHED | 1 << 59;
const LISTENER: Token = WATCHED | 1 << 58;
const ROOM: Token = WATCHED | 1 << 57;
const INDEX_BITS: u32 = 20;
const MAX_CONNECTIONS: usize = 1 << INDEX_BITS;
const GENERATIONS: u64 = 1 << 36;

/// A request that the engine has.
pub(crate) struct Asked {
    pub(crate) conn: usize,
    pub(crate) request: Request,
    /// The number of the write that it is a part of.
    pub(crate) cut: Option<usize>,
}

/// One thread with its engine and its connections.
pub(crate) struct Thread<Q: Queue, M: Map> {
    pub(crate) shared: Arc<Shared>,
    /// The export that its connections are served, by number.
    pub(crate) export: usize,
    pub(crate) device: Arc<Device<M>>,
    pub(crate) engine: Engine<Q, M>,
    pub(crate) conns: Slab<Conn>,
    pub(crate) asked: Slab<Asked>,
    pub(crate) cuts: Slab<Cut>,
    /// The memory for payload that the connections share.
    pub(crate) store: Store,
    pub(crate) handshakes: Handshakes,
    inbox: Arc<Inbox>,
    entrance: Entrance,
    /// Reports of the queue, with the `POLL*` bits that are true.
    events: Vec<(Token, i32)>,
    /// Connections to look at, those that move little before this turn ends.
    lines: Lines,
    /// Bytes that one look may move.
    pub(crate) portion: u64,
    /// Connections that have nothing under way and wait until a slot or memory is free, in the
    /// order in which they came.
    pub(crate) stalled: Vec<usize>,
    stopping: bool,
    pub(crate) scratch: Vec<u8>,
    /// What was in `scratch`, where that came by TLS.
    pub(crate) opened: Vec<u8>,
    generation: u64,
    /// The connection that sent something last.
    pub(crate) last_heard: usize,
    /// Connections that may have ended since they were read from.
    pub(crate) read_from: Vec<usize>,
    /// What was handed over last had ended when that was done.
    pub(crate) ends_at_once: bool,
    spin: Spin,
}

/// Lets `engine` watch what comes to `post`.
///
/// # Errors
/// What the queue said.
pub(crate) fn watch<Q: Queue, M: Map>(post: &Post, engine: &mut Engine<Q, M>) -> Result<(), Error> {
    engine.watch(post.inbox.as_fd(), INBOX, Interest::Readable)?;
    for (n, listener) in post.listeners.iter().enumerate() {
        engine.watch(listener.as_fd(), of_listener(n), Interest::Readable)?;
    }
    Ok(())
}

impl<Q: Queue, M: Map> Thread<Q, M> {
    /// A thread at `post`, which `engine` watches, with `engine` on `device`.
    pub(crate) fn new(post: Post, device: Arc<Device<M>>, engine: Engine<Q, M>) -> Self {
        let Post { shared, export, inbox, listeners, .. } = post;
        let secrecy = Secrecy::from(&shared.options.tls);
        Self {
            entrance: Entrance::new(listeners, shared.seats.clone(), secrecy),
            store: Store::new(shared.options.config.buffer_bytes as u64),
            handshakes: Handshakes::default(),
            shared,
            export,
            device,
            engine,
            conns: Slab::new(),
            asked: Slab::new(),
            cuts: Slab::new(),
            inbox,
            events: Vec::with_capacity(64),
            lines: Lines::default(),
            portion: portion_among(1),
            stalled: Vec::new(),
            stopping: false,
            scratch: vec![0; RECEIVE_BYTES],
            opened: Vec::new(),
            generation: 0,
            last_heard: 0,
            read_from: Vec::new(),
            ends_at_once: false,
            spin: Spin::default(),
        }
    }

    /// Serves until the server stops and everything in flight has ended.
    ///
    /// # Errors
    /// What the queue said; then the connections are dropped.
    pub(crate) fn run(&mut self) -> Result<(), Error> {
        loop {
            if !self.stopping && self.shared.is_stopping() {
                self.stopping = true;
                self.take_no_more();
            }
            if self.stopping && self.conns.is_empty() {
                return Ok(());
            }
            self.wait()?;
            self.end_late_handshakes();
            self.take_turn()?;
        }
    }

    /// Does what there is to do.
    fn take_turn(&mut self) -> Result<(), Error> {
        self.take_events();
        if !self.look_at_little() {
            self.look_at_much();
        }
        // What was just submitted may have ended at once, and its replies may be sent now.
        let handed_over = self.engine.in_flight() > 0;
        self.engine.poll_watched(&mut |token, bits| self.events.push((token, bits)))?;
        self.complete();
        if handed_over {
            self.ends_at_once = self.engine.in_flight() == 0;
        }
        self.look_at_little();
        self.look_at_much();
        self.inbox.say_requests(self.asked.len());
        Ok(())
    }

    /// Sleeps until there is something to do, unless there is already.
    fn wait(&mut self) -> Result<(), Error> {
        let events = &mut self.events;
        if !self.lines.is_empty() || !events.is_empty() || self.engine.pending() {
            return self.engine.poll_watched(&mut |token, bits| events.push((token, bits)));
        }
        let began = Instant::now();
        let engine = &mut self.engine;
        if self.spin.wait(began, || engine.pending()) {
            self.expect_last_heard();
        } else if !self.read_once_more() {
            let handshake = self.handshakes.due().map(|due| due.saturating_duration_since(began));
            let timeout = handshake.into_iter().chain(self.entrance.rest()).min();
            let events = &mut self.events;
            self.engine.wait(timeout, &mut |token, bits| events.push((token, bits)))?;
            self.spin.slept(began);
        }
        Ok(())
    }

    /// Most likely the client that was heard last has sent its next request: it is read before the
    /// kernel is asked what has happened, which the next submission does anyway.
    fn expect_last_heard(&mut self) {
        if let Some(conn) = self.conns.get_mut(self.last_heard)
            && conn.input == Input::Open
        {
            conn.readable = true;
            self.touch(self.last_heard);
        }
    }

    fn take_events(&mut self) {
        // The default export's own threads do all handshakes.
        let (shared, export) = (&self.shared, self.export);
        self.entrance.try_again(|arrival| shared.give(export, arrival));
        let mut events = std::mem::take(&mut self.events);
        for (token, bits) in events.drain(..) {
            if token == INBOX {
                self.take_arrivals();
            } else if token & LISTENER == LISTENER {
                let (shared, n) = (&self.shared, (token & !LISTENER) as usize);
                self.entrance.accept(n, |arrival| shared.give(self.export, arrival));
            } else {
                let index = (token as usize) & (MAX_CONNECTIONS - 1);
                let generation = (token & !ROOM & !WATCHED) >> INDEX_BITS;
                let Some(conn) = self.conns.get_mut(index) else { continue };
                if conn.generation != generation {
                    continue;
                }
                if token & ROOM == ROOM {
                    conn.awaits_room = false;
                } else {
                    conn.readable = true;
                    conn.hung_up |= bits & HANG_UP != 0;
                }
                self.touch(index);
            }
        }
        self.events = events;
        self.complete();
    }

    /// Puts a connection on the list of those to look at.
    pub(crate) fn touch(&mut self, index: usize) {
        if let Some(conn) = self.conns.get_mut(index)
            && !conn.touched
        {
            conn.touched = true;
            self.lines.push(index, &conn.portion);
        }
    }

    fn take_arrivals(&mut self) {
        for arrival in self.inbox.take() {
            self.add(arrival);
        }
    }

    fn add(&mut self, arrival: Arrival) {
        if self.conns.len() >= MAX_CONNECTIONS || self.shared.is_stopping() {
            self.inbox.left();
            return;
        }
        self.generation = (self.generation + 1) % GENERATIONS;
        let index = self.conns.insert(Conn::new(arrival, self.generation));
        self.share_among();
        let token = token(index, self.generation);
        let Some(conn) = self.conns.get(index) else { return };
        if let Phase::Handshake(_) = conn.phase {
            self.handshakes.begun(conn.due);
        }
        if let Err(error) = self.engine.watch(conn.socket.as_fd(), token, Interest::Readable) {
            tracing::warn!("cannot watch a connection: {error}");
            self.remove(index);
            return;
        }
        self.touch(index);
    }

    /// Looks at every connection that something happened to, of those that move little. Returns
    /// whether there was one.
    fn look_at_little(&mut self) -> bool {
        let mut touched = std::mem::take(&mut self.lines.little);
        let any = !touched.is_empty();
        for index in touched.drain(..) {
            self.look_at(index);
        }
        // Those that were touched meanwhile have their turn next.
        touched.append(&mut self.lines.little);
        self.lines.little = touched;
        any
    }

    /// Looks at those that move much, in turn, until they have moved one portion together.
    fn look_at_much(&mut self) {
        let mut left = self.portion;
        for _ in 0..self.lines.much.len() {
            let Some(index) = self.lines.much.pop_front() else { return };
            let moved = self.look_at(index);
            if moved >= left {
                return;
            }
            left -= moved;
        }
    }

    /// Receives from a connection and sends to it. Returns how many bytes moved.
    fn look_at(&mut self, index: usize) -> u64 {
        let Some(conn) = self.conns.get_mut(index) else { return 0 };
        conn.touched = false;
        conn.portion.begin(self.portion);
        self.send(index);
        self.resume(index);
        self.receive(index);
        self.send(index);
        let Some(conn) = self.conns.get(index) else { return 0 };
        let moved = conn.portion.in_this_look();
        let goes_on = match conn.input {
            Input::Open => conn.readable,
            Input::Stalled => conn.portion.is_used_up(),
            Input::Ended | Input::Broken => false,
        };
        if conn.is_over() {
            self.close(index);
        } else if let Phase::Chosen(agreed) = conn.phase {
            self.hand_over(index, agreed);
        } else if goes_on {
            self.touch(index);
        }
        moved
    }

    /// Sends what can be sent, and asks for a report when the socket has room for the rest.
    fn send(&mut self, index: usize) {
        let Some(conn) = self.conns.get_mut(index) else { return };
        if !conn.has_unsent() || conn.awaits_room || conn.input == Input::Broken {
            return;
        }
        let mut freed = 0;
        let sent = conn.send(&mut freed);
        self.store.give_back(&mut conn.held, freed);
        match sent {
            // There may be room now for what it has stalled at.
            Sent::All => self.touch_if_stalled(index),
            Sent::Enough => self.touch(index),
            Sent::Broken => conn.break_off(),
            Sent::Full => {
                conn.awaits_room = true;
                let token = of_room(token(index, conn.generation));
                if self.engine.watch(conn.socket.as_fd(), token, Interest::Writable).is_err() {
                    conn.break_off();
                }
            }
        }
        if freed > 0 {
            self.wake_stalled();
        }
    }

    fn touch_if_stalled(&mut self, index: usize) {
        if self.conns.get(index).is_some_and(|conn| conn.input == Input::Stalled) {
            self.touch(index);
        }
    }

    /// Something is free again: those that wait for it have another try.
    fn wake_stalled(&mut self) {
        let mut stalled = std::mem::take(&mut self.stalled);
        for index in stalled.drain(..) {
            self.touch(index);
        }
        self.stalled = stalled;
    }

    /// Parses again what came before a stall.
    fn resume(&mut self, index: usize) {
        let Some(conn) = self.conns.get_mut(index) else { return };
        if conn.input == Input::Stalled {
            conn.input = Input::Open;
            let stash = std::mem::take(&mut conn.stash);
            self.parse(index, &stash, usize::MAX);
        }
    }

    /// Replies to what has ended.
    fn complete(&mut self) {
        if self.engine.has_done() {
            self.wake_stalled();
        }
        while let Some(completion) = self.engine.next() {
            let Some(asked) = self.asked.try_remove(completion.tag as usize) else { continue };
            let start = self.engine.start(asked.request.header.offset);
            let spans = match completion.io.op {
                nowait::Op::Status => self.engine.take_spans(completion.tag),
                _ => Vec::new(),
            };
            let Some(conn) = self.conns.get_mut(asked.conn) else { continue };
            conn.in_flight -= 1;
            if let Some(cut) = asked.cut {
                let (bytes, errno) = (completion.io.range.len, verdict(&completion).err());
                let Asked { conn: index, request, .. } = asked;
                self.part_ended(index, cut, &request, bytes, errno.unwrap_or(0));
                self.touch(index);
                continue;
            }
            if conn.input != Input::Broken {
                let ended = Ended { completion, start, spans: &spans };
                conn.reply(&self.device, &asked.request, ended);
            }
            self.touch(asked.conn);
        }
    }

    /// Gives a connection to a thread of the export that its client has chosen.
    fn hand_over(&mut self, index: usize, agreed: Negotiated) {
        if let Some(conn) = self.remove(index) {
            self.shared.give(agreed.export, conn.depart(agreed.into()));
        }
    }

    /// There are more or fewer connections from now on.
    fn share_among(&mut self) {
        self.store.share_among(self.conns.len());
        self.portion = portion_among(self.conns.len());
    }

    /// Takes a connection off this thread.
    fn remove(&mut self, index: usize) -> Option<Conn> {
        let mut conn = self.conns.try_remove(index)?;
        self.forget_cut(&conn);
        self.share_among();
        let token = token(index, conn.generation);
        self.engine.unwatch(conn.socket.as_fd(), token);
        if conn.awaits_room {
            self.engine.unwatch(conn.socket.as_fd(), of_room(token));
        }
        if let Phase::Handshake(_) = conn.phase {
            self.handshakes.ended();
        }
        self.store.give_back(&mut conn.held, u64::MAX);
        self.wake_stalled();
        self.inbox.left();
        Some(conn)
    }

    fn close(&mut self, index: usize) {
        let Some(mut conn) = self.remove(index) else { return };
        conn.say_goodbye();
        // The queue may hold the socket open for a little longer; the client should not notice.
        conn.socket.shut_down();
        tracing::debug!("a connection to export {} has ended", self.export);
    }

    /// Closes the connections that have not chosen an export in time.
    fn end_late_handshakes(&mut self) {
        let now = match self.handshakes.due() {
            Some(due) => Some(Instant::now()).filter(|now| *now >= due),
            None => None,
        };
        let Some(now) = now else { return };
        let open = |conn: &Conn| matches!(conn.phase, Phase::Handshake(_));
        let late = self.conns.iter().filter(|(_, conn)| open(conn) && conn.due <= now);
        for index in late.map(|(index, _)| index).collect::<Vec<_>>() {
            tracing::debug!("a client has not ended its handshake in time");
            self.close(index);
        }
        let others = self.conns.iter().filter(|(_, conn)| open(conn));
        self.handshakes.looked(others.map(|(_, conn)| conn.due));
    }

    /// Reads no more requests; what is in flight is still answered.
    fn take_no_more(&mut self) {
        for (n, listener) in self.entrance.close().into_iter().enumerate() {
            self.engine.unwatch(listener.as_fd(), of_listener(n));
        }
        self.take_arrivals();
        let indices: Vec<usize> = self.conns.iter().map(|(index, _)| index).collect();
        for index in indices {
            let Some(conn) = self.conns.get_mut(index) else { continue };
            if matches!(conn.input, Input::Open | Input::Stalled) {
                conn.input = Input::Ended;
            }
            if matches!(conn.phase, Phase::Handshake(_)) {
                conn.break_off();
            }
            self.touch(index);
        }
    }
}

/// Something has come to a connection.
fn token(index: usize, generation: u64) -> Token {
    WATCHED | generation << INDEX_BITS | index as u64
}

/// The connection of `token` has room to send.
fn of_room(token: Token) -> Token {
    token | ROOM
}

/// Somebody has come to listener number `n`.
fn of_listener(n: usize) -> Token {
    LISTENER | n as u64
}

#[cfg(test)]
#[path = "turn_tests.rs"]
mod tests;
