//! A server that stops serving for a while, in the middle of what its clients send and receive.
//!
//! Invariant: a client sees a pause and nothing else. Expected bytes are read from the image,
//! bypassing the server.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nowait_testkit::nbd::{BLOCK_STATUS, DISC, FLUSH, Mode, READ};

use crate::client::{self, Client, Request};
use crate::scene::{KIB, MIB, OTHER, OTHER_BYTE, Scene, bytes_at};

const TIMEOUT: Duration = Duration::from_secs(20);

fn payload(seed: u64, len: u64) -> Vec<u8> {
    (0..len).map(|at| ((at / 7 + at * seed) % 253) as u8).collect()
}

fn image(scene: &Scene, pos: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    scene.file().read_exact_at(&mut bytes, pos).unwrap();
    bytes
}

/// Parks the server and has it go on.
fn park(scene: &Scene) {
    let parked = scene.exports().pause(TIMEOUT).unwrap();
    drop(parked);
}

#[test]
fn a_write_that_is_received_in_pieces_is_written_whole_wherever_the_pause_comes() {
    for mode in Mode::ALL {
        let scene = Scene::new(16 * MIB, &[(0, MIB)]);
        // Beside another connection long writes are split.
        let mut bystander = scene.connect(mode);
        let mut writer = scene.connect(mode);
        let cuts = [1, 27, 28, 32, 33, 100, 4096, 256 * KIB + 5, 700 * KIB, MIB + 31];
        for (n, cut) in (1..).zip(cuts) {
            let (bytes, at) = (payload(n, MIB), MIB + n * 512 + 7);
            let mut message = writer.header(Request::write(mode, at, &bytes));
            message.extend_from_slice(&bytes);
            let (first, rest) = message.split_at(cut.min(message.len() as u64 - 1) as usize);
            writer.send_bytes(first).unwrap();
            // The reads have been received when the bystander's answer is there, or soon after:
            // the pause comes at a place that varies.
            assert_eq!(bystander.call(Request::of(READ, 4096, 4096)).error, 0);
            park(&scene);
            writer.send_bytes(rest).unwrap();
            let (_, outcome) = writer.outcome();
            assert_eq!(outcome.error, 0, "{mode:?}, cut at {cut}");
            assert!(image(&scene, at, bytes.len()) == bytes, "{mode:?}, cut at {cut}");
        }
    }
}

#[test]
fn answers_that_a_client_has_not_read_are_whole_after_a_pause() {
    const READS: u64 = 24;
    for mode in Mode::ALL {
        let scene = Scene::new(32 * MIB, &[(0, 8 * MIB)]);
        let mut reader = scene.connect(mode);
        // More than the socket's buffers hold.
        let sent: Vec<_> =
            (0..READS).map(|n| (reader.send(Request::of(READ, n * 997, MIB)), n * 997)).collect();
        for _ in 0..3 {
            park(&scene);
        }
        let mut answered = 0;
        for _ in 0..READS {
            let (cookie, outcome) = reader.outcome();
            let (_, at) = sent.iter().find(|(one, _)| *one == cookie).expect("it was asked");
            assert_eq!(outcome.error, 0);
            let expected = bytes_at(*at..at + MIB);
            assert!(outcome.data == expected, "{mode:?} at {at}");
            answered += 1;
        }
        assert_eq!(answered, READS);
    }
}

/// libnbd shuts a connection down so: it waits until the server has closed it.
#[test]
fn a_client_that_has_disconnected_gets_its_answers_and_the_end_after_a_pause() {
    const READS: u64 = 24;
    for mode in Mode::ALL {
        let scene = Scene::new(32 * MIB, &[(0, 8 * MIB)]);
        let mut client = scene.connect(mode);
        for n in 0..READS {
            client.send(Request::of(READ, n * 997, MIB));
        }
        client.send(Request::of(DISC, 0, 0));
        // All requests have been received when those of another client are answered, or soon after.
        assert_eq!(scene.connect(mode).call(Request::of(READ, 0, 512)).error, 0);
        for _ in 0..3 {
            park(&scene);
        }
        for _ in 0..READS {
            assert_eq!(client.outcome().1.data.len() as u64, MIB);
        }
        assert!(client.is_closed(), "{mode:?}");
    }
}

#[test]
fn clients_under_load_get_every_answer_once_through_many_pauses() {
    const PAUSES: usize = 30;
    for mode in Mode::ALL {
        let (scene, cert) = Scene::with_tls(16 * MIB, &[(0, 16 * MIB)]);
        let over = AtomicBool::new(false);
        let load = &|client: &mut Client, region: u64| {
            let mut round = 0;
            // A thread that begins late works without pauses.
            while round == 0 || !over.load(Ordering::Relaxed) {
                round += 1;
                let (bytes, at) = (payload(round % 250, 40_000), region + round % 16 * 50_000);
                let mut waiting: Vec<_> = (0..16)
                    .map(|n| client.send(Request::of(READ, region + MIB + n * 4096, 4096)))
                    .collect();
                waiting.push(client.send(Request::write(mode, at, &bytes)));
                while !waiting.is_empty() {
                    let (cookie, outcome) = client.outcome();
                    let found = waiting.iter().position(|one| *one == cookie);
                    waiting.swap_remove(found.expect("an answer to one that waits"));
                    assert_eq!(outcome.error, 0);
                }
                assert!(client.call(Request::of(READ, at, 40_000)).data == bytes);
            }
            assert_eq!(client.call(Request::of(FLUSH, 0, 0)).error, 0);
        };
        let mut clients = [
            scene.connect(mode),
            scene.connect(mode),
            client::connect_encrypted(scene.socket(), mode, &cert),
        ];
        std::thread::scope(|scope| {
            let with_region = clients.iter_mut().zip([0, 4 * MIB, 8 * MIB]);
            let loads: Vec<_> = with_region
                .map(|(client, region)| scope.spawn(move || load(client, region)))
                .collect();
            for _ in 0..PAUSES {
                park(&scene);
                // New clients are accepted, too.
                let mut late = scene.connect(mode);
                assert_eq!(late.call(Request::of(READ, 15 * MIB, 512)).error, 0);
            }
            over.store(true, Ordering::Relaxed);
            loads.into_iter().for_each(|load| load.join().unwrap());
        });
    }
}

#[test]
fn a_client_that_connects_or_chooses_an_export_during_a_pause_is_served_after_it() {
    let scene = Scene::with_other(MIB, &[(0, MIB)]);
    let mut of_other = client::connect_to(scene.socket(), Mode::Structured, OTHER, &[]);
    let parked = scene.exports().pause(TIMEOUT).unwrap();
    assert!(scene.exports().pause(TIMEOUT).is_err(), "it is parked");
    let sent = of_other.send(Request::of(READ, 0, 512));
    let connecting = std::thread::spawn({
        let socket = scene.socket().to_owned();
        move || client::connect_to(&socket, Mode::Structured, OTHER, &[])
    });
    std::thread::sleep(Duration::from_millis(30));
    assert!(!connecting.is_finished());
    drop(parked);
    let (cookie, outcome) = of_other.outcome();
    assert_eq!((cookie, outcome.data), (sent, vec![OTHER_BYTE; 512]));
    let mut late = connecting.join().unwrap();
    assert_eq!(late.call(Request::of(READ, 0, 512)).data, vec![OTHER_BYTE; 512]);
    assert_eq!(late.call(Request::of(BLOCK_STATUS, 0, MIB)).error, 0);
}
