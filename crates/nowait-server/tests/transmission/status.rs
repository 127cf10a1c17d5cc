//! Block status: extents of the selected contexts (NBD proto.md, "Metadata querying" and
//! `NBD_CMD_BLOCK_STATUS`).
//!
//! Invariant: the extents of a reply are where the image has its data and holes.

use nowait_testkit::nbd::{
    BLOCK_STATUS, BLOCK_STATUS_CHUNK, BLOCK_STATUS_EXT, EINVAL, Mode, PAYLOAD_LEN, READ, REQ_ONE,
};

use crate::client::{self, Client, Message, Outcome, Request};
use crate::scene::{KIB, MIB, Scene, TIB};

const HOLE_AND_ZERO: u64 = 3;
const DATA: [(u64, u64); 2] = [(MIB, 64 * KIB), (2 * MIB, 128 * KIB)];

fn status(client: &mut Client, offset: u64, length: u64, flags: u16) -> Vec<(u64, u64)> {
    let outcome = client.call(Request::of(BLOCK_STATUS, offset, length).with(flags));
    assert_eq!(outcome.error, 0);
    let [(context, extents)] = &outcome.status[..] else { panic!("{outcome:?}") };
    assert_eq!(*context, client.context());
    extents.clone()
}

/// A block status request that names its contexts in a payload.
fn named(client: &mut Client, offset: u64, length: u64, ids: &[u32]) -> Outcome {
    let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_be_bytes()).collect();
    let payload = [&length.to_be_bytes()[..], &ids].concat();
    let header = Request::of(BLOCK_STATUS, offset, payload.len() as u64).with(PAYLOAD_LEN);
    client.call(Request { payload: &payload, ..header })
}

/// proto.md, "Metadata querying": one chunk for each selected context; with structured replies
/// `NBD_REPLY_TYPE_BLOCK_STATUS`, with extended headers `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`.
#[test]
fn nbd_must_block_status_is_one_chunk_for_each_context_of_the_type_agreed_on() {
    let scene = Scene::new(4 * MIB, &DATA);
    for (mode, wanted) in
        [(Mode::Structured, BLOCK_STATUS_CHUNK), (Mode::Extended, BLOCK_STATUS_EXT)]
    {
        let mut client = scene.connect(mode);
        client.send(Request::of(BLOCK_STATUS, 0, MIB));
        let Message::Chunk { done: true, kind, .. } = client.message() else { panic!("{mode:?}") };
        assert_eq!(kind, wanted);
    }
}

#[test]
fn extents_are_where_data_and_holes_are() {
    let scene = Scene::new(4 * MIB, &DATA);
    for mode in Mode::CHUNKED {
        let mut client = scene.connect(mode);
        let wanted = [
            (MIB, HOLE_AND_ZERO),
            (64 * KIB, 0),
            (MIB - 64 * KIB, HOLE_AND_ZERO),
            (128 * KIB, 0),
            (2 * MIB - 128 * KIB, HOLE_AND_ZERO),
        ];
        assert_eq!(status(&mut client, 0, 4 * MIB, 0), wanted);
        assert_eq!(status(&mut client, MIB + 1, 1000, 0), [(1000, 0)]);
    }
}

/// proto.md, "Structured reply types": each extent MUST have a length, and all but the last MUST
/// end before the end of the request; of `base:allocation` only the lowest two bits have a meaning,
/// and with extended headers the upper 32 MUST be 0.
#[test]
fn nbd_must_extents_follow_each_other_and_begin_within_the_request() {
    let scene = Scene::new(4 * MIB, &DATA);
    for mode in Mode::CHUNKED {
        let mut client = scene.connect(mode);
        for n in 0..200 {
            let offset = n * 20_903;
            let length = 1 + n * n * 7919 % (4 * MIB - offset);
            for flags in [0, REQ_ONE] {
                let extents = status(&mut client, offset, length, flags);
                let mut sum = 0;
                for (len, state) in extents {
                    assert!(len > 0 && state <= HOLE_AND_ZERO && sum < length, "{mode:?} {n}");
                    sum += len;
                }
                assert!(flags == 0 || sum <= length, "{mode:?} {n}");
            }
        }
    }
}

/// proto.md, "Command flags": with `NBD_CMD_FLAG_REQ_ONE` "the server MUST NOT send metadata on
/// more than one extent", which MUST NOT be longer than the requested range.
#[test]
fn nbd_must_req_one_gets_one_extent_no_longer_than_asked_for() {
    let scene = Scene::new(4 * MIB, &DATA);
    for mode in Mode::CHUNKED {
        let mut client = scene.connect(mode);
        assert_eq!(status(&mut client, 0, 4 * MIB, REQ_ONE), [(MIB, HOLE_AND_ZERO)]);
        assert_eq!(status(&mut client, 512, 512, REQ_ONE), [(512, HOLE_AND_ZERO)]);
    }
}

