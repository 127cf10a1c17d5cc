//! Dirty bitmaps of raw files and block devices, in a file of their own.
//!
//! Invariant: a change that a bitmap may lack makes all of it dirty, and a file that is not one for the disk stays as it is.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use nowait_testkit::{Random, require_tool, tool};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::disk_with_bitmaps::{
    QemuNbd, REGION, SIZE, Stored, USUAL, dirty, has_qemu, info,
};
use crate::common::loop_device::LoopDevice;
use crate::common::{Finished, MIB, NOWAIT, Server, accepted, refusal, text};
use crate::upgrade::Upgraded;

/// The warning where a bitmap may lack a change.
const MAY_BE_CHANGED: &str = "the disk may have been changed without its dirty bitmaps";
/// The warning where bitmaps are not used.
const NOT_USED: &str = "its dirty bitmaps are not used: ";

/// A raw disk with bitmap `a`, in which a granule is dirty, and that is not served.
fn closed() -> Stored {
    let it = Stored::raw();
    let server = it.serve(&[]);
    it.change(&["add", "", "a"]);
    server.connect().write(MIB, &[1; 512]).expect("a write");
    server.stop();
    it
}

/// The same, whose server was killed.
fn killed() -> Stored {
    let it = Stored::raw();
    let server = it.serve(&[]);
    it.change(&["add", "", "a"]);
    server.connect().write(MIB, &[1; 512]).expect("a write");
    it.kill(server);
    it
}

/// Serves the disk once. Returns what is listed, and the log.
fn served_once(it: &Stored, extra: &[&str]) -> (Value, String) {
    let server = it.serve(extra);
    let (listed, log) = (it.listed(), server.log());
    server.stop();
    (listed, log)
}

#[test]
fn qemu_reads_and_makes_the_bitmaps_of_a_raw_disk() {
    nowait_testkit::needs!(has_qemu());
    let it = closed();
    it.qemu_checks();
    assert_eq!(it.flags(), [("a".to_owned(), json!(["auto"]))]);
    assert_eq!(it.dirty_in_qemu("a"), [16]);
    it.qemu_bitmap(&["--add", "@", "theirs"]);
    it.qemu_bitmap(&["--merge", "a", "@", "theirs"]);
    let server = it.serve(&[]);
    assert!(!server.log().contains(MAY_BE_CHANGED), "{}", server.log());
    assert_eq!(it.listed(), json!([info("a", true, 1), info("theirs", true, 1)]));
    server.connect().write(40 * MIB, &[1; 512]).expect("a write");
    server.stop();
    it.qemu_checks();
    assert_eq!(it.dirty_in_qemu("theirs"), [16, 640]);
    it.qemu_bitmap(&["--clear", "@", "a"]);
    it.qemu_bitmap(&["--remove", "@", "theirs"]);
    assert_eq!(served_once(&it, &[]).0, json!([info("a", true, 0)]));
    // Bytes that QEMU writes by that file are on the disk, and in its bitmaps, but nothing tells us who has written to the disk.
    tool("qemu-io").args(["-f", "qcow2", "-c", "write 80M 64k", text(&it.stored)]).succeeds();
    assert_eq!(it.dirty_in_qemu("a"), [1280]);
    let (listed, log) = served_once(&it, &[]);
    assert!(log.contains(MAY_BE_CHANGED), "{log}");
    assert_eq!(listed, json!([info("a", true, SIZE / USUAL)]));
    it.qemu_checks();
}

