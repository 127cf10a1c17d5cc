//! Limits: many, idle, slow and greedy clients get bounded resources and do not affect others.
//!
//! Invariant: in every test a well-behaved connection works during and after the load.

use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::{KIB, MIB, Scratch, Server, require_tool};
use nowait_testkit::nbd::load::{rest_of, write_and_read_back};
use nowait_testkit::nbd::{Client, Command, Mode, RawRequest, greet, send_option};
use nowait_testkit::{BOUND, Random, wait_for};

const IDLE: usize = 1000;
const IDLE_BYTES: u64 = 64 * MIB;
const CHURN: usize = 2000;
/// Clients that never read their replies.
const GREEDY: usize = 40;
/// The memory that a server may use for them: its payload memory and its own.
const GREEDY_BYTES: u64 = 384 * MIB;
/// The longest write that NBD clients send without negotiation (NBD proto.md, "Block size
/// constraints").
const LONGEST_BYTES: usize = 32 << 20;

/// A served image of random bytes, and a well-behaved connection.
struct Fixture {
    server: Server,
    bystander: Client,
    _scratch: Scratch,
}

impl Fixture {
    fn new(bytes: u64, extra: &[&str]) -> Self {
        let scratch = Scratch::new();
        let image = scratch.random("disk.img", bytes, bytes);
        let server = Server::start(&image, extra);
        Self { bystander: server.connect(), server, _scratch: scratch }
    }

    /// The bystander writes and reads back, in requests of each of `sizes`.
    fn bystander_works(&mut self, sizes: &[u64]) {
        write_and_read_back(&mut self.bystander, sizes);
    }
}

#[test]
fn a_connection_beyond_max_connections_is_closed_at_once_and_accepted_after_a_disconnect() {
    let mut fixture = Fixture::new(MIB, &["--max-connections", "2"]);
    let mut second = fixture.server.connect();
    for _ in 0..3 {
        let mut third = UnixStream::connect(fixture.server.socket()).expect("a connection");
        assert_eq!(rest_of(&mut third), b"", "it is greeted");
    }
    second.read(0, 512).expect("a read of one that has a place");
    let printed = fixture.server.log();
    assert_eq!(printed.matches("a connection was closed: 2 are open").count(), 1, "{printed}");
    drop(second);
    let connect = || Client::connect(&fixture.server.socket(), Mode::Structured);
    drop(wait_for("a free place", connect));
    fixture.bystander_works(&[4 * KIB]);
    fixture.server.stop();
}

#[test]
fn a_handshake_that_takes_ten_seconds_ends_and_an_idle_server_sleeps_before_and_after() {
    let mut fixture = Fixture::new(MIB, &[]);
    let socket = fixture.server.socket();
    let mut silent = UnixStream::connect(&socket).expect("a connection");
    let mut halfway = greet(&socket).expect("a greeting");
    halfway.write_all(b"IHAVEOPT").expect("a socket");
    let mut slow = greet(&socket).expect("a greeting");
    // An endless series of options: each is answered, so that the client is never silent for long.
    let dripping = thread::spawn(move || {
        let start = Instant::now();
        while send_option(&mut slow, 0x7777, b"drip").is_ok() {
            assert!(start.elapsed() < BOUND, "it may go on for ever");
            thread::sleep(Duration::from_millis(200));
        }
    });
    for stream in [&mut silent, &mut halfway] {
        stream.set_read_timeout(Some(BOUND)).expect("a socket");
        rest_of(stream);
    }
    dripping.join().expect("the slow client's end");
    // The bystander has completed its handshake and may stay idle. The memory of the others is
    // freed a second after they have disconnected.
    thread::sleep(Duration::from_secs(3));
    let before = fixture.server.sleeps();
    thread::sleep(Duration::from_secs(1));
    assert_eq!(fixture.server.sleeps(), before, "something wakes an idle server");
    fixture.bystander_works(&[4 * KIB]);
    fixture.server.stop();
}

