//! Streams of requests with random damage: each valid request gets exactly the reply that the
//! specification requires, nothing else is answered, and an invalid request ends its connection.
//!
//! Invariant: the expected replies are derived from the sent bytes by the specification alone.

mod reader;
mod spec;
mod stream;

use std::collections::HashSet;
use std::fs;
use std::io::{self, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::{KIB, MIB, Scratch, Server};
use nowait_testkit::nbd::{Client, Mode, WireClient, greet};
use nowait_testkit::{Random, seed};

use reader::Reader;
use spec::End;

const IMAGE_BYTES: u64 = MIB;
/// Streams on each of [`TERMS`].
const STREAMS: u64 = 300;
/// The number of pieces of a few bytes, in one stream of five.
const SMALL_PIECES: u32 = 300;
/// Message formats, and whether a context is selected.
const TERMS: [(Mode, bool); 5] = [
    (Mode::Simple, false),
    (Mode::Structured, false),
    (Mode::Structured, true),
    (Mode::Extended, false),
    (Mode::Extended, true),
];
/// The limit of the server's memory under this load.
const MOST_BYTES: u64 = 128 * MIB;

/// The length and the interval of the reads of a well-behaved client.
const READ_BYTES: u64 = 64 * KIB;
const READ_INTERVAL: Duration = Duration::from_millis(1);

/// The result of a connection's negotiation.
#[derive(Clone, Copy, Debug)]
struct Terms {
    mode: Mode,
    /// The id of `base:allocation`, where it is selected.
    context: Option<u32>,
}

/// A connection of `mode` to the default export.
fn connect(socket: &Path, mode: Mode, with_context: bool) -> (UnixStream, Terms) {
    let queries = if with_context { &["base:allocation"][..] } else { &[] };
    let client = WireClient::greeted(greet(socket).expect("a greeting"), mode);
    let client = client.choose("", queries, &[]).expect("an export");
    assert_eq!((client.size, client.contexts.len()), (IMAGE_BYTES, queries.len()));
    let context = with_context.then(|| client.context());
    (client.stream, Terms { mode, context })
}

/// Sends `bytes` in pieces, then shuts down the sending side.
fn send(stream: &UnixStream, bytes: &[u8], mut random: Random) {
    let mut rest = bytes;
    let mut small_pieces = if random.chance(20) { SMALL_PIECES } else { 0 };
    let mut sent = || -> io::Result<()> {
        while !rest.is_empty() {
            let most = if small_pieces > 0 { 16 } else { 100_000 };
            small_pieces = small_pieces.saturating_sub(1);
            let (piece, later) = rest.split_at(rest.len().min(1 + random.below(most) as usize));
            (&*stream).write_all(piece)?;
            rest = later;
        }
        stream.shutdown(Shutdown::Write)
    };
    if let Err(error) = sent() {
        // The server has ended the connection; the reader checks whether that was correct.
        assert_ne!(error.kind(), io::ErrorKind::WouldBlock, "the server reads nothing");
    }
}

/// Sends one stream on a new connection and checks the replies. Returns the expected end.
fn play(socket: &Path, terms: (Mode, bool), random: &mut Random) -> End {
    let (stream, terms) = connect(socket, terms.0, terms.1);
    let (bytes, expected) = loop {
        let bytes = stream::damaged(terms, random);
        let expected = spec::parse(terms, IMAGE_BYTES, &bytes);
        let cookies: HashSet<_> = expected.asked.iter().map(|asked| asked.cookie).collect();
        // If damage has made two requests with the same cookie, an answer could belong to either.
        if cookies.len() == expected.asked.len() {
            break (bytes, expected);
        }
    };
    let end = expected.end;
    let mut reader = Reader::new(terms, expected, BufReader::new(&stream));
    let pace = Random::from_seed(random.word());
    thread::scope(|scope| {
        scope.spawn(|| send(&stream, &bytes, pace));
        reader.read_to_end();
    });
    end
}

fn play_all(socket: &Path, terms: (Mode, bool), mut random: Random) {
    let mut broken = 0;
    for _ in 0..STREAMS {
        broken += u64::from(play(socket, terms, &mut random) == End::Broken);
    }
    assert!((STREAMS / 20..STREAMS).contains(&broken), "{broken} of {STREAMS} were to be broken");
}

/// A well-behaved client of another export, while the streams are sent.
fn read_other_export(socket: &Path, expected: &[u8], over: &AtomicBool) -> u64 {
    let mut client = Client::connect_to(socket, "other", Mode::Structured).expect("a connection");
    let mut reads = 0;
    while !over.load(Ordering::Relaxed) {
        let offset = reads * READ_BYTES % MIB;
        let read = client.read(offset, READ_BYTES as u32).expect("bytes");
        assert!(read == expected[offset as usize..][..READ_BYTES as usize], "other bytes");
        reads += 1;
        thread::sleep(READ_INTERVAL);
    }
    reads
}

#[test]
fn nbd_must_mutated_requests_are_answered_once_each_or_end_the_connection() {
    let seed = seed();
    for (variant, extra) in [&[][..], &["--queue", "threads"]].iter().enumerate() {
        let scratch = Scratch::new();
        let image = scratch.random("disk.img", IMAGE_BYTES, 2);
        let other = scratch.random("other.img", MIB, 3);
        let bytes = fs::read(&other).expect("an image");
        let named = format!("other={}", other.display());
        let server = Server::start(&image, &[&[&named[..]], *extra].concat());
        let socket = server.socket();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let reader_thread = scope.spawn(|| read_other_export(&socket, &bytes, &over));
            let players = TERMS.into_iter().zip(1..).map(|(terms, number)| {
                let random = Random::from_seed(seed ^ (number << 40) ^ ((variant as u64) << 50));
                let socket = &socket;
                scope.spawn(move || play_all(socket, terms, random))
            });
            let players: Vec<_> = players.collect();
            let fair = players.into_iter().map(|player| player.join().is_ok());
            let fair = fair.fold(true, |all, one| all & one);
            over.store(true, Ordering::Relaxed);
            assert!(reader_thread.join().expect("a good client is served") > 0);
            assert!(fair, "a player objects");
        });
        let highest = server.peak();
        assert!(highest < MOST_BYTES, "{highest} bytes");
        assert!(!server.log().contains("panic"), "{}", server.log());
        server.stop();
        assert!(fs::read(&other).expect("an image") == bytes, "the other image has changed");
    }
}
