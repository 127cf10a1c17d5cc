//! The obligations of every command, in every mode (NBD proto.md, "Request types", "Command flags",
//! "Transmission flags").
//!
//! Invariant: expected bytes are read from the image, bypassing the server.

use std::os::unix::fs::{FileExt, MetadataExt};

use nowait_testkit::nbd::{
    BLOCK_STATUS, CACHE, DF, EINVAL, EIO, ENOSPC, ENOTSUP, EPERM, ERROR, FAST_ZERO, FLUSH, FUA,
    Mode, NO_HOLE, NONE, READ, REQ_ONE, TRIM, WRITE_ZEROES,
};

use crate::client::{self, Client, Message, Request};
use crate::scene::{KIB, MIB, Scene, byte_at, bytes_at, inverted_at};

// Bits of the transmission flags.
const HAS_FLAGS: u16 = 1 << 0;
const READ_ONLY: u16 = 1 << 1;
const SEND_FLUSH: u16 = 1 << 2;
const SEND_FUA: u16 = 1 << 3;
const SEND_TRIM: u16 = 1 << 5;
const SEND_WRITE_ZEROES: u16 = 1 << 6;
const SEND_DF: u16 = 1 << 7;
const SEND_FAST_ZERO: u16 = 1 << 11;

const PAYLOAD: [u8; 4096] = [0x5a; 4096];

/// One valid request of every command but `DISC`; block status only with chunks.
fn one_of_each(mode: Mode) -> Vec<Request<'static>> {
    let mut all = vec![
        Request::of(READ, 0, 4096),
        Request::write(mode, 4096, &PAYLOAD),
        Request::of(FLUSH, 0, 0),
        Request::of(TRIM, 8192, 4096),
        Request::of(CACHE, 12288, 4096),
        Request::of(WRITE_ZEROES, 16384, 4096),
    ];
    if mode != Mode::Simple {
        all.push(Request::of(BLOCK_STATUS, 0, MIB));
    }
    all
}

fn image(scene: &Scene, pos: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    scene.file().read_exact_at(&mut bytes, pos).unwrap();
    bytes
}

/// proto.md, "Simple reply message": it MUST be sent "in response to all requests if structured
/// replies have not been negotiated", errors included. [`Client::message`] takes nothing else then.
#[test]
fn nbd_must_without_negotiation_every_reply_is_a_simple_one() {
    let scene = Scene::new(MIB, &[(0, MIB)]);
    let mut client = scene.connect(Mode::Simple);
    for request in one_of_each(Mode::Simple) {
        assert_eq!(client.call(request).error, 0, "command {}", request.command);
        let past_the_end = Request { offset: 2 * MIB, ..request };
        let failed = client.call(past_the_end).error != 0;
        assert_eq!(failed, request.command != FLUSH, "command {}", request.command);
    }
    assert_eq!(client.call(Request::of(77, 0, 0)).error, EINVAL);
}

/// proto.md, "Structured reply chunk message": the server MUST NOT use a simple reply for a read,
/// "even for the case of an early `NBD_EINVAL` due to bad flags"; "NBD_REPLY_TYPE_ERROR": its error
/// MUST be nonzero and its length at least 6, which [`Client::call`] checks.
#[test]
fn nbd_must_a_read_or_block_status_that_fails_is_one_error_chunk() {
    let scene = Scene::new(MIB, &[(0, MIB)]);
    for mode in Mode::CHUNKED {
        let mut client = scene.connect(mode);
        let bad = [
            Request::of(READ, 0, 512).with(NO_HOLE),
            Request::of(READ, MIB, 1),
            Request::of(READ, u64::MAX, 1).with(DF),
            Request::of(BLOCK_STATUS, 0, 512).with(NO_HOLE),
            Request::of(BLOCK_STATUS, MIB, 1).with(REQ_ONE),
        ];
        for request in bad {
            client.send(request);
            let Message::Chunk { done: true, kind: ERROR, payload, .. } = client.message() else {
                panic!("{mode:?}, command {}", request.command)
            };
            assert_eq!(payload[..4], EINVAL.to_be_bytes());
        }
        assert_eq!(client.call(Request::of(READ, 0, 512)).data[0], byte_at(0));
    }
}

