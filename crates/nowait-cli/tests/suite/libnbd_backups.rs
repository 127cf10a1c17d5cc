//! Backups by other programs: nbdcopy for all of a disk, libnbd for what a bitmap calls dirty, through kills of the server.
//!
//! Invariant: what a program has copied is compared byte for byte with a copy of the disk that the test took.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nowait_testkit::nbd::{Client, Command};
use nowait_testkit::{PYTHON, Random, allocated, python_with_nbd, require_tool, seed, tool};
use serde_json::{Value, json};

use crate::common::disk_with_bitmaps::{REGION, SIZE, Stored, USUAL};
use crate::common::{Finished, KIB, MIB, Scratch, Server, accepted, text};

/// Bytes at the start of the disk that the test changes.
const CHANGED: u64 = 4 * REGION;

/// Runs the program that copies by libnbd; returns what it has printed.
fn incremental(uri: &str, target: &Path, bitmap: Option<&str>) -> Value {
    let script =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../nowait-daemon/tests/clients/incremental.py");
    let printed = tool(PYTHON).args([script, uri, text(target)]).args(bitmap).succeeds();
    serde_json::from_str(&printed).expect("JSON")
}

#[test]
fn libnbd_gets_allocation_and_bitmaps_in_one_answer_for_ranges_of_4_gib() {
    nowait_testkit::needs!(python_with_nbd());
    let size = 6 * 1024 * MIB + 512;
    let scratch = Scratch::new();
    let (image, target) = (scratch.sparse("disk.img", size), scratch.join("target"));
    let server = Server::start(&image, &["--bitmap", "a", "--bitmap", "b"]);
    let mut client = server.connect();
    // Before, across and after the end of the first range, and at the end of the disk.
    let four = 4 * 1024 * MIB;
    let written = [(MIB, 4 * KIB), (four - 2 * USUAL, 4 * USUAL), (size - 512, 512)];
    for (offset, len) in written {
        client.write(offset, &vec![7; len as usize]).expect("a write");
    }
    client
        .call(&Command::Zero { offset: 5 * 1024 * MIB, len: MIB as u32, keep: false })
        .expect("zeros");
    for bitmap in ["a", "b"] {
        let said = incremental(server.uri(), &target, Some(bitmap));
        let expected = json!([
            [MIB, USUAL],
            [four - 2 * USUAL, 4 * USUAL],
            [5 * 1024 * MIB, MIB],
            [size - 512, 512]
        ]);
        assert_eq!(said["dirty"], expected, "{bitmap}");
        let data = said["data"].as_u64().expect("a number");
        assert!((4 * USUAL..MIB).contains(&data), "{said}");
    }
    let all = incremental(server.uri(), &scratch.join("all"), None);
    assert!(all["data"].as_u64() < Some(MIB), "{all}");
    server.stop();
    for copy in [&target, &scratch.join("all")] {
        // All that is not a hole; the rest would take long to compare.
        assert!(allocated(copy) < 3 * MIB, "{} bytes", allocated(copy));
        for (offset, len) in written {
            let mut bytes = vec![0; len as usize];
            let file = File::open(copy).expect("the copy");
            file.read_exact_at(&mut bytes, offset).expect("bytes");
            assert!(bytes.iter().all(|byte| *byte == 7), "{offset}");
        }
    }
}

/// Changes a part of the disk at random.
fn change(client: &mut Client, random: &mut Random) {
    for _ in 0..12 {
        let len = 1 + random.below(200 * KIB);
        let offset = random.below(CHANGED - len);
        match random.below(4) {
            0 => client.call(&Command::Trim { offset, len: len as u32 }),
            1 => client.call(&Command::Zero { offset, len: len as u32, keep: true }),
            _ => client.write(offset, &random.bytes(len as usize)),
        }
        .expect("a change");
    }
}

/// A disk with bitmap `a`, and the copy that other programs keep of it.
struct Backed {
    it: Stored,
    copy: PathBuf,
    random: Random,
}

impl Backed {
    /// Changes the disk, begins a backup with `only`, and changes the disk again. Returns the URI of the backup; the file
    /// `expected` has the disk as it was.
    fn begin(&mut self, server: &Server, only: &[&str]) -> String {
        let mut client = server.connect();
        change(&mut client, &mut self.random);
        accepted(&["copy", server.uri(), text(&self.expected()), "-O", "raw", "--force"]);
        self.it.backup(&[&["start", "", "--bitmap", "a"], only].concat());
        change(&mut client, &mut self.random);
        server.uri().replace("///?", "///backup?")
    }

    fn expected(&self) -> PathBuf {
        self.it.scratch.join("expected")
    }

    /// Brings the copy up to date by libnbd, and compares it.
    fn update(&self, uri: &str) {
        let said = incremental(uri, &self.copy, Some("a"));
        let dirty = said["dirty"].as_array().expect("ranges");
        // All changes are there, and what a kill has added is whole regions around them.
        assert!(!dirty.is_empty(), "{said}");
        for range in dirty {
            let end = range[0].as_u64().zip(range[1].as_u64()).map(|(at, len)| at + len);
            assert!(end <= Some(CHANGED), "{said}");
        }
        self.compare();
    }

    fn compare(&self) {
        assert_eq!(self.copy.metadata().expect("the copy").len(), SIZE);
        tool("cmp").args([&self.copy, &self.expected()]).succeeds();
    }
}

#[test]
fn increments_by_libnbd_are_whole_also_when_the_server_is_killed_between_them() {
    nowait_testkit::needs!(python_with_nbd() && require_tool("nbdcopy"));
    for it in Stored::of_each_kind() {
        let copy = it.scratch.join("copy");
        let mut backed = Backed { it, copy, random: Random::from_seed(seed()) };
        // All of the disk, and a kill after the commit.
        let server = backed.it.serve(&[]);
        backed.it.change(&["add", "", "a"]);
        let uri = backed.begin(&server, &[]);
        tool("nbdcopy").args([&uri, text(&backed.copy)]).succeeds();
        backed.it.backup(&["commit", ""]);
        backed.compare();
        backed.it.kill(server);
        // An increment that was read, and a kill before the commit: its bits come again with the next one.
        let server = backed.it.serve(&[]);
        let uri = backed.begin(&server, &["--only-dirty"]);
        backed.update(&uri);
        backed.it.kill(server);
        let server = backed.it.serve(&[]);
        for only in [&[][..], &["--only-dirty"]] {
            let uri = backed.begin(&server, only);
            backed.update(&uri);
            backed.it.backup(&["commit", ""]);
        }
        server.stop();
        // An end in order has the changes after the last instant, and no others.
        let server = backed.it.serve(&["--read-only"]);
        let said = incremental(server.uri(), &backed.copy, Some("a"));
        assert_ne!(said["dirty"], json!([]));
        accepted(&["copy", server.uri(), text(&backed.expected()), "-O", "raw", "--force"]);
        backed.compare();
        server.stop();
        backed.it.checks();
    }
}
