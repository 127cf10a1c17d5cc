//! Chains of backups in an object store, also when requests fail, a command is killed, or two write to one chain.
//!
//! Invariant: the store answers only what is signed as it has to be. What is restored is compared byte for byte.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nowait_testkit::bucket::{Bucket, BucketObject};
use nowait_testkit::multipart_upload::Call;
use nowait_testkit::signer::Signer;
use nowait_testkit::web_server::{Lie, WebServer};
use nowait_testkit::{Random, ends_with_test, output_of, wait_until};
use serde_json::{Value, json};

use crate::common::{Finished, KIB, MIB, NOWAIT, Scratch, refusal_under, text, tool};
use crate::copy_to_store::environment_of;
use crate::remote_objects::{KEY, SECRET};

const CHAIN: &str = "s3://bucket/backups/disk";
const FOLDER: &str = "/bucket/backups/disk/";
const LOCK: &str = "/bucket/backups/disk/nowait-backup.lock";
/// Three parts, if it cannot be compressed.
const BYTES: u64 = 20 * MIB + 512;
const DENIED: Lie = Lie::Status(403, "", "<Error><Code>AccessDenied</Code></Error>");

/// A bucket.
struct Store {
    server: WebServer,
    environment: Vec<String>,
}

impl Store {
    fn new() -> Self {
        let server = WebServer::start(Vec::new(), "/");
        let (key, secret, region) = (KEY.into(), SECRET.into(), String::new());
        server.script().signer = Some(Signer::Aws { key, secret, region });
        // A list has several pages.
        server.script().bucket = Some(Bucket { page: 3, ..Bucket::default() });
        let environment = environment_of(&server);
        Self { server, environment }
    }

    fn command(&self, program: &mut Command, arguments: &[&str]) -> Command {
        let mut command = Command::new(program.get_program());
        command.args(program.get_args()).args(&self.environment[1..]).arg(NOWAIT).args(arguments);
        command
    }

    fn accepts(&self, arguments: &[&str]) -> String {
        self.command(&mut tool("env"), arguments).succeeds()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let printed = self.accepts(&[arguments, &["--json"]].concat());
        serde_json::from_str(&printed).expect("JSON")
    }

    /// The command fails with one line that has these words, and not the secret.
    fn refuses(&self, arguments: &[&str], words: &[&str]) {
        let environment: Vec<&str> = self.environment.iter().map(String::as_str).collect();
        let refused = refusal_under(&environment, arguments);
        refused.says(words);
        assert!(!refused.error.contains(SECRET), "{}", refused.error);
    }

    fn start(&self, arguments: &[&str]) -> Child {
        let mut command = self.command(&mut Command::new("env"), arguments);
        let silent = command.stdout(Stdio::null()).stderr(Stdio::piped());
        ends_with_test(silent).spawn().expect("nowait")
    }

    /// Lies of the next requests of this kind: none for the first ones.
    fn lie_after(&self, first: usize, on: Call, lie: Lie) {
        let lies = std::iter::repeat_n(Lie::Header(""), first).chain([lie]);
        self.server.script().upload_lies.extend(lies.map(|lie| (on, lie)));
    }

    fn names(&self) -> Vec<String> {
        let script = self.server.script();
        let objects = &script.bucket.as_ref().expect("a bucket").objects;
        objects.keys().filter_map(|path| Some(path.strip_prefix(FOLDER)?.to_owned())).collect()
    }

    fn insert(&self, path: &str, bytes: &[u8], seconds: u64) {
        let object = BucketObject { bytes: bytes.to_vec(), tag: "\"other\"".into(), seconds };
        let mut script = self.server.script();
        script.bucket.as_mut().expect("a bucket").objects.insert(path.into(), object);
    }

    fn points(&self) -> Vec<u64> {
        let listed = self.json(&["backup", "list", CHAIN]);
        let points = listed["points"].as_array().expect("an array");
        assert!(points.iter().all(|point| point["damaged"].is_null()), "{listed}");
        points.iter().map(|point| point["point"].as_u64().expect("a number")).collect()
    }

