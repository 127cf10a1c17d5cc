//! The NBD frontend of a thread: its connections, and those that it accepts.
//!
//! Invariant: a connection that breaks a rule of the protocol ends only itself, never another
//! connection. An end of file without an event is found before the thread sleeps.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use nowait::{Completion, Error, Interest, IoQueue, Op, Token};
use slab::Slab;

use crate::export::{ExportId, result};
use crate::frontend::Frontend;
use crate::frontend_kind::FrontendKind;
use crate::injected_bug;
use crate::injected_bug::ServerBug;
use crate::loop_context::LoopContext;
use crate::member::Member;
use crate::nbd::connection::{
    Connection, GENERATIONS, HandoffConnection, LISTENER, MAX_CONNECTIONS, WRITABLE, connection_of,
};
use crate::nbd::connection_channel::ConnectionChannel;
use crate::nbd::handshake::timeout::HandshakeDeadlines;
use crate::nbd::negotiate::{ExportDirectory, Handshakes};
use crate::nbd::reply::builder::{CompletedRequest, RequestContext};
use crate::nbd::session::{Phase, ReadState};
use crate::nbd::socket_read::{ReadBuffers, SharedState};
use crate::nbd::stalled_connections::{PERIOD, StallCheck};
use crate::nbd::submit::{InFlight, Requests};
use crate::nbd::tls_config::Tls;
use crate::nbd::write_split::SplitPolicy;
use crate::net::acceptor::Acceptor;
use crate::net::listener::Listener;
use crate::refusal_log::{self, Refusal};

/// `POLL*` bits after which the peer sends nothing more.
const RDHUP: i32 = (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) as i32;

/// The connections of a thread.
pub(crate) struct NbdFrontend {
    pub(crate) connections: Slab<Connection>,
    pub(crate) shared: SharedState,
    pub(crate) generation: u64,
    buffers: ReadBuffers,
    pub(crate) channel: Arc<ConnectionChannel>,
    acceptor: Acceptor,
    /// The connection that sent something last.
    last_reader: usize,
    /// Connections that may have reached their end of file since the last read.
    pub(crate) maybe_eof: Vec<usize>,
    /// The requests to close connections that were seen.
    close_count: u64,
    pub(crate) stalls: StallCheck,
    stopping: bool,
}

impl NbdFrontend {
    /// The frontend of the thread that takes connections from `channel` and from `acceptor`, and
    /// serves the exports of `directory`.
    pub(crate) fn new(
        directory: Arc<dyn ExportDirectory>,
        channel: Arc<ConnectionChannel>,
        acceptor: Acceptor,
        tls: Tls,
        split_policy: SplitPolicy,
    ) -> Self {
        let deadlines = HandshakeDeadlines::default();
        let shared = SharedState {
            requests: Requests { in_flight: Slab::new(), split_policy },
            handshakes: Handshakes { deadlines, directory, tls },
            parsed_again: Vec::new(),
        };
        Self {
            connections: Slab::new(),
            shared,
            generation: 0,
            buffers: ReadBuffers::default(),
            channel,
            acceptor,
            last_reader: 0,
            maybe_eof: Vec::new(),
            close_count: 0,
            stalls: StallCheck::default(),
            stopping: false,
        }
    }

