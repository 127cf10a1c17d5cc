//! The servers as programs: detection, command lines, start and stop.
//!
//! Invariant: when a [`Server`] is dropped its process has ended and the file is free again. All
//! servers get an image of the same format, the conditions of the table, a socket of this host,
//! and otherwise their defaults.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{io, thread};

use clap::ValueEnum;
use nowait_nbd::Address;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::address;
use crate::certificates::Certificates;
use crate::cpus::Placement;
use crate::error::Error;
use crate::image_kind::ImageKind;
use crate::machine::Machine;
use crate::other_programs;
use crate::test_file::{Access, Target};
use crate::workload::{Caching, Conditions, Transport};

/// The longest time that a server may take to start or to stop.
const TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// The kernel releases the io_uring of a killed process, and closes the files registered there,
/// some time after the process has ended; until then the file is still locked for the next server.
const RELEASE_DELAY: Duration = Duration::from_millis(500);

/// The servers that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ServerKind {
    /// The server of this project.
    Nowait,
    /// qemu-nbd.
    QemuNbd,
    /// qemu-storage-daemon.
    QemuStorageDaemon,
    /// nbdkit with its file plugin.
    Nbdkit,
}

impl ServerKind {
    /// All servers, in the order of the tables.
    pub const ALL: [ServerKind; 4] = [
        ServerKind::Nowait,
        ServerKind::QemuNbd,
        ServerKind::QemuStorageDaemon,
        ServerKind::Nbdkit,
    ];

    /// The name of its program.
    pub fn name(self) -> &'static str {
        match self {
            ServerKind::Nowait => "nowait",
            ServerKind::QemuNbd => "qemu-nbd",
            ServerKind::QemuStorageDaemon => "qemu-storage-daemon",
            ServerKind::Nbdkit => "nbdkit",
        }
    }

    /// Whether it supports the caching mode `caching`. The file plugin of nbdkit has no direct I/O:
    /// its `cache=none` goes through the page cache and drops the pages afterwards.
    pub fn can(self, caching: Caching) -> bool {
        (self, caching) != (ServerKind::Nbdkit, Caching::Direct)
    }

    /// Whether it serves over `transport`.
    pub fn has(self, transport: Transport) -> bool {
        let vhost_user = [ServerKind::Nowait, ServerKind::QemuStorageDaemon];
        transport != Transport::VhostUser || vhost_user.contains(&self)
    }

    /// The name of its export.
    pub(crate) fn export(self) -> &'static str {
        match self {
            ServerKind::QemuStorageDaemon => "f",
            _ => "",
        }
    }

    /// The arguments that the program is started with.
    pub(crate) fn arguments(
        self,
        terms: Conditions,
        access: Access,
        server_files: ServerFiles<'_>,
    ) -> Vec<OsString> {
        let ServerFiles { file, image, address, queues, certificates } = server_files;
        let vhost_user = terms.transport == Transport::VhostUser;
        let queues = queues.to_string();
        let (socket, port) = match address {
            Address::Unix(path) => (path.as_os_str().as_bytes(), None),
            Address::Tcp { port, .. } => (&b""[..], Some(port.to_string())),
        };
        let (direct, read_only) = (terms.caching == Caching::Direct, access == Access::ReadOnly);
        let (tls, raw) = (terms.transport == Transport::Tls, image == ImageKind::Raw);
        let on = |is_on: bool| if is_on { "on" } else { "off" };
        let conditions = [
            ("r", read_only),
            ("t", tls),
            ("n", !vhost_user),
            ("v", vhost_user),
            ("u", port.is_none() && !vhost_user),
            ("p", port.is_some()),
            ("d", direct),
            ("c", !direct),
            ("q", !raw),
        ];
        let values = [
            ("file", file.as_os_str().as_bytes()),
            ("format", image.format().as_bytes()),
            ("socket", socket),
            ("queues", queues.as_bytes()),
            ("port", port.as_deref().unwrap_or_default().as_bytes()),
            ("certificates", certificates.as_os_str().as_bytes()),
            ("direct", on(direct).as_bytes()),
            ("read_only", on(read_only).as_bytes()),
            ("writable", on(!read_only).as_bytes()),
            // The exported node is named f.
            ("node", if raw { b"f" } else { b"file" }),
            ("tls", if tls { b",tls-creds=t" } else { b"" }),
        ];
        let words = self.command_line().split_ascii_whitespace();
        let chosen = words.filter_map(|word| match word.split_once('?') {
            Some((condition, word)) => conditions.contains(&(condition, true)).then_some(word),
            None => Some(word),
        });
        chosen.map(|word| filled_in(word, &values)).collect()
    }

    /// The arguments as words. One that begins with a letter and `?` is only for tables that are
    /// read-only (r), NBD (n) over TLS (t), a Unix socket (u) or a port (p), vhost-user (v), with direct I/O (d) or the page
    /// cache (c), or of qcow2 images (q). Names in braces are filled in, with commas doubled if the
    /// name ends with one.
    fn command_line(self) -> &'static str {
        match self {
            ServerKind::Nowait => {
                "serve --format {format} --direct {direct} r?--read-only t?--tls-certs \
                 t?{certificates} n?--nbd u?unix:{socket} p?tcp:127.0.0.1:{port} \
                 v?--vhost-user v?{socket} {file}"
            }
            ServerKind::QemuNbd => {
                "--aio=io_uring d?--cache=none c?--cache=writeback -f {format} -t -e 64 r?-r \
                 t?--object t?tls-creds-x509,id=t,endpoint=server,verify-peer=off,dir={certificates,} \
                 t?--tls-creds t?t u?-k u?{socket} p?-b p?127.0.0.1 p?-p p?{port} {file}"
            }
            ServerKind::QemuStorageDaemon => {
                "t?--object t?tls-creds-x509,id=t,endpoint=server,verify-peer=off,dir={certificates,} \
                 --blockdev driver=file,node-name={node},aio=io_uring,cache.direct={direct},\
                 read-only={read_only},filename={file,} \
                 q?--blockdev q?driver={format},node-name=f,file={node},cache.direct={direct},\
                 read-only={read_only} n?--nbd-server u?addr.type=unix,addr.path={socket,}{tls} \
                 p?addr.type=inet,addr.host=127.0.0.1,addr.port={port}{tls} \
                 --export n?type=nbd,id=e,node-name=f,name=f,writable={writable} \
                 v?type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={socket,},\
                 num-queues={queues},writable={writable}"
            }
            ServerKind::Nbdkit => {
                "-f r?-r t?--tls=require t?--tls-certificates={certificates} u?-U u?{socket} \
                 p?-i p?127.0.0.1 p?-p p?{port} file file={file} d?cache=none"
            }
        }
    }
}

