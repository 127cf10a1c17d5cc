//! The sandbox of a server: which threads it holds for, and what it forbids.
//!
//! Invariant: what is forbidden is tried, by a process that the server's own code has confined.
#![allow(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread;

use nowait_daemon::sandbox::{self, FileAccess, Mode as SandboxMode};
use nowait_testkit::nbd::{Client, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};

use crate::common::{
    Finished, MIB, NOWAIT, PYTHON, Scratch, Server, accepted, refusal_under, require_tool, text,
};
use crate::without_io_uring::without_call;

/// The tests that are the confined process, and what tells them so: a directory.
const CONFINED: &str = "sandbox::confined";
const CONNECTED: &str = "sandbox::connected";
const DIRECTORY: &str = "NOWAIT_TEST_CONFINED";
const LANDLOCK_CREATE_RULESET: &str = "444";

/// Whether this kernel has landlock in use.
fn has_landlock() -> bool {
    match fs::read_to_string("/sys/kernel/security/lsm") {
        Ok(modules) => modules.contains("landlock"),
        // Where the list cannot be read, the server is asked.
        Err(_) => {
            let scratch = Scratch::new();
            let server = Server::start(&scratch.sparse("disk.img", MIB), &["--verbose"]);
            let log = server.log();
            server.stop();
            log.contains("landlock") && !log.contains("no landlock")
        }
    }
}

/// The lines `key` of the status of each thread of `server`.
fn thread_status(server: &Server, key: &str) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{}/task", server.pid())).expect("a child");
    let status = threads.flatten().filter_map(|thread| {
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        Some(line.expect("the line").trim().to_owned())
    });
    status.collect()
}

#[test]
fn every_thread_of_a_server_is_confined_whenever_it_was_started() {
    let scratch = Scratch::new();
    // A qcow2 image has a thread from when it is opened.
    let image = scratch.join("disk.qcow2");
    Command::new(NOWAIT).arg("create").arg(&image).arg("64M").succeeds();
    let server = Server::start(&image, &["--queues", "2"]);
    let mut client = server.connect();
    client.write(1001, b"a worker allocates for this").expect("a write");
    let (filters, privileges) =
        (thread_status(&server, "Seccomp:"), thread_status(&server, "NoNewPrivs:"));
    assert!(filters.len() >= 5, "{filters:?}");
    assert!(filters.iter().all(|mode| mode == "2"), "{filters:?}");
    assert!(privileges.iter().all(|flag| flag == "1"), "{privileges:?}");
    drop(client);
    server.stop();
}

/// The nice values of the threads of `server`, by their names (proc_pid_stat(5), field 19).
fn nice_values(server: &Server) -> Vec<(String, i32)> {
    let threads = fs::read_dir(format!("/proc/{}/task", server.pid())).expect("a child");
    let value = threads.flatten().filter_map(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).ok()?;
        let (name, fields) = stat.split_once('(')?.1.rsplit_once(") ")?;
        Some((name.to_owned(), fields.split(' ').nth(16)?.parse().expect("a number")))
    });
    value.collect()
}

#[test]
fn only_the_thread_of_the_control_interface_has_a_lower_priority() {
    let scratch = Scratch::new();
    let (image, more) = (scratch.sparse("disk.img", MIB), scratch.sparse("more.img", MIB));
    let socket = scratch.join("control");
    let control = format!("unix:{}", socket.display());
    let directory = text(scratch.path());
    let server = Server::start(&image, &["--control", &control, "--allow-dir", directory]);
    // Its threads are started at a request of the control interface.
    accepted(&["export", "add", "more", text(&more), "--control", text(&socket)]);
    let mut client =
        Client::connect_to(&server.socket(), "more", Mode::Structured).expect("a server");
    client.write(0, b"it serves").expect("a write");
    let own = nice_values(&server).iter().find(|(name, _)| name == "nowait").expect("the first").1;
    let lower = (own + 10).min(19);
    let mut answering = 0;
    for (name, nice) in nice_values(&server) {
        // Others have the name, too, while they carry out a request.
        let is_it = name == "nowait-control" && nice == lower;
        assert!(is_it || nice == own, "{name} has {nice}");
        answering += usize::from(is_it);
    }
    assert_eq!(answering, 1);
    drop(client);
    server.stop();
}

#[test]
fn without_the_sandbox_no_thread_is_confined() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", MIB), &["--sandbox", "off"]);
    let filters = thread_status(&server, "Seccomp:");
    let own = fs::read_to_string("/proc/self/status").expect("own status");
    let own = own.lines().find_map(|line| line.strip_prefix("Seccomp:")).expect("the line");
    assert!(filters.iter().all(|mode| mode == own.trim()), "{filters:?}");
    server.stop();
}