/// proto.md, `NBD_CMD_READ`: after an error the server "MUST NOT send any payload for this
/// request"; with chunks it MUST include an error chunk.
#[test]
fn nbd_must_a_read_that_fails_below_has_no_data_and_says_so() {
    for mode in Mode::ALL {
        let scene = Scene::new(8 * MIB, &[(0, 8 * MIB)]);
        let mut client = scene.connect(mode);
        // The image is truncated behind the server's back.
        scene.writable().set_len(MIB).unwrap();
        for (offset, length, flags) in
            [(4 * MIB, MIB, 0), (MIB - 512, 1024, 0), (MIB - 5, 64 * KIB, 0)]
        {
            let outcome = client.call(Request::of(READ, offset, length).with(flags));
            assert_eq!((outcome.error, outcome.data.len()), (EIO, 0), "{mode:?}");
        }
        let outcome = client.call(Request::of(READ, 0, 64 * KIB));
        assert!(outcome.data == bytes_at(0..outcome.data.len() as u64));
        assert_eq!(outcome.data.len() as u64, 64 * KIB);
    }
}

/// proto.md, `NBD_CMD_WRITE` and `NBD_CMD_WRITE_ZEROES`: the server MUST write the data, or zero
/// them, and then send the reply; zeroed data MUST read back as zeros.
#[test]
fn nbd_must_bytes_are_where_they_belong_when_a_write_or_zeroing_is_answered() {
    for mode in Mode::ALL {
        let scene = Scene::new(MIB, &[(0, MIB)]);
        let mut client = scene.connect(mode);
        let mut expected = image(&scene, 0, MIB as usize);
        for (pos, len) in [(0, 4096), (4096, 70_000), (100_001, 3), (MIB - 777, 777)] {
            let bytes = inverted_at(pos..pos + len);
            assert_eq!(client.call(Request::write(mode, pos, &bytes)).error, 0);
            expected[pos as usize..(pos + len) as usize].copy_from_slice(&bytes);
            assert!(image(&scene, 0, MIB as usize) == expected, "{mode:?}, {len} at {pos}");
        }
        for (pos, len) in [(8192, 4096), (200_001, 70_000), (MIB - 5, 5)] {
            assert_eq!(client.call(Request::of(WRITE_ZEROES, pos, len)).error, 0);
            expected[pos as usize..(pos + len) as usize].fill(0);
            assert!(image(&scene, 0, MIB as usize) == expected, "{mode:?}, {len} at {pos}");
            assert!(client.call(Request::of(READ, pos, len)).data == vec![0; len as usize]);
        }
    }
}

/// proto.md, "Command flags": the server MUST support `NBD_CMD_FLAG_NO_HOLE` if it advertises
/// `NBD_FLAG_SEND_WRITE_ZEROES`, and then the area MUST be fully provisioned.
#[test]
fn nbd_must_zeroing_without_holes_allocates_storage() {
    for mode in Mode::ALL {
        let scene = Scene::new(8 * MIB, &[]);
        let mut client = scene.connect(mode);
        assert_ne!(client.transmission_flags & SEND_WRITE_ZEROES, 0);
        let zero = Request::of(WRITE_ZEROES, MIB, 4 * MIB).with(NO_HOLE);
        assert_eq!(client.call(zero).error, 0);
        assert!(scene.file().metadata().unwrap().blocks() * 512 >= 4 * MIB, "{mode:?}");
        assert!(client.call(Request::of(READ, 0, 8 * MIB)).data == vec![0; 8 << 20]);
    }
}

