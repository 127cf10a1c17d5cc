//! Backups of a running server: begun and ended by commands and by HTTP, read by other programs.
//!
//! Invariant: what a backup reads is compared with a copy of the disk that was taken at its instant.

use nowait_testkit::nbd::{Client, Command, Mode, StatusClient};
use nowait_testkit::{Finished, Random, require_tool, seed, tool};
use serde_json::{Value, json};

use crate::common::{KIB, MIB, NOWAIT, Scratch, Server, text};
use crate::control::Controlled;
use crate::upgrade::Upgraded;

/// Bytes of a block, the least that is copied.
const BLOCK: u64 = 64 * KIB;

/// Runs `nowait export backup ACTION …`.
fn backup(it: &Controlled, arguments: &[&str]) -> String {
    it.nowait(&[&["export", "backup"], arguments].concat()).succeeds()
}

/// Runs `nowait export backup ACTION …`, which is refused; returns the line that says why.
fn refused(it: &Controlled, arguments: &[&str]) -> String {
    it.nowait(&[&["export", "backup"], arguments].concat()).fails()
}

/// The backups as JSON, by the numbers of their exports.
fn listed(it: &Controlled) -> Vec<Value> {
    let text = it.nowait(&["export", "backup", "list", "--json"]).succeeds();
    let exports: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    exports.into_iter().map(|export| export["backup"].clone()).collect()
}

fn all_of(client: &mut Client) -> Vec<u8> {
    client.read(0, client.size as u32).expect("all bytes")
}

/// Changes all of a disk at random.
fn change(client: &mut Client, random: &mut Random, count: u64) {
    for _ in 0..count {
        let offset = random.below(client.size - BLOCK);
        let len = random.below(2 * BLOCK).min(client.size - offset) as u32;
        let change = match random.below(4) {
            0 => Command::Trim { offset, len },
            1 => Command::Zero { offset, len, keep: false },
            _ => Command::Write { offset, data: random.bytes(len as usize), fua: false },
        };
        client.call(&change).expect("a change");
    }
}

/// A server of a raw disk without a name and a qcow2 disk called `two`, both with data.
fn two_disks(random: &mut Random) -> (Controlled, Client, Client) {
    let it = Controlled::start();
    let image = it.image("two.qcow2", "8M");
    it.nowait(&["export", "add", "two", &image]).succeeds();
    let mut first = it.server.connect();
    let mut second =
        Client::connect_to(&it.server.socket(), "two", Mode::Structured).expect("a client");
    change(&mut first, random, 30);
    change(&mut second, random, 30);
    (it, first, second)
}

#[test]
fn two_disks_are_read_as_they_were_at_one_instant_and_a_bitmap_is_frozen() {
    let mut random = Random::from_seed(seed());
    let (it, mut first, mut second) = two_disks(&mut random);
    for export in ["", "two"] {
        it.nowait(&["export", "bitmap", "add", export, "b"]).succeeds();
    }
    first.write(MIB, &[1; 512]).expect("a write");
    second.write(2 * MIB, &[1; 512]).expect("a write");
    let was = [all_of(&mut first), all_of(&mut second)];
    assert_eq!(backup(&it, &["start", "", "two", "--bitmap", "b"]), "backup\ntwo.backup\n");
    change(&mut first, &mut random, 60);
    change(&mut second, &mut random, 60);
    let socket = it.server.socket();
    for (name, was, dirty) in [("backup", &was[0], 16), ("two.backup", &was[1], 32)] {
        let mut client = Client::connect_to(&socket, name, Mode::Structured).expect("a client");
        assert!(all_of(&mut client) == *was, "{name}");
        let query = ["qemu:dirty-bitmap:b"];
        let mut client = StatusClient::connect(&socket, name, Mode::Extended, &query);
        let bits = client.dirty("b", 8 * MIB, BLOCK, 0);
        assert_eq!((0..bits.len()).filter(|at| bits[*at]).collect::<Vec<_>>(), [dirty]);
    }
    let all = listed(&it);
    assert_eq!((&all[0]["name"], &all[1]["name"]), (&json!("backup"), &json!("two.backup")));
    assert!(all[0]["copied_bytes"].as_u64() > Some(0) && all[0]["failure"].is_null());
    let table = backup(&it, &["list"]);
    let states = table.lines().map(|line| line.split_whitespace().last().expect("a state"));
    assert_eq!(states.collect::<Vec<_>>(), ["state", "running", "running"]);
    assert!(refused(&it, &["start", "two"]).contains("it has a backup already"));
    assert!(refused(&it, &["start", "backup"]).contains("it is a backup"));
    it.nowait(&["export", "bitmap", "clear", "two", "b"]).fails();
    assert_eq!(backup(&it, &["commit", ""]), "");
    assert_eq!(backup(&it, &["abort", "two"]), "");
    assert!(listed(&it).is_empty());
    assert!(refused(&it, &["commit", "two"]).contains("it has no backup"));
    for (export, was_dirty) in [("", 16), ("two", 32)] {
        let query = ["qemu:dirty-bitmap:b"];
        let mut client = StatusClient::connect(&socket, export, Mode::Extended, &query);
        let bits = client.dirty("b", 8 * MIB, BLOCK, 0);
        assert!(bits.iter().filter(|is_dirty| **is_dirty).count() > 5);
        // All of the disk may have been changed; then this says nothing.
        assert!(bits[was_dirty] || export.is_empty());
    }
    it.server.stop();
}

