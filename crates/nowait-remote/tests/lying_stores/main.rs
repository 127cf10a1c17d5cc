//! Stores and web servers that fail, lie, stall, and serve another object than before.
//!
//! Invariant: no test waits without a bound; a read returns the bytes of the object that was opened,
//! or fails.

use std::io::IoSliceMut;
use std::time::Duration;

use nowait::{Error, Storage};
use nowait_remote::{ObjectOptions, ObjectStorage};
use nowait_testkit::web_server::{Lie, WebServer};
use nowait_testkit::{KIB, MIB, Random, seed};

const BYTES: u64 = 8 * MIB + 777;

fn object() -> Vec<u8> {
    let mut random = Random::from_seed(1);
    (0..BYTES / 8 + 1)
        .flat_map(|_| random.below(u64::MAX).to_le_bytes())
        .take(BYTES as usize)
        .collect()
}

fn server() -> WebServer {
    WebServer::start(object(), "/disk.img")
}

/// Gives up soon, on a server that is silent and on one that fails.
fn hasty() -> ObjectOptions {
    let silence = Duration::from_millis(300);
    ObjectOptions { reconnect: Duration::ZERO, silence, request: Duration::from_secs(1) }
}

fn patient() -> ObjectOptions {
    ObjectOptions { reconnect: Duration::from_secs(60), ..hasty() }
}

fn open(server: &WebServer, options: &ObjectOptions) -> Result<ObjectStorage, String> {
    ObjectStorage::open(&server.url().parse().unwrap(), options)
}

fn read(disk: &ObjectStorage, pos: u64, len: u64) -> Result<Vec<u8>, Error> {
    let mut data = vec![0xee; len as usize];
    let mut done = 0;
    while done < data.len() {
        let rest = &mut data[done..];
        match disk.read(&mut [IoSliceMut::new(rest)], pos + done as u64)? {
            0 => break,
            bytes => done += bytes,
        }
    }
    data.truncate(done);
    Ok(data)
}

#[test]
fn every_range_is_read_as_it_is_up_to_the_end() {
    let (server, object) = (server(), object());
    let disk = open(&server, &patient()).unwrap();
    assert_eq!(disk.size().unwrap(), BYTES);
    let mut random = Random::from_seed(seed());
    for _ in 0..200 {
        let pos = random.below(BYTES);
        let len = 1 + random.below(300 * KIB);
        let end = (pos + len).min(BYTES);
        assert!(
            read(&disk, pos, len).unwrap() == object[pos as usize..end as usize],
            "{pos}+{len}"
        );
    }
    assert!(read(&disk, BYTES, 10).unwrap().is_empty());
    assert!(disk.write(&[], 0, nowait::Flags::NONE).is_err());
}

#[test]
fn a_sequential_read_asks_for_every_byte_once_in_few_requests() {
    let (server, object) = (server(), object());
    let disk = open(&server, &patient()).unwrap();
    for pos in (0..BYTES).step_by(16 << 10) {
        let end = (pos + 16 * KIB).min(BYTES);
        assert!(read(&disk, pos, end - pos).unwrap() == object[pos as usize..end as usize]);
    }
    // The first byte was asked for when the object was opened, too.
    assert_eq!(server.asked_bytes(), BYTES + 1);
    let requests = server.script().ranges.len();
    assert!(requests < 20, "{requests}");
}

#[test]
fn reads_of_one_block_at_the_same_time_are_one_request() {
    let server = server();
    server.script().delay = Duration::from_millis(200);
    let disk = open(&server, &patient()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| read(&disk, MIB + 4096, 4096).unwrap());
        }
    });
    // That of the open, and one.
    assert_eq!(server.script().ranges.len(), 2);
}

#[test]
fn what_may_pass_is_asked_again_until_the_whole_answer_has_come() {
    let (server, object) = (server(), object());
    let disk = open(&server, &patient()).unwrap();
    let lies = [
        Lie::Status(503, "", "slow down"),
        Lie::Status(500, "", ""),
        Lie::Status(429, "", ""),
        Lie::Cut(0),
        Lie::Cut(30),
        Lie::Cut(5000),
        Lie::Stall(0),
        Lie::Stall(5000),
        Lie::Drip,
        Lie::Shift(4096),
        Lie::HangUp,
        Lie::EndlessHeader,
    ];
    for (n, lie) in (0..).zip(lies) {
        let pos = n * 200 * KIB;
        server.script().lies.push_back(lie.clone());
        let data = read(&disk, pos, 4096).unwrap();
        assert!(data == object[pos as usize..pos as usize + 4096], "{lie:?}");
    }
    assert!(disk.counters().counts().retries >= 12);
}

