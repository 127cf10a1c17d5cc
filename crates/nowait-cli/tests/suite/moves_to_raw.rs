//! Raw disks with stored bitmaps that move to raw files.
//!
//! Invariant: a bitmap has at least the changes that were noted, whenever the server is killed.

use std::path::Path;

use nowait_testkit::{Finished, tool};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{KIB, MIB, NOWAIT, Server, text};
use crate::moves::{Served, filled};

/// The bitmaps of the only export: name, whether it is stored, and dirty bytes.
fn listed(control: &Path) -> Vec<(String, bool, u64)> {
    let mut command = tool(NOWAIT);
    command.args(["export", "bitmap", "list", "@0", "--json", "--control"]).arg(control);
    let all: Vec<Value> = serde_json::from_str(&command.succeeds()).expect("JSON");
    let each = |it: Value| {
        let name = it["name"].as_str().expect("a name").to_owned();
        (name, it["persistent"] == true, it["dirty_bytes"].as_u64().expect("a number"))
    };
    all.into_iter().map(each).collect()
}

/// Serves `image`, next to which the server may make files.
fn serve(image: &Path, control: &Path) -> Server {
    let address = format!("unix:{}", control.display());
    let directory = image.parent().expect("a directory");
    let options = ["--control", &address, "--format", "raw", "--allow-dir", text(directory)];
    Server::start(image, &options)
}

/// A raw disk of which 4 MiB are dirty in the stored bitmap `monday`.
fn noted() -> Served {
    let it = Served::start("raw", &[]);
    it.export(&["bitmap", "add", "@0", "monday"]).succeeds();
    filled(&it);
    assert_eq!(listed(&it.control), [("monday".to_owned(), true, 4 * MIB)]);
    it
}

#[test]
fn c92_stored_bitmaps_go_to_a_file_next_to_the_new_raw_file_and_outlive_a_kill() {
    let it = noted();
    let file = it.scratch.join("moved");
    let info = it.move_to(text(&file), &[]);
    assert!(info.get("notes").is_none(), "{info}");
    assert_eq!(listed(&it.control), [("monday".to_owned(), true, 4 * MIB)]);
    let names = ["disk", "disk.bitmaps.qcow2", "moved", "moved.bitmaps.qcow2"];
    assert_eq!(it.files(), names);
    it.server.connect().write(0, &[6; 512]).expect("a write");
    it.server.stop();
    let mut server = serve(&file, &it.control);
    assert!(!server.log().contains("without its dirty bitmaps"), "{}", server.log());
    let dirty = 4 * MIB + 64 * KIB;
    assert_eq!(listed(&it.control), [("monday".to_owned(), true, dirty)]);
    server.connect().write(12 * MIB, &[7; 512]).expect("a write");
    server.signal(Signal::KILL);
    server.wait();
    let server = serve(&file, &it.control);
    let found = listed(&it.control);
    assert!(found[0].2 >= dirty + 64 * KIB, "{found:?}");
    server.stop();
}

#[test]
fn c92_a_move_that_is_cancelled_or_killed_leaves_no_bitmap_that_is_too_clean_and_can_be_repeated() {
    let it = noted();
    let file = it.scratch.join("moved");
    let slow = ["--rate", "64K", "--max-pause", "10", "--detach"];
    let begin = |it: &Served| {
        it.export(&[&["move", "@0", text(&file)][..], &slow].concat()).succeeds();
    };
    begin(&it);
    it.export(&["move", "@0", "--cancel"]).succeeds();
    assert_eq!(it.files(), ["disk", "disk.bitmaps.qcow2"]);
    begin(&it);
    let Served { mut server, control, scratch } = it;
    server.signal(Signal::KILL);
    server.wait();
    let server = serve(&scratch.join("disk"), &control);
    let it = Served { server, control, scratch };
    let before = listed(&it.control);
    assert!(before[0].1 && before[0].2 >= 4 * MIB, "{before:?}");
    // The file with bitmaps that the killed server has left is taken.
    let info = it.move_to(text(&file), &[]);
    assert!(info.get("notes").is_none(), "{info}");
    assert_eq!(listed(&it.control), before);
    it.server.stop();
    let server = serve(&file, &it.control);
    assert_eq!(listed(&it.control), before);
    server.stop();
}