    /// Adds a connection, unless the thread is stopping.
    pub(crate) fn add<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        mut arrival: HandoffConnection,
    ) {
        if self.connections.len() >= MAX_CONNECTIONS || self.stopping {
            return;
        }
        self.generation = (self.generation + 1) % GENERATIONS;
        let entry = self.connections.vacant_entry();
        let (number, used) = (entry.key(), arrival.used.take());
        let connection = entry.insert(Connection::new(
            arrival,
            number,
            self.generation,
            self.shared.requests.split_policy,
        ));
        context.add_member();
        if let Phase::Handshake(_) = connection.session.phase {
            self.shared.handshakes.deadlines.begin(connection.due);
        }
        if let Some(used) = used {
            connection.use_export(context, used);
        }
        let (socket, token) = (connection.socket.as_fd(), connection.readable_token());
        if let Err(error) = context.watch(socket, token, Interest::Readable) {
            tracing::warn!("cannot watch a connection: {error}");
            self.remove(context, number);
            return;
        }
        context.schedule(number, &mut connection.member);
    }

    /// Removes a connection from this thread.
    fn remove<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        number: usize,
    ) -> Option<Connection> {
        let mut connection = self.connections.try_remove(number)?;
        context.unwatch(connection.socket.as_fd(), connection.readable_token());
        if connection.waiting_writable {
            context.unwatch(connection.socket.as_fd(), connection.writable_token());
        }
        if let Phase::Handshake(_) = connection.session.phase {
            self.shared.handshakes.deadlines.end();
        }
        context.remove_member(&mut connection.member);
        Some(connection)
    }

    /// Takes all connections off this thread.
    #[cfg(feature = "sim")]
    pub(crate) fn take_all<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
    ) -> Vec<HandoffConnection> {
        let numbers: Vec<_> = self.connections.iter().map(|(number, _)| number).collect();
        let all = numbers.into_iter().filter_map(|number| self.remove(context, number));
        all.map(Connection::into_parked).collect()
    }

    /// Closes a connection.
    pub(crate) fn close<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>, number: usize) {
        let Some(mut connection) = self.remove(context, number) else { return };
        context.delayed_release.on_closed();
        connection.send_close_notify();
        // The queue may hold the socket open for a little longer; the client must not notice.
        connection.socket.shut_down();
        match connection.session.phase {
            Phase::Transmission(_) => tracing::info!("{} has left", connection.peer),
            _ => tracing::info!("{} has left without opening an export", connection.peer),
        }
    }
}

impl NbdFrontend {
    /// Takes no more requests of the connections that an operator wants closed.
    fn close_on_request<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>) {
        let count = context.close_count();
        if std::mem::replace(&mut self.close_count, count) == count {
            return;
        }
        for (number, connection) in &mut self.connections {
            if connection.takes_close_request() {
                tracing::info!("{} is disconnected on request", connection.peer);
                connection.session.abort();
                context.schedule(number, &mut connection.member);
            }
        }
    }
}

impl NbdFrontend {
    /// Accepts the connections of the listeners that were given to this thread, or gives them back.
    fn take_listeners<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>) {
        if self.channel.wants_listeners() {
            let mut listeners = self.close_listeners(context);
            listeners.extend(self.channel.take_listeners());
            return self.channel.give_back(listeners);
        }
        for listener in self.channel.take_listeners() {
            let n = self.acceptor.add(listener);
            let watched = self.acceptor.listeners().get(n).map_or(Ok(()), |listener| {
                context.watch(listener.as_fd(), LISTENER | n as u64, Interest::Readable)
            });
            if let Err(error) = watched {
                tracing::error!("cannot watch a listening socket: {error}");
            }
        }
    }

    /// Accepts no more connections. Returns the listeners.
    fn close_listeners<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>) -> Vec<Listener> {
        let listeners = self.acceptor.close();
        for (n, listener) in listeners.iter().enumerate() {
            context.unwatch(listener.as_fd(), LISTENER | n as u64);
        }
        listeners
    }

    /// Sends the answers of a connection of a paused `export`, which leaves this thread once none of its
    /// requests is in flight.
    fn pause<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        member: usize,
        export: ExportId,
    ) -> u64 {
        let Some(connection) = self.connections.get_mut(member) else { return 0 };
        connection.send(context);
        let moved = connection.member.quantum.bytes_moved();
        if connection.can_close() {
            self.close(context, member);
        } else if connection.session.can_be_parked()
            && let Some(connection) = self.remove(context, member)
        {
            // The export stays attached to the thread until this connection is kept.
            self.shared.handshakes.directory.keep(export, connection.into_parked());
        }
        moved
    }
}

impl NbdFrontend {
    /// Replies to a completed block status request.
    #[cold]
    fn complete_status<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        member: usize,
        request: &RequestContext,
        completion: Completion,
    ) {
        let extents = context.engine.take_extents(completion.tag);
        let Some(connection) = self.connections.get_mut(member) else { return };
        connection.session.in_flight -= 1;
        if connection.session.input != ReadState::Aborted
            && let Some(served) = context.exports.get(completion.device)
        {
            let (all, block) = (&served.shared.bitmaps, served.export.smallest_block());
            let dirty = connection.session.dirty_extents(all, (request, completion.io), block);
            let completed = CompletedRequest { completion, extents: &extents, dirty: &dirty };
            connection.session.reply(&served.export, request, completed);
        }
        context.schedule(member, &mut connection.member);
    }
}

