//! QEMU as a client that reads dirty bitmaps: its own server is one side of each comparison, or a table in the test.
//!
//! Invariant: QEMU's tools make the images and the changes; only the server differs.

use std::path::{Path, PathBuf};
use std::process::Command;

use nowait_testkit::tool;
use serde_json::Value;

use crate::common::disk_with_bitmaps::{Stored, has_qemu, lost};
use crate::common::{Finished, KIB, MIB, Scratch, Server, text};
use crate::control::Controlled;
use crate::copy_other_servers::Peer;

/// QEMU shows what is dirty as data that is not there.
const DIRTY: bool = true;
/// Clean in a bitmap, which QEMU shows as data.
const CLEAN: bool = false;

/// An extent of a bitmap: its start, its length, and whether it is dirty.
type Extent = (u64, u64, bool);

/// The command by which QEMU maps `export` of the server at `socket` in the place of its allocation by `context`.
fn map_command(socket: &Path, export: &str, context: &str, more: &[&str]) -> Command {
    let server = format!("driver=nbd,server.type=unix,server.path={}", text(socket));
    let options = format!("{server},export={export},x-dirty-bitmap={context}");
    let mut command = tool("qemu-img");
    command.args(["map", "--output=json", "--image-opts"]).args(more).arg(options);
    command
}

/// All extents that QEMU finds, as JSON.
fn map(socket: &Path, export: &str, context: &str, more: &[&str]) -> Value {
    let answer = map_command(socket, export, context, more).succeeds();
    serde_json::from_str(&answer).expect("JSON")
}

/// The extents of a bitmap up to `size`, beyond which QEMU fills up the last sector.
fn extents(map: &Value, size: u64) -> Vec<Extent> {
    let all = map.as_array().expect("extents").iter();
    let numbers = |it: &Value| {
        let number = |key: &str| it[key].as_u64().expect("a number");
        (number("start"), number("length"), it["data"] == Value::Bool(false))
    };
    all.map(numbers).filter(|(start, ..)| *start < size).collect()
}

/// A qcow2 disk of `size` bytes, changed by QEMU while it had the bitmaps `names`, each with its granularity. They have
/// been disabled since, without which QEMU would not serve them read-only.
fn changed_by_qemu(scratch: &Scratch, size: u64, cluster: u64, names: &[(&str, u64)]) -> PathBuf {
    let image = scratch.join(&format!("{size}-{cluster}.qcow2"));
    let cluster = format!("cluster_size={cluster}");
    let create = ["create", "-q", "-f", "qcow2", "-o", &cluster, text(&image), &size.to_string()];
    tool("qemu-img").args(create).succeeds();
    qemu_io(&image, &["write 0 64k"]);
    for (name, granularity) in names {
        let granularity = granularity.to_string();
        let add = ["bitmap", "--add", "-g", &granularity, text(&image), name];
        tool("qemu-img").args(add).succeeds();
    }
    let end = format!("write {} 512", size - 512);
    qemu_io(
        &image,
        &["write 1M 2000", "write 513k 512", "write -z 2M 100k", "discard 3M 64k", &end],
    );
    for (name, _) in names {
        tool("qemu-img").args(["bitmap", "--disable", text(&image), name]).succeeds();
    }
    image
}

/// Runs commands of qemu-io on a qcow2 image.
fn qemu_io(image: &Path, commands: &[&str]) {
    let mut io = tool("qemu-io");
    io.args(["-f", "qcow2"]).args(commands.iter().flat_map(|it| ["-c", *it])).arg(image);
    io.succeeds();
}

