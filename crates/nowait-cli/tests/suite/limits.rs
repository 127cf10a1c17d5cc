//! Crowds, idlers, dawdlers and greed: what each client gets is bounded, and the others do not notice.
//!
//! Invariant: in every test a well-behaved connection works amid the others and after them.
//! Knows: NBD proto.md, procfs. Known by: nobody.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::nbd::{Client, Command, Mode, RawRequest, greet, send_option};
use crate::common::random::Random;
use crate::common::{KIB, MIB, Scratch, Server, require_tool};

const IDLE: usize = 1000;
const IDLE_BYTES: u64 = 64 * MIB;
const CHURN: usize = 2000;
/// Clients that take none of the replies they asked for.
const GREEDY: usize = 40;
/// What a server may keep for them: its memory for payload, and what it needs itself.
const GREEDY_BYTES: u64 = 384 * MIB;
/// The longest write that NBD clients send unasked (NBD proto.md, "Block size constraints").
const LONGEST_BYTES: usize = 32 << 20;
/// Far beyond what the server takes to notice something.
const PATIENCE: Duration = Duration::from_secs(30);

/// A served image of random bytes, and a connection that has done nothing wrong.
struct Scene {
    server: Server,
    bystander: Client,
    image: PathBuf,
    _scratch: Scratch,
}

impl Scene {
    fn new(bytes: u64, extra: &[&str]) -> Self {
        let scratch = Scratch::new();
        let image = scratch.random("disk.img", bytes, bytes);
        let server = Server::start(&image, extra);
        Self { bystander: server.connect(), server, image, _scratch: scratch }
    }

    /// The bystander writes and reads back, in requests of each of `sizes`.
    fn bystander_works(&mut self, sizes: &[u64]) {
        for (n, &size) in (0..).zip(sizes) {
            let data = Random::from_seed(n).bytes(size as usize);
            self.bystander.write(0, &data).expect("the bystander's write");
            let read = self.bystander.read(0, size as u32).expect("the bystander's read");
            assert!(read == data, "the bystander reads something else than it wrote");
        }
    }

