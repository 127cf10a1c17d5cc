//! Serving qcow2 images: detected and given formats, locks on the whole chain, protection of raw
//! disks.
//!
//! Invariant: the expected results are those of QEMU's tools.

use std::fs;

use crate::common::{
    Finished, KIB, MIB, Scratch, Server, refusal, require_qemu, require_tool, tool,
};
use nowait_testkit::nbd::{Command, EPERM};

/// The first bytes of every qcow2 image.
const MAGIC: &[u8; 4] = b"QFI\xfb";

/// `top.qcow2` of 8 MiB over `base.img`.
fn overlay(scratch: &Scratch) -> [String; 2] {
    let base = scratch.dotted("base.img", 8 * MIB, 30_000, 200_000);
    let top = scratch.join("top.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    tool("qemu-img").args(create).arg(&base).arg(&top).succeeds();
    [top, base].map(|path| path.display().to_string())
}

#[test]
fn a_disk_detected_as_raw_never_gets_qcow2s_magic() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let server = Server::start(&image, &[]);
    let mut client = server.connect();
    let refused = |client: &mut nowait_testkit::nbd::Client, offset, bytes: &[u8]| {
        assert_eq!(client.write(offset, bytes), Err(EPERM), "{bytes:x?} at {offset}");
    };
    let mut block = vec![7; 4096];
    block[..4].copy_from_slice(MAGIC);
    refused(&mut client, 0, &block);
    refused(&mut client, 0, MAGIC);
    // Several writes would make up the magic: the last one is refused.
    client.write(0, b"QFIx").expect("no magic");
    refused(&mut client, 3, b"\xfb and more");
    client.write(0, b"xFI\xfb").expect("no magic");
    refused(&mut client, 0, b"Q");
    client.write(1, MAGIC).expect("not at the beginning");
    client.call(&Command::Zero { offset: 0, len: 4096, keep: false }).expect("zeros");
    drop(client);
    server.stop();
    assert!(!fs::read(&image).expect("the image").starts_with(MAGIC));

    let server = Server::start(&image, &["--format", "raw"]);
    server.connect().write(0, &block).expect("raw was given");
    server.stop();
    assert!(fs::read(&image).expect("the image").starts_with(MAGIC));
    let image = image.display().to_string();
    refusal(&["serve", &image]).says(&["disk.img", "qcow2"]);
}

#[test]
fn a_qcow2_image_is_served_as_its_disk_and_with_format_raw_as_its_bytes() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let [top, base] = overlay(&scratch);
    let server = Server::start(top.as_ref(), &["--read-only"]);
    let mut client = server.connect();
    assert_eq!(client.size, 8 * MIB);
    let disk = client.read(0, 8 << 20).expect("the disk");
    assert!(disk == fs::read(&base).expect("the backing file"));
    assert_eq!(client.write(0, &[1; 512]), Err(EPERM));
    drop(client);
    server.stop();
    let server = Server::start(top.as_ref(), &["--format", "raw"]);
    assert_eq!(server.connect().read(0, 4).as_deref(), Ok(&MAGIC[..]));
    assert!(server.log().contains("begins like a qcow2 image but is served raw"));
    server.stop();
}

#[test]
fn every_file_of_the_chain_is_locked_while_it_is_served() {
    nowait_testkit::needs!(require_qemu());
    let scratch = Scratch::new();
    let [top, base] = overlay(&scratch);
    let server = Server::start(top.as_ref(), &[]);
    for (image, format, command) in
        [(&top, "qcow2", "read 0 1k"), (&top, "qcow2", "write 0 1k"), (&base, "raw", "write 0 1k")]
    {
        let printed = tool("qemu-io").args(["-f", format, "-c", command, image]).fails();
        assert!(printed.contains("lock"), "{image}, {command}: {printed}");
    }
    tool("qemu-io").args(["-r", "-f", "raw", "-c", "read 0 1k", &base]).succeeds();
    refusal(&["serve", &top]).says(&["top.qcow2", "another process"]);
    refusal(&["serve", &base, "--format", "raw"]).says(&["base.img", "another process"]);
    server.stop();
    tool("qemu-io").args(["-f", "qcow2", "-c", "write 0 1k", &top]).succeeds();
}

