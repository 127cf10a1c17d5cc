//! Two exports of one server, and two sockets.
//!
//! Invariant: the exports differ in every byte that is read.

use nowait_testkit::nbd::{Mode, READ};

use crate::client::{self, Request};
use crate::scene::{MIB, OTHER, OTHER_BYTE, Scene, byte_at, bytes_at};

#[test]
fn a_client_is_served_the_export_that_it_chooses() {
    let scene = Scene::with_other(MIB, &[(0, MIB)]);
    for mode in Mode::ALL {
        let mut default = scene.connect(mode);
        let mut other = client::connect_to(scene.socket(), mode, OTHER, &[]);
        for _ in 0..3 {
            let read = Request::of(READ, 0, 4096);
            assert_eq!(default.call(read).data, bytes_at(0..4096));
            assert_eq!(other.call(read).data, [OTHER_BYTE; 4096]);
        }
    }
}

/// The bytes after the choice, whole requests or not, move with the connection to the other thread.
#[test]
fn requests_sent_with_the_choice_of_an_export_are_for_that_export() {
    let scene = Scene::with_other(MIB, &[(0, MIB)]);
    for name in ["", OTHER] {
        let mut pattern = client::greeted(scene.socket(), Mode::Simple);
        let reads: Vec<u8> =
            (0..3).flat_map(|_| pattern.header(Request::of(READ, 0, 512))).collect();
        for cut in [reads.len(), reads.len() - 1, 28, 1] {
            let mut client = client::connect_to(scene.socket(), Mode::Simple, name, &reads[..cut]);
            client.take_over(&pattern);
            client.send_bytes(&reads[cut..]).unwrap();
            for _ in 0..3 {
                let data = client.outcome().1.data;
                assert_eq!(data, [if name == OTHER { OTHER_BYTE } else { byte_at(0) }; 512]);
            }
        }
    }
}

#[test]
fn all_sockets_of_a_server_lead_to_the_same_export() {
    let scene = Scene::with_other(MIB, &[(0, MIB)]);
    let beside = scene.socket_beside();
    for _ in 0..2 {
        for socket in [scene.socket(), &beside] {
            let mut client = client::connect(socket, Mode::Simple);
            assert_eq!(client.call(Request::of(READ, 0, 1)).data, [byte_at(0)]);
        }
    }
}
