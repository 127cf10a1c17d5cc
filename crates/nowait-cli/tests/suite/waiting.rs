//! A server that takes connections and says nothing: it is named while it is waited for.
//!
//! Invariant: the line of the wait is the first one on standard error.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Stdio};

use crate::common::{MIB, NOWAIT, Scratch, skip, text};
use nowait_testkit::ends_with_test;

/// The first line on standard error of `nowait` with `arguments`, which is ended then.
fn first_line(arguments: &[&str], scratch: &Scratch) -> String {
    let mut command = Command::new(NOWAIT);
    command.args(arguments).current_dir(scratch.path());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = ends_with_test(&mut command).spawn().expect("nowait");
    let mut line = String::new();
    let stderr = child.stderr.take().expect("a pipe");
    BufReader::new(stderr).read_line(&mut line).expect("a line");
    child.kill().expect("a child");
    child.wait().expect("a child");
    line
}

#[test]
fn a_server_that_says_nothing_is_named_while_it_is_waited_for() {
    // The kernel completes the handshakes of TCP, and no one accepts.
    let Ok(silent) = TcpListener::bind("127.0.0.1:0") else {
        skip("no loopback network");
        return;
    };
    let server = silent.local_addr().expect("an address").to_string();
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let socket = format!("unix:{}", text(&scratch.join("socket")));
    let (export, object) = (format!("nbd://{server}/"), format!("https://{server}/disk.img"));
    let serve = ["serve", "--nbd", &socket, "--read-only"];
    std::thread::scope(|scope| {
        for arguments in [
            vec!["info", &export],
            vec!["info", &object],
            vec!["map", &object],
            vec!["copy", &export, "copy.img"],
            vec!["copy", &object, "other.img"],
            vec!["copy", text(&image), &export],
            [&serve[..], &[&export]].concat(),
            [&serve[..], &[&object]].concat(),
        ] {
            let (server, scratch) = (&server, &scratch);
            scope.spawn(move || {
                let line = first_line(&arguments, scratch);
                assert_eq!(line, format!("nowait: waiting for {server} ...\n"), "{arguments:?}");
            });
        }
    });
}