#[test]
fn block_status_reports_data_and_holes_of_an_image() {
    nowait_testkit::needs!(require_tool("qemu-img") && require_tool("nbdinfo"));
    let scratch = Scratch::new();
    let image = scratch.join("disk.qcow2");
    tool("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("8M").succeeds();
    let server = Server::start(&image, &[]);
    let mut client = server.connect();
    client.write(MIB, &[1; 1 << 20]).expect("a write");
    client.write(5 * MIB, &[1; 512]).expect("a write");
    client.call(&Command::Trim { offset: MIB, len: 1 << 19 }).expect("a trim");
    let map = tool("nbdinfo").args(["--map", server.uri()]).succeeds();
    let output: Vec<Vec<&str>> =
        map.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
    let right: [[&str; 3]; 5] = [
        ["0", "1572864", "3"],
        ["1572864", "524288", "0"],
        ["2097152", "3145728", "3"],
        ["5242880", "4096", "0"],
        ["5246976", "3141632", "3"],
    ];
    assert_eq!(output, right, "{map}");
    drop(client);
    server.stop();
}

/// A chain of an image of 6 MiB in the format `base`, a qcow2 image and another of 10 MiB; all of
/// them have data, the upper ones have zeros, and the top one has a compressed cluster.
fn chain_of_three(scratch: &Scratch, base: &str) -> std::path::PathBuf {
    let in_scratch = |program: &str, arguments: &[&str]| {
        tool(program).current_dir(scratch.path()).args(arguments).succeeds();
    };
    in_scratch("qemu-img", &["create", "-q", "-f", base, "base.img", "6M"]);
    in_scratch("qemu-io", &["-f", base, "-c", "write 1M 1M", "base.img"]);
    let create = ["create", "-q", "-f", "qcow2", "-b"];
    in_scratch("qemu-img", &[&create[..], &["base.img", "-F", base, "mid", "10M"]].concat());
    in_scratch("qemu-img", &[&create[..], &["mid", "-F", "qcow2", "top"]].concat());
    let commands = ["write 128k 300k", "write -z 3M 256k", "write 7M 64k", "discard 7M 64k"];
    let commands = commands.map(|command| ["-c", command]).concat();
    in_scratch("qemu-io", &[&["-f", "qcow2"], &commands[..], &["mid"]].concat());
    let commands = ["write 192k 64k", "write -z 1216k 64k", "write -c 2M 64k", "write 9M 4k"];
    let commands = commands.map(|command| ["-c", command]).concat();
    in_scratch("qemu-io", &[&["-f", "qcow2"], &commands[..], &["top"]].concat());
    scratch.join("top")
}

/// The allocation depths of an export, by `nbdinfo` with `arguments`.
fn depths(arguments: &[&str]) -> String {
    tool("nbdinfo").arg("--map=qemu:allocation-depth").args(arguments).succeeds()
}

#[test]
fn allocation_depth_of_a_chain_is_reported_as_by_qemu_nbd() {
    nowait_testkit::needs!(
        ["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"].iter().all(|name| require_tool(name))
    );
    // Beyond the end of the lowest image, the zeros belong to that image.
    for (base, there) in [("raw", &[1, 2, 3][..]), ("qcow2", &[0, 1, 2, 3])] {
        let scratch = Scratch::new();
        let top = chain_of_three(&scratch, base);
        let path = top.display().to_string();
        let options = ["--read-only", "--allocation-depth", "--format=qcow2", &path, "]"];
        let qemu = [&["--", "[", "qemu-nbd"], &options[..]].concat();
        let right = depths(&qemu);
        for depth in there {
            let tells = |line: &str| line.split_whitespace().nth(2) == Some(&depth.to_string());
            assert!(right.lines().any(tells), "depth {depth} is in {right}");
        }
        let server = Server::start(&top, &[]);
        assert_eq!(depths(&[server.uri()]), right, "over {base}");
        let output = tool("nbdinfo").args(["--list", server.uri()]).succeeds();
        assert!(output.contains("base:allocation") && output.contains("qemu:allocation-depth"));
        server.connect().write(5 * MIB, &[1; 65536]).expect("a write");
        let written = depths(&[server.uri()]);
        server.stop();
        assert_eq!(written, depths(&qemu), "over {base}, after a write");
    }
}

#[test]
fn all_of_a_raw_disk_is_at_depth_1_as_with_qemu_nbd() {
    nowait_testkit::needs!(["qemu-nbd", "nbdinfo"].iter().all(|name| require_tool(name)));
    let scratch = Scratch::new();
    let image = scratch.sparse("alone.img", MIB);
    let server = Server::start(&image, &[]);
    server.connect().write(256 * KIB, &[1; 65536]).expect("a write between two holes");
    let printed = depths(&[server.uri()]);
    server.stop();
    assert_eq!(printed.split_whitespace().collect::<Vec<_>>(), ["0", "1048576", "1", "local"]);
    let path = image.display().to_string();
    let options = ["--read-only", "--allocation-depth", "--format=raw", &path, "]"];
    assert_eq!(printed, depths(&[&["--", "[", "qemu-nbd"], &options[..]].concat()));
}
