//! Limits: slow and greedy clients get bounded resources and do not affect others.
//!
//! Invariant: in every test a well-behaved connection works during and after the load.

use std::fs;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::common::{KIB, MIB, Scratch, Server};
use nowait_testkit::nbd::load::{rest_of, write_and_read_back};
use nowait_testkit::nbd::{Client, Command, RawRequest};
use nowait_testkit::{Random, SetOnDrop};

/// The longest write that NBD clients send without negotiation (NBD proto.md, "Block size
/// constraints").
const LONGEST_BYTES: usize = 32 << 20;

/// A served image of random bytes, and a well-behaved connection.
struct Fixture {
    server: Server,
    bystander: Client,
    image: PathBuf,
    _scratch: Scratch,
}

impl Fixture {
    fn new(bytes: u64, options: &str) -> Self {
        let scratch = Scratch::new();
        let image = scratch.random("disk.img", bytes, bytes);
        let server = Server::start(&image, options);
        Self { bystander: server.connect(), server, image, _scratch: scratch }
    }

    /// The bystander writes and reads back, in requests of each of `sizes`.
    fn bystander_works(&mut self, sizes: &[u64]) {
        write_and_read_back(&mut self.bystander, sizes);
    }
}

#[test]
fn a_client_that_has_closed_its_sending_half_gets_all_its_replies_and_then_the_end() {
    const REQUESTS: u64 = 64;
    let mut fixture = Fixture::new(16 * MIB, "");
    let image = fs::read(&fixture.image).expect("the image");
    let mut half = fixture.server.connect();
    let piece = 256 * KIB;
    let mut ask = |n| half.send(&Command::Read { offset: n * piece, len: piece as u32 });
    let cookies = (0..REQUESTS).map(|n| ask(n).expect("a socket")).collect::<Vec<_>>();
    half.stream().shutdown(Shutdown::Write).expect("a socket");
    fixture.bystander_works(&[]);
    for _ in 0..REQUESTS {
        let (cookie, read) = half.receive().expect("a reply");
        let asked = cookies.iter().position(|it| *it == cookie).expect("a request");
        let start = asked * piece as usize;
        assert!(read.expect("bytes") == image[start..start + piece as usize]);
    }
    assert_eq!(rest_of(half.stream()), b"");
    fixture.bystander_works(&[4 * KIB]);
    fixture.server.stop();
}

#[test]
fn a_write_of_32_mib_may_come_a_byte_at_a_time() {
    let mut fixture = Fixture::new(LONGEST_BYTES as u64 + MIB, "");
    let mut slow = fixture.server.connect();
    let data = Random::from_seed(32).bytes(LONGEST_BYTES);
    let request = RawRequest::write(MIB, LONGEST_BYTES as u32);
    slow.expect_answer_to(&request);
    let (first, rest) = data.split_at(4096);
    let (middle, last) = rest.split_at(rest.len() - 4096);
    dribble(slow.stream(), &request.bytes());
    dribble(slow.stream(), first);
    fixture.bystander_works(&[4 * KIB]);
    slow.stream().write_all(middle).expect("a socket");
    dribble(slow.stream(), last);
    assert_eq!(slow.receive().expect("an answer"), (request.cookie, Ok(Vec::new())));
    fixture.bystander_works(&[4 * KIB, MIB]);
    fixture.server.stop();
    assert!(fs::read(&fixture.image).expect("the image")[MIB as usize..] == data);
}

/// Sends the bytes one at a time.
fn dribble(stream: &mut UnixStream, bytes: &[u8]) {
    for byte in bytes {
        stream.write_all(&[*byte]).expect("a socket");
    }
}

/// Clients that do not read the reply to a long read.
const UNREAD: usize = 8;

#[test]
fn replies_that_are_never_read_leave_memory_for_the_longest_request_of_another_client() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch.random("disk", 33 * MIB, MIB), "");
    // Enough clients that some get memory simultaneously, and a few wait for it.
    let mut unread: Vec<Client> = (0..UNREAD).map(|_| server.connect()).collect();
    for client in &mut unread {
        let read = RawRequest::read(0, LONGEST_BYTES as u32);
        client.stream().write_all(&read.bytes()).expect("a socket");
    }
    let data = server.connect().read(0, LONGEST_BYTES as u32).expect("the longest read");
    assert_eq!(data.len(), LONGEST_BYTES);
    drop(unread);
    server.stop();
}

/// Requests of a client that has one at a time, and those that the other client has at a time.
const SINGLE: u64 = 20;

const DEPTH: u64 = 64;

/// Replies after which a bucket that was full is empty.
const BURST: u64 = 30;

/// At 20 requests a second: a client that waits for a processor misses no turn.
#[test]
fn a_client_with_one_request_at_a_time_gets_its_part_of_a_limited_rate() {
    for limit in ["limit-iops = 20", "limit-bandwidth = '80K'"] {
        let mut fixture = Fixture::new(MIB, &format!("threads = 1\n{limit}"));
        let read = |n| Command::Read { offset: n % DEPTH * 4 * KIB, len: 4096 };
        let mut deep = fixture.server.connect();
        for n in 0..DEPTH {
            deep.send(&read(n)).expect("a server");
        }
        let mut next = |n| {
            deep.receive().expect("a reply").1.expect("bytes");
            deep.send(&read(n)).expect("a server");
        };
        (0..BURST).for_each(&mut next);
        let over = AtomicBool::new(false);
        let replies = thread::scope(|scope| {
            let deep = scope.spawn(|| {
                let more = || !over.load(Ordering::Relaxed);
                (0..).take_while(|_| more()).map(&mut next).count() as u64
            });
            let reading = SetOnDrop(&over);
            for _ in 0..SINGLE {
                fixture.bystander.read(0, 4096).expect("bytes");
            }
            drop(reading);
            deep.join().expect("a client")
        });
        // Half of the rate, or a little less.
        assert!(replies < 2 * SINGLE, "{limit}: {replies} beside {SINGLE}");
        fixture.server.stop();
    }
}
