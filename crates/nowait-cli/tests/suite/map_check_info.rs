//! `nowait map`, `check` and `info` compared with qemu-img, on images made by it.
//!
//! Invariant: a read-only command leaves the image unchanged.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use serde_json::Value;

use crate::common::{Finished, Scratch, accepted, refusal, require_qemu, require_tool, tool};

/// The offset of the only refcount block of a small image made by qemu-img.
const REFCOUNT_BLOCK: u64 = 2 << 16;
const KEYS: [&str; 9] = [
    "filename",
    "format",
    "virtual-size",
    "actual-size",
    "cluster-size",
    "dirty-flag",
    "backing-filename",
    "backing-filename-format",
    "full-backing-filename",
];

/// `top.qcow2` over `base.raw`, with data in both.
fn overlay(scratch: &Scratch) -> String {
    let (base, top) = (scratch.random("base.raw", 1 << 20, 1), scratch.join("top.qcow2"));
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    tool("qemu-img").args(create).arg(base).arg(&top).arg("4M").succeeds();
    tool("qemu-io").args(["-f", "qcow2", "-c", "write 512k 1M"]).arg(&top).succeeds();
    top.display().to_string()
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn map_and_info_of_an_overlay_agree_with_qemu() {
    nowait_testkit::needs!(require_qemu());
    let scratch = Scratch::new();
    let top = overlay(&scratch);
    let theirs = tool("qemu-img").args(["map", "--output=json", &top]).succeeds();
    for json in [&["map", &top, "--json"][..], &["map", "--output=json", &top]] {
        assert_eq!(accepted(json), theirs);
    }
    let theirs = tool("qemu-img").args(["map", &top]).succeeds();
    for human in [&["map", &top][..], &["map", "--output=human", &top]] {
        assert_eq!(accepted(human), theirs);
    }
    let theirs = json_of(&tool("qemu-img").args(["info", "--output=json", &top]).succeeds());
    let ours = json_of(&accepted(&["info", &top, "--json"]));
    for key in KEYS {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    assert_eq!(ours["format-specific"], theirs["format-specific"]);
    let words = accepted(&["info", &top]);
    assert!(words.contains("qcow2, version 3") && words.contains("base.raw (raw)"), "{words}");
}

#[test]
fn check_exits_as_qemu_does_and_repairs() {
    nowait_testkit::needs!(require_qemu());
    let scratch = Scratch::new();
    let top = overlay(&scratch);
    assert!(accepted(&["check", &top]).starts_with("no errors were found"));
    let file = File::options().write(true).open(&top).expect("the image");
    // The first data cluster gets the refcount 2: a leak, and a wrong COPIED flag.
    file.write_all_at(&2u16.to_be_bytes(), REFCOUNT_BLOCK + 5 * 2).expect("the refcount block");
    let before = fs::read(&top).expect("the image");
    assert_eq!(refusal(&["check", &top]).code, 2);
    assert_eq!(fs::read(&top).expect("the image"), before);
    accepted(&["check", &top, "--repair"]);
    tool("qemu-img").args(["check", "-q", &top]).succeeds();
    let report = json_of(&accepted(&["check", &top, "--json"]));
    assert_eq!((&report["check-errors"], &report["corruptions"]), (&0.into(), &Value::Null));
    let raw = scratch.join("base.raw").display().to_string();
    let refused = refusal(&["check", &raw]);
    assert!(refused.error.contains("base.raw: raw images"), "{}", refused.error);
    assert_eq!(
        refused.code,
        tool("qemu-img")
            .args(["check", "-f", "raw", &raw])
            .status()
            .expect("qemu-img")
            .code()
            .unwrap_or(0)
    );
}

#[test]
fn a_backing_file_in_another_directory_is_refused_until_it_is_allowed() {
    nowait_testkit::needs!(require_qemu());
    let (scratch, elsewhere) = (Scratch::new(), Scratch::new());
    let base = elsewhere.random("base.raw", 1 << 20, 1);
    let top = scratch.join("top.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    tool("qemu-img").args(create).arg(base).arg(&top).succeeds();
    let top = top.display().to_string();
    let allowed = elsewhere.path().display().to_string();
    refusal(&["map", &top]).says(&[
        "top.qcow2",
        "not in the image's own directory",
        "--backing-dir",
    ]);
    accepted(&["map", &top, "--backing-dir", &allowed]);
}

/// An image of 4 MiB with four bitmaps: recording, of small granularity, not recording, and not saved.
fn with_bitmaps(scratch: &Scratch) -> String {
    let image = scratch.join("bitmaps.qcow2");
    tool("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("4M").succeeds();
    let add = |options: &[&str], name| {
        tool("qemu-img").args(["bitmap", "--add"]).args(options).arg(&image).arg(name).succeeds();
    };
    add(&[], "recording");
    add(&["-g", "512"], "small \u{e4}\u{1f4be}\n\"");
    add(&["--disable", "-g", "2M"], "not recording");
    add(&[], "not saved");
    // The state after a crash of a program that used the image: the entry has 24 bytes before the
    // name, with the flags at byte 12.
    let file = File::options().write(true).open(&image).expect("the image");
    let bytes = fs::read(&image).expect("the image");
    let name = bytes.windows(9).rposition(|bytes| bytes == b"not saved").expect("its name");
    file.write_all_at(&3u32.to_be_bytes(), name as u64 - 24 + 12).expect("its flags");
    image.display().to_string()
}

#[test]
fn info_lists_the_bitmaps_that_qemu_lists() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let image = with_bitmaps(&scratch);
    let theirs = json_of(&tool("qemu-img").args(["info", "--output=json", &image]).succeeds());
    let ours = json_of(&accepted(&["info", &image, "--json"]));
    let flags = &ours["format-specific"]["data"]["bitmaps"][3]["flags"];
    assert_eq!(*flags, serde_json::json!(["in-use", "auto"]));
    assert_eq!(ours["format-specific"], theirs["format-specific"]);
    let words = accepted(&["info", &image]);
    assert!(words.contains("bitmaps:      4\n"), "{words}");
}

#[test]
fn info_omits_bitmaps_whose_directory_is_damaged_and_prints_the_rest() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let image = with_bitmaps(&scratch);
    let bytes = fs::read(&image).expect("the image");
    let name = bytes.windows(9).rposition(|bytes| bytes == b"not saved").expect("its name");
    let file = File::options().write(true).open(&image).expect("the image");
    file.write_all_at(&[0xff; 4], name as u64 - 24 + 8).expect("its table's entries");
    let ours = json_of(&accepted(&["info", &image, "--json"]));
    let data = &ours["format-specific"]["data"];
    assert_eq!((&data["compat"], data.get("bitmaps")), (&"1.1".into(), None));
    assert_eq!(ours["virtual-size"], 4 << 20);
    assert!(!accepted(&["info", &image]).contains("bitmaps:"));
}

#[test]
fn info_has_no_key_for_a_data_file_or_bitmaps_where_there_are_none() {
    let scratch = Scratch::new();
    let image = scratch.join("plain.qcow2").display().to_string();
    accepted(&["create", &image, "1M"]);
    let ours = json_of(&accepted(&["info", &image, "--json"]));
    let data = ours["format-specific"]["data"].as_object().expect("an object");
    for key in ["data-file", "data-file-raw", "bitmaps"] {
        assert!(!data.contains_key(key), "{key}");
    }
    if require_tool("qemu-img") {
        let theirs = tool("qemu-img").args(["info", "--output=json", &image]).succeeds();
        assert_eq!(ours["format-specific"], json_of(&theirs)["format-specific"]);
    }
}