#[test]
fn c93_a_file_that_another_program_has_written_to_is_dirty_as_a_whole() {
    let write = |it: &Stored| {
        let file = File::options().write(true).open(&it.image).expect("the image");
        file.write_all_at(&[2; 512], 200 * MIB).expect("a write");
    };
    let restore = |it: &Stored| {
        let (kept, times) = (it.scratch.join("kept"), ["-a", "--no-preserve=links"]);
        tool("cp").args(times).args([&it.image, &kept]).succeeds();
        fs::rename(&kept, &it.image).expect("a rename");
    };
    type Case<'a> = (&'a str, fn() -> Stored, &'a dyn Fn(&Stored));
    let cases: [Case<'_>; 4] = [
        ("a write", closed, &write),
        ("times that are set back", closed, &|it| {
            let before = fs::metadata(&it.image).and_then(|meta| meta.modified()).expect("times");
            write(it);
            let file = File::options().write(true).open(&it.image).expect("the image");
            file.set_modified(before).expect("a time");
        }),
        ("a copy in its place", closed, &restore),
        ("a copy in its place, after a kill", killed, &restore),
    ];
    for (what, prepared, act) in cases {
        let it = prepared();
        act(&it);
        // Of a disk that is only read nothing is changed, and such bitmaps are not served.
        let before = fs::read(&it.stored).expect("bitmaps");
        let (listed, log) = served_once(&it, &["--read-only"]);
        assert!(log.contains(MAY_BE_CHANGED), "{what}: {log}");
        assert_eq!(listed[0]["inconsistent"], json!(true), "{what}");
        assert!(fs::read(&it.stored).expect("bitmaps") == before, "{what}");
        let (listed, log) = served_once(&it, &[]);
        assert!(log.contains(MAY_BE_CHANGED), "{what}: {log}");
        assert_eq!(listed, json!([info("a", true, SIZE / USUAL)]), "{what}");
        let (listed, log) = served_once(&it, &[]);
        assert!(!log.contains(MAY_BE_CHANGED), "{what}: {log}");
        assert_eq!(listed, json!([info("a", true, SIZE / USUAL)]), "{what}");
    }
    let untouched = closed();
    let (listed, log) = served_once(&untouched, &["--read-only"]);
    assert!(!log.contains(MAY_BE_CHANGED), "{log}");
    assert_eq!(listed[0]["dirty_bytes"], json!(USUAL));
}

#[test]
fn bitmaps_of_a_raw_disk_go_along_with_its_size_and_a_snapshot() {
    let it = closed();
    let server = it.serve(&[]);
    let control = ["--control", text(&it.control)];
    let resize = |size: &str| {
        let resize = ["export", "resize", "", size, "--shrink"];
        tool(NOWAIT).args(resize).args(control).succeeds();
    };
    server.connect().write(250 * MIB, &[1; 512]).expect("a write");
    for (size, granules) in [("300M", 2), ("240M", 1), ("256M", 1)] {
        resize(size);
        assert_eq!(it.listed(), json!([info("a", true, granules)]), "{size}");
    }
    let overlay = it.scratch.join("overlay.qcow2");
    let snapshot = ["export", "snapshot", "", text(&overlay)];
    tool(NOWAIT).args(snapshot).args(control).succeeds();
    server.connect().write(20 * MIB, &[1; 512]).expect("a write");
    assert_eq!(dirty(&server.socket(), "a"), [16, 320]);
    assert!(!server.log().contains(MAY_BE_CHANGED), "{}", server.log());
    server.stop();
    assert_eq!(served_once(&it, &["--format", "raw"]).0, json!([info("a", true, 1)]));
    // A commit into the raw disk is a change by another program.
    let above = Stored { image: overlay.clone(), stored: overlay.clone(), ..it };
    let server = above.serve(&[]);
    above.change(&["remove", "", "a"]);
    server.stop();
    accepted(&["commit", text(&overlay)]);
    let it = Stored {
        image: above.scratch.join("disk.img"),
        stored: above.scratch.join("disk.img.bitmaps.qcow2"),
        ..above
    };
    let (listed, log) = served_once(&it, &[]);
    assert!(log.contains(MAY_BE_CHANGED), "{log}");
    assert_eq!(listed, json!([info("a", true, SIZE / USUAL)]));
    // So is another size that no server has given it.
    for size in ["300M", "200M"] {
        let server = it.serve(&[]);
        it.change(&["clear", "", "a"]);
        server.stop();
        accepted(&["resize", text(&it.image), size, "--shrink"]);
        let (listed, log) = served_once(&it, &[]);
        assert!(log.contains(MAY_BE_CHANGED), "{size}: {log}");
        let all = fs::metadata(&it.image).expect("the image").len() / USUAL;
        assert_eq!(listed, json!([info("a", true, all)]), "{size}");
        if has_qemu() {
            it.qemu_checks();
        }
    }
}

