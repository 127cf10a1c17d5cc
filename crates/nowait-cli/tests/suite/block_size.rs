//! `serve --block-size`: what clients are told, and what is refused. The disks of virtual machines and the nodes are
//! tested where these are.
//!
//! Invariant: a request that was refused has changed nothing, and the connection goes on.

use serde_json::{Value, json};

use crate::common::{
    Finished, KIB, MIB, NOWAIT, Scratch, Server, accepted, refusal, require_tool, text, tool,
};
use nowait_testkit::nbd::{EINVAL, Mode};

#[test]
fn nbd_takes_whole_blocks_only_of_the_size_that_clients_are_told() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    for (option, block) in
        [(&[][..], 1), (&["--block-size", "512"], 512), (&["--block-size=4K"], 4096)]
    {
        let server = Server::start(&image, option);
        if require_tool("nbdinfo") {
            let printed = tool("nbdinfo").args(["--json", server.uri()]).succeeds();
            let told: Value = serde_json::from_str(&printed).expect("JSON from nbdinfo");
            let told = &told["exports"][0];
            assert_eq!(told["block_size_minimum"], block, "{told}");
            assert_eq!(told["block_size_preferred"], 4096, "{told}");
        }
        for mode in [Mode::Simple, Mode::Structured, Mode::Extended] {
            let mut client = nowait_testkit::nbd::Client::connect(&server.socket(), mode)
                .expect("a server that takes connections");
            client.write(8192, &[3; 4096]).expect("a whole block");
            for (offset, len) in [(8192, 1), (8193, 511), (8704, 512), (8192, 4608)] {
                let is_whole = (offset | len) % block == 0;
                let written = client.write(offset, &vec![3; len as usize]);
                assert_eq!(written.err(), Some(EINVAL).filter(|_| !is_whole), "{block}: {offset}");
                let read = client.read(offset, len as u32);
                let expected = if is_whole { Ok(vec![3; len as usize]) } else { Err(EINVAL) };
                assert_eq!(read, expected, "{block}: {len} at {offset}");
            }
            client.write(8192, &[0; 8192]).expect("two whole blocks");
        }
        server.stop();
    }
}

#[test]
fn extents_are_whole_blocks_although_the_clusters_of_the_image_are_smaller() {
    nowait_testkit::needs!(["qemu-io", "nbdinfo"].into_iter().all(require_tool));
    let scratch = Scratch::new();
    let image = scratch.join("disk.qcow2");
    accepted(&["create", text(&image), "64K", "--format", "qcow2", "--cluster-size", "512"]);
    let server = Server::start(&image, &[]);
    let write = |at: &str, len: &str| {
        let write = format!("write -P 5 {at} {len}");
        tool("qemu-io").args(["-f", "raw", "-c", &write, server.uri()]).succeeds();
    };
    write("4608", "512");
    write("16384", "4096");
    write("24064", "1024");
    server.stop();
    let server = Server::start(&image, &["--block-size", "4K"]);
    let map = tool("nbdinfo").args(["--map", "--json", server.uri()]).succeeds();
    let map: Value = serde_json::from_str(&map).expect("JSON from nbdinfo");
    let extent =
        |extent: &Value| (extent["offset"].clone(), extent["length"].clone(), extent["type"] == 0);
    let extents: Vec<_> = map.as_array().expect("extents").iter().map(extent).collect();
    let expected = [
        (0, 4 * KIB, false),
        (4 * KIB, 4 * KIB, true),
        (8 * KIB, 8 * KIB, false),
        (16 * KIB, 8 * KIB + 4 * KIB, true),
        (28 * KIB, 36 * KIB, false),
    ];
    let expected =
        expected.map(|(offset, length, is_data)| (json!(offset), json!(length), is_data));
    assert_eq!(extents, expected);
    // QEMU reads and writes whole blocks, whatever its guest does.
    let commands =
        ["read -P 5 4608 512", "write -P 6 4608 100", "read -P 6 4608 100", "read -P 5 4708 412"];
    for command in commands {
        let done = tool("qemu-io").args(["-f", "raw", "-c", command, server.uri()]).succeeds();
        assert!(!done.contains("failed"), "{command}: {done}");
    }
    server.stop();
    accepted(&["check", text(&image)]);
}

#[test]
fn an_image_that_is_no_multiple_of_the_block_is_refused_at_the_start_and_later() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB + 512);
    let line = format!("{} bytes are not a multiple of --block-size 4096", MIB + 512);
    refusal(&["serve", text(&image), "--block-size", "4096"]).says(&["disk.img", &line]);
    let byte = scratch.sparse("byte.img", MIB + 1);
    refusal(&["serve", text(&byte), "--block-size", "512"]).says(&["byte.img", "--block-size 512"]);
    let control = scratch.join("control");
    let control = format!("unix:{}", control.display());
    let directory = image.parent().expect("a directory");
    let options = ["--block-size", "512", "--control", &control, "--allow-dir", text(directory)];
    let server = Server::start(&image, &options);
    let export = |arguments: &[&str]| {
        let address = control.strip_prefix("unix:").expect("the address of a socket");
        tool(NOWAIT)
            .arg("export")
            .args(arguments)
            .args(["--control", address])
            .output()
            .expect("timeout(1)")
    };
    for (arguments, is_done) in [
        (&["add", "byte", text(&byte)][..], false),
        (&["resize", "@0", "1049089"], false),
        (&["resize", "@0", "2M"], true),
        (&["resize", "@0", "2097664"], true),
    ] {
        let output = export(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), is_done, "{arguments:?}: {said}");
        assert_eq!(said.contains("not a multiple of --block-size 512"), !is_done, "{said}");
    }
    assert_eq!(server.connect().size, 2 * MIB + 512);
    server.stop();
}