/// proto.md, "Metadata querying": "Servers SHOULD reply with `NBD_EINVAL`" where no context was
/// selected; `NBD_CMD_BLOCK_STATUS`: and past the end.
#[test]
fn nbd_should_block_status_without_a_context_or_past_the_end_is_einval() {
    let scene = Scene::new(4 * MIB, &DATA);
    for mode in Mode::ALL {
        let mut without = client::connect_selecting(scene.socket(), mode, false);
        assert_eq!(without.call(Request::of(BLOCK_STATUS, 0, MIB)).error, EINVAL);
        assert_eq!(without.call(Request::of(READ, 0, 512)).error, 0);
    }
    for mode in Mode::CHUNKED {
        let mut client = scene.connect(mode);
        for (offset, length) in [(4 * MIB, 1), (1, 4 * MIB), (u64::MAX, 1), (0, 0)] {
            assert_eq!(client.call(Request::of(BLOCK_STATUS, offset, length)).error, EINVAL);
        }
        assert_eq!(status(&mut client, 4 * MIB - 1, 1, 0), [(1, HOLE_AND_ZERO)]);
    }
}

#[test]
fn extended_extents_reach_beyond_what_32_bits_can_say() {
    let scene = Scene::new(5 * TIB, &[(4 * TIB, MIB)]);
    let mut client = scene.connect(Mode::Extended);
    let wanted = [(4 * TIB, HOLE_AND_ZERO), (MIB, 0), (TIB - MIB, HOLE_AND_ZERO)];
    assert_eq!(status(&mut client, 0, 5 * TIB, 0), wanted);
    let mut client = scene.connect(Mode::Structured);
    let max = u64::from(u32::MAX);
    assert_eq!(status(&mut client, 0, max, 0), [(max, HOLE_AND_ZERO)]);
}

/// proto.md (ext), `NBD_CMD_BLOCK_STATUS`: the payload form limits the reply to the contexts that
/// it names and brings the effect length with it.
#[test]
fn nbd_a_payload_limits_block_status_to_the_contexts_it_names() {
    let scene = Scene::new(5 * TIB, &[(MIB, MIB)]);
    let mut client = scene.connect(Mode::Extended);
    assert_eq!(client.transmission_flags & 1 << 12, 1 << 12);
    let context = client.context();
    let outcome = named(&mut client, MIB, TIB, &[context]);
    let extents = vec![(MIB, 0), (TIB - MIB, HOLE_AND_ZERO)];
    assert_eq!((outcome.error, outcome.status), (0, vec![(context, extents)]));
    // The next request follows the payload, even if the range is refused.
    assert_eq!(client.call(Request::of(READ, 0, 512)).error, 0);
    assert_eq!(named(&mut client, 5 * TIB, MIB, &[context]).error, EINVAL);
    assert_eq!(client.call(Request::of(READ, 0, 512)).error, 0);
}

/// proto.md (ext), `NBD_CMD_BLOCK_STATUS`: with unknown or duplicate ids "the server MUST
/// gracefully consume the client's payload before failing with `NBD_EINVAL`"; likewise for a
/// payload of another size than 8 + n * 4 bytes, or if no context was selected.
#[test]
fn nbd_must_a_bad_block_status_payload_is_consumed_and_refused() {
    let scene = Scene::new(4 * MIB, &DATA);
    let mut client = scene.connect(Mode::Extended);
    let id = client.context();
    for ids in [&[][..], &[id + 1], &[0], &[id, id], &[id, id + 1], &vec![id; 300_000]] {
        assert_eq!(named(&mut client, 0, MIB, ids).error, EINVAL, "{} ids", ids.len());
        assert_eq!(client.call(Request::of(READ, 0, 512)).error, 0);
    }
    for bytes in [0, 1, 7, 11, 13, 16 << 20] {
        let payload = vec![0x5a; bytes];
        let header = Request::of(BLOCK_STATUS, 0, bytes as u64).with(PAYLOAD_LEN);
        assert_eq!(client.call(Request { payload: &payload, ..header }).error, EINVAL, "{bytes}");
        assert_eq!(client.call(Request::of(READ, 0, 512)).error, 0);
    }
    let mut without = client::connect_selecting(scene.socket(), Mode::Extended, false);
    assert_eq!(without.transmission_flags & 1 << 12, 0);
    assert_eq!(named(&mut without, 0, MIB, &[1]).error, EINVAL);
    assert_eq!(without.call(Request::of(READ, 0, 512)).error, 0);
}

#[test]
fn a_block_status_payload_that_comes_byte_by_byte_is_understood() {
    let scene = Scene::new(4 * MIB, &DATA);
    let mut client = scene.connect(Mode::Extended);
    let header = Request::of(BLOCK_STATUS, 0, 12).with(PAYLOAD_LEN);
    let mut bytes = client.header(header);
    bytes.extend(MIB.to_be_bytes());
    bytes.extend(client.context().to_be_bytes());
    for byte in bytes {
        client.send_bytes(&[byte]).unwrap();
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    let (_, outcome) = client.outcome();
    assert_eq!(outcome.status, [(client.context(), vec![(MIB, HOLE_AND_ZERO)])]);
}
