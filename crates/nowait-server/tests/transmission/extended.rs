//! Extended headers (NBD proto.md of the branch extension-ext-header): 64-bit lengths, payloads and
//! where they may be.
//!
//! Invariant: a refused request leaves the connection in step, unless the specification lets the
//! server end it.

use std::os::unix::fs::MetadataExt;

use nowait_testkit::nbd::{
    BLOCK_STATUS, CACHE, DISC, EINVAL, ENOSPC, FAST_ZERO, FLUSH, FUA, Mode, NO_HOLE, NONE,
    PAYLOAD_LEN, READ, REQ_ONE, TRIM, WRITE, WRITE_ZEROES,
};

use crate::client::{Message, Request};
use crate::scene::{KIB, MIB, Scene, TIB, byte_at};

/// proto.md (ext), "Extended reply chunk message": "all server replies MUST use an extended reply";
/// its offset "MUST match the offset of the client's request", which the client here checks.
#[test]
fn nbd_must_every_reply_is_an_extended_chunk_with_the_offset_of_its_request() {
    let scene = Scene::new(MIB, &[(0, MIB)]);
    let mut client = scene.connect(Mode::Extended);
    let payload = [7; 512];
    let requests = [
        Request::of(FLUSH, 0, 0),
        Request::of(FLUSH, 0, 0).with(FUA),
        Request::write(Mode::Extended, 4096, &payload).with(FUA),
        Request::of(WRITE_ZEROES, 8192, 4096),
        Request::of(TRIM, 16384, 4096),
        Request::of(CACHE, 1000, 3),
        Request::of(READ, 777, 0),
    ];
    for request in requests {
        client.send(request);
        let Message::Chunk { done: true, kind: NONE, .. } = client.message() else {
            panic!("command {}", request.command)
        };
    }
    for refused in [Request::of(77, 1234, 5), Request::of(READ, 2 * MIB, 512)] {
        assert_eq!(client.call(refused).error, EINVAL);
    }
    assert_eq!(client.call(Request::of(READ, 4096, 512)).data, payload);
}

#[test]
fn one_request_zeroes_or_trims_4_tib_and_others_are_served_meanwhile() {
    let data = [(0, 64 * KIB), (4 * TIB - 64 * KIB, 128 * KIB)];
    let scene = Scene::new(5 * TIB, &data);
    let (mut client, mut other) = (scene.connect(Mode::Extended), scene.connect(Mode::Extended));
    for command in [WRITE_ZEROES, TRIM, CACHE] {
        let cookie = client.send(Request::of(command, 64 * KIB, 4 * TIB - 64 * KIB));
        let read = other.call(Request::of(READ, 4 * TIB, 512));
        assert_eq!((read.error, read.data[0]), (0, byte_at(4 * TIB)));
        let (answered, outcome) = client.outcome();
        assert_eq!((answered, outcome.error), (cookie, 0), "command {command}");
    }
    let at = |client: &mut crate::client::Client, pos| client.call(Request::of(READ, pos, 1)).data;
    assert_eq!(at(&mut client, 64 * KIB - 1), [byte_at(64 * KIB - 1)]);
    assert_eq!(at(&mut client, 64 * KIB), [0]);
    assert_eq!(at(&mut client, 4 * TIB - 1), [0]);
    assert_eq!(at(&mut client, 4 * TIB), [byte_at(4 * TIB)]);
    // The trimmed storage is freed, and no other storage is allocated.
    assert!(scene.file().metadata().unwrap().blocks() * 512 < MIB);
}

#[test]
fn effect_lengths_of_any_size_past_the_end_are_refused_whole() {
    let scene = Scene::new(5 * TIB, &[(0, 4 * KIB)]);
    let mut client = scene.connect(Mode::Extended);
    let rows = [
        (READ, EINVAL),
        (TRIM, EINVAL),
        (CACHE, EINVAL),
        (BLOCK_STATUS, EINVAL),
        (WRITE_ZEROES, ENOSPC),
    ];
    for (command, error) in rows {
        for (offset, length) in
            [(0, 5 * TIB + 1), (0, 1 << 63), (1, u64::MAX), (u64::MAX, u64::MAX), (5 * TIB, 1)]
        {
            let outcome = client.call(Request::of(command, offset, length));
            assert_eq!(outcome.error, error, "command {command}, {length} bytes at {offset}");
        }
    }
    assert_eq!(client.call(Request::of(READ, 0, 1)).data, [byte_at(0)]);
}

/// proto.md (ext), "Command flags": on other commands `NBD_CMD_FLAG_PAYLOAD_LEN` "will trigger an
/// `NBD_EINVAL` error"; "Request message": the payload is consumed.
#[test]
fn nbd_must_a_payload_where_none_may_be_is_consumed_and_refused() {
    let scene = Scene::new(64 * MIB, &[(0, MIB)]);
    let mut client = scene.connect(Mode::Extended);
    // Were the payload taken for requests, it would be reads with valid headers.
    let mut lure = Vec::new();
    for _ in 0..100 {
        lure.extend(client.header(Request::of(READ, 0, 1)));
    }
    for command in [READ, FLUSH, TRIM, CACHE, WRITE_ZEROES, 77] {
        for bytes in [0, 1, lure.len()] {
            let header = Request::of(command, 0, bytes as u64).with(PAYLOAD_LEN);
            let outcome = client.call(Request { payload: &lure[..bytes], ..header });
            assert_eq!(outcome.error, EINVAL, "command {command}, {bytes} bytes");
        }
    }
    let large = vec![1; 32 << 20];
    let header = Request::of(TRIM, 0, large.len() as u64).with(PAYLOAD_LEN);
    assert_eq!(client.call(Request { payload: &large, ..header }).error, EINVAL);
    assert_eq!(client.call(Request::of(READ, 0, 1)).data, [byte_at(0)]);
}

