//! `nowait create`, `resize` and `commit`: killed, refused, and beside QEMU's tools.
//!
//! Invariant: a refused or killed command loses no data.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{
    Finished, MIB, NOWAIT, Scratch, Server, accepted, refusal, refusal_under, require_qemu,
    require_tool, text, tool,
};
use nowait_testkit::{Random, ends_with_test, seed};

const KILLS: u64 = 20;

/// The bytes of the disk in `image`, by QEMU.
fn bytes(scratch: &Scratch, image: &Path) -> Vec<u8> {
    let raw = scratch.join("all.raw");
    tool("qemu-img").args(["convert", "-O", "raw"]).arg(image).arg(&raw).succeeds();
    fs::read(raw).expect("the disk")
}

/// Fails the test if QEMU finds `image` corrupt; leaks are allowed.
fn not_corrupt(image: &Path) {
    let printed = tool("qemu-img").args(["check", "--output=json"]).arg(image).output();
    let printed = printed.expect("timeout(1)");
    let code = printed.status.code();
    assert!(matches!(code, Some(0 | 3)), "{}", String::from_utf8_lossy(&printed.stdout));
}

/// `top.qcow2`, with data and zeros, over `base.qcow2`, both made by nowait and filled by QEMU.
fn overlay(scratch: &Scratch) -> (PathBuf, PathBuf) {
    let (base, top) = (scratch.join("base.qcow2"), scratch.join("top.qcow2"));
    accepted(&["create", text(&base), "8M", "--format", "qcow2", "--cluster-size", "4K"]);
    let fill = ["-f", "qcow2", "-c", "write -P 1 0 2M", "-c", "write -P 2 6M 1M"];
    tool("qemu-io").args(fill).arg(&base).succeeds();
    let on = ["--backing", "base.qcow2", "--backing-format", "qcow2"];
    let made = accepted(&[&["create", text(&top), "10M", "--format", "qcow2"][..], &on].concat());
    assert!(made.contains("10 MiB") && made.contains("on base.qcow2"), "{made}");
    let fill = ["-c", "write -P 3 1M 4M", "-c", "write -z 6M 100k", "-c", "write -P 4 8300k 1M"];
    tool("qemu-io").args(["-f", "qcow2"]).args(fill).arg(&top).succeeds();
    (base, top)
}

#[test]
fn a_killed_commit_loses_no_data_and_can_be_repeated() {
    nowait_testkit::needs!(require_qemu());
    let scratch = Scratch::new();
    let (base, top) = overlay(&scratch);
    let images = [&base, &top].map(|path| (path, fs::read(path).expect("an image")));
    let expected = bytes(&scratch, &top);
    let put_back = || {
        for (path, bytes) in &images {
            fs::write(path, bytes).expect("room for an image");
        }
    };
    let begin = Instant::now();
    accepted(&["commit", text(&top)]);
    let whole = begin.elapsed();
    let mut random = Random::from_seed(seed());
    for _ in 0..KILLS {
        put_back();
        let mut commit = Command::new(NOWAIT);
        let commit = commit.arg("commit").arg(&top).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = ends_with_test(commit).spawn().expect("the commit");
        let micros = u64::try_from(whole.as_micros()).expect("a short time");
        thread::sleep(Duration::from_micros(random.below(micros)));
        child.kill().expect("a child of one's own");
        child.wait().expect("its end");
        not_corrupt(&base);
        not_corrupt(&top);
        assert!(bytes(&scratch, &top) == expected, "after the kill");
        accepted(&["commit", text(&top)]);
        not_corrupt(&base);
        assert!(bytes(&scratch, &base) == expected, "after the next commit");
        assert!(bytes(&scratch, &top) == expected, "after the next commit");
    }
}

#[test]
fn a_commit_without_space_reports_it_and_loses_no_data() {
    nowait_testkit::needs!(require_qemu() && require_tool("prlimit"));
    let scratch = Scratch::new();
    let (base, top) = overlay(&scratch);
    let expected = bytes(&scratch, &top);
    let before = fs::read(&top).expect("the overlay");
    let limit = format!("--fsize={}", 4 * MIB);
    let refused = refusal_under(&["prlimit", &limit], &["commit", text(&top)]);
    refused.says(&["base.qcow2", "ulimit -f", "nothing is lost"]);
    assert!(fs::read(&top).expect("the overlay") == before);
    assert!(bytes(&scratch, &top) == expected);
    not_corrupt(&base);
    let printed = accepted(&["commit", text(&top), "--json"]);
    let printed: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!((&printed["emptied"], &printed["size_bytes"]), (&json!(true), &json!(10 * MIB)));
    assert!(bytes(&scratch, &base) == expected);
}

#[test]
fn an_image_in_use_is_neither_resized_nor_committed() {
    nowait_testkit::needs!(require_qemu());
    let scratch = Scratch::new();
    let raw = scratch.random("base.raw", MIB, 1);
    let top = scratch.join("top.qcow2");
    accepted(&["create", text(&top), "--format", "qcow2", "--backing", "base.raw"]);
    tool("qemu-io").args(["-f", "qcow2", "-c", "write -P 9 0 64k"]).arg(&top).succeeds();
    let before = fs::read(&raw).expect("the image");
    let server = Server::start(&raw, &["--read-only"]);
    let in_use = "lets nobody write";
    refusal(&["resize", text(&raw), "+1M"]).says(&["base.raw", in_use]);
    refusal(&["commit", text(&top)]).says(&["base.raw", in_use]);
    server.stop();
    assert!(fs::read(&raw).expect("the image") == before);
    accepted(&["commit", text(&top)]);
    assert_eq!(fs::read(&raw).expect("the image")[..64 << 10], [9; 64 << 10]);
}

#[test]
fn a_backing_file_that_is_missing_is_named() {
    let scratch = Scratch::new();
    let top = scratch.join("top.qcow2");
    scratch.random("base.raw", MIB, 1);
    accepted(&["create", text(&top), "--format", "qcow2", "--backing", "base.raw"]);
    fs::remove_file(scratch.join("base.raw")).expect("the base");
    for command in [&["commit", text(&top)][..], &["resize", text(&top), "2M"]] {
        refusal(command).says(&["top.qcow2", "'base.raw' is missing"]);
    }
}

#[test]
fn a_size_changes_as_requested_and_never_shrinks_without_the_option() {
    let scratch = Scratch::new();
    for format in ["raw", "qcow2"] {
        let image = scratch.join(format);
        let image = text(&image);
        let made = accepted(&["create", image, "10M", "--format", format, "--json"]);
        let made: Value = serde_json::from_str(&made).expect("JSON");
        let expected = json!({ "image": image, "format": format, "size_bytes": 10 * MIB });
        assert_eq!(made, expected);
        for (arguments, size) in [
            (&["+1M"][..], 11),
            (&["16M"], 16),
            (&["-1M", "--shrink"], 15),
            (&["--shrink", "-1M"], 14),
            (&["14M"], 14),
        ] {
            let all = [&["resize", image, "--json"], arguments].concat();
            let printed: Value = serde_json::from_str(&accepted(&all)).expect("JSON");
            assert_eq!(printed["size_bytes"], json!(size * MIB), "{arguments:?}");
        }
        refusal(&["resize", image, "-1M"]).says(&["smaller", "--shrink"]);
        refusal(&["resize", image, "-15M", "--shrink"]).says(&["cannot be resized by that much"]);
        refusal(&["resize", image, "-14M", "--shrink"]).says(&["at least one byte"]);
        assert!(accepted(&["resize", image, "14M"]).contains("14 MiB"));
    }
}
