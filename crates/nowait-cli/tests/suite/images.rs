//! `nowait map`, `check` and `info` beside qemu-img, on images that it made.
//!
//! Invariant: a command that only looks leaves the image as it was. Knows: the command line. Known by: nobody.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use serde_json::Value;

use crate::common::{Finished, Scratch, accepted, refusal, require_tool, tool};

/// Where qemu-img puts the only refcount block of a small image.
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
fn map_and_info_say_of_an_overlay_what_qemu_says() {
    if !require_tool("qemu-img") || !require_tool("qemu-io") {
        return;
    }
    let scratch = Scratch::new();
    let top = overlay(&scratch);
    let theirs = tool("qemu-img").args(["map", "--output=json", &top]).succeeds();
    assert_eq!(accepted(&["map", &top]), theirs);
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
    if !require_tool("qemu-img") || !require_tool("qemu-io") {
        return;
    }
    let scratch = Scratch::new();
    let top = overlay(&scratch);
    assert!(accepted(&["check", &top]).starts_with("no errors were found"));
    let file = File::options().write(true).open(&top).expect("the image");
    // The first data cluster counts as in use twice: a leak, and a flag that lies.
    file.write_all_at(&2u16.to_be_bytes(), REFCOUNT_BLOCK + 5 * 2).expect("the refcount block");
    let before = fs::read(&top).expect("the image");
    assert_eq!(refusal(&["check", &top]).code, 2);
    assert_eq!(fs::read(&top).expect("the image"), before);
    accepted(&["check", &top, "--repair"]);
    tool("qemu-img").args(["check", "-q", &top]).succeeds();
    let report = json_of(&accepted(&["check", &top, "--json"]));
    assert_eq!((&report["check-errors"], &report["corruptions"]), (&0.into(), &Value::Null));
    let raw = scratch.join("base.raw").display().to_string();
    refusal(&["check", &raw]).says(&["base.raw", "raw images"]);
}

#[test]
fn a_backing_file_elsewhere_is_refused_until_its_directory_is_allowed() {
    if !require_tool("qemu-img") || !require_tool("qemu-io") {
        return;
    }
    let (scratch, elsewhere) = (Scratch::new(), Scratch::new());
    let base = elsewhere.random("base.raw", 1 << 20, 1);
    let top = scratch.join("top.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    tool("qemu-img").args(create).arg(base).arg(&top).succeeds();
    let top = top.display().to_string();
    let allowed = elsewhere.path().display().to_string();
    refusal(&["map", &top]).says(&["top.qcow2", "outside", "--backing-dir"]);
    accepted(&["map", &top, "--backing-dir", &allowed]);
}