#[test]
fn qemu_finds_in_our_exports_the_bitmaps_that_it_finds_in_those_of_its_own_server() {
    nowait_testkit::needs!(has_qemu());
    let names = [("b", 64 * KIB), ("small", 512), ("uneven", 4 * MIB), ("größe", 128 * KIB)];
    for (size, cluster) in [(4 * MIB, 64 * KIB), (10 * MIB - 512, 4 * KIB), (9 * MIB + 1536, 512)] {
        let scratch = Scratch::new();
        let image = changed_by_qemu(&scratch, size, cluster, &names);
        let bitmaps = names.map(|(name, _)| format!("--bitmap={name}"));
        let arguments = ["-f", "qcow2", "--read-only"].into_iter();
        let arguments: Vec<&str> = arguments.chain(bitmaps.iter().map(|it| &**it)).collect();
        let peer = Peer::qemu_nbd(&scratch, &image, &arguments);
        let context = |name: &str| format!("qemu:dirty-bitmap:{name}");
        // Parts of the disk are asked for, too: neither limit is that of a granule.
        let parts: [&[&str]; 3] = [&[], &["--max-length=12345"], &["--start-offset=12345"]];
        let maps_of = |socket: &Path, export: &str| {
            names.map(|(name, _)| parts.map(|part| map(socket, export, &context(name), part)))
        };
        let expected = maps_of(&scratch.join("qemu.sock"), "");
        drop(peer);
        let of_small = extents(&expected[1][0], size);
        assert!(of_small.contains(&(513 * KIB, 512, DIRTY)), "{of_small:?}");
        assert_eq!(of_small.last(), Some(&(size - 512, 512, DIRTY)));
        // One server that may write to the disk, and then a disk under two names, which two servers read.
        let server = Server::start(&image, &[]);
        assert_eq!(maps_of(&server.socket(), ""), expected, "{size} bytes");
        server.stop();
        let twice = format!("other={}", text(&image));
        let first = Server::start(&image, &[&twice, "--read-only"]);
        let second = Server::start(&image, &["--read-only"]);
        for (server, export) in [(&first, "other"), (&first, ""), (&second, "")] {
            assert_eq!(maps_of(&server.socket(), export), expected, "{size} bytes, {export:?}");
        }
        second.stop();
        first.stop();
    }
}

#[test]
fn qemu_finds_the_end_of_a_bitmap_at_the_last_byte_of_a_raw_disk() {
    nowait_testkit::needs!(has_qemu());
    let usual = 64 * KIB;
    // The size of the disk, the offset and the length of a write, and what is dirty after it.
    let cases: [(u64, u64, u64, &[Extent]); 6] = [
        (1000, 300, 600, &[(0, 1000, DIRTY)]),
        (MIB, MIB - 1, 1, &[(0, MIB - usual, CLEAN), (MIB - usual, usual, DIRTY)]),
        (MIB + 1, MIB, 1, &[(0, MIB, CLEAN), (MIB, 1, DIRTY)]),
        (
            MIB + 1,
            MIB - 1,
            1,
            &[(0, MIB - usual, CLEAN), (MIB - usual, usual, DIRTY), (MIB, 1, CLEAN)],
        ),
        (MIB - 512, MIB - 1024, 512, &[(0, MIB - usual, CLEAN), (MIB - usual, usual - 512, DIRTY)]),
        (MIB + 511, 0, MIB + 511, &[(0, MIB + 511, DIRTY)]),
    ];
    for (size, offset, len, expected) in cases {
        let scratch = Scratch::new();
        let server = Server::start(&scratch.sparse("disk.img", size), &["--bitmap", "b"]);
        let found = |name| extents(&map(&server.socket(), "", name, &[]), size);
        assert_eq!(found("qemu:dirty-bitmap:b"), [(0, size, CLEAN)], "{size}");
        let write = format!("write {offset} {len}");
        tool("qemu-io").args(["-f", "raw", "-c", &write, server.uri()]).succeeds();
        assert_eq!(found("qemu:dirty-bitmap:b"), expected, "{size}: {write}");
        server.stop();
    }
}

#[test]
fn qemu_finds_the_depth_of_our_images_as_that_of_its_own_server() {
    nowait_testkit::needs!(has_qemu());
    let scratch = Scratch::new();
    let base = changed_by_qemu(&scratch, 4 * MIB, 64 * KIB, &[("below", 64 * KIB)]);
    let overlay = scratch.join("overlay.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", text(&base), text(&overlay)];
    tool("qemu-img").args(create).succeeds();
    qemu_io(&overlay, &["write 1M 1M"]);
    let arguments = ["-f", "qcow2", "--read-only", "--allocation-depth"];
    let peer = Peer::qemu_nbd(&scratch, &overlay, &arguments);
    let context = "qemu:allocation-depth";
    let expected = map(&scratch.join("qemu.sock"), "", context, &[]);
    drop(peer);
    assert!(expected.as_array().expect("extents").len() > 3, "{expected}");
    let server = Server::start(&overlay, &["--read-only"]);
    assert_eq!(map(&server.socket(), "", context, &[]), expected);
    // QEMU's server would offer a bitmap of the image below, which tells nothing about what this one has changed since.
    map_command(&server.socket(), "", "qemu:dirty-bitmap:below", &[]).fails();
    server.stop();
}

