//! The server as a daemon: in the background, with a log file, reading files again, with a watchdog.
//!
//! Invariant: a server in the background ends with the test that started it.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nowait_testkit::certificates::{Authority, Flaw, Role, client_of};
use nowait_testkit::nbd::{
    Client, Mode, OPT_STARTTLS, REP_ACK, go, greet, read_option_reply, send_option,
};
use nowait_testkit::{
    BOUND, ends_with_program, ends_with_test, no_child_starts, output_of, wait_for, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};
use rustls::StreamOwned;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::common::{MIB, NOWAIT, PYTHON, Scratch, Server, require_tool, skip, text};
use crate::log_messages::await_line;
use crate::upgrade::{Upgraded, runs};

/// A prefix that makes SIGHUP a reload, wherever the tests run.
pub(crate) const NO_TERMINAL: [&str; 3] = ["setsid", "env", "--default-signal=HUP"];

/// A server in the background.
struct InBackground {
    pid: Pid,
    scratch: Scratch,
}

impl InBackground {
    /// Starts it with `--fork` and waits for the process that was called.
    fn start(extra: &[&str]) -> Self {
        let scratch = Scratch::new();
        let image = scratch.sparse("disk.img", MIB);
        let (pid_file, listen) =
            (scratch.join("pid"), format!("unix:{}", scratch.join("socket").display()));
        let called = Command::new(NOWAIT)
            .args(["serve", "--fork", "--verbose", "--nbd", &listen, "--pid-file"])
            .args([&pid_file, &image])
            .args(extra)
            .args(["--log-file", text(&scratch.join("log"))])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("nowait");
        let output = output_of(called);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {error}", output.status);
        assert!(String::from_utf8_lossy(&output.stdout).starts_with("serving nbd+unix:"));
        let pid = fs::read_to_string(&pid_file).expect("the PID file of a server that is ready");
        let pid = Pid::from_raw(pid.trim().parse().expect("a number")).expect("a process");
        ends_with_program(pid);
        Self { pid, scratch }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.scratch.join("log")).expect("the log file")
    }

    fn proc(&self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.pid.to_string()).join(name)
    }
}

impl Drop for InBackground {
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
    }
}

#[test]
fn a_server_in_the_background_is_ready_when_its_caller_ends_and_has_left_it() {
    let server = InBackground::start(&[]);
    let mut client = Client::connect(&server.scratch.join("socket"), Mode::Structured).expect("it");
    client.write(1001, b"in the background").expect("a write");
    for descriptor in ["fd/0", "fd/1"] {
        let target = fs::read_link(server.proc(descriptor)).expect("a descriptor");
        assert_eq!(target, Path::new("/dev/null"), "{descriptor}");
    }
    assert_eq!(
        fs::read_link(server.proc("fd/2")).expect("a descriptor"),
        server.scratch.join("log")
    );
    let stat = fs::read_to_string(server.proc("stat")).expect("a status");
    let after_name: Vec<&str> = stat.rsplit_once(") ").expect("a name").1.split(' ').collect();
    // Its session is its own, and has no terminal.
    assert_eq!((after_name[3], after_name[4]), (server.pid.to_string().as_str(), "0"), "{stat}");
    let line = wait_for("a line of the log", || {
        let log = server.log();
        log.lines().find(|line| line.contains("has opened export")).map(str::to_owned).ok_or(log)
    });
    let (time, message) = line.split_once(' ').expect("a time");
    assert!(time.len() >= 20 && time.ends_with('Z') && time.as_bytes()[10] == b'T', "{line}");
    assert!(message.starts_with("nowait: client (uid "), "{line}");
    drop(client);
    kill_process(server.pid, Signal::TERM).expect("the server");
    wait_until("its end", || {
        !server.scratch.join("pid").exists() && !server.proc("status").exists()
    });
    assert!(server.log().contains("stopped, everything is flushed"), "{}", server.log());
}

/// A program of tests that is killed: run by the test below in a process of its own.
#[test]
#[ignore = "waits to be killed; another test runs it in a process of its own"]
fn killed() {
    let server = InBackground::start(&[]);
    let mut upgraded = Upgraded::start("raw", &[]);
    upgraded.upgrade();
    println!("servers: {} {}", server.pid, upgraded.process());
    std::io::stdout().flush().expect("a test that reads");
    loop {
        std::thread::park();
    }
}

