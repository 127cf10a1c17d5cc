//! Disks that move to qcow2 images: their stored bitmaps, and their sizes.
//!
//! Invariant: a stored bitmap goes on being stored, with the bits that it has at the exchange.

use std::path::Path;

use nowait_testkit::{Finished, tool};
use serde_json::Value;

use crate::common::{MIB, NOWAIT, Server, accepted, text};
use crate::moves::{LONG_PAUSE, Served, contents, filled};

#[test]
fn stored_bitmaps_are_in_the_new_qcow2_image_with_the_bits_of_the_exchange() {
    for from in ["raw", "qcow2"] {
        let it = Served::start(from, &[]);
        assert_eq!(it.export(&["bitmap", "add", "@0", "monday"]).succeeds(), "");
        assert_eq!(it.export(&["bitmap", "add", "@0", "passing", "--temporary"]).succeeds(), "");
        let mut model = filled(&it);
        let listed = |control: &Path| -> Vec<(Value, bool, Value)> {
            let mut command = tool(NOWAIT);
            command.args(["export", "bitmap", "list", "@0", "--json", "--control"]).arg(control);
            let all: Vec<Value> = serde_json::from_str(&command.succeeds()).expect("JSON");
            let each = |it: Value| {
                let is_stored = it["persistent"] == true;
                (it["name"].clone(), is_stored, it["dirty_bytes"].clone())
            };
            all.into_iter().map(each).collect()
        };
        let file = it.scratch.join("moved.qcow2");
        let before = listed(&it.control);
        let stored: Vec<_> = before.iter().map(|(_, is_stored, _)| *is_stored).collect();
        assert_eq!(stored, [true, false], "{from}: {before:?}");
        let info = it.move_to(text(&file), &[]);
        assert!(info.get("notes").is_none(), "{info}");
        assert_eq!(listed(&it.control), before, "{from}: copying changes nothing");
        it.server.connect().write(0, &[6; 512]).expect("a write");
        model[..512].fill(6);
        let served = listed(&it.control);
        assert_eq!(served[0].2, before[0].2.as_u64().expect("a number") + 64 * 1024, "{from}");
        it.server.stop();
        accepted(&["check", text(&file)]);
        let address = format!("unix:{}", it.control.display());
        let again = Server::start(&file, &["--control", &address]);
        assert_eq!(listed(&it.control), served[..1], "{from}");
        again.stop();
        assert!(contents(&it.scratch, &file, "qcow2") == model);
    }
}

#[test]
fn a_disk_of_no_whole_sectors_moves_to_a_raw_file_and_not_to_qcow2() {
    let it = Served::start("raw", &[]);
    let odd = it.scratch.random("odd", 3 * MIB + 100, 5);
    it.export(&["add", "odd", text(&odd), "--format", "raw"]).succeeds();
    let content = std::fs::read(&odd).expect("a file");
    let names = it.files();
    let said = it.export(&["move", "odd", text(&it.scratch.join("new.qcow2"))]).fails();
    assert!(said.contains("3145828 bytes, and a qcow2 image whole sectors of 512"), "{said}");
    assert_eq!(it.files(), names);
    let new = it.scratch.join("new");
    it.export(&[&["move", "odd", text(&new)], &LONG_PAUSE[..]].concat()).succeeds();
    it.server.stop();
    assert!(std::fs::read(&new).expect("the new place") == content);
}
