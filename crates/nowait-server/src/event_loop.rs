//! The event loop of a server thread. One iteration receives, submits, completes and sends for all
//! connections of the thread.
//!
//! Invariant: the thread sleeps only in the queue's `wait`, which waits for sockets, transfers,
//! workers and control together. A connection that breaks a rule of the protocol ends only itself,
//! never another connection.

#[cfg(feature = "sim")]
mod sim;
#[cfg(test)]
mod tests;
mod request_reader;
mod split_submit;
mod socket_read;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait::{
    BlockMap, BlockingFile, ByteRange, Engine, Error, FD_TOKEN, Flags, Interest, IoQueue, Op,
    Request, Token,
};
use slab::Slab;

use crate::acceptor::Acceptor;
use crate::adaptive_poll::AdaptivePoll;
use crate::buffer_budget::BufferBudget;
use crate::delayed_release::DelayedRelease;
use crate::export::{Export, result};
use crate::export_threads::{ConnectionChannel, Retired, Shared, ThreadContext};
use crate::fairness::{RunQueues, quantum_among};
use crate::idle_timeout::IdleTimeout;
use crate::nbd::connection::{Connection, HandoffConnection, Phase, ReadState};
use crate::nbd::handshake::timeout::HandshakeDeadlines;
use crate::nbd::handshake::{Negotiated, TlsState};
use crate::nbd::reply::builder::{CompletedRequest, RequestContext};
use crate::nbd::reply::send_queue::SendResult;
use crate::nbd::write_split::SplitWrite;

#[cfg(feature = "sim")]
pub use crate::event_loop::sim::Simulated;

/// Bytes received with one system call, beside the payload of a large write.
pub(crate) const RECEIVE_BYTES: usize = 256 << 10;

/// Retry interval of a connection that waits for buffer memory while nothing of its thread is in
/// flight.
const RETRY: Duration = Duration::from_millis(10);

/// `POLL*` bits after which the peer sends nothing more.
const RDHUP: i32 = (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) as i32;

// Event tokens.
const CHANNEL: Token = FD_TOKEN | 1 << 59;
const LISTENER: Token = FD_TOKEN | 1 << 58;
const WRITABLE: Token = FD_TOKEN | 1 << 57;
const INDEX_BITS: u32 = 20;
const MAX_CONNECTIONS: usize = 1 << INDEX_BITS;
const GENERATIONS: u64 = 1 << 36;

/// A request that the engine has accepted.
pub(crate) struct InFlight {
    pub(crate) connection: usize,
    pub(crate) request: RequestContext,
    /// The split write that the request is a fragment of.
    pub(crate) split: Option<usize>,
}

/// One thread with its engine and its connections.
pub(crate) struct EventLoop<Q: IoQueue, M: BlockMap> {
    pub(crate) shared: Arc<Shared>,
    /// Index of the export that this thread serves.
    pub(crate) export_index: usize,
    pub(crate) export: Arc<Export<M>>,
    pub(crate) engine: Engine<Q, M>,
    pub(crate) connections: Slab<Connection>,
    pub(crate) in_flight: Slab<InFlight>,
    pub(crate) splits: Slab<SplitWrite>,
    /// The payload memory that the connections share.
    pub(crate) budget: BufferBudget,
    pub(crate) handshakes: HandshakeDeadlines,
    channel: Arc<ConnectionChannel>,
    acceptor: Acceptor,
    /// Events of the queue: a token and its `POLL*` bits.
    events: Vec<(Token, i32)>,
    /// Connections to service: the interactive ones in this iteration, the bulk ones in turn.
    run_queues: RunQueues,
    /// Bytes that one service of a connection may move.
    pub(crate) quantum: u64,
    /// Connections that have nothing in flight and wait for a slot or for memory, in order of
    /// arrival.
    pub(crate) blocked: Vec<usize>,
    stopping: bool,
    pub(crate) read_buffer: Vec<u8>,
    /// The decrypted contents of `read_buffer`, for TLS.
    pub(crate) plaintext: Vec<u8>,
    generation: u64,
    /// The connection that sent something last.
    pub(crate) last_reader: usize,
    /// Connections that may have reached their end of file since the last read.
    pub(crate) maybe_eof: Vec<usize>,
    /// All requests in flight in the last busy iteration completed within it.
    pub(crate) completes_inline: bool,
    adaptive_poll: AdaptivePoll,
    idle: IdleTimeout,
    delayed_release: DelayedRelease,
}