#[test]
fn a_killed_program_of_tests_leaves_no_server_behind() {
    let mut program = Command::new(std::env::current_exe().expect("this program"));
    program.args(["daemon::killed", "--exact", "--ignored", "--nocapture"]).stdout(Stdio::piped());
    let alone = no_child_starts();
    let mut program = ends_with_test(&mut program).spawn().expect("this program");
    drop(alone);
    let lines = BufReader::new(program.stdout.take().expect("a pipe")).lines();
    let line = lines
        .map_while(Result::ok)
        .find_map(|line| line.split_once("servers: ").map(|(_, servers)| servers.to_owned()));
    let servers: Vec<i32> =
        line.expect("servers").split(' ').map(|pid| pid.parse().expect("a number")).collect();
    assert_eq!(servers.len(), 2);
    program.kill().expect("a program");
    program.wait().expect("a program");
    for pid in servers {
        let pid = Pid::from_raw(pid).expect("a process");
        wait_until("the end of a server", || !runs(pid));
    }
}

#[test]
fn a_server_that_cannot_start_in_the_background_gives_its_status_and_its_line_to_the_caller() {
    let scratch = Scratch::new();
    let (missing, pid_file) = (scratch.join("missing.img"), scratch.join("pid"));
    let image = scratch.sparse("disk.img", MIB);
    for (image, log_file, status, word) in [
        (&missing, scratch.join("log"), 66, "missing.img: there is no such file"),
        (&image, scratch.join("none/log"), 1, "none/log: its directory does not exist"),
    ] {
        let called = Command::new(NOWAIT)
            .args(["serve", text(image), "--fork", "--pid-file", text(&pid_file)])
            .args(["--log-file", text(&log_file)])
            .args(["--nbd", &format!("unix:{}", scratch.join("socket").display())])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("nowait");
        let output = output_of(called);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{error}");
        assert!(error.contains(word) && error.lines().count() == 1, "{error}");
        assert_eq!(output.stdout, b"");
        assert!(!pid_file.exists(), "a PID file of a process that has ended");
    }
}

#[test]
fn a_log_file_that_was_moved_away_is_made_again_at_a_hangup() {
    let server = InBackground::start(&[]);
    let (log, old) = (server.scratch.join("log"), server.scratch.join("log.1"));
    for _ in 0..2 {
        fs::rename(&log, &old).expect("the log file");
        kill_process(server.pid, Signal::HUP).expect("the server");
        wait_until("a new log file", || {
            log.exists() && server.log().contains("read again: the log")
        });
    }
    assert!(!fs::read_to_string(&old).expect("the old file").is_empty());
}

/// Whether a TLS client that trusts the authority in `directory` gets the export of `socket`.
fn is_served(socket: &Path, directory: &Path) -> bool {
    let mut stream = greet(socket).expect("a greeting");
    send_option(&mut stream, OPT_STARTTLS, &[]).expect("a socket");
    assert_eq!(read_option_reply(&mut stream).expect("a reply"), (REP_ACK, vec![]));
    let root = CertificateDer::from_pem_file(directory.join("ca-cert.pem")).expect("a root");
    go(&mut StreamOwned::new(client_of(root, rustls::ALL_VERSIONS), stream)).is_ok()
}

#[test]
fn tls_files_are_read_again_at_a_hangup_and_broken_ones_leave_the_old_ones_in_use() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let (certs, old, new) = (Scratch::new(), Scratch::new(), Scratch::new());
    let (first, second) = (Authority::new("the old one"), Authority::new("the new one"));
    first.trusted_in(old.path());
    second.trusted_in(new.path());
    first.certify(certs.path(), Role::Server, Flaw::None);
    let server =
        Server::start_under(&NO_TERMINAL, &image, &["--tls-certs", text(certs.path()), "-v"]);
    let mut stream = greet(&server.socket()).expect("a greeting");
    send_option(&mut stream, OPT_STARTTLS, &[]).expect("a socket");
    read_option_reply(&mut stream).expect("a reply");
    let root = CertificateDer::from_pem_file(old.path().join("ca-cert.pem")).expect("a root");
    let mut before = StreamOwned::new(client_of(root, rustls::ALL_VERSIONS), stream);
    assert!(is_served(&server.socket(), old.path()) && !is_served(&server.socket(), new.path()));

    second.certify(certs.path(), Role::Server, Flaw::None);
    server.signal(Signal::HUP);
    wait_until("the new files", || server.log().contains("read again: the TLS files"));
    assert!(is_served(&server.socket(), new.path()) && !is_served(&server.socket(), old.path()));
    assert_eq!(go(&mut before).expect("a session of before goes on"), MIB);

    fs::write(certs.path().join("server-cert.pem"), "broken").expect("a file");
    server.signal(Signal::HUP);
    let line = await_line(&server, "stay in use");
    assert!(line.starts_with("nowait: error: ") && line.contains("server-cert.pem"), "{line}");
    assert!(is_served(&server.socket(), new.path()));
    server.stop();
}

