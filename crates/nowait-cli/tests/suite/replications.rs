//! Disks that are replicated to another server while clients write to them.
//!
//! Invariant: between two rounds the target is the disk as it was at one instant.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nowait_testkit::nbd::Client;
use nowait_testkit::{Finished, Random, SetOnDrop, seed, tool, wait_until};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{MIB, NOWAIT, Scratch, Server, accepted, text};
use crate::upgrade::Upgraded;

const SIZE: u64 = 16 * MIB;

/// A server of a disk, and one of the disk that it is replicated to.
pub(crate) struct Pair {
    pub(crate) server: Server,
    pub(crate) control: PathBuf,
    pub(crate) behind: Server,
    pub(crate) scratch: Scratch,
}

/// `nowait export` with `arguments`, of the server with this control socket.
fn export(control: &Path, arguments: &[&str]) -> Command {
    let mut command = tool(NOWAIT);
    command.arg("export").args(arguments).arg("--control").arg(control);
    command
}

/// Runs `nowait export replicate @0` with `arguments`.
pub(crate) fn replicate(control: &Path, arguments: &[&str]) -> Value {
    let all = [&["replicate", "@0", "--json"], arguments].concat();
    serde_json::from_str(&export(control, &all).succeeds()).expect("JSON")
}

impl Pair {
    fn start(format: &str) -> Self {
        Self::of_size(format, SIZE)
    }

    pub(crate) fn of_size(format: &str, size: u64) -> Self {
        let scratch = Scratch::new();
        let (image, control) = (scratch.join("disk"), scratch.join("control"));
        accepted(&["create", text(&image), &size.to_string(), "--format", format]);
        scratch.sparse("replica", size);
        let behind = Self::behind(scratch.path());
        let server = Self::server(format, scratch.path(), &behind);
        Self { server, control, behind, scratch }
    }

    /// A server of the disk.
    pub(crate) fn server(format: &str, directory: &Path, behind: &Server) -> Server {
        let address = format!("unix:{}", directory.join("control").display());
        let arguments = ["--control", &address, "--format", format, "--allow-dir", text(directory)];
        let to = ["--allow-uri", behind.uri(), "--reconnect", "1", "--verbose"];
        Server::start(&directory.join("disk"), &[&arguments[..], &to].concat())
    }

    /// A server of the replica.
    pub(crate) fn behind(directory: &Path) -> Server {
        let address = format!("unix:{}", directory.join("behind.sock").display());
        let image = directory.join("replica");
        Server::start_by(&[], &["serve", text(&image), "-f", "raw", "--nbd", &address])
    }

    pub(crate) fn export(&self, arguments: &[&str]) -> Command {
        export(&self.control, arguments)
    }

    /// Runs `nowait export replicate @0` with `arguments`.
    pub(crate) fn replicate(&self, arguments: &[&str]) -> Value {
        replicate(&self.control, arguments)
    }

    fn begin(&self, every: &str) {
        self.replicate(&[self.behind.uri(), "--every", every]);
    }

    pub(crate) fn await_rounds(&self, rounds: u64) {
        wait_until("rounds are complete", || {
            self.replicate(&[])["rounds"].as_u64().is_some_and(|done| done >= rounds)
        });
    }

    fn replica(&self) -> Vec<u8> {
        self.behind.connect().read(0, SIZE as u32).expect("all bytes")
    }
}

/// Writes 1, 2, … to the begin of each MiB in turn, until `over`.
fn count(client: &mut Client, over: &AtomicBool) {
    let mut number = 0_u64;
    while !over.load(Ordering::Relaxed) {
        number += 1;
        for at in (0..SIZE).step_by(MIB as usize) {
            client.write(at, &number.to_le_bytes().repeat(64)).expect("a write");
        }
    }
}

/// Checks that `disk` is what [`count`] has written up to an instant.
fn assert_instant(disk: &[u8]) {
    let number = |at: &[u8]| u64::from_le_bytes(at[..8].try_into().expect("8 bytes"));
    let numbers: Vec<_> = disk.chunks(MIB as usize).map(number).collect();
    let (first, last) = (numbers[0], numbers[numbers.len() - 1]);
    assert!(numbers.is_sorted_by(|a, b| a >= b) && first - last <= 1, "{numbers:?}");
}

#[test]
fn between_two_rounds_the_target_is_the_disk_as_it_was_at_an_instant() {
    for format in ["raw", "qcow2"] {
        let it = Pair::start(format);
        let (mut client, over) = (it.server.connect(), &AtomicBool::new(false));
        thread::scope(|scope| {
            let load = scope.spawn(|| count(&mut client, over));
            let loading = SetOnDrop(over);
            it.begin("86400");
            it.await_rounds(1);
            assert_instant(&it.replica());
            it.replicate(&["--stop"]);
            // Rounds that copy what has changed. A round may be cut off.
            let is_whole = || {
                it.begin("1");
                it.await_rounds(3);
                it.replicate(&["--stop"])["consistent"] == true
            };
            while !is_whole() {}
            assert_instant(&it.replica());
            drop(loading);
            load.join().expect("no error");
        });
        it.server.stop();
        it.behind.stop();
    }
}

