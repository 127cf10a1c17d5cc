//! A disk whose dirty bitmaps are stored, as the server and QEMU tell of them.
//!
//! Invariant: what is stored is looked at only while no server has it open.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use nowait_testkit::nbd::{Mode, StatusClient};
use nowait_testkit::{require_tool, tool, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::common::{Finished, KIB, MIB, NOWAIT, Scratch, Server, accepted, text};

/// Bytes of the disk.
pub(crate) const SIZE: u64 = 256 * MIB;
/// The granularity of a bitmap without another one.
pub(crate) const USUAL: u64 = 64 * KIB;
/// Bytes of a region, which becomes dirty as a whole before its first write.
pub(crate) const REGION: u64 = 16 * MIB;
/// `qemu-img check`: leaked clusters, and nothing corrupt.
const LEAKS: i32 = 3;

/// An image that is served from time to time.
pub(crate) struct Stored {
    pub(crate) scratch: Scratch,
    pub(crate) image: PathBuf,
    /// The file with the bitmaps.
    pub(crate) stored: PathBuf,
    pub(crate) control: PathBuf,
}

impl Stored {
    pub(crate) fn new(options: &[&str]) -> Self {
        let scratch = Scratch::new();
        let image = scratch.join("disk.qcow2");
        let size = SIZE.to_string();
        accepted(&[&["create", text(&image), &size], options].concat());
        let (stored, control) = (image.clone(), scratch.join("control"));
        Self { scratch, image, stored, control }
    }

    /// A raw file, with its bitmaps beside it.
    pub(crate) fn raw() -> Self {
        let scratch = Scratch::new();
        let image = scratch.join("disk.img");
        accepted(&["create", text(&image), &SIZE.to_string()]);
        let (stored, control) = (scratch.join("disk.img.bitmaps.qcow2"), scratch.join("control"));
        Self { scratch, image, stored, control }
    }

    /// A disk of each kind.
    pub(crate) fn of_each_kind() -> [Self; 2] {
        [Self::new(&[]), Self::raw()]
    }

    pub(crate) fn is_raw(&self) -> bool {
        self.stored != self.image
    }

    pub(crate) fn serve(&self, extra: &[&str]) -> Server {
        let address = format!("unix:{}", self.control.display());
        let own = ["--control", &address, "--allow-dir", text(self.scratch.path())];
        Server::start(&self.image, &[&own, extra].concat())
    }

    pub(crate) fn kill(&self, mut server: Server) {
        server.signal(Signal::KILL);
        server.wait();
        std::fs::remove_file(server.socket()).expect("its socket");
        std::fs::remove_file(&self.control).expect("its control socket");
    }

    /// `nowait export backup ACTION` of the only export.
    pub(crate) fn backup(&self, action: &[&str]) {
        let control = ["--control", text(&self.control)];
        tool(NOWAIT).args(["export", "backup"]).args(action).args(control).succeeds();
    }

    /// `nowait export bitmap` with `arguments`.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = tool(NOWAIT);
        command.args(["export", "bitmap"]).args(arguments).arg("--control").arg(&self.control);
        command
    }

    pub(crate) fn change(&self, arguments: &[&str]) {
        self.command(arguments).succeeds();
    }

    pub(crate) fn listed(&self) -> Value {
        serde_json::from_str(&self.command(&["list", "", "--json"]).succeeds()).expect("JSON")
    }

    /// `qemu-img bitmap`, with the name of the image in the place of `@`.
    pub(crate) fn qemu_bitmap(&self, arguments: &[&str]) {
        let image = |argument: &&str| {
            if *argument == "@" { text(&self.stored) } else { argument }.to_owned()
        };
        tool("qemu-img").arg("bitmap").args(arguments.iter().map(image)).succeeds();
    }

    pub(crate) fn qemu_writes(&self, command: &str) {
        tool("qemu-io").args(["-f", "qcow2", "-c", command, text(&self.stored)]).succeeds();
    }

    pub(crate) fn qemu_checks(&self) {
        tool("qemu-img").args(["check", "-q", text(&self.stored)]).succeeds();
        self.checks();
        self.qemu_compares();
    }

    /// [`Stored::qemu_checks`] after kills, which may leave leaked clusters, but none that is corrupt.
    pub(crate) fn qemu_checks_after_kills(&self) {
        let mut check = tool("qemu-img");
        let check = check.args(["check", "-q", text(&self.stored)]).output().expect("a check");
        let status = check.status.code();
        assert!(status == Some(0) || status == Some(LEAKS), "{check:?}");
        self.qemu_compares();
    }

    /// QEMU finds the bytes of a raw disk through the file with its bitmaps, too.
    fn qemu_compares(&self) {
        if self.is_raw() {
            let compare = ["compare", "-q", "-f", "qcow2", "-F", "raw"];
            tool("qemu-img").args(compare).args([&self.stored, &self.image]).succeeds();
        }
    }

    /// `nowait check` of the file with the bitmaps.
    pub(crate) fn checks(&self) {
        match self.is_raw() {
            true => accepted(&["check", text(&self.stored), "--data-file", text(&self.image)]),
            false => accepted(&["check", text(&self.image)]),
        };
    }

    /// The flags of each bitmap as QEMU shows them.
    pub(crate) fn flags(&self) -> Vec<(String, Value)> {
        let info = tool("qemu-img").args(["info", "--output=json", text(&self.stored)]).succeeds();
        let info: Value = serde_json::from_str(&info).expect("JSON");
        let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().cloned();
        let each = bitmaps.unwrap_or_default().into_iter();
        each.map(|it| (it["name"].as_str().expect("a name").to_owned(), it["flags"].clone()))
            .collect()
    }

    /// The dirty granules that QEMU finds in bitmap `name`.
    pub(crate) fn dirty_in_qemu(&self, name: &str) -> Vec<u64> {
        let served = QemuNbd::start(&self.stored, name, &self.scratch.join("qemu"));
        dirty(&served.socket, name)
    }
}

