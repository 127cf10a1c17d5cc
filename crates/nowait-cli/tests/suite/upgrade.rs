//! The program of a running server is exchanged while clients use it.
//!
//! Invariant: a client whose connection is handed over sees a pause and nothing else; an upgrade that
//! fails leaves the old program as it was.

use std::fs;
use std::fs::Permissions;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::{
    Finished, SetOnDrop, ends_with_program, no_child_starts, require_tool, tool, wait_until,
};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use crate::common::{MIB, NOWAIT, Scratch, Server, accepted, text};
use nowait_testkit::nbd::load::{bytes, load, verified_by_fio};

/// A server that is upgraded, and the process that serves now.
pub(crate) struct Upgraded {
    /// The first process.
    server: Server,
    control: PathBuf,
    serving: Option<Pid>,
    scratch: Scratch,
}

/// A child of `process`: of a server it is the launcher.
pub(crate) fn child_of(process: Pid) -> Pid {
    let own = format!(" {} ", process.as_raw_nonzero());
    let all = fs::read_dir("/proc").expect("processes").flatten();
    let is_child = |stat: &String| {
        let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        after_name.get(1..).is_some_and(|rest| rest.starts_with(&own))
    };
    let mut children = all.filter_map(|process| {
        let stat = fs::read_to_string(process.path().join("stat")).ok().filter(is_child)?;
        stat.split(' ').next()?.parse().ok().and_then(Pid::from_raw)
    });
    children.next().expect("a child of the server")
}

impl Upgraded {
    pub(crate) fn start(format: &str, extra: &[&str]) -> Self {
        Self::start_under(&[], format, extra)
    }

    /// Starts with the command prefix `wrapper`, which must end in exec.
    fn start_under(wrapper: &[&str], format: &str, extra: &[&str]) -> Self {
        let scratch = Scratch::new();
        let (image, control) = (scratch.join("disk"), scratch.join("control"));
        accepted(&["create", text(&image), "64M", "--format", format]);
        let address = format!("unix:{}", control.display());
        let arguments = [&["--control", &address, "--format", format, "--verbose"], extra].concat();
        let server = Server::start_under(wrapper, &image, &arguments);
        Self { server, control, serving: None, scratch }
    }

    /// `server`, with its control socket at `control` and its files in `scratch`.
    pub(crate) fn of(server: Server, control: &Path, scratch: Scratch) -> Self {
        Self { server, control: control.to_owned(), serving: None, scratch }
    }

    /// A server in front of the one at `uri`.
    pub(crate) fn in_front_of(uri: &str) -> Self {
        let scratch = Scratch::new();
        let control = scratch.join("control");
        let address = format!("unix:{}", control.display());
        let server = Server::start(Path::new(uri), &["--control", &address, "--verbose"]);
        Self { server, control, serving: None, scratch }
    }

    /// A new client.
    pub(crate) fn connect(&self) -> Client {
        self.server.connect()
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.scratch.join("disk")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.server.socket()
    }

    pub(crate) fn control(&self) -> &Path {
        &self.control
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = tool(NOWAIT);
        command.args(arguments).arg("--control").arg(&self.control);
        command
    }