    /// Waits until the server has no more descriptors open than `before`.
    fn gives_back(&self, before: usize) {
        let start = Instant::now();
        while self.server.descriptors() > before {
            let after = self.server.descriptors();
            assert!(start.elapsed() < PATIENCE, "{before} descriptors before, {after} after");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Reads to the end of the connection. Fails the test if it does not end.
fn rest_of(stream: &mut UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("no end: {error}"),
        _ => rest,
    }
}

#[test]
fn one_more_than_max_connections_is_closed_at_once_and_finds_a_place_when_one_has_left() {
    let mut scene = Scene::new(MIB, &["--max-connections", "2"]);
    let mut second = scene.server.connect();
    for _ in 0..3 {
        let mut third = UnixStream::connect(scene.server.socket()).expect("a connection");
        assert_eq!(rest_of(&mut third), b"", "it is greeted");
    }
    second.read(0, 512).expect("a read of one that has a place");
    let said = scene.server.log();
    assert_eq!(said.matches("a connection was closed: 2 are open").count(), 1, "{said}");
    drop(second);
    let start = Instant::now();
    while Client::connect(&scene.server.socket(), Mode::Structured).is_err() {
        assert!(start.elapsed() < PATIENCE, "the place that was left is not free");
    }
    scene.bystander_works(&[4 * KIB]);
    scene.server.stop();
}

#[test]
fn a_handshake_that_takes_ten_seconds_ends_and_an_idle_server_sleeps_before_and_after() {
    let mut scene = Scene::new(MIB, &[]);
    let socket = scene.server.socket();
    let mut silent = UnixStream::connect(&socket).expect("a connection");
    let mut halfway = greet(&socket).expect("a greeting");
    halfway.write_all(b"IHAVEOPT").expect("a socket");
    let mut slow = greet(&socket).expect("a greeting");
    // Options that have no end: each is answered, so that the client is never silent for long.
    let dripping = thread::spawn(move || {
        let start = Instant::now();
        while send_option(&mut slow, 0x7777, b"drip").is_ok() {
            assert!(start.elapsed() < PATIENCE, "it may go on for ever");
            thread::sleep(Duration::from_millis(200));
        }
    });
    for stream in [&mut silent, &mut halfway] {
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        rest_of(stream);
    }
    dripping.join().expect("the slow client's end");
    // The bystander is past its handshake and may be silent for as long as it likes.
    thread::sleep(Duration::from_millis(100));
    let before = scene.server.sleeps();
    thread::sleep(Duration::from_secs(1));
    assert_eq!(scene.server.sleeps(), before, "something wakes an idle server");
    scene.bystander_works(&[4 * KIB]);
    scene.server.stop();
}

#[test]
fn a_thousand_idle_connections_need_less_than_64_mib_whatever_the_lower_limit_of_descriptors() {
    if !require_tool("prlimit") {
        return;
    }
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
        let resident = server.memory("VmRSS");
        assert!(resident < IDLE_BYTES, "{queue}: {resident} bytes");
        assert!(server.descriptors() > IDLE, "they are not all there");
        drop(idle);
        server.stop();
    }
}

#[test]
fn two_thousand_that_come_and_go_leave_nothing_behind() {
    let mut scene = Scene::new(MIB, &[]);
    let (socket, before) = (scene.server.socket(), scene.server.descriptors());
    let come_and_go = |n: usize| match n % 4 {
        0 => drop(UnixStream::connect(&socket).expect("a connection")),
        1 => drop(greet(&socket).expect("a greeting")),
        2 => drop(Client::connect(&socket, Mode::Structured).expect("a handshake")),
        _ => {
            let mut client = Client::connect(&socket, Mode::Simple).expect("a handshake");
            client.send(&Command::Read { offset: 0, len: 4096 }).expect("a request");
        }
    };
    (0..CHURN / 4).for_each(come_and_go);
    scene.gives_back(before);
    let warm = scene.server.memory("VmRSS");
    (CHURN / 4..CHURN).for_each(come_and_go);
    scene.gives_back(before);
    let more = scene.server.memory("VmRSS").saturating_sub(warm);
    assert!(more < 2 * MIB, "{more} bytes more after three times as many");
    // A ring that still watches a socket keeps it, and what is in it, though it was closed.
    let polls = scene.server.polls();
    assert!(polls < 20, "{polls} descriptors are watched");
    scene.bystander_works(&[4 * KIB]);
    scene.server.stop();
}

#[test]
fn a_client_that_has_closed_its_sending_half_gets_all_its_replies_and_then_the_end() {
    const REQUESTS: u64 = 64;
    let mut scene = Scene::new(16 * MIB, &[]);
    let image = fs::read(&scene.image).expect("the image");
    let mut half = scene.server.connect();
    let piece = 256 * KIB;
    for n in 0..REQUESTS {
        half.send(&Command::Read { offset: n * piece, len: piece as u32 }).expect("a socket");
    }
    half.stream().shutdown(Shutdown::Write).expect("a socket");
    scene.bystander_works(&[]);
    for _ in 0..REQUESTS {
        let (cookie, read) = half.receive().expect("a reply");
        let start = (cookie - 1) as usize * piece as usize;
        assert!(read.expect("bytes") == image[start..start + piece as usize]);
    }
    assert_eq!(rest_of(half.stream()), b"");
    scene.bystander_works(&[4 * KIB]);
    scene.server.stop();
}

#[test]
fn a_client_that_has_closed_its_receiving_half_is_disconnected() {
    let mut scene = Scene::new(MIB, &[]);
    let before = scene.server.descriptors();
    let mut half = scene.server.connect();
    half.stream().shutdown(Shutdown::Read).expect("a socket");
    half.send(&Command::Read { offset: 0, len: 4096 }).expect("a socket");
    scene.gives_back(before);
    let mut half = greet(&scene.server.socket()).expect("a greeting");
    half.shutdown(Shutdown::Write).expect("a socket");
    assert_eq!(rest_of(&mut half), b"");
    scene.bystander_works(&[4 * KIB]);
    scene.server.stop();
}

#[test]
fn a_write_of_32_mib_may_come_a_byte_at_a_time() {
    let mut scene = Scene::new(LONGEST_BYTES as u64 + MIB, &[]);
    let mut slow = scene.server.connect();
    let data = Random::from_seed(32).bytes(LONGEST_BYTES);
    let request = RawRequest::write(MIB, LONGEST_BYTES as u32);
    slow.expect_answer_to(&request);
    let (first, rest) = data.split_at(4096);
    let (middle, last) = rest.split_at(rest.len() - 4096);
    dribble(slow.stream(), &request.bytes());
    dribble(slow.stream(), first);
    scene.bystander_works(&[4 * KIB]);
    slow.stream().write_all(middle).expect("a socket");
    dribble(slow.stream(), last);
    assert_eq!(slow.receive().expect("an answer"), (request.cookie, Ok(Vec::new())));
    scene.bystander_works(&[4 * KIB, MIB]);
    scene.server.stop();
    assert!(fs::read(&scene.image).expect("the image")[MIB as usize..] == data);
}

/// Sends one byte after the other.
fn dribble(stream: &mut UnixStream, bytes: &[u8]) {
    for byte in bytes {
        stream.write_all(&[*byte]).expect("a socket");
    }
}

/// Asks for more than the sockets hold, and takes nothing of it.
fn greedy_client(server: &Server, len: u32) -> Client {
    let mut greedy = server.connect();
    for _ in 0..64 {
        greedy.send(&Command::Read { offset: 0, len }).expect("room for 64 request headers");
    }
    greedy
}

#[test]
fn forty_clients_that_never_read_their_replies_get_bounded_memory_and_hold_up_nobody() {
    for queue in ["uring", "threads"] {
        // The page cache, because what is tested is memory and not a disk's speed.
        let one_thread = ["--queues", "1", "--queue", queue, "--direct", "off"];
        let mut scene = Scene::new(32 * MIB, &one_thread);
        let mut greedy = Vec::new();
        for n in 0..GREEDY {
            let len = [MIB, 256 * KIB, 2 * MIB][n % 3] as u32;
            greedy.push(greedy_client(&scene.server, len));
            scene.bystander_works(&[4 * KIB, 64 * KIB, MIB]);
        }
        let resident = scene.server.memory("VmHWM");
        assert!(resident < GREEDY_BYTES, "{queue}: {resident} bytes");
        // Those that begin to read after all get what they asked for.
        let mut late = greedy.pop().expect("one of them");
        for _ in 0..64 {
            late.receive().expect("a reply").1.expect("bytes");
        }
        drop(greedy);
        scene.bystander_works(&[MIB]);
        scene.server.stop();
    }
}