    /// The chain has these points, each as it was, and nothing is left of commands that have ended.
    fn has(&self, scratch: &Scratch, disks: &[(u64, Vec<u8>)]) {
        assert_eq!(self.points(), disks.iter().map(|(number, _)| *number).collect::<Vec<_>>());
        let restored = scratch.join("restored");
        for (number, disk) in disks {
            let from = format!("{CHAIN}@{number}");
            self.accepts(&["restore", &from, text(&restored), "-O", "raw", "--force"]);
            assert!(fs::read(&restored).expect("the disk") == *disk, "point {number}");
        }
        assert_eq!(self.json(&["backup", "verify", CHAIN])["sound"], true);
        let script = self.server.script();
        assert!(script.uploads.open.is_empty(), "an upload is open");
        assert!(script.upload_lies.is_empty() && script.unsigned == 0);
        drop(script);
        assert!(!self.names().contains(&"nowait-backup.lock".into()));
    }

    fn parts(&self) -> usize {
        self.server.script().uploads.parts
    }

    /// A command that is sending parts, which the store does not take.
    fn start_stalled(&self, disk: &Path) -> Child {
        let before = self.parts();
        for _ in 0..2 {
            self.lie_after(0, Call::Part, Lie::Stall(0));
        }
        let child = self.start(&["backup", text(disk), CHAIN, "--whole"]);
        wait_until("parts are there", || self.parts() >= before + 2);
        child
    }
}

fn disk_of(scratch: &Scratch) -> (PathBuf, Vec<u8>) {
    let disk = scratch.random("disk", BYTES, 1);
    let bytes = fs::read(&disk).expect("the disk");
    (disk, bytes)
}

/// Changes some of the disk.
fn change(disk: &Path, random: &mut Random) -> Vec<u8> {
    let file = fs::File::options().write(true).open(disk).expect("the disk");
    for _ in 0..5 {
        file.write_all_at(&random.bytes(100 << 10), random.below(BYTES - 100 * KIB)).expect("room");
    }
    fs::read(disk).expect("the disk")
}

fn failed(child: Child, words: &str) {
    let output = output_of(child);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), printed.lines().count()), (Some(1), 1), "{printed}");
    assert!(printed.contains(words) && !printed.contains(SECRET), "{printed}");
}

#[test]
fn points_in_a_store_are_restored_verified_and_pruned() {
    let (scratch, store, mut random) = (Scratch::new(), Store::new(), Random::from_seed(1));
    let (disk, bytes) = disk_of(&scratch);
    let made = store.json(&["backup", text(&disk), CHAIN]);
    assert_eq!((&made["point"], &made["directory"]), (&1.into(), &CHAIN.into()));
    assert_eq!(store.parts(), 3);
    let mut disks = vec![(1, bytes)];
    for number in 2..=5 {
        disks.push((number, change(&disk, &mut random)));
        let made = store.json(&["backup", text(&disk), &format!("{CHAIN}/")]);
        assert_eq!((&made["point"], &made["parent"]), (&number.into(), &(number - 1).into()));
        assert!(made["stored_bytes"].as_u64().expect("a number") < 3 * MIB, "{made}");
    }
    store.has(&scratch, &disks);
    for keep in [3, 1] {
        store.json(&["backup", "prune", CHAIN, "--keep", &keep.to_string()]);
        disks.drain(..disks.len() - keep);
        store.has(&scratch, &disks);
    }
    assert_eq!(store.names().iter().filter(|name| name.starts_with("point-")).count(), 1);
    store.refuses(&["restore", &format!("{CHAIN}@9"), "x"], &[CHAIN, "there is no point 9"]);
    // A disk without any data has no data file.
    let empty = scratch.sparse("empty", 1 << 20);
    store.accepts(&["backup", text(&empty), "s3://bucket/empty"]);
}

