//! An event loop whose iterations the test runs, service by service.
//!
//! Invariant: nothing here blocks. The engine's requests complete only when the queue is polled,
//! and then all of them.

mod many_clients;
mod many_members;
mod service_order;
mod split_writes;
mod receive;
mod replies;
mod queue_events;
mod request_cost;
mod dirty_marks;
mod ring_frontend;
mod ublk_requests;
mod ublk_backups;
mod ublk_cost;
mod vhost_queue;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use nowait::{BlockDevice, Config, Engine, Null, OpenOptions};

use crate::any_export::AnyExport;
use crate::dirty_bitmaps::bitmap_spec::BitmapSpec;
use crate::event_loop::*;
use crate::export::Export;
use crate::nbd::command::TransmissionMode;
use crate::nbd::connection::{Connection, HandoffConnection, MAX_REQUESTS};
use crate::nbd::handshake::{Handshake, TlsState};
use crate::nbd::nbd_frontend::NbdFrontend;
use crate::nbd::reply::builder::RequestContext;
use crate::nbd::session::{Phase, ReadState};
use crate::nbd::socket_read::RECEIVE_BYTES;
use crate::nbd::submit::InFlight;
use crate::nbd::wire;
use crate::net::listener::Listener;
use crate::net::socket::Socket;
use crate::registered_export::RegisteredExport;
use crate::server_options::Options;

const SIZE: u64 = 8 << 20;
const BLOCK: usize = 4096;
/// The forbidden first bytes of the image.
const FORBIDDEN: [u8; 4] = [2; 4];
/// Bytes of a request's header, and of the header of a simple reply.
const REQUEST: usize = 28;
const REPLY: usize = 16;

/// An event loop with connections in the transmission phase.
struct Bench {
    thread: EventLoop<NbdFrontend, Null>,
    /// The clients' sockets, by the index of the connection.
    clients: Vec<UnixStream>,
}

impl Bench {
    fn new(connections: usize) -> Self {
        Self::with(connections, Config::default())
    }

    fn with(connections: usize, config: Config) -> Self {
        let mut bench = Self::listening(config, Vec::new());
        for index in 0..connections {
            bench.connect(index);
        }
        bench
    }

    /// An event loop that accepts connections.
    fn listening(config: Config, listeners: Vec<Listener>) -> Self {
        let (context, engine) = parts(config, || Null::new().unwrap());
        context.shared.listen(listeners);
        let frontend = context.frontends().nbd;
        let mut thread = EventLoop::new(&context, engine, frontend).unwrap();
        thread.wake_up();
        Self { thread, clients: Vec::new() }
    }

    /// Adds a connection without any input yet.
    fn connect(&mut self, index: usize) {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        self.adopt(index, near, far);
        // The service that a new connection gets.
        self.iterate();
    }

    /// Adds a connection with the given sockets of the server and the client.
    fn adopt(&mut self, index: usize, near: impl Into<Socket>, far: UnixStream) {
        far.set_nonblocking(true).unwrap();
        let permit = self.thread.shared.limit.take().unwrap();
        let arrival = HandoffConnection::new(near.into(), TlsState::Off, permit);
        let used = Some(registered(&self.thread).shared().begin_use().unwrap());
        self.add(HandoffConnection { used, ..arrival });
        let connection = self.connection(index);
        connection.session.phase = Phase::Transmission(TransmissionMode::default());
        connection.session.send_queue.clear();
        self.thread.frontend.shared.handshakes.deadlines.end();
        self.clients.push(far);
    }

    fn connection(&mut self, index: usize) -> &mut Connection {
        &mut self.thread.frontend.connections[index]
    }

    fn add(&mut self, arrival: HandoffConnection) {
        self.thread.frontend.add(&mut self.thread.context, arrival);
    }

    fn close(&mut self, index: usize) {
        self.thread.frontend.close(&mut self.thread.context, index);
    }

    fn schedule(&mut self, index: usize) {
        let EventLoop { frontend, context, .. } = &mut self.thread;
        context.schedule(index, &mut frontend.connections[index].member);
    }

