//! `nowait backup` and `nowait restore`: points of disks in use, also when a command is killed or has no space.
//!
//! Invariant: what is restored is compared byte for byte with a copy that the test has kept.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nowait_testkit::{Random, ends_with_test, require_tool, seed, tool, wait_until};
use serde_json::Value;

use crate::common::{
    Finished, KIB, MIB, NOWAIT, Scratch, Server, accepted, refusal, refusal_under, text,
};
use crate::control::Controlled;
use crate::copy_increments::change;
use crate::copy_other_servers::Peer;
use crate::storage_faults::private_mounts;

/// Large enough to be killed midway.
const BYTES: u64 = 48 * MIB;

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&accepted(&[arguments, &["--json"]].concat())).expect("JSON")
}

/// The numbers of the points of a chain.
fn points(chain: &Path) -> Vec<u64> {
    let listed = json(&["backup", "list", text(chain)]);
    let points = listed["points"].as_array().expect("an array");
    assert!(points.iter().all(|point| point["damaged"].is_null()), "{listed}");
    points.iter().map(|point| point["point"].as_u64().expect("a number")).collect()
}

/// Compares the point `number` with `disk`, restored to a raw file and to a qcow2 image in turns.
fn assert_point(scratch: &Scratch, chain: &Path, number: u64, disk: &[u8]) {
    let from = format!("{}@{number}", text(chain));
    let (raw, qcow2) = (scratch.join("restored"), scratch.join("restored.qcow2"));
    if number.is_multiple_of(2) {
        accepted(&["restore", &from, text(&qcow2), "--verify", "--force"]);
        accepted(&["copy", text(&qcow2), text(&raw), "-O", "raw", "--force"]);
    } else {
        accepted(&["restore", &from, text(&raw), "-O", "raw", "--force"]);
    }
    assert!(fs::read(&raw).expect("the disk") == disk, "point {number}");
}

#[test]
fn each_point_of_a_disk_in_use_is_restored_as_it_was_also_after_a_prune() {
    let mut random = Random::from_seed(seed());
    let it = Controlled::start();
    let (uri, scratch) = (it.server.uri(), &it.scratch);
    let chain = scratch.join("chain");
    let mut client = it.server.connect();
    it.nowait(&["export", "bitmap", "add", "", "b", "--granularity", "64K"]).succeeds();
    let mut disks: Vec<(u64, Vec<u8>)> = Vec::new();
    for round in 1..=6 {
        change(&mut client, &mut random);
        let disk = fs::read(scratch.join("disk.img")).expect("the image");
        let by_bitmap = ["--bitmap", "b"];
        let made = match round % 3 {
            // The disk of an instant, while it is changed.
            0 => {
                let only = if round == 6 { &["--only-dirty"][..] } else { &[] };
                let start = ["export", "backup", "start", "", "--bitmap", "b"];
                it.nowait(&[&start[..], only].concat()).succeeds();
                change(&mut client, &mut random);
                let of_backup = uri.replace("///?", "///backup?");
                let made = json(&[&["backup", &of_backup, text(&chain)][..], &by_bitmap].concat());
                it.nowait(&["export", "backup", "commit", ""]).succeeds();
                made
            }
            1 => {
                let made = json(&[&["backup", uri, text(&chain)][..], &by_bitmap].concat());
                it.nowait(&["export", "bitmap", "clear", "", "b"]).succeeds();
                made
            }
            // All of it is read and compared; the bitmap goes on.
            _ => json(&["backup", uri, text(&chain)]),
        };
        assert_eq!(made["point"], round, "{made}");
        assert_eq!(made["parent"].is_null(), round == 1, "{made}");
        if round > 1 {
            assert!(made["data_bytes"].as_u64().expect("a number") < 5 * MIB, "{made}");
        }
        disks.push((round, disk));
    }
    let check = |disks: &[(u64, Vec<u8>)]| {
        assert_eq!(points(&chain), disks.iter().map(|(number, _)| *number).collect::<Vec<_>>());
        for (number, disk) in disks {
            assert_point(scratch, &chain, *number, disk);
        }
        assert_eq!(json(&["backup", "verify", text(&chain)])["sound"], true);
    };
    check(&disks);
    for keep in ["4", "1"] {
        let said = json(&["backup", "prune", text(&chain), "--keep", keep]);
        let kept = said["kept"].as_array().expect("an array").len();
        disks.drain(..disks.len() - kept);
        check(&disks);
    }
    // Nothing has changed.
    let last = scratch.join("restored");
    let made = json(&["backup", text(&last), text(&chain), "-f", "raw"]);
    assert_eq!((&made["stored_bytes"], &made["parent"]), (&0.into(), &6.into()), "{made}");
    // Into an export, and the last point is what is meant without a number.
    client.write(0, &[5; 4096]).expect("a write");
    accepted(&["restore", text(&chain), uri, "--verify"]);
    assert!(fs::read(scratch.join("disk.img")).expect("the image") == disks[0].1);
}