#[test]
fn a_thousand_idle_connections_need_less_than_64_mib_with_a_low_descriptor_limit() {
    nowait_testkit::needs!(require_tool("prlimit"));
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .expect("a raised limit");
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", MIB, 7);
    for queue in ["uring", "threads"] {
        let limits = ["prlimit", "--nofile=256:4096"];
        let server = Server::start_under(&limits, &image, &["--queue", queue]);
        let mut idle: Vec<Client> = (0..IDLE).map(|_| server.connect()).collect();
        for client in &mut idle {
            client.read(0, 4096).expect("a read");
        }
        let resident = server.memory("RssAnon");
        assert!(resident < IDLE_BYTES, "{queue}: {resident} bytes");
        assert!(server.descriptors() > IDLE, "they are not all there");
        drop(idle);
        server.stop();
    }
}

#[test]
fn two_thousand_short_connections_leak_no_descriptor_and_no_memory() {
    let mut fixture = Fixture::new(MIB, &[]);
    let (socket, before) = (fixture.server.socket(), fixture.server.descriptors());
    let connect_and_close = |n: usize| match n % 4 {
        0 => drop(UnixStream::connect(&socket).expect("a connection")),
        1 => drop(greet(&socket).expect("a greeting")),
        2 => drop(Client::connect(&socket, Mode::Structured).expect("a handshake")),
        _ => {
            let mut client = Client::connect(&socket, Mode::Simple).expect("a handshake");
            client.send(&Command::Read { offset: 0, len: 4096 }).expect("a request");
        }
    };
    (0..CHURN / 4).for_each(connect_and_close);
    fixture.server.await_descriptors(before);
    let warm = fixture.server.memory("RssAnon");
    (CHURN / 4..CHURN).for_each(connect_and_close);
    fixture.server.await_descriptors(before);
    let more = fixture.server.memory("RssAnon").saturating_sub(warm);
    assert!(more < 2 * MIB, "{more} bytes more after three times as many");
    // A ring that still polls a closed socket keeps the socket and its data.
    let polls = fixture.server.polls();
    assert!(polls < 20, "{polls} descriptors are watched");
    fixture.bystander_works(&[4 * KIB]);
    fixture.server.stop();
}

#[test]
fn a_client_that_has_closed_its_receiving_half_is_disconnected() {
    let mut fixture = Fixture::new(MIB, &[]);
    let before = fixture.server.descriptors();
    let mut half = fixture.server.connect();
    half.stream().shutdown(Shutdown::Read).expect("a socket");
    half.send(&Command::Read { offset: 0, len: 4096 }).expect("a socket");
    fixture.server.await_descriptors(before);
    let mut half = greet(&fixture.server.socket()).expect("a greeting");
    half.shutdown(Shutdown::Write).expect("a socket");
    assert_eq!(rest_of(&mut half), b"");
    fixture.bystander_works(&[4 * KIB]);
    fixture.server.stop();
}

/// Requests more than the sockets hold, and reads no reply.
fn greedy_client(server: &Server, len: u32) -> Client {
    let mut greedy = server.connect();
    for _ in 0..64 {
        greedy.send(&Command::Read { offset: 0, len }).expect("room for 64 request headers");
    }
    greedy
}

#[test]
fn forty_clients_that_never_read_their_replies_get_bounded_memory_and_block_no_other_client() {
    for queue in ["uring", "threads"] {
        // With the page cache, because the test is about memory and not about a disk's speed.
        let one_thread = ["--queues", "1", "--queue", queue, "--direct", "off"];
        let mut fixture = Fixture::new(32 * MIB, &one_thread);
        let mut greedy = Vec::new();
        for n in 0..GREEDY {
            let len = [MIB, 256 * KIB, 2 * MIB][n % 3] as u32;
            greedy.push(greedy_client(&fixture.server, len));
            fixture.bystander_works(&[4 * KIB, 64 * KIB, MIB]);
        }
        let resident = fixture.server.peak();
        assert!(resident < GREEDY_BYTES, "{queue}: {resident} bytes");
        // A client that begins to read late gets all its replies.
        let mut late = greedy.pop().expect("one of them");
        for _ in 0..64 {
            late.receive().expect("a reply").1.expect("bytes");
        }
        drop(greedy);
        fixture.bystander_works(&[MIB]);
        fixture.server.stop();
    }
}

const EXPORTS: usize = 8;
/// Clients that each send the header of the longest write and a part of its payload, and then no more.
const UNFINISHED: usize = 16;

