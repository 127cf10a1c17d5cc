//! Images of a Ceph cluster: a real one, of one monitor and one OSD on this machine.
//!
//! Invariant: the cluster ends with this program; a test that takes its OSD away runs alone among these.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{OnceLock, PoisonError, RwLock};

use nowait_testkit::nbd::Command;
use nowait_testkit::{Random, Scratch, seed, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Finished, MIB, Server, accepted, refusal, require_tool, text, tool};

const DISK_BYTES: u64 = 16 * MIB;
/// NBD's EIO.
const EIO: u32 = 5;

/// Written to by a test that takes the OSD away.
pub(crate) static OSD: RwLock<()> = RwLock::new(());

pub(crate) struct Cluster {
    pub(crate) directory: PathBuf,
    conf: PathBuf,
}

/// The cluster, which the first test starts; `None` where a test is skipped.
pub(crate) fn cluster() -> Option<&'static Cluster> {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    if !["ceph", "ceph-mon", "ceph-osd", "rbd"].into_iter().all(require_tool) {
        return None;
    }
    Some(CLUSTER.get_or_init(|| {
        // The script removes it: a static is not dropped.
        let directory = Scratch::new().path().with_extension("ceph");
        let (script, pid) = (script(), std::process::id().to_string());
        let mut start = tool(script);
        // An OSD that is killed keeps what it has written.
        start.env("NOWAIT_CEPH_STORE", "bluestore");
        let conf = start.arg("start").arg(&directory).arg(pid).succeeds();
        Cluster { directory, conf: conf.trim_end().into() }
    }))
}

pub(crate) fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/ceph-node")
}

impl Cluster {
    /// Runs Ceph's `rbd`.
    fn rbd(&self, arguments: &[&str]) -> String {
        tool("rbd").arg("-c").arg(&self.conf).args(arguments).succeeds()
    }

    /// The location of a new image of [`DISK_BYTES`].
    fn image(&self, name: &str) -> String {
        self.rbd(&["create", "--size", "16M", name]);
        self.location(name)
    }

    fn location(&self, name: &str) -> String {
        format!("rbd:rbd/{name}:conf={}", text(&self.conf))
    }

    /// What is in the image, as Ceph's own program reads it.
    fn export(&self, name: &str) -> Vec<u8> {
        let file = Scratch::new();
        let path = file.join("exported");
        self.rbd(&["export", "--no-progress", name, text(&path)]);
        fs::read(path).expect("an exported image")
    }

    fn kill_osd(&self) {
        let pid = fs::read_to_string(self.directory.join("osd.0.pid")).expect("an OSD");
        let pid = Pid::from_raw(pid.trim().parse().expect("a number")).expect("a process ID");
        kill_process(pid, Signal::KILL).expect("an OSD");
        wait_until("the OSD's end", || rustix::process::test_kill_process(pid).is_err());
    }

    fn start_osd(&self) {
        tool(script())
            .env("NOWAIT_CEPH_STORE", "bluestore")
            .arg("osd")
            .arg(&self.directory)
            .succeeds();
    }
}

fn serve(location: &str, extra: &[&str]) -> Server {
    Server::start(Path::new(location), extra)
}

/// `rounds` commands of all kinds at random places; returns what the disk has then.
fn use_all_commands(server: &Server, rounds: u64) -> Vec<u8> {
    let mut model = vec![0; DISK_BYTES as usize];
    let mut client = server.connect();
    let mut random = Random::from_seed(seed());
    for round in 0..rounds {
        let offset = random.below(DISK_BYTES - MIB);
        let len = 1 + random.below(if round % 20 == 0 { MIB } else { 9000 });
        let range = offset as usize..(offset + len) as usize;
        match random.below(6) {
            0 => {
                let (length, keep) = (len as u32, round % 2 == 0);
                client.call(&Command::Zero { offset, len: length, keep }).expect("zeroes");
                model[range].fill(0);
            }
            1 => drop(client.call(&Command::Flush).expect("a flush")),
            2 => assert!(
                client.read(offset, len as u32).expect("a read") == model[range],
                "{offset}"
            ),
            choice => {
                let data = random.bytes(len as usize);
                model[range].copy_from_slice(&data);
                client.call(&Command::Write { offset, data, fua: choice == 3 }).expect("a write");
            }
        }
    }
    client.call(&Command::Flush).expect("a flush");
    assert!(client.read(0, DISK_BYTES as u32).expect("a read") == model, "the whole disk");
    model
}

#[test]
fn an_image_of_a_cluster_has_what_clients_have_written_and_its_snapshot_what_it_had() {
    let Some(cluster) = cluster() else { return };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let location = cluster.image("model");
    let server = serve(&location, &[]);
    let model = use_all_commands(&server, 150);
    server.stop();
    assert!(cluster.export("model") == model, "as Ceph's own program reads it");
    cluster.rbd(&["snap", "create", "--no-progress", "model@before"]);
    let server = serve(&location, &["--queue", "threads"]);
    server.connect().write(0, &[7; 4096]).expect("a write");
    server.stop();
    let snapshot = cluster.location("model@before");
    refusal(&["serve", &snapshot]).says(&["snapshot", "--read-only"]);
    let server = serve(&snapshot, &["--read-only"]);
    assert!(server.connect().read(0, DISK_BYTES as u32).expect("a read") == model, "the snapshot");
    server.stop();
    let info = accepted(&["info", "--json", &snapshot]);
    assert!(info.contains("\"read_only\":true") && info.contains("ceph_image"), "{info}");
}

