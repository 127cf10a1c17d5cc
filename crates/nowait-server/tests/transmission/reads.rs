//! Reads: in one piece, as a hole, and as alternating holes and data (NBD proto.md, "Request
//! types", `NBD_CMD_READ`; "Structured reply types").
//!
//! Invariant: the bytes are those of the image, however they are cut into chunks.

use nowait_testkit::nbd::{DF, EINVAL, EIO, EOVERFLOW, Mode, OFFSET_DATA, OFFSET_HOLE, READ, TRIM};

use crate::client::{Client, Message, Outcome, Request};
use crate::scene::{KIB, MIB, Scene, bytes_at};

/// Data in the second and the fourth 64 KiB of every MiB of the first four.
fn patchwork() -> Vec<(u64, u64)> {
    (0..4).flat_map(|n| [1, 3].map(|k| (n * MIB + k * 64 * KIB, 64 * KIB))).collect()
}

/// The bytes of an image with `data` in a range.
fn bytes_of(data: &[(u64, u64)], pos: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    for &(from, data_len) in data {
        let (start, end) = (from.max(pos), (from + data_len).min(pos + len));
        if start < end {
            bytes[(start - pos) as usize..(end - pos) as usize]
                .copy_from_slice(&bytes_at(start..end));
        }
    }
    bytes
}

fn read(client: &mut Client, offset: u64, length: u64, flags: u16) -> Outcome {
    let outcome = client.call(Request::of(READ, offset, length).with(flags));
    assert_eq!(outcome.error, 0);
    outcome
}

#[test]
fn a_large_read_leaves_the_known_holes_out_and_small_ones_and_simple_replies_do_not() {
    let data = patchwork();
    let scene = Scene::new(8 * MIB, &data);
    for mode in Mode::ALL {
        let mut client = scene.connect(mode);
        // It begins and ends inside data, unaligned.
        let (pos, len) = (64 * KIB + 777, 192 * KIB - 1000);
        let outcome = read(&mut client, pos, len, 0);
        assert!(outcome.data == bytes_of(&data, pos, len), "{mode:?}");
        let end = pos + len;
        let holes = [
            (OFFSET_DATA, pos, 128 * KIB - pos),
            (OFFSET_HOLE, 128 * KIB, 64 * KIB),
            (OFFSET_DATA, 192 * KIB, end - 192 * KIB),
        ];
        assert_eq!(outcome.chunks, if mode == Mode::Simple { vec![] } else { holes.to_vec() });
        // 64 KiB less a byte, half of them a hole.
        let outcome = read(&mut client, 96 * KIB, 64 * KIB - 1, 0);
        assert!(outcome.data == bytes_of(&data, 96 * KIB, 64 * KIB - 1));
        assert_eq!(outcome.chunks.len(), usize::from(mode != Mode::Simple));
    }
}

/// C56: buffers serve one request after another, and unaligned requests share blocks.
#[test]
fn c56_no_reply_has_bytes_of_another_request_or_of_the_memory_it_was_made_in() {
    // Not in the image.
    let secret = vec![0xff; 300_000];
    for (mode, cache_holes) in Mode::ALL.into_iter().flat_map(|mode| [(mode, false), (mode, true)])
    {
        let options = nowait::OpenOptions::new().cache_holes(cache_holes);
        let data = [(0, MIB)];
        let scene = Scene::with(5 * MIB, &data, options);
        let (mut writer, mut reader) = (scene.connect(mode), scene.connect(mode));
        for n in 0..20 {
            let len = 1 + n * 14_999;
            writer.send(Request::write(mode, 3 * MIB + n, &secret[..len as usize]));
            for pos in [n * 513, MIB - 700, 2 * MIB + n * 777] {
                let outcome = read(&mut reader, pos, len, 0);
                assert!(outcome.data == bytes_of(&data, pos, len), "{mode:?}: {len} at {pos}");
            }
            assert_eq!(writer.outcome().1.error, 0);
        }
        // Data that is missing is not made up for by the bytes in the buffer.
        scene.writable().set_len(MIB + 4096).unwrap();
        for (pos, len) in [(MIB, 64 * KIB), (MIB + 5, 5000), (2 * MIB, 4096)] {
            let outcome = reader.call(Request::of(READ, pos, len));
            assert!([0, EIO].contains(&outcome.error), "{len} at {pos}");
            assert!(outcome.data.iter().all(|byte| *byte == 0), "{len} at {pos}");
        }
        reader.send(Request::of(READ, 5 * MIB, 1));
        if let Message::Chunk { payload, .. } = reader.message() {
            let is_text = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
            assert!(payload[6..].iter().all(is_text), "{payload:?}");
        }
    }
}

#[test]
fn a_reply_has_at_most_16_chunks_and_the_last_has_the_rest_as_data() {
    let data = patchwork();
    let scene = Scene::new(8 * MIB, &data);
    for mode in Mode::CHUNKED {
        let outcome = read(&mut scene.connect(mode), 0, 8 * MIB, 0);
        assert!(outcome.data == bytes_of(&data, 0, 8 * MIB), "{mode:?}");
        let (kinds, rest): (Vec<_>, _) = (outcome.chunks.iter().map(|c| c.0).collect(), 16);
        assert_eq!(kinds.len(), rest);
        let turns = [OFFSET_HOLE, OFFSET_DATA].repeat(8);
        assert_eq!(kinds, turns);
        let (_, pos, len) = outcome.chunks[15];
        assert_eq!(pos + len, 8 * MIB);
    }
}

