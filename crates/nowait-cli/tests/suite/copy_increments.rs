//! `nowait copy --bitmap` and `--compare`: what has changed since an earlier copy, into that copy or into an overlay on it.
//!
//! Invariant: each increment is compared byte for byte with the image that was served.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command as Process;

use nowait_testkit::nbd::{Client, Command};
use nowait_testkit::{Random, require_tool, seed, tool};
use serde_json::Value;

use crate::common::{Finished, KIB, MIB, Scratch, Server, accepted, allocated, refusal, text};
use crate::control::Controlled;
use crate::copy::{copy, patchwork};
use crate::copy_other_servers::Peer;

/// Changes a disk of 8 MiB at random places.
pub(crate) fn change(client: &mut Client, random: &mut Random) {
    for _ in 0..10 {
        let offset = random.below(7 * MIB) & !511;
        let len = (512 + random.below(200 * KIB)) & !511;
        match random.below(4) {
            0 => client.call(&Command::Trim { offset, len: len as u32 }),
            1 => client.call(&Command::Zero { offset, len: len as u32, keep: true }),
            _ => client.write(offset, &random.bytes(len as usize)),
        }
        .expect("a change");
    }
}

/// The disk in the image `path`.
fn disk(scratch: &Scratch, path: &Path) -> Vec<u8> {
    let flat = scratch.join("flat");
    copy(text(path), text(&flat), &["-O", "raw", "--force"]);
    fs::read(&flat).expect("the copy")
}

#[test]
fn increments_in_overlays_and_in_place_have_the_disk_as_it_was() {
    let mut random = Random::from_seed(seed());
    let it = Controlled::start();
    let (uri, scratch) = (it.server.uri(), &it.scratch);
    let served = || fs::read(scratch.join("disk.img")).expect("the image");
    let mut client = it.server.connect();
    change(&mut client, &mut random);
    it.nowait(&["export", "bitmap", "add", "", "b", "--granularity", "4K"]).succeeds();
    let [full, raw, qcow2] = ["full.img", "place.img", "place.qcow2"].map(|it| scratch.join(it));
    for to in [&full, &raw, &qcow2] {
        copy(uri, text(to), &[]);
    }
    let mut below = ("full.img".to_owned(), "raw");
    for round in 1..5 {
        change(&mut client, &mut random);
        let expected = served();
        // The disk itself, while it rests, and a backup of it, while it is changed, take turns.
        let of_backup = round % 2 == 0;
        let mut from = uri.to_owned();
        if of_backup {
            it.nowait(&["export", "backup", "start", "", "--bitmap", "b", "--only-dirty"])
                .succeeds();
            from = uri.replace("///?", "///backup?");
            change(&mut client, &mut random);
        }
        let name = format!("{round}.qcow2");
        let overlay = scratch.join(&name);
        let backing = ["--to-backing", &below.0, "--to-backing-format", below.1];
        // Clusters that are larger and smaller than the pieces that a bit stands for.
        let cluster = ["--cluster-size", ["512", "4K", "64K", "2M"][round - 1]];
        let said = copy(
            &from,
            text(&overlay),
            &[&["--bitmap", "b", "--json", "--verify"][..], &backing, &cluster].concat(),
        );
        for (to, more) in [(&raw, "--verify"), (&qcow2, "--no-progress")] {
            copy(&from, text(to), &["--bitmap", "b", "--in-place", more]);
        }
        match of_backup {
            true => it.nowait(&["export", "backup", "commit", ""]).succeeds(),
            false => it.nowait(&["export", "bitmap", "clear", "", "b"]).succeeds(),
        };
        let said: Value = serde_json::from_str(&said).expect("JSON");
        let bytes = |key: &str| said[key].as_u64().expect("a number");
        assert!(bytes("unchanged_bytes") > MIB, "{said}");
        let all = ["data_bytes", "zero_bytes", "unchanged_bytes"].map(bytes).iter().sum::<u64>();
        assert_eq!(all, 8 * MIB, "{said}");
        for image in [&overlay, &raw, &qcow2] {
            assert!(disk(scratch, image) == expected, "round {round}: {}", image.display());
        }
        if require_tool("qemu-img") {
            for image in [&overlay, &qcow2] {
                tool("qemu-img").args(["check", "-q"]).arg(image).succeeds();
            }
        }
        below = (name, "qcow2");
    }
    it.nowait(&["export", "bitmap", "clear", "", "b"]).succeeds();
    // Nothing has changed: an increment is empty.
    let said = copy(uri, text(&raw), &["--bitmap", "b", "--in-place"]);
    assert!(
        said.contains("of them 0 bytes data and 0 bytes zeros, 8 MiB (8388608 bytes) unchanged"),
        "{said}"
    );
}

