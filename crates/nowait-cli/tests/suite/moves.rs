//! Disks that move to another place while clients write to them.
//!
//! Invariant: a model has what the clients have written; the disk that is served has it at every moment, and so has the
//! new place after the exchange.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nowait_testkit::nbd::{Client, Command as Request, Mode};
use nowait_testkit::{Finished, Random, Running, SetOnDrop, require_tool, seed, tool, wait_until};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::{LoopDevice, MIB, NOWAIT, Scratch, Server, accepted, text};
use crate::control::Controlled;
use crate::upgrade::Upgraded;
use nowait_testkit::nbd::load::load;

const SIZE: u64 = 16 * MIB;
/// A pause that suffices under any load.
pub(crate) const LONG_PAUSE: [&str; 2] = ["--max-pause", "60000"];

/// Options of a move that copies all that there is, and does not end while a client writes.
const FOLLOWS: [&str; 5] = ["--rate", "2M", "--max-pause", "10", "--detach"];

/// A server of an image of 16 MiB, `disk`, in a directory that it may make images in.
pub(crate) struct Served {
    pub(crate) server: Server,
    pub(crate) control: PathBuf,
    pub(crate) scratch: Scratch,
}

impl Served {
    pub(crate) fn start(format: &str, extra: &[&str]) -> Self {
        Self::start_under(&[], format, extra)
    }

    fn start_under(wrapper: &[&str], format: &str, extra: &[&str]) -> Self {
        let scratch = Scratch::new();
        let (image, control) = (scratch.join("disk"), scratch.join("control"));
        accepted(&["create", text(&image), "16M", "--format", format]);
        let (address, directory) = (format!("unix:{}", control.display()), scratch.path());
        let arguments = ["--control", &address, "--format", format, "--allow-dir", text(directory)];
        let server = Server::start_under(wrapper, &image, &[&arguments, extra].concat());
        Self { server, control, scratch }
    }

    pub(crate) fn export(&self, arguments: &[&str]) -> Command {
        let mut command = tool(NOWAIT);
        command.arg("export").args(arguments).arg("--control").arg(&self.control);
        command
    }

    /// Moves the disk and waits for the end.
    pub(crate) fn move_to(&self, target: &str, more: &[&str]) -> Value {
        let arguments = [&["move", "@0", target, "--json"], &LONG_PAUSE[..], more].concat();
        let info: Value = serde_json::from_str(&self.export(&arguments).succeeds()).expect("JSON");
        assert_eq!(info["state"], "completed", "{info}");
        info
    }

    /// Begins to move the disk so slowly that the move does not end.
    fn begin_slowly(&self, target: &str) {
        let slow = ["--rate", "64K", "--max-pause", "10", "--detach"];
        self.export(&[&["move", "@0", target][..], &slow].concat()).succeeds();
    }

    fn status(&self) -> Value {
        let told: Value =
            serde_json::from_str(&self.export(&["list", "--json"]).succeeds()).expect("JSON");
        told[0].clone()
    }

    fn state(&self) -> String {
        self.status()["moving"]["state"].as_str().expect("a state").to_owned()
    }

    /// The files that are images, or parts of one.
    pub(crate) fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.scratch.path()).expect("a directory");
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
        let names = entries.map(|entry| name(entry).to_string_lossy().into_owned());
        let mut names: Vec<_> = names.filter(|name| name != "control").collect();
        names.sort();
        names
    }
}

/// The bytes of the disk of `image`.
pub(crate) fn contents(scratch: &Scratch, image: &Path, format: &str) -> Vec<u8> {
    let raw = scratch.join("contents");
    accepted(&["copy", text(image), text(&raw), "--force", "-f", format, "-O", "raw"]);
    std::fs::read(raw).expect("a raw image")
}

/// Writes and zeroes at random, and checks what it reads. `model` has what the disk has.
fn change(client: &mut Client, model: &mut [u8], random: &mut Random) {
    let offset = random.below(SIZE - 128 * 1024);
    let len = 1 + random.below(128 * 1024) as usize;
    let place = &mut model[offset as usize..][..len];
    if random.below(4) == 0 {
        place.fill(0);
        client.call(&Request::Zero { offset, len: len as u32, keep: false }).expect("zeroes");
    } else {
        let data = random.bytes(len);
        place.copy_from_slice(&data);
        client.write(offset, &data).expect("a write");
    }
    let (at, len) = (random.below(SIZE - 4096), 4096);
    let read = client.read(at, len).expect("bytes");
    assert!(read == model[at as usize..][..len as usize], "at {at}");
}