    /// Parses `input` of a connection.
    fn parse(&mut self, index: usize, input: &[u8]) {
        let EventLoop { frontend: NbdFrontend { connections, shared, .. }, context, .. } =
            &mut self.thread;
        connections[index].parse(shared, context, input, usize::MAX);
    }

    /// Charges `bytes` to a connection.
    fn charge(&mut self, index: usize, bytes: u64) {
        let EventLoop { frontend, context, .. } = &mut self.thread;
        context.budget.charge(&mut frontend.connections[index].member.budget_used, bytes);
    }

    fn recheck_eof(&mut self) -> bool {
        self.thread.frontend.before_sleep(&mut self.thread.context)
    }

    fn poll_last_reader(&mut self) {
        self.thread.frontend.poll(&mut self.thread.context);
    }

    fn begin_shutdown(&mut self) {
        self.thread.frontend.begin_shutdown(&mut self.thread.context);
    }

    /// Split writes that are not answered.
    fn splits(&mut self) -> usize {
        self.thread.frontend.connections.iter().map(|(_, c)| c.session.splits.len()).sum()
    }

    /// Sends `bytes` from a client.
    fn send(&mut self, index: usize, bytes: &[u8]) {
        self.clients[index].write_all(bytes).unwrap();
        self.connection(index).readable = true;
    }

    /// Runs an iteration without sleeping before it.
    fn iterate(&mut self) {
        self.thread.poll().unwrap();
        self.thread.run_once().unwrap();
    }

    /// Runs iterations until nothing is left to do.
    fn settle(&mut self) {
        self.iterate();
        while !self.thread.context.run_queues.is_empty()
            || self.thread.context.engine.has_completions()
        {
            self.iterate();
        }
    }

    /// The bytes that a client has received.
    fn received(&mut self, index: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = self.clients[index].read_to_end(&mut bytes);
        bytes
    }
}

/// The parts of an event loop: its context and its engine.
type Parts<Q> = (ThreadContext, DiskEngine<Q>);

/// The only export of the server of `thread`.
fn registered<F, Q: IoQueue>(thread: &EventLoop<F, Q>) -> Arc<RegisteredExport> {
    thread.shared.registry.default_export().unwrap()
}

/// Adds a bitmap of blocks to the export.
fn add_bitmap<F, Q: IoQueue>(thread: &EventLoop<F, Q>) {
    let spec = BitmapSpec { granularity: BLOCK as u64, ..BitmapSpec::new("a".into()) };
    registered(thread).bitmaps.add(&spec, SIZE, 1).unwrap();
}

/// The dirty blocks of the bitmap.
fn dirty_blocks<F, Q: IoQueue>(thread: &EventLoop<F, Q>) -> u64 {
    registered(thread).bitmaps.status(SIZE)[0].dirty_bytes / BLOCK as u64
}

/// The parts for an image of bytes 7, all mapped, on a `queue` of its device.
fn parts<Q: IoQueue>(config: Config, queue: impl FnOnce() -> Q) -> Parts<Q> {
    parts_of(SIZE, config, queue)
}

/// The parts for an image of `size` bytes.
fn parts_of<Q: IoQueue>(size: u64, config: Config, queue: impl FnOnce() -> Q) -> Parts<Q> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), vec![7; size as usize]).unwrap();
    file.as_file().sync_all().unwrap();
    let disk = BlockDevice::open(file.path(), OpenOptions::new().cache_holes(true)).unwrap();
    let disk = Arc::new(disk.with_forbidden_prefix(&FORBIDDEN));
    disk.scan();
    let export = AnyExport::new(Export::new(disk, String::new(), String::new()));
    let context = ThreadContext::simulated([export], config, Options::SPLIT_BYTES).unwrap();
    (context, Engine::new(queue(), nowait::WorkerPool::new(1), config).unwrap())
}

fn request(command: u16, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = wire::REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend([0, 0]);
    bytes.extend(command.to_be_bytes());
    bytes.extend([9; 8]);
    bytes.extend(offset.to_be_bytes());
    bytes.extend((length as u32).to_be_bytes());
    bytes
}

fn read(length: usize) -> Vec<u8> {
    request(wire::CMD_READ, 0, length)
}

fn write(length: usize) -> Vec<u8> {
    [request(wire::CMD_WRITE, 0, length), vec![1; length]].concat()
}