#[test]
fn requests_that_fail_once_are_made_again() {
    let (scratch, store) = (Scratch::new(), Store::new());
    let (disk, bytes) = disk_of(&scratch);
    for (first, on, lie) in [
        (0, Call::Begin, Lie::Status(500, "", "")),
        (0, Call::Part, Lie::Cut(10)),
        (1, Call::Part, Lie::Status(503, "", "<Error><Code>SlowDown</Code></Error>")),
        (0, Call::Complete, Lie::HangUp),
        (0, Call::List, Lie::Cut(60)),
        (1, Call::List, Lie::Status(500, "", "")),
        // Answers about the lock, and about the manifest, are lost: both are there.
        (0, Call::Put, Lie::HangUp),
        (2, Call::Put, Lie::HangUp),
        (0, Call::Delete, Lie::HangUp),
    ] {
        store.lie_after(first, on, lie);
    }
    store.accepts(&["backup", text(&disk), CHAIN]);
    store.server.script().upload_lies.clear();
    store.has(&scratch, &[(1, bytes)]);
}

#[test]
fn a_request_that_is_refused_leaves_the_points_before_and_no_other() {
    let (scratch, store, mut random) = (Scratch::new(), Store::new(), Random::from_seed(2));
    let (disk, bytes) = disk_of(&scratch);
    store.accepts(&["backup", text(&disk), CHAIN]);
    let before = store.names();
    let mut disks = vec![(1, bytes)];
    let changed = change(&disk, &mut random);
    let arguments = ["backup", text(&disk), CHAIN, "--whole"];
    // The lock, its note of the upload, and the manifest are put.
    for (first, on) in [
        (0, Call::List),
        (0, Call::Begin),
        (0, Call::Part),
        (2, Call::Part),
        (0, Call::Complete),
        (0, Call::Put),
        (1, Call::Put),
        (2, Call::Put),
    ] {
        store.lie_after(first, on, DENIED);
        store.refuses(&arguments, &[CHAIN, "refuses access (403 AccessDenied)"]);
        store.server.script().upload_lies.clear();
        assert_eq!(store.names(), before, "{on:?}");
        assert!(store.server.script().uploads.open.is_empty(), "{on:?}");
    }
    // A list that ends in the middle, though its status and its length are right.
    for _ in 0..200 {
        let body = "<ListBucketResult><Contents><Key>backups/di";
        store.lie_after(0, Call::List, Lie::Status(200, "", body));
    }
    let said = store.command(&mut tool("env"), &["backup", "list", CHAIN]).fails();
    assert!(said.contains(&format!("{CHAIN}: cannot list it: ")), "{said}");
    store.server.script().upload_lies.clear();
    store.has(&scratch, &disks);
    store.accepts(&arguments);
    disks.push((2, changed));
    store.has(&scratch, &disks);
}

#[test]
fn sigkill_of_an_upload_leaves_the_points_before_and_the_next_backup_or_prune_aborts_it() {
    let (scratch, store) = (Scratch::new(), Store::new());
    let (disk, bytes) = disk_of(&scratch);
    store.accepts(&["backup", text(&disk), CHAIN]);
    let mut disks = vec![(1, bytes.clone())];
    for round in 0..2 {
        let mut killed = store.start_stalled(&disk);
        killed.kill().expect("a child");
        killed.wait().expect("a child");
        assert_eq!(store.server.script().uploads.open.len(), 1);
        assert!(store.names().contains(&"nowait-backup.lock".into()));
        assert_eq!(store.points(), disks.iter().map(|(number, _)| *number).collect::<Vec<_>>());
        store.accepts(&["restore", CHAIN, text(&scratch.join("restored")), "-O", "raw", "--force"]);
        store.server.script().upload_lies.clear();
        if round == 0 {
            store.accepts(&["backup", "prune", CHAIN, "--keep", "9"]);
        } else {
            store.accepts(&["backup", text(&disk), CHAIN]);
            disks.push((2, bytes.clone()));
        }
        assert_eq!(store.server.script().uploads.aborted, round + 1);
        store.has(&scratch, &disks);
    }
}