/// proto.md, `NBD_CMD_WRITE_ZEROES`: with `NBD_CMD_FLAG_FAST_ZERO` it is quick or `NBD_ENOTSUP`,
/// and then the contents SHOULD be as before; without, the server MUST NOT fail with `NBD_ENOTSUP`.
#[test]
fn nbd_must_only_fast_zeroing_may_be_not_supported() {
    let scene = Scene::new(MIB, &[(0, MIB)]);
    for mode in Mode::ALL {
        let mut client = scene.connect(mode);
        assert_ne!(client.transmission_flags & SEND_FAST_ZERO, 0);
        for (flags, pos) in [(0, 0), (NO_HOLE, 64 * KIB), (FUA, 128 * KIB), (0, 200_001)] {
            let write = Request::write(mode, pos, &PAYLOAD);
            assert_eq!(client.call(write).error, 0);
            let zero = Request::of(WRITE_ZEROES, pos, 4096).with(flags);
            let expected = match client.call(zero.with(FAST_ZERO)).error {
                0 => [0; 4096],
                error => {
                    assert_eq!(error, ENOTSUP);
                    PAYLOAD
                }
            };
            assert!(image(&scene, pos, 4096) == expected, "{mode:?} {flags}");
            assert_eq!(client.call(zero).error, 0);
            assert!(image(&scene, pos, 4096) == [0; 4096], "{mode:?} {flags}");
        }
    }
}

/// proto.md, `NBD_CMD_CACHE`: a server that advertises it MUST reject flags that it does not know,
/// and there MUST NOT be any difference in semantics to not having asked.
#[test]
fn nbd_must_cache_refuses_unknown_flags_and_changes_nothing() {
    let scene = Scene::new(MIB, &[(0, MIB / 2)]);
    let before = image(&scene, 0, MIB as usize);
    for mode in Mode::ALL {
        let mut client = scene.connect(mode);
        for flag in (1..16).map(|bit| 1 << bit) {
            // With extended headers bit 5 announces a payload, here of no bytes.
            let refused = client.call(Request::of(CACHE, 0, 0).with(flag));
            assert_eq!(refused.error, EINVAL, "{mode:?} {flag:#x}");
        }
        for (offset, length) in [(0, MIB), (777, 1), (MIB, 0)] {
            assert_eq!(client.call(Request::of(CACHE, offset, length)).error, 0);
        }
        assert_eq!(client.call(Request::of(CACHE, 0, MIB + 1)).error, EINVAL);
        assert!(client.call(Request::of(READ, 0, MIB)).data == before);
        assert_eq!(client.call(Request::write(mode, 0, &before[..4096])).error, 0);
    }
    assert!(image(&scene, 0, MIB as usize) == before);
    // A hole that was cached is still a hole.
    assert!(scene.file().metadata().unwrap().blocks() * 512 < MIB);
}

/// proto.md, "Command flags": where `NBD_FLAG_SEND_FUA` is set, "the server MUST accept all
/// commands with this bit set".
#[test]
fn nbd_must_every_command_may_carry_fua() {
    let scene = Scene::new(MIB, &[(0, MIB)]);
    for mode in Mode::ALL {
        let mut client = scene.connect(mode);
        assert_ne!(client.transmission_flags & SEND_FUA, 0);
        for request in one_of_each(mode) {
            assert_eq!(client.call(request.with(FUA)).error, 0, "{mode:?} {}", request.command);
        }
    }
}

/// proto.md, "Transmission flags": a server that sets `NBD_FLAG_READ_ONLY` "MUST error subsequent
/// write operations"; it MUST NOT set flags for what it does not support, and
/// `NBD_FLAG_SEND_FAST_ZERO` only beside `NBD_FLAG_SEND_WRITE_ZEROES`.
#[test]
fn nbd_must_a_read_only_export_refuses_every_change_and_offers_none() {
    let options = nowait::OpenOptions::new().read_only(true);
    let scene = Scene::with(MIB, &[(0, MIB)], options);
    let before = image(&scene, 0, MIB as usize);
    for mode in Mode::ALL {
        let mut client = scene.connect(mode);
        let changes = SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO;
        let flags = client.transmission_flags & (READ_ONLY | changes);
        assert_eq!(flags, READ_ONLY, "{mode:?}");
        for request in one_of_each(mode) {
            let changes =
                request.command != FLUSH && !matches!(request.command, READ | CACHE | BLOCK_STATUS);
            let wanted = if changes { EPERM } else { 0 };
            for request in [request, request.with(FUA)] {
                assert_eq!(client.call(request).error, wanted, "{mode:?} {}", request.command);
            }
        }
    }
    assert!(image(&scene, 0, MIB as usize) == before);
}