/// Registers the channel and the listeners of `context` with `engine`.
///
/// # Errors
/// The queue's error.
pub(crate) fn watch<Q: IoQueue, M: BlockMap>(
    context: &ThreadContext,
    engine: &mut Engine<Q, M>,
) -> Result<(), Error> {
    engine.watch(context.channel.as_fd(), CHANNEL, Interest::Readable)?;
    for (n, listener) in context.listeners.iter().enumerate() {
        engine.watch(listener.as_fd(), listener_token(n), Interest::Readable)?;
    }
    Ok(())
}

impl<Q: IoQueue, M: BlockMap> EventLoop<Q, M> {
    /// The event loop of the thread of `context`; `engine` serves `export` and watches `context`.
    pub(crate) fn new(
        context: ThreadContext,
        export: Arc<Export<M>>,
        engine: Engine<Q, M>,
    ) -> Self {
        let ThreadContext { shared, export_index, channel, listeners, .. } = context;
        let tls = TlsState::from(&shared.options.tls);
        let idle = IdleTimeout::new(shared.options.idle);
        Self {
            acceptor: Acceptor::new(listeners, shared.limit.clone(), tls),
            budget: BufferBudget::new(
                shared.options.config.buffer_bytes as u64,
                shared.declared.clone(),
            ),
            handshakes: HandshakeDeadlines::default(),
            shared,
            export_index,
            export,
            engine,
            connections: Slab::new(),
            in_flight: Slab::new(),
            splits: Slab::new(),
            channel,
            events: Vec::with_capacity(64),
            run_queues: RunQueues::default(),
            quantum: quantum_among(1),
            blocked: Vec::new(),
            stopping: false,
            read_buffer: vec![0; RECEIVE_BYTES],
            plaintext: Vec::new(),
            generation: 0,
            last_reader: 0,
            maybe_eof: Vec::new(),
            completes_inline: false,
            adaptive_poll: AdaptivePoll::default(),
            idle,
            delayed_release: DelayedRelease::default(),
        }
    }

    /// Serves until the server stops and nothing is in flight, or until the thread has had no
    /// connection for the idle timeout.
    ///
    /// # Errors
    /// The queue's error; the connections are dropped then.
    pub(crate) fn run(&mut self) -> Result<(), Error> {
        loop {
            if !self.stopping && self.shared.is_stopping() {
                self.stopping = true;
                self.begin_shutdown();
            }
            if self.stopping && self.connections.is_empty() || self.retires() {
                return Ok(());
            }
            self.wait()?;
            self.expire_handshakes();
            self.run_once()?;
        }
    }

    /// Whether this thread ends because of the idle timeout. The last thread of a writable export
    /// flushes it, so that no data remain in memory only.
    fn retires(&mut self) -> bool {
        if self.time_until_retirement() != Some(Duration::ZERO) || self.engine.in_flight() > 0 {
            return false;
        }
        let retired = self.shared.retire(self.export_index, &self.channel);
        if retired == Retired::TheLast && !self.export.disk().is_read_only() {
            let flushed = BlockingFile::new(self.export.disk().clone()).flush();
            if let Err(error) = flushed {
                let flush =
                    Request { op: Op::Flush, flags: Flags::NONE, range: ByteRange::new(0, 0) };
                self.export.note_fault(flush, error.errno());
            }
        }
        retired != Retired::No
    }

    /// Time until this thread retires; `None` for the acceptor thread and while it has connections.
    fn time_until_retirement(&self) -> Option<Duration> {
        if self.acceptor.is_open() { None } else { self.idle.remaining() }
    }

    /// One iteration: handle events, service connections, submit, complete, send.
    fn run_once(&mut self) -> Result<(), Error> {
        self.budget.set_connection_count(self.shared.limit.taken(), self.connections.len());
        self.take_events();
        if !self.service_interactive() {
            self.service_bulk();
        }
        // Requests just submitted may have completed already; then their replies are sent now.
        let has_submitted = self.engine.in_flight() > 0;
        self.engine.poll_watched(&mut |token, bits| self.events.push((token, bits)))?;
        self.complete();
        if has_submitted {
            self.completes_inline = self.engine.in_flight() == 0;
        }
        self.service_interactive();
        self.service_bulk();
        self.channel.publish_in_flight(self.in_flight.len());
        Ok(())
    }

