//! Signals from a terminal, a shell or a user: the server ends flushed, or continues.
//!
//! Invariant: every answered write is in the image after every signal but SIGKILL.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::{ends_with_test, output_of, wait_until};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::common::{MIB, NOWAIT, Scratch, Server, accepted, skip, text};

/// Bytes of a cluster of a qcow2 image.
const CLUSTER_BYTES: u64 = 64 << 10;
/// Writes that each need a new cluster.
const WRITES: u64 = 16;

/// A new qcow2 image.
fn qcow2(scratch: &Scratch) -> std::path::PathBuf {
    let image = scratch.join("disk.qcow2");
    accepted(&["create", text(&image), "16M", "--format", "qcow2"]);
    image
}

fn written(number: u64) -> Vec<u8> {
    vec![number as u8 + 1; CLUSTER_BYTES as usize]
}

fn write_all(server: &Server) {
    let mut client = server.connect();
    for number in 0..WRITES {
        client.write(number * CLUSTER_BYTES, &written(number)).expect("a write");
    }
}

fn assert_all_is_in(image: &Path) {
    let server = Server::start(image, &["--read-only"]);
    let mut client = server.connect();
    for number in 0..WRITES {
        let read = client.read(number * CLUSTER_BYTES, CLUSTER_BYTES as u32).expect("bytes");
        assert!(read == written(number), "write {number} is lost");
    }
    server.stop();
}

#[test]
fn int_term_and_quit_each_end_a_server_flushed_and_with_its_socket_removed() {
    for signal in [Signal::INT, Signal::TERM, Signal::QUIT] {
        let scratch = Scratch::new();
        let image = qcow2(&scratch);
        let mut server = Server::start(&image, &[]);
        write_all(&server);
        server.signal(signal);
        assert_ends_flushed(&mut server, signal);
        assert_all_is_in(&image);
    }
}

fn assert_ends_flushed(server: &mut Server, signal: Signal) {
    let status = server.wait();
    assert!(status.success(), "{signal:?}: {status}; it said: {}", server.log());
    assert_eq!(server.log(), "", "{signal:?}");
    assert!(!server.socket().exists(), "{signal:?}: the socket is left behind");
}

#[test]
fn a_terminal_that_closes_ends_its_server_flushed() {
    let scratch = Scratch::new();
    let image = qcow2(&scratch);
    let pid_file = scratch.join("pid");
    // script(1) runs the server at a terminal of its own. If the tests were started by nohup, the
    // server would inherit the ignored SIGHUP.
    let inside = r#"exec env --default-signal=HUP "$@" 2>&1"#;
    let command = format!(
        "set -- {NOWAIT} serve {} --pid-file {} --nbd unix:{}; {inside}",
        text(&image),
        text(&pid_file),
        text(&scratch.join("socket"))
    );
    let terminal = ends_with_test(&mut Command::new("script"))
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    let mut terminal = match terminal {
        Ok(terminal) => terminal,
        Err(error) => {
            skip(&format!("no script(1): {error}"));
            return;
        }
    };
    wait_until("the pid file", || pid_file.exists());
    let pid = std::fs::read_to_string(&pid_file).expect("the pid file").trim().parse().ok();
    let pid = pid.and_then(Pid::from_raw).expect("a pid");
    let mut client = Client::connect(&scratch.join("socket"), Mode::Simple).expect("a connection");
    client.write(0, &[1; 4096]).expect("a write");
    // The kernel hangs up the server, whose terminal is gone.
    terminal.kill().expect("script(1) runs");
    terminal.wait().expect("its end");
    wait_until("the server's end", || test_kill_process(pid).is_err());
    assert!(!scratch.join("socket").exists(), "the socket is left behind");
    assert!(!pid_file.exists(), "the PID file is left behind");
    accepted(&["check", text(&image)]);
    let back = scratch.join("back");
    accepted(&["copy", text(&image), text(&back)]);
    let mut first = [0; 4096];
    std::fs::File::open(&back).and_then(|mut file| file.read_exact(&mut first)).expect("bytes");
    assert_eq!(first, [1; 4096]);
}