#[test]
fn an_upgrade_takes_the_bitmaps_of_a_raw_disk_along() {
    let it = closed();
    let Stored { scratch, image, stored, control } = it;
    let address = format!("unix:{}", control.display());
    let own = ["--control", &address, "--allow-dir", text(scratch.path()), "--verbose"];
    let server = Server::start(&image, &own);
    let mut upgraded = Upgraded::of(server, &control, scratch);
    upgraded.connect().write(5 * REGION, &[1; 512]).expect("a write");
    upgraded.upgrade();
    let listed = || {
        let listed = upgraded.command(&["export", "bitmap", "list", "", "--json"]).succeeds();
        serde_json::from_str::<Value>(&listed).expect("JSON")
    };
    assert_eq!(listed(), json!([info("a", true, 2)]), "the exact bits");
    upgraded.connect().write(9 * REGION, &[1; 512]).expect("a write");
    // The lock on the bitmaps has gone along, too.
    assert!(refusal(&["serve", text(&image)]).error.contains("another process has it open"));
    upgraded.command(&["export", "bitmap", "add", "", "b"]).succeeds();
    assert_eq!(listed(), json!([info("a", true, 3), info("b", true, 0)]));
    let (scratch, _) = upgraded.stop();
    let it = Stored { scratch, image, stored, control };
    let (listed, _) = served_once(&it, &[]);
    assert_eq!(listed, json!([info("a", true, 3), info("b", true, 0)]));
}

#[test]
fn bitmaps_that_another_process_uses_keep_the_disk_from_being_served() {
    nowait_testkit::needs!(has_qemu());
    let it = closed();
    let before = fs::read(&it.stored).expect("bitmaps");
    // A link to the disk has the same bitmaps, and QEMU only reads them.
    let reader = QemuNbd::start(&it.stored, "a", &it.scratch.join("qemu"));
    let refused = refusal(&["serve", text(&it.image)]);
    assert!(refused.error.contains("another process has it open"), "{}", refused.error);
    drop(reader);
    assert!(fs::read(&it.stored).expect("bitmaps") == before);
    assert_eq!(served_once(&it, &[]).0, json!([info("a", true, 1)]));
}

/// The fate of the file with the bitmaps, and the message about it.
type Damage = (&'static str, fn(&Stored), &'static str);

fn damages() -> [Damage; 6] {
    [
        (
            "no image",
            |it| fs::write(&it.stored, "text").expect("a file"),
            "it is not a qcow2 image",
        ),
        (
            "an image with data of its own",
            |it| {
                fs::remove_file(&it.stored).expect("a file");
                accepted(&["create", text(&it.stored), "1M"]);
            },
            "it is not the file with the bitmaps of a raw disk",
        ),
        (
            "a symbolic link",
            |it| {
                let kept = it.scratch.join("kept");
                fs::rename(&it.stored, &kept).expect("a rename");
                symlink(&kept, &it.stored).expect("a link");
            },
            "it is a symbolic link",
        ),
        (
            "a file that was cut off",
            |it| {
                let file = File::options().write(true).open(&it.stored).expect("bitmaps");
                file.set_len(70_000).expect("a length");
            },
            "it was cut off",
        ),
        (
            "the bitmaps of another disk",
            |it| {
                let other = it.scratch.join("other.img");
                let server = {
                    accepted(&["create", text(&other), &SIZE.to_string()]);
                    let of_other = ["--allow-dir", text(it.scratch.path()), "--control"];
                    let control = format!("unix:{}", it.control.display());
                    Server::start(&other, &[&of_other[..], &[&control]].concat())
                };
                it.change(&["add", "", "b"]);
                server.stop();
                fs::rename(it.scratch.join("other.img.bitmaps.qcow2"), &it.stored)
                    .expect("a rename");
            },
            "another disk",
        ),
        (
            "a list of bitmaps that is damaged",
            |it| {
                let bytes = fs::read(&it.stored).expect("bitmaps");
                // The name of the only bitmap is the last byte of its entry.
                let entry = bytes.chunks(8).rposition(|word| word == b"a\0\0\0\0\0\0\0");
                let at = entry.expect("an entry") as u64 * 8;
                let file = File::options().write(true).open(&it.stored).expect("bitmaps");
                file.write_all_at(&[9], at - 8).expect("another type");
            },
            "the list of its bitmaps is damaged",
        ),
    ]
}