/// `word` with each name in braces replaced by its value. With a comma behind the name, commas in
/// the value are doubled, because a single one ends a value in an option list of QEMU.
fn filled_in(word: &str, values: &[(&str, &[u8])]) -> OsString {
    let mut bytes = Vec::new();
    let mut rest = word;
    while let Some((before, behind)) = rest.split_once('{') {
        let (name, after) = behind.split_once('}').unwrap_or((behind, ""));
        bytes.extend(before.as_bytes());
        let plain = name.trim_end_matches(',');
        let value = values.iter().find(|(name, _)| *name == plain).map_or(&b""[..], |it| it.1);
        for &byte in value {
            let count = if byte == b',' && name.ends_with(',') { 2 } else { 1 };
            bytes.extend(std::iter::repeat_n(byte, count));
        }
        rest = after;
    }
    bytes.extend(rest.as_bytes());
    OsString::from_vec(bytes)
}

/// The image, the address and the certificates that a server is started with.
#[derive(Clone, Copy)]
pub(crate) struct ServerFiles<'a> {
    pub(crate) file: &'a Path,
    pub(crate) image: ImageKind,
    /// The address to listen on.
    pub(crate) address: &'a Address,
    /// The queues of the device, for vhost-user.
    pub(crate) queues: usize,
    /// The directory with its certificate and key, for TLS.
    pub(crate) certificates: &'a Path,
}

/// An installed server.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) kind: ServerKind,
    path: PathBuf,
    /// Its name and version as it reports them.
    pub(crate) version: String,
}

impl Program {
    /// Looks for `kind` at `path` if given, otherwise in PATH, and queries its version.
    pub(crate) fn find(kind: ServerKind, path: Option<&Path>) -> io::Result<Program> {
        let path = path.unwrap_or(Path::new(kind.name())).to_owned();
        let version = other_programs::version(&path)?;
        Ok(Program { kind, path, version })
    }