/// Acts while a client changes the disk, whose content is `model`.
fn while_written<T>(it: &Served, model: &mut [u8], act: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut random = Random::from_seed(seed());
            let mut client = it.server.connect();
            while !over.load(Ordering::Relaxed) {
                change(&mut client, model, &mut random);
            }
            // Some more, after the move.
            (0..20).for_each(|_| change(&mut client, model, &mut random));
        });
        let loading = SetOnDrop(&over);
        let acted = act();
        drop(loading);
        load.join().expect("no error");
        acted
    })
}

/// Acts while a client writes 2 MiB again and again, faster than a move with [`FOLLOWS`] copies them.
fn while_overwritten(it: &Served, act: impl FnOnce()) {
    let over = AtomicBool::new(false);
    let mut client = it.server.connect();
    thread::scope(|scope| {
        let load = scope.spawn(|| load(&mut client, 0, &over));
        let loading = SetOnDrop(&over);
        act();
        drop(loading);
        assert!(load.join().expect("no error") > 0);
    });
}

/// Random bytes in a part of the disk, and its model.
pub(crate) fn filled(it: &Served) -> Vec<u8> {
    let mut model = vec![0; SIZE as usize];
    let data = Random::from_seed(seed()).bytes(4 << 20);
    it.server.connect().write(3 * MIB, &data).expect("a write");
    model[3 << 20..][..data.len()].copy_from_slice(&data);
    model
}

fn assert_served(it: &Served, model: &[u8]) {
    let read = it.server.connect().read(0, SIZE as u32).expect("all bytes");
    assert!(read == model, "the disk is not what was written");
}

#[test]
fn a_disk_moves_between_files_while_it_is_written_and_the_one_before_stays_as_it_was() {
    for (from, to) in [("raw", "raw"), ("raw", "qcow2"), ("qcow2", "raw"), ("qcow2", "qcow2")] {
        let it = Served::start(from, &[]);
        let mut model = filled(&it);
        let (source, target) = (it.scratch.join("disk"), it.scratch.join("moved"));
        std::fs::set_permissions(&source, Permissions::from_mode(0o640)).expect("a mode");
        let info = while_written(&it, &mut model, || {
            let info = it.move_to(text(&target), &["--format", to]);
            accepted(&["info", text(&source), "--format", from]);
            info
        });
        assert!(info["pause_ms"].as_f64().is_some_and(|pause| pause > 0.0), "{info}");
        assert_eq!(info["left_bytes"], 0, "{info}");
        let status = it.status();
        assert_eq!((&status["image"], &status["format"]), (&text(&target).into(), &to.into()));
        assert_served(&it, &model);
        let mode = std::fs::metadata(&target).expect("the new place").permissions().mode();
        assert_eq!(mode & 0o7777, 0o640);
        // The image before has no lock.
        let other = Server::start(&source, &["--format", from]);
        let before = other.connect().read(0, SIZE as u32).expect("all bytes");
        let mut client = it.server.connect();
        client.write(0, &[0xab; 4096]).expect("a write");
        model[..4096].fill(0xab);
        assert!(other.connect().read(0, SIZE as u32).expect("all bytes") == before);
        drop(client);
        other.stop();
        it.server.stop();
        assert!(contents(&it.scratch, &target, to) == model, "{from} to {to}");
        for (image, format) in [(&source, from), (&target, to)] {
            if format == "qcow2" {
                accepted(&["check", text(image)]);
            }
        }
    }
}

