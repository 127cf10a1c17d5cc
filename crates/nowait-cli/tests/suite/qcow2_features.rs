//! Features of qcow2 images by commands: internal snapshots, compression, subclusters.

use std::fs;
use std::path::Path;

use nowait_testkit::Random;
use serde_json::Value;

use crate::common::{
    Finished, Scratch, Server, accepted, refusal, require_qemu, require_tool, text, tool,
};

const MIB: usize = 1 << 20;

#[test]
fn a_snapshot_is_served_read_only_copied_mapped_and_listed() {
    nowait_testkit::needs!(require_qemu() && require_tool("nbdcopy"));
    let scratch = Scratch::new();
    let image = scratch.join("disk.qcow2");
    accepted(&["create", text(&image), "4M", "--compression", "zstd"]);
    let fill = |write: &str| {
        tool("qemu-io").args(["-f", "qcow2", "-c", write]).arg(&image).succeeds();
    };
    fill("write -c -P 7 1M 1M");
    tool("qemu-img").args(["snapshot", "-c", "before"]).arg(&image).succeeds();
    fill("write -P 8 1M 1M");
    let expected = [vec![0; MIB], vec![7; MIB], vec![0; 2 * MIB]].concat();
    let name = format!("{}@before", text(&image));
    let raw = scratch.join("copied.img");
    accepted(&["copy", &name, text(&raw), "--verify"]);
    assert!(fs::read(&raw).expect("the copy") == expected);
    let info = accepted(&["info", text(&image)]);
    assert!(info.contains("before (ID 1), "), "{info}");
    let info = accepted(&["info", text(&image), "--json"]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["snapshots"][0]["name"], "before");
    assert_eq!(info["format-specific"]["data"]["compression-type"], "zstd");
    assert!(accepted(&["map", &name]).contains("0x100000"));
    accepted(&["check", text(&image)]);
    refusal(&["serve", &name]).says(&["its internal snapshot 'before' is only read"]);
    refusal(&["info", &format!("{}@after", text(&image))])
        .says(&["it has no internal snapshot 'after'"]);
    let server = Server::start(Path::new(&name), &["--read-only"]);
    let served = scratch.join("served.img");
    tool("nbdcopy").arg(server.uri()).arg(&served).succeeds();
    assert!(fs::read(&served).expect("the copy") == expected);
}

/// Data that is compressed well, and in part not at all.
fn sample(len: usize) -> Vec<u8> {
    let mut random = Random::from_seed(7);
    let mut disk = vec![0; len];
    for (number, block) in disk.chunks_mut(32 << 10).enumerate() {
        match number % 7 {
            0 => {}
            1 => block.iter_mut().for_each(|byte| *byte = random.below(256) as u8),
            2 => block.fill(number as u8),
            _ => {
                for (n, line) in block.chunks_mut(61).enumerate() {
                    let text = format!("{number} line {} of {} words\n", n * 7, random.below(99));
                    line.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
                }
            }
        }
    }
    disk
}

#[test]
fn a_compressed_copy_is_an_image_as_qemu_makes_it_and_as_small() {
    nowait_testkit::needs!(require_qemu());
    let scratch = Scratch::new();
    let source = scratch.join("source.img");
    for (cluster_kib, compression, len) in [
        (64, "zlib", 24 * MIB + 512),
        (64, "zstd", 24 * MIB),
        (4, "zlib", 6 * MIB + 100),
        (2048, "zstd", 24 * MIB - 1),
    ] {
        let cluster = &format!("{cluster_kib}K");
        fs::write(&source, sample(len)).expect("room for the source");
        let (ours, theirs) = (scratch.join("ours.qcow2"), scratch.join("theirs.qcow2"));
        let to = ["--compress", "--compression", compression, "--cluster-size", cluster];
        let copy = ["copy", text(&source), text(&ours), "--verify", "--force"];
        accepted(&[&copy[..], &to].concat());
        let options = format!("cluster_size={cluster},compression_type={compression}");
        let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options];
        tool("qemu-img").args(convert).arg(&source).arg(&theirs).succeeds();
        tool("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(&ours).succeeds();
        accepted(&["check", text(&ours)]);
        tool("qemu-img")
            .args(["compare", "-f", "qcow2", "-F", "qcow2"])
            .arg(&ours)
            .arg(&theirs)
            .succeeds();
        let bytes = |path| fs::metadata(path).expect("an image").len();
        let (ours, theirs) = (bytes(&ours), bytes(&theirs));
        println!("{cluster}, {compression}: {ours} bytes, qemu-img {theirs}");
        // Only QEMU's image may end inside a cluster.
        let most = theirs * 105 / 100 + cluster_kib * 1024;
        assert!(ours <= most, "{ours} bytes, and qemu-img's {theirs}");
    }
    let raw = scratch.join("raw.img");
    for (option, words) in [
        (&["--compress"][..], "--compress is for qcow2, and TO is raw"),
        (&["--compression", "zstd"], "--compress is missing"),
    ] {
        let refused = refusal(&[&["copy", text(&source), text(&raw)][..], option].concat());
        assert!(refused.code == 2 && refused.error.contains(words), "{}", refused.error);
    }
}

#[test]
fn an_image_with_subclusters_is_made_served_copied_and_resized() {
    nowait_testkit::needs!(require_qemu() && require_tool("nbdcopy"));
    let scratch = Scratch::new();
    let (base, image) = (scratch.join("base.img"), scratch.join("disk.qcow2"));
    fs::write(&base, vec![5; 4 * MIB]).expect("room for the base");
    let on = ["--backing", "base.img", "--backing-format", "raw", "--extended-l2"];
    accepted(&[&["create", text(&image)][..], &on].concat());
    let info = accepted(&["info", text(&image), "--json"]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["format-specific"]["data"]["extended-l2"], true);
    assert!(accepted(&["info", text(&image)]).contains("subcluster size"));
    let mut expected = vec![5; 4 * MIB];
    let source = scratch.join("source.img");
    for (at, byte) in [(0, 1), (70_000, 2), (MIB + 4096, 3)] {
        expected[at..at + 5000].fill(byte);
    }
    fs::write(&source, &expected).expect("room for the source");
    let server = Server::start(&image, &[]);
    tool("nbdcopy").arg(&source).arg(server.uri()).succeeds();
    server.stop();
    tool("qemu-img")
        .args(["compare", "-f", "raw", "-F", "qcow2"])
        .arg(&source)
        .arg(&image)
        .succeeds();
    tool("qemu-img").args(["check", "-q"]).arg(&image).succeeds();
    accepted(&["check", text(&image)]);
    accepted(&["resize", text(&image), "6M"]);
    let copied = scratch.join("copied.img");
    accepted(&["copy", text(&image), text(&copied), "--verify"]);
    expected.resize(6 * MIB, 0);
    assert!(fs::read(&copied).expect("the copy") == expected);
    let raw = scratch.join("raw.img");
    refusal(&["create", text(&raw), "1M", "--extended-l2"]).says(&["leave out --extended-l2"]);
    let small = scratch.join("small.qcow2");
    refusal(&["create", text(&small), "1M", "--extended-l2", "--cluster-size", "8K"])
        .says(&["clusters of at least 16K"]);
}
