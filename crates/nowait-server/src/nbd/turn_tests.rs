//! A thread whose turns the test takes: what it does with each connection, look by look.
//!
//! Invariant: nothing here waits; what the engine has is done only when the queue is polled, and then
//! all of it.
//! Knows: turn, conn, door, group, handshake, parse, respond, wire, device. Known by: nobody.

#[path = "turn_tests/fair.rs"]
mod fair;
#[path = "turn_tests/parts.rs"]
mod parts;
#[path = "turn_tests/receive.rs"]
mod receive;
#[path = "turn_tests/replies.rs"]
mod replies;
#[path = "turn_tests/reports.rs"]
mod reports;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use nowait::{Config, Disk, Extents, Flags, Io, Null, Op, OpenOptions, Range};

use super::super::conn::MAX_REQUESTS;
use super::super::door::Dialect;
use super::super::handshake::Handshake;
use super::super::parse::Taken;
use super::super::socket::Socket;
use super::super::wire;
use super::*;

const SIZE: u64 = 8 << 20;
const BLOCK: usize = 4096;
/// What the image never begins with.
const FORBIDDEN: [u8; 4] = [2; 4];
/// Bytes of a request's header, and of the head of a simple reply.
const REQUEST: usize = 28;
const REPLY: usize = 16;

/// A thread with connections in transmission phase.
struct Bench {
    thread: Thread<Null, Extents>,
    /// The clients' sides, by the connections' numbers.
    clients: Vec<UnixStream>,
}

impl Bench {
    fn new(connections: usize) -> Self {
        Self::with(connections, Config::default())
    }

    fn with(connections: usize, config: Config) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; SIZE as usize]).unwrap();
        file.as_file().sync_all().unwrap();
        let disk = Arc::new(Disk::open(file.path(), OpenOptions::default()).unwrap());
        disk.scan();
        let device = Device::new(disk.clone(), 1, String::new(), String::new());
        let device = Arc::new(device.never_beginning(&FORBIDDEN));
        let post = Post::simulated(device.clone(), config).unwrap();
        let queue = Null::new().unwrap();
        let mut engine = Engine::new(disk, device.workers(), queue, config).unwrap();
        watch(&post, &mut engine).unwrap();
        let mut bench = Self { thread: Thread::new(post, device, engine), clients: Vec::new() };
        for index in 0..connections {
            bench.connect(index);
        }
        bench
    }

    /// One more connection, in which nothing was sent yet.
    fn connect(&mut self, index: usize) {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        self.adopt(index, near, far);
        // The look that a new connection gets.
        self.turn();
    }

    /// One more connection: its sockets here and there.
    fn adopt(&mut self, index: usize, near: impl Into<Socket>, far: UnixStream) {
        far.set_nonblocking(true).unwrap();
        let seat = self.thread.shared.seats.take().unwrap();
        self.thread.add(Arrival::new(near.into(), Secrecy::Off, seat));
        let conn = self.conn(index);
        conn.phase = Phase::Transmission(Dialect::default());
        conn.out.clear();
        self.thread.handshakes.ended();
        self.clients.push(far);
    }

    fn conn(&mut self, index: usize) -> &mut Conn {
        &mut self.thread.conns[index]
    }

    /// A client sends `bytes`.
    fn send(&mut self, index: usize, bytes: &[u8]) {
        self.clients[index].write_all(bytes).unwrap();
        self.conn(index).readable = true;
    }

    /// A turn, without waiting before it.
    fn turn(&mut self) {
        let Thread { events, engine, .. } = &mut self.thread;
        engine.poll_watched(&mut |token, bits| events.push((token, bits))).unwrap();
        self.thread.take_turn().unwrap();
    }

    /// Turns until nothing is left to do.
    fn settle(&mut self) {
        self.turn();
        while !self.thread.lines.is_empty() || self.thread.engine.pending() {
            self.turn();
        }
    }

    /// What has come to a client.
    fn received(&mut self, index: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = self.clients[index].read_to_end(&mut bytes);
        bytes
    }
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
fn of_12_to_32_requests_that_end_at_once_the_first_half_is_served_first() {
    for one in [read(BLOCK), write(BLOCK)] {
        for (count, first) in [(11, 11), (12, 6), (13, 7), (32, 16), (33, 33)] {
            let mut bench = Bench::new(1);
            bench.thread.ends_at_once = true;
            bench.send(0, &one.repeat(count));
            bench.thread.look_at(0);
            assert_eq!(bench.conn(0).in_flight, first, "of {count}, each of {} bytes", one.len());
            // The other half is served without anything having to happen.
            assert_eq!(bench.thread.lines.is_empty(), first as usize == count);
            bench.settle();
            let replies = count * (REPLY + if one.len() == REQUEST { BLOCK } else { 0 });
            assert_eq!(bench.received(0).len(), replies);
        }
    }
}