    /// The program without arguments.
    pub(crate) fn command(&self) -> Command {
        Command::new(&self.path)
    }

    /// A program for tests that start none.
    #[cfg(test)]
    pub(crate) fn example(kind: ServerKind) -> Program {
        Program { kind, path: PathBuf::new(), version: String::new() }
    }
}

/// The servers that are measured.
pub(crate) struct Servers {
    pub(crate) programs: Vec<Program>,
    /// Requested servers that are not installed.
    missing: Vec<&'static str>,
}

impl Servers {
    /// Looks for `kinds`; nowait is at the path `nowait`, or left out.
    pub(crate) fn find(kinds: &[ServerKind], nowait: Option<&Path>) -> Result<Servers, Error> {
        let mut servers = Servers { programs: Vec::new(), missing: Vec::new() };
        for &kind in kinds {
            let path = nowait.filter(|_| kind == ServerKind::Nowait);
            if kind == ServerKind::Nowait && path.is_none() {
                continue;
            }
            match (Program::find(kind, path), path) {
                (Ok(program), _) => servers.programs.push(program),
                (Err(e), Some(path)) => {
                    let problem = format!("does not run: {e}");
                    return Err(Error::File { path: path.to_owned(), problem });
                }
                (Err(_), None) => servers.missing.push(kind.name()),
            }
        }
        if servers.programs.is_empty() { Err(Error::NoServer) } else { Ok(servers) }
    }

    /// The lines about them in a report.
    pub(crate) fn lines(&self) -> String {
        let versions = self.programs.iter().map(|program| format!("{}\n", program.version));
        versions.chain(self.missing.iter().map(|name| format!("{name}: not installed\n"))).collect()
    }

    /// The part of a report's object that names them and `machine`.
    pub(crate) fn to_json(&self, machine: &Machine, placement: Placement) -> Value {
        let server = |it: &Program| json!({ "name": it.kind.name(), "version": it.version });
        let mut machine = machine.to_json();
        let (client, server_cpu) = match placement {
            Placement::Apart { client, server, .. } => (Some(client), Some(server)),
            Placement::Shared => (None, None),
        };
        machine["client_cpu"] = client.into();
        machine["server_cpu"] = server_cpu.into();
        let servers: Vec<Value> = self.programs.iter().map(server).collect();
        json!({ "machine": machine, "servers": servers, "not_installed": self.missing })
    }
}

/// A running server; stopped when dropped.
pub(crate) struct Server {
    child: Child,
    address: Address,
    log: PathBuf,
}

impl Server {
    /// Starts `program` on `target`, with its socket and its messages in `directory`.
    ///
    /// It runs on the processor that the calling thread is on, and must be stopped before that thread ends:
    /// nbdkit asks the kernel for a signal (PR_SET_PDEATHSIG) when its parent is gone, which is this thread.
    pub(crate) fn start(
        program: &Program,
        target: &Target,
        terms: Conditions,
        queues: usize,
        (certificates, directory): (&Certificates, &Path),
    ) -> io::Result<Server> {
        let address = match terms.transport {
            Transport::Tcp => address::free_port()?,
            Transport::Plain | Transport::Tls | Transport::VhostUser => {
                Address::Unix(directory.join("socket"))
            }
        };
        let server_files = ServerFiles {
            file: &target.path,
            image: target.image,
            address: &address,
            queues,
            certificates: certificates.directory(),
        };
        let arguments = program.kind.arguments(terms, target.access, server_files);
        Server::spawn(program.command().args(arguments), address, directory)
    }

    /// Starts `nowait serve` for raw images with these `arguments`, with its socket and its messages in `directory`.
    pub(crate) fn of_nowait(
        nowait: &Path,
        arguments: impl IntoIterator<Item = OsString>,
        directory: &Path,
    ) -> io::Result<Server> {
        let socket = directory.join("socket");
        let mut command = Command::new(nowait);
        command.args(["serve", "--format", "raw", "--nbd"]);
        command.arg(format!("unix:{}", socket.display())).args(arguments);
        Server::spawn(&mut command, Address::Unix(socket), directory)
    }