#[test]
fn an_upload_goes_on_from_the_objects_that_one_that_was_killed_has_completed() {
    let (scratch, store) = (Scratch::new(), Store::new());
    let disk = scratch.random("disk", 80 * MIB, 1);
    // The parts of the second data file are not taken.
    let parts = (64 << 20) / (8 << 20);
    store.lie_after(parts, Call::Part, Lie::Stall(0));
    let mut killed = store.start(&["backup", text(&disk), CHAIN]);
    let is_index = |name: &String| name.starts_with("index-");
    wait_until("a data file to be complete", || store.names().iter().any(is_index));
    killed.kill().expect("a child");
    killed.wait().expect("a child");
    assert!(store.points().is_empty());
    store.server.script().upload_lies.clear();
    let before = store.parts();
    let made = store.json(&["backup", text(&disk), CHAIN]);
    let number = |key: &str| made[key].as_u64().expect("a number");
    assert!(number("resumed_bytes") > 60 * MIB, "{made}");
    assert!(number("resumed_bytes") < number("stored_bytes"), "{made}");
    assert!(store.parts() - before < parts, "{made}");
    assert!(!store.names().iter().any(is_index));
    store.has(&scratch, &[(1, fs::read(&disk).expect("the disk"))]);
}

#[test]
fn a_chain_has_one_writer_at_a_time() {
    let (scratch, store) = (Scratch::new(), Store::new());
    let (disk, bytes) = disk_of(&scratch);
    store.accepts(&["backup", text(&disk), CHAIN]);
    let disks = [(1, bytes)];
    let first = store.start_stalled(&disk);
    for second in [&["backup", text(&disk), CHAIN][..], &["backup", "prune", CHAIN, "--keep", "1"]]
    {
        store.refuses(second, &[CHAIN, "another backup or prune is at work in it"]);
    }
    // The lock goes to another one.
    let holder = json!({ "host": "other", "pid": 1, "started": 1 });
    let record = json!({ "id": 1, "holder": holder, "renewals": 0, "uploads": [] });
    let record = record.to_string();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.expect("a clock").as_secs();
    store.insert(LOCK, record.as_bytes(), now);
    store.server.script().upload_lies.clear();
    nowait_testkit::tool("true").succeeds();
    failed(first, "has taken the lock of the chain meanwhile");
    assert_eq!(store.points(), [1]);
    // Nothing tells whether a process of another host has ended.
    store.refuses(&["backup", text(&disk), CHAIN], &["another backup or prune", "15 minutes"]);
    store.insert(LOCK, record.as_bytes(), now - 14 * 60);
    store.refuses(&["backup", text(&disk), CHAIN], &["another backup or prune"]);
    for old in [record.as_bytes(), b"{", b""] {
        store.insert(LOCK, if old.is_empty() { b"\0" } else { old }, now - 16 * 60);
        store.accepts(&["backup", "prune", CHAIN, "--keep", "9"]);
        store.has(&scratch, &disks);
    }
}

#[test]
fn a_point_that_another_program_makes_meanwhile_stays() {
    let (scratch, store) = (Scratch::new(), Store::new());
    let (disk, _) = disk_of(&scratch);
    store.accepts(&["backup", text(&disk), CHAIN]);
    let child = store.start_stalled(&disk);
    let foreign = format!("{FOLDER}point-000002");
    store.insert(&foreign, b"foreign", 0);
    store.server.script().upload_lies.clear();
    failed(child, "there is such an object already");
    let script = store.server.script();
    assert_eq!(script.bucket.as_ref().expect("a bucket").objects[&foreign].bytes, b"foreign");
}