    /// Upgrades; returns what the command says.
    pub(crate) fn upgrade(&mut self) -> Value {
        let report = self.command(&["upgrade", "--json"]).succeeds();
        let report: Value = serde_json::from_str(&report).expect("JSON");
        let before = self.process();
        self.serving = report["pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32));
        self.serving.into_iter().for_each(ends_with_program);
        assert_ne!(self.process(), before);
        report
    }

    /// Clients of the server.
    pub(crate) fn connections(&self) -> u64 {
        let status = self.command(&["status", "--json"]).succeeds();
        let status: Value = serde_json::from_str(&status).expect("JSON");
        status[0]["server"]["connections"].as_u64().expect("a number")
    }

    /// The process that starts the new program.
    fn launcher(&self) -> Pid {
        child_of(self.process())
    }

    /// The process that serves.
    pub(crate) fn process(&self) -> Pid {
        self.serving.unwrap_or_else(|| Pid::from_raw(self.server.pid() as i32).expect("a number"))
    }

    /// Ends the server as a service manager does; everything it made is removed.
    pub(crate) fn stop(mut self) -> (Scratch, PathBuf) {
        assert!(self.server.wait().success(), "{}", self.server.log());
        let process = self.serving.take().expect("it was upgraded");
        kill_process(process, Signal::TERM).expect("a server to end");
        wait_until("the new server's end", || !runs(process));
        let log = self.server.log();
        assert!(log.contains("stopped, everything is flushed"), "{log}");
        assert!(!self.server.socket().exists() && !self.control.exists(), "a socket is left");
        let image = self.image();
        (std::mem::replace(&mut self.scratch, Scratch::new()), image)
    }
}

impl Drop for Upgraded {
    fn drop(&mut self) {
        if let Some(process) = self.serving {
            // It may have ended.
            let _ = kill_process(process, Signal::KILL);
        }
    }
}

/// Whether `process` has not ended. It is not a child of this one, so nothing is left to wait for.
pub(crate) fn runs(process: Pid) -> bool {
    let state = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
    test_kill_process(process).is_ok() && !state.is_ok_and(|state| state.contains(") Z "))
}

#[test]
fn clients_under_load_go_on_through_upgrades_of_their_server() {
    for format in ["raw", "qcow2"] {
        let mut it = Upgraded::start(format, &[]);
        let mut idle = it.server.connect();
        idle.write(60 * MIB, &bytes(5, 4096)).expect("a write");
        let mut clients =
            Mode::ALL.map(|mode| Client::connect(&it.server.socket(), mode).expect("a connection"));
        let over = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let regions = clients.iter_mut().zip([0, 16 * MIB, 32 * MIB]);
            let loads: Vec<_> = regions
                .map(|(client, region)| scope.spawn(move || load(client, region, over)))
                .collect();
            let loading = SetOnDrop(over);
            for _ in 0..3 {
                let report = it.upgrade();
                assert_eq!((&report["connections"], &report["closed"]), (&4.into(), &0.into()));
                it.server.connect().read(0, 512).expect("a new client is served");
                wait_until("the new client has left", || it.connections() == 4);
            }
            drop(loading);
            loads.into_iter().for_each(|load| assert!(load.join().expect("no error") > 0));
        });
        assert!(idle.read(60 * MIB, 4096).expect("bytes") == bytes(5, 4096));
        // No other process gets in, as at no moment of the upgrades.
        let refused = tool(NOWAIT).args(["serve", text(&it.image())]).fails();
        assert!(refused.contains("open for writing"), "{refused}");
        drop((idle, clients));
        let (_scratch, image) = it.stop();
        if format == "qcow2" {
            accepted(&["check", text(&image)]);
        }
    }
}

