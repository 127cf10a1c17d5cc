//! Servers that die, lie, and come back as others.
//!
//! Invariant: no test waits without a bound; a server that dies loses what it has not flushed.

mod fake_server;

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use fake_server::{ALL_FLAGS, FakeServer};
use nowait::{ByteRange, Error, Flags, Storage};
use nowait_nbd as nbd;
use nowait_remote::{NbdOptions, NbdStorage};
use nowait_testkit::{Random, seed, wait_for};

const BYTES: u64 = 1 << 20;

fn options(seconds: u64) -> NbdOptions {
    let reconnect = Duration::from_secs(seconds);
    NbdOptions { reconnect, read_only: false, ..NbdOptions::default() }
}

fn open(server: &FakeServer) -> NbdStorage {
    NbdStorage::open(&server.uri(), &options(60)).unwrap()
}

fn write(disk: &NbdStorage, pos: u64, data: &[u8], flags: Flags) -> Result<usize, Error> {
    disk.write(&[IoSlice::new(data)], pos, flags)
}

fn read(disk: &NbdStorage, pos: u64, len: usize) -> Result<Vec<u8>, Error> {
    let mut data = vec![0xee; len];
    disk.read(&mut [IoSliceMut::new(&mut data)], pos).map(|_| data)
}

/// Writes, zeroes and flushes in one part of the disk, and checks what it reads. Returns the part.
fn work(disk: &NbdStorage, server: &FakeServer, part: ByteRange, mut random: Random) -> Vec<u8> {
    let mut model = vec![0; part.len as usize];
    for round in 0..400u32 {
        let at = random.below(part.len);
        let len = (1 + random.below(8192)).min(part.len - at);
        let (pos, range) = (part.pos + at, at as usize..(at + len) as usize);
        match random.below(12) {
            0 => disk.sync().unwrap(),
            1 => {
                disk.punch(ByteRange::new(pos, len)).unwrap();
                model[range].fill(0);
            }
            2 => server.change(|it| it.answers = it.answers.min(1 + random.below(20))),
            3..6 => assert_eq!(read(disk, pos, len as usize).unwrap(), model[range]),
            choice => {
                let flags = if choice == 6 { Flags::DSYNC } else { Flags::NONE };
                let data = vec![round as u8; len as usize];
                assert_eq!(write(disk, pos, &data, flags).unwrap(), len as usize);
                model[range].copy_from_slice(&data);
            }
        }
    }
    model
}

#[test]
fn a_server_that_dies_under_load_and_loses_its_cache_costs_no_write_and_no_error() {
    let seed = seed();
    // With FUA, and by a flush behind each durable write.
    for flags in [ALL_FLAGS, ALL_FLAGS & !nbd::FLAG_SEND_FUA] {
        let server = FakeServer::start(BYTES);
        server.change(|it| it.flags = flags);
        let disk = open(&server);
        let parts: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4u64)
                .map(|n| {
                    let part = ByteRange::new(n * BYTES / 4, BYTES / 4);
                    let (disk, server) = (&disk, &server);
                    scope.spawn(move || work(disk, server, part, Random::from_seed(seed + n)))
                })
                .collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).collect()
        });
        disk.sync().unwrap();
        assert!(server.connections() > 20, "{}", server.connections());
        assert!(server.durable() == parts.concat(), "a flushed byte is lost; seed {seed}");
    }
}

#[test]
fn a_durable_write_is_not_undone_by_an_earlier_one_that_is_made_again() {
    let server = FakeServer::start(BYTES);
    let disk = open(&server);
    write(&disk, 0, &[1; 4096], Flags::NONE).unwrap();
    write(&disk, 0, &[2; 4096], Flags::DSYNC).unwrap();
    server.change(|it| it.answers = 0);
    assert_eq!(read(&disk, 0, 4096).unwrap(), [2; 4096]);
    disk.sync().unwrap();
    assert_eq!(server.durable()[..4096], [2; 4096]);
}

