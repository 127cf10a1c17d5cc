//! Dirty bitmaps that are stored in a qcow2 image: through ends of the server, crashes, and writes of QEMU.
//!
//! Invariant: what QEMU and the server tell of a bitmap is compared with what the test has written.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use nowait_testkit::nbd::Mode;
use nowait_testkit::{require_tool, tool, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::common::status_client::StatusClient;
use crate::common::{Finished, KIB, MIB, NOWAIT, Scratch, Server, accepted, refusal, text};

const SIZE: u64 = 256 * MIB;
/// The granularity of a bitmap without another one.
const USUAL: u64 = 64 * KIB;
/// Bytes of a region, which becomes dirty as a whole before its first write.
const REGION: u64 = 16 * MIB;
/// Where a header has its autoclear bits.
const AUTOCLEAR_AT: u64 = 88;

/// An image that is served from time to time.
struct Stored {
    scratch: Scratch,
    image: PathBuf,
    control: PathBuf,
}

impl Stored {
    fn new(options: &[&str]) -> Self {
        let scratch = Scratch::new();
        let (image, control) = (scratch.join("disk.qcow2"), scratch.join("control"));
        let size = SIZE.to_string();
        accepted(&[&["create", text(&image), &size], options].concat());
        Self { scratch, image, control }
    }

    fn serve(&self, extra: &[&str]) -> Server {
        let address = format!("unix:{}", self.control.display());
        let own = ["--control", &address, "--allow-dir", text(self.scratch.path())];
        Server::start(&self.image, &[&own, extra].concat())
    }

    fn kill(&self, mut server: Server) {
        server.signal(Signal::KILL);
        server.wait();
        std::fs::remove_file(server.socket()).expect("its socket");
        std::fs::remove_file(&self.control).expect("its control socket");
    }

    /// `nowait export backup ACTION` of the only export.
    fn backup(&self, action: &[&str]) {
        let control = ["--control", text(&self.control)];
        tool(NOWAIT).args(["export", "backup"]).args(action).args(control).succeeds();
    }

    /// `nowait export bitmap` with `arguments`.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = tool(NOWAIT);
        command.args(["export", "bitmap"]).args(arguments).arg("--control").arg(&self.control);
        command
    }

    fn change(&self, arguments: &[&str]) {
        self.command(arguments).succeeds();
    }

    fn listed(&self) -> Value {
        serde_json::from_str(&self.command(&["list", "", "--json"]).succeeds()).expect("JSON")
    }

    /// `qemu-img bitmap`, with the name of the image in the place of `@`.
    fn qemu_bitmap(&self, arguments: &[&str]) {
        let image = |argument: &&str| {
            if *argument == "@" { text(&self.image) } else { argument }.to_owned()
        };
        tool("qemu-img").arg("bitmap").args(arguments.iter().map(image)).succeeds();
    }

    fn qemu_writes(&self, command: &str) {
        tool("qemu-io").args(["-f", "qcow2", "-c", command, text(&self.image)]).succeeds();
    }

    fn qemu_checks(&self) {
        tool("qemu-img").args(["check", "-q", text(&self.image)]).succeeds();
        accepted(&["check", text(&self.image)]);
    }

    /// The flags of each bitmap as QEMU shows them.
    fn flags(&self) -> Vec<(String, Value)> {
        let info = tool("qemu-img").args(["info", "--output=json", text(&self.image)]).succeeds();
        let info: Value = serde_json::from_str(&info).expect("JSON");
        let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().cloned();
        let each = bitmaps.unwrap_or_default().into_iter();
        each.map(|it| (it["name"].as_str().expect("a name").to_owned(), it["flags"].clone()))
            .collect()
    }

    /// The dirty granules that QEMU finds in bitmap `name`.
    fn dirty_in_qemu(&self, name: &str) -> Vec<u64> {
        let served = QemuNbd::start(&self.image, name, &self.scratch.join("qemu"));
        dirty(&served.socket, name)
    }
}

/// `qemu-nbd` with a bitmap of an image.
struct QemuNbd {
    child: Child,
    socket: PathBuf,
}