#[test]
fn c94_a_file_that_is_not_one_for_the_disk_is_not_used_and_stays_as_it_is() {
    for (what, act, why) in damages() {
        let it = closed();
        act(&it);
        let before = fs::read(&it.stored).expect("bitmaps");
        for mode in [&["--read-only"][..], &[]] {
            let server = it.serve(mode);
            assert!(server.log().contains(NOT_USED), "{what}: {}", server.log());
            assert!(server.log().contains(why), "{what}: {}", server.log());
            assert_eq!(it.listed(), json!([]), "{what}");
            if mode.is_empty() {
                assert!(it.command(&["add", "", "b"]).fails().contains(why), "{what}");
                it.change(&["add", "", "b", "--temporary"]);
                let resize = ["export", "resize", "", "300M", "--control", text(&it.control)];
                tool(NOWAIT).args(resize).succeeds();
                server.connect().write(299 * MIB, &[1; 512]).expect("a write");
            }
            server.stop();
        }
        assert!(fs::read(&it.stored).expect("bitmaps") == before, "{what}");
    }
}

/// `nowait serve IMAGE --bitmap-dir` of an image, whose bitmaps cannot be beside it.
fn serve_with_dir(it: &Stored, image: &Path, directory: &Path) -> Server {
    let control = format!("unix:{}", it.control.display());
    Server::start(image, &["--control", &control, "--bitmap-dir", text(directory)])
}

#[test]
fn a_directory_of_bitmaps_has_a_file_for_each_disk() {
    let it = Stored::raw();
    let directory = it.scratch.join("bitmaps");
    let missing = refusal(&["serve", text(&it.image), "--bitmap-dir", text(&directory)]);
    assert!(missing.error.contains("No such file or directory"), "{}", missing.error);
    fs::create_dir(&directory).expect("a directory");
    let other = it.scratch.join("below");
    fs::create_dir(&other).expect("a directory");
    let other = other.join("disk.img");
    accepted(&["create", text(&other), "64M"]);
    for (image, at) in [(&it.image, MIB), (&other, 2 * MIB)] {
        let server = serve_with_dir(&it, image, &directory);
        it.change(&["add", "", "a"]);
        server.connect().write(at, &[1; 512]).expect("a write");
        server.stop();
    }
    assert_eq!(fs::read_dir(&directory).expect("bitmaps").count(), 2);
    for (image, at, size) in [(&it.image, MIB, "300M"), (&other, 2 * MIB, "100M")] {
        let server = serve_with_dir(&it, image, &directory);
        assert_eq!(it.listed(), json!([info("a", true, 1)]));
        let resize = ["export", "resize", "", size, "--control", text(&it.control)];
        tool(NOWAIT).args(resize).succeeds();
        server.connect().write(at, &[1; 512]).expect("a write");
        assert_eq!(it.listed(), json!([info("a", true, 1)]));
        server.stop();
    }
    assert!(!it.stored.exists());
}