/// The error values of replies without data.
fn errors(replies: &[u8]) -> Vec<u32> {
    assert_eq!(replies.len() % REPLY, 0);
    replies.chunks(REPLY).map(|reply| u32::from_be_bytes(reply[4..8].try_into().unwrap())).collect()
}

#[test]
fn of_12_to_32_requests_that_complete_inline_the_first_half_is_served_first() {
    for one in [read(BLOCK), write(BLOCK)] {
        for (count, first) in [(11, 11), (12, 6), (13, 7), (32, 16), (33, 33)] {
            let mut bench = Bench::new(1);
            bench.thread.context.completes_inline = true;
            bench.send(0, &one.repeat(count));
            bench.thread.service(0);
            assert_eq!(
                bench.connection(0).session.in_flight,
                first,
                "of {count}, each of {} bytes",
                one.len()
            );
            // The second half is served without any event.
            assert_eq!(bench.thread.context.run_queues.is_empty(), first as usize == count);
            bench.settle();
            let replies = count * (REPLY + if one.len() == REQUEST { BLOCK } else { 0 });
            assert_eq!(bench.received(0).len(), replies);
        }
    }
}

#[test]
fn requests_that_do_not_complete_inline_are_all_submitted_at_once() {
    let mut bench = Bench::new(1);
    bench.thread.context.completes_inline = false;
    bench.send(0, &read(BLOCK).repeat(16));
    bench.thread.service(0);
    assert_eq!(bench.connection(0).session.in_flight, 16);
}

/// The disconnect is in the first half.
#[test]
fn nothing_is_parsed_after_a_disconnect_even_if_half_of_the_input_follows_it() {
    let mut bench = Bench::new(1);
    bench.thread.context.completes_inline = true;
    let disconnect = request(wire::CMD_DISC, 0, 0);
    bench.send(0, &[read(BLOCK).repeat(7), disconnect, read(BLOCK).repeat(8)].concat());
    bench.thread.service(0);
    let connection = bench.connection(0);
    assert_eq!((connection.session.input, connection.session.in_flight), (ReadState::Eof, 7));
    bench.settle();
    assert_eq!(bench.received(0).len(), 7 * (REPLY + BLOCK));
    assert!(bench.thread.frontend.connections.is_empty());
}

#[test]
fn a_connection_has_1024_requests_at_most_from_their_arrival_until_their_replies_are_sent() {
    for unsent in [0, 1, MAX_REQUESTS - 1] {
        let mut bench = Bench::new(1);
        let header = wire::RequestHeader::parse(wire::ReplyMode::Simple, &read(BLOCK)).unwrap();
        let connection = bench.connection(0);
        for _ in 0..unsent {
            connection.session.refuse(wire::ReplyMode::Simple, &header, 0);
        }
        // Their client does not read, and the other requests are in the engine.
        connection.waiting_writable = true;
        connection.session.in_flight = MAX_REQUESTS - 1 - unsent;
        bench.send(0, &read(BLOCK).repeat(2));
        bench.thread.service(0);
        let connection = bench.connection(0);
        assert_eq!(
            connection.session.in_flight + unsent,
            MAX_REQUESTS,
            "{unsent} replies not sent"
        );
        assert_eq!(
            (connection.session.input, connection.session.unparsed.len()),
            (ReadState::Blocked, REQUEST)
        );
    }
}

#[test]
fn a_payload_without_a_free_slot_is_kept_and_not_parsed_as_a_request() {
    for missing in [1, BLOCK] {
        let mut bench = Bench::with(2, Config { slots: 1, ..Config::default() });
        let bytes = [write(BLOCK), read(BLOCK)].concat();
        let (first, rest) = bytes.split_at(REQUEST + BLOCK - missing);
        bench.send(0, first);
        bench.thread.service(0);
        // Another request takes the only slot.
        bench.send(1, &read(BLOCK));
        bench.thread.service(1);
        bench.parse(0, rest);
        let connection = bench.connection(0);
        assert_eq!(
            (connection.session.in_flight, connection.session.input),
            (0, ReadState::Blocked)
        );
        assert_eq!(
            connection.session.unparsed.len(),
            REQUEST,
            "the read, and nothing of the payload"
        );
        bench.settle();
        assert_eq!(bench.received(0).len(), 2 * REPLY + BLOCK);
    }
}