#[test]
fn what_fio_verifies_is_whole_through_three_upgrades() {
    nowait_testkit::needs!(require_tool("fio"));
    let mut it = Upgraded::start("qcow2", &[]);
    let mut fio = verified_by_fio(it.scratch.path(), it.server.uri());
    std::thread::scope(|scope| {
        let load = scope.spawn(|| fio.succeeds());
        for _ in 0..3 {
            it.upgrade();
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        load.join().expect("fio finds no difference");
    });
    let (_scratch, image) = it.stop();
    accepted(&["check", text(&image)]);
}

#[test]
fn an_upgrade_that_fails_leaves_the_server_and_its_clients_as_they_were() {
    // Another program than its own is started only by a server that is not confined.
    let it = Upgraded::start("raw", &["--sandbox", "off"]);
    let mut client = it.server.connect();
    client.write(0, &bytes(1, 4096)).expect("a write");
    let works = |client: &mut Client| {
        assert!(client.read(0, 4096).expect("bytes") == bytes(1, 4096));
        it.server.connect().read(0, 512).expect("a new client is served");
    };
    let refused = |binary: &Path, why: &str| {
        let said = it.command(&["upgrade", text(binary)]).fails();
        assert!(said.contains(why) && said.trim().lines().count() == 1, "{said}");
    };
    refused(&it.scratch.join("missing"), "No such file or directory");
    refused(Path::new("/bin/true"), "it has exited");
    works(&mut client);
    // A file that is not the one that is served has its name.
    let (image, moved) = (it.image(), it.scratch.join("moved"));
    fs::rename(&image, &moved).expect("a new name");
    accepted(&["create", text(&image), "64M"]);
    let said = it.command(&["upgrade"]).fails();
    assert!(said.contains("another file has taken its place"), "{said}");
    works(&mut client);
    let alone = no_child_starts();
    fs::rename(&moved, &image).expect("its name again");
    drop(alone);
    let said = tool(NOWAIT).args(["serve", text(&image)]).fails();
    assert!(said.contains("open for writing"), "it is not locked any more: {said}");
    works(&mut client);
    drop(client);
    it.server.terminate();
    wait_until("its end", || !runs(it.process()));
}

#[test]
fn a_confined_server_starts_only_its_own_program() {
    let it = Upgraded::start("raw", &[]);
    let said = it.command(&["upgrade", "/bin/true"]).fails();
    assert!(said.contains("takes its new program only at"), "{said}");
    it.server.connect().read(0, 512).expect("it goes on");
}

/// Whether the vhost-user device at `socket` offers VIRTIO_BLK_F_RO.
fn offers_read_only(socket: &Path) -> bool {
    let mut vmm = UnixStream::connect(socket).expect("a socket");
    let get_features = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    vmm.write_all(&get_features).expect("a question");
    let mut answer = [0; 20];
    vmm.read_exact(&mut answer).expect("an answer");
    answer[12] & 1 << 5 != 0
}

#[test]
fn what_was_changed_and_added_stays_and_the_pid_file_names_the_new_process() {
    let scratch = Scratch::new();
    let pid_file = scratch.join("pid");
    let (more, allowed) = (scratch.join("more.qcow2"), text(scratch.path()));
    accepted(&["create", text(&more), "4M"]);
    let options = ["--allow-dir", allowed, "--pid-file", text(&pid_file), "--description", "first"];
    let mut it = Upgraded::start("raw", &options);
    let socket = scratch.join("machines");
    let add = ["export", "add", "more", text(&more), "--read-only", "--vhost-user", text(&socket)];
    it.command(&add).succeeds();
    it.command(&["export", "limit", "more", "--limit-iops", "5000"]).succeeds();
    let list = |it: &Upgraded| {
        let told = it.command(&["export", "list", "--json"]).succeeds();
        let mut all: Value = serde_json::from_str(&told).expect("JSON");
        for export in all.as_array_mut().expect("a list") {
            let export = export.as_object_mut().expect("an export");
            export.retain(|field, _| {
                !["frontends", "mechanisms", "members", "in_flight"].contains(&&**field)
            });
        }
        all
    };
    let before = list(&it);
    it.upgrade();
    assert_eq!(list(&it), before);
    let written = fs::read_to_string(&pid_file).expect("a PID file");
    assert_eq!(written.trim(), it.process().as_raw_nonzero().to_string());
    let mut client = Client::connect_to(&it.server.socket(), "more", Mode::Simple).expect("served");
    client.read(0, 4096).expect("zeros");
    drop(client);
    assert!(offers_read_only(&socket), "virtual machines");
    it.stop();
    assert!(!socket.exists(), "the socket is left");
    assert!(!pid_file.exists(), "the PID file is left");
}

/// Few descriptors at first, and many on demand.
const LOW_LIMIT: [&str; 2] = ["prlimit", "--nofile=64:4096"];

#[test]
fn more_images_and_connections_than_the_soft_limit_of_descriptors_are_opened_and_handed_over() {
    const IMAGES: usize = 40;
    const CLIENTS: usize = 100;
    nowait_testkit::needs!(require_tool("prlimit"));
    let scratch = Scratch::new();
    let images: Vec<String> = (0..IMAGES)
        .map(|n| format!("e{n}={}", text(&scratch.sparse(&format!("disk{n}"), MIB))))
        .collect();
    let images: Vec<&str> = images.iter().map(String::as_str).collect();
    let mut it = Upgraded::start_under(&LOW_LIMIT, "raw", &images);
    assert!(it.server.descriptors() > 64, "the images alone are more than the limit");
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| it.connect()).collect();
    for _ in 0..2 {
        let report = it.upgrade();
        assert_eq!((&report["connections"], &report["closed"]), (&CLIENTS.into(), &0.into()));
        clients.iter_mut().for_each(|client| drop(client.read(0, 512).expect("a read")));
    }
    drop(clients);
    it.stop();
}

