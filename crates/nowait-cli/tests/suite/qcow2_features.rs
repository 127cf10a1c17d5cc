//! Features of qcow2 images by commands: internal snapshots, compression by zstd.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::common::{
    Finished, Scratch, Server, accepted, refusal, require_qemu, require_tool, text, tool,
};

const MIB: usize = 1 << 20;

#[test]
fn a_snapshot_is_served_read_only_copied_mapped_and_listed() {
    if !require_qemu() || !require_tool("nbdcopy") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.join("disk.qcow2");
    accepted(&["create", text(&image), "4M", "--compression", "zstd"]);
    let fill = |pattern: &str| {
        let write = format!("write -c -P {pattern} 1M 1M");
        tool("qemu-io").args(["-f", "qcow2", "-c", &write]).arg(&image).succeeds();
    };
    fill("7");
    tool("qemu-img").args(["snapshot", "-c", "before"]).arg(&image).succeeds();
    fill("8");
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
    let refused = refusal(&["serve", &name]);
    assert!(refused.contains("its internal snapshot 'before' is only read"), "{refused}");
    let refused = refusal(&["info", &format!("{}@after", text(&image))]);
    assert!(refused.contains("it has no internal snapshot 'after'"), "{refused}");
    let server = Server::start(Path::new(&name), &["--read-only"]);
    let served = scratch.join("served.img");
    tool("nbdcopy").arg(server.uri()).arg(&served).succeeds();
    assert!(fs::read(&served).expect("the copy") == expected);
}