#[test]
fn a_store_without_conditional_requests_has_chains_too() {
    let (scratch, store) = (Scratch::new(), Store::new());
    let (disk, bytes) = disk_of(&scratch);
    store.server.script().uploads.knows_no_conditions = true;
    store.accepts(&["backup", text(&disk), CHAIN]);
    store.accepts(&["backup", text(&disk), CHAIN]);
    store.accepts(&["backup", "prune", CHAIN, "--keep", "1"]);
    store.has(&scratch, &[(2, bytes)]);
}

#[test]
fn an_encrypted_chain_in_a_store_shows_nothing() {
    const IDENTITY: &str =
        "AGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J33";
    const RECIPIENT: &str = "age1t7rxyev2z3rw82stdlrrepyc39nvn86l5078zqkf5uasdy86jp6svpy7pa";
    let (scratch, store) = (Scratch::new(), Store::new());
    let disk = scratch.random("disk", 2 * MIB, 1);
    let bytes = fs::read(&disk).expect("the disk");
    let [target, key] = ["target", "key"].map(|name| scratch.join(name));
    fs::write(&key, IDENTITY).expect("a file");
    let identity = ["--identity", text(&key)];
    store.accepts(&["backup", text(&disk), CHAIN, "--recipient", RECIPIENT]);
    store.refuses(&["backup", "list", CHAIN], &[CHAIN, "it is encrypted (give the --identity"]);
    let with = |arguments: &[&str]| store.accepts(&[arguments, &identity].concat());
    with(&["backup", text(&disk), CHAIN]);
    with(&["backup", "prune", CHAIN, "--keep", "1"]);
    assert!(with(&["backup", "verify", CHAIN]).contains("point 2: sound"));
    with(&["restore", CHAIN, text(&target), "-O", "raw"]);
    assert!(fs::read(&target).expect("the disk") == bytes);
    let script = store.server.script();
    let objects = &script.bucket.as_ref().expect("a bucket").objects;
    assert!(objects.values().all(|object| object.bytes.starts_with(b"age-encryption.org/v1")));
}

#[test]
fn a_key_or_a_place_that_is_refused_is_one_line() {
    let (scratch, store) = (Scratch::new(), Store::new());
    let disk = scratch.random("disk", MIB, 1);
    store.insert("/bucket/letters/a", b"precious", 1);
    let other = "s3://bucket/letters";
    store.refuses(&["backup", text(&disk), other], &[other, "other objects, and no backups"]);
    store.refuses(&["backup", "list", CHAIN], &[CHAIN, "there are no backups in it"]);
    store.refuses(&["restore", CHAIN, "x"], &[CHAIN, "there are no backups in it"]);
    let web = store.server.root() + "/backups";
    store.refuses(&["backup", text(&disk), &web], &[&web, "a web server is only read"]);
    let version = "s3://bucket/a?versionId=1";
    store.refuses(&["backup", text(&disk), version], &["a folder has no version"]);
    let long = format!("s3://bucket/{}", "a".repeat(401));
    store.refuses(&["backup", text(&disk), &long], &["more than 400 bytes"]);
    let longest = &long[..long.len() - 1];
    store.accepts(&["backup", text(&disk), longest]);
    let secret = "another secret".into();
    let signer = Signer::Aws { key: KEY.into(), secret, region: String::new() };
    store.server.script().signer = Some(signer);
    for arguments in [
        &["backup", text(&disk), CHAIN][..],
        &["backup", "list", CHAIN],
        &["backup", "verify", CHAIN],
        &["backup", "prune", CHAIN, "--keep", "1"],
        &["restore", CHAIN, "x"],
    ] {
        store.refuses(arguments, &[CHAIN, "refuses access (403 SignatureDoesNotMatch)"]);
    }
    let parsed = store.command(&mut tool("env"), &["backup", text(&disk), "s3://bucket"]).fails();
    assert!(parsed.contains("s3://BUCKET"), "{parsed}");
}