#[test]
fn a_disk_moves_to_an_export_of_another_server_and_back_to_a_file() {
    let scratch = Scratch::new();
    let image = scratch.sparse("behind", SIZE);
    let behind = Server::start(&image, &["-f", "raw"]);
    let it = Served::start("qcow2", &["--allow-uri", behind.uri()]);
    it.export(&["bitmap", "add", "@0", "monday"]).succeeds();
    let mut model = filled(&it);
    let info = while_written(&it, &mut model, || it.move_to(behind.uri(), &[]));
    assert!(info["notes"][0].as_str().is_some_and(|note| note.contains("monday")), "{info}");
    assert_eq!(it.status()["image"], behind.uri());
    assert_served(&it, &model);
    let bitmaps = it.export(&["bitmap", "list", "@0", "--json"]).succeeds();
    let bitmaps: Value = serde_json::from_str(&bitmaps).expect("JSON");
    let dirty = bitmaps[0]["dirty_bytes"].as_u64().expect("a number");
    assert!(dirty >= 4 * MIB && bitmaps[0].get("persistent") != Some(&true.into()), "{bitmaps}");
    let file = it.scratch.join("back.qcow2");
    let info = while_written(&it, &mut model, || it.move_to(text(&file), &[]));
    assert!(info.get("notes").is_none(), "{info}");
    assert_eq!(it.status()["format"], "qcow2");
    assert_served(&it, &model);
    behind.stop();
    it.server.stop();
    assert!(contents(&it.scratch, &file, "qcow2") == model);
}

#[test]
fn a_disk_moves_to_qemu_nbd() {
    nowait_testkit::needs!(require_tool("qemu-nbd"));
    let it = Scratch::new();
    let (image, socket) = (it.sparse("behind", SIZE), it.join("qemu.sock"));
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--format=raw", "--socket"]).arg(&socket).arg(&image);
    let mut qemu = Running::start(&mut command);
    wait_until("qemu-nbd listens", || socket.exists());
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let served = Served::start("raw", &["--allow-uri", &uri]);
    let mut model = filled(&served);
    while_written(&served, &mut model, || served.move_to(&uri, &[]));
    assert_served(&served, &model);
    served.server.stop();
    qemu.end();
    assert!(std::fs::read(&image).expect("an image") == model);
}

#[test]
fn a_move_that_is_cancelled_leaves_the_disk_where_it_was_and_no_file() {
    for is_following in [false, true] {
        let it = Served::start("raw", &[]);
        let mut model = filled(&it);
        let names = it.files();
        let target = it.scratch.join("moved");
        let cancel = || {
            assert!(!target.exists());
            let said = it.export(&["move", "@0", "--cancel"]).succeeds();
            assert!(said.contains("was cancelled: the disk is where it was"), "{said}");
        };
        match is_following {
            false => while_written(&it, &mut model, || {
                it.begin_slowly(text(&target));
                cancel();
            }),
            true => while_overwritten(&it, || {
                it.export(&[&["move", "@0", text(&target)], &FOLLOWS[..]].concat()).succeeds();
                wait_until("all is copied", || it.status()["moving"]["rounds"] != 0);
                cancel();
                let mut client = it.server.connect();
                client.read(0, 4096).expect("bytes");
            }),
        }
        model[..2 << 20].copy_from_slice(&it.server.connect().read(0, 2 << 20).expect("bytes"));
        assert_eq!((it.state().as_str(), it.files()), ("cancelled", names));
        assert_served(&it, &model);
        let said = it.export(&["move", "@0", "--cancel"]).fails();
        assert!(said.contains("it is not being moved"), "{said}");
        // The next one is not hindered by it.
        it.move_to(text(&target), &[]);
        assert_served(&it, &model);
        it.server.stop();
    }
}

#[test]
fn a_command_that_waits_for_its_move_cancels_it_when_it_is_interrupted() {
    let it = Served::start("raw", &[]);
    let model = filled(&it);
    let target = it.scratch.join("moved");
    let mut waiting =
        Running::start(&mut it.export(&["move", "@0", text(&target), "--rate", "64K"]));
    wait_until("it moves", || it.status().get("moving").is_some());
    let pid = rustix::process::Pid::from_child(&waiting.0);
    // It may not yet handle the signal.
    wait_until("it is cancelled", || {
        let _ = rustix::process::kill_process(pid, Signal::INT);
        it.state() == "cancelled"
    });
    assert!(!waiting.0.wait().expect("an end").success());
    assert_eq!(it.files(), ["disk"]);
    assert_served(&it, &model);
    it.server.stop();
}