#[test]
fn a_bitmap_of_qemu_tells_what_has_changed_too() {
    nowait_testkit::needs!(
        ["qemu-img", "qemu-io", "qemu-nbd"].iter().all(|name| require_tool(name))
    );
    let scratch = Scratch::new();
    let (source, chain) = (scratch.join("source.qcow2"), scratch.join("chain"));
    tool("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&source).arg("8M").succeeds();
    let io = |what: &str| {
        tool("qemu-io").args(["-f", "qcow2", "-c", what]).arg(&source).succeeds();
    };
    io("write -P 1 1M 3M");
    tool("qemu-img").args(["bitmap", "--add"]).arg(&source).arg("b").succeeds();
    accepted(&["backup", text(&source), text(&chain)]);
    io("write -P 2 2M 100k");
    io("write -z 3M 100k");
    let arguments = ["-f", "qcow2", "--read-only", "--bitmap=b"];
    let peer = Peer::qemu_nbd(&scratch, &source, &arguments);
    let made = json(&["backup", &peer.uri(), text(&chain), "--bitmap", "b"]);
    drop(peer);
    assert_eq!((&made["parent"], &made["data_bytes"]), (&1.into(), &(192 * KIB).into()), "{made}");
    let flat = scratch.join("flat");
    accepted(&["copy", text(&source), text(&flat), "-O", "raw"]);
    assert_point(&scratch, &chain, 2, &fs::read(&flat).expect("the disk"));
}

fn start(arguments: &[&str]) -> Child {
    let command = &mut Command::new(NOWAIT);
    let silent = command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
    ends_with_test(silent).spawn().expect("nowait")
}

/// Kills `child` after a random part of the time `takes`.
fn kill_within(mut child: Child, takes: Duration, random: &mut Random) {
    thread::sleep(takes.mul_f64(random.below(1100) as f64 / 1000.0));
    child.kill().expect("a child");
    child.wait().expect("a child");
}

/// A chain of four points of `disk`, of which each changes a part, and the disks.
fn chain_of(scratch: &Scratch, random: &mut Random) -> (PathBuf, PathBuf, Vec<Vec<u8>>) {
    let disk = scratch.random("disk", BYTES / 4, 1);
    let (chain, mut disks) = (scratch.join("chain"), Vec::new());
    for _ in 0..4 {
        let file = fs::File::options().write(true).open(&disk).expect("the disk");
        for _ in 0..20 {
            let pos = random.below(BYTES / 4 - 300 * KIB);
            file.write_all_at(&random.bytes(200 << 10), pos).expect("room");
        }
        accepted(&["backup", text(&disk), text(&chain)]);
        disks.push(fs::read(&disk).expect("the disk"));
    }
    (disk, chain, disks)
}

#[test]
fn sigkill_of_a_backup_at_any_moment_leaves_the_points_before_and_the_next_one_is_whole() {
    let mut random = Random::from_seed(seed());
    let scratch = Scratch::new();
    let (disk, chain) = (scratch.random("disk", BYTES, 1), scratch.join("chain"));
    let begin = Instant::now();
    accepted(&["backup", text(&disk), text(&scratch.join("first"))]);
    let takes = begin.elapsed();
    let mut made = 0;
    for _ in 0..8 {
        kill_within(start(&["backup", text(&disk), text(&chain)]), takes, &mut random);
        // A first backup that is killed early has made no chain yet.
        if chain.join("nowait-backup.lock").exists() {
            made = points(&chain).len();
        }
        if made > 0 {
            assert_eq!(json(&["backup", "verify", text(&chain)])["sound"], true);
            break;
        }
    }
    accepted(&["backup", text(&disk), text(&chain)]);
    assert_point(&scratch, &chain, made as u64 + 1, &fs::read(&disk).expect("the disk"));
    // The lock, a manifest for each point, and a data file that the first one has.
    assert_eq!(fs::read_dir(&chain).expect("a directory").count(), made + 3);
}

#[test]
fn a_backup_goes_on_from_what_one_that_was_killed_has_stored() {
    let scratch = Scratch::new();
    // Two data files that are full, and one that is not.
    let disk = scratch.random("disk", 160 * MIB, 1);
    let chain = scratch.join("chain");
    let paths = || fs::read_dir(&chain).into_iter().flatten().flatten().map(|it| it.path());
    let is_index = |path: PathBuf| text(&path).contains("index-") && path.extension().is_none();
    let has_index = || paths().any(is_index);
    let server = Server::start(&disk, &["--limit-bandwidth", "32M"]);
    let mut killed = start(&["backup", server.uri(), text(&chain)]);
    wait_until("a data file to be complete", has_index);
    killed.kill().expect("a child");
    killed.wait().expect("a child");
    server.stop();
    assert!(points(&chain).is_empty());
    let made = json(&["backup", text(&disk), text(&chain)]);
    let number = |key: &str| made[key].as_u64().expect("a number");
    assert_eq!((number("point"), number("data_bytes")), (1, 160 * MIB), "{made}");
    assert!(number("resumed_bytes") > 60 * MIB, "{made}");
    assert!(number("resumed_bytes") < number("stored_bytes"), "{made}");
    assert!(!has_index());
    assert_point(&scratch, &chain, 1, &fs::read(&disk).expect("the disk"));
}

#[test]
fn sigkill_of_a_prune_at_any_moment_leaves_every_point_that_stays() {
    let mut random = Random::from_seed(seed());
    let scratch = Scratch::new();
    let (_, chain, disks) = chain_of(&scratch, &mut random);
    let copied = |name: &str| {
        let copy = scratch.join(name);
        tool("cp").arg("-r").args([&chain, &copy]).succeeds();
        copy
    };
    let prune = |chain: &Path| accepted(&["backup", "prune", text(chain), "--keep", "2"]);
    let begin = Instant::now();
    prune(&copied("first"));
    let takes = begin.elapsed();
    for round in 0..8 {
        let copy = copied(&format!("killed{round}"));
        let child = start(&["backup", "prune", text(&copy), "--keep", "2"]);
        kill_within(child, takes, &mut random);
        let there = points(&copy);
        assert!(there.contains(&3) && there.contains(&4), "{there:?}");
        assert_eq!(json(&["backup", "verify", text(&copy)])["sound"], true);
        prune(&copy);
        assert_eq!(points(&copy), [3, 4]);
        for number in [3, 4] {
            assert_point(&scratch, &copy, number, &disks[number as usize - 1]);
        }
        fs::remove_dir_all(&copy).expect("the copy");
    }
}

#[test]
fn a_backup_without_space_is_reported_and_leaves_the_points_before() {
    let Some(flags) = private_mounts() else { return };
    let scratch = Scratch::new();
    let disk = scratch.random("disk", 16 * MIB, 2);
    let little = scratch.random("little", MIB, 3);
    let small = scratch.join("small");
    fs::create_dir(&small).expect("a directory");
    // The mount goes with the command, so that the points are looked at before.
    const SCRIPT: &str = r#"mount -t tmpfs -o size=8m none "$0" && cd "$0" || exit 9
"$1" backup "$2" chain >/dev/null || exit 8
before=$(ls chain); shift 2; "$@"; status=$?
[ "$(ls chain)" = "$before" ] || exit 7; exit $status"#;
    let script = ["--", "sh", "-c", SCRIPT, text(&small), NOWAIT, text(&little)];
    let wrapper = [&["unshare"], flags, &script].concat();
    let refused = refusal_under(&wrapper, &["backup", text(&disk), "chain"]);
    refused.says(&["chain: cannot write data-", "No space left"]);
}

#[test]
fn a_damaged_block_is_named_and_nothing_is_restored() {
    let scratch = Scratch::new();
    let (chain, target) = (scratch.join("chain"), scratch.join("target"));
    let disk = scratch.random("disk", 2 * MIB, 4);
    accepted(&["backup", text(&disk), text(&chain)]);
    let files = fs::read_dir(&chain).expect("a directory").map(|it| it.expect("an entry").path());
    let data = files.max_by_key(|path| fs::metadata(path).expect("a file").len()).expect("data");
    let len = fs::metadata(&data).expect("data").len();
    let file = fs::File::options().read(true).write(true).open(&data).expect("data");
    let mut byte = [0];
    file.read_exact_at(&mut byte, len - 10).expect("a byte");
    file.write_all_at(&[byte[0] ^ 8], len - 10).expect("a byte");
    let refused = refusal(&["restore", text(&chain), text(&target)]);
    refused.says(&["chain@1: bytes ", " are damaged: its checksum is wrong"]);
    assert!(!target.exists() && !scratch.join("target.partial").exists());
    let found = Command::new(NOWAIT).args(["backup", "verify", text(&chain)]).output();
    let found = found.expect("nowait");
    let printed = String::from_utf8_lossy(&found.stdout).into_owned();
    assert_eq!(found.status.code(), Some(1), "{printed}");
    assert!(printed.starts_with("point 1: damaged at offset ") && printed.contains("length 65536"));
    let refused = refusal(&["backup", "verify", text(&chain), "1", "--no-progress"]);
    refused.says(&["1 of 1 points are damaged"]);
}

#[test]
fn what_cannot_be_backed_up_or_restored_is_refused_in_one_line() {
    let scratch = Scratch::new();
    let disk = scratch.random("disk", MIB, 5);
    let (chain, foreign) = (scratch.join("chain"), scratch.join("foreign"));
    fs::create_dir(&foreign).expect("a directory");
    fs::write(foreign.join("letter"), "precious").expect("a file");
    let target = scratch.join("target");
    accepted(&["backup", text(&disk), text(&chain)]);
    let [chain, foreign, target] = [&chain, &foreign, &target].map(|path| text(path));
    let none = format!("{chain}@2");
    for (arguments, words) in [
        (&["backup", text(&disk), foreign][..], &["foreign", "other files"][..]),
        (&["backup", text(&disk), text(&disk)], &["disk", "Not a directory"]),
        (&["backup", target, chain], &["target", "no such file"]),
        (&["backup", "list", foreign], &["foreign", "no backups"]),
        (&["backup", "verify", chain, "2"], &["there is no point 2"]),
        (&["restore", &none, target], &["there is no point 2"]),
        (&["restore", foreign, target], &["no backups"]),
        (&["restore", chain, text(&disk)], &["--force"]),
    ] {
        refusal(arguments).says(words);
    }
    // A second backup while one is at work.
    let image = scratch.random("image", 8 * MIB, 6);
    let server = Server::start(&image, &["--limit-bandwidth", "1M"]);
    let files = || fs::read_dir(chain).expect("the chain").count();
    let before = files();
    let mut slow = start(&["backup", server.uri(), chain]);
    wait_until("the first backup to have the lock", || files() > before);
    refusal(&["backup", text(&disk), chain]).says(&["another backup or prune"]);
    slow.kill().expect("a child");
    slow.wait().expect("a child");
    assert!(!Path::new(target).exists());
}

#[test]
fn an_encrypted_chain_is_of_use_with_an_identity_only() {
    // A pair that the tests of age have, too.
    const IDENTITY: &str =
        "AGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J33";
    const RECIPIENT: &str = "age1t7rxyev2z3rw82stdlrrepyc39nvn86l5078zqkf5uasdy86jp6svpy7pa";
    let scratch = Scratch::new();
    let disk = scratch.random("disk", MIB, 7);
    let [chain, target, key] = ["chain", "target", "key"].map(|name| scratch.join(name));
    fs::write(&key, IDENTITY).expect("a file");
    let [chain, target, key] = [&chain, &target, &key].map(|path| text(path));
    accepted(&["backup", text(&disk), chain, "--recipient", RECIPIENT]);
    for without in [
        &["backup", text(&disk), chain][..],
        &["backup", text(&disk), chain, "--recipient", RECIPIENT],
        &["backup", "list", chain],
        &["backup", "verify", chain],
        &["backup", "prune", chain, "--keep", "1"],
        &["restore", chain, target],
    ] {
        refusal(without).says(&["it is encrypted (give the --identity"]);
    }
    let with = |arguments: &[&str]| accepted(&[arguments, &["--identity", key]].concat());
    with(&["backup", text(&disk), chain]);
    assert!(with(&["backup", "verify", chain]).contains("point 2: sound"));
    with(&["backup", "prune", chain, "--keep", "1"]);
    assert_eq!(with(&["backup", "list", chain]).lines().count(), 2);
    with(&["restore", chain, target, "--verify"]);
    assert!(fs::read(target).expect("the disk") == fs::read(&disk).expect("the disk"));
}