#[test]
fn a_write_that_cannot_be_made_again_fails_every_later_flush() {
    let server = FakeServer::start(BYTES);
    let disk = open(&server);
    write(&disk, 0, &[1; 4096], Flags::NONE).unwrap();
    server.change(|it| {
        it.answers = 0;
        it.write_error = nbd::ENOSPC;
    });
    read(&disk, 0, 1).unwrap();
    server.change(|it| it.write_error = 0);
    for _ in 0..2 {
        assert_eq!(disk.sync().unwrap_err().errno(), libc::EIO);
        assert!(!disk.keeps_unsynced());
        write(&disk, 0, &[1; 4096], Flags::NONE).unwrap();
    }
}

#[test]
fn after_a_failed_flush_nothing_is_said_to_be_durable_by_a_flush() {
    let server = FakeServer::start(BYTES);
    // A durable write is a write and a flush.
    server.change(|it| it.flags = ALL_FLAGS & !nbd::FLAG_SEND_FUA);
    let disk = open(&server);
    write(&disk, 0, &[1; 4096], Flags::NONE).unwrap();
    server.change(|it| it.flush_error = nbd::ENOSPC);
    assert_eq!(disk.sync().unwrap_err().errno(), libc::ENOSPC);
    assert_eq!(disk.sync().unwrap_err().errno(), libc::EIO);
    assert!(!disk.keeps_unsynced());
    assert_eq!(write(&disk, 0, &[2; 4096], Flags::DSYNC).unwrap_err().errno(), libc::EIO);
    assert_eq!(read(&disk, 0, 4096).unwrap(), [2; 4096]);
}

#[test]
fn the_log_of_unflushed_writes_is_bounded_by_flushes_of_its_own() {
    let server = FakeServer::start(BYTES);
    let disk = open(&server);
    let data = vec![7; BYTES as usize];
    for _ in 0..100 {
        write(&disk, 0, &data, Flags::NONE).unwrap();
    }
    // Nothing else has asked for a flush.
    wait_for("a flush by the log", || (server.durable() == data).then_some(()).ok_or("none"));
}

#[test]
fn an_export_that_has_another_size_later_is_not_used_any_more() {
    let server = FakeServer::start(BYTES);
    let disk = open(&server);
    write(&disk, 0, &[1; 4096], Flags::NONE).unwrap();
    server.change(|it| {
        it.answers = 0;
        it.size = BYTES / 2;
    });
    assert_eq!(read(&disk, 0, 1).unwrap_err().errno(), libc::EIO);
    server.change(|it| it.size = BYTES);
    assert_eq!(read(&disk, 0, 1).unwrap_err().errno(), libc::EIO);
    assert_eq!(disk.sync().unwrap_err().errno(), libc::EIO);
    assert_eq!(server.durable()[..4096], [0; 4096], "it was written to");
}

#[test]
fn requests_fail_when_the_time_is_over_and_succeed_when_the_server_is_there_again() {
    let server = FakeServer::start(BYTES);
    let disk = NbdStorage::open(&server.uri(), &options(0)).unwrap();
    write(&disk, 0, &[3; 4096], Flags::NONE).unwrap();
    server.change(|it| {
        it.answers = 0;
        it.absent = true;
    });
    assert_eq!(read(&disk, 0, 1).unwrap_err().errno(), libc::EIO);
    assert_eq!(write(&disk, 0, &[4], Flags::NONE).unwrap_err().errno(), libc::EIO);
    assert_eq!(disk.sync().unwrap_err().errno(), libc::EIO);
    assert!(disk.keeps_unsynced());
    server.change(|it| it.absent = false);
    let found = wait_for("the server", || read(&disk, 0, 4096).map_err(|error| error.to_string()));
    // The write that had completed was lost with the server, and was made again.
    assert_eq!(found, [3; 4096]);
    disk.sync().unwrap();
    assert_eq!(server.durable()[..4096], [3; 4096]);
}