#[test]
fn a_server_that_ends_or_is_killed_during_a_move_leaves_its_disk_and_nothing_under_the_new_name() {
    for is_killed in [false, true] {
        let it = Served::start("raw", &[]);
        let model = filled(&it);
        let target = it.scratch.join("moved");
        it.begin_slowly(text(&target));
        let Served { mut server, scratch, .. } = it;
        match is_killed {
            true => {
                server.signal(Signal::KILL);
                server.wait();
                assert!(!target.exists());
            }
            false => {
                server.stop();
                assert!(!target.exists() && !scratch.join("moved.partial").exists());
            }
        }
        assert!(std::fs::read(scratch.join("disk")).expect("the disk") == model);
        let again = Server::start(&scratch.join("disk"), &["--format", "raw"]);
        again.connect().write(0, &[1; 512]).expect("a write");
        again.stop();
    }
}

#[test]
fn a_target_that_fails_ends_the_move_and_no_client_notices() {
    // A file that is too short for the tables beside the data.
    let limit = format!("--fsize={SIZE}");
    let it = Served::start_under(&["prlimit", &limit], "raw", &[]);
    let mut model = Random::from_seed(seed()).bytes(SIZE as usize);
    it.server.connect().write(0, &model).expect("a write");
    let target = it.scratch.join("moved.qcow2");
    while_overwritten(&it, || {
        let said = it.export(&["move", "@0", text(&target), "--max-pause", "60000"]).fails();
        assert!(said.contains("moved.qcow2: cannot") && said.lines().count() == 1, "{said}");
    });
    assert_eq!((it.state().as_str(), it.files()), ("failed", vec!["disk".to_owned()]));
    model[..2 << 20].copy_from_slice(&it.server.connect().read(0, 2 << 20).expect("bytes"));
    assert_served(&it, &model);
    it.server.stop();
    // A server that is killed.
    let scratch = Scratch::new();
    let image = scratch.sparse("behind", SIZE);
    let mut behind = Server::start(&image, &["-f", "raw"]);
    let it = Served::start("raw", &["--allow-uri", behind.uri(), "--reconnect", "1"]);
    let mut model = filled(&it);
    while_written(&it, &mut model, || {
        it.begin_slowly(behind.uri());
        behind.signal(Signal::KILL);
        behind.wait();
        wait_until("the move has failed", || it.state() == "failed");
    });
    let failure = it.status()["moving"]["failure"].to_string();
    assert!(failure.contains("nbd+unix:"), "{failure}");
    assert_served(&it, &model);
    it.server.stop();
}

#[test]
fn what_cannot_be_done_during_a_move_is_refused_and_the_other_way_round() {
    let it = Served::start("qcow2", &[]);
    filled(&it);
    let more = it.scratch.join("more");
    accepted(&["create", text(&more), "1M"]);
    it.export(&["add", "more", text(&more)]).succeeds();
    it.export(&["bitmap", "add", "@0", "b"]).succeeds();
    let target = it.scratch.join("moved");
    it.begin_slowly(text(&target));
    let overlay = it.scratch.join("overlay");
    let refused: [&[&str]; 9] = [
        &["resize", "@0", "32M"],
        &["snapshot", "@0", text(&overlay)],
        &["backup", "start", "@0"],
        &["bitmap", "add", "@0", "c"],
        &["bitmap", "clear", "@0", "b"],
        &["bitmap", "disable", "@0", "b"],
        &["bitmap", "remove", "@0", "b"],
        &["remove", "@0", "--force"],
        &["move", "@0", text(&overlay)],
    ];
    for arguments in refused {
        let said = it.export(arguments).fails();
        let is_told = said.contains("is being moved to") && said.contains("--cancel");
        assert!(is_told && said.lines().count() == 1, "{arguments:?}: {said}");
    }
    let mut upgrade = tool(NOWAIT);
    let said = upgrade.arg("upgrade").arg("--control").arg(&it.control).fails();
    assert!(said.contains("is being moved to"), "{said}");
    // Another export is not concerned, nor is what needs no other image.
    it.export(&["bitmap", "add", "more", "b"]).succeeds();
    it.export(&["limit", "@0", "--limit-iops", "9000"]).succeeds();
    it.export(&["move", "@0", "--cancel"]).succeeds();
    it.export(&["resize", "@0", "32M"]).succeeds();
    it.export(&["backup", "start", "@0"]).succeeds();
    let said = it.export(&["move", "@0", text(&target)]).fails();
    assert!(said.contains("it has a backup"), "{said}");
    let said = it.export(&["move", "backup", text(&target)]).fails();
    assert!(said.contains("is the backup of") || said.contains("no such export"), "{said}");
    assert!(!target.exists() && !it.scratch.join("moved.partial").exists());
    it.export(&["backup", "abort", "@0"]).succeeds();
    it.server.stop();
}