#[test]
fn where_landlock_is_forbidden_a_server_says_so_and_a_required_sandbox_is_refused() {
    nowait_testkit::needs!(require_tool(PYTHON));
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let wrapper = without_call(LANDLOCK_CREATE_RULESET);
    let refusal = refusal_under(&wrapper, &["serve", text(&image), "--sandbox", "on"]);
    refusal.says(&["--sandbox", "landlock", "--sandbox off"]);
    let server = Server::start_under(&wrapper, &image, &["--verbose"]);
    assert!(server.log().contains("sandbox: no_new_privs, no landlock ("), "{}", server.log());
    assert!(thread_status(&server, "Seccomp:").iter().all(|mode| mode == "2"));
    server.stop();
}

#[test]
fn a_confined_process_has_its_files_and_nothing_else() {
    if !has_landlock() {
        crate::common::skip("this kernel has no landlock in use");
        return;
    }
    let scratch = Scratch::new();
    for directory in ["image", "backing", "allowed", "forbidden"] {
        fs::create_dir(scratch.join(directory)).expect("a directory");
        fs::write(scratch.join(directory).join("file"), "content").expect("a file");
    }
    in_another_process(CONFINED, &scratch);
}

/// Runs an ignored test in a process of its own.
fn in_another_process(test: &str, scratch: &Scratch) {
    let program = std::env::current_exe().expect("this test program");
    let output = Command::new(program)
        .args([test, "--exact", "--ignored", "--nocapture"])
        .env(DIRECTORY, scratch.path())
        .succeeds();
    assert!(output.contains("1 passed"), "{output}");
}

#[test]
fn a_server_of_remote_images_connects_by_tcp_to_their_ports_and_sends_nothing_else() {
    if !has_landlock() {
        crate::common::skip("this kernel has no landlock in use");
        return;
    }
    in_another_process(CONNECTED, &Scratch::new());
}

/// Not a test of its own: another one runs it, in a process that may be confined.
#[test]
#[ignore = "confines its process; another test runs it in one of its own"]
fn connected() {
    if std::env::var_os(DIRECTORY).is_none() {
        return;
    }
    let [allowed, other] = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").expect("a listener"));
    let address = |listener: &TcpListener| listener.local_addr().expect("an address");
    let mut files = FileAccess::default();
    files.connect(address(&allowed).port());
    sandbox::enter(SandboxMode::On, &files).expect("a sandbox");
    TcpStream::connect(address(&allowed)).expect("the port that is allowed");
    let refused = TcpStream::connect(address(&other)).expect_err("no other port");
    // From landlock's fourth version on.
    assert!([ErrorKind::PermissionDenied, ErrorKind::Unsupported].contains(&refused.kind()));
    has_not(UdpSocket::bind("127.0.0.1:0").expect_err("no datagram"));
    let mptcp = std::num::NonZero::new(libc::IPPROTO_MPTCP as u32);
    let mptcp = mptcp.map(rustix::net::Protocol::from_raw);
    let socket = |protocol| rustix::net::socket(AddressFamily::INET, SocketType::STREAM, protocol);
    has_not(socket(mptcp).expect_err("no protocol whose ports landlock does not know").into());
    let unconnected = socket(None).expect("a socket");
    let flags = rustix::net::SendFlags::from_bits_retain(libc::MSG_FASTOPEN as u32);
    let sent = rustix::net::sendto(&unconnected, b"data", flags, &address(&other));
    has_not(sent.expect_err("no data to an address").into());
}

