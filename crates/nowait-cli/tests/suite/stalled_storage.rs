//! A server that is stopped for a while, and storage that does not answer for a while or ever.
//!
//! Invariant: every stopped process is resumed or killed, even when a test fails.

use std::fs;
use std::ops::Range;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process;
use std::thread;
use std::time::Duration;

use nowait_testkit::{BOUND, Running, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{KIB, MIB, Scratch, Server, require_fuse, require_tool, tool};
use crate::log_messages::await_line;
use nowait_testkit::nbd::{Client, Command};

const STEP: Duration = Duration::from_millis(20);
/// The length of a standstill: long enough for errors to show.
const STANDSTILL: Duration = Duration::from_millis(500);
const BLOCK_BYTES: u32 = 64 * KIB as u32;

fn block(number: u64) -> Vec<u8> {
    vec![number as u8 + 1; BLOCK_BYTES as usize]
}

/// Writes its own blocks, several in flight, and reads each back.
fn write_and_read_back(mut client: Client, blocks: Range<u64>) {
    let offset = |number: u64| number * u64::from(BLOCK_BYTES);
    for batch in blocks.clone().collect::<Vec<_>>().chunks(4) {
        for &number in batch {
            let write = Command::Write { offset: offset(number), data: block(number), fua: false };
            client.send(&write).expect("a request");
        }
        for _ in batch {
            client.receive().expect("an answer").1.expect("a write");
        }
    }
    for number in blocks {
        let read = client.read(offset(number), BLOCK_BYTES).expect("bytes");
        assert!(read == block(number), "block {number}");
    }
}

#[test]
fn a_server_that_is_stopped_and_resumed_under_load_answers_every_request() {
    const CLIENTS: u64 = 3;
    const BLOCKS: u64 = 40;
    for extra in [&[][..], &["--queue", "threads"]] {
        let scratch = Scratch::new();
        let image = scratch.sparse("disk.img", CLIENTS * BLOCKS * u64::from(BLOCK_BYTES));
        let server = Server::start(&image, extra);
        // The first requests are sent to a stopped server.
        let clients: Vec<_> = (0..CLIENTS).map(|_| server.connect()).collect();
        server.signal(Signal::STOP);
        let workers = (0..).zip(clients).map(|(number, client)| {
            let blocks = number * BLOCKS..(number + 1) * BLOCKS;
            thread::spawn(move || write_and_read_back(client, blocks))
        });
        let workers: Vec<_> = workers.collect();
        thread::sleep(STANDSTILL);
        while workers.iter().any(|worker| !worker.is_finished()) {
            server.signal(Signal::CONT);
            thread::sleep(STEP);
            server.signal(Signal::STOP);
            thread::sleep(STEP);
        }
        server.signal(Signal::CONT);
        for worker in workers {
            worker.join().expect("a client that got all it asked for");
        }
        server.stop();
    }
}

/// An image on a file system that is served by a process that can be stopped.
struct Stoppable {
    storage: Running,
    _mount: Running,
    image: PathBuf,
    _scratch: Scratch,
}

impl Stoppable {
    /// `None`, and a message, where a tool is missing.
    fn new() -> Option<Self> {
        let there =
            ["nbdkit", "nbdfuse", "fusermount3"].into_iter().all(require_tool) && require_fuse();
        if !there {
            return None;
        }
        let scratch = Scratch::new();
        let (socket, image) = (scratch.join("storage"), scratch.sparse("disk.img", 0));
        let mut nbdkit = process::Command::new("nbdkit");
        let storage = Running::start(nbdkit.args(["-f", "-U"]).arg(&socket).args(["memory", "4M"]));
        wait_until("nbdkit listens", || socket.exists());
        let mut nbdfuse = process::Command::new("nbdfuse");
        let mount = Running::start(nbdfuse.arg(&image).arg("--unix").arg(&socket));
        wait_until("the image is mounted", || {
            fs::metadata(&image).is_ok_and(|image| image.len() == 4 * MIB)
        });
        Some(Self { storage, _mount: mount, image, _scratch: scratch })
    }

    /// Stops the storage until the returned value is dropped.
    fn stop(&self) -> StoodStill {
        let storage = Pid::from_child(&self.storage.0);
        kill_process(storage, Signal::STOP).expect("storage to signal");
        // SIGSTOP takes effect later: until each thread has stopped, a request may still be
        // answered.
        wait_until("the storage stands still", || is_stopped(storage));
        StoodStill(storage)
    }

    /// A server of the image, started with `extra`, and a client whose write of `block(1)` to the
    /// first block is unanswered because the storage stands still. Before, that block is
    /// `block(0)`.
    fn server_with_unanswered_write(&self, extra: &[&str]) -> (Server, Client, StoodStill) {
        let server = Server::start(&self.image, &[&["--direct", "auto"], extra].concat());
        let mut client = server.connect();
        client.write(0, &block(0)).expect("a write");
        let stood_still = self.stop();
        let write = Command::Write { offset: 0, data: block(1), fua: false };
        client.send(&write).expect("room in the socket");
        thread::sleep(STANDSTILL);
        (server, client, stood_still)
    }
}

/// Whether each thread of a process is stopped: proc_pid_stat(5), the field after the name.
fn is_stopped(process: Pid) -> bool {
    let threads = fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero()));
    threads.expect("a process").all(|thread| {
        let stat = fs::read_to_string(thread.expect("a thread").path().join("stat"));
        stat.is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')))
    })
}