#[test]
fn qemu_is_not_offered_a_bitmap_that_is_inconsistent_and_reads_the_others() {
    nowait_testkit::needs!(has_qemu());
    let it = Stored::new(&[]);
    it.qemu_bitmap(&["--add", "@", "broken"]);
    // An end without an orderly close leaves the bitmap in use, which QEMU calls inconsistent.
    let mut end = tool("qemu-io");
    end.args(["-f", "qcow2", "-c", "write 1M 64k", "-c", "abort", text(&it.image)]);
    end.current_dir(it.scratch.path()).fails();
    it.qemu_bitmap(&["--add", "@", "good"]);
    it.qemu_writes("write 2M 64k");
    let writable = it.serve(&[]);
    assert!(it.listed().as_array().expect("bitmaps").contains(&lost("broken")));
    let good = map(&writable.socket(), "", "qemu:dirty-bitmap:good", &[]);
    assert_eq!(extents(&good, 3 * MIB)[1], (2 * MIB, 64 * KIB, DIRTY));
    map_command(&writable.socket(), "", "qemu:dirty-bitmap:broken", &[]).fails();
    writable.stop();
    let read_only = it.serve(&["--read-only"]);
    assert_eq!(map(&read_only.socket(), "", "qemu:dirty-bitmap:good", &[]), good);
    map_command(&read_only.socket(), "", "qemu:dirty-bitmap:broken", &[]).fails();
    read_only.stop();
    it.qemu_checks();
}

/// Runs a command of qemu-io on an export.
fn qemu_io_on(uri: &str, command: &str) -> Command {
    let mut io = tool("qemu-io");
    io.args(["-f", "raw", "-c", command, uri]);
    if command.starts_with("read") {
        io.arg("-r");
    }
    io
}

#[test]
fn qemu_reads_from_a_backup_what_was_there_before_it_wrote() {
    nowait_testkit::needs!(has_qemu());
    for only_dirty in [&["--only-dirty"][..], &[]] {
        let it = Controlled::start();
        let uri = it.server.uri();
        let backup = uri.replace("///?", "///backup?");
        it.nowait(&["export", "bitmap", "add", "", "b"]).succeeds();
        // At the start of the disk, inside it and at its end.
        for write in ["write -P 0x5d 0 64k", "write -P 0xd5 1M 64k", "write -P 0xcd 8128k 64k"] {
            qemu_io_on(uri, write).succeeds();
        }
        let dirty = ["read -P 0x5d 0 64k", "read -P 0xd5 1M 64k", "read -P 0xcd 8128k 64k"];
        // Clean bytes before the second and the third write, and far from all.
        let clean = ["read -P 0 992k 32k", "read -P 0 8064k 64k", "read -P 0 3M 1M"];
        let start = ["export", "backup", "start", "", "--bitmap", "b"];
        it.nowait(&[&start, only_dirty].concat()).succeeds();
        let frozen = map(&it.server.socket(), "backup", "qemu:dirty-bitmap:b", &[]);
        let check = || {
            for read in dirty {
                qemu_io_on(&backup, read).succeeds();
            }
            for read in clean {
                let mut read = qemu_io_on(&backup, read);
                if only_dirty.is_empty() {
                    read.succeeds();
                } else {
                    let said = read.fails();
                    assert!(said.contains("read failed: Operation not permitted"), "{said}");
                }
            }
            assert_eq!(map(&it.server.socket(), "backup", "qemu:dirty-bitmap:b", &[]), frozen);
        };
        check();
        for write in ["write -P 0xab 0 64k", "write -P 0xad 992k 64k", "write -z 8064k 128k"] {
            qemu_io_on(uri, write).succeeds();
        }
        check();
        it.nowait(&["export", "backup", "abort", ""]).succeeds();
        it.server.stop();
    }
}