#[test]
fn where_no_file_may_be_made_a_bitmap_is_in_memory_and_says_so() {
    let it = Stored::raw();
    let control = format!("unix:{}", it.control.display());
    let server = Server::start(&it.image, &["--control", &control]);
    it.change(&["add", "", "a"]);
    assert_eq!(it.listed()[0].get("persistent"), None);
    server.stop();
    assert!(!it.stored.exists());
    // Bitmaps that are there are kept all the same; only a file for another size cannot be made.
    let server = it.serve(&[]);
    it.change(&["add", "", "a"]);
    server.stop();
    let server = Server::start(&it.image, &["--control", &control]);
    it.change(&["add", "", "b"]);
    it.change(&["clear", "", "a"]);
    assert_eq!(it.listed(), json!([info("a", true, 0), info("b", true, 0)]));
    let resize = ["export", "resize", "", "300M", "--control", text(&it.control)];
    let refused = tool(NOWAIT).args(resize).fails();
    assert!(refused.contains("--bitmap-dir"), "{refused}");
    server.connect().write(MIB, &[1; 512]).expect("a write");
    server.stop();
    assert_eq!(served_once(&it, &[]).0, json!([info("a", true, 1), info("b", true, 1)]));
}

#[test]
fn a_block_device_has_its_bitmaps_in_the_given_directory() {
    let it = Stored::raw();
    let Some(device) = LoopDevice::on(&it.image) else { return };
    let directory = it.scratch.join("bitmaps");
    fs::create_dir(&directory).expect("a directory");
    let control = format!("unix:{}", it.control.display());
    let server = Server::start(device.path(), &["--control", &control]);
    it.change(&["add", "", "a"]);
    assert_eq!(it.listed()[0].get("persistent"), None, "there is no directory for it");
    server.stop();
    let server = serve_with_dir(&it, device.path(), &directory);
    it.change(&["add", "", "a"]);
    server.connect().write(MIB, &[1; 512]).expect("a write");
    server.stop();
    let server = serve_with_dir(&it, device.path(), &directory);
    assert_eq!(it.listed(), json!([info("a", true, 1)]));
    server.connect().write(5 * REGION, &[1; 512]).expect("a write");
    it.kill(server);
    let region = REGION / USUAL;
    let server = serve_with_dir(&it, device.path(), &directory);
    let expected: Vec<u64> = std::iter::once(16).chain(5 * region..6 * region).collect();
    assert_eq!(dirty(&server.socket(), "a"), expected);
    // It grows while it is served, and is written to behind the old end.
    File::options()
        .write(true)
        .open(&it.image)
        .and_then(|file| file.set_len(300 * MIB))
        .expect("a length");
    device.resize();
    let resize = ["export", "resize", "", "300M", "--control", text(&it.control)];
    tool(NOWAIT).args(resize).succeeds();
    server.connect().write(299 * MIB, &[1; 512]).expect("a write");
    it.kill(server);
    let server = serve_with_dir(&it, device.path(), &directory);
    let grown = (300 - 256) * MIB / USUAL;
    assert_eq!(it.listed(), json!([info("a", true, region + 1 + grown)]));
    server.stop();
    // Of a device nothing is served that its bitmaps would miss.
    let file =
        fs::read_dir(&directory).expect("bitmaps").next().expect("a file").expect("a file").path();
    fs::write(&file, "text").expect("a file");
    let refused = refusal(&["serve", text(device.path()), "--bitmap-dir", text(&directory)]);
    assert!(refused.error.contains("it is not a qcow2 image"), "{}", refused.error);
    fs::remove_file(&file).expect("a file");
    // Another file behind the same name is another disk.
    let server = serve_with_dir(&it, device.path(), &directory);
    it.change(&["add", "", "a"]);
    server.stop();
    let path = device.path().to_owned();
    drop(device);
    let Some(again) = LoopDevice::on(&it.image).filter(|device| device.path() == path) else {
        return;
    };
    let server = serve_with_dir(&it, again.path(), &directory);
    assert!(server.log().contains(MAY_BE_CHANGED), "{}", server.log());
    server.stop();
}

