//! Writes that are split because another connection is served beside them.
//!
//! Invariant: expected bytes are read from the image, bypassing the server.

use std::os::unix::fs::FileExt;

use nowait_testkit::nbd::{FLUSH, FUA, Mode, READ};

use crate::client::{Client, Request};
use crate::scene::{KIB, MIB, Scene, bytes_at};

const MODES: [Mode; 3] = [Mode::Simple, Mode::Structured, Mode::Extended];

fn payload(seed: u64, len: u64) -> Vec<u8> {
    (0..len).map(|at| ((at / 7 + at * seed) % 253) as u8).collect()
}

fn assert_served(bystander: &mut Client) {
    let outcome = bystander.call(Request::of(READ, 4096, 4096));
    assert_eq!(outcome.error, 0);
    assert!(outcome.data == bytes_at(4096..8192));
}

#[test]
fn long_writes_beside_another_connection_are_written_whole_and_answered_once_each() {
    for mode in MODES {
        let scene = Scene::new(16 * MIB, &[(0, MIB)]);
        let mut bystander = scene.connect(mode);
        let mut writer = scene.connect(mode);
        // Aligned, unaligned at both ends, into a hole, durable.
        let ranges = [
            (2 * MIB, MIB, 0),
            (5 * MIB + 513, 3 * MIB + 77, 0),
            (9 * MIB, 256 * KIB + 1, 0),
            (12 * MIB, 2 * MIB, FUA),
        ];
        let payloads: Vec<_> = (1..).zip(ranges).map(|(n, (_, len, _))| payload(n, len)).collect();
        let mut cookies = Vec::new();
        for ((offset, _, flags), bytes) in ranges.into_iter().zip(&payloads) {
            cookies.push(writer.send(Request::write(mode, offset, bytes).with(flags)));
            assert_served(&mut bystander);
        }
        cookies.push(writer.send(Request::of(FLUSH, 0, 0)));
        while !cookies.is_empty() {
            let (cookie, outcome) = writer.outcome();
            assert_eq!(outcome.error, 0);
            let index = cookies.iter().position(|sent| *sent == cookie).expect("asked for");
            cookies.swap_remove(index);
        }
        for ((offset, len, _), bytes) in ranges.into_iter().zip(&payloads) {
            let mut written = vec![0; len as usize];
            scene.file().read_exact_at(&mut written, offset).unwrap();
            assert!(written == *bytes, "{mode:?}: {len} bytes at {offset}");
        }
        let mut around = vec![0; 513];
        scene.file().read_exact_at(&mut around, 5 * MIB).unwrap();
        assert!(around.iter().all(|byte| *byte == 0), "before an odd write");
    }
}

#[test]
fn a_client_that_disconnects_in_the_middle_of_a_long_write_delays_no_other_client() {
    let scene = Scene::new(16 * MIB, &[(0, MIB)]);
    let mut bystander = scene.connect(Mode::Simple);
    for sent in [0, 1, 256 * KIB, 700 * KIB] {
        let mut writer = scene.connect(Mode::Simple);
        let bytes = payload(3, 2 * MIB);
        let header = writer.header(Request::write(Mode::Simple, 4 * MIB, &bytes));
        writer.send_bytes(&header).unwrap();
        writer.send_bytes(&bytes[..sent as usize]).unwrap();
        assert_served(&mut bystander);
        drop(writer);
        assert_served(&mut bystander);
    }
    let mut writer = scene.connect(Mode::Simple);
    let bytes = payload(5, 2 * MIB);
    assert_eq!(writer.call(Request::write(Mode::Simple, 4 * MIB, &bytes)).error, 0);
    let mut written = vec![0; bytes.len()];
    scene.file().read_exact_at(&mut written, 4 * MIB).unwrap();
    assert!(written == bytes);
}
