//! Replications that go on after the end of their server, by bits that are stored.
//!
//! Invariant: a target whose round is complete has all bytes of the disk; how many were copied for that is counted by the server.

use std::path::Path;

use nowait_testkit::nbd::Command;
use nowait_testkit::{Finished, wait_until};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{MIB, Server};
use crate::replications::{Pair, replicate};
use crate::upgrade::Upgraded;

/// Bytes of a region of stored bitmaps, all of which is dirty after a kill if something is.
const REGION: u64 = 16 * MIB;
const SIZE: u64 = 4 * REGION;

/// A pair whose disk has some data in each region, and these.
fn pair(format: &str) -> (Pair, Vec<u8>) {
    let it = Pair::of_size(format, SIZE);
    let mut model = vec![0; SIZE as usize];
    for (at, number) in (0..SIZE).step_by(REGION as usize).zip(1..) {
        write(&it, &mut model, at, &vec![number; MIB as usize]);
    }
    (it, model)
}

/// Writes durably: a kill takes from an image what was not flushed.
fn write(it: &Pair, model: &mut [u8], at: u64, data: &[u8]) {
    let mut client = it.server.connect();
    client.write(at, data).expect("a write");
    client.call(&Command::Flush).expect("a flush");
    model[at as usize..][..data.len()].copy_from_slice(data);
}

fn resume(it: &Pair, more: &[&str]) {
    let arguments = [it.behind.uri(), "--every", "86400", "--resume"];
    it.replicate(&[&arguments[..], more].concat());
}

/// Waits until a round is complete, and checks the target. Returns what the server says.
fn completed(it: &Pair, model: &[u8]) -> Value {
    it.await_rounds(1);
    check_target(&it.control, &it.behind, model)
}

/// Checks that the target, `behind`, has `model`. Returns what the server with this control socket says.
fn check_target(control: &Path, behind: &Server, model: &[u8]) -> Value {
    let info = replicate(control, &[]);
    assert_eq!(info["consistent"], true, "{info}");
    let mut behind = behind.connect();
    for (at, part) in (0..).step_by(MIB as usize).zip(model.chunks(MIB as usize)) {
        assert!(behind.read(at, MIB as u32).expect("a read") == part, "{at}: {info}");
    }
    info
}

fn copied(info: &Value) -> u64 {
    info["copied_bytes"].as_u64().expect("a number")
}

/// Begins a round that takes long, and kills the server in the middle of it.
fn kill_in_a_round(it: &mut Pair, format: &str) {
    resume(it, &["--rate", "64K"]);
    wait_until("some is copied", || copied(&it.replicate(&[])) > 0);
    let info = it.replicate(&[]);
    assert_eq!((&info["rounds"], &info["consistent"]), (&0.into(), &false.into()), "{info}");
    kill(it, format);
}

fn kill(it: &mut Pair, format: &str) {
    it.server.signal(Signal::KILL);
    it.server.wait();
    std::fs::remove_file(it.scratch.join("control")).expect("its control socket");
    it.server = Pair::server(format, it.scratch.path(), &it.behind);
}

#[test]
fn after_a_kill_a_target_gets_what_it_lacks_and_all_of_it_if_no_round_was_complete() {
    for format in ["raw", "qcow2"] {
        let (mut it, mut model) = pair(format);
        kill_in_a_round(&mut it, format);
        resume(&it, &[]);
        let info = completed(&it, &model);
        assert!(copied(&info) >= 4 * MIB, "{info}");
        // Between two rounds.
        write(&it, &mut model, 2 * REGION + 5 * MIB, &[77; 4096]);
        kill(&mut it, format);
        resume(&it, &[]);
        let info = completed(&it, &model);
        assert!((4096..=REGION).contains(&copied(&info)), "{format}: {info}");
        it.replicate(&["--stop"]);
        // In a round.
        write(&it, &mut model, REGION + MIB / 2, &vec![78; 2 * MIB as usize]);
        kill_in_a_round(&mut it, format);
        write(&it, &mut model, 3 * REGION, &[79; 4096]);
        resume(&it, &[]);
        let info = completed(&it, &model);
        assert!((2 * MIB..=2 * REGION).contains(&copied(&info)), "{format}: {info}");
        // An end in order leaves the exact bits.
        write(&it, &mut model, 0, &[80; 4096]);
        it.server.stop();
        it.server = Pair::server(format, it.scratch.path(), &it.behind);
        resume(&it, &[]);
        let info = completed(&it, &model);
        assert_eq!(copied(&info), 64 << 10, "{format}: {info}");
        it.server.stop();
        it.behind.stop();
    }
}

