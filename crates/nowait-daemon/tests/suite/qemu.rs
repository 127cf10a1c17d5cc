//! QEMU's block layer as a client.
//!
//! Invariant: each test compares with bytes that were not transferred by the server.

use crate::common::{Finished, GIB, KIB, MIB, Scratch, Server, VARIANTS, require_tool, tool};

#[test]
fn qemu_img_converts_into_and_out_of_the_export_and_finds_all_identical() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let source = scratch.dotted("source", GIB / 4, 100 * KIB as usize, 3 * MIB);
    let packed = scratch.join("packed.qcow2");
    let unpacked = scratch.join("unpacked.qcow2");
    let server = Server::start(&scratch.sparse("disk.img", GIB / 4), "");
    let compare = |format: &str, file: &std::path::Path| {
        let printed = tool("qemu-img")
            .args(["compare", "-f", format, "-F", "raw"])
            .arg(file)
            .arg(server.uri())
            .succeeds();
        assert!(printed.contains("Images are identical."), "{printed}");
    };

    tool("qemu-img")
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .arg(&source)
        .arg(&packed)
        .succeeds();
    tool("qemu-img")
        .args(["convert", "-n", "-f", "qcow2", "-O", "raw"])
        .arg(&packed)
        .arg(server.uri())
        .succeeds();
    compare("raw", &source);
    tool("qemu-img")
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .arg(server.uri())
        .arg(&unpacked)
        .succeeds();
    compare("qcow2", &unpacked);
    server.stop();
}

/// Each line checks the effects of the lines before it.
const QEMU_IO_SCRIPT: [&str; 20] = [
    "read -P 0 0 16M",
    "write -P 0x5a 4k 64k",
    "read -P 0x5a 4k 64k",
    "read -P 0 68k 60k",
    "write -P 0x11 1001 777",
    "read -P 0x11 1001 777",
    "read -P 0 0 1001",
    "write -P 0x22 4097 1",
    "read -P 0x5a 4096 1",
    "read -P 0x5a 4098 8k",
    "write -f -P 0x33 1M 1M",
    "flush",
    "write -z 1M 256k",
    "read -P 0 1M 256k",
    "write -z -u 1536k 100000",
    "read -P 0 1536k 100000",
    "read -P 0x33 1280k 256k",
    "discard 8k 16k",
    "writev -P 0x44 10M 512 4k 12k 1k",
    "readv -P 0x44 10M 1k 512 16k",
];

#[test]
fn qemu_io_reads_the_patterns_it_wrote_zeroed_and_discarded_in_every_variant() {
    nowait_testkit::needs!(require_tool("qemu-io"));
    for variant in VARIANTS {
        println!("serve {variant:?}");
        let scratch = Scratch::new();
        let server = Server::start(&scratch.sparse("disk.img", 16 * MIB), variant);
        let mut command = tool("qemu-io");
        command.args(["-f", "raw", "-d", "unmap", &server.uri()]);
        for line in QEMU_IO_SCRIPT {
            command.args(["-c", line]);
        }
        let printed = command.succeeds();
        assert!(!printed.contains("failed"), "{printed}");
        server.stop();
    }
}
