//! Stores and web servers that fail, lie, stall, and serve another object than before.
//!
//! Invariant: no test waits without a bound; a read returns the bytes of the object that was opened,
//! or fails.

mod slow_stores;

use std::fs;
use std::io::IoSliceMut;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use nowait::{Error, Storage};
use nowait_remote::{BootRecord, CacheOptions, MIN_CACHE_BYTES, ObjectOptions, ObjectStorage};
use nowait_testkit::web_server::{Lie, WebServer};
use nowait_testkit::{KIB, MIB, Random, seed, wait_until};

const BYTES: u64 = 8 * MIB + 777;

/// Made once, because each test has one or several.
fn object() -> Vec<u8> {
    static OBJECT: OnceLock<Vec<u8>> = OnceLock::new();
    OBJECT.get_or_init(|| Random::from_seed(1).bytes(BYTES as usize)).clone()
}

fn server() -> WebServer {
    WebServer::start(object(), "/disk.img")
}

/// Gives up soon, on a server that is silent and on one that fails.
fn hasty() -> ObjectOptions {
    let silence = Duration::from_millis(300);
    ObjectOptions {
        reconnect: Duration::ZERO,
        silence,
        request: Duration::from_secs(1),
        ..ObjectOptions::default()
    }
}

fn patient() -> ObjectOptions {
    ObjectOptions { reconnect: Duration::from_secs(60), ..hasty() }
}

/// Requests that are counted have it: none is made again because the processors are busy.
fn calm() -> ObjectOptions {
    let minute = Duration::from_secs(60);
    ObjectOptions {
        reconnect: minute,
        silence: minute,
        request: minute,
        ..ObjectOptions::default()
    }
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
    let disk = open(&server, &calm()).unwrap();
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
    let disk = open(&server, &calm()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| read(&disk, MIB + 4096, 4096).unwrap());
        }
    });
    // One request of the open, and one of the read.
    assert_eq!(server.script().ranges.len(), 2);
}

#[test]
fn a_range_that_no_object_has_is_refused() {
    let server = server();
    let header = "content-range: bytes 0-18446744073709551615/18446744073709551615\r\n";
    server.script().always = Some(Lie::Status(206, header, "x"));
    let error = open(&server, &patient()).err().unwrap();
    assert!(error.contains("a range that no object has"), "{error}");
}

#[test]
fn what_may_pass_is_asked_again_until_the_whole_answer_has_come() {
    let (server, object) = (server(), object());
    let disk = open(&server, &patient()).unwrap();
    let lies = [
        Lie::Status(500, "", ""),
        Lie::Cut(0),
        Lie::Cut(30),
        Lie::Cut(5000),
        Lie::Stall(0),
        Lie::Stall(5000),
        Lie::Drip,
        Lie::Shift(4096),
        Lie::HangUp,
        Lie::EndlessHeader,
        Lie::Status(502, "", "bad gateway"),
    ];
    for (n, lie) in (0..).zip(lies) {
        let pos = n * 200 * KIB;
        server.script().lies.push_back(lie.clone());
        let data = read(&disk, pos, 4096).unwrap();
        assert!(data == object[pos as usize..pos as usize + 4096], "{lie:?}");
    }
    assert!(disk.counters().counts().retries >= 11);
}

#[test]
fn a_store_that_does_not_answer_in_time_is_an_error_and_later_none() {
    let (server, object) = (server(), object());
    let disk = open(&server, &hasty()).unwrap();
    for lie in [Lie::Status(500, "", ""), Lie::Stall(100), Lie::Drip, Lie::HangUp] {
        server.script().always = Some(lie.clone());
        assert_eq!(read(&disk, 0, 4096).unwrap_err().errno(), libc_eio(), "{lie:?}");
    }
    server.script().always = None;
    assert!(read(&disk, 0, 4096).unwrap() == object[..4096]);
}

