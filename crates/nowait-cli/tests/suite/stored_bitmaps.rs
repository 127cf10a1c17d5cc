//! Dirty bitmaps that are stored, in a qcow2 image and beside a raw file: through ends of the server, crashes, and writes of QEMU.
//!
//! Invariant: what QEMU and the server tell of a bitmap is compared with what the test has written.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use nowait_testkit::{SetOnDrop, ends_with_program, tool, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::common::disk_with_bitmaps::{REGION, SIZE, Stored, USUAL, dirty, has_qemu, info, lost};
use crate::common::{Finished, MIB, NOWAIT, accepted, refusal, text};
use crate::upgrade::runs;

/// Where a header has its autoclear bits.
const AUTOCLEAR_AT: u64 = 88;
/// Regions that are written to during an upgrade.
const LOADED: [u64; 5] = [2, 7, 3, 9, 11];

#[test]
fn a_bitmap_is_there_again_at_the_next_start_with_what_was_noted() {
    for it in Stored::of_each_kind() {
        let server = it.serve(&[]);
        it.change(&["add", "", "a"]);
        it.change(&["add", "", "off", "--disabled"]);
        it.change(&["add", "", "gone", "--temporary"]);
        server.connect().write(MIB, &[1; 512]).expect("a write");
        let temporary = json!({"name": "gone", "granularity_bytes": USUAL, "enabled": true,
        "dirty_bytes": USUAL});
        assert_eq!(it.listed(), json!([info("a", true, 1), info("off", false, 0), temporary]));
        server.stop();
        let server = it.serve(&["--bitmap", "a"]);
        assert_eq!(it.listed(), json!([info("a", true, 1), info("off", false, 0)]));
        server.connect().write(100 * MIB, &[1; 512]).expect("a write");
        assert_eq!(dirty(&server.socket(), "a"), [16, 1600]);
        it.change(&["merge", "", "off", "a"]);
        it.change(&["clear", "", "a"]);
        it.change(&["disable", "", "a"]);
        it.change(&["enable", "", "off"]);
        server.connect().write(200 * MIB, &[1; 512]).expect("a write");
        server.stop();
        it.checks();
        let server = it.serve(&["--read-only"]);
        assert_eq!(dirty(&server.socket(), "off"), [16, 1600, 3200]);
        assert!(dirty(&server.socket(), "a").is_empty());
        assert!(it.command(&["add", "", "b", "--temporary"]).succeeds().is_empty());
        server.stop();
        let server = it.serve(&[]);
        assert_eq!(it.listed(), json!([info("a", false, 0), info("off", true, 3)]));
        it.change(&["remove", "", "a"]);
        it.change(&["remove", "", "off"]);
        server.stop();
        let server = it.serve(&[]);
        assert_eq!(it.listed(), json!([]));
        server.stop();
        it.checks();
    }
}

#[test]
fn a_kill_leaves_each_change_and_whole_regions_beside_them() {
    for it in Stored::of_each_kind() {
        let server = it.serve(&[]);
        it.change(&["add", "", "a"]);
        let mut client = server.connect();
        client.write(MIB, &[1; 512]).expect("a write");
        it.change(&["disable", "", "a"]);
        client.write(200 * MIB, &[1; 512]).expect("a write that is not noted");
        it.change(&["enable", "", "a"]);
        client.write(5 * REGION, &[1; 512]).expect("a write");
        it.kill(server);
        let server = it.serve(&[]);
        let region = REGION / USUAL;
        let expected: Vec<u64> = std::iter::once(16).chain(5 * region..6 * region).collect();
        assert_eq!(dirty(&server.socket(), "a"), expected);
        server.stop();
        it.checks();
        // The end in order has nothing more.
        let server = it.serve(&[]);
        assert_eq!(dirty(&server.socket(), "a"), expected);
        server.stop();
    }
}