#[test]
fn writes_that_never_end_on_many_exports_hold_up_no_client_of_any_export() {
    let scratch = Scratch::new();
    let image = |n: usize| scratch.random(&format!("disk{n}"), 33 * MIB, MIB);
    let first = image(0);
    let more: Vec<String> =
        (1..EXPORTS).map(|n| format!("disk{n}={}", image(n).display())).collect();
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let server = Server::start(&first, &more);
    let names: Vec<String> =
        (0..EXPORTS).map(|n| if n == 0 { String::new() } else { format!("disk{n}") }).collect();
    let connect = |n: usize| {
        let name = &names[n % EXPORTS];
        Client::connect_to(&server.socket(), name, Mode::Structured).expect("a connection")
    };
    let mut unfinished: Vec<Client> = (0..UNFINISHED).map(connect).collect();
    let all = Barrier::new(UNFINISHED);
    thread::scope(|scope| {
        for client in &mut unfinished {
            scope.spawn(|| {
                let request = RawRequest::write(0, LONGEST_BYTES as u32);
                all.wait();
                let stream = client.stream();
                stream.write_all(&request.bytes()).expect("a socket");
                stream.set_nonblocking(true).expect("a socket");
                // All but the end is sent, or less where the server has no memory for it.
                let (data, mut sent) = (vec![7; 64 << 10], 0);
                let mut waits = 0;
                while sent < LONGEST_BYTES - data.len() && waits < 200 {
                    match stream.write(&data) {
                        Ok(bytes) => (sent, waits) = (sent + bytes, 0),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {
                            waits += 1;
                            thread::sleep(Duration::from_millis(5));
                        }
                        Err(error) => panic!("a socket: {error}"),
                    }
                }
            });
        }
    });
    for n in 0..EXPORTS {
        let mut client = connect(n);
        for bytes in [4 * KIB, 64 * KIB, MIB] {
            let data = Random::from_seed(n as u64).bytes(bytes as usize);
            client.write(32 * MIB, &data).expect("a write");
            assert!(client.read(32 * MIB, bytes as u32).expect("a read") == data);
        }
    }
    assert!(server.peak() < GREEDY_BYTES + 64 * MIB, "{} bytes", server.peak());
    // Beside other clients of their threads the writes hold a fragment each: there is memory for the
    // longest read, and none of them is disconnected for it.
    connect(0).read(0, LONGEST_BYTES as u32).expect("the longest read");
    assert!(!server.log().contains("keeps memory that others wait for"), "{}", server.log());
    drop(unfinished);
    server.stop();
}

/// Connects without waiting, if the server's backlog has room; sends nothing.
fn try_connect(socket: &Path) -> Option<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket");
    let address = SocketAddrUnix::new(socket).expect("a short path");
    connect(&fd, &address).is_ok().then_some(fd)
}

#[test]
fn running_out_of_descriptors_is_survived() {
    nowait_testkit::needs!(require_tool("prlimit"));
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", MIB, 5);
    let server = Server::start_under(&["prlimit", "--nofile=64"], &image, &[]);
    let mut early = server.connect();
    let crowd: Vec<_> = (0..90).map_while(|_| try_connect(&server.socket())).collect();
    assert!(crowd.len() > 10, "only {} fit the backlog", crowd.len());
    early.read(0, 512).expect("a read amid the crowd");
    drop(crowd);
    server.connect().read(0, 512).expect("a newcomer's read");
    server.stop();
}

#[test]
fn the_descriptor_of_a_client_that_disconnects_within_a_request_is_closed() {
    let mut fixture = Fixture::new(MIB, &[]);
    let before = fixture.server.descriptors();
    for _ in 0..50 {
        for sent in [13, 28, 4000] {
            let mut dying = fixture.server.connect();
            // Now the server sleeps, so that it sees the bytes and the end of the stream together.
            thread::sleep(Duration::from_millis(1));
            let mut bytes = RawRequest::write(4096, 8192).bytes();
            bytes.resize(sent, 0x77);
            dying.stream().write_all(&bytes).expect("a socket");
        }
    }
    fixture.server.await_descriptors(before);
    fixture.bystander_works(&[4 * KIB]);
    fixture.server.stop();
}