#[test]
fn what_a_store_refuses_while_it_is_read_is_an_error_at_once_and_later_none() {
    let (server, object) = (server(), object());
    let disk = open(&server, &calm()).unwrap();
    let refusals = [
        Lie::Status(401, "", ""),
        Lie::Status(403, "", "<Code>ExpiredToken</Code>"),
        Lie::Status(404, "", ""),
        Lie::Status(301, "", ""),
        Lie::Whole,
    ];
    for (n, lie) in (0..).zip(refusals) {
        let pos = n * MIB;
        server.script().always = Some(lie.clone());
        assert_eq!(read(&disk, pos, 4096).unwrap_err().errno(), libc_eio(), "{lie:?}");
        server.script().always = None;
        assert!(read(&disk, pos, 4096).unwrap() == object[pos as usize..][..4096], "{lie:?}");
    }
    assert_eq!(disk.counters().counts().retries, 0);
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
        // Blocks in memory are of the old object: they are not a part of a disk any more.
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
fn a_strong_tag_that_stays_with_another_date_is_another_object() {
    let (server, object) = (server(), object());
    let disk = open(&server, &patient()).unwrap();
    let first = disk.identity();
    assert!(read(&disk, 0, 4096).unwrap() == object[..4096]);
    // An answer without a date says nothing of it.
    let date = std::mem::take(&mut server.script().date);
    assert!(read(&disk, 2 * MIB, 4096).unwrap() == object[2 * MIB as usize..][..4096]);
    server.script().date = date.replace("10:00:00", "10:00:01");
    server.script().object.iter_mut().for_each(|byte| *byte ^= 1);
    assert!(read(&disk, 4 * MIB, 4096).is_err());
    assert!(read(&disk, 0, 4096).is_err(), "bytes of both are one disk");
    // Nor is what a cache has of one the other's.
    assert_ne!(open(&server, &patient()).unwrap().identity(), first);
}

#[test]
fn an_encoded_answer_is_an_error_and_plain_bytes_are_asked_for() {
    let headers = [
        ("content-encoding: gzip\r\n", "encoded (gzip)"),
        ("Content-Encoding: identity, BR\r\n", "encoded (BR)"),
        ("content-encoding: identity\r\ncontent-encoding: x\"y\r\n", "encoded (an encoding)"),
        ("transfer-encoding: gzip, chunked\r\n", ""),
    ];
    for (header, why) in headers {
        let (server, object) = (server(), object());
        let disk = open(&server, &patient()).unwrap();
        server.script().always = Some(Lie::Header(header));
        assert_eq!(read(&disk, 0, 4096).unwrap_err().errno(), libc_eio(), "{header}");
        let error = open(&server, &patient()).err().unwrap();
        assert!(error.contains(why), "{header}: {error}");
        server.script().always = Some(Lie::Header("content-encoding: Identity\r\n"));
        assert!(read(&disk, 0, 4096).unwrap() == object[..4096]);
        let identity = |accepted: &Option<String>| accepted.as_deref() == Some("identity");
        assert!(server.script().accepted.iter().all(identity));
    }
}

#[test]
fn an_answer_without_a_length_is_as_long_as_its_range() {
    for lie in [Lie::Chunked(100), Lie::Chunked(5000), Lie::Closed(usize::MAX)] {
        let (server, object) = (server(), object());
        server.script().always = Some(lie.clone());
        let disk = open(&server, &calm()).unwrap();
        assert_eq!(disk.size().unwrap(), BYTES, "{lie:?}");
        for pos in [0, BYTES - 4096] {
            let data = read(&disk, pos, 4096).unwrap();
            assert!(data == object[pos as usize..][..4096], "{lie:?}");
        }
        assert_eq!(disk.counters().counts().retries, 0, "{lie:?}");
    }
}

#[test]
fn a_body_that_is_not_as_long_as_its_range_is_an_error() {
    let (server, object) = (server(), object());
    let disk = open(&server, &hasty()).unwrap();
    // Cut in the body; cut in the body without a length; with a length, and more than the range.
    for lie in [Lie::Cut(30_000), Lie::Closed(30_000), Lie::Longer(1), Lie::Longer(10_000)] {
        server.script().always = Some(lie.clone());
        assert_eq!(read(&disk, 0, 4096).unwrap_err().errno(), libc_eio(), "{lie:?}");
    }
    let error = open(&server, &patient()).err().unwrap();
    assert!(error.contains("length of the answer"), "{error}");
    server.script().always = None;
    assert!(read(&disk, 0, 4096).unwrap() == object[..4096]);
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
        (Lie::Status(302, "location: file:///a\r\n", ""), "not a web address"),
        (Lie::Whole, "sends the whole object"),
        (Lie::Shift(1), "Requested"),
        (Lie::EndlessHeader, ""),
        (Lie::Stall(0), "has not answered"),
        (Lie::Stall(20), "has not answered"),
        (Lie::HangUp, ""),
    ] {
        let server = server();
        server.script().always = Some(lie.clone());
        // An answer that does not stall may take as long as it needs on a busy machine.
        let options = match lie {
            Lie::Stall(_) => hasty(),
            _ => ObjectOptions { reconnect: Duration::ZERO, ..calm() },
        };
        let error = open(&server, &options).err().unwrap();
        assert!(error.contains(why), "{lie:?}: {error}");
        assert!(!error.contains(['\n', '\x1b']) && error.len() < 200, "{error}");
    }
    // No server listens there, and a certificate that is none.
    let gone = "http://127.0.0.1:1/a".parse().unwrap();
    let refused = ObjectStorage::open(&gone, &hasty()).err().unwrap();
    assert_eq!(refused, "cannot connect: Connection refused");
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

fn cached(scratch: &tempfile::TempDir) -> ObjectOptions {
    let directory = scratch.path().join("cache");
    ObjectOptions { cache: Some(CacheOptions { directory, bytes: MIN_CACHE_BYTES }), ..calm() }
}

/// The files of the cache.
fn cache_files(scratch: &tempfile::TempDir) -> Vec<PathBuf> {
    let list =
        |path: PathBuf| fs::read_dir(path).into_iter().flatten().map(|it| it.unwrap().path());
    list(scratch.path().join("cache")).flat_map(list).collect()
}

/// Reads all of the disk in parts, and waits until it is in the cache.
fn read_all(disk: &ObjectStorage, object: &[u8]) {
    for pos in (0..BYTES).step_by(1 << 20) {
        let end = (pos + MIB).min(BYTES);
        assert!(read(disk, pos, end - pos).unwrap() == object[pos as usize..end as usize], "{pos}");
    }
}

/// Waits until `disk` has written so many blocks to its cache.
fn in_cache(disk: &ObjectStorage, blocks: u64) {
    wait_until("the cache", || disk.counters().counts().stored >= blocks);
}

const BLOCKS: u64 = BYTES.div_ceil(64 * KIB);

#[test]
fn what_was_read_is_not_fetched_again_by_any_server_until_the_object_changes() {
    let (server, object) = (server(), object());
    let scratch = tempfile::tempdir().unwrap();
    let disk = open(&server, &cached(&scratch)).unwrap();
    read_all(&disk, &object);
    in_cache(&disk, BLOCKS);
    let asked = server.asked_bytes();
    // Beside the first server, and after it.
    for _ in 0..2 {
        let again = open(&server, &cached(&scratch)).unwrap();
        read_all(&again, &object);
        let counts = again.counters().counts();
        assert_eq!((counts.misses, counts.fetched_bytes), (0, 0));
        assert!(counts.hits > 0);
    }
    // The first byte was asked for by each of them.
    assert_eq!(server.asked_bytes(), asked + 2);
    let other: Vec<u8> = object.iter().map(|byte| byte ^ 1).collect();
    server.script().object.clone_from(&other);
    server.script().tag = "\"two\"".into();
    read_all(&open(&server, &cached(&scratch)).unwrap(), &other);
}

#[test]
fn a_corrupt_cache_is_fetched_again_counted_and_put_right() {
    let (server, object) = (server(), object());
    let scratch = tempfile::tempdir().unwrap();
    let disk = open(&server, &cached(&scratch)).unwrap();
    read_all(&disk, &object);
    in_cache(&disk, BLOCKS);
    let mut random = Random::from_seed(seed());
    for path in cache_files(&scratch) {
        let mut bytes = fs::read(&path).unwrap();
        // Each block of the file.
        for block in bytes[4096..].chunks_mut(64 << 10) {
            let at = random.below(block.len() as u64) as usize;
            block[at] ^= 1 << random.below(8);
        }
        fs::write(&path, &bytes).unwrap();
    }
    let disk = open(&server, &cached(&scratch)).unwrap();
    read_all(&disk, &object);
    assert_eq!(disk.counters().counts().corrupt, BLOCKS);
    in_cache(&disk, BLOCKS);
    let again = open(&server, &cached(&scratch)).unwrap();
    read_all(&again, &object);
    assert_eq!(again.counters().counts().fetched_bytes, 0);
}

#[test]
fn what_a_record_names_is_fetched_ahead_and_a_read_waits_for_no_request() {
    let (server, object) = (server(), object());
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("boot");
    let record = BootRecord::create(&path).unwrap();
    let first = ObjectOptions { record: Some(record), ..patient() };
    let places = [7 * MIB, 3 * MIB + 5, 0, 7 * MIB + 70 * KIB, 5 * MIB];
    let reads = |disk: &ObjectStorage| {
        for pos in places {
            let data = read(disk, pos, 100 * KIB).unwrap();
            assert!(data == object[pos as usize..(pos + 100 * KIB) as usize], "{pos}");
        }
    };
    reads(&open(&server, &first).unwrap());
    wait_until("the record", || fs::read_to_string(&path).unwrap().lines().count() == 9);
    let options = ObjectOptions { prefetch: Some(path), ..cached(&scratch) };
    let disk = open(&server, &options).unwrap();
    in_cache(&disk, 9);
    let requests = server.script().ranges.len();
    server.script().always = Some(Lie::Status(500, "", ""));
    reads(&open_cached(&server, &scratch));
    assert!(server.script().ranges.len() >= requests);
}

#[test]
fn behind_what_the_cache_has_nothing_is_read_ahead_before_it_is_needed() {
    let (server, object) = (server(), object());
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("boot");
    let lines: String = (0..16).map(|block| format!("{block} {}\n", server.url())).collect();
    fs::write(&path, lines).unwrap();
    let options = ObjectOptions { prefetch: Some(path), ..cached(&scratch) };
    let disk = open(&server, &options).unwrap();
    in_cache(&disk, 16);
    let read_all = |range: std::ops::Range<u64>| {
        for pos in range.step_by(16 << 10) {
            let end = (pos + 16 * KIB).min(BYTES);
            assert!(read(&disk, pos, end - pos).unwrap() == object[pos as usize..end as usize]);
        }
    };
    // The sequence stays a short one until its blocks ahead have been looked for.
    let short = MIB - 128 * KIB;
    read_all(0..short);
    assert_eq!(disk.counters().counts().fetched_bytes, MIB);
    let requests = server.script().ranges.len();
    read_all(short..BYTES);
    assert_eq!(disk.counters().counts().fetched_bytes, BYTES);
    let requests = server.script().ranges.len() - requests;
    assert!(requests < 20, "{requests}");
}

/// Opens the object although the server has nothing but errors for reads.
fn open_cached(server: &WebServer, scratch: &tempfile::TempDir) -> ObjectStorage {
    let always = server.script().always.take();
    let options = ObjectOptions { reconnect: Duration::ZERO, ..cached(scratch) };
    let disk = open(server, &options).unwrap();
    server.script().always = always;
    disk
}
