//! Disks that move to another place while clients write to them.
//!
//! Invariant: a model has what the clients have written; the disk that is served has it at every moment, and so has the
//! new place after the exchange.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nowait_testkit::nbd::{Client, Command as Request};
use nowait_testkit::{Finished, Random, Running, SetOnDrop, require_tool, seed, tool, wait_until};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{MIB, NOWAIT, Scratch, Server, accepted, text};

const SIZE: u64 = 16 * MIB;
/// A pause that suffices under any load.
const LONG_PAUSE: [&str; 2] = ["--max-pause", "60000"];

/// A server of an image of 16 MiB, `disk`, in a directory that it may make images in.
struct Served {
    server: Server,
    control: PathBuf,
    scratch: Scratch,
}

impl Served {
    fn start(format: &str, extra: &[&str]) -> Self {
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

    fn export(&self, arguments: &[&str]) -> Command {
        let mut command = tool(NOWAIT);
        command.arg("export").args(arguments).arg("--control").arg(&self.control);
        command
    }

    /// Moves the disk and waits for the end.
    fn move_to(&self, target: &str, more: &[&str]) -> Value {
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
    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.scratch.path()).expect("a directory");
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
        let names = entries.map(|entry| name(entry).to_string_lossy().into_owned());
        let mut names: Vec<_> = names.filter(|name| name != "control").collect();
        names.sort();
        names
    }
}

/// What the disk of `image` has.
fn contents(scratch: &Scratch, image: &Path, format: &str) -> Vec<u8> {
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

/// Random bytes in a part of the disk, and its model.
fn filled(it: &Served) -> Vec<u8> {
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
        // Nobody holds the image before.
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