#[test]
fn requests_that_take_their_time_are_all_taken_at_once() {
    let mut bench = Bench::new(1);
    bench.thread.ends_at_once = false;
    bench.send(0, &read(BLOCK).repeat(16));
    bench.thread.look_at(0);
    assert_eq!(bench.conn(0).in_flight, 16);
}

/// The goodbye ends the first half.
#[test]
fn nothing_is_taken_after_a_goodbye_though_half_of_what_came_is_behind_it() {
    let mut bench = Bench::new(1);
    bench.thread.ends_at_once = true;
    let goodbye = request(wire::CMD_DISC, 0, 0);
    bench.send(0, &[read(BLOCK).repeat(7), goodbye, read(BLOCK).repeat(8)].concat());
    bench.thread.look_at(0);
    let conn = bench.conn(0);
    assert_eq!((conn.input, conn.in_flight), (Input::Ended, 7));
    bench.settle();
    assert_eq!(bench.received(0).len(), 7 * (REPLY + BLOCK));
    assert!(bench.thread.conns.is_empty());
}

#[test]
fn a_connection_has_1024_requests_at_most_from_their_arrival_until_their_replies_have_left() {
    for unsent in [0, 1, MAX_REQUESTS - 1] {
        let mut bench = Bench::new(1);
        let header = wire::RequestHeader::parse(wire::Mode::Simple, &read(BLOCK)).unwrap();
        let conn = bench.conn(0);
        for _ in 0..unsent {
            conn.refuse(wire::Mode::Simple, &header, 0);
        }
        // Their client does not listen, and the engine has the others.
        conn.awaits_room = true;
        conn.in_flight = MAX_REQUESTS - 1 - unsent;
        bench.send(0, &read(BLOCK).repeat(2));
        bench.thread.look_at(0);
        let conn = bench.conn(0);
        assert_eq!(conn.in_flight + unsent, MAX_REQUESTS, "{unsent} replies not sent");
        assert_eq!((conn.input, conn.stash.len()), (Input::Stalled, REQUEST));
    }
}

#[test]
fn a_payload_that_finds_no_room_stays_and_is_no_request() {
    for came in [1, BLOCK] {
        let mut bench = Bench::with(2, Config { slots: 1, ..Config::default() });
        let bytes = [write(BLOCK), read(BLOCK)].concat();
        let (first, rest) = bytes.split_at(REQUEST + BLOCK - came);
        bench.send(0, first);
        bench.thread.look_at(0);
        // The only slot is taken meanwhile.
        bench.send(1, &read(BLOCK));
        bench.thread.look_at(1);
        bench.thread.parse(0, rest, usize::MAX);
        let conn = bench.conn(0);
        assert_eq!((conn.in_flight, conn.input), (0, Input::Stalled));
        assert_eq!(conn.stash.len(), REQUEST, "the read, and nothing of the payload");
        bench.settle();
        assert_eq!(bench.received(0).len(), 2 * REPLY + BLOCK);
    }
}

