//! Images that are opened again while clients use them: snapshots, and sizes that a running image cannot
//! have.
//!
//! Invariant: a client sees a pause and nothing else; a request that is refused leaves the export as it
//! was, and no file.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use nowait_testkit::nbd::{Client, Command as Request, Mode};
use nowait_testkit::{Finished, SetOnDrop, require_tool, tool};
use serde_json::Value;

use crate::common::{MIB, NOWAIT, Scratch, Server, accepted, text};
use nowait_testkit::nbd::load::{bytes, load, verified_by_fio};

/// A server of an image of 64 MiB in a directory that it may make images in.
struct Served {
    server: Server,
    control: PathBuf,
    scratch: Scratch,
}

impl Served {
    fn start(format: &str, extra: &[&str]) -> Self {
        let scratch = Scratch::new();
        accepted(&["create", text(&scratch.join("disk")), "64M", "--format", format]);
        Self::start_of(scratch, format, extra)
    }

    /// A server of the image that is there.
    fn start_of(scratch: Scratch, format: &str, extra: &[&str]) -> Self {
        let (image, control) = (scratch.join("disk"), scratch.join("control"));
        let (address, directory) = (format!("unix:{}", control.display()), scratch.path());
        let arguments = ["--control", &address, "--format", format, "--allow-dir", text(directory)];
        let server = Server::start(&image, &[&arguments, extra].concat());
        Self { server, control, scratch }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    fn export(&self, arguments: &[&str]) -> Command {
        let mut command = tool(NOWAIT);
        command.arg("export").args(arguments).arg("--control").arg(&self.control);
        command
    }

    /// Takes a snapshot; returns the overlay.
    fn snapshot(&self, name: &str) -> PathBuf {
        let overlay = self.path(name);
        let report = self.export(&["snapshot", "@0", text(&overlay), "--json"]).succeeds();
        let report: Value = serde_json::from_str(&report).expect("JSON");
        assert_eq!(report["image"], text(&overlay));
        overlay
    }

    fn size(&self) -> u64 {
        let told = self.export(&["list", "--json"]).succeeds();
        let told: Value = serde_json::from_str(&told).expect("JSON");
        told[0]["size_bytes"].as_u64().expect("a size")
    }

    /// The names in its directory.
    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.scratch.path()).expect("a directory");
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
        let mut names: Vec<_> =
            entries.map(|entry| name(entry).to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    fn stop(self) -> Scratch {
        self.server.stop();
        self.scratch
    }
}

/// The bytes of the disk of `image`.
fn contents(scratch: &Scratch, image: &Path, format: &str) -> Vec<u8> {
    let raw = scratch.join("contents");
    accepted(&["copy", text(image), text(&raw), "--force", "-f", format, "-O", "raw"]);
    std::fs::read(raw).expect("a raw image")
}

#[test]
fn snapshots_under_load_keep_what_was_written_before_and_lose_nothing_that_is_written_after() {
    for format in ["raw", "qcow2"] {
        let it = Served::start(format, &[]);
        let mut idle = it.server.connect();
        idle.write(60 * MIB, &bytes(1, 70_000)).expect("a write");
        let mut clients =
            Mode::ALL.map(|mode| Client::connect(&it.server.socket(), mode).expect("a connection"));
        let over = &AtomicBool::new(false);
        let overlays = std::thread::scope(|scope| {
            let regions = clients.iter_mut().zip([0, 16 * MIB, 32 * MIB]);
            let loads: Vec<_> = regions
                .map(|(client, region)| scope.spawn(move || load(client, region, over)))
                .collect();
            let loading = SetOnDrop(over);
            let overlays = ["one", "two", "three"].map(|name| {
                let overlay = it.snapshot(name);
                it.server.connect().read(0, 512).expect("a new client is served");
                overlay
            });
            drop(loading);
            loads.into_iter().for_each(|load| assert!(load.join().expect("no error") > 0));
            overlays
        });
        idle.write(60 * MIB + 4096, &bytes(2, 4096)).expect("a write");
        let mut expected = bytes(1, 70_000);
        expected[4096..8192].copy_from_slice(&bytes(2, 4096));
        assert!(idle.read(60 * MIB, 70_000).expect("bytes") == expected);
        drop((idle, clients));
        // The images below are read by others, and not written to.
        accepted(&["info", text(&it.path("disk")), "--format", format]);
        let refused = tool(NOWAIT).args(["resize", text(&overlays[0]), "65M"]).fails();
        assert!(refused.contains("open for reading"), "{refused}");
        let refused = tool(NOWAIT).args(["resize", text(&overlays[2]), "65M"]).fails();
        assert!(refused.contains("open for writing"), "{refused}");
        let scratch = it.stop();
        let before = contents(&scratch, &scratch.join("disk"), format);
        assert!(before[60 << 20..][..70_000] == bytes(1, 70_000));
        let after = contents(&scratch, &overlays[2], "qcow2");
        assert!(after[60 << 20..][..70_000] == expected);
        for overlay in &overlays {
            accepted(&["check", text(overlay)]);
        }
    }
}

#[test]
fn an_overlay_is_served_again_and_committed_as_any() {
    let it = Served::start("raw", &[]);
    let mut client = it.server.connect();
    client.write(0, &bytes(1, 4096)).expect("a write");
    let overlay = it.snapshot("overlay");
    client.write(0, &bytes(2, 4096)).expect("a write");
    drop(client);
    let scratch = it.stop();
    let again = Server::start(&overlay, &[]);
    assert!(again.connect().read(0, 4096).expect("bytes") == bytes(2, 4096));
    again.stop();
    assert!(contents(&scratch, &scratch.join("disk"), "raw")[..4096] == bytes(1, 4096));
    accepted(&["commit", text(&overlay)]);
    assert!(contents(&scratch, &scratch.join("disk"), "raw")[..4096] == bytes(2, 4096));
}

#[test]
fn a_snapshot_that_is_refused_leaves_the_export_as_it_was_and_no_file() {
    let it = Served::start("raw", &[]);
    let mut client = it.server.connect();
    client.write(0, &bytes(1, 4096)).expect("a write");
    std::fs::write(it.path("taken"), "precious").expect("a file");
    let elsewhere = Scratch::new();
    let names = it.names();
    for (overlay, why) in [
        (it.path("taken"), "there is such a file already"),
        (elsewhere.join("new"), "is not in a directory of --allow-dir"),
        (it.path("missing/new"), "missing: there is no such file"),
        (it.path(".."), "names no file"),
    ] {
        let said = it.export(&["snapshot", "@0", text(&overlay)]).fails();
        assert!(said.contains(why) && said.trim().lines().count() == 1, "{said}");
    }
    let said = it.export(&["snapshot", "other", text(&it.path("new"))]).fails();
    assert!(said.contains("no such export"), "{said}");
    assert_eq!(
        (it.names(), std::fs::read(it.path("taken")).expect("it")),
        (names, b"precious".into())
    );
    client.write(4096, &bytes(2, 4096)).expect("a write");
    assert!(client.read(0, 4096).expect("bytes") == bytes(1, 4096));
    drop(client);
    let scratch = it.stop();
    let it = Served::start_of(scratch, "raw", &["--read-only"]);
    let said = it.export(&["snapshot", "@0", text(&it.path("new"))]).fails();
    assert!(said.contains("it is read-only"), "{said}");
    it.stop();
}

#[test]
fn limits_counts_and_write_protection_stay_through_a_snapshot() {
    let it = Served::start("raw", &["--limit-iops", "7000"]);
    let mut client = it.server.connect();
    client.write(0, &bytes(1, 4096)).expect("a write");
    it.export(&["read-only", "@0", "on"]).succeeds();
    let told = |it: &Served| -> Value {
        let told = it.export(&["list", "--json"]).succeeds();
        serde_json::from_str::<Value>(&told).expect("JSON")[0].take()
    };
    let before = told(&it);
    it.snapshot("overlay");
    let after = told(&it);
    for field in ["id", "name", "size_bytes", "read_only", "limits", "frontends", "places"] {
        assert_eq!(before[field], after[field], "{field}");
    }
    assert_eq!(after["format"], "qcow2");
    client.write(0, &[9; 4096]).expect_err("a refusal");
    it.export(&["read-only", "@0", "off"]).succeeds();
    client.write(0, &[9; 4096]).expect("a write");
    drop(client);
    it.stop();
}

#[test]
fn a_qcow2_disk_in_use_grows_and_shrinks_and_a_raw_one_shrinks() {
    for format in ["raw", "qcow2"] {
        let it = Served::start(format, &[]);
        let mut client = it.server.connect();
        client.write(30 * MIB, &bytes(1, 70_000)).expect("a write");
        let over = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut other = it.server.connect();
            let load = scope.spawn(move || load(&mut other, 8 * MIB, over));
            let loading = SetOnDrop(over);
            it.export(&["resize", "@0", "2G"]).succeeds();
            assert_eq!(it.size(), 2048 * MIB);
            let mut new = it.server.connect();
            new.write(2047 * MIB, &bytes(2, 4096)).expect("a write to the new part");
            let said = it.export(&["resize", "@0", "-2016M"]).fails();
            assert!(said.contains("it would shrink from"), "{said}");
            assert!(new.read(2047 * MIB, 4096).expect("bytes") == bytes(2, 4096));
            it.export(&["resize", "@0", "-2016M", "--shrink"]).succeeds();
            assert_eq!(it.size(), 32 * MIB);
            // Room that a client was told of is gone (C53).
            let write = Request::Write { offset: 2047 * MIB, data: vec![1; 512], fua: false };
            assert_eq!(new.call(&write), Err(28), "ENOSPC");
            it.export(&["resize", "@0", "+32M"]).succeeds();
            assert!(new.read(32 * MIB, 4096).expect("bytes").iter().all(|byte| *byte == 0));
            drop(loading);
            assert!(load.join().expect("no error") > 0);
        });
        assert!(client.read(30 * MIB, 70_000).expect("bytes") == bytes(1, 70_000));
        drop(client);
        let scratch = it.stop();
        let all = contents(&scratch, &scratch.join("disk"), format);
        assert_eq!(all.len(), 64 << 20);
        assert!(all[30 << 20..][..70_000] == bytes(1, 70_000));
        if format == "qcow2" {
            accepted(&["check", text(&scratch.join("disk"))]);
        }
    }
}

#[test]
fn what_fio_verifies_is_whole_through_three_snapshots_resizes_and_limits() {
    nowait_testkit::needs!(require_tool("fio"));
    let it = Served::start("qcow2", &[]);
    let mut fio = verified_by_fio(it.scratch.path(), it.server.uri());
    std::thread::scope(|scope| {
        let load = scope.spawn(|| fio.succeeds());
        for (n, size) in ["80M", "96M", "72M"].into_iter().enumerate() {
            it.snapshot(&format!("overlay-{n}"));
            it.export(&["limit", "@0", "--limit-iops", &format!("{}", 3000 + n * 2000)]).succeeds();
            std::thread::sleep(std::time::Duration::from_millis(200));
            it.export(&["resize", "@0", size, "--shrink"]).succeeds();
            it.export(&["limit", "@0", "--clear"]).succeeds();
        }
        load.join().expect("fio finds no difference");
    });
    let scratch = it.stop();
    accepted(&["check", text(&scratch.join("overlay-2"))]);
}