#[test]
fn a_hangup_without_a_terminal_has_the_sizes_read_again_and_requests_go_on() {
    let scratch = Scratch::new();
    let image = scratch.join("disk.raw");
    std::fs::File::create(&image).and_then(|file| file.set_len(4 * MIB)).expect("an image");
    let server = Server::start_under(&["setsid", "env", "--default-signal=HUP"], &image, &["-v"]);
    let mut before = server.connect();
    before.write(4 * MIB - 4096, &[1; 4096]).expect("a write");
    std::fs::File::options().write(true).open(&image).unwrap().set_len(8 * MIB).expect("growth");
    server.signal(Signal::HUP);
    wait_until("the new size", || server.log().contains("has 8388608 bytes now, it had 4194304"));
    before.write(3 * MIB, &[2; 4096]).expect("an old client's write");
    let mut after = server.connect();
    after.write(8 * MIB - 4096, &[3; 4096]).expect("a write into what is new");
    assert_eq!(after.read(8 * MIB - 4096, 4096).expect("bytes"), [3; 4096]);
    assert_eq!(after.read(4 * MIB - 4096, 4096).expect("bytes"), [1; 4096]);
    server.stop();
}

#[test]
fn a_signal_sent_several_times_in_a_row_ends_a_server_flushed() {
    let scratch = Scratch::new();
    let image = qcow2(&scratch);
    let mut server = Server::start(&image, &[]);
    write_all(&server);
    (0..3).for_each(|_| server.signal(Signal::INT));
    let status = server.wait();
    assert!(status.success(), "{status}; it said: {}", server.log());
    assert_eq!(server.log(), "");
    assert_all_is_in(&image);
}

#[test]
fn ignored_signals_do_not_end_a_server() {
    let scratch = Scratch::new();
    let image = qcow2(&scratch);
    let server = Server::start(&image, &[]);
    for signal in
        [Signal::USR1, Signal::USR2, Signal::ALARM, Signal::VTALARM, Signal::PROF, Signal::IO]
    {
        server.signal(signal);
        write_all(&server);
    }
    server.stop();
    assert_all_is_in(&image);
}

#[test]
fn a_server_started_by_nohup_continues_after_a_hangup() {
    let scratch = Scratch::new();
    let image = qcow2(&scratch);
    let wrapper = ["sh", "-c", r#"trap "" HUP; exec "$@""#, "sh"];
    let server = Server::start_under(&wrapper, &image, &[]);
    server.signal(Signal::HUP);
    write_all(&server);
    server.stop();
    assert_all_is_in(&image);
}

#[test]
fn a_copy_ends_cleanly_on_each_of_the_signals_and_continues_under_nohup() {
    let scratch = Scratch::new();
    let source = scratch.random("source", 64 * MIB, 1);
    let target = scratch.join("target");
    let partial = scratch.join("target.partial");
    for (trap, signal) in [
        ("", Signal::HUP),
        ("", Signal::QUIT),
        ("", Signal::TERM),
        (r#"trap "" HUP; "#, Signal::HUP),
    ] {
        let copy = ends_with_test(&mut Command::new("sh"))
            .args(["-c", &format!(r#"{trap}exec "$@""#), "sh", NOWAIT, "copy"])
            .args([&source, &target])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("sh");
        wait_until("the begin of a copy", || partial.exists() || target.exists());
        // The process may have ended already.
        let _ = kill_process(Pid::from_child(&copy), signal);
        let output = output_of(copy);
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!partial.exists(), "{signal:?}: an unfinished copy is left");
        match output.status.code() {
            Some(0) => std::fs::remove_file(&target).expect("the copy"),
            Some(1) => {
                assert!(trap.is_empty(), "nohup's copy was ended");
                assert!(printed.starts_with("nowait: interrupted"), "{printed}");
            }
            _ => panic!("{signal:?}: {}; it said: {printed}", output.status),
        }
    }
}