#[test]
fn an_increment_that_cannot_be_whole_is_refused_and_nothing_is_left_or_changed() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", 8 * MIB), &["--bitmap", "b"]);
    server.connect().write(0, &[7; 4096]).expect("a write");
    let uri = server.uri();
    let other = scratch.sparse("other.img", 8 * MIB + 4096);
    let same = scratch.sparse("same.img", 8 * MIB);
    let elsewhere = Scratch::new();
    let far = elsewhere.sparse("far.img", 8 * MIB);
    let overlay = scratch.join("new.qcow2");
    let raw = scratch.join("new.img");
    let there = scratch.sparse("there.qcow2", 0);
    let bitmap = |name| ["--bitmap", name];
    let onto = |name| ["--to-backing", name];
    let place = &["--in-place"][..];
    for (from, to, bitmap, rest, words) in [
        (uri, &same, bitmap("c"), place, &["socket", "it has no dirty bitmap c"][..]),
        (uri, &other, bitmap("b"), place, &["other.img", "another size", "8388608", "8392704"]),
        (uri, &overlay, bitmap("b"), &onto("other.img"), &["new.qcow2", "another size"]),
        (uri, &overlay, bitmap("b"), &onto("none.img"), &["none.img"]),
        (uri, &overlay, bitmap("b"), &onto(text(&far)), &["far.img", "--backing-dir"]),
        (uri, &raw, bitmap("b"), &onto("same.img"), &["new.img", "-O qcow2"]),
        (uri, &there, bitmap("b"), &onto("same.img"), &["there.qcow2", "already"]),
        (uri, &raw, bitmap("b"), place, &["new.img"]),
    ] {
        refusal(&[&["copy", from, text(to)][..], &bitmap, rest].concat()).says(words);
    }
    let dir = ["--backing-dir", text(elsewhere.path())];
    copy(uri, text(&overlay), &[&bitmap("b")[..], &onto(text(&far)), &dir].concat());
    fs::remove_file(&overlay).expect("it was made");
    for wrong in [
        &["--bitmap", "b"][..],
        &["--in-place"],
        &["--bitmap", "b", "--in-place", "--to-backing", "same.img"],
        &["--bitmap", "b", "--in-place", "--compress", "-O", "qcow2"],
        &["--bitmap", "", "--in-place"],
    ] {
        assert_eq!(refusal(&[&["copy", uri, text(&same)][..], wrong].concat()).code, 2);
    }
    let image = [text(&other), text(&same), "--bitmap", "b", "--in-place"];
    assert_eq!(refusal(&[&["copy"][..], &image].concat()).code, 2);
    let mut names: Vec<_> = fs::read_dir(scratch.path())
        .expect("a directory")
        .map(|entry| entry.expect("an entry").file_name())
        .filter(|name| !name.to_string_lossy().contains("sock"))
        .collect();
    names.sort();
    assert_eq!(names, ["disk.img", "other.img", "same.img", "there.qcow2"]);
    assert!(fs::read(&same).expect("it").iter().all(|&byte| byte == 0));
    server.stop();
}

#[test]
fn an_increment_of_a_server_that_dies_is_not_called_whole() {
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", 64 * MIB, 3);
    let mut server = Server::start(&image, &["--bitmap", "b", "--limit-bandwidth", "8M"]);
    scratch.sparse("full.img", 64 * MIB);
    let mut client = server.connect();
    client.call(&Command::Zero { offset: 0, len: 64 * MIB as u32, keep: true }).expect("zeros");
    let overlay = scratch.join("new.qcow2");
    let mut copy = Process::new(crate::common::NOWAIT)
        .args(["copy", server.uri(), text(&overlay), "--bitmap", "b", "--to-backing", "full.img"])
        .spawn()
        .expect("nowait copy");
    let partial = scratch.join("new.qcow2.partial");
    nowait_testkit::wait_for("the new image", || partial.exists().then_some(()).ok_or("none"));
    server.signal(rustix::process::Signal::KILL);
    assert_eq!(copy.wait().expect("its status").code(), Some(1));
    assert!(!overlay.exists() && !partial.exists());
    server.wait();
}