#[test]
fn a_target_that_goes_away_and_comes_back_gets_all_that_was_written_meanwhile() {
    let mut it = Pair::start("raw");
    it.begin("1");
    it.await_rounds(1);
    let mut model = vec![0; SIZE as usize];
    let (mut client, mut random) = (it.server.connect(), Random::from_seed(seed()));
    let mut change = |model: &mut [u8]| {
        for _ in 0..40 {
            let at = random.below(SIZE - 100_000);
            let data = random.bytes(100_000);
            client.write(at, &data).expect("a write");
            model[at as usize..][..data.len()].copy_from_slice(&data);
        }
    };
    for _ in 0..2 {
        change(&mut model);
        it.behind.signal(Signal::KILL);
        it.behind.wait();
        change(&mut model);
        wait_until("it is noticed", || it.replicate(&[])["state"] == "retrying");
        let info = it.replicate(&[]);
        assert!(info["last_error"].as_str().is_some_and(|why| why.contains("nbd+unix:")), "{info}");
        change(&mut model);
        let rounds = info["rounds"].as_u64().expect("a number");
        it.behind = Pair::behind(it.scratch.path());
        it.await_rounds(rounds + 1);
        change(&mut model);
    }
    let rounds = it.replicate(&[])["rounds"].as_u64().expect("a number");
    it.await_rounds(rounds + 2);
    let info = it.replicate(&["--stop"]);
    assert_eq!((&info["state"], &info["consistent"]), (&"stopped".into(), &true.into()), "{info}");
    assert!(it.replica() == model);
    it.server.stop();
    it.behind.stop();
}

#[test]
fn what_a_replication_forbids_is_refused_and_it_ends_with_its_server() {
    let it = Pair::start("raw");
    let target = it.scratch.join("moved");
    for (arguments, why) in [
        (&["nbd://other.example/x"][..], "--allow-uri does not allow"),
        (&[text(&target)], "a disk is replicated to an export of an NBD server"),
        (&[it.behind.uri(), "--every", "0"], "it goes from 1 to 86400"),
        (&["--stop"], "it is not being replicated"),
        (&[], "it was not replicated"),
    ] {
        let said = it.export(&[&["replicate", "@0"], arguments].concat()).fails();
        assert!(said.contains(why) && said.lines().count() == 1, "{arguments:?}: {said}");
    }
    it.export(&["resize", "@0", "17M"]).succeeds();
    let said = it.export(&["replicate", "@0", it.behind.uri()]).fails();
    assert!(said.contains("16777216 bytes, and the disk 17825792"), "{said}");
    it.export(&["resize", "@0", "16M", "--shrink"]).succeeds();
    it.begin("86400");
    it.await_rounds(1);
    let refused: [&[&str]; 3] = [
        &["resize", "@0", "32M"],
        &["move", "@0", text(&target)],
        &["replicate", "@0", it.behind.uri()],
    ];
    for arguments in refused {
        let said = it.export(arguments).fails();
        assert!(said.contains("is being replicated to") && said.contains("--stop"), "{said}");
    }
    let mut upgrade = tool(NOWAIT);
    upgrade.args(["upgrade", "/bin/false", "--control"]).arg(&it.control).fails();
    assert_eq!(it.replicate(&[])["running"], true);
    // A round is not there for long.
    it.export(&["backup", "start", "@0"]).succeeds();
    it.export(&["backup", "abort", "@0"]).succeeds();
    it.export(&["snapshot", "@0", text(&it.scratch.join("overlay"))]).succeeds();
    it.server.stop();
    it.behind.stop();
}

#[test]
fn a_replication_goes_on_after_an_upgrade_also_to_a_target_that_is_away_meanwhile() {
    let mut it = Pair::start("raw");
    let mut model = vec![0; SIZE as usize];
    model[..4096].fill(1);
    it.server.connect().write(0, &model[..4096]).expect("a write");
    it.begin("1");
    it.await_rounds(1);
    it.behind.signal(Signal::KILL);
    it.behind.wait();
    let Pair { server, control, scratch, .. } = it;
    let directory = scratch.path().to_owned();
    let mut upgraded = Upgraded::of(server, &control, scratch);
    upgraded.upgrade();
    let info = replicate(&control, &[]);
    assert!(info["running"] == true && info["every_seconds"] == 1, "{info}");
    model[8 << 20..][..4096].fill(2);
    upgraded.connect().write(8 * MIB, &[2; 4096]).expect("a write");
    let behind = Pair::behind(&directory);
    wait_until("the target has all", || {
        replicate(&control, &[])["rounds"].as_u64().is_some_and(|rounds| rounds > 0)
            && behind.connect().read(0, SIZE as u32).is_ok_and(|found| found == model)
    });
    upgraded.stop();
    behind.stop();
}