    /// Sleeps until there is an event, unless work is pending.
    fn wait(&mut self) -> Result<(), Error> {
        let back_off = self.acceptor.back_off();
        let events = &mut self.events;
        let has_work =
            !self.run_queues.is_empty() || !events.is_empty() || self.engine.has_completions();
        if has_work || back_off == Some(Duration::ZERO) {
            return self.engine.poll_watched(&mut |token, bits| events.push((token, bits)));
        }
        let began = Instant::now();
        let engine = &mut self.engine;
        if self.adaptive_poll.wait(began, || engine.has_completions()) {
            self.poll_last_reader();
        } else if !self.recheck_eof() {
            let handshake = self.handshakes.due().map(|due| due.saturating_duration_since(began));
            // Memory released by another thread's connections causes no event here.
            let retry = (!self.blocked.is_empty()).then_some(RETRY);
            let release = self.delayed_release.release_if_due(began);
            let timeout = [handshake, back_off, self.time_until_retirement(), retry, release]
                .into_iter()
                .flatten()
                .min();
            let events = &mut self.events;
            self.engine.wait(timeout, &mut |token, bits| events.push((token, bits)))?;
            self.adaptive_poll.slept(began);
            self.wake_blocked();
        }
        Ok(())
    }

    /// Marks the connection that sent last as readable: its client has probably sent the next
    /// request. The next submission asks the kernel for events anyway.
    fn poll_last_reader(&mut self) {
        if let Some(connection) = self.connections.get_mut(self.last_reader)
            && connection.input == ReadState::Open
        {
            connection.readable = true;
            self.schedule(self.last_reader);
        }
    }

    fn take_events(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        for (token, bits) in events.drain(..) {
            if token == CHANNEL {
                self.take_arrivals();
            } else if token & LISTENER == LISTENER {
                self.acceptor.mark_ready((token & !LISTENER) as usize);
            } else {
                let index = (token as usize) & (MAX_CONNECTIONS - 1);
                let generation = (token & !WRITABLE & !FD_TOKEN) >> INDEX_BITS;
                let Some(connection) = self.connections.get_mut(index) else { continue };
                if connection.generation != generation {
                    continue;
                }
                if token & WRITABLE == WRITABLE {
                    connection.waiting_writable = false;
                } else {
                    connection.readable = true;
                    connection.rdhup |= bits & RDHUP != 0;
                }
                self.schedule(index);
            }
        }
        self.events = events;
        // All handshakes run on the default export's threads.
        let (shared, export) = (&self.shared, self.export_index);
        self.acceptor.accept(|arrival| shared.assign(export, arrival));
        self.complete();
    }

    /// Puts a connection into the run queues.
    pub(crate) fn schedule(&mut self, index: usize) {
        if let Some(connection) = self.connections.get_mut(index)
            && !connection.scheduled
        {
            connection.scheduled = true;
            self.run_queues.push(index, &connection.quantum);
        }
    }

    fn take_arrivals(&mut self) {
        if self.channel.retires_early() {
            self.idle.hurry();
        }
        for arrival in self.channel.take() {
            self.add(arrival);
        }
    }

    fn add(&mut self, arrival: HandoffConnection) {
        if self.connections.len() >= MAX_CONNECTIONS || self.shared.is_stopping() {
            self.channel.on_connection_closed();
            return;
        }
        self.generation = (self.generation + 1) % GENERATIONS;
        let index = self.connections.insert(Connection::new(arrival, self.generation));
        self.idle.on_connection_added();
        self.set_connection_count();
        let token = token(index, self.generation);
        let Some(connection) = self.connections.get(index) else { return };
        if let Phase::Handshake(_) = connection.phase {
            self.handshakes.begin(connection.due);
        }
        if let Err(error) = self.engine.watch(connection.socket.as_fd(), token, Interest::Readable)
        {
            tracing::warn!("cannot watch a connection: {error}");
            self.remove(index);
            return;
        }
        self.schedule(index);
    }

    /// Services every scheduled interactive connection. Returns whether there was one.
    fn service_interactive(&mut self) -> bool {
        let mut scheduled = std::mem::take(&mut self.run_queues.interactive);
        let any = !scheduled.is_empty();
        for index in scheduled.drain(..) {
            self.service(index);
        }
        // Connections scheduled meanwhile are serviced in the next pass.
        scheduled.append(&mut self.run_queues.interactive);
        self.run_queues.interactive = scheduled;
        any
    }