#[test]
fn an_increment_comes_from_a_bitmap_of_qemu_too() {
    nowait_testkit::needs!(
        ["qemu-img", "qemu-io", "qemu-nbd"].iter().all(|name| require_tool(name))
    );
    let scratch = Scratch::new();
    let source = scratch.join("source.qcow2");
    tool("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&source).arg("8M").succeeds();
    let io = |what: &str| {
        tool("qemu-io").args(["-f", "qcow2", "-c", what]).arg(&source).succeeds();
    };
    io("write -P 1 1M 3M");
    tool("qemu-img").args(["bitmap", "--add"]).arg(&source).arg("b").succeeds();
    let full = scratch.join("full.img");
    copy(text(&source), text(&full), &[]);
    io("write -P 2 2M 100k");
    io("write -z 3M 100k");
    let arguments = ["-f", "qcow2", "--read-only", "--bitmap=b"];
    let peer = Peer::qemu_nbd(&scratch, &source, &arguments);
    let overlay = scratch.join("new.qcow2");
    copy(&peer.uri(), text(&overlay), &["--bitmap", "b", "--to-backing", "full.img", "--verify"]);
    copy(&peer.uri(), text(&full), &["--bitmap", "b", "--in-place", "--verify"]);
    drop(peer);
    let expected = disk(&scratch, &source);
    assert!(disk(&scratch, &overlay) == expected);
    assert!(disk(&scratch, &full) == expected);
    accepted(&["check", text(&overlay)]);
}

#[test]
fn an_increment_of_a_disk_that_ends_inside_a_sector_has_its_last_bytes() {
    for size in [MIB + 1, MIB + 511, MIB + 513] {
        let scratch = Scratch::new();
        let image = scratch.sparse("disk.img", size);
        let server = Server::start(&image, &["--bitmap", "b"]);
        let uri = server.uri();
        let [full, raw] = ["full.img", "place.img"].map(|name| scratch.join(name));
        for to in [&full, &raw] {
            copy(uri, text(to), &[]);
        }
        let mut client = server.connect();
        assert_eq!(client.size, size);
        client.write(size - 700, &[7; 700]).expect("a write up to the end");
        let overlay = scratch.join("new.qcow2");
        let onto = ["--bitmap", "b", "--to-backing", "full.img", "--verify"];
        copy(uri, text(&overlay), &onto);
        copy(uri, text(&raw), &["--bitmap", "b", "--in-place", "--verify"]);
        // A qcow2 image is whole sectors: its last one is filled up with zeros.
        let whole = scratch.sparse("whole.img", size.next_multiple_of(512));
        copy(uri, text(&whole), &["--bitmap", "b", "--in-place", "--verify"]);
        server.stop();
        let mut expected = fs::read(&image).expect("the image");
        assert!(fs::read(&raw).expect("the copy") == expected, "{size}");
        expected.resize(size.next_multiple_of(512) as usize, 0);
        assert!(disk(&scratch, &overlay) == expected, "{size}");
        assert!(fs::read(&whole).expect("the copy") == expected, "{size}");
    }
}

#[test]
fn an_increment_goes_to_a_disk_of_the_same_sectors_and_no_other() {
    let size = MIB + 1;
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", size), &["--bitmap", "b"]);
    for (other, fits) in [
        (size - 1, false),
        (size, true),
        (size + 1, false),
        (MIB + 511, false),
        (MIB + 512, true),
        (MIB + 513, false),
    ] {
        let to = scratch.sparse(&format!("{other}.img"), other);
        let arguments = ["copy", server.uri(), text(&to), "--bitmap", "b", "--in-place"];
        match fits {
            true => drop(accepted(&arguments)),
            false => refusal(&arguments).says(&[text(&to), "another size"]),
        }
    }
    server.stop();
}

/// The figures of `--json`: written as data and as zeros, left as they were, and read of the earlier copy.
fn figures(said: &str) -> [u64; 4] {
    let said: Value = serde_json::from_str(said).expect("JSON");
    ["data_bytes", "zero_bytes", "unchanged_bytes", "compared_bytes"]
        .map(|key| said[key].as_u64().expect("a number"))
}

#[test]
fn what_differs_from_an_earlier_copy_is_found_by_comparing_and_nothing_else_is_written() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 16 * MIB);
    let file = File::options().write(true).open(&image).expect("the image");
    file.write_all_at(&vec![7; 2 * MIB as usize], MIB).expect("data");
    let [full, overlay] = ["full.img", "new.qcow2"].map(|name| scratch.join(name));
    copy(text(&image), text(&full), &[]);
    file.write_all_at(&[8; 100], MIB + 4000).expect("two blocks");
    file.write_all_at(&[9; 1], 12 * MIB).expect("a block in a hole");
    file.write_all_at(&vec![0; 128 * KIB as usize], 2 * MIB).expect("zeros");
    let onto = ["--compare", "--to-backing", "full.img", "--json", "--verify"];
    let said = copy(text(&image), text(&overlay), &onto);
    let [data, zero, unchanged, compared] = figures(&said);
    assert_eq!((data, zero), (3 * 4 * KIB, 128 * KIB), "{said}");
    assert_eq!(data + zero + unchanged, 16 * MIB, "{said}");
    // The file system may say of more than was written that it has data.
    assert!((2 * MIB..4 * MIB).contains(&compared), "{said}");
    let expected = fs::read(&image).expect("the image");
    assert!(disk(&scratch, &overlay) == expected);
    assert!(allocated(&overlay) < MIB);
    let place = ["--compare", "--in-place", "--json"];
    assert_eq!(figures(&copy(text(&image), text(&full), &place))[..3], [data, zero, unchanged]);
    assert!(fs::read(&full).expect("the copy") == expected);
    let said = copy(text(&image), text(&full), &place);
    assert_eq!(figures(&said)[..3], [0, 0, 16 * MIB], "{said}");
}