/// proto.md, "Transmission flags": `NBD_FLAG_HAS_FLAGS` MUST always be 1, `NBD_FLAG_SEND_DF` MUST
/// be 1 where the flag is supported and 0 without chunks; bits 4 and 9 are of what is not
/// supported.
#[test]
fn nbd_must_the_transmission_flags_are_those_of_what_is_supported() {
    let scene = Scene::new(MIB, &[]);
    for mode in Mode::ALL {
        let flags = scene.connect(mode).transmission_flags;
        let rotational_or_resize = 1 << 4 | 1 << 9;
        assert_eq!(flags & (HAS_FLAGS | rotational_or_resize), HAS_FLAGS);
        assert_eq!(flags & SEND_DF != 0, mode != Mode::Simple);
        assert_eq!(flags & SEND_WRITE_ZEROES != 0, flags & SEND_FAST_ZERO != 0);
        assert_eq!(flags >> 13, 0, "bits that mean nothing");
    }
}

/// No device here is write-through, so each one has a cache that a flush empties, and FUA for single
/// writes (proto.md, "Transmission flags").
#[test]
fn c50_every_export_is_advertised_with_a_volatile_write_cache() {
    for direct in [nowait::Direct::Auto, nowait::Direct::Off] {
        let options = nowait::OpenOptions::new().direct(direct);
        let scene = Scene::with(MIB, &[(0, MIB)], options);
        for mode in Mode::ALL {
            let mut client = scene.connect(mode);
            let flags = client.transmission_flags & (SEND_FLUSH | SEND_FUA);
            assert_eq!(flags, SEND_FLUSH | SEND_FUA, "{mode:?} {direct:?}");
            assert_eq!(client.call(Request::of(FLUSH, 0, 0)).error, 0, "{mode:?} {direct:?}");
        }
    }
}

/// proto.md, "Size constraints": the smallest block MUST be a power of 2 up to 65536, the preferred
/// one a power of 2 of at least that and 512, the longest payload at least the preferred block.
#[test]
fn nbd_must_the_block_sizes_are_powers_of_2_in_ascending_order() {
    for direct in [nowait::Direct::Auto, nowait::Direct::Off] {
        let options = nowait::OpenOptions::new().direct(direct);
        let scene = Scene::with(MIB + 777, &[], options);
        let [smallest, preferred, longest] = scene.connect(Mode::Simple).block_sizes;
        assert!(smallest.is_power_of_two() && smallest <= 65536, "{smallest}");
        assert!(preferred.is_power_of_two() && preferred >= smallest.max(512), "{preferred}");
        assert!(longest >= preferred.max(MIB), "{longest}");
    }
}

/// proto.md, "Transmission": each reply MUST have the cookie of its request, "treating the cookie
/// as an opaque field". [`Client::call_as`] compares it.
#[test]
fn nbd_must_any_cookie_comes_back_in_every_kind_of_reply() {
    let scene = Scene::new(MIB, &[(0, 64 * KIB)]);
    for mode in Mode::ALL {
        let mut client = scene.connect(mode);
        for cookie in [0, 1, u64::MAX, 1 << 63, 0x6744_6698_668e_33ef, 0] {
            for request in one_of_each(mode) {
                assert_eq!(client.call_as(cookie, request).error, 0);
            }
            let large = client.call_as(cookie, Request::of(READ, 0, MIB));
            assert_eq!(large.data.len() as u64, MIB);
            assert_eq!(client.call_as(cookie, Request::of(READ, MIB, 1)).error, EINVAL);
            assert_eq!(client.call_as(cookie, Request::of(99, 0, 0)).error, EINVAL);
        }
    }
}

