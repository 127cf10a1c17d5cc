//! VMDK and VHDX images, which are only read: every command with them.
//!
//! Invariant: what a format cannot do is refused in one line that names the image, and the image is as it was.

use std::fs;

use serde_json::Value;

use crate::common::{Finished, MIB, Scratch, Server, accepted, refusal, require_tool, text, tool};
use crate::copy::patchwork;
use crate::upgrade::Upgraded;
use nowait_testkit::{Random, seed};

/// Formats, and the options of `qemu-img convert` for their variants.
const VARIANTS: [(&str, &str); 8] = [
    ("vmdk", "subformat=monolithicSparse"),
    ("vmdk", "subformat=monolithicFlat"),
    ("vmdk", "subformat=twoGbMaxExtentSparse"),
    ("vmdk", "subformat=twoGbMaxExtentFlat"),
    ("vmdk", "subformat=streamOptimized"),
    ("vhdx", "subformat=dynamic"),
    ("vhdx", "subformat=dynamic,block_size=1M"),
    ("vhdx", "subformat=fixed"),
];

fn converted(scratch: &Scratch, raw: &str, format: &str, options: &str) -> String {
    let image = scratch.join(&format!("disk.{format}"));
    let convert = ["convert", "-q", "-f", "raw", "-O", format, "-o", options, raw];
    tool("qemu-img").args(convert).arg(&image).succeeds();
    text(&image).to_owned()
}

#[test]
fn every_variant_is_copied_to_raw_and_qcow2_and_served_below_an_overlay() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let mut random = Random::from_seed(seed());
    for (format, options) in VARIANTS {
        let scratch = Scratch::new();
        let raw = patchwork(&scratch, "disk.raw", &mut random);
        let expected = {
            let mut bytes = fs::read(&raw).expect("the disk");
            bytes.resize(bytes.len().next_multiple_of(512), 0);
            bytes
        };
        let image = converted(&scratch, text(&raw), format, options);
        let (flat, qcow2) = (scratch.join("flat.img"), scratch.join("copy.qcow2"));
        accepted(&["copy", &image, text(&flat), "-O", "raw", "--verify"]);
        assert!(fs::read(&flat).expect("a copy") == expected, "{format}, {options}");
        accepted(&["copy", "-f", format, &image, text(&qcow2)]);
        let compare = ["compare", "-f", "raw", "-F", "qcow2"];
        tool("qemu-img").args(compare).args([&flat, &qcow2]).succeeds();

        let over = scratch.join("over.qcow2");
        let name = format!("disk.{format}");
        accepted(&["create", text(&over), "--backing", &name, "--backing-format", format]);
        let server = Server::start(&over, &[]);
        let mut client = server.connect();
        assert_eq!(client.read(4096, 70_000).as_deref(), Ok(&expected[4096..74_096]));
        client.write(8192, &[7; 512]).expect("a write");
        assert_eq!(client.read(8192, 512).as_deref(), Ok(&[7; 512][..]));
        assert_eq!(client.read(8704, 512).as_deref(), Ok(&expected[8704..9216]));
        server.stop();

        let server = Server::start(image.as_ref(), &["--read-only"]);
        let mut client = server.connect();
        for at in [0, 512, (expected.len() as u64 / 2) & !511, expected.len() as u64 - 4096] {
            let range = at as usize..at as usize + 4096;
            assert_eq!(client.read(at, 4096).as_deref(), Ok(&expected[range]), "{options}, {at}");
        }
        assert!(client.write(0, &[1; 512]).is_err());
        server.stop();
    }
}

/// The extents beside the descriptor are opened again by a confined program, with the locks of the first.
#[test]
fn an_image_of_several_files_is_served_on_by_a_program_that_takes_over() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let raw = scratch.random("disk.raw", MIB, 1);
    let expected = fs::read(&raw).expect("the disk");
    let image = converted(&scratch, text(&raw), "vmdk", "subformat=twoGbMaxExtentFlat");
    let control = scratch.join("control");
    let address = format!("unix:{}", control.display());
    let server =
        Server::start(image.as_ref(), &["--read-only", "--control", &address, "--verbose"]);
    let mut it = Upgraded::of(server, &control, scratch);
    assert_eq!(it.connect().read(4096, 8192).as_deref(), Ok(&expected[4096..12_288]));
    it.upgrade();
    assert_eq!(it.connect().read(65_536, 8192).as_deref(), Ok(&expected[65_536..73_728]));
    it.stop();
}

#[test]
fn what_a_format_that_is_only_read_cannot_do_is_refused_in_one_line() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let raw = scratch.random("disk.raw", MIB, 1);
    for (format, options) in [VARIANTS[0], VARIANTS[5]] {
        let image = converted(&scratch, text(&raw), format, options);
        let before = fs::read(&image).expect("the image");
        let a = format!("disk.{format}: a {format} image");
        for (command, says) in [
            (&["serve", &image][..], "is only read (say --read-only, put a qcow2 image on it"),
            (&["resize", &image, "+1M"], "cannot be resized"),
            (&["check", &image, "--repair"], "cannot be repaired"),
        ] {
            refusal(command).says(&[&format!("{a} {says}")]);
        }
        let refused = refusal(&["check", &image]);
        let says = format!("{a} cannot be checked");
        assert!(refused.code == 63 && refused.error.contains(&says), "{}", refused.error);
        let over = scratch.join("over.qcow2");
        let name = format!("disk.{format}");
        accepted(&["create", text(&over), "--backing", &name, "--backing-format", format]);
        refusal(&["commit", text(&over)]).says(&[&format!("{a} cannot be committed to")]);
        fs::remove_file(&over).expect("the overlay");
        for making in [
            &["create", "new", "1M", "--format", format][..],
            &["copy", text(&raw), "new", "-O", format],
        ] {
            let refused = refusal(making);
            let says = "the formats of new images are raw and qcow2";
            assert!(refused.code == 2 && refused.error.contains(says), "{}", refused.error);
        }
        assert!(fs::read(&image).expect("the image") == before);
    }
}

#[test]
fn info_and_map_tell_of_the_disk_in_an_image_that_is_only_read() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let raw = scratch.random("disk.raw", 3 * MIB, 1);
    for (format, options) in VARIANTS {
        let image = converted(&scratch, text(&raw), format, options);
        let json: Value =
            serde_json::from_str(&accepted(&["info", &image, "--json"])).expect("JSON");
        let theirs = tool("qemu-img").args(["info", "--output=json", &image]).succeeds();
        let theirs: Value = serde_json::from_str(&theirs).expect("JSON");
        for key in ["format", "virtual-size", "dirty-flag"] {
            assert_eq!(json[key], theirs[key], "{options}, {key}");
        }
        let kind = "/format-specific/data/create-type";
        assert_eq!(json.pointer(kind), theirs.pointer(kind), "{options}");
        let words = accepted(&["info", &image]);
        assert!(words.contains(&format!("format:       {format}")), "{words}");
        assert!(
            words.contains("virtual size: 3 MiB") && words.contains("it is only read"),
            "{words}"
        );
        let map: Value = serde_json::from_str(&accepted(&["map", &image, "--json"])).expect("JSON");
        let runs = map.as_array().expect("an array").iter();
        let data: u64 =
            runs.filter(|it| it["data"] == true).filter_map(|it| it["length"].as_u64()).sum();
        assert_eq!(data, 3 * MIB, "{options}");
        for file in fs::read_dir(scratch.path()).expect("a directory") {
            let path = file.expect("an entry").path();
            if path != raw {
                fs::remove_file(path).expect("a file");
            }
        }
    }
}
