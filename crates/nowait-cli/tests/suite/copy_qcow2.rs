//! `nowait copy` of and to qcow2 images: backing files, compressed clusters, cluster sizes.
//!
//! Invariant: qemu-img checks each copy and compares it with its source.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::{
    Finished, KIB, MIB, Scratch, Server, accepted, allocated, refusal, require_qemu, require_tool,
    text, tool,
};
use crate::copy::{copy, patchwork};
use nowait_testkit::{Random, seed};

/// `a` and `b` hold the same disk, except for zeros beyond the end of the shorter one.
fn assert_same(a: &Path, a_format: &str, b: &Path, b_format: &str) {
    tool("qemu-img").args(["compare", "-f", a_format, "-F", b_format]).arg(a).arg(b).succeeds();
}

/// The image has neither corruptions nor leaks.
fn assert_sound(image: &Path) {
    tool("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(image).succeeds();
}

fn size_of(image: &Path) -> u64 {
    let printed = tool("qemu-img").args(["info", "--output=json"]).arg(image).succeeds();
    let printed: serde_json::Value = serde_json::from_str(&printed).expect("JSON");
    printed["virtual-size"].as_u64().expect("a size")
}

/// A qcow2 image made by `qemu-img convert` with `options`.
fn converted(scratch: &Scratch, name: &str, from: &Path, options: &[&str]) -> PathBuf {
    let to = scratch.join(name);
    let convert = ["convert", "-q", "-f", "raw", "-O", "qcow2"];
    tool("qemu-img").args(convert).args(options).arg(from).arg(&to).succeeds();
    to
}

/// Writes pieces over an image, with qemu-io.
fn scribble(image: &Path, random: &mut Random) {
    let mut io = tool("qemu-io");
    io.args(["-f", "qcow2"]);
    for _ in 0..12 {
        let (pos, len) = (random.below(6 * MIB) & !511, (512 + random.below(200 * KIB)) & !511);
        let what = match random.below(4) {
            0 => format!("write -z {pos} {len}"),
            1 => format!("discard {pos} {len}"),
            _ => format!("write -P {} {pos} {len}", 1 + random.below(255)),
        };
        io.args(["-c", &what]);
    }
    io.arg(image).succeeds();
}

#[test]
fn random_disks_go_into_images_of_any_clusters_and_out_again() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let mut random = Random::from_seed(seed());
    for (round, cluster) in ["512", "4K", "64K", "64K", "2M", "64K"].into_iter().enumerate() {
        let scratch = Scratch::new();
        let source = patchwork(&scratch, "source", &mut random);
        let (image, back) = (scratch.join("image"), scratch.join("back"));
        let options: [&[&str]; 4] =
            [&[], &["--verify"], &["--sparse", "0"], &["--requests", "1", "--verify"]];
        let to = ["-O", "qcow2", "--cluster-size", cluster];
        copy(text(&source), text(&image), &[&to, options[round % 4]].concat());
        assert_sound(&image);
        assert_same(&source, "raw", &image, "qcow2");
        let bytes = fs::metadata(&source).expect("the source").len();
        assert_eq!(size_of(&image), bytes.next_multiple_of(512));
        copy(text(&image), text(&back), &["--verify"]);
        let (source, back) = (fs::read(&source).expect("it"), fs::read(&back).expect("it"));
        assert!(source == back[..source.len()] && back[source.len()..].iter().all(|&b| b == 0));
        assert_eq!(fs::read_dir(scratch.path()).expect("a directory").count(), 3);
    }
}