/// Stopped storage, resumed on drop. Declared after the server, it is dropped first, before a
/// failing test waits for the server's end.
struct StoodStill(Pid);

impl Drop for StoodStill {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = kill_process(self.0, Signal::CONT);
    }
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        self.storage.end();
        let _ = tool("fusermount3").args(["-u", "-z"]).arg(&self.image).output();
    }
}

#[test]
fn stopped_storage_delays_only_the_requests_that_need_it() {
    let Some(storage) = Stoppable::new() else { return };
    for extra in [&[][..], &["--queue", "threads"]] {
        let (server, mut client, stood_still) = storage.server_with_unanswered_write(extra);
        let mut other = server.connect();
        other.read(4 * MIB, 1).expect_err("a read behind the end");
        drop(stood_still);
        client.receive().expect("an answer").1.expect("a write");
        assert!(other.read(0, BLOCK_BYTES).expect("bytes") == block(1));
        server.stop();
    }
}

#[test]
fn a_request_that_waits_for_long_is_told_while_it_waits_and_when_it_ends() {
    let Some(storage) = Stoppable::new() else { return };
    for extra in [&[][..], &["--queue", "threads"]] {
        let extra = [extra, &["--slow-requests", "100ms"]].concat();
        let (server, mut client, stood_still) = storage.server_with_unanswered_write(&extra);
        let waits = await_line(&server, "go on waiting");
        assert!(
            waits.starts_with("nowait: warning: export \"\" (")
                && waits.contains("): 1 requests have waited for its storage for 0.1 s"),
            "{waits}"
        );
        drop(stood_still);
        client.receive().expect("an answer").1.expect("a write");
        let took = await_line(&server, " took ");
        let expected = format!(": write of {BLOCK_BYTES} bytes at byte 0 took ");
        assert!(took.starts_with("nowait: warning: ") && took.contains(&expected), "{took}");
        // A quick request is not logged.
        client.read(0, BLOCK_BYTES).expect("bytes");
        assert_eq!(server.log().matches(" took ").count(), 1, "{}", server.log());
        server.stop();
    }
}

/// Checks that a server whose storage does not answer ends on SIGTERM, and reports the unfinished
/// requests.
fn ends_on_sigterm(extra: &[&str]) {
    let Some(mut storage) = Stoppable::new() else { return };
    let (mut server, _client, _stood_still) = storage.server_with_unanswered_write(extra);
    server.terminate();
    for line in [
        "nowait: stopping, 1 request left (a second signal terminates it immediately)",
        "1 requests did not complete within 10 s",
        "nowait: stopping, flushing",
        "not flushed: its storage did not answer",
    ] {
        wait_until(line, || server.log().contains(line));
    }
    // The kernel keeps an exited process until its calls to a FUSE file system have ended.
    storage.storage.end();
    assert_eq!(server.wait().code(), Some(1), "{}", server.log());
}

#[test]
fn sigterm_ends_a_server_whose_storage_never_answers_and_it_reports_the_rest() {
    ends_on_sigterm(&[]);
}

#[test]
fn sigterm_ends_a_server_on_threads_whose_storage_never_answers_and_it_reports_the_rest() {
    ends_on_sigterm(&["--queue", "threads"]);
}

#[test]
fn a_failed_flush_is_reported_once_in_the_log_and_to_the_service_manager() {
    let Some(mut storage) = Stoppable::new() else { return };
    let scratch = Scratch::new();
    let socket = scratch.join("notify");
    let manager = UnixDatagram::bind(&socket).expect("a socket");
    manager.set_read_timeout(Some(BOUND)).expect("a timeout");
    let receive_message = || {
        let mut message = [0; 4096];
        let len = manager.recv(&mut message).expect("a message in time");
        String::from_utf8_lossy(&message[..len]).into_owned()
    };
    let notify = format!("NOTIFY_SOCKET={}", socket.display());
    let server = Server::start_under(&["env", &notify], &storage.image, &["--direct", "auto"]);
    assert!(receive_message().starts_with("READY=1"));
    let mut client = server.connect();
    client.write(0, &block(0)).expect("a write");
    storage.storage.end();
    for _ in 0..3 {
        client.call(&Command::Flush).expect_err("storage that is gone");
    }
    assert!(receive_message().starts_with("STATUS=a flush has failed"));
    let log = server.log();
    assert_eq!(
        log.matches("every flush fails until the server is started again").count(),
        1,
        "{log}"
    );
    assert_eq!(log.lines().count(), 1, "{log}");
}

#[test]
fn a_second_signal_ends_a_waiting_server_at_once_and_it_reports_the_rest() {
    let Some(mut storage) = Stoppable::new() else { return };
    let (mut server, _client, _stood_still) = storage.server_with_unanswered_write(&[]);
    server.signal(Signal::INT);
    wait_until("what the stop waits for", || server.log().contains("stopping, 1 request left"));
    server.signal(Signal::INT);
    let printed = "nowait: terminated by a second signal: 1 request left, not flushed\n";
    wait_until(printed, || server.log().ends_with(printed));
    // The kernel keeps the process until its FUSE calls have ended.
    storage.storage.end();
    assert_eq!(server.wait().code(), Some(1), "{}", server.log());
    assert!(!server.socket().exists(), "the socket is left behind");
}