#[test]
fn a_program_that_is_started_has_the_limit_of_descriptors_that_the_server_was_started_with() {
    nowait_testkit::needs!(require_tool("prlimit"));
    let it = Upgraded::start_under(&LOW_LIMIT, "raw", &["--sandbox", "off"]);
    let (program, told) = (it.scratch.join("program"), it.scratch.join("told"));
    let alone = no_child_starts();
    let script = format!("#!/bin/sh\nulimit -Sn > {0}; ulimit -Hn >> {0}\n", text(&told));
    fs::write(&program, script).expect("a program");
    fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("a program");
    drop(alone);
    it.command(&["upgrade", text(&program)]).fails();
    assert_eq!(fs::read_to_string(&told).expect("what it has"), "64\n4096\n");
    it.connect().read(0, 512).expect("it goes on");
}

#[test]
fn a_launcher_that_has_ended_leaves_no_zombie_and_is_told_of_or_replaced() {
    for sandbox in ["auto", "off"] {
        let mut it = Upgraded::start("raw", &["--sandbox", sandbox]);
        let mut client = it.connect();
        let launcher = it.launcher();
        kill_process(launcher, Signal::KILL).expect("a launcher");
        let left = PathBuf::from(format!("/proc/{}", launcher.as_raw_nonzero()));
        wait_until("the end of the launcher", || !left.exists());
        let status = it.command(&["status"]).succeeds();
        match sandbox {
            "off" => {
                assert!(!status.contains("warning"), "{status}");
                it.upgrade();
            }
            _ => {
                assert!(status.contains("warning: the process that starts the new"), "{status}");
                let said = it.command(&["upgrade"]).fails();
                assert!(said.contains("has exited (restart the server instead)"), "{said}");
                assert_eq!(said.trim().lines().count(), 1, "{said}");
            }
        }
        client.read(0, 512).expect("the server serves");
    }
}

#[test]
fn an_upgraded_server_that_ends_with_its_last_client_leaves_the_sockets_to_the_one_that_serves() {
    let mut it = Upgraded::start("raw", &["--exit-with-last-client"]);
    let mut client = it.connect();
    client.write(0, &bytes(3, 4096)).expect("a write");
    for _ in 0..3 {
        it.upgrade();
        // The old process has ended, and its only connection with it.
        it.command(&["status"]).succeeds();
        assert!(client.read(0, 4096).expect("bytes") == bytes(3, 4096));
    }
    let (process, control) = (it.process(), it.control().to_owned());
    drop(client);
    wait_until("the end with the last client", || !runs(process));
    assert!(!control.exists() && !it.socket().exists(), "a socket is left");
}

#[test]
fn a_part_of_a_message_of_a_vmm_holds_up_no_upgrade() {
    let scratch = Scratch::new();
    let socket = scratch.join("machines");
    let mut it =
        Upgraded::start("raw", &["--vhost-user", text(&socket), "--nbd", "tcp:127.0.0.1:0"]);
    for _ in 0..2 {
        let mut vmm = UnixStream::connect(&socket).expect("a socket");
        // Five bytes of the twelve of a header.
        vmm.write_all(&[1, 0, 0, 0, 1]).expect("a part of a message");
        it.upgrade();
        assert_eq!(vmm.read(&mut [0; 20]).unwrap_or(0), 0, "an answer to a part of a message");
        assert!(!offers_read_only(&socket), "virtual machines are served");
    }
    it.command(&["status"]).succeeds();
}