/// A bitmap as the test knows it, in granules.
#[derive(Default)]
struct Model {
    /// Changes since the bitmap was cleared.
    changed: BTreeSet<u64>,
    /// Other parts that may be dirty.
    maybe: BTreeSet<u64>,
    /// Changes since the server has last exited in order, or since the last change of the bitmap.
    recent: BTreeSet<u64>,
}

impl Model {
    fn write(&mut self, granules: std::ops::Range<u64>) {
        self.changed.extend(granules.clone());
        self.recent.extend(granules);
    }

    fn kill(&mut self) {
        let region = REGION / USUAL;
        let whole = |granule: &u64| {
            let first = granule / region * region;
            first..first + region
        };
        self.maybe.extend(self.recent.iter().flat_map(whole));
        self.recent.clear();
    }

    fn check(&self, found: &[u64]) {
        let found: BTreeSet<u64> = found.iter().copied().collect();
        let missing: Vec<_> = self.changed.difference(&found).collect();
        assert!(missing.is_empty(), "too clean: {missing:?}");
        let more: Vec<_> =
            found.difference(&self.changed).filter(|at| !self.maybe.contains(at)).collect();
        assert!(more.is_empty(), "too dirty: {more:?}");
    }
}

#[test]
fn c74_a_bitmap_of_a_raw_disk_has_each_change_through_any_sequence_of_ends() {
    for seed in 0..4 {
        let mut random = Random::from_seed(seed);
        let it = Stored::raw();
        let mut server = it.serve(&[]);
        it.change(&["add", "", "a"]);
        let mut model = Model::default();
        for _ in 0..24 {
            match random.below(8) {
                0 => {
                    server.stop();
                    model.recent.clear();
                    server = it.serve(&[]);
                }
                1 | 2 => {
                    it.kill(server);
                    model.kill();
                    server = it.serve(&[]);
                }
                3 => {
                    it.change(&["clear", "", "a"]);
                    model = Model::default();
                }
                4 => {
                    it.change(&["disable", "", "a"]);
                    server.connect().write(random.below(SIZE - MIB), &[1; 512]).expect("a write");
                    it.change(&["enable", "", "a"]);
                    model.recent.clear();
                }
                _ => {
                    let len = 1 + random.below(MIB);
                    let pos = random.below(SIZE - len);
                    server.connect().write(pos, &vec![1; len as usize]).expect("a write");
                    model.write(pos / USUAL..(pos + len).div_ceil(USUAL));
                }
            }
            model.check(&dirty(&server.socket(), "a"));
        }
        server.stop();
        it.checks();
    }
}

#[test]
fn a_kill_at_any_moment_while_a_bitmap_is_added_leaves_a_whole_file_or_none() {
    let it = Stored::raw();
    let mut random = Random::from_seed(1);
    for round in 0..6 {
        let mut server = it.serve(&[]);
        let name = format!("of-{round}");
        let mut adding = it.command(&["add", "", &name]).spawn().expect("nowait");
        std::thread::sleep(std::time::Duration::from_millis(random.below(40)));
        server.signal(Signal::KILL);
        server.wait();
        let _ = adding.wait();
        for socket in [server.socket(), it.control.clone()] {
            let _ = fs::remove_file(socket);
        }
    }
    let (_, log) = served_once(&it, &[]);
    assert!(!log.contains(NOT_USED) && !log.contains("inconsistent"), "{log}");
    if it.stored.exists() && require_tool("qemu-img") {
        it.qemu_checks_after_kills();
    }
}

#[test]
fn nothing_is_made_beside_a_disk_without_bitmaps() {
    let it = Stored::raw();
    let server = it.serve(&[]);
    server.connect().write(MIB, &[1; 512]).expect("a write");
    it.change(&["add", "", "a", "--temporary"]);
    server.stop();
    let left: Vec<PathBuf> = fs::read_dir(it.scratch.path())
        .expect("files")
        .map(|it| it.expect("a file").path())
        .collect();
    assert_eq!(left, std::slice::from_ref(&it.image));
}
