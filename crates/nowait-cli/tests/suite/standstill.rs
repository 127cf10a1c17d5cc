//! A server that is stopped for a while, and storage that answers nothing for a while or for good.
//!
//! Invariant: what stands still here is let go or ended again, also when a test fails.
//! Knows: nbdkit, nbdfuse and signals, to make storage that can be stopped. Known by: nobody.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::nbd::{Client, Command};
use crate::common::{KIB, MIB, Scratch, Server, require_tool, skip, tool};

/// Far beyond what a mount or a line of the log takes.
const PATIENCE: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_millis(20);
/// How long nothing moves: long enough for what would go wrong meanwhile.
const STANDSTILL: Duration = Duration::from_millis(500);
const BLOCK_BYTES: u32 = 64 * KIB as u32;

/// Waits until `is_so`.
fn await_that(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "not within {} s: {what}", PATIENCE.as_secs());
        thread::sleep(STEP);
    }
}

fn block(number: u64) -> Vec<u8> {
    vec![number as u8 + 1; BLOCK_BYTES as usize]
}

/// Writes blocks of its own, several in flight, and reads each back.
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
fn a_server_that_is_stopped_and_resumed_under_load_answers_everything_as_if_nothing_had_been() {
    const CLIENTS: u64 = 3;
    const BLOCKS: u64 = 40;
    for extra in [&[][..], &["--queue", "threads"]] {
        let scratch = Scratch::new();
        let image = scratch.sparse("disk.img", CLIENTS * BLOCKS * u64::from(BLOCK_BYTES));
        let server = Server::start(&image, extra);
        // The first requests are sent to a server that stands still.
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

/// A tool that runs until this is gone.
struct Running(Child);

impl Running {
    fn start(command: &mut process::Command) -> Self {
        Self(command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("a tool"))
    }

    fn end(&mut self) {
        // Both fail only where it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

/// An image on a file system whose other end is a process that can be stopped.
struct Stoppable {
    storage: Running,
    _mount: Running,
    image: PathBuf,
    _scratch: Scratch,
}

impl Stoppable {
    /// `None`, and a line that says why, where what it takes is missing.
    fn new() -> Option<Self> {
        let there = ["nbdkit", "nbdfuse", "fusermount3"].into_iter().all(require_tool)
            && (Path::new("/dev/fuse").exists() || skip("no /dev/fuse"));
        if !there {
            return None;
        }
        let scratch = Scratch::new();
        let (socket, image) = (scratch.join("storage"), scratch.sparse("disk.img", 0));
        let mut nbdkit = process::Command::new("nbdkit");
        let storage = Running::start(nbdkit.args(["-f", "-U"]).arg(&socket).args(["memory", "4M"]));
        await_that("nbdkit listens", || socket.exists());
        let mut nbdfuse = process::Command::new("nbdfuse");
        let mount = Running::start(nbdfuse.arg(&image).arg("--unix").arg(&socket));
        await_that("the image is mounted", || {
            fs::metadata(&image).is_ok_and(|image| image.len() == 4 * MIB)
        });
        Some(Self { storage, _mount: mount, image, _scratch: scratch })
    }

    /// It answers nothing until what this gives is gone.
    fn stop(&self) -> StoodStill {
        let storage = Pid::from_child(&self.storage.0);
        kill_process(storage, Signal::STOP).expect("storage to signal");
        StoodStill(storage)
    }
}

/// Storage that answers nothing as long as this is there. Made after the server, this is gone
/// before a test that fails waits for the server's end.
struct StoodStill(Pid);

impl Drop for StoodStill {
    fn drop(&mut self) {
        // It may have been ended.
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
fn storage_that_stands_still_delays_what_needs_it_and_nothing_else() {
    let Some(storage) = Stoppable::new() else { return };
    for extra in [&[][..], &["--queue", "threads"]] {
        let server = Server::start(&storage.image, &[&["--direct", "auto"], extra].concat());
        let mut client = server.connect();
        client.write(0, &block(0)).expect("a write");
        let stood_still = storage.stop();
        let write = Command::Write { offset: 0, data: block(1), fua: false };
        client.send(&write).expect("room in the socket");
        thread::sleep(STANDSTILL);
        let mut other = server.connect();
        other.read(4 * MIB, 1).expect_err("a read behind the end");
        drop(stood_still);
        client.receive().expect("an answer").1.expect("a write");
        assert!(other.read(0, BLOCK_BYTES).expect("bytes") == block(1));
        server.stop();
    }
}

/// A server whose storage answers nothing ends on SIGTERM, and says what was left.
fn ends_on_sigterm(extra: &[&str]) {
    let Some(mut storage) = Stoppable::new() else { return };
    let mut server = Server::start(&storage.image, &[&["--direct", "auto"], extra].concat());
    let mut client = server.connect();
    client.write(0, &block(0)).expect("a write");
    let _stood_still = storage.stop();
    let write = Command::Write { offset: 0, data: block(1), fua: false };
    client.send(&write).expect("room in the socket");
    thread::sleep(STANDSTILL);
    server.terminate();
    for line in ["1 requests did not end within 10 s", "not flushed: its storage did not answer"] {
        await_that(line, || server.log().contains(line));
    }
    // The kernel keeps a process until its calls to a file system in user space have ended, even
    // where the process has ended itself.
    storage.storage.end();
    assert_eq!(server.wait().code(), Some(1), "{}", server.log());
}

#[test]
fn sigterm_ends_a_server_whose_storage_never_answers_and_it_says_what_was_left() {
    ends_on_sigterm(&[]);
}

#[test]
fn sigterm_ends_a_server_on_threads_whose_storage_never_answers_and_it_says_what_was_left() {
    ends_on_sigterm(&["--queue", "threads"]);
}
