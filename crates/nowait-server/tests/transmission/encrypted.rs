//! Connections by TLS (NBD proto.md, "TLS support"): requests are served as without TLS, and the
//! end of a session is announced by close_notify.
//!
//! Invariant: expected bytes are read from the image, bypassing the server.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;

use rustls::pki_types::CertificateDer;

use nowait_testkit::nbd::{
    BLOCK_STATUS, DISC, FLUSH, Mode, OPT_GO, OPT_STARTTLS, READ, WRITE_ZEROES, option_bytes,
};

use crate::client::{self, Client, Request};
use crate::scene::{KIB, MIB, Scene, bytes_at, inverted_at};

/// A TLS record of an alert, and the level of one that ends the session (RFC 8446, section 6).
const ALERT: u8 = 21;
const FATAL: u8 = 2;

fn connect(scene: &Scene, mode: Mode, cert: &CertificateDer<'static>) -> Client {
    client::connect_encrypted(scene.socket(), mode, cert)
}

fn image(scene: &Scene, pos: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    scene.file().read_exact_at(&mut bytes, pos).unwrap();
    bytes
}

#[test]
fn requests_by_tls_are_served_as_those_without_beside_them() {
    for mode in Mode::ALL {
        let (scene, cert) = Scene::with_tls(16 * MIB, &[(0, 8 * MIB)]);
        let mut plain = scene.connect(mode);
        let mut client = connect(&scene, mode, &cert);
        // Shorter and longer than a record, than one receive, than a fragment.
        for (pos, len) in [(0, 1), (777, 30_001), (MIB, 300 * KIB), (3 * MIB + 5, 2 * MIB + 77)] {
            let bytes = inverted_at(pos..pos + len);
            assert_eq!(client.call(Request::write(mode, pos, &bytes)).error, 0);
            assert!(image(&scene, pos, len as usize) == bytes, "{mode:?}, {len} at {pos}");
            let read = Request::of(READ, pos, len);
            assert!(client.call(read).data == bytes, "{mode:?}, {len} at {pos}");
            assert!(plain.call(read).data == bytes, "{mode:?}, {len} at {pos}");
        }
        assert_eq!(client.call(Request::of(WRITE_ZEROES, MIB, 512)).error, 0);
        assert_eq!(client.call(Request::of(READ, MIB, 512)).data, [0; 512]);
        if mode != Mode::Simple {
            assert_eq!(client.call(Request::of(BLOCK_STATUS, 0, MIB)).status.len(), 1);
        }
    }
}

#[test]
fn many_requests_by_tls_are_answered_even_if_the_client_reads_late() {
    const READS: usize = 40;
    let (scene, cert) = Scene::with_tls(4 * MIB, &[(0, 4 * MIB)]);
    let mut client = connect(&scene, Mode::Simple, &cert);
    let reads: Vec<u8> =
        (0..READS).flat_map(|_| client.header(Request::of(READ, 512, MIB))).collect();
    client.send_bytes(&reads).unwrap();
    let expected = bytes_at(512..512 + MIB);
    for _ in 0..READS {
        let (_, outcome) = client.outcome();
        assert!(outcome.error == 0 && outcome.data == expected);
    }
}

/// NBD proto.md, `NBD_CMD_DISC` and "TLS support"; RFC 8446, section 6.1: without close_notify a
/// client cannot tell an end from a truncation.
#[test]
fn a_client_that_disconnects_gets_all_replies_and_close_notify() {
    let (scene, cert) = Scene::with_tls(MIB, &[(0, MIB)]);
    for by_request in [true, false] {
        let mut client = connect(&scene, Mode::Simple, &cert);
        for _ in 0..3 {
            client.send(Request::of(READ, 4096, 70_000));
        }
        client.send(Request::of(FLUSH, 0, 0));
        match by_request {
            true => drop(client.send(Request::of(DISC, 0, 0))),
            false => client.stream.send_close_notify(),
        }
        for _ in 0..4 {
            assert_eq!(client.outcome().1.error, 0);
        }
        // Without close_notify this would be an error.
        assert_eq!(client.stream.read(&mut [0]).unwrap(), 0);
        assert_eq!(client.stream.socket().read(&mut [0]).unwrap(), 0);
    }
}

/// NBD proto.md, "TLS support": the bytes after `NBD_OPT_STARTTLS` are TLS, even if sent with it.
#[test]
fn bytes_after_starttls_are_tls_or_end_the_connection() {
    let (scene, cert) = Scene::with_tls(MIB, &[(0, MIB)]);
    let go = option_bytes(OPT_GO, &[0; 6]);
    let mut client = client::greeted(scene.socket(), Mode::Simple);
    client.stream.write_all(&[option_bytes(OPT_STARTTLS, &[]), go].concat()).unwrap();
    let mut answer = Vec::new();
    let _ = client.stream.read_to_end(&mut answer);
    // The acknowledgement, which is 20 bytes, and one alert.
    assert_eq!((answer[20], answer[25]), (ALERT, FATAL), "{answer:?}");
    assert_eq!(answer.len(), 27);
    assert_eq!(connect(&scene, Mode::Simple, &cert).call(Request::of(READ, 0, 512)).error, 0);
}

#[test]
fn a_client_that_omits_close_notify_or_tls_loses_only_its_own_connection() {
    let (scene, cert) = Scene::with_tls(MIB, &[(0, MIB)]);
    let mut other = connect(&scene, Mode::Simple, &cert);
    let bytes = vec![7; 64 << 10];
    for in_clear in [true, false] {
        let mut client = connect(&scene, Mode::Simple, &cert);
        let write = client.header(Request::write(Mode::Simple, 0, &bytes));
        client.send_bytes(&[&write[..], &bytes[..1000]].concat()).unwrap();
        if in_clear {
            client.stream.socket().write_all(&bytes[1000..]).unwrap();
            assert!(client.stream.read_to_end(&mut Vec::new()).is_err());
        }
        drop(client);
        let stored = other.call(Request::of(READ, 0, bytes.len() as u64)).data;
        assert!(stored == bytes_at(0..bytes.len() as u64));
    }
}