impl QemuNbd {
    fn start(image: &Path, bitmap: &str, socket: &Path) -> Self {
        let _ = std::fs::remove_file(socket);
        let mut command = tool("qemu-nbd");
        command.args([
            "--read-only",
            "--persistent",
            "--shared=9",
            "--format=qcow2",
            "--bitmap",
            bitmap,
            "-k",
        ]);
        let child = command.arg(socket).arg(image).spawn().expect("qemu-nbd");
        wait_until("qemu-nbd's socket", || UnixStream::connect(socket).is_ok());
        Self { child, socket: socket.to_owned() }
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        // By the program that bounds its time, which passes it on.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

/// The dirty granules that a server tells of.
fn dirty(socket: &Path, name: &str) -> Vec<u64> {
    let query = format!("qemu:dirty-bitmap:{name}");
    let mut client = StatusClient::connect(socket, "", Mode::Structured, &[&query]);
    let all = client.dirty(name, SIZE, USUAL, 0);
    (0..all.len() as u64).filter(|at| all[*at as usize]).collect()
}

fn has_qemu() -> bool {
    ["qemu-img", "qemu-io", "qemu-nbd"].into_iter().all(require_tool)
}

fn info(name: &str, enabled: bool, granules: u64) -> Value {
    json!({"name": name, "granularity_bytes": USUAL, "enabled": enabled,
        "dirty_bytes": granules * USUAL, "persistent": true})
}

fn lost(name: &str) -> Value {
    json!({"name": name, "granularity_bytes": USUAL, "enabled": false, "dirty_bytes": 0,
        "persistent": true, "inconsistent": true})
}

#[test]
fn a_bitmap_is_there_again_at_the_next_start_with_what_was_noted() {
    let it = Stored::new(&[]);
    let server = it.serve(&[]);
    it.change(&["add", "", "a"]);
    it.change(&["add", "", "off", "--disabled"]);
    it.change(&["add", "", "gone", "--temporary"]);
    server.connect().write(MIB, &[1; 512]).expect("a write");
    let temporary = json!({"name": "gone", "granularity_bytes": USUAL, "enabled": true,
        "dirty_bytes": USUAL});
    assert_eq!(it.listed(), json!([info("a", true, 1), info("off", false, 0), temporary]));
    server.stop();
    let server = it.serve(&["--bitmap", "a"]);
    assert_eq!(it.listed(), json!([info("a", true, 1), info("off", false, 0)]));
    server.connect().write(100 * MIB, &[1; 512]).expect("a write");
    assert_eq!(dirty(&server.socket(), "a"), [16, 1600]);
    it.change(&["merge", "", "off", "a"]);
    it.change(&["clear", "", "a"]);
    it.change(&["disable", "", "a"]);
    it.change(&["enable", "", "off"]);
    server.connect().write(200 * MIB, &[1; 512]).expect("a write");
    server.stop();
    accepted(&["check", text(&it.image)]);
    let server = it.serve(&["--read-only"]);
    assert_eq!(dirty(&server.socket(), "off"), [16, 1600, 3200]);
    assert!(dirty(&server.socket(), "a").is_empty());
    assert!(it.command(&["add", "", "b", "--temporary"]).succeeds().is_empty());
    server.stop();
    let server = it.serve(&[]);
    assert_eq!(it.listed(), json!([info("a", false, 0), info("off", true, 3)]));
    it.change(&["remove", "", "a"]);
    it.change(&["remove", "", "off"]);
    server.stop();
    let server = it.serve(&[]);
    assert_eq!(it.listed(), json!([]));
    server.stop();
    accepted(&["check", text(&it.image)]);
}

#[test]
fn a_kill_leaves_each_change_and_whole_regions_beside_them() {
    let it = Stored::new(&[]);
    let server = it.serve(&[]);
    it.change(&["add", "", "a"]);
    let mut client = server.connect();
    client.write(MIB, &[1; 512]).expect("a write");
    it.change(&["disable", "", "a"]);
    client.write(200 * MIB, &[1; 512]).expect("a write that is not noted");
    it.change(&["enable", "", "a"]);
    client.write(5 * REGION, &[1; 512]).expect("a write");
    it.kill(server);
    let server = it.serve(&[]);
    let region = REGION / USUAL;
    let expected: Vec<u64> = std::iter::once(16).chain(5 * region..6 * region).collect();
    assert_eq!(dirty(&server.socket(), "a"), expected);
    server.stop();
    accepted(&["check", text(&it.image)]);
    // The end in order has nothing more.
    let server = it.serve(&[]);
    assert_eq!(dirty(&server.socket(), "a"), expected);
    server.stop();
}

/// The image of a server that was killed after a write, with bitmap `a`.
fn killed() -> Stored {
    let it = Stored::new(&[]);
    let server = it.serve(&[]);
    it.change(&["add", "", "a"]);
    server.connect().write(MIB, &[1; 512]).expect("a write");
    it.kill(server);
    it
}

#[test]
fn after_a_kill_and_a_write_of_qemu_a_bitmap_is_inconsistent_and_can_be_removed() {
    if !has_qemu() {
        return;
    }
    let it = killed();
    assert_eq!(it.flags(), [("a".to_owned(), json!(["in-use", "auto"]))]);
    it.qemu_checks();
    it.qemu_writes("write 3M 64k");
    let server = it.serve(&[]);
    assert!(server.log().contains("bitmap \"a\" is not served"), "{}", server.log());
    assert_eq!(it.listed(), json!([lost("a")]));
    for action in ["clear", "enable"] {
        assert!(it.command(&[action, "", "a"]).fails().contains("can only be removed"));
    }
    assert!(it.command(&["add", "", "a"]).fails().contains("there is a bitmap of that name"));
    it.change(&["remove", "", "a"]);
    assert_eq!(it.listed(), json!([]));
    server.stop();
    it.qemu_checks();
    assert_eq!(it.flags(), []);
}

#[test]
fn bitmaps_are_not_used_where_a_program_that_does_not_know_them_has_written() {
    let it = killed();
    let file = File::options().read(true).write(true).open(&it.image).expect("the image");
    file.write_all_at(&[0; 8], AUTOCLEAR_AT).expect("what such a program does");
    let server = it.serve(&[]);
    let why = "its dirty bitmaps are not used: another program has written to it without them";
    assert!(server.log().contains(why), "{}", server.log());
    assert_eq!(it.listed(), json!([]));
    it.change(&["add", "", "a"]);
    server.connect().write(MIB, &[1; 512]).expect("a write");
    server.stop();
    let server = it.serve(&[]);
    assert!(!server.log().contains("another program"), "{}", server.log());
    assert_eq!(it.listed(), json!([info("a", true, 1)]));
    server.stop();
}

#[test]
fn qemu_reads_our_bitmaps_and_we_read_those_of_qemu() {
    if !has_qemu() {
        return;
    }
    let it = Stored::new(&[]);
    let server = it.serve(&[]);
    it.change(&["add", "", "ours"]);
    server.connect().write(10 * MIB, &[1; 512]).expect("a write");
    server.stop();
    it.qemu_checks();
    assert_eq!(it.flags(), [("ours".to_owned(), json!(["auto"]))]);
    assert_eq!(it.dirty_in_qemu("ours"), [160]);
    it.qemu_writes("write 20M 64k");
    it.qemu_bitmap(&["--add", "@", "theirs"]);
    it.qemu_writes("write 30M 64k");
    let server = it.serve(&[]);
    assert_eq!(dirty(&server.socket(), "ours"), [160, 320, 480]);
    assert_eq!(dirty(&server.socket(), "theirs"), [480]);
    server.connect().write(40 * MIB, &[1; 512]).expect("a write");
    server.stop();
    it.qemu_checks();
    it.qemu_bitmap(&["--merge", "theirs", "@", "ours"]);
    assert_eq!(it.dirty_in_qemu("ours"), [160, 320, 480, 640]);
    assert_eq!(it.dirty_in_qemu("theirs"), [480, 640]);
    it.qemu_bitmap(&["--clear", "@", "ours"]);
    it.qemu_bitmap(&["--remove", "@", "theirs"]);
    let server = it.serve(&[]);
    assert_eq!(it.listed(), json!([info("ours", true, 0)]));
    server.stop();
    it.qemu_checks();
}

#[test]
fn bitmaps_go_along_with_other_sizes_and_stay_below_a_snapshot() {
    if !has_qemu() {
        return;
    }
    let it = Stored::new(&[]);
    let server = it.serve(&[]);
    it.change(&["add", "", "a"]);
    server.connect().write(10 * MIB, &[1; 512]).expect("a write");
    let overlay = it.scratch.join("overlay.qcow2");
    let mut snapshot = tool(NOWAIT);
    snapshot.args(["export", "snapshot", "", text(&overlay), "--control"]).arg(&it.control);
    snapshot.succeeds();
    server.connect().write(20 * MIB, &[1; 512]).expect("a write");
    assert_eq!(dirty(&server.socket(), "a"), [160, 320]);
    server.stop();
    assert_eq!(it.dirty_in_qemu("a"), [160]);
    it.qemu_checks();
    let above = Stored { image: overlay.clone(), ..it };
    assert_eq!(above.dirty_in_qemu("a"), [160, 320]);
    above.qemu_checks();
    let refused = refusal(&["commit", text(&overlay)]);
    assert!(refused.error.contains("it has dirty bitmaps"), "{}", refused.error);
    // Larger and smaller again, and larger, without a server.
    for (size, granules) in [("1G", &[160, 320][..]), ("15M", &[160]), ("256M", &[160])] {
        accepted(&["resize", text(&overlay), size, "--shrink"]);
        above.qemu_checks();
        if size != "15M" {
            let found = above.dirty_in_qemu("a");
            assert_eq!(found, granules, "{size}");
        }
    }
    let server = above.serve(&[]);
    assert_eq!(dirty(&server.socket(), "a"), [160]);
    server.stop();
    above.qemu_checks();
}

#[test]
fn bitmaps_that_qemu_has_are_kept_with_a_backing_file_and_with_clusters_of_any_size() {
    if !has_qemu() {
        return;
    }
    for options in ["cluster_size=512", "cluster_size=2M", "extended_l2=on,cluster_size=64k"] {
        let it = Stored::new(&[]);
        let base = it.scratch.join("base.qcow2");
        std::fs::rename(&it.image, &base).expect("a file to rename");
        let create =
            ["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "qcow2", "-o", options];
        tool("qemu-img").args(create).arg(&it.image).succeeds();
        let server = it.serve(&[]);
        it.change(&["add", "", "a"]);
        server.connect().write(10 * MIB, &[1; 512]).expect("a write");
        it.change(&["add", "", "b"]);
        server.connect().write(255 * MIB, &[1; 512]).expect("a write");
        server.stop();
        it.qemu_checks();
        assert_eq!(it.dirty_in_qemu("a"), [160, 4080], "{options}");
        assert_eq!(it.dirty_in_qemu("b"), [4080], "{options}");
        let backing = tool("qemu-img").args(["info", text(&it.image)]).succeeds();
        assert!(backing.contains(text(&base)), "{backing}");
    }
}

#[test]
fn what_cannot_be_stored_is_refused_in_one_line() {
    if !has_qemu() {
        return;
    }
    let it = Stored::new(&["--format", "raw"]);
    let server = it.serve(&["--format", "raw"]);
    it.change(&["add", "", "in memory"]);
    assert_eq!(it.listed()[0].get("persistent"), None);
    server.stop();
    let it = Stored::new(&[]);
    for number in 0..33 {
        it.qemu_bitmap(&["--add", "@", &number.to_string()]);
    }
    let refused = refusal(&["serve", text(&it.image)]);
    assert!(refused.error.contains("more than 32 bitmaps"), "{}", refused.error);
    it.qemu_bitmap(&["--remove", "@", "0"]);
    let server = it.serve(&[]);
    assert_eq!(it.listed().as_array().map(Vec::len), Some(32));
    assert!(it.command(&["add", "", "one more"]).fails().contains("at most 32 bitmaps"));
    server.stop();
    it.qemu_checks();
}

#[test]
fn a_bitmap_that_a_backup_has_frozen_is_stored_with_what_comes_after() {
    let region = REGION / USUAL;
    let both: Vec<u64> = (0..region).chain(5 * region..6 * region).collect();
    for (end, is_killed, expected) in [
        (None, true, both),
        (None, false, vec![16, 5 * region]),
        (Some("abort"), false, vec![16, 5 * region]),
        (Some("commit"), true, vec![5 * region]),
        (Some("commit"), false, vec![5 * region]),
    ] {
        let it = Stored::new(&[]);
        let server = it.serve(&[]);
        it.change(&["add", "", "a"]);
        let mut client = server.connect();
        client.write(MIB, &[1; 512]).expect("a write");
        it.backup(&["start", "", "--bitmap", "a"]);
        client.write(5 * REGION, &[1; 512]).expect("a write");
        let refused = it.command(&["remove", "", "a"]).fails();
        assert!(refused.contains("backup"), "{refused}");
        if let Some(end) = end {
            it.backup(&[end, ""]);
        }
        drop(client);
        match is_killed {
            true => it.kill(server),
            false => server.stop(),
        }
        let server = it.serve(&[]);
        assert_eq!(dirty(&server.socket(), "a"), expected, "{end:?}, killed: {is_killed}");
        server.stop();
        accepted(&["check", text(&it.image)]);
    }
}