#[test]
fn an_image_is_copied_with_its_backing_chain() {
    nowait_testkit::needs!(require_qemu());
    let mut random = Random::from_seed(seed());
    for (base_options, format) in [
        (&["-c"][..], "qcow2"),
        (&["-o", "cluster_size=4k"], "qcow2"),
        (&["-o", "compat=0.10"], "qcow2"),
        (&[], "raw"),
    ] {
        let scratch = Scratch::new();
        let raw = scratch.dotted("base.img", 8 * MIB, 30_000, 200_000);
        let base = match format {
            "raw" => raw,
            _ => converted(&scratch, "base.qcow2", &raw, base_options),
        };
        let (middle, top) = (scratch.join("middle.qcow2"), scratch.join("top.qcow2"));
        for (image, below, format) in [(&middle, &base, format), (&top, &middle, "qcow2")] {
            let create = ["create", "-q", "-f", "qcow2", "-F", format, "-b"];
            tool("qemu-img").args(create).arg(below).arg(image).arg("9M").succeeds();
            scribble(image, &mut random);
        }
        let (flat, raw) = (scratch.join("flat.qcow2"), scratch.join("flat.img"));
        copy(text(&top), text(&flat), &["--verify"]);
        copy(text(&top), text(&raw), &[]);
        assert_sound(&flat);
        assert_same(&top, "qcow2", &flat, "qcow2");
        assert_same(&top, "qcow2", &raw, "raw");
        let info = tool("qemu-img").arg("info").arg(&flat).succeeds();
        assert!(!info.contains("backing"), "{info}");
    }
}

#[test]
fn data_files_and_backing_files_in_other_directories_are_copied_only_with_permission() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let (scratch, elsewhere) = (Scratch::new(), Scratch::new());
    let raw = scratch.dotted("disk.img", 8 * MIB, 30_000, 200_000);
    let data = scratch.join("data");
    let option = format!("data_file={}", text(&data));
    let apart = converted(&scratch, "apart.qcow2", &raw, &["-o", &option]);
    copy(
        text(&apart),
        text(&scratch.join("copy.qcow2")),
        &["--verify", "--data-file", text(&data)],
    );
    assert_same(&raw, "raw", &scratch.join("copy.qcow2"), "qcow2");

    let base = elsewhere.random("base.img", MIB, 3);
    let top = scratch.join("top.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    tool("qemu-img").args(create).arg(&base).arg(&top).succeeds();
    let flat = scratch.join("flat.qcow2");
    refusal(&["copy", text(&top), text(&flat)]).says(&["top.qcow2", "--backing-dir"]);
    copy(text(&top), text(&flat), &["--backing-dir", text(elsewhere.path())]);
    assert_same(&base, "raw", &flat, "qcow2");
}

#[test]
fn an_image_goes_to_a_server_and_back_into_an_image() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let mut random = Random::from_seed(seed());
    let source = patchwork(&scratch, "source", &mut random);
    let image = converted(&scratch, "image.qcow2", &source, &["-c"]);
    let served = scratch.sparse("served.img", size_of(&image));
    let back = scratch.join("back.qcow2");
    let server = Server::start(&served, &[]);
    copy(text(&image), server.uri(), &["--verify"]);
    copy(server.uri(), text(&back), &["--verify"]);
    server.stop();
    assert_same(&source, "raw", &served, "raw");
    assert_sound(&back);
    assert_same(&source, "raw", &back, "qcow2");
}

#[test]
fn an_image_is_as_sparse_as_its_source_and_ends_after_its_data() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let source = scratch.dotted("source", 64 * MIB, 64 * KIB as usize, MIB);
    let file = File::options().write(true).open(&source).expect("the source");
    file.write_all_at(&vec![0; MIB as usize], 32 * MIB + 64 * KIB).expect("zeros");
    let image = scratch.join("image.qcow2");
    copy(text(&source), text(&image), &[]);
    // 63 pieces are data, the 64th was overwritten.
    let data = 63 * 64 * KIB;
    let used = allocated(&image);
    assert!((data..data + 768 * KIB).contains(&used), "{used} bytes for {data}");
    let len = fs::metadata(&image).expect("the image").len();
    assert!((data..data + 768 * KIB).contains(&len), "{len} bytes for {data}");
    let maps = [&source, &image].map(|path| {
        let printed = tool("qemu-img").args(["map", "--output=json"]).arg(path).succeeds();
        let printed: Vec<serde_json::Value> = serde_json::from_str(&printed).expect("JSON");
        let data = printed.iter().filter(|entry| entry["data"] == true && entry["zero"] == false);
        data.map(|entry| entry["length"].as_u64().expect("bytes")).sum::<u64>()
    });
    assert_eq!(maps[1], data, "of {} in the source", maps[0]);
}

