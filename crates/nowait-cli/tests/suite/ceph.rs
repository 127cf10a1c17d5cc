//! Images of a Ceph cluster: a real one, of one monitor and one OSD on this host.
//!
//! Invariant: the cluster ends with this program; a test that takes its OSD away runs alone among these.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{OnceLock, PoisonError, RwLock};

use nowait_testkit::nbd::Command;
use nowait_testkit::{Random, Scratch, seed, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{
    Finished, Guest, Kernel, MIB, Server, accepted, bench_program, refusal, require_tool, text,
    tool,
};
use crate::guest::{WRITTEN_FILES, check_written, have_file_system_tools, make_disk};
use crate::vhost_user::booted_from;
use nowait_testkit::nbd::load::verified_by_fio;

pub(crate) const DISK_BYTES: u64 = 16 * MIB;
/// Written to by a test that takes the OSD away, or the space.
pub(crate) static OSD: RwLock<()> = RwLock::new(());

pub(crate) struct Cluster {
    pub(crate) directory: PathBuf,
    pub(crate) conf: PathBuf,
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
    /// Runs Ceph's `program`, as `rbd`.
    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> String {
        tool(program).arg("-c").arg(&self.conf).args(arguments).succeeds()
    }

    pub(crate) fn rbd(&self, arguments: &[&str]) -> String {
        self.run("rbd", arguments)
    }

    /// The location of a new image of [`DISK_BYTES`].
    pub(crate) fn image(&self, name: &str) -> String {
        self.rbd(&["create", "--size", "16M", name]);
        self.location(name)
    }

    pub(crate) fn location(&self, name: &str) -> String {
        format!("rbd:rbd/{name}:conf={}", text(&self.conf))
    }

    /// Bytes of the image, as Ceph's own program reads them.
    pub(crate) fn export(&self, name: &str) -> Vec<u8> {
        let file = Scratch::new();
        let path = file.join("exported");
        self.rbd(&["export", "--no-progress", name, text(&path)]);
        fs::read(path).expect("an exported image")
    }

    /// The process of `daemon`.
    pub(crate) fn process(&self, daemon: &str) -> Pid {
        let pid = fs::read_to_string(self.directory.join(format!("{daemon}.pid")));
        let pid = pid.expect("a daemon").trim().parse().expect("a number");
        Pid::from_raw(pid).expect("a process ID")
    }

    pub(crate) fn kill_osd(&self) {
        let pid = self.process("osd.0");
        kill_process(pid, Signal::KILL).expect("an OSD");
        wait_until("the OSD's end", || rustix::process::test_kill_process(pid).is_err());
    }

    pub(crate) fn start_osd(&self) {
        tool(script())
            .env("NOWAIT_CEPH_STORE", "bluestore")
            .arg("osd")
            .arg(&self.directory)
            .succeeds();
    }
}

pub(crate) fn serve(location: &str, extra: &[&str]) -> Server {
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

#[test]
fn what_fio_writes_is_verified_and_what_is_trimmed_reads_as_zeros_and_has_no_objects() {
    let Some(cluster) = cluster().filter(|_| require_tool("fio") && require_tool("rados")) else {
        return;
    };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let server = serve(&cluster.image("verified"), &[]);
    let objects = || {
        let info = cluster.rbd(&["info", "--format", "json", "verified"]);
        let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
        let prefix = info["block_name_prefix"].as_str().expect("a prefix");
        cluster
            .run("rados", &["-p", "rbd", "ls"])
            .lines()
            .filter(|name| name.starts_with(prefix))
            .count()
    };
    let scratch = Scratch::new();
    verified_by_fio(scratch.path(), server.uri()).succeeds();
    // It has used the first 8 MiB, two objects.
    assert_eq!(objects(), 2);
    let mut client = server.connect();
    client.call(&Command::Trim { offset: 0, len: 4 << 20 }).expect("a trim of an object");
    client.call(&Command::Trim { offset: 5 * MIB, len: 70_000 }).expect("a trim of a part");
    assert_eq!(objects(), 1);
    assert!(client.read(0, 4 << 20).expect("a read") == vec![0; 4 << 20]);
    assert!(client.read(5 * MIB, 70_000).expect("a read") == vec![0; 70_000]);
    server.stop();
}

#[test]
fn a_stock_kernel_boots_from_an_image_of_a_cluster_and_its_files_are_right_outside() {
    let Some(cluster) = cluster().filter(|_| have_file_system_tools()) else { return };
    let Some(guest) = Guest::with(Kernel::V6_1) else { return };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let scratch = Scratch::new();
    let disk = make_disk(&scratch, &guest.busybox());
    cluster.rbd(&["import", "--no-progress", text(&disk), "guest"]);
    let location = cluster.location("guest");
    let console = booted_from(&guest, Path::new(&location));
    fs::remove_file(&disk).expect("own file");
    cluster.rbd(&["export", "--no-progress", "guest", text(&disk)]);
    check_written(&scratch, &disk, &console, WRITTEN_FILES);
    cluster.rbd(&["rm", "--no-progress", "guest"]);
}

#[test]
fn an_image_is_measured_and_one_that_another_client_writes_to_is_not_overwritten() {
    let Some(cluster) = cluster() else { return };
    let _shared = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let Some(_) = bench_program() else { return };
    cluster.rbd(&["create", "--size", "64M", "measured"]);
    let location = cluster.location("measured");
    let load = ["bench", "nowait", "--rounds", "1", "--seconds", "0.05", "--json", "--jobs", "1"];
    let bench = [&load[..], &["--device", &location]].concat();
    let server = serve(&location, &[]);
    server.connect().write(0, &[1; 4096]).expect("a write");
    accepted(&bench);
    let overwriting = [&bench[..], &["--overwrite"]].concat();
    refusal(&overwriting).says(&[&location, "another client holds its lock"]);
    assert!(server.connect().read(0, 4096).expect("a read") == [1; 4096]);
    server.stop();
    let printed = accepted(&overwriting);
    let printed: serde_json::Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(printed["written"], true);
    let rows = printed["tables"][0]["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 4, "{printed}");
    cluster.rbd(&["rm", "--no-progress", "measured"]);
}