/// Not a test of its own: [`a_confined_process_has_its_files_and_nothing_else`] runs it, in a process
/// that may be confined.
#[test]
#[ignore = "confines its process; another test runs it in one of its own"]
fn confined() {
    let Some(scratch) = std::env::var_os(DIRECTORY).map(PathBuf::from) else { return };
    let manager = UnixDatagram::bind(scratch.join("notify")).expect("a socket");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().expect("its address");
    let abstract_name = format!("nowait-test-{}", std::process::id());
    let other = SocketAddr::from_abstract_name(abstract_name).expect("an address");
    let abstract_listener = UnixListener::bind_addr(&other).expect("a listener");
    let has_ring = io_uring::IoUring::new(1).is_ok();
    if has_ring {
        connects_by_a_ring(&abstract_listener).expect("a connection before the sandbox");
    }
    let notify = UnixDatagram::unbound().expect("a socket for the service manager");
    notify.connect(scratch.join("notify")).expect("the service manager");
    let (go, waits) = channel();
    let before = {
        let scratch = scratch.clone();
        thread::spawn(move || {
            waits.recv().expect("the sandbox");
            tries_files(&scratch);
        })
    };
    // SAFETY: with this flag (LANDLOCK_CREATE_RULESET_VERSION) the call takes no memory.
    let landlock_version = unsafe { libc::syscall(444, 0, 0, 1) };
    let mut files = FileAccess::default();
    files.read("/proc/self");
    files.write(scratch.join("image"));
    files.read(scratch.join("backing"));
    files.change(scratch.join("allowed"));
    sandbox::enter(SandboxMode::On, &files).expect("a sandbox");

    tries_files(&scratch);
    go.send(()).expect("the thread");
    before.join().expect("a thread that was started before is confined, too");
    let other = scratch.clone();
    thread::spawn(move || tries_files(&other)).join().expect("a new thread is confined, too");
    tries_programs_and_sockets(&manager, &notify, address);
    tries_commands(&scratch, &notify);
    has_few_capabilities();
    // From Linux 6.12 on.
    if landlock_version >= 6 && has_ring {
        let refused = connects_by_a_ring(&abstract_listener).expect_err("no abstract socket");
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
    } else {
        nowait_testkit::say_skipped("no io_uring, or no scopes in this kernel's landlock");
    }
}

/// Each thread has no capabilities but to use the files of other users and to lock memory.
fn has_few_capabilities() {
    // CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER and CAP_IPC_LOCK (linux/capability.h).
    let kept = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 14;
    let threads = fs::read_dir("/proc/self/task").expect("the threads");
    for thread in threads.map(|thread| thread.expect("a thread").path()) {
        let status = fs::read_to_string(thread.join("status")).expect("its status");
        for name in ["CapInh:", "CapPrm:", "CapEff:"] {
            let bits = status.lines().find_map(|line| line.strip_prefix(name)).expect(name);
            let bits = u64::from_str_radix(bits.trim(), 16).expect("a number");
            assert_eq!(bits & !kept, 0, "{name} {bits:x} of {}", thread.display());
        }
    }
}