#[test]
fn an_image_that_another_client_writes_to_or_that_is_not_there_is_refused() {
    let Some(cluster) = cluster() else { return };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let location = cluster.image("locked");
    let server = serve(&location, &[]);
    refusal(&["serve", &location]).says(&["another client holds its lock"]);
    server.stop();
    serve(&location, &[]).stop();
    let absent = cluster.location("absent");
    refusal(&["info", &absent]).says(&["no such image"]);
    let no_pool = location.replace("rbd:rbd/", "rbd:lake/");
    refusal(&["info", &no_pool]).says(&["no pool lake"]);
}

#[test]
fn an_osd_that_is_killed_is_a_pause_and_then_an_error_and_loses_nothing() {
    let Some(cluster) = cluster() else { return };
    let _alone = OSD.write().unwrap_or_else(PoisonError::into_inner);
    let server = serve(&cluster.image("killed"), &[]);
    let hasty = serve(&cluster.image("hasty"), &["--reconnect", "2"]);
    let mut client = server.connect();
    client.write(0, &[1; 65536]).expect("a write");
    client.call(&Command::Flush).expect("a flush");
    hasty.connect().write(0, &[1; 4096]).expect("a write");
    cluster.kill_osd();
    let waiting = client.send(&Command::Write { offset: 65536, data: vec![2; 65536], fua: true });
    assert_eq!(hasty.connect().read(0, 4096).expect_err("no OSD"), EIO);
    cluster.start_osd();
    let (answered, answer) = client.receive().expect("an answer");
    assert_eq!((Some(answered), answer.map(drop)), (waiting.ok(), Ok(())));
    let data = client.read(0, 131_072).expect("a read");
    assert!(data[..65536] == [1; 65536] && data[65536..] == [2; 65536]);
    wait_until("an answer again", || hasty.connect().read(0, 4096).is_ok());
    hasty.stop();
    server.stop();
}

#[test]
fn a_lock_that_another_client_breaks_is_an_error_of_every_request_after_it() {
    let Some(cluster) = cluster() else { return };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let mut server = serve(&cluster.image("broken"), &[]);
    let mut client = server.connect();
    client.write(0, &[1; 4096]).expect("a write");
    client.call(&Command::Flush).expect("a flush");
    let locks = cluster.rbd(&["lock", "ls", "broken"]);
    let last: Vec<&str> = locks.lines().last().expect("a lock").split_whitespace().collect();
    // The locker, the two words of the lock's name, and its address.
    cluster.rbd(&["lock", "rm", "broken", &last[1..3].join(" "), last[0]]);
    assert!(client.write(0, &[2; 4096]).is_err() && client.call(&Command::Flush).is_err());
    assert!(client.read(0, 4096).is_err(), "a client that was shut out");
    assert!(cluster.export("broken")[..4096] == [1; 4096], "what was flushed");
    server.terminate();
    assert!(!server.wait().success(), "its last flush has failed");
    let log = server.log();
    assert!(log.contains("another client has broken the lock"), "{log}");
}

#[test]
fn a_qcow2_image_in_a_cluster_is_served_and_copies_go_both_ways() {
    let Some(cluster) = cluster() else { return };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let (file, raw, back) =
        (scratch.join("a.qcow2"), scratch.join("raw.img"), scratch.join("back.img"));
    accepted(&["create", text(&file), "8M"]);
    cluster.rbd(&["import", "--no-progress", text(&file), "inside"]);
    // Its clusters need space behind its tables.
    cluster.rbd(&["resize", "--no-progress", "--size", "16M", "inside"]);
    let inside = cluster.location("inside");
    let server = serve(&inside, &["--format", "qcow2"]);
    server.connect().write(5 * MIB, &[3; 70_000]).expect("a write");
    server.stop();
    let server = serve(&inside, &["--format", "qcow2"]);
    assert!(server.connect().read(5 * MIB, 70_000).expect("a read") == [3; 70_000]);
    server.stop();
    accepted(&["check", &inside, "--format", "qcow2"]);
    fs::write(&raw, Random::from_seed(seed()).bytes(DISK_BYTES as usize)).expect("a file");
    let copied = cluster.image("copied");
    accepted(&["copy", text(&raw), &copied, "--force"]);
    accepted(&["copy", &copied, text(&back)]);
    assert!(fs::read(&raw).expect("a file") == fs::read(&back).expect("a file"));
}

#[test]
fn another_size_is_seen_after_a_reload() {
    let Some(cluster) = cluster() else { return };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let server = serve(&cluster.image("grown"), &[]);
    cluster.rbd(&["resize", "--no-progress", "--size", "24M", "grown"]);
    server.signal(Signal::HUP);
    wait_until("the other size", || {
        server.connect().read(DISK_BYTES, 4096).is_ok_and(|data| data == [0; 4096])
    });
    server.stop();
}