    /// Starts `command`, which listens on `address`; its messages go to `directory`.
    pub(crate) fn spawn(
        command: &mut Command,
        address: Address,
        directory: &Path,
    ) -> io::Result<Server> {
        let log = directory.join("messages");
        if let Address::Unix(socket) = &address {
            remove_if_there(socket)?;
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            // A separate process group, so that only this process receives Ctrl-C from a terminal.
            .process_group(0);
        let child = command.spawn()?;
        Ok(Server { child, address, log })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Calls `connect` with the address until the server listens there.
    pub(crate) fn when_ready<T>(
        &mut self,
        mut connect: impl FnMut(&Address) -> io::Result<T>,
    ) -> io::Result<T> {
        let begin = Instant::now();
        loop {
            match connect(&self.address) {
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                    ) => {}
                outcome => return outcome,
            }
            if let Some(status) = self.child.try_wait()? {
                return Err(io::Error::other(format!("did not start: {status}")));
            }
            if begin.elapsed() > TIMEOUT {
                return Err(io::Error::other("did not listen in time"));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Sends SIGTERM and waits until the server has ended.
    pub(crate) fn stop(mut self) -> io::Result<()> {
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            kill_process(pid, Signal::TERM)?;
        }
        let begin = Instant::now();
        while self.child.try_wait()?.is_none() {
            if begin.elapsed() > TIMEOUT {
                return Err(io::Error::other("did not end when asked to"));
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// The last line of its output, for an error message; empty if there is none.
    pub(crate) fn last_message(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        other_programs::last_line(&log).map(|line| format!(": {line}")).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Ok(Some(_)) = self.child.try_wait() {
            return;
        }
        // Both fail only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        thread::sleep(RELEASE_DELAY);
    }
}

pub(crate) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: u16 = 4321;

    fn arguments(kind: ServerKind, terms: Conditions, access: Access) -> Vec<OsString> {
        let address = match terms.transport {
            Transport::Tcp => address::loopback(PORT),
            Transport::Plain | Transport::Tls | Transport::VhostUser => Address::Unix("/s".into()),
        };
        let [file, certificates] = ["/f", "/c"].map(Path::new);
        let server_files =
            ServerFiles { file, image: ImageKind::Raw, address: &address, queues: 2, certificates };
        kind.arguments(terms, access, server_files)
    }

    #[test]
    fn each_server_gets_the_address_the_certificates_and_the_access_of_its_table() {
        let read_only = ["--read-only", "-r", "writable=off", "-r"];
        for (kind, read_only) in ServerKind::ALL.into_iter().zip(read_only) {
            for terms in Conditions::ALL.into_iter().filter(|terms| kind.has(terms.transport)) {
                let given = |access| {
                    let words = arguments(kind, terms, access).join(" ".as_ref());
                    format!(" {} ", words.to_string_lossy())
                };
                let said = given(Access::ReadOnly);
                let has = |text: &str| said.contains(text);
                let vhost_user = terms.transport == Transport::VhostUser;
                let tcp = terms.transport == Transport::Tcp;
                assert_eq!((has(&PORT.to_string()), has("/s")), (tcp, !tcp), "{said}");
                assert_eq!(has("/c"), terms.transport == Transport::Tls, "{said}");
                if vhost_user {
                    let words = match kind {
                        ServerKind::Nowait => "--vhost-user /s /f",
                        _ => {
                            "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path=/s,num-queues=2"
                        }
                    };
                    assert!(has(words) && !has("nbd"), "{said}");
                }
                assert!(has(&format!("{read_only} ")), "{said}");
                assert!(!given(Access::ReadWrite).contains(&format!("{read_only} ")), "{said}");
            }
        }
    }

    #[test]
    fn a_comma_in_a_path_does_not_end_qemus_option() {
        let values = [("file", &b"/a,b/c"[..])];
        assert_eq!(filled_in("x={file,},y={file}", &values), "x=/a,,b/c,y=/a,b/c");
    }

    #[test]
    fn a_missing_program_is_not_found() {
        let missing = Program::find(ServerKind::Nowait, Some(Path::new("/nonexistent/nowait")));
        assert_eq!(missing.err().map(|e| e.kind()), Some(io::ErrorKind::NotFound));
    }
}