#[test]
fn a_store_that_does_not_answer_in_time_is_an_error_and_later_none() {
    let (server, object) = (server(), object());
    let disk = open(&server, &hasty()).unwrap();
    for lie in [Lie::Status(503, "", ""), Lie::Stall(100), Lie::Drip, Lie::HangUp] {
        server.script().always = Some(lie.clone());
        assert_eq!(read(&disk, 0, 4096).unwrap_err().errno(), libc_eio(), "{lie:?}");
    }
    server.script().always = None;
    assert!(read(&disk, 0, 4096).unwrap() == object[..4096]);
}

const fn libc_eio() -> i32 {
    5
}

#[test]
fn an_object_that_changes_is_an_error_from_then_on_and_never_a_mixture() {
    // The server knows conditions, or knows none and sends what it has.
    let changes: [fn(&WebServer); 4] = [
        |server| server.script().tag = "\"two\"".into(),
        |server| server.script().always = Some(Lie::Other(7, "\"two\"")),
        |server| server.script().object.truncate(MIB as usize),
        |server| server.script().always = Some(Lie::Status(412, "", "")),
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let (server, object) = (server(), object());
        let disk = open(&server, &patient()).unwrap();
        assert!(read(&disk, 0, 4096).unwrap() == object[..4096]);
        change(&server);
        assert!(read(&disk, 4 * MIB, 4096).is_err(), "{n}");
        // What is in memory is of the old object: it is no part of a disk any more.
        assert!(read(&disk, 0, 4096).is_err(), "{n}");
    }
}

#[test]
fn without_a_strong_tag_the_date_tells_a_change() {
    for tag in ["", "W/\"weak\""] {
        let (server, object) = (server(), object());
        server.script().tag = tag.into();
        let disk = open(&server, &patient()).unwrap();
        assert!(read(&disk, 0, 4096).unwrap() == object[..4096]);
        server.script().date = "Tue, 01 Jul 2025 10:00:01 GMT".into();
        assert!(read(&disk, 4 * MIB, 4096).is_err());
    }
    for tag in ["", "W/\"weak\""] {
        let server = server();
        server.script().tag = tag.into();
        server.script().date = String::new();
        assert!(open(&server, &hasty()).err().unwrap().contains("neither an ETag nor a date"));
    }
}

#[test]
fn what_cannot_be_opened_is_one_line_that_says_why() {
    for (lie, why) in [
        (Lie::Status(404, "", ""), "there is no such object (404)"),
        (Lie::Status(403, "", "<Code>AccessDenied</Code>"), "refuses access (403 AccessDenied)"),
        (Lie::Status(401, "", ""), "does not accept the credentials (401)"),
        (Lie::Status(416, "", ""), "no bytes in the range"),
        (Lie::Status(503, "", ""), "come back later (503)"),
        (Lie::Status(500, "", "<Code>\x1b[31m</Code>"), "the store has an error (500)"),
        (Lie::Status(302, "location: /\r\n", ""), "redirects again and again"),
        (Lie::Status(302, "location: file:///a\r\n", ""), "no web address"),
        (Lie::Whole, "sends the whole object"),
        (Lie::Shift(1), "Requested"),
        (Lie::EndlessHeader, ""),
        (Lie::Stall(0), "has not answered"),
        (Lie::Stall(20), "has not answered"),
        (Lie::HangUp, ""),
    ] {
        let server = server();
        server.script().always = Some(lie.clone());
        let error = open(&server, &hasty()).err().unwrap();
        assert!(error.contains(why), "{lie:?}: {error}");
        assert!(!error.contains(['\n', '\x1b']) && error.len() < 200, "{error}");
    }
    // No server listens there, and a certificate that is none.
    let gone = "http://127.0.0.1:1/a".parse().unwrap();
    assert!(ObjectStorage::open(&gone, &hasty()).err().unwrap().contains("cannot connect"));
    let plain = server().url().replace("http:", "https:").parse().unwrap();
    assert!(ObjectStorage::open(&plain, &hasty()).is_err());
}

#[test]
fn a_redirection_is_followed_to_where_the_object_is() {
    let (server, object) = (server(), object());
    server.script().path = "/a%20b/disk.img".into();
    server.script().lies.push_back(Lie::Status(302, "location: /a%20b/disk.img\r\n", ""));
    let url = format!("{}/elsewhere", server.root()).parse().unwrap();
    let disk = ObjectStorage::open(&url, &patient()).unwrap();
    server.script().lies.push_back(Lie::Status(307, "location: a%20b/disk.img\r\n", ""));
    assert!(read(&disk, 0, 4096).unwrap() == object[..4096]);
}

#[test]
fn a_name_with_spaces_is_asked_for_as_it_is() {
    let server = server();
    server.script().path = "/a%20b/c%20d.img".into();
    for path in ["/a b/c d.img", "/a%20b/c%20d.img"] {
        let url = format!("{}{path}", server.root()).parse().unwrap();
        assert!(ObjectStorage::open(&url, &hasty()).is_ok(), "{path}");
    }
}
