//! `--vhost-user connect:PATH`: the server connects to a VMM that listens.
//!
//! Invariant: the VMM is this test, which asks for the features of the device.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use nowait_testkit::{BOUND, wait_for};

use crate::common::{MIB, Scratch, Server, refusal, text};
use crate::upgrade::Upgraded;

/// The next connection of the server.
fn connected(listener: &UnixListener) -> UnixStream {
    listener.set_nonblocking(true).expect("a socket");
    let (stream, _) = wait_for("a connection of the server", || listener.accept());
    stream.set_nonblocking(false).expect("a socket");
    stream.set_read_timeout(Some(BOUND)).expect("a bound");
    stream
}

/// Asks a device for its features: the message 1 of version 1 without a payload, answered by 8 bytes.
fn answers(stream: &mut UnixStream) {
    let message = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    stream.write_all(&message).expect("a server that takes messages");
    let mut answer = [0; 20];
    stream.read_exact(&mut answer).expect("an answer");
    let words = [1u32, 5, 8].map(u32::to_ne_bytes).concat();
    assert_eq!(answer[..12], words);
    let features = u64::from_ne_bytes(answer[12..].try_into().expect("8 bytes"));
    assert_ne!(features & 1 << 32, 0, "VIRTIO_F_VERSION_1");
}

#[test]
fn a_confined_server_connects_to_vmms_and_so_does_the_one_that_takes_over() {
    let scratch = Scratch::new();
    let socket = scratch.join("vmm");
    let place = format!("connect:{}", socket.display());
    let mut it = Upgraded::start("raw", &["--vhost-user", &place, "--sandbox", "on"]);
    it.connect().read(0, 512).expect("it serves although the VMM is not there yet");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let mut vmm = connected(&listener);
    answers(&mut vmm);
    it.upgrade();
    answers(&mut vmm);
    drop(vmm);
    let mut vmm = connected(&listener);
    answers(&mut vmm);
    drop((vmm, listener));
    // The VMM's socket is there, and nothing listens.
    it.upgrade();
    std::fs::remove_file(&socket).expect("a socket");
    let listener = UnixListener::bind(&socket).expect("a socket");
    answers(&mut connected(&listener));
    it.stop();
    assert!(socket.exists(), "it is the VMM's");
}

#[test]
fn a_server_that_only_connects_has_no_other_socket_and_says_where_it_connects() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let socket = scratch.join("vmm");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let place = format!("connect:{}", socket.display());
    let server = Server::start_by(&[], &["serve", text(&image), "--vhost-user", &place]);
    assert_eq!(server.ready_line().trim(), format!("serving vhost-user:{place}"));
    answers(&mut connected(&listener));
    server.terminate();
    let refused = refusal(&["serve", text(&image), "--vhost-user", &format!("other={place}")]);
    assert_eq!((refused.code, refused.error.contains("no image has the name 'other'")), (2, true));
}