#[test]
fn a_kill_after_an_upgrade_leaves_each_change_of_before_during_and_after_it() {
    for it in Stored::of_each_kind() {
        let mut server = it.serve(&[]);
        it.change(&["add", "", "a"]);
        let mut client = server.connect();
        client.write(MIB, &[1; 512]).expect("a write");
        let (mut loaded, over) = (server.connect(), &AtomicBool::new(false));
        let (process, written) = std::thread::scope(|scope| {
            // A region after another, so that each process opens some, and some are opened during the exchange.
            let load = scope.spawn(move || {
                let mut written = 0;
                while !over.load(Ordering::Relaxed) {
                    let at = LOADED[written as usize % LOADED.len()] * REGION + written * USUAL;
                    loaded.write(at % SIZE, &[2; 512]).expect("a write");
                    written += 1;
                }
                written
            });
            let loading = SetOnDrop(over);
            let mut upgrade = tool(NOWAIT);
            let report = upgrade.args(["upgrade", "--json", "--control"]).arg(&it.control);
            let report: Value = serde_json::from_str(&report.succeeds()).expect("JSON");
            let process = report["pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32));
            let process = process.expect("a process");
            ends_with_program(process);
            drop(loading);
            (process, load.join().expect("no error"))
        });
        client.write(5 * REGION + MIB, &[3; 512]).expect("a write");
        assert!(server.wait().success(), "{}", server.log());
        kill_process(process, Signal::KILL).expect("a server");
        wait_until("its end", || !runs(process));
        for socket in [server.socket(), it.control.clone()] {
            std::fs::remove_file(socket).expect("a socket");
        }
        let server = it.serve(&[]);
        let noted: BTreeSet<_> = dirty(&server.socket(), "a").into_iter().collect();
        let loaded = (0..written)
            .map(|n| (LOADED[n as usize % LOADED.len()] * REGION + n * USUAL) % SIZE / USUAL);
        let others = [MIB / USUAL, (5 * REGION + MIB) / USUAL];
        for granule in loaded.chain(others) {
            assert!(noted.contains(&granule), "{granule} of {written}");
        }
        server.stop();
    }
}

/// The image of a server that was killed after a write, with bitmap `a`.
fn killed() -> Stored {
    let it = Stored::new(&[]);
    let server = it.serve(&[]);
    it.change(&["add", "", "a"]);
    server.connect().write(MIB, &[1; 512]).expect("a write");
    it.kill(server);
    it
}

#[test]
fn after_a_kill_and_a_write_of_qemu_a_bitmap_is_inconsistent_and_can_be_removed() {
    nowait_testkit::needs!(has_qemu());
    let it = killed();
    assert_eq!(it.flags(), [("a".to_owned(), json!(["in-use", "auto"]))]);
    it.qemu_checks();
    it.qemu_writes("write 3M 64k");
    let server = it.serve(&[]);
    assert!(server.log().contains("bitmap \"a\" is not served"), "{}", server.log());
    assert_eq!(it.listed(), json!([lost("a")]));
    for action in ["clear", "enable"] {
        assert!(it.command(&[action, "", "a"]).fails().contains("can only be removed"));
    }
    assert!(it.command(&["add", "", "a"]).fails().contains("there is a bitmap of that name"));
    it.change(&["remove", "", "a"]);
    assert_eq!(it.listed(), json!([]));
    server.stop();
    it.qemu_checks();
    assert_eq!(it.flags(), []);
}

#[test]
fn bitmaps_are_not_used_where_a_program_that_does_not_know_them_has_written() {
    let it = killed();
    let file = File::options().read(true).write(true).open(&it.image).expect("the image");
    file.write_all_at(&[0; 8], AUTOCLEAR_AT).expect("what such a program does");
    let server = it.serve(&[]);
    let why = "its dirty bitmaps are not used: another program has written to it without them";
    assert!(server.log().contains(why), "{}", server.log());
    assert_eq!(it.listed(), json!([]));
    it.change(&["add", "", "a"]);
    server.connect().write(MIB, &[1; 512]).expect("a write");
    server.stop();
    let server = it.serve(&[]);
    assert!(!server.log().contains("another program"), "{}", server.log());
    assert_eq!(it.listed(), json!([info("a", true, 1)]));
    server.stop();
}

#[test]
fn qemu_reads_our_bitmaps_and_we_read_those_of_qemu() {
    nowait_testkit::needs!(has_qemu());
    let it = Stored::new(&[]);
    let server = it.serve(&[]);
    it.change(&["add", "", "ours"]);
    server.connect().write(10 * MIB, &[1; 512]).expect("a write");
    server.stop();
    it.qemu_checks();
    assert_eq!(it.flags(), [("ours".to_owned(), json!(["auto"]))]);
    assert_eq!(it.dirty_in_qemu("ours"), [160]);
    it.qemu_writes("write 20M 64k");
    it.qemu_bitmap(&["--add", "@", "theirs"]);
    it.qemu_writes("write 30M 64k");
    let server = it.serve(&[]);
    assert_eq!(dirty(&server.socket(), "ours"), [160, 320, 480]);
    assert_eq!(dirty(&server.socket(), "theirs"), [480]);
    server.connect().write(40 * MIB, &[1; 512]).expect("a write");
    server.stop();
    it.qemu_checks();
    it.qemu_bitmap(&["--merge", "theirs", "@", "ours"]);
    assert_eq!(it.dirty_in_qemu("ours"), [160, 320, 480, 640]);
    assert_eq!(it.dirty_in_qemu("theirs"), [480, 640]);
    it.qemu_bitmap(&["--clear", "@", "ours"]);
    it.qemu_bitmap(&["--remove", "@", "theirs"]);
    let server = it.serve(&[]);
    assert_eq!(it.listed(), json!([info("ours", true, 0)]));
    server.stop();
    it.qemu_checks();
}

#[test]
fn bitmaps_go_along_with_other_sizes_and_stay_below_a_snapshot() {
    nowait_testkit::needs!(has_qemu());
    let it = Stored::new(&[]);
    let server = it.serve(&[]);
    it.change(&["add", "", "a"]);
    server.connect().write(10 * MIB, &[1; 512]).expect("a write");
    let overlay = it.scratch.join("overlay.qcow2");
    let mut snapshot = tool(NOWAIT);
    snapshot.args(["export", "snapshot", "", text(&overlay), "--control"]).arg(&it.control);
    snapshot.succeeds();
    server.connect().write(20 * MIB, &[1; 512]).expect("a write");
    assert_eq!(dirty(&server.socket(), "a"), [160, 320]);
    server.stop();
    assert_eq!(it.dirty_in_qemu("a"), [160]);
    it.qemu_checks();
    let above = Stored { image: overlay.clone(), stored: overlay.clone(), ..it };
    assert_eq!(above.dirty_in_qemu("a"), [160, 320]);
    above.qemu_checks();
    let refused = refusal(&["commit", text(&overlay)]);
    assert!(refused.error.contains("it has dirty bitmaps"), "{}", refused.error);
    // Larger and smaller again, and larger, without a server.
    for (size, granules) in [("1G", &[160, 320][..]), ("15M", &[160]), ("256M", &[160])] {
        accepted(&["resize", text(&overlay), size, "--shrink"]);
        above.qemu_checks();
        if size != "15M" {
            let found = above.dirty_in_qemu("a");
            assert_eq!(found, granules, "{size}");
        }
    }
    let server = above.serve(&[]);
    assert_eq!(dirty(&server.socket(), "a"), [160]);
    server.stop();
    above.qemu_checks();
}

#[test]
fn bitmaps_that_qemu_has_are_kept_with_a_backing_file_and_with_clusters_of_any_size() {
    nowait_testkit::needs!(has_qemu());
    for options in ["cluster_size=512", "cluster_size=2M", "extended_l2=on,cluster_size=64k"] {
        let it = Stored::new(&[]);
        let base = it.scratch.join("base.qcow2");
        std::fs::rename(&it.image, &base).expect("a file to rename");
        let create =
            ["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "qcow2", "-o", options];
        tool("qemu-img").args(create).arg(&it.image).succeeds();
        let server = it.serve(&[]);
        it.change(&["add", "", "a"]);
        server.connect().write(10 * MIB, &[1; 512]).expect("a write");
        it.change(&["add", "", "b"]);
        server.connect().write(255 * MIB, &[1; 512]).expect("a write");
        server.stop();
        it.qemu_checks();
        assert_eq!(it.dirty_in_qemu("a"), [160, 4080], "{options}");
        assert_eq!(it.dirty_in_qemu("b"), [4080], "{options}");
        let backing = tool("qemu-img").args(["info", text(&it.image)]).succeeds();
        assert!(backing.contains(text(&base)), "{backing}");
    }
}

#[test]
fn what_cannot_be_stored_is_refused_in_one_line() {
    nowait_testkit::needs!(has_qemu());
    let it = Stored::new(&[]);
    for number in 0..33 {
        it.qemu_bitmap(&["--add", "@", &number.to_string()]);
    }
    let refused = refusal(&["serve", text(&it.image)]);
    assert!(refused.error.contains("more than 32 bitmaps"), "{}", refused.error);
    it.qemu_bitmap(&["--remove", "@", "0"]);
    let server = it.serve(&[]);
    assert_eq!(it.listed().as_array().map(Vec::len), Some(32));
    assert!(it.command(&["add", "", "one more"]).fails().contains("at most 32 bitmaps"));
    server.stop();
    it.qemu_checks();
}

#[test]
fn a_bitmap_that_a_backup_has_frozen_is_stored_with_what_comes_after() {
    let region = REGION / USUAL;
    let both: Vec<u64> = (0..region).chain(5 * region..6 * region).collect();
    for (end, is_killed, expected) in [
        (None, true, both),
        (None, false, vec![16, 5 * region]),
        (Some("abort"), false, vec![16, 5 * region]),
        (Some("commit"), true, vec![5 * region]),
        (Some("commit"), false, vec![5 * region]),
    ] {
        for it in Stored::of_each_kind() {
            let server = it.serve(&[]);
            it.change(&["add", "", "a"]);
            let mut client = server.connect();
            client.write(MIB, &[1; 512]).expect("a write");
            it.backup(&["start", "", "--bitmap", "a"]);
            client.write(5 * REGION, &[1; 512]).expect("a write");
            let refused = it.command(&["remove", "", "a"]).fails();
            assert!(refused.contains("backup"), "{refused}");
            if let Some(end) = end {
                it.backup(&[end, ""]);
            }
            drop(client);
            match is_killed {
                true => it.kill(server),
                false => server.stop(),
            }
            let server = it.serve(&[]);
            assert_eq!(dirty(&server.socket(), "a"), expected, "{end:?}, killed: {is_killed}");
            server.stop();
            it.checks();
        }
    }
}