impl<Q: IoQueue> Frontend<Q> for NbdFrontend {
    fn begin(&mut self, context: &mut LoopContext<Q>) -> Result<(), Error> {
        for (n, listener) in self.acceptor.listeners().iter().enumerate() {
            context.watch(listener.as_fd(), LISTENER | n as u64, Interest::Readable)?;
        }
        Ok(())
    }

    fn on_wake(&mut self, context: &mut LoopContext<Q>) {
        self.take_listeners(context);
        for arrival in self.channel.take() {
            self.add(context, arrival);
            self.channel.thread().remove_connection();
        }
        self.close_on_request(context);
    }

    fn on_event(&mut self, context: &mut LoopContext<Q>, token: Token, bits: i32) {
        if token & LISTENER != 0 {
            return self.acceptor.mark_ready((token & !LISTENER) as usize);
        }
        let (number, generation) = connection_of(token);
        let Some(connection) = self.connections.get_mut(number) else { return };
        if connection.generation != generation {
            return;
        }
        if token & WRITABLE != 0 {
            connection.waiting_writable = false;
        } else {
            connection.readable = true;
            connection.rdhup |= bits & RDHUP != 0;
        }
        context.schedule(number, &mut connection.member);
    }

    fn after_events(&mut self, _: &mut LoopContext<Q>) {
        let handshakes = &self.shared.handshakes;
        let tls = handshakes.tls_state();
        self.acceptor.accept(|socket, permit| {
            handshakes.directory.assign(HandoffConnection::new(socket, tls, permit));
        });
    }

    #[inline]
    fn kind(&self, _: usize) -> FrontendKind {
        FrontendKind::Nbd
    }

    /// Not during the handshake, which has a timeout, nor once the client has left.
    fn is_limited(&self, member: usize) -> bool {
        self.connections.get(member).is_some_and(|connection| {
            matches!(connection.session.phase, Phase::Transmission(_))
                && connection.session.input != ReadState::Aborted
        })
    }

    #[inline]
    fn member(&mut self, member: usize) -> Option<&mut Member> {
        self.connections.get_mut(member).map(|connection| &mut connection.member)
    }

    /// Receives from a connection and sends to it.
    fn service(&mut self, context: &mut LoopContext<Q>, member: usize) -> u64 {
        let Some(connection) = self.connections.get_mut(member) else { return 0 };
        if let Some(served) = &connection.member.served
            && served.is_pausing.get()
        {
            let export = served.shared.id;
            return self.pause(context, member, export);
        }
        connection.send(context);
        connection.retry_parse(&mut self.shared, context);
        if connection.receive(&mut self.shared, &mut self.buffers, context) {
            self.last_reader = member;
            if !connection.readable && !std::mem::replace(&mut connection.eof_unchecked, true) {
                self.maybe_eof.push(member);
            }
        }
        connection.send(context);
        let moved = connection.member.quantum.bytes_moved();
        let needs_service = match connection.session.input {
            ReadState::Open => connection.readable,
            ReadState::Blocked => connection.member.quantum.needs_requeue(),
            ReadState::Eof | ReadState::Aborted => false,
        };
        if connection.can_close() {
            self.close(context, member);
        } else if let Some(export) = connection.waits_for {
            return self.pause(context, member, export);
        } else if needs_service {
            context.schedule(member, &mut connection.member);
        }
        moved
    }

    fn send_answers(&mut self, context: &mut LoopContext<Q>, member: usize) -> u64 {
        let Some(connection) = self.connections.get_mut(member) else { return 0 };
        connection.send(context);
        let moved = connection.member.quantum.bytes_moved();
        if connection.can_close() {
            self.close(context, member);
        }
        moved
    }

    /// Replies to a completed request.
    #[inline(always)]
    fn complete(
        &mut self,
        context: &mut LoopContext<Q>,
        member: usize,
        key: u32,
        completion: Completion,
    ) {
        let Some(entry) = self.shared.requests.in_flight.try_remove(key as usize) else { return };
        let InFlight { request, split } = entry;
        if completion.io.op == Op::Status {
            return self.complete_status(context, member, &request, completion);
        }
        let Some(connection) = self.connections.get_mut(member) else { return };
        connection.session.in_flight -= 1;
        if let Some(split) = split {
            let (bytes, errno) = (completion.io.range.len, result(&completion).err());
            connection.on_fragment_done(context, split, &request, bytes, errno.unwrap_or(0));
        } else if connection.session.input != ReadState::Aborted {
            let Some(served) = &connection.member.served else { return };
            let completed = CompletedRequest { completion, extents: &[], dirty: &[] };
            connection.session.reply(&served.export, &request, completed);
        }
        context.schedule(member, &mut connection.member);
    }