#[test]
fn the_format_is_the_given_one_or_that_of_the_file_name() {
    let scratch = Scratch::new();
    let source = scratch.random("source", MIB + 100, 3);
    for (name, options, is_image) in [
        ("a.qcow2", &[][..], true),
        ("a.img", &[], false),
        ("qcow2", &[], false),
        ("b.qcow2", &["--to-format", "raw"], false),
        ("b.img", &["--to-format", "qcow2"], true),
        ("c.img", &["-O", "qcow2", "--json"], true),
    ] {
        let to = scratch.join(name);
        let printed = copy(text(&source), text(&to), options);
        let begins = fs::read(&to).expect("the copy").starts_with(b"QFI\xfb");
        assert_eq!(begins, is_image, "{name} {options:?}");
        if options.contains(&"--json") {
            let printed: serde_json::Value = serde_json::from_str(&printed).expect("JSON");
            assert_eq!(
                (&printed["to_format"], &printed["to_size_bytes"]),
                (&"qcow2".into(), &(MIB + 512).into())
            );
        } else if is_image {
            assert!(printed.contains("are zeros"), "{printed}");
        }
    }
}

#[test]
fn an_invalid_image_or_target_is_refused_and_no_file_is_left() {
    let scratch = Scratch::new();
    let source = scratch.random("source", MIB, 3);
    let served = scratch.random("served", MIB, 4);
    let damaged = scratch.join("damaged");
    fs::write(&damaged, b"QFI\xfb and more").expect("a file");
    let huge = scratch.sparse("huge", 1 << 40);
    let server = Server::start(&served, &[]);
    let target = scratch.join("target");
    for (from, to, options, words) in [
        (text(&damaged), text(&target), &[][..], &["damaged: qcow2 version"][..]),
        (text(&source), text(&target), &["--from-format", "qcow2"], &["source: it is not a qcow2"]),
        (text(&source), server.uri(), &["-O", "qcow2"], &["made as a file only"]),
        (
            text(&huge),
            text(&target),
            &["-O", "qcow2", "--cluster-size", "512"],
            &["target: ", "needs larger clusters"],
        ),
    ] {
        refusal(&[&["copy", from, to], options].concat()).says(words);
        assert!(!target.exists() && !scratch.join("target.partial").exists());
    }
    server.stop();
    copy(text(&damaged), text(&target), &["--from-format", "raw", "-O", "raw"]);
    assert!(fs::read(&target).expect("the copy") == fs::read(&damaged).expect("the source"));
}

#[test]
fn an_image_replaces_a_file_only_with_force_and_when_it_is_complete() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let source = scratch.random("source", MIB, 5);
    let target = scratch.random("target.qcow2", 3 * MIB, 6);
    refusal(&["copy", text(&source), text(&target)]).says(&["--force"]);
    copy(text(&source), text(&target), &["--force"]);
    assert_sound(&target);
    assert_same(&source, "raw", &target, "qcow2");
    // The file is now part of the source, and so the copy may not replace it.
    let overlay = scratch.join("overlay.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"];
    tool("qemu-img").args(create).arg(&target).arg(&overlay).succeeds();
    refusal(&["copy", text(&overlay), text(&target), "--force"]).says(&["target.qcow2"]);
    assert_sound(&target);
    accepted(&["copy", text(&overlay), text(&scratch.join("flat.qcow2")), "--verify"]);
}