    /// Services bulk connections round robin until they have moved one quantum together.
    fn service_bulk(&mut self) {
        let mut left = self.quantum;
        for _ in 0..self.run_queues.bulk.len() {
            let Some(index) = self.run_queues.bulk.pop_front() else { return };
            let moved = self.service(index);
            if moved >= left {
                return;
            }
            left -= moved;
        }
    }

    /// Receives from a connection and sends to it. Returns the number of bytes moved.
    fn service(&mut self, index: usize) -> u64 {
        let Some(connection) = self.connections.get_mut(index) else { return 0 };
        connection.scheduled = false;
        connection.quantum.begin(self.quantum);
        self.send(index);
        self.retry_parse(index);
        self.receive(index);
        self.send(index);
        let Some(connection) = self.connections.get(index) else { return 0 };
        let moved = connection.quantum.bytes_moved();
        let needs_service = match connection.input {
            ReadState::Open => connection.readable,
            ReadState::Blocked => connection.quantum.needs_requeue(),
            ReadState::Eof | ReadState::Aborted => false,
        };
        if connection.can_close() {
            self.close(index);
        } else if let Phase::Handoff(negotiated) = connection.phase {
            self.migrate(index, negotiated);
        } else if needs_service {
            self.schedule(index);
        }
        moved
    }

    /// Sends as much as possible; asks for a writable event if the socket is full.
    fn send(&mut self, index: usize) {
        let Some(connection) = self.connections.get_mut(index) else { return };
        if !connection.has_unsent()
            || connection.waiting_writable
            || connection.input == ReadState::Aborted
        {
            return;
        }
        let mut freed = 0;
        let sent = connection.send(&mut freed);
        self.budget.release(&mut connection.budget_used, freed);
        match sent {
            // The connection may have been blocked by its own unsent replies.
            SendResult::Drained => self.schedule_if_blocked(index),
            SendResult::QuotaUsed => self.schedule(index),
            SendResult::Closed(error) => connection.lose(error),
            SendResult::WouldBlock => {
                connection.waiting_writable = true;
                let token = writable_token(token(index, connection.generation));
                let socket = connection.socket.as_fd();
                if let Err(error) = self.engine.watch(socket, token, Interest::Writable) {
                    tracing::warn!("cannot watch a connection: {error}");
                    connection.abort();
                }
            }
        }
        if freed > 0 {
            self.wake_blocked();
        }
    }

    fn schedule_if_blocked(&mut self, index: usize) {
        if self.connections.get(index).is_some_and(|c| c.input == ReadState::Blocked) {
            self.schedule(index);
        }
    }

    /// Schedules the blocked connections after a slot or memory became free.
    fn wake_blocked(&mut self) {
        let mut blocked = std::mem::take(&mut self.blocked);
        for index in blocked.drain(..) {
            self.schedule(index);
        }
        self.blocked = blocked;
    }

    /// Parses again the input of a blocked connection.
    fn retry_parse(&mut self, index: usize) {
        let Some(connection) = self.connections.get_mut(index) else { return };
        if connection.input == ReadState::Blocked {
            connection.input = ReadState::Open;
            let unparsed = std::mem::take(&mut connection.unparsed);
            self.parse(index, &unparsed, usize::MAX);
        }
    }

    /// Replies to the completed requests.
    fn complete(&mut self) {
        if self.engine.has_done() {
            self.wake_blocked();
        }
        while let Some(completion) = self.engine.next() {
            let Some(entry) = self.in_flight.try_remove(request_by_tag(completion.tag)) else {
                continue;
            };
            let start = self.engine.buffer_offset(entry.request.header.offset);
            let extents = match completion.io.op {
                nowait::Op::Status => self.engine.take_extents(completion.tag),
                _ => Vec::new(),
            };
            if let Err(errno) = result(&completion) {
                self.export.note_fault(completion.io, errno);
            }
            let Some(connection) = self.connections.get_mut(entry.connection) else { continue };
            connection.in_flight -= 1;
            if let Some(split) = entry.split {
                let (bytes, errno) = (completion.io.range.len, result(&completion).err());
                let InFlight { connection: index, request, .. } = entry;
                self.on_fragment_done(index, split, &request, bytes, errno.unwrap_or(0));
                self.schedule(index);
                continue;
            }
            if connection.input != ReadState::Aborted {
                let completed = CompletedRequest { completion, start, extents: &extents };
                connection.reply(&self.export, &entry.request, completed);
            }
            self.schedule(entry.connection);
        }
    }