#[test]
fn a_request_that_the_engine_does_not_get_is_answered_and_holds_nothing() {
    let mut bench = Bench::new(1);
    let header = |pos, len| request(wire::CMD_WRITE, pos, len);
    bench.send(0, &[header(0, BLOCK), vec![2; BLOCK]].concat());
    bench.send(0, &[header(1, 2), vec![2; 2]].concat());
    bench.settle();
    assert_eq!(errors(&bench.received(0)), [1, 1]);
    assert_eq!((bench.conn(0).held, bench.conn(0).in_flight), (0, 0));
    // EAGAIN is no answer.
    for (errno, told) in [(libc::EPERM, 1), (libc::EAGAIN, 5)] {
        let request = Request {
            header: wire::RequestHeader::parse(wire::Mode::Simple, &write(BLOCK)).unwrap(),
            contexts: Dialect::default().contexts,
            held: 1000,
        };
        let Thread { store, conns, asked, .. } = &mut bench.thread;
        store.take(&mut conns[0].held, 3000);
        let tag = asked.insert(Asked { conn: 0, request, cut: None });
        let io = Io { op: Op::Write, flags: Flags::NONE, range: Range::new(0, 0) };
        bench.thread.rejected(0, tag, io, errno);
        assert_eq!(bench.conn(0).held, 2000);
        bench.thread.look_at(0);
        assert_eq!(errors(&bench.received(0)), [told]);
        assert!(bench.thread.asked.is_empty());
        bench.conn(0).held = 0;
    }
}

/// The others are looked at again when something of their own has ended or left.
#[test]
fn who_waits_for_others_is_listed_once_and_nobody_else_is() {
    let mut bench = Bench::with(2, Config { slots: 1, ..Config::default() });
    bench.send(0, &read(BLOCK).repeat(2));
    bench.thread.look_at(0);
    assert_eq!((bench.conn(0).in_flight, bench.conn(0).input), (1, Input::Stalled));
    assert!(bench.thread.stalled.is_empty(), "its own request is under way");
    for _ in 0..3 {
        bench.send(1, &read(BLOCK));
        bench.thread.look_at(1);
        assert_eq!((bench.conn(1).in_flight, bench.conn(1).input), (0, Input::Stalled));
        assert_eq!(bench.thread.stalled, [1]);
    }
    bench.settle();
    assert_eq!(bench.received(0).len(), 2 * (REPLY + BLOCK));
    assert_eq!(bench.received(1).len(), 3 * (REPLY + BLOCK));
}

#[test]
fn who_has_replies_to_send_waits_for_nobody_else() {
    let mut bench = Bench::with(2, Config { slots: 1, ..Config::default() });
    bench.send(0, &read(BLOCK));
    bench.thread.look_at(0);
    let header = wire::RequestHeader::parse(wire::Mode::Simple, &read(BLOCK)).unwrap();
    let conn = bench.conn(1);
    conn.refuse(wire::Mode::Simple, &header, 0);
    conn.awaits_room = true;
    bench.send(1, &read(BLOCK));
    bench.thread.look_at(1);
    assert_eq!(bench.conn(1).input, Input::Stalled);
    assert!(bench.thread.stalled.is_empty());
}

#[test]
fn what_is_received_read_and_sent_counts_as_moved_in_its_look() {
    let mut bench = Bench::new(1);
    bench.send(0, &[read(BLOCK), write(2 * BLOCK)].concat());
    assert_eq!(bench.thread.look_at(0), (2 * REQUEST + BLOCK + 2 * BLOCK) as u64);
    let Thread { events, engine, .. } = &mut bench.thread;
    engine.poll_watched(&mut |token, bits| events.push((token, bits))).unwrap();
    bench.thread.complete();
    assert_eq!(bench.thread.look_at(0), (2 * REPLY + BLOCK) as u64);
    assert_eq!(bench.thread.look_at(0), 0);
}