#[test]
fn a_place_that_a_disk_cannot_move_to_is_refused_before_anything_is_made() {
    let scratch = Scratch::new();
    let small = scratch.sparse("small", SIZE - 512);
    let behind = Server::start(&small, &["-f", "raw"]);
    let it = Served::start("raw", &["--allow-uri", behind.uri()]);
    std::fs::write(it.scratch.join("taken"), "precious").expect("a file");
    let names = it.files();
    let (taken, disk) = (it.scratch.join("taken"), it.scratch.join("disk"));
    let elsewhere = scratch.join("new");
    let new = it.scratch.join("new");
    let refused: [(&[&str], &str); 9] = [
        (&[text(&taken)], "there is such a file already"),
        (&[text(&disk)], "there is such a file already"),
        (&[text(&elsewhere)], "is not in a directory of --allow-dir"),
        (&[behind.uri()], "16776704 bytes, and the disk 16777216"),
        (&["nbd://other.example/x"], "--allow-uri does not allow"),
        (&[text(&new), "--format", "vmdk"], "the formats of a new file are raw and qcow2"),
        (&[text(&new), "--max-pause", "9"], "it goes from 10 to 60000"),
        (&[text(&new), "--rate", "0"], "at least one byte is needed"),
        (&["/dev/null"], "is not in a directory of --allow-dir"),
    ];
    for (arguments, why) in refused {
        let said = it.export(&[&["move", "@0"], arguments].concat()).fails();
        assert!(said.contains(why), "{arguments:?}: {said}");
    }
    assert_eq!(it.files(), names);
    let more = it.scratch.join("more");
    accepted(&["create", text(&more), "1M"]);
    it.export(&["add", "ro", text(&more), "--read-only"]).succeeds();
    let said = it.export(&["move", "ro", text(&new)]).fails();
    assert!(said.contains("it is served read-only"), "{said}");
    it.server.stop();
    behind.stop();
}

#[test]
fn a_pause_that_is_too_short_leaves_the_disk_where_it_is_until_its_writers_are_slower() {
    let it = Served::start("raw", &[]);
    let mut model = filled(&it);
    let target = it.scratch.join("moved");
    while_overwritten(&it, || {
        it.export(&[&["move", "@0", text(&target)], &FOLLOWS[..]].concat()).succeeds();
        wait_until("its writers are faster", || it.state() == "behind");
        assert!(it.status()["moving"]["running"] == true && !target.exists());
    });
    assert!(it.server.log().contains("its writers are faster than its move"));
    // They have ended, so it can end, too.
    wait_until("it has moved", || it.state() == "completed");
    model[..2 << 20].copy_from_slice(&it.server.connect().read(0, 2 << 20).expect("bytes"));
    assert_served(&it, &model);
    it.server.stop();
    assert!(std::fs::read(&target).expect("the new place") == model);
}

#[test]
fn a_program_that_takes_over_serves_the_new_place() {
    let scratch = Scratch::new();
    let image = scratch.sparse("behind", SIZE);
    let behind = Server::start(&image, &["-f", "raw"]);
    for is_remote in [false, true] {
        let it = Served::start("raw", &["--verbose", "--allow-uri", behind.uri()]);
        let mut model = filled(&it);
        let file = it.scratch.join("moved.qcow2");
        let target = if is_remote { behind.uri() } else { text(&file) };
        let mut client = it.server.connect();
        it.move_to(target, &[]);
        let Served { server, control, scratch } = it;
        let mut it = Upgraded::of(server, &control, scratch);
        assert_eq!(it.upgrade()["connections"], 1);
        client.write(8 * MIB, &[7; 4096]).expect("a write");
        model[8 << 20..][..4096].fill(7);
        assert!(client.read(0, SIZE as u32).expect("all bytes") == model);
        drop(client);
        let (scratch, _) = it.stop();
        match is_remote {
            true => assert!(std::fs::read(&image).expect("the new place") == model),
            false => assert!(contents(&scratch, &file, "qcow2") == model),
        }
    }
    behind.stop();
}

