//! A server that is upgraded ends for one reason, and leaves its sockets to the one that serves.
//!
//! Invariant: a server with one connection ends with it, however often it was upgraded.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use nowait_testkit::{BOUND, PYTHON, skip, wait_until};

use crate::common::{Finished, MIB, Scratch, Server, text};
use crate::upgrade::{Upgraded, runs};

/// Connects to the socket at the first argument, as descriptor 9 of the program in the others.
const CONNECTED: &str = r#"
import os, socket, sys
vmm = socket.socket(socket.AF_UNIX)
vmm.connect(sys.argv[1])
os.dup2(vmm.fileno(), 9, inheritable=True)
os.execvp(sys.argv[2], sys.argv[2:])
"#;

/// Asks for the features of a device, as a VMM does.
fn ask_features(vmm: &mut UnixStream) {
    let message = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    vmm.write_all(&message).expect("a device");
    let mut answer = [0; 20];
    vmm.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer[8..12], 8u32.to_ne_bytes());
}

#[test]
fn an_upgraded_server_of_one_connection_leaves_its_sockets_to_the_one_that_serves_and_ends_with_its_vmm()
 {
    if !Path::new(PYTHON).is_file() {
        skip("no python3");
        return;
    }
    let scratch = Scratch::new();
    let (image, control, path) =
        (scratch.sparse("disk", MIB), scratch.join("control"), scratch.join("vmm"));
    let listener = UnixListener::bind(&path).expect("a socket");
    let address = format!("unix:{}", control.display());
    let options = ["--vhost-user", "fd:9", "--control", &address, "--verbose"];
    let server = Server::start_by(
        &[PYTHON, "-c", CONNECTED, text(&path)],
        &[&["serve", text(&image)], &options[..]].concat(),
    );
    let mut vmm = listener.accept().expect("a connection").0;
    vmm.set_read_timeout(Some(BOUND)).expect("a timeout");
    let mut it = Upgraded::of(server, &control, scratch);
    ask_features(&mut vmm);
    for _ in 0..3 {
        let before = it.process();
        it.upgrade();
        wait_until("the end of the process before", || !runs(before));
        it.command(&["status"]).succeeds();
        ask_features(&mut vmm);
    }
    let process = it.process();
    drop(vmm);
    wait_until("the end with the VMM", || !runs(process));
    assert!(!control.exists(), "a socket is left");
}