/// `qemu-nbd` with a bitmap of an image.
pub(crate) struct QemuNbd {
    child: Child,
    socket: PathBuf,
}

impl QemuNbd {
    pub(crate) fn start(image: &Path, bitmap: &str, socket: &Path) -> Self {
        let _ = std::fs::remove_file(socket);
        let mut command = tool("qemu-nbd");
        command.args([
            "--read-only",
            "--persistent",
            "--shared=9",
            "--format=qcow2",
            "--bitmap",
            bitmap,
            "-k",
        ]);
        let child = command.arg(socket).arg(image).spawn().expect("qemu-nbd");
        wait_until("qemu-nbd's socket", || UnixStream::connect(socket).is_ok());
        Self { child, socket: socket.to_owned() }
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        // By the program that bounds its time, which passes it on.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

/// The dirty granules that a server tells of.
pub(crate) fn dirty(socket: &Path, name: &str) -> Vec<u64> {
    let query = format!("qemu:dirty-bitmap:{name}");
    let mut client = StatusClient::connect(socket, "", Mode::Structured, &[&query]);
    let all = client.dirty(name, SIZE, USUAL, 0);
    (0..all.len() as u64).filter(|at| all[*at as usize]).collect()
}

pub(crate) fn has_qemu() -> bool {
    ["qemu-img", "qemu-io", "qemu-nbd"].into_iter().all(require_tool)
}

pub(crate) fn info(name: &str, enabled: bool, granules: u64) -> Value {
    json!({"name": name, "granularity_bytes": USUAL, "enabled": enabled,
        "dirty_bytes": granules * USUAL, "persistent": true})
}

pub(crate) fn lost(name: &str) -> Value {
    json!({"name": name, "granularity_bytes": USUAL, "enabled": false, "dirty_bytes": 0,
        "persistent": true, "inconsistent": true})
}