/// The flag is a MUST for a client's write, but QEMU (10.0) does not set it: its writes have a
/// payload all the same.
#[test]
fn a_write_that_does_not_announce_its_payload_is_served_with_it() {
    let scene = Scene::new(64 * MIB, &[(0, MIB)]);
    let mut client = scene.connect(Mode::Extended);
    for bytes in [1, 512, 4096, 2 << 20] {
        let mut lure = Vec::new();
        while lure.len() < bytes {
            lure.extend(client.header(Request::of(READ, 0, 1)));
        }
        lure.truncate(bytes);
        let header = Request::of(WRITE, 0, bytes as u64);
        assert_eq!(client.call(Request { payload: &lure, ..header }).error, 0, "{bytes} bytes");
        assert_eq!(client.call(Request::of(READ, 0, bytes as u64)).data, lure);
    }
}

/// proto.md (ext), "Request message": "A server SHOULD initiate hard disconnect" for a payload
/// beyond the maximum.
#[test]
fn nbd_should_a_payload_too_long_ends_the_connection_and_no_other() {
    let scene = Scene::new(MIB, &[(0, MIB)]);
    let mut bystander = scene.connect(Mode::Extended);
    let bad = [
        Request::of(WRITE, 0, 32 * MIB + 1).with(PAYLOAD_LEN),
        Request::of(WRITE, 0, 1 << 63).with(PAYLOAD_LEN),
        Request::of(READ, 0, u64::MAX).with(PAYLOAD_LEN),
        Request::of(BLOCK_STATUS, 0, (1 << 32) + 12).with(PAYLOAD_LEN),
        Request::of(WRITE, 0, 1 << 63),
    ];
    for request in bad {
        let mut client = scene.connect(Mode::Extended);
        client.send(request);
        assert!(client.is_closed(), "command {}, {}", request.command, request.length);
        assert_eq!(bystander.call(Request::of(READ, 0, 1)).data, [byte_at(0)]);
    }
}

#[test]
fn compact_magic_after_extended_headers_and_the_other_way_round_end_the_connection() {
    let scene = Scene::new(MIB, &[]);
    for mode in Mode::ALL {
        let mut client = scene.connect(mode);
        let mut header = client.header(Request::of(READ, 0, 512));
        header.resize(32, 0);
        let magic: u32 = if mode == Mode::Extended { 0x2560_9513 } else { 0x21e4_1c71 };
        header[..4].copy_from_slice(&magic.to_be_bytes());
        client.send_bytes(&header).unwrap();
        assert!(client.is_closed(), "{mode:?}");
    }
}

/// proto.md (ext), "Request message": "In the compact style, the client MUST NOT use the
/// `NBD_CMD_FLAG_PAYLOAD_LEN` flag"; "Error values": such a flag SHOULD be `NBD_EINVAL`.
#[test]
fn nbd_should_the_payload_flag_on_compact_requests_is_einval() {
    let scene = Scene::new(MIB, &[]);
    for mode in [Mode::Simple, Mode::Structured] {
        let mut client = scene.connect(mode);
        let write = Request::write(mode, 0, &[1; 512]).with(PAYLOAD_LEN);
        assert_eq!(client.call(write).error, EINVAL);
        assert_eq!(client.call(Request::of(READ, 0, 512).with(PAYLOAD_LEN)).error, EINVAL);
        assert_eq!(client.call(Request::of(READ, 0, 512)).data, [0; 512]);
    }
}

#[test]
fn nbd_should_flags_that_do_not_belong_to_a_command_are_einval_in_every_mode() {
    let scene = Scene::new(MIB, &[]);
    for mode in Mode::ALL {
        let mut client = scene.connect(mode);
        let write = [1; 512];
        let bad = [
            Request::of(READ, 0, 512).with(NO_HOLE),
            Request::of(READ, 0, 512).with(1 << 15),
            Request::write(mode, 0, &write).with(FAST_ZERO),
            Request::of(TRIM, 0, 512).with(NO_HOLE),
            Request::of(WRITE_ZEROES, 0, 512).with(REQ_ONE),
            Request::of(FLUSH, 0, 0).with(REQ_ONE),
            Request::of(CACHE, 0, 512).with(NO_HOLE),
        ];
        for request in bad {
            let outcome = client.call(request);
            assert_eq!(outcome.error, EINVAL, "{mode:?} {} {}", request.command, request.flags);
        }
        assert_eq!(client.call(Request::of(READ, 0, 512)).data, [0; 512]);
    }
}

/// proto.md, `NBD_CMD_DISC`: "The server MUST handle all outstanding requests", then close.
#[test]
fn nbd_must_disc_is_not_answered_and_earlier_requests_are() {
    let scene = Scene::new(8 * MIB, &[(0, MIB)]);
    for mode in Mode::ALL {
        let mut client = scene.connect(mode);
        let cookies: Vec<u64> =
            (0..8).map(|n| client.send(Request::of(READ, n * 1000, 100_000))).collect();
        client.send(Request::of(DISC, 0, 0));
        for _ in &cookies {
            let (cookie, outcome) = client.outcome();
            assert!(cookies.contains(&cookie) && outcome.error == 0);
        }
        assert!(client.is_closed());
    }
}