/// Connects to the abstract address of `listener` by io_uring, whose operations seccomp does not see.
fn connects_by_a_ring(listener: &UnixListener) -> io::Result<()> {
    let address = listener.local_addr().expect("an address");
    let name = address.as_abstract_name().expect("an abstract name");
    // SAFETY: all zeros are a valid value of this plain structure.
    let mut to: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    to.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in to.sun_path[1..].iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    let len = (size_of::<libc::sa_family_t>() + 1 + name.len()) as libc::socklen_t;
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
    let mut ring = io_uring::IoUring::new(1)?;
    let fd = io_uring::types::Fd(socket.as_raw_fd());
    let connect = io_uring::opcode::Connect::new(fd, (&raw const to).cast(), len).build();
    // SAFETY: the address lives until the operation has ended, which is awaited.
    unsafe { ring.submission().push(&connect) }.expect("room for an operation");
    ring.submit_and_wait(1)?;
    match ring.completion().next().expect("its end").result() {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// The process has not the system call that was made.
fn has_not(error: io::Error) {
    assert_eq!(error.raw_os_error(), Some(Errno::NOSYS.raw_os_error()), "{error}");
}

fn tries_files(scratch: &Path) {
    let file = |directory| scratch.join(directory).join("file");
    let refused = |error: io::Error| assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    let write = |path: PathBuf| OpenOptions::new().read(true).write(true).open(path);

    let mut image = write(file("image")).expect("the image is written");
    image.write_all(b"CONTENT").expect("a write");
    refused(File::create(scratch.join("image/new")).expect_err("no file is made beside the image"));
    refused(fs::remove_file(file("image")).expect_err("the image is not removed"));

    File::open(file("backing")).expect("a backing file is read");
    refused(write(file("backing")).expect_err("a backing file is not written"));

    let name = format!("allowed/{:?}", thread::current().id());
    fs::write(scratch.join(&name), "new").expect("an image is made where that is allowed");
    fs::rename(scratch.join(&name), scratch.join("allowed/renamed")).expect("and renamed");
    refused(
        fs::rename(scratch.join("allowed/renamed"), scratch.join("image/moved"))
            .expect_err("but not moved elsewhere"),
    );
    fs::remove_file(scratch.join("allowed/renamed")).expect("and removed");

    refused(File::open(file("forbidden")).expect_err("no other file is read"));
    refused(File::open("/etc/passwd").expect_err("no file of the system is read"));
    refused(fs::read_dir("/").expect_err("no other directory is read"));
    refused(fs::remove_file(file("forbidden")).expect_err("no other file is removed"));
    let directory = fs::create_dir(scratch.join("allowed/directory"));
    has_not(directory.expect_err("no directory is made"));
    let link = std::os::unix::fs::symlink("/etc", scratch.join("allowed/link"));
    has_not(link.expect_err("no link is made"));
    File::open("/proc/self/status").expect("the process's own status is read");
    let parent = format!("/proc/{}/status", std::os::unix::process::parent_id());
    refused(File::open(parent).expect_err("that of another process is not read"));
}

fn tries_programs_and_sockets(
    manager: &UnixDatagram,
    notify: &UnixDatagram,
    address: std::net::SocketAddr,
) {
    has_not(Command::new("/bin/true").spawn().expect_err("no program is executed"));
    has_not(TcpStream::connect(address).expect_err("no connection by TCP"));
    has_not(TcpListener::bind("127.0.0.1:0").expect_err("no listener"));
    has_not(UdpSocket::bind("127.0.0.1:0").expect_err("no datagram"));
    let path = manager.local_addr().expect("an address");
    let path = path.as_pathname().expect("a path");
    notify.send(b"READY=1").expect("a notification by a connection that was there before");
    has_not(notify.send_to(b"READY=1", path).expect_err("no message to an address"));
    has_not(UnixDatagram::unbound().expect_err("no socket that sends to addresses"));
    has_not(UnixDatagram::pair().expect_err("and no pair of such"));
    has_not(UnixStream::connect(path).expect_err("no connection to a socket of another process"));
    UnixStream::pair().expect("a pair of sockets");
}

/// Calls that do many things by a command, of which some would reach other processes.
fn tries_commands(scratch: &Path, socket: &UnixDatagram) {
    let file = File::open(scratch.join("image/file")).expect("the image");
    let (own, parent) = (std::process::id(), std::os::unix::process::parent_id());
    let fcntl = |command: i32, argument: u64| {
        // SAFETY: the commands take numbers only.
        match unsafe { libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), command, argument) } {
            -1 => Err(io::Error::last_os_error()),
            value => Ok(value),
        }
    };
    let flags = fcntl(libc::F_GETFL, 0).expect("its flags") as u64;
    fcntl(libc::F_SETFL, flags | libc::O_NONBLOCK as u64).expect("other flags");
    has_not(fcntl(libc::F_SETFL, flags | libc::O_ASYNC as u64).expect_err("no signals of a file"));
    for (command, argument) in [
        (libc::F_SETOWN, u64::from(parent)),
        (libc::F_SETOWN, u64::from(own)),
        // F_SETOWN_EX and F_SETSIG (asm-generic/fcntl.h).
        (15, 0),
        (10, libc::SIGKILL as u64),
        (libc::F_NOTIFY, 0),
        (libc::F_SETLEASE, libc::F_RDLCK as u64),
    ] {
        has_not(fcntl(command, argument).expect_err("no signals to a process"));
    }
    let ioctl = |request: libc::c_ulong| {
        let argument: i32 = 1;
        // SAFETY: the requests read a number at the address.
        match unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw const argument) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    socket.set_nonblocking(true).expect("a request that is needed");
    // FIOSETOWN and SIOCSPGRP (asm-generic/sockios.h) set the receiver of signals, too.
    for request in [libc::FIOASYNC, 0x8901, 0x8902, libc::TIOCSTI, libc::TIOCLINUX] {
        has_not(ioctl(request).expect_err("no such request"));
    }
    // IORING_REGISTER_PERSONALITY, and the registration of another ring's buffers.
    for operation in [9, 30] {
        // SAFETY: it fails for a descriptor that is not a ring, whatever its other arguments.
        let done = unsafe { libc::syscall(libc::SYS_io_uring_register, -1, operation, 0, 0) };
        assert_eq!(done, -1);
        has_not(io::Error::last_os_error());
    }
    // SAFETY: as above; the file is not a ring.
    let done = unsafe { libc::syscall(libc::SYS_io_uring_register, file.as_raw_fd(), 1, 0, 0) };
    assert_eq!(done, -1);
    assert_ne!(io::Error::last_os_error().raw_os_error(), Some(libc::ENOSYS));
}
