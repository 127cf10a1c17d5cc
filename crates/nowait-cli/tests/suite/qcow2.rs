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