#[test]
fn a_disk_moves_to_a_block_device_that_may_be_overwritten() {
    let scratch = Scratch::new();
    let file = scratch.random("file", SIZE, 3);
    let Some(device) = LoopDevice::on(&file) else { return };
    let it = Served::start("qcow2", &["--allow-dir", "/dev"]);
    let mut model = filled(&it);
    let before = std::fs::read(&file).expect("the device");
    let said = it.export(&["move", "@0", text(device.path())]).fails();
    assert!(said.contains("it is a block device") && said.contains("--overwrite-device"), "{said}");
    let format = ["--overwrite-device", "--format", "qcow2"];
    let said = it.export(&[&["move", "@0", text(device.path())], &format[..]].concat()).fails();
    assert!(said.contains("only a new file has a format"), "{said}");
    assert!(std::fs::read(&file).expect("the device") == before);
    while_written(&it, &mut model, || it.move_to(text(device.path()), &["--overwrite-device"]));
    assert_served(&it, &model);
    it.server.stop();
    drop(device);
    assert!(std::fs::read(&file).expect("the device") == model);
}

#[test]
fn four_disks_move_at_a_time() {
    let it = Served::start("raw", &[]);
    for name in ["a", "b", "c", "d", "e"] {
        let image = it.scratch.join(name);
        accepted(&["create", text(&image), "4M"]);
        it.export(&["add", name, text(&image)]).succeeds();
        let mut client =
            Client::connect_to(&it.server.socket(), name, Mode::Structured).expect("a client");
        client.write(0, &[7; 1 << 20]).expect("a write");
        let target = it.scratch.join(&format!("{name}.moved"));
        let mut begin = it.export(&["move", name, text(&target), "--rate", "4K", "--detach"]);
        match name {
            "e" => {
                let said = begin.fails();
                assert!(said.contains("4 disks are being moved already"), "{said}");
                it.export(&["move", "a", "--cancel"]).succeeds();
                begin.succeeds();
            }
            _ => _ = begin.succeeds(),
        }
    }
    it.server.stop();
}

#[test]
fn moves_and_replications_by_http_have_bounds_and_metrics() {
    nowait_testkit::needs!(require_tool("curl"));
    let it = Controlled::start();
    it.server.connect().write(0, &[7; 1 << 20]).expect("a write");
    let target = it.scratch.join("images/moved");
    let (path, replicate) = ("/v1/exports/@0/move", "/v1/exports/@0/replicate");
    for place in [path, replicate] {
        it.refusal("GET", place, None, 404);
        it.refusal("DELETE", place, None, 404);
        it.refusal("POST", place, Some(json!({"target": target, "other": 1})), 400);
        it.refusal("POST", place, Some(json!({"target": target, "rate_bytes": 0})), 400);
    }
    for seconds in [0, 86_401] {
        let body = json!({"target": "nbd://h/", "every_seconds": seconds});
        it.refusal("POST", replicate, Some(body), 400);
    }
    for seconds in [1, 86_400] {
        let body = json!({"target": "nbd://h/", "every_seconds": seconds});
        it.refusal("POST", replicate, Some(body), 403);
    }
    let move_with =
        |pause: u64| json!({"target": target, "max_pause_ms": pause, "rate_bytes": 4096});
    for pause in [9, 60_001] {
        it.refusal("POST", path, Some(move_with(pause)), 400);
    }
    for pause in [10, 60_000] {
        let begun = it.json("POST", path, Some(move_with(pause)), 202);
        assert_eq!((&begun["state"], &begun["running"]), (&"copying".into(), &true.into()));
        it.refusal("POST", path, Some(move_with(pause)), 409);
        assert_eq!(it.json("GET", path, None, 200)["total_bytes"], 8 * MIB);
        let (_, metrics) = it.ask("GET", "/metrics", None);
        assert!(metrics.contains("nowait_move_running{export=\"\"} 1"), "{metrics}");
        assert_eq!(it.json("DELETE", path, None, 200)["state"], "cancelled");
        it.refusal("DELETE", path, None, 404);
        assert_eq!(it.json("GET", path, None, 200)["running"], false);
    }
    it.server.stop();
}