/// proto.md, "Size constraints": a server MUST cleanly refuse commands outside its constraints
/// "without corrupting data"; `NBD_CMD_WRITE`: it MUST set an error.
#[test]
fn nbd_must_a_refused_write_changes_nothing_and_its_payload_is_discarded() {
    let scene = Scene::new(MIB, &[(0, MIB)]);
    let before = image(&scene, 0, MIB as usize);
    let long = vec![0x77; (32 << 20) + 1];
    for mode in Mode::ALL {
        let mut client = scene.connect(mode);
        for (offset, bytes) in [(MIB - 1, 2), (MIB, 1), (u64::MAX - 10, 512), (0, 2 << 20)] {
            let outcome = client.call(Request::write(mode, offset, &long[..bytes]));
            assert_eq!(outcome.error, ENOSPC, "{mode:?}, {bytes} at {offset}");
        }
        let zero = Request::of(WRITE_ZEROES, MIB - 1, 2);
        assert_eq!(client.call(zero).error, ENOSPC);
        if mode != Mode::Extended {
            // With extended headers a payload beyond the maximum ends the connection.
            assert_ne!(client.call(Request::write(mode, 0, &long)).error, 0);
        }
        client.send(Request::of(FLUSH, 0, 0));
        let answered = match client.message() {
            Message::Simple { error: 0, .. } => mode != Mode::Extended,
            Message::Chunk { kind: NONE, .. } => mode == Mode::Extended,
            _ => false,
        };
        assert!(answered, "{mode:?}");
    }
    assert!(image(&scene, 0, MIB as usize) == before);
}

/// proto.md, "Transmission flags": with `NBD_FLAG_CAN_MULTI_CONN` the effects of a flush, and of
/// FUA, MUST be visible on all connections when it is answered.
#[test]
fn nbd_must_every_connection_reads_the_writes_of_every_other() {
    let scene = Scene::new(MIB, &[(0, MIB)]);
    let mut clients: Vec<Client> = Mode::ALL.map(|mode| scene.connect(mode)).into();
    for client in &clients {
        assert_ne!(client.transmission_flags & 1 << 8, 0);
    }
    for round in 0..12u8 {
        let writer = usize::from(round) % clients.len();
        let (mode, bytes) = (clients[writer].mode, vec![round + 1; 9001]);
        let write = Request::write(mode, 777, &bytes);
        if round % 2 == 0 {
            assert_eq!(clients[writer].call(write.with(FUA)).error, 0);
        } else {
            assert_eq!(clients[writer].call(write).error, 0);
            assert_eq!(clients[writer].call(Request::of(FLUSH, 0, 0)).error, 0);
        }
        for client in &mut clients {
            assert!(client.call(Request::of(READ, 777, 9001)).data == bytes, "round {round}");
        }
    }
}

#[test]
fn a_client_that_reads_no_error_replies_is_no_longer_read_and_delays_no_other_client() {
    const FIRST: usize = 1000;
    // Far more than fit into the sockets and the limit: their replies are 11 MB at least.
    const REQUESTS: usize = 700_000;
    let scene = Scene::new(MIB, &[(0, MIB)]);
    let mut deaf = scene.connect(Mode::Simple);
    let first: Vec<u8> = (0..FIRST).flat_map(|_| deaf.header(Request::of(77, 0, 0))).collect();
    let rest = deaf.header(Request::of(77, 0, 0)).repeat(REQUESTS);
    deaf.send_bytes(&first).unwrap();
    assert!(
        !client::send_while_taken(&mut deaf, &rest),
        "all was read, though the client reads no replies"
    );
    assert_eq!(scene.connect(Mode::Simple).call(Request::of(READ, 0, 4096)).error, 0);
    for _ in 0..FIRST {
        assert_eq!(deaf.outcome().1.error, EINVAL);
    }
}

#[test]
fn a_connection_that_finds_no_free_slot_is_served_when_one_is_free() {
    const ROUNDS: usize = 50;
    const MANY: usize = 20;
    let scene = Scene::with_slots(MIB, &[(0, MIB)], 1);
    let mut clients: Vec<Client> = (0..4).map(|_| scene.connect(Mode::Simple)).collect();
    for _ in 0..ROUNDS {
        for client in &mut clients {
            let read = |_| client.header(Request::of(READ, 4096, 4096));
            let reads: Vec<u8> = (0..MANY).flat_map(read).collect();
            client.send_bytes(&reads).unwrap();
        }
        for client in &mut clients {
            for _ in 0..MANY {
                let (_, outcome) = client.outcome();
                assert_eq!((outcome.error, outcome.data[0]), (0, byte_at(4096)));
            }
        }
    }
}