    /// Hands a connection over to a thread of the export that its client has chosen.
    fn migrate(&mut self, index: usize, negotiated: Negotiated) {
        if let Some(connection) = self.remove(index) {
            self.shared.assign(negotiated.export, connection.into_handoff(negotiated.into()));
        }
    }

    /// Adapts the limits to the number of connections.
    fn set_connection_count(&mut self) {
        self.budget.set_connection_count(self.shared.limit.taken(), self.connections.len());
        self.quantum = quantum_among(self.connections.len());
    }

    /// Removes a connection from this thread.
    fn remove(&mut self, index: usize) -> Option<Connection> {
        let mut connection = self.connections.try_remove(index)?;
        self.drop_split(&connection);
        self.set_connection_count();
        let token = token(index, connection.generation);
        self.engine.unwatch(connection.socket.as_fd(), token);
        if connection.waiting_writable {
            self.engine.unwatch(connection.socket.as_fd(), writable_token(token));
        }
        if let Phase::Handshake(_) = connection.phase {
            self.handshakes.end();
        }
        self.budget.release(&mut connection.budget_used, u64::MAX);
        self.wake_blocked();
        if self.connections.is_empty() {
            self.idle.on_idle();
            self.shared.on_idle(&self.channel);
        }
        self.channel.on_connection_closed();
        Some(connection)
    }

    fn close(&mut self, index: usize) {
        let Some(mut connection) = self.remove(index) else { return };
        self.delayed_release.on_closed();
        connection.send_close_notify();
        // The queue may hold the socket open for a little longer; the client must not notice.
        connection.socket.shut_down();
        match connection.phase {
            Phase::Transmission(_) => tracing::info!("{} has left", connection.peer),
            _ => tracing::info!("{} has left without opening an export", connection.peer),
        }
    }

    /// Closes the connections whose handshake has timed out.
    fn expire_handshakes(&mut self) {
        let now = match self.handshakes.due() {
            Some(due) => Some(Instant::now()).filter(|now| *now >= due),
            None => None,
        };
        let Some(now) = now else { return };
        let negotiates = |c: &Connection| matches!(c.phase, Phase::Handshake(_));
        let late = self.connections.iter().filter(|(_, c)| negotiates(c) && c.due <= now);
        for index in late.map(|(index, _)| index).collect::<Vec<_>>() {
            if let Some(connection) = self.connections.get(index) {
                tracing::info!("{} has not ended its handshake in time", connection.peer);
            }
            self.close(index);
        }
        let others = self.connections.iter().filter(|(_, c)| negotiates(c));
        self.handshakes.reset(others.map(|(_, c)| c.due));
    }

    /// Reads no more requests; requests in flight are still answered.
    fn begin_shutdown(&mut self) {
        for (n, listener) in self.acceptor.close().into_iter().enumerate() {
            self.engine.unwatch(listener.as_fd(), listener_token(n));
        }
        self.channel.take_all().into_iter().for_each(|arrival| self.add(arrival));
        let indices: Vec<usize> = self.connections.iter().map(|(index, _)| index).collect();
        for index in indices {
            let Some(connection) = self.connections.get_mut(index) else { continue };
            if matches!(connection.input, ReadState::Open | ReadState::Blocked) {
                connection.input = ReadState::Eof;
            }
            if matches!(connection.phase, Phase::Handshake(_)) {
                connection.abort();
            }
            self.schedule(index);
        }
    }
}

/// The tag of a connection's request. The engine's workers serve the connections in turn by its
/// upper half.
#[inline]
pub(crate) fn tag(connection: usize, key: usize) -> u64 {
    (connection as u64) << 32 | key as u64
}

/// The key in `in_flight` of the request with this tag.
#[inline]
fn request_by_tag(tag: u64) -> usize {
    tag as u32 as usize
}

/// Token of a readable event of a connection.
fn token(index: usize, generation: u64) -> Token {
    FD_TOKEN | generation << INDEX_BITS | index as u64
}

/// Token of a writable event of the connection of `token`.
fn writable_token(token: Token) -> Token {
    token | WRITABLE
}

/// Token of an event of listener number `n`.
fn listener_token(n: usize) -> Token {
    LISTENER | n as u64
}
