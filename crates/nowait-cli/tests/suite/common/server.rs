//! Starts, awaits and stops a `nowait serve` process.
//!
//! Invariant: the process ends when the value is dropped, and no other process is signalled.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::{BOUND, ends_with_test, wait_for};

use super::{Finished, KIB, Scratch, tool};

/// The binary under test.
pub(crate) const NOWAIT: &str = env!("CARGO_BIN_EXE_nowait");
const READY: &str = "serving ";

/// A running server with one Unix socket in a directory of its own.
pub(crate) struct Server {
    child: Child,
    ready_line: String,
    uris: Vec<String>,
    own: Scratch,
}

impl Server {
    /// Serves `image` with `extra` arguments; returns when it is ready.
    pub(crate) fn start(image: &Path, extra: &[&str]) -> Self {
        Self::start_under(&[], image, extra)
    }

    /// Like `start`, with the command prefix `wrapper`, which must end in exec.
    pub(crate) fn start_under(wrapper: &[&str], image: &Path, extra: &[&str]) -> Self {
        let own = Scratch::new();
        let listen = format!("unix:{}", own.join("socket").display());
        let mut command = under(wrapper);
        command.arg("serve").arg(image).args(["--nbd", &listen]).args(extra);
        Self::run(command, own)
    }

    /// Runs `nowait` with `arguments` only, started by `wrapper`, which passes it its sockets.
    pub(crate) fn start_by(wrapper: &[&str], arguments: &[impl AsRef<OsStr>]) -> Self {
        let mut command = under(wrapper);
        command.args(arguments);
        Self::run(command, Scratch::new())
    }

    /// Serves `image` at the vhost-user socket `path` only, with `extra` arguments.
    pub(crate) fn start_vhost_user(image: &Path, path: &Path, extra: &[&str]) -> Self {
        let mut command = under(&[]);
        command.arg("serve").arg(image).arg("--vhost-user").arg(path).args(extra);
        Self::run(command, Scratch::new())
    }

    /// Runs a whole `command`; its standard error is kept in `own`.
    fn run(mut command: Command, own: Scratch) -> Self {
        let log = File::create(own.join("log")).expect("a log file");
        let mut child = ends_with_test(&mut command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let lines = lines_of(&mut child);
        let mut server = Self { child, ready_line: String::new(), uris: Vec::new(), own };
        match lines.recv_timeout(BOUND) {
            Ok(line) => {
                server.uris = addresses_in(&line);
                server.ready_line = line;
            }
            Err(_) => panic!("{command:?}: no ready line; it said: {}", server.log()),
        }
        server
    }

    /// Serves no image, for a user whose directories are all in `home`.
    pub(crate) fn start_without_image(home: &Scratch) -> Self {
        let mut command = Command::new(NOWAIT);
        command.arg("serve");
        for variable in ["XDG_STATE_HOME", "XDG_RUNTIME_DIR", "HOME"] {
            command.env(variable, home.path());
        }
        Self::run(command, Scratch::new())
    }

    /// The line in which it says that it is ready.
    pub(crate) fn ready_line(&self) -> &str {
        &self.ready_line
    }

    /// The URI of its Unix socket, from its ready line.
    pub(crate) fn uri(&self) -> &str {
        &self.uris[0]
    }

    /// The addresses in its first ready line: with `--json`, all.
    pub(crate) fn uris(&self) -> &[String] {
        &self.uris
    }

    /// The socket's path, taken from the address.
    pub(crate) fn socket(&self) -> PathBuf {
        let (_, path) = self.uri().split_once("?socket=").expect("an nbd+unix address");
        PathBuf::from(path)
    }

    /// Its port on 127.0.0.1, in digits.
    pub(crate) fn port(&self) -> &str {
        let tcp = self.uris.iter().find_map(|uri| uri.strip_prefix("nbd://127.0.0.1:"));
        tcp.and_then(|rest| rest.strip_suffix('/')).expect("a TCP address")
    }

    /// Its standard error so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.own.join("log")).expect("the server's log")
    }

    /// The content of its proc(5) file `name`.
    pub(crate) fn proc(&self, name: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{name}", self.child.id())).expect("a child")
    }

    /// The owner of its proc(5) files.
    pub(crate) fn proc_owner(&self) -> u32 {
        fs::metadata(format!("/proc/{}/fd", self.child.id())).expect("a child").uid()
    }

    /// Its PID.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The number of its open descriptors.
    pub(crate) fn descriptors(&self) -> usize {
        let open = fs::read_dir(format!("/proc/{}/fd", self.child.id()));
        open.expect("the descriptors of a child").count()
    }

    /// Waits until it has no more descriptors open than `before`.
    pub(crate) fn await_descriptors(&self, before: usize) {
        wait_for(format!("{before} open descriptors"), || {
            let open = self.descriptors();
            if open <= before { Ok(()) } else { Err(open) }
        });
    }

    /// Its memory in bytes: `field` of its status (proc_pid_status(5)), such as `VmRSS`.
    pub(crate) fn memory(&self, field: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("the status of a child");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("the field");
        let kib = line.trim_start_matches(':').trim().trim_end_matches(" kB");
        kib.parse::<u64>().expect("a number of KiB") * KIB
    }