#[test]
fn a_request_that_the_engine_rejects_is_answered_and_holds_no_budget() {
    let mut bench = Bench::new(1);
    let header = |pos, len| request(wire::CMD_WRITE, pos, len);
    bench.send(0, &[header(0, BLOCK), vec![2; BLOCK]].concat());
    bench.send(0, &[header(1, 2), vec![2; 2]].concat());
    bench.settle();
    assert_eq!(errors(&bench.received(0)), [1, 1]);
    assert_eq!(
        (bench.connection(0).member.budget_used, bench.connection(0).session.in_flight),
        (0, 0)
    );
    // EAGAIN is never sent to a client.
    for (errno, error) in [(libc::EPERM, 1), (libc::EAGAIN, 5)] {
        let request = RequestContext {
            header: wire::RequestHeader::parse(wire::ReplyMode::Simple, &write(BLOCK)).unwrap(),
            contexts: TransmissionMode::default().contexts,
            budget_used: 1000,
        };
        bench.charge(0, 3000);
        let io = Request { op: Op::Write, flags: Flags::NONE, range: ByteRange::new(0, 0) };
        let EventLoop { frontend, context, .. } = &mut bench.thread;
        let rejected = InFlight { request, split: None };
        frontend.connections[0].on_rejected(context, &rejected, io, errno);
        assert_eq!(bench.connection(0).member.budget_used, 2000);
        bench.thread.service(0);
        assert_eq!(errors(&bench.received(0)), [error]);
        assert!(bench.thread.frontend.shared.requests.in_flight.is_empty());
        bench.connection(0).member.budget_used = 0;
    }
}

/// A connection with a request in flight or an unsent reply is scheduled by its completion.
#[test]
fn only_a_connection_with_nothing_in_flight_is_listed_as_blocked_and_only_once() {
    let mut bench = Bench::with(2, Config { slots: 1, ..Config::default() });
    bench.send(0, &read(BLOCK).repeat(2));
    bench.thread.service(0);
    assert_eq!(
        (bench.connection(0).session.in_flight, bench.connection(0).session.input),
        (1, ReadState::Blocked)
    );
    assert!(bench.thread.context.blocked.is_empty(), "its own request is under way");
    for _ in 0..3 {
        bench.send(1, &read(BLOCK));
        bench.thread.service(1);
        assert_eq!(
            (bench.connection(1).session.in_flight, bench.connection(1).session.input),
            (0, ReadState::Blocked)
        );
        assert_eq!(bench.thread.context.blocked, [1]);
    }
    bench.settle();
    assert_eq!(bench.received(0).len(), 2 * (REPLY + BLOCK));
    assert_eq!(bench.received(1).len(), 3 * (REPLY + BLOCK));
}

#[test]
fn a_connection_with_unsent_replies_is_not_listed_as_blocked() {
    let mut bench = Bench::with(2, Config { slots: 1, ..Config::default() });
    bench.send(0, &read(BLOCK));
    bench.thread.service(0);
    let header = wire::RequestHeader::parse(wire::ReplyMode::Simple, &read(BLOCK)).unwrap();
    let connection = bench.connection(1);
    connection.session.refuse(wire::ReplyMode::Simple, &header, 0);
    connection.waiting_writable = true;
    bench.send(1, &read(BLOCK));
    bench.thread.service(1);
    assert_eq!(bench.connection(1).session.input, ReadState::Blocked);
    assert!(bench.thread.context.blocked.is_empty());
}

#[test]
fn received_read_and_sent_bytes_count_as_moved_in_their_service() {
    let mut bench = Bench::new(1);
    bench.send(0, &[read(BLOCK), write(2 * BLOCK)].concat());
    assert_eq!(bench.thread.service(0), (2 * REQUEST + BLOCK + 2 * BLOCK) as u64);
    bench.thread.poll().unwrap();
    bench.thread.complete();
    assert_eq!(bench.thread.service(0), (2 * REPLY + BLOCK) as u64);
    assert_eq!(bench.thread.service(0), 0);
}
