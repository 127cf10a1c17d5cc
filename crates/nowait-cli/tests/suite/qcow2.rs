//! qcow2 images served: formats guessed and given, locks on the whole chain, a guest's disk kept raw.
//!
//! Invariant: QEMU's tools say what is right. Knows: the command line, the wire. Known by: nobody.

use std::fs;

use crate::common::nbd::{Command, EPERM};
use crate::common::{Finished, MIB, Scratch, Server, refusal, require_tool, tool};

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
fn a_disk_guessed_raw_never_comes_to_begin_like_qcow2() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let server = Server::start(&image, &[]);
    let mut client = server.connect();
    let refused = |client: &mut crate::common::nbd::Client, offset, bytes: &[u8]| {
        assert_eq!(client.write(offset, bytes), Err(EPERM), "{bytes:x?} at {offset}");
    };
    let mut block = vec![7; 4096];
    block[..4].copy_from_slice(MAGIC);
    refused(&mut client, 0, &block);
    refused(&mut client, 0, MAGIC);
    // The last write of several that would make it one.
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
    refusal(&["serve", &image]).says(&["disk.img", "qcow2 version"]);
}

#[test]
fn a_qcow2_image_is_served_as_its_disk_and_given_as_raw_as_its_bytes() {
    if !require_tool("qemu-img") {
        return;
    }
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
    if !require_tool("qemu-img") || !require_tool("qemu-io") {
        return;
    }
    let scratch = Scratch::new();
    let [top, base] = overlay(&scratch);
    let server = Server::start(top.as_ref(), &[]);
    for (image, format, command) in
        [(&top, "qcow2", "read 0 1k"), (&top, "qcow2", "write 0 1k"), (&base, "raw", "write 0 1k")]
    {
        let said = tool("qemu-io").args(["-f", format, "-c", command, image]).fails();
        assert!(said.contains("lock"), "{image}, {command}: {said}");
    }
    tool("qemu-io").args(["-r", "-f", "raw", "-c", "read 0 1k", &base]).succeeds();
    refusal(&["serve", &top]).says(&["top.qcow2", "another process"]);
    refusal(&["serve", &base, "--format", "raw"]).says(&["base.img", "another process"]);
    server.stop();
    tool("qemu-io").args(["-f", "qcow2", "-c", "write 0 1k", &top]).succeeds();
}

#[test]
fn what_an_image_has_and_has_not_is_told_as_block_status() {
    if !require_tool("qemu-img") || !require_tool("nbdinfo") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.join("disk.qcow2");
    tool("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("8M").succeeds();
    let server = Server::start(&image, &[]);
    let mut client = server.connect();
    client.write(MIB, &[1; 1 << 20]).expect("a write");
    client.write(5 * MIB, &[1; 512]).expect("a write");
    client.call(&Command::Trim { offset: MIB, len: 1 << 19 }).expect("a trim");
    let map = tool("nbdinfo").args(["--map", server.uri()]).succeeds();
    let told: Vec<Vec<&str>> =
        map.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
    let right: [[&str; 3]; 5] = [
        ["0", "1572864", "3"],
        ["1572864", "524288", "0"],
        ["2097152", "3145728", "3"],
        ["5242880", "4096", "0"],
        ["5246976", "3141632", "3"],
    ];
    assert_eq!(told, right, "{map}");
    drop(client);
    server.stop();
}

/// A chain of an image of 6 MiB in the format `base`, a qcow2 image and another of 10 MiB; in all of
/// them there is data, in the upper ones there are zeros, and the one on top has a packed cluster.
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

/// What `nbdinfo` says of the depths of what `arguments` name.
fn depths(arguments: &[&str]) -> String {
    tool("nbdinfo").arg("--map=qemu:allocation-depth").args(arguments).succeeds()
}

#[test]
fn which_image_of_a_chain_has_what_is_told_as_qemu_nbd_tells_it() {
    if !["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"].iter().all(|name| require_tool(name)) {
        return;
    }
    // Behind the end of the lowest image it is that one which says that there are zeros.
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
        let told = tool("nbdinfo").args(["--list", server.uri()]).succeeds();
        assert!(told.contains("base:allocation") && told.contains("qemu:allocation-depth"));
        server.connect().write(5 * MIB, &[1; 65536]).expect("a write");
        let written = depths(&[server.uri()]);
        server.stop();
        assert_eq!(written, depths(&qemu), "over {base}, after a write");
    }
}

#[test]
fn of_a_disk_that_stands_on_nothing_no_depths_are_told() {
    if !require_tool("nbdinfo") {
        return;
    }
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("alone.img", MIB), &[]);
    let told = tool("nbdinfo").args(["--list", server.uri()]).succeeds();
    assert!(told.contains("base:allocation") && !told.contains("qemu:"), "{told}");
    server.stop();
}
