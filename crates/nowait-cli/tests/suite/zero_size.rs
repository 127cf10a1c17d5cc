//! Disks of no bytes, raw and qcow2, made by nowait and by QEMU.
//!
//! Invariant: every command handles them as QEMU does; a block device of no bytes has no medium and
//! is refused.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::common::loop_device::LoopDevice;
use crate::common::{Finished, MIB, Scratch, Server, accepted, refusal, require_tool, tool};
use nowait_testkit::nbd::{Client, Command, EINVAL, ENOSPC, Mode};

const FORMATS: [&str; 2] = ["raw", "qcow2"];

/// Disks of no bytes: a raw and a qcow2 one made by nowait, and by QEMU where it is installed.
fn disks(scratch: &Scratch) -> Vec<(&'static str, String)> {
    let mut made = Vec::new();
    for format in FORMATS {
        let name = scratch.join(&format!("ours.{format}")).display().to_string();
        let printed = accepted(&["create", &name, "0", "--format", format]);
        assert!(printed.contains("0 bytes"), "{printed}");
        made.push((format, name));
    }
    if require_tool("qemu-img") {
        for format in FORMATS {
            let name = scratch.join(&format!("theirs.{format}")).display().to_string();
            tool("qemu-img").args(["create", "-q", "-f", format, &name, "0"]).succeeds();
            made.push((format, name));
        }
    }
    made
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn a_disk_of_no_bytes_is_served_as_an_export_of_size_0() {
    let scratch = Scratch::new();
    for (_, image) in disks(&scratch) {
        for extra in [&[][..], &["--direct", "off"], &["--read-only"]] {
            let before = fs::read(&image).expect("the image");
            let server = Server::start(image.as_ref(), extra);
            for mode in [Mode::Simple, Mode::Structured, Mode::Extended] {
                let mut client = Client::connect(&server.socket(), mode).expect("a connection");
                assert_eq!(client.size, 0);
                assert_eq!(client.read(0, 1), Err(EINVAL), "{image}");
                if !extra.contains(&"--read-only") {
                    assert_eq!(client.write(0, &[1]), Err(ENOSPC), "{image}");
                    let zero = Command::Zero { offset: 0, len: 512, keep: false };
                    assert_eq!(client.call(&zero), Err(ENOSPC), "{image}");
                }
                assert_eq!(client.call(&Command::Flush), Ok(Vec::new()), "{image}");
            }
            if require_tool("nbdinfo") {
                assert_eq!(tool("nbdinfo").args(["--size", server.uri()]).succeeds().trim(), "0");
                tool("nbdinfo").args(["--map", server.uri()]).succeeds();
                let printed = tool("nbdinfo").arg(server.uri()).succeeds();
                assert!(printed.contains("export-size: 0"), "{printed}");
            }
            server.stop();
            if extra.contains(&"--read-only") {
                assert!(fs::read(&image).expect("the image") == before, "{image}");
            }
        }
    }
}

#[test]
fn a_disk_of_no_bytes_is_copied_to_and_from_each_format_and_exports() {
    let scratch = Scratch::new();
    for (_, image) in disks(&scratch) {
        let path = |name: &str| scratch.join(name).display().to_string();
        let (raw, qcow2, back) = (path("to.img"), path("to.qcow2"), path("back.img"));
        accepted(&["copy", &image, &raw, "--verify"]);
        assert_eq!(fs::metadata(&raw).expect("the copy").len(), 0);
        accepted(&["copy", &image, &qcow2, "--verify"]);
        accepted(&["copy", &qcow2, &back, "--verify"]);
        assert_eq!(fs::metadata(&back).expect("the copy").len(), 0);
        assert!(accepted(&["check", &qcow2]).starts_with("no errors were found"));
        if require_tool("qemu-img") {
            tool("qemu-img").args(["check", "-q", &qcow2]).succeeds();
            tool("qemu-img").args(["compare", "-q", &image, &qcow2]).succeeds();
        }
        let server = Server::start(image.as_ref(), &[]);
        accepted(&["copy", server.uri(), &back, "--force", "--verify"]);
        let printed = accepted(&["copy", &back, server.uri(), "--verify", "--json"]);
        assert_eq!(json_of(&printed)["size_bytes"], json!(0));
        let full = scratch.random("full", 512, 1);
        let printed = refusal(&["copy", full.to_str().expect("UTF-8"), server.uri()]);
        printed.says(&["it is too small: it has 0 bytes, the source has 512"]);
        server.stop();
        for path in [PathBuf::from(raw), qcow2.into(), back.into(), full] {
            fs::remove_file(path).expect("a file of this test");
        }
    }
}

#[test]
fn map_info_and_check_of_a_disk_of_no_bytes_agree_with_qemu() {
    let scratch = Scratch::new();
    for (format, image) in disks(&scratch) {
        let info = json_of(&accepted(&["info", &image, "--json"]));
        assert_eq!((&info["virtual-size"], &info["format"]), (&json!(0), &json!(format)));
        assert!(accepted(&["info", &image]).contains("virtual size: 0 bytes"));
        let map = accepted(&["map", "--json", &image]);
        if require_tool("qemu-img") {
            let theirs = ["map", "--output=json", "-f", format, image.as_str()];
            assert_eq!(map, tool("qemu-img").args(theirs).succeeds());
        }
        if format == "qcow2" {
            assert!(accepted(&["check", &image]).starts_with("no errors were found"));
            if require_tool("qemu-img") {
                tool("qemu-img").args(["check", "-q", "-f", format, &image]).succeeds();
            }
        }
    }
}

#[test]
fn a_disk_of_no_bytes_grows_and_is_written_to_then_but_no_disk_shrinks_to_none() {
    let scratch = Scratch::new();
    for (format, image) in disks(&scratch) {
        for size in ["+0", "0"] {
            let refused = tool(crate::common::NOWAIT).args(["resize", &image, size]).fails();
            assert!(refused.contains("at least one byte"), "{refused}");
        }
        let printed = json_of(&accepted(&["resize", &image, "+1M", "--json"]));
        assert_eq!((&printed["old_size_bytes"], &printed["size_bytes"]), (&json!(0), &json!(MIB)));
        let server = Server::start(image.as_ref(), &["--format", format]);
        let mut client = server.connect();
        assert_eq!(client.size, MIB);
        assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
        assert_eq!(client.write(MIB - 512, &[7; 512]), Ok(Vec::new()));
        assert_eq!(client.read(MIB - 512, 512), Ok(vec![7; 512]));
        drop(client);
        server.stop();
        if format == "qcow2" {
            assert!(accepted(&["check", &image]).starts_with("no errors were found"));
        }
        // qemu-img says: "New image size must be positive".
        refusal(&["resize", &image, "-1M", "--shrink"]).says(&["at least one byte"]);
    }
}

#[test]
fn an_overlay_on_a_disk_of_no_bytes_is_made_and_committed() {
    let scratch = Scratch::new();
    for (format, base) in disks(&scratch) {
        let top = scratch.join("top.qcow2").display().to_string();
        let on = ["--backing", base.as_str(), "--backing-format", format];
        accepted(&[&["create", &top][..], &on].concat());
        assert_eq!(json_of(&accepted(&["info", &top, "--json"]))["virtual-size"], json!(0));
        accepted(&["commit", &top]);
        accepted(&["resize", &top, "64K"]);
        let server = Server::start(top.as_ref(), &[]);
        assert_eq!(server.connect().write(0, &[9; 4096]), Ok(Vec::new()));
        server.stop();
        accepted(&["commit", &top]);
        let server = Server::start(base.as_ref(), &["--format", format]);
        let mut client = server.connect();
        assert_eq!((client.size, client.read(0, 4096)), (64 << 10, Ok(vec![9; 4096])));
        drop(client);
        server.stop();
        fs::remove_file(&top).expect("the overlay");
    }
}

#[test]
fn preallocation_for_a_disk_of_no_bytes_reserves_its_tables() {
    let scratch = Scratch::new();
    for (format, reserved) in [("raw", "falloc"), ("qcow2", "falloc"), ("qcow2", "metadata")] {
        let image = scratch.join(&format!("{reserved}.{format}")).display().to_string();
        accepted(&["create", &image, "0", "--format", format, "--preallocation", reserved]);
        if format == "qcow2" {
            assert!(accepted(&["check", &image]).starts_with("no errors were found"));
        }
    }
}

#[test]
fn a_block_device_of_no_bytes_has_no_medium_and_is_refused() {
    let scratch = Scratch::new();
    let (nothing, target) = (scratch.sparse("nothing", 0), scratch.join("target"));
    let Some(device) = LoopDevice::on(&nothing) else { return };
    let name = device.0.as_str();
    let (source, target) = (nothing.to_str().expect("UTF-8"), target.to_str().expect("UTF-8"));
    let words = [name, "block device without bytes"];
    refusal(&["serve", name]).says(&words);
    refusal(&["serve", name, "--read-only"]).says(&words);
    refusal(&["copy", name, target]).says(&words);
    refusal(&["copy", source, name, "--force"]).says(&words);
    refusal(&["map", name]).says(&words);
    refusal(&["check", name]).says(&words);
    refusal(&["resize", name, "1M"]).says(&words);
    let on = ["--backing", name, "--backing-format", "raw", "--backing-dir", "/dev"];
    refusal(&[&["create", target, "--format", "qcow2"][..], &on].concat()).says(&words);
}