#[test]
fn a_reply_that_breaks_the_protocol_ends_the_connection_and_not_the_request() {
    let reply = |error: u32, cookie: u64, data: &[u8]| {
        let mut bytes = nbd::SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(error.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(data);
        bytes
    };
    let server = FakeServer::start(BYTES);
    let disk = open(&server);
    write(&disk, 0, &[5; 4096], Flags::DSYNC).unwrap();
    let lies = [
        vec![0; 16],
        reply(0, 77, &[0; 4096]),
        reply(0, 1 << 32, &[0; 4096]),
        reply(0, u64::MAX, &[]),
        // The answer to the request, and another one to it.
        reply(0, 0, &[&[5; 4096][..], &reply(0, 0, &[9; 4096])].concat()),
        reply(nbd::ESHUTDOWN, 0, &[]),
        // More than is there.
        nbd::STRUCTURED_REPLY_MAGIC.to_be_bytes().repeat(64),
    ];
    for lie in lies {
        let before = server.connections();
        server.change(|it| it.lie = Some(lie.clone()));
        assert_eq!(read(&disk, 0, 4096).unwrap(), [5; 4096], "{:x?}", &lie[..16.min(lie.len())]);
        // It may be noticed after the answer.
        assert_eq!(read(&disk, 0, 4096).unwrap(), [5; 4096]);
        assert_eq!(server.connections(), before + 1, "{:x?}", &lie[..16.min(lie.len())]);
    }
}

#[test]
fn a_server_that_is_there_and_never_answers_a_request_right_fails_it_in_time() {
    let server = FakeServer::start(BYTES);
    let disk = NbdStorage::open(&server.uri(), &options(1)).unwrap();
    server.change(|it| it.never_answers = true);
    assert_eq!(read(&disk, 0, 1).unwrap_err().errno(), libc::EIO);
    // With pauses in between, not as fast as it can.
    assert!(server.connections() < 20, "{}", server.connections());
    server.change(|it| it.never_answers = false);
    wait_for("the server", || read(&disk, 0, 1).map_err(|error| error.to_string()));
}

#[test]
fn a_handshake_that_never_ends_fails_requests_in_time() {
    let server = FakeServer::start(BYTES);
    let disk = NbdStorage::open(&server.uri(), &options(1)).unwrap();
    server.change(|it| {
        it.answers = 0;
        it.drips = true;
    });
    assert_eq!(read(&disk, 0, 1).unwrap_err().errno(), libc::EIO);
    server.change(|it| it.drips = false);
    wait_for("the server", || read(&disk, 0, 1).map_err(|error| error.to_string()));
}

#[test]
fn an_error_of_the_server_is_the_error_of_the_request() {
    let server = FakeServer::start(BYTES);
    let disk = open(&server);
    for (error, errno) in
        [(nbd::ENOSPC, libc::ENOSPC), (nbd::EPERM, libc::EPERM), (12345, libc::EIO)]
    {
        server.change(|it| it.write_error = error);
        assert_eq!(write(&disk, 0, &[1], Flags::NONE).unwrap_err().errno(), errno);
    }
    assert_eq!(write(&disk, BYTES, &[1], Flags::NONE).unwrap_err().errno(), libc::ENOSPC);
    assert_eq!(read(&disk, BYTES, 1).unwrap(), [0xee]);
    assert_eq!(server.connections(), 1);
}

#[test]
fn an_export_that_cannot_be_used_is_refused_with_the_reason() {
    let server = FakeServer::start(BYTES);
    let refused = |uri: String, read_only| {
        let options = NbdOptions { read_only, ..options(0) };
        NbdStorage::open(&uri.parse().unwrap(), &options).err().unwrap()
    };
    let uri = server.uri().to_string();
    let other = refused(uri.replace("/disk", "/other"), true);
    assert!(other.contains("the server has no export 'other'"), "{other}");
    let tls = refused(uri.replace("nbd+", "nbds+"), true);
    assert!(tls.contains("TLS needs certificates"), "{tls}");
    server.change(|it| it.flags |= nbd::FLAG_READ_ONLY);
    assert!(refused(uri.clone(), false).contains("read-only"));
    server.change(|it| it.absent = true);
    assert!(refused(uri, true).contains("closed the connection"));
    let missing = refused("nbd+unix:///?socket=/nonexistent/socket".into(), true);
    assert!(missing.contains("is the server running?"), "{missing}");
}