#[test]
fn a_program_that_takes_over_copies_what_was_changed_since_the_last_round() {
    for format in ["raw", "qcow2"] {
        let (it, mut model) = pair(format);
        resume(&it, &[]);
        completed(&it, &model);
        write(&it, &mut model, REGION, &[81; 4096]);
        let Pair { server, control, behind, scratch } = it;
        let mut upgraded = Upgraded::of(server, &control, scratch);
        upgraded.upgrade();
        wait_until("a round is complete", || replicate(&control, &[])["rounds"] != 0);
        let info = check_target(&control, &behind, &model);
        assert_eq!(copied(&info), 64 << 10, "{format}: {info}");
        upgraded.stop();
        behind.stop();
    }
}

#[test]
fn a_disk_of_another_size_is_copied_whole_and_has_another_bitmap() {
    let (mut it, mut model) = pair("qcow2");
    resume(&it, &[]);
    completed(&it, &model);
    it.replicate(&["--stop"]);
    let larger = SIZE + REGION;
    it.export(&["resize", "@0", &larger.to_string()]).succeeds();
    it.behind.stop();
    let replica = std::fs::File::options().write(true).open(it.scratch.join("replica"));
    replica.and_then(|file| file.set_len(larger)).expect("a larger file");
    it.behind = Pair::behind(it.scratch.path());
    resume(&it, &[]);
    model.resize(larger as usize, 0);
    let info = completed(&it, &model);
    assert!(copied(&info) >= 4 * MIB, "{info}");
    let listed = it.export(&["bitmap", "list", "@0", "--json"]).succeeds();
    let all: Value = serde_json::from_str(&listed).expect("JSON");
    let names: Vec<_> = all.as_array().into_iter().flatten().map(|it| &it["name"]).collect();
    let begin = format!("nowait-replica:{larger}:");
    assert!(matches!(names[..], [Value::String(name)] if name.starts_with(&begin)), "{names:?}");
    it.server.stop();
    it.behind.stop();
}

#[test]
fn a_target_that_is_another_one_or_was_changed_gets_all_of_the_disk() {
    let (mut it, model) = pair("qcow2");
    resume(&it, &[]);
    completed(&it, &model);
    it.replicate(&["--stop"]);
    it.behind.stop();
    let replica = it.scratch.join("replica");
    std::fs::remove_file(&replica).expect("a file");
    it.scratch.sparse("replica", SIZE);
    it.behind = Pair::behind(it.scratch.path());
    resume(&it, &[]);
    let info = completed(&it, &model);
    assert_eq!(info["failures"], 1, "it was noticed: {info}");
    assert!(copied(&info) >= 4 * MIB, "{info}");
    // A larger one.
    it.replicate(&["--stop"]);
    it.behind.stop();
    std::fs::remove_file(&replica).expect("a file");
    it.scratch.sparse("replica", 2 * SIZE);
    it.behind = Pair::behind(it.scratch.path());
    let refused = it.export(&["replicate", "@0", it.behind.uri(), "--resume"]).fails();
    assert!(refused.contains("a disk is replicated to one of its size"), "{refused}");
    it.server.stop();
    it.behind.stop();
}

#[test]
fn the_bitmap_of_a_replication_is_changed_by_nothing_else() {
    let (it, model) = pair("raw");
    resume(&it, &[]);
    completed(&it, &model);
    let all: Value =
        serde_json::from_str(&it.export(&["bitmap", "list", "@0", "--json"]).succeeds())
            .expect("JSON");
    let bitmap = &all[0];
    let name = bitmap["name"].as_str().expect("a name").to_owned();
    assert!(name.starts_with("nowait-replica:67108864:nbd+unix:"), "{all}");
    assert_eq!((&bitmap["persistent"], &bitmap["dirty_bytes"]), (&true.into(), &0.into()));
    let refused: [&[&str]; 5] = [
        &["bitmap", "add", "@0", "nowait-replica:1:nbd://h/"],
        &["bitmap", "clear", "@0", &name],
        &["bitmap", "disable", "@0", &name],
        &["backup", "start", "@0", "--bitmap", &name],
        &["bitmap", "remove", "@0", &name],
    ];
    for arguments in refused {
        let said = it.export(arguments).fails();
        assert!(said.contains("replica"), "{arguments:?}: {said}");
    }
    it.replicate(&["--stop"]);
    it.export(&["bitmap", "remove", "@0", &name]).succeeds();
    it.server.stop();
    it.behind.stop();
}