#[test]
fn other_programs_read_a_backup_while_its_disk_is_written() {
    let tools = ["qemu-img", "nbdcopy", "nbdinfo"];
    nowait_testkit::needs!(tools.into_iter().all(require_tool));
    let mut random = Random::from_seed(seed());
    let (it, mut first, mut second) = two_disks(&mut random);
    let was = [all_of(&mut first), all_of(&mut second)];
    backup(&it, &["start", "", "two"]);
    change(&mut first, &mut random, 20);
    change(&mut second, &mut random, 20);
    let socket = it.server.socket();
    for (n, name) in ["backup", "two.backup"].into_iter().enumerate() {
        let uri = format!("nbd+unix:///{name}?socket={}", socket.display());
        let (copy, converted) = (it.scratch.join("copy"), it.scratch.join("converted"));
        tool("nbdcopy").args([&uri, text(&copy)]).succeeds();
        assert!(std::fs::read(&copy).expect("the copy") == was[n], "{name}");
        let convert = ["convert", "-f", "raw", "-O", "raw", &uri, text(&converted)];
        tool("qemu-img").args(convert).succeeds();
        assert!(std::fs::read(&converted).expect("the copy") == was[n], "{name}");
        let info = tool("nbdinfo").arg(&uri).succeeds();
        assert!(info.contains("is_read_only: true") && info.contains("can_trim: false"), "{info}");
        std::fs::remove_file(copy).expect("the copy");
    }
    backup(&it, &["commit", "", "two"]);
    backup(&it, &["start", "", "--discard"]);
    let uri = format!("nbd+unix:///backup?socket={}", socket.display());
    let info = tool("nbdinfo").arg(&uri).succeeds();
    assert!(info.contains("is_read_only: false") && info.contains("can_trim: true"), "{info}");
    assert!(info.contains("can_zero: false") && info.contains("can_fast_zero: false"), "{info}");
    let info =
        tool("nbdinfo").arg(format!("nbd+unix:///two?socket={}", socket.display())).succeeds();
    assert!(info.contains("can_zero: true") && info.contains("can_fast_zero: true"), "{info}");
    it.server.stop();
}