#[test]
fn a_read_of_nothing_but_a_hole_is_one_chunk_whatever_its_length() {
    let scene = Scene::new(8 * MIB, &[(0, 64 * KIB)]);
    for mode in Mode::CHUNKED {
        let mut client = scene.connect(mode);
        for len in [1, 4096, 64 * KIB, 7 * MIB] {
            let outcome = read(&mut client, MIB, len, 0);
            assert_eq!(outcome.chunks, [(OFFSET_HOLE, MIB, len)]);
        }
    }
}

#[test]
fn a_hole_that_was_made_while_serving_is_left_out_too() {
    let scene = Scene::new(MIB, &[(0, MIB)]);
    let mut client = scene.connect(Mode::Structured);
    assert_eq!(read(&mut client, 0, MIB, 0).chunks, [(OFFSET_DATA, 0, MIB)]);
    assert_eq!(client.call(Request::of(TRIM, 256 * KIB, 256 * KIB)).error, 0);
    let outcome = read(&mut client, 0, MIB, 0);
    let wanted = [
        (OFFSET_DATA, 0, 256 * KIB),
        (OFFSET_HOLE, 256 * KIB, 256 * KIB),
        (OFFSET_DATA, 512 * KIB, 512 * KIB),
    ];
    assert_eq!(outcome.chunks, wanted);
    let data = [(0, 256 * KIB), (512 * KIB, 512 * KIB)];
    assert!(outcome.data == bytes_of(&data, 0, MIB));
}

/// proto.md, `NBD_CMD_READ`: "If this flag is set, the server MUST send at most one content chunk"
/// and, with data and holes in it, `NBD_REPLY_TYPE_OFFSET_DATA`; up to 65536 bytes it MUST not
/// refuse.
#[test]
fn nbd_must_dont_fragment_gets_one_data_chunk_with_the_zeros_in_it() {
    let data = patchwork();
    let scene = Scene::new(8 * MIB, &data);
    for mode in Mode::CHUNKED {
        let mut client = scene.connect(mode);
        for (pos, len) in [(0, 65536), (1000, 65536), (0, 8 * MIB), (6 * MIB, MIB)] {
            let outcome = read(&mut client, pos, len, DF);
            assert_eq!(outcome.chunks, [(OFFSET_DATA, pos, len)]);
            assert!(outcome.data == bytes_of(&data, pos, len));
        }
    }
}

/// proto.md, "Structured reply flags": `NBD_REPLY_FLAG_DONE` MUST be clear when more chunks are to
/// come, and MUST be set on the final one. [`Client::outcome`] reads up to it; this looks for more.
#[test]
fn nbd_must_only_the_last_chunk_is_marked_done_and_replies_keep_their_cookies() {
    let scene = Scene::new(8 * MIB, &patchwork());
    for mode in Mode::CHUNKED {
        let mut client = scene.connect(mode);
        let cookies: Vec<u64> =
            (0..32).map(|n| client.send(Request::of(READ, n * 64 * KIB, MIB))).collect();
        let mut answered = Vec::new();
        while answered.len() < cookies.len() {
            if let Message::Chunk { cookie, done: true, .. } = client.message() {
                assert!(cookies.contains(&cookie) && !answered.contains(&cookie));
                answered.push(cookie);
            }
        }
        // A message left over would be the next one here.
        assert_eq!(read(&mut client, 0, 512, 0).data.len(), 512);
    }
}

/// proto.md, `NBD_CMD_READ`: the server may reject reads beyond the maximum payload with
/// `NBD_EOVERFLOW`; without chunks any such request "will fail". Past the end it is `NBD_EINVAL`.
#[test]
fn nbd_should_a_read_beyond_the_maximum_payload_is_eoverflow_and_past_the_end_einval() {
    let scene = Scene::new(64 * MIB, &[(0, 4 * KIB)]);
    for mode in Mode::ALL {
        let mut client = scene.connect(mode);
        let too_long = if mode == Mode::Simple { EINVAL } else { EOVERFLOW };
        assert_eq!(read(&mut client, 4 * KIB, 32 * MIB, 0).data.len(), 32 << 20);
        let outcome = client.call(Request::of(READ, 0, 32 * MIB + 1));
        assert_eq!((outcome.error, outcome.data.len()), (too_long, 0));
        for (offset, length) in [(64 * MIB, 1), (0, 64 * MIB + 1), (u64::MAX, 2), (1 << 63, 0)] {
            assert_eq!(client.call(Request::of(READ, offset, length)).error, EINVAL);
        }
    }
}

/// proto.md, `NBD_CMD_READ`: content chunks MUST NOT overlap nor leave the range that was asked
/// for, each MUST describe at least one byte, and together they MUST cover all of it. The client
/// checks each; here the bytes are compared.
#[test]
fn nbd_must_the_chunks_of_a_read_cover_it_without_overlap() {
    let data = patchwork();
    let scene = Scene::new(5 * MIB, &data);
    for mode in Mode::CHUNKED {
        let mut client = scene.connect(mode);
        for n in 0..200 {
            let pos = n * 104_729 % (4 * MIB);
            let len = 1 + n * n * 7919 % MIB;
            let outcome = read(&mut client, pos, len, 0);
            assert!(outcome.data == bytes_of(&data, pos, len), "{mode:?}, {len} at {pos}");
        }
    }
}

#[test]
fn nbd_should_not_disconnect_for_a_read_of_nothing() {
    let scene = Scene::new(MIB, &[]);
    for mode in Mode::ALL {
        let outcome = read(&mut scene.connect(mode), 4096, 0, 0);
        assert_eq!((outcome.data, outcome.chunks), (vec![], vec![]));
    }
}