    /// The most memory of its own that it has used so far, in bytes: without the pages of the
    /// program, of which a debug build has more.
    pub(crate) fn peak(&self) -> u64 {
        self.memory("VmHWM").saturating_sub(self.memory("RssFile"))
    }

    /// The number of descriptors that its rings poll, including closed ones (`PollList` of a ring
    /// in fdinfo; 6 is the operation that adds a poll).
    pub(crate) fn polls(&self) -> usize {
        let rings = fs::read_dir(format!("/proc/{}/fdinfo", self.child.id()));
        let rings =
            rings.expect("the descriptors of a child").map(|ring| ring.expect("one").path());
        // A ring may be closed meanwhile.
        let infos = rings.filter_map(|ring| fs::read_to_string(ring).ok());
        infos.map(|text| text.lines().filter(|line| line.trim().starts_with("op=6,")).count()).sum()
    }

    /// The number of voluntary context switches of its threads (proc_pid_status(5)).
    pub(crate) fn sleeps(&self) -> u64 {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let tasks = tasks.expect("the threads of a child").map(|task| task.expect("a thread"));
        let status = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
        let sleeps = status.filter_map(|status| {
            let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
            line.and_then(|count| count.trim().parse::<u64>().ok())
        });
        sleeps.sum()
    }

    /// The names of its threads.
    pub(crate) fn threads(&self) -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let tasks = tasks.expect("the threads of a child").map(|task| task.expect("a thread"));
        // A thread may end meanwhile.
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        names.map(|name| name.trim().to_owned()).collect()
    }

    /// A new connection to the default export, with structured replies.
    pub(crate) fn connect(&self) -> Client {
        Client::connect(&self.socket(), Mode::Structured).expect("a connection")
    }

    /// Sends SIGTERM; does not wait.
    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Sends it `signal`.
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a server to signal");
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        wait_for("the server's end", || {
            let ended = self.child.try_wait().expect("a child to wait for");
            ended.ok_or_else(|| self.log())
        })
    }

    /// Stops it as a service manager does, and checks exit status 0 and that no socket is left.
    pub(crate) fn stop(self) {
        let socket = self.socket();
        self.stop_but_leave_socket();
        assert!(!socket.exists(), "the socket is left behind");
    }

    /// Like `stop`, for a server with inherited sockets.
    pub(crate) fn stop_but_leave_socket(mut self) {
        self.terminate();
        let status = self.wait();
        assert!(status.success(), "{status}; it said: {}", self.log());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if thread::panicking() {
            let ended = self.child.try_wait();
            eprintln!("the server has ended: {ended:?}; it said: {}", self.log());
        }
        // Both fail only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The addresses in a ready line: all if it is JSON, else one.
fn addresses_in(line: &str) -> Vec<String> {
    if let Some(uri) = line.strip_prefix(READY) {
        return vec![uri.to_owned()];
    }
    let event: Value = serde_json::from_str(line).expect("a ready line, plain or JSON");
    assert_eq!(event["event"], "ready");
    let uris = event["uris"].as_array().expect("a list of addresses");
    uris.iter().map(|uri| uri.as_str().expect("an address").to_owned()).collect()
}

/// The server's command with the prefix `wrapper`.
fn under(wrapper: &[&str]) -> Command {
    let words: Vec<OsString> = wrapper.iter().map(OsString::from).chain([NOWAIT.into()]).collect();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

/// The lines of the child's standard output, over a channel, so that the wait for a line can have a
/// timeout.
fn lines_of(child: &mut Child) -> mpsc::Receiver<String> {
    let output = BufReader::new(child.stdout.take().expect("a piped output"));
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    lines
}

/// The exit code and the message of a `nowait` that was refused.
pub(crate) struct Refusal {
    /// The exit code.
    pub(crate) code: i32,
    /// All of standard error.
    pub(crate) error: String,
}

impl Refusal {
    /// Checks the form of an error (one line, `nowait: …`, exit 1, or 66 where an image cannot be
    /// opened to be served) and that it contains each of `words`.
    pub(crate) fn says(&self, words: &[&str]) {
        assert!([1, 66].contains(&self.code), "{}: {}", self.code, self.error);
        assert!(self.error.starts_with("nowait: "), "{}", self.error);
        assert_eq!(self.error.lines().count(), 1, "{}", self.error);
        for word in words {
            assert!(self.error.contains(word), "no '{word}' in: {}", self.error);
        }
    }
}

/// Runs `nowait` with `arguments`, which must fail.
pub(crate) fn refusal(arguments: &[impl AsRef<OsStr>]) -> Refusal {
    refusal_under(&[], arguments)
}

/// Like `refusal`, with the prefix `wrapper`.
pub(crate) fn refusal_under(wrapper: &[&str], arguments: &[impl AsRef<OsStr>]) -> Refusal {
    let inner = under(wrapper);
    let output = tool(inner.get_program())
        .args(inner.get_args())
        .args(arguments)
        .output()
        .expect("timeout(1)");
    let code = output.status.code().expect("an exit code, not a signal");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_ne!(code, 0, "was to be refused; it said: {error}");
    Refusal { code, error }
}

/// Runs `nowait` with `arguments`; returns its standard output. Fails the test unless it exits with
/// 0.
pub(crate) fn accepted(arguments: &[&str]) -> String {
    tool(NOWAIT).args(arguments).succeeds()
}