#[test]
fn backups_are_begun_and_ended_by_http_and_what_cannot_be_is_refused_in_one_line() {
    let mut random = Random::from_seed(seed());
    let (it, mut first, _second) = two_disks(&mut random);
    let path = "/v1/exports/@0/backup";
    it.refusal("GET", path, None, 404);
    first.write(0, &vec![2; 4 * BLOCK as usize]).expect("a write");
    let scratch = it.scratch.join("images").join("old");
    let start = json!({"name": "x", "scratch": text(&scratch), "max_scratch_bytes": 2 * BLOCK});
    let begun = it.json("POST", path, Some(start.clone()), 201);
    assert!(!scratch.exists(), "it has no name");
    assert_eq!(begun[0], it.json("GET", path, None, 200));
    assert_eq!((&begun[0]["name"], &begun[0]["size_bytes"]), (&json!("x"), &json!(8 * MIB)));
    first.write(0, &vec![1; 4 * BLOCK as usize]).expect("a write, although scratch is full");
    let failed = it.json("GET", path, None, 200);
    assert_eq!(failed["failure"], "its scratch is full, 131072 bytes");
    assert!(it.server.log().contains("backup \"x\" has failed: its scratch is full"));
    let metrics = it.ask("GET", "/metrics", None).1;
    assert!(metrics.contains("nowait_backup_failed{export=\"\"} 1\n"), "{metrics}");
    let why = it.refusal("POST", &format!("{path}/commit"), None, 409);
    assert!(why.contains("abort it"), "{why}");
    let two = "/v1/exports/two";
    let overlay = text(&it.scratch.join("images").join("overlay")).to_owned();
    it.json("POST", &format!("{two}/backup"), None, 201);
    let both = Some(json!({"with": ["two"]}));
    for (method, path, body, status) in [
        ("POST", path.to_owned(), Some(start), 409),
        ("POST", path.to_owned(), Some(json!({"more": 1})), 400),
        ("POST", format!("{two}/backup"), None, 409),
        ("POST", "/v1/exports/none/backup".into(), None, 404),
        ("POST", "/v1/exports/two.backup/backup".into(), None, 409),
        ("POST", format!("{two}/snapshot"), Some(json!({"overlay": overlay})), 409),
        ("PATCH", two.to_owned(), Some(json!({"size_bytes": 16 * MIB})), 409),
        ("PATCH", "/v1/exports/@0".into(), Some(json!({"size_bytes": 16 * MIB})), 409),
        ("DELETE", format!("{two}?mode=hard"), None, 409),
        ("DELETE", "/v1/exports/two.backup?mode=hard".into(), None, 409),
        ("POST", "/v1/upgrade".into(), None, 409),
        ("POST", format!("{path}/commit"), both.clone(), 409),
    ] {
        it.refusal(method, &path, body, status);
    }
    assert!(!std::path::Path::new(&overlay).exists());
    it.json("POST", &format!("{path}/abort"), both, 204);
    for (body, status) in [
        (json!({"with": ["two"], "name": "y"}), 400),
        (json!({"with": ["none"]}), 404),
        (json!({"with": ["@0"]}), 409),
        (json!({"bitmap": "none"}), 404),
        (json!({"only_dirty": true}), 400),
        (json!({"max_scratch_bytes": BLOCK - 1}), 400),
        (json!({"name": "two"}), 409),
        (json!({"name": "x".repeat(4097)}), 400),
        (json!({"scratch": "/nowhere/x"}), 403),
        (json!({"scratch": "relative"}), 400),
        (json!({"scratch": text(&it.scratch.join("images").join("two.qcow2"))}), 409),
    ] {
        it.refusal("POST", path, Some(body), status);
    }
    it.refusal("GET", path, None, 404);
    it.json("DELETE", &format!("{two}?mode=hard"), None, 204);
    it.server.stop();
}

#[test]
fn a_server_with_a_backup_is_not_upgraded_and_one_without_is() {
    let directory = Scratch::new();
    let mut it = Upgraded::start("raw", &["--allow-dir", text(directory.path())]);
    let mut client = it.connect();
    client.write(0, &[1; 4096]).expect("a write");
    it.command(&["export", "backup", "start", "@0"]).succeeds();
    let why = it.command(&["upgrade"]).fails();
    assert!(why.contains("it has a backup, \"backup\": commit or abort that first"), "{why}");
    client.write(0, &[2; 4096]).expect("the server goes on");
    let mut backup = Client::connect_to(&it.socket(), "backup", Mode::Structured).expect("it, too");
    assert_eq!(backup.read(0, 4096), Ok(vec![1; 4096]));
    it.command(&["export", "backup", "abort", "@0"]).succeeds();
    it.upgrade();
    assert_eq!(client.read(0, 4096), Ok(vec![2; 4096]));
    it.stop();
}

#[test]
fn a_server_that_may_make_no_files_makes_no_backup() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let socket = scratch.join("control");
    let control = format!("unix:{}", socket.display());
    let server = Server::start(&image, &["--control", &control]);
    let start = ["export", "backup", "start", "@0", "--control", text(&socket)];
    let why = tool(NOWAIT).args(start).fails();
    assert!(why.contains("it was started without --allow-dir"), "{why}");
    server.stop();
}