#[test]
fn increments_by_comparison_are_whole_whatever_the_images_and_the_requests_are() {
    let mut random = Random::from_seed(seed());
    let options: [&[&str]; 4] = [&[], &["--requests", "1"], &["--sparse", "0"], &["--verify"]];
    for options in options {
        let scratch = Scratch::new();
        let image = patchwork(&scratch, "disk.img", &mut random);
        let [full, raw, qcow2] =
            ["full.img", "place.img", "place.qcow2"].map(|name| scratch.join(name));
        for to in [&full, &raw, &qcow2] {
            copy(text(&image), text(to), &[]);
        }
        let bytes = fs::metadata(&image).expect("the image").len();
        let file = File::options().write(true).open(&image).expect("the image");
        for _ in 0..8 {
            let pos = random.below(bytes);
            let len = (1 + random.below(200 * KIB)).min(bytes - pos) as usize;
            let data = if random.chance(40) { vec![0; len] } else { random.bytes(len) };
            file.write_all_at(&data, pos).expect("a change");
        }
        let overlay = scratch.join("new.qcow2");
        let onto = ["--compare", "--to-backing", "full.img"];
        copy(text(&image), text(&overlay), &[&onto[..], options].concat());
        // The next one stands on the one before, and is read from a server.
        let server = Server::start(&image, &["--read-only"]);
        for to in [&raw, &qcow2] {
            let place = [&["--compare", "--in-place"][..], options].concat();
            copy(server.uri(), text(to), &place);
        }
        server.stop();
        let mut expected = fs::read(&image).expect("the image");
        assert!(fs::read(&raw).expect("the copy") == expected);
        expected.resize(bytes.next_multiple_of(512) as usize, 0);
        for image in [&overlay, &qcow2] {
            assert!(disk(&scratch, image) == expected, "{}", image.display());
            accepted(&["check", text(image)]);
        }
        file.write_all_at(&[1; 512], 0).expect("a change");
        let next = scratch.join("next.qcow2");
        let onto = ["--compare", "--to-backing", "new.qcow2", "--to-backing-format", "qcow2"];
        copy(text(&image), text(&next), &[&onto[..], options].concat());
        expected[..512].fill(1);
        assert!(disk(&scratch, &next) == expected);
    }
}

#[test]
fn a_comparison_with_a_disk_that_is_none_or_of_another_size_is_refused_in_one_line() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let other = scratch.sparse("other.img", MIB + 4096);
    let new = scratch.join("new.qcow2");
    let from = text(&image);
    let compare = ["--compare", "--to-backing"];
    for (to, rest, words) in [
        (&other, &["--compare", "--in-place"][..], &["other.img", "another size"][..]),
        (&new, &[&compare[..], &["other.img"]].concat(), &["new.qcow2", "another size"]),
        (&new, &[&compare[..], &["none.img"]].concat(), &["none.img"]),
        (&new, &["--compare", "--in-place"], &["new.qcow2"]),
        (&image, &["--compare", "--in-place"], &["disk.img", "it is the source itself"]),
    ] {
        refusal(&[&["copy", from, text(to)][..], rest].concat()).says(words);
    }
    assert_eq!(refusal(&["copy", from, "s3://bucket/disk", "--compare", "--in-place"]).code, 1);
    for wrong in [
        &["--compare"][..],
        &["--compare", "--bitmap", "b", "--in-place"],
        &["--compare", "--in-place", "--rescue"],
    ] {
        assert_eq!(refusal(&[&["copy", from, text(&other)][..], wrong].concat()).code, 2);
    }
    assert!(!new.exists());
}