    fn has_work(&self) -> bool {
        self.acceptor.has_work()
    }

    fn deadline(&self) -> Option<Instant> {
        let handshake = self.shared.handshakes.deadlines.due();
        handshake.into_iter().chain(self.acceptor.retry_at()).chain(self.stalls.due()).min()
    }

    fn watch_memory(&mut self, context: &LoopContext<Q>, now: Instant) {
        self.stalls.watch(&context.budget, now);
    }

    /// Closes the connections whose handshake has timed out, and those that keep the memory which others wait for.
    fn expire(&mut self, context: &mut LoopContext<Q>, now: Instant) {
        let connections = self.connections.iter_mut().map(|(_, connection)| connection);
        for number in self.stalls.stalled(connections, &context.budget, now) {
            if let Some(connection) = self.connections.get(number) {
                refusal_log::note(
                    Refusal::Stalled,
                    format_args!(
                        "{} keeps memory that others wait for: its request or reply has stood still for {} s",
                        connection.peer,
                        PERIOD.as_secs()
                    ),
                );
            }
            self.close(context, number);
        }
        let negotiates = |c: &Connection| matches!(c.session.phase, Phase::Handshake(_));
        let late = self.connections.iter().filter(|(_, c)| negotiates(c) && c.due <= now);
        for number in late.map(|(number, _)| number).collect::<Vec<_>>() {
            if let Some(connection) = self.connections.get(number) {
                refusal_log::note(
                    Refusal::Handshake,
                    format_args!("{} has not completed its handshake in time", connection.peer),
                );
            }
            self.close(context, number);
        }
        let others = self.connections.iter().filter(|(_, c)| negotiates(c));
        self.shared.handshakes.deadlines.reset(others.map(|(_, c)| c.due));
    }

    /// Marks the connection that sent last as readable: its client has probably sent the next
    /// request. The next submission asks the kernel for events anyway.
    fn poll(&mut self, context: &mut LoopContext<Q>) {
        if let Some(connection) = self.connections.get_mut(self.last_reader)
            && connection.session.input == ReadState::Open
        {
            connection.readable = true;
            context.schedule(self.last_reader, &mut connection.member);
        }
    }

    /// Schedules another read of each open connection that was drained and may have reached its end
    /// of file since.
    ///
    /// A multishot poll of Linux 6.18 sometimes misses a shutdown(2) that comes while it reports
    /// the last bytes, and there is no other event.
    fn before_sleep(&mut self, context: &mut LoopContext<Q>) -> bool {
        let mut any = false;
        if injected_bug::injected(ServerBug::TrustReports) {
            return any;
        }
        while let Some(number) = self.maybe_eof.pop() {
            let Some(connection) = self.connections.get_mut(number) else { continue };
            // A blocked connection is read when it is unblocked.
            connection.readable |= std::mem::take(&mut connection.eof_unchecked);
            if connection.readable && connection.session.input == ReadState::Open {
                context.schedule(number, &mut connection.member);
                any = true;
            }
        }
        any
    }

    /// Reads no more requests; requests in flight are still answered.
    fn begin_shutdown(&mut self, context: &mut LoopContext<Q>) {
        drop(self.close_listeners(context));
        self.stopping = true;
        self.channel.close();
        for (number, connection) in &mut self.connections {
            let session = &mut connection.session;
            if matches!(session.input, ReadState::Open | ReadState::Blocked) {
                session.input = ReadState::Eof;
            }
            if matches!(session.phase, Phase::Handshake(_)) {
                session.abort();
            }
            context.schedule(number, &mut connection.member);
        }
    }

    fn change_pause(&mut self, context: &mut LoopContext<Q>, exports: &[u32]) {
        for (number, connection) in &mut self.connections {
            if exports.binary_search(&connection.member.export()).is_ok() {
                context.schedule(number, &mut connection.member);
            }
        }
    }
}
