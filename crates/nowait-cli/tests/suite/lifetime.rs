//! The end of a server with its last client or its parent, PID files, and qemu-nbd's option names.
//!
//! Invariant: after any end, written data is in the image and no socket or PID file is left.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Finished, MIB, NOWAIT, Scratch, Server, refusal, require_tool, text, tool};
use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::wait_until;

#[test]
fn a_server_ends_flushed_with_its_last_client_and_not_with_one_that_only_connected() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let mut server = Server::start(&image, &["--exit-with-last-client"]);
    drop(UnixStream::connect(server.socket()).expect("a connection"));
    let (mut first, second) = (server.connect(), server.connect());
    first.write(0, b"kept").expect("a write");
    drop(first);
    let mut third = server.connect();
    drop(second);
    assert_eq!(third.read(0, 4).expect("bytes"), b"kept");
    drop(third);
    let status = server.wait();
    assert!(status.success(), "{status}; it said: {}", server.log());
    assert!(!server.socket().exists(), "the socket is left behind");
    assert_eq!(&fs::read(&image).expect("the image")[..4], b"kept");
}

#[test]
fn a_server_ends_flushed_with_its_parent_and_removes_its_pid_file() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let (pid, socket) = (scratch.join("pid"), scratch.join("socket"));
    let mut parent = Command::new("sh")
        .args(["-c", r#""$0" "$@" & wait"#, NOWAIT, "serve", text(&image), "-k", text(&socket)])
        .args(["--exit-with-parent", "--pid-file", text(&pid)])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("a shell");
    wait_until("a pid file", || pid.exists());
    let number = fs::read_to_string(&pid).expect("a pid file");
    let process = format!("/proc/{}", number.strip_suffix('\n').expect("a line"));
    let name = fs::read_to_string(format!("{process}/comm")).expect("the server's process");
    assert_eq!(name, "nowait\n");
    let mut client = Client::connect(&socket, Mode::Structured).expect("a connection");
    client.write(0, b"kept").expect("a write");
    parent.kill().expect("a child");
    parent.wait().expect("a child");
    wait_until("the end of the server", || !pid.exists() && !socket.exists());
    assert_eq!(&fs::read(&image).expect("the image")[..4], b"kept");
    // The image is unlocked and can be served again.
    wait_until("the end of its process", || !Path::new(&process).exists());
    Server::start(&image, &[]).stop();
}

#[test]
fn a_pid_file_holds_the_servers_number_while_it_serves_and_is_removed_at_the_end() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let pid = scratch.join("pid");
    fs::write(&pid, "an older one").expect("a file");
    let server = Server::start(&image, &["--json", "--pid-file", text(&pid)]);
    let number = fs::read_to_string(&pid).expect("a pid file");
    assert!(number.trim().parse::<u32>().is_ok() && number.ends_with('\n'), "{number:?}");
    server.stop();
    // Only the image is left.
    assert_eq!(fs::read_dir(scratch.path()).expect("a directory").count(), 1);
    let missing = scratch.join("missing/pid");
    refusal(&["serve", text(&image), "-k", text(&scratch.join("s")), "--pid-file", text(&missing)])
        .says(&["missing/pid", "its directory does not exist"]);
}

#[test]
fn a_command_line_of_qemu_nbd_serves_the_same() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let socket = scratch.join("socket");
    let qemu_nbd = ["-t", "-r", "-e", "4", "-x", "name", "-D", "a disk", "-f", "raw", "-A"];
    let server = [&["serve", text(&image), "-k", text(&socket)][..], &qemu_nbd].concat();
    let server = Server::start_by(&[], &server);
    assert_eq!(server.uri(), format!("nbd+unix:///name?socket={}", socket.display()));
    if require_tool("nbdinfo") {
        let printed = tool("nbdinfo").arg(server.uri()).succeeds();
        assert!(printed.contains("description: a disk"), "{printed}");
        assert!(printed.contains("is_read_only: true"), "{printed}");
    }
    server.stop();
    for (arguments, way_out) in [
        (&["serve", "-c", "/dev/nbd0", text(&image)][..], "nbd-client -unix"),
        (&["serve", "-d", "/dev/nbd0"], "nbd-client -d"),
        (&["serve", "-p", "10809", text(&image)], "--bind HOST"),
    ] {
        let refused = refusal(arguments);
        assert_eq!((refused.code, refused.error.lines().count()), (2, 1), "{}", refused.error);
        assert!(refused.error.contains(way_out), "{}", refused.error);
    }
}