/// A service manager's socket, and the prefix that tells a server of it.
fn manager(scratch: &Scratch) -> (UnixDatagram, String) {
    let socket = scratch.join("notify");
    let manager = UnixDatagram::bind(&socket).expect("a socket");
    manager.set_read_timeout(Some(BOUND)).expect("a timeout");
    (manager, format!("NOTIFY_SOCKET={}", socket.display()))
}

fn receive(manager: &UnixDatagram) -> String {
    let mut message = [0; 4096];
    let len = manager.recv(&mut message).expect("a message in time");
    String::from_utf8(message[..len].to_vec()).expect("text")
}

#[test]
fn a_reload_is_announced_to_the_service_manager_with_its_time_and_its_end() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let (manager, notify) = manager(&scratch);
    let wrapper = [&NO_TERMINAL[..], &[&notify]].concat();
    let server = Server::start_under(&wrapper, &image, &[]);
    assert!(receive(&manager).starts_with("READY=1\n"));
    for _ in 0..2 {
        server.signal(Signal::HUP);
        let reloading = receive(&manager);
        let time = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect("a reload");
        assert!(time.trim().parse::<u64>().is_ok_and(|time| time > 0), "{reloading}");
        assert_eq!(receive(&manager), "READY=1\n");
    }
    server.stop();
}

/// Stops one thread of a process until its input ends: the process number, the thread's name.
const STOP_THREAD: &str = r#"
import ctypes, os, sys
process, name = sys.argv[1:]
tasks = "/proc/%s/task" % process
thread = next(t for t in os.listdir(tasks) if open("%s/%s/comm" % (tasks, t)).read().strip() == name)
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
    if libc.ptrace(request, int(thread), 0, 0) != 0:
        print("no:", os.strerror(ctypes.get_errno()), flush=True)
        sys.exit()
os.waitpid(int(thread), 0x40000000)
print("stopped", flush=True)
sys.stdin.read()
"#;

#[test]
fn the_watchdog_is_fed_while_all_threads_answer_and_not_while_one_hangs() {
    nowait_testkit::needs!(require_tool(PYTHON));
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let (manager, notify) = manager(&scratch);
    let server = Server::start_under(&["env", &notify, "WATCHDOG_USEC=200000"], &image, &[]);
    for _ in 0..5 {
        // Of the messages READY=1 is one.
        wait_until("food for the watchdog", || receive(&manager) == "WATCHDOG=1\n");
    }
    let mut stopper = ends_with_test(&mut Command::new(PYTHON))
        .args(["-c", STOP_THREAD, &server.pid().to_string(), "nowait-0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python");
    let mut answer = String::new();
    let output = stopper.stdout.take().expect("a pipe");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut answer).expect("a line");
    if answer.trim() != "stopped" {
        skip(&format!("this process may not stop a thread of its child ({})", answer.trim()));
        stopper.wait().expect("python");
        return server.stop();
    }
    let line = await_line(&server, "watchdog");
    assert_eq!(
        line,
        "nowait: error: a serving thread does not answer; the service manager's watchdog is not fed"
    );
    manager.set_nonblocking(true).expect("own socket");
    while manager.recv(&mut [0; 64]).is_ok() {}
    // It is not fed until the thread goes on.
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(manager.recv(&mut [0; 64]).is_err(), "the watchdog is fed while a thread hangs");
    manager.set_nonblocking(false).expect("own socket");
    drop(stopper.stdin.take());
    stopper.wait().expect("python");
    assert_eq!(receive(&manager), "WATCHDOG=1\n");
    server.stop();
}
