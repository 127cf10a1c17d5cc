//! A `nowait serve` of one's own: started, awaited, stopped.
//!
//! Invariant: the process is gone when the value is, and no other process is ever signalled.
//! Knows: the command line, the ready line. Known by: all tests.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::nbd::{Client, Mode};
use super::{Finished, KIB, Scratch, tool};

/// The binary under test.
pub(crate) const NOWAIT: &str = env!("CARGO_BIN_EXE_nowait");
/// How long a start or a stop may take before the test fails.
const BOUND: Duration = Duration::from_secs(30);
/// How often a stop is looked for.
const STEP: Duration = Duration::from_millis(5);
const READY: &str = "serving ";

/// A running server with one Unix socket in a directory of its own.
pub(crate) struct Server {
    child: Child,
    uris: Vec<String>,
    own: Scratch,
}

impl Server {
    /// Serves `image` with `extra` arguments; returns when it is ready.
    pub(crate) fn start(image: &Path, extra: &[&str]) -> Self {
        Self::start_under(&[], image, extra)
    }

    /// As `start`, with the command `wrapper` put before the server's own; `wrapper` must end in exec.
    pub(crate) fn start_under(wrapper: &[&str], image: &Path, extra: &[&str]) -> Self {
        let own = Scratch::new();
        let listen = format!("unix:{}", own.join("socket").display());
        let mut command = under(wrapper);
        command.arg("serve").arg(image).args(["--nbd", &listen]).args(extra);
        Self::run(command, own)
    }

    /// Runs `nowait` with `arguments` and nothing else, behind `wrapper`, which gives it its sockets.
    pub(crate) fn start_by(wrapper: &[&str], arguments: &[impl AsRef<OsStr>]) -> Self {
        let mut command = under(wrapper);
        command.args(arguments);
        Self::run(command, Scratch::new())
    }

    /// Runs a whole `command`; its standard error is kept in `own`.
    fn run(mut command: Command, own: Scratch) -> Self {
        let log = File::create(own.join("log")).expect("a log file");
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let lines = lines_of(&mut child);
        let mut server = Self { child, uris: Vec::new(), own };
        match lines.recv_timeout(BOUND) {
            Ok(line) => server.uris = addresses_in(&line),
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

    /// The address of its Unix socket, as it said it.
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

    /// What it said on standard error until now.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.own.join("log")).expect("the server's log")
    }

    /// How many descriptors it has open.
    pub(crate) fn descriptors(&self) -> usize {
        let open = fs::read_dir(format!("/proc/{}/fd", self.child.id()));
        open.expect("the descriptors of a child").count()
    }

    /// What it keeps in memory, in bytes: `field` of its status (proc_pid_status(5)), as in `VmRSS`.
    pub(crate) fn memory(&self, field: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("the status of a child");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("the field");
        let kib = line.trim_start_matches(':').trim().trim_end_matches(" kB");
        kib.parse::<u64>().expect("a number of KiB") * KIB
    }

    /// How many descriptors its rings watch, those included that are closed (what fs/proc shows of a
    /// ring, `PollList`; 6 is the operation that adds a poll).
    pub(crate) fn polls(&self) -> usize {
        let rings = fs::read_dir(format!("/proc/{}/fdinfo", self.child.id()));
        let rings =
            rings.expect("the descriptors of a child").map(|ring| ring.expect("one").path());
        // One may be closed meanwhile.
        let told = rings.filter_map(|ring| fs::read_to_string(ring).ok());
        told.map(|text| text.lines().filter(|line| line.trim().starts_with("op=6,")).count()).sum()
    }

    /// How often its threads have gone to sleep of their own accord (proc_pid_status(5)).
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

    /// Asks it to finish; does not wait.
    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Sends it `signal`.
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a server to signal");
    }

    /// Waits for its end, within bounds.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        while start.elapsed() < BOUND {
            if let Some(status) = self.child.try_wait().expect("a child to wait for") {
                return status;
            }
            thread::sleep(STEP);
        }
        panic!("the server does not end; it said: {}", self.log());
    }

    /// Ends it as a service manager does, and checks that it ends well: exit 0, no socket left.
    pub(crate) fn stop(self) {
        let socket = self.socket();
        self.stop_but_leave_socket();
        assert!(!socket.exists(), "the socket is left behind");
    }

    /// As `stop`, for one whose sockets are somebody else's.
    pub(crate) fn stop_but_leave_socket(mut self) {
        self.terminate();
        let status = self.wait();
        assert!(status.success(), "{status}; it said: {}", self.log());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only where the process is gone already, which is what they are for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a ready line names: all addresses where it is JSON, else one.
fn addresses_in(line: &str) -> Vec<String> {
    if let Some(uri) = line.strip_prefix(READY) {
        return vec![uri.to_owned()];
    }
    let event: Value = serde_json::from_str(line).expect("a ready line, plain or JSON");
    assert_eq!(event["event"], "ready");
    let uris = event["uris"].as_array().expect("a list of addresses");
    uris.iter().map(|uri| uri.as_str().expect("an address").to_owned()).collect()
}

/// The server's command behind `wrapper`.
fn under(wrapper: &[&str]) -> Command {
    let words: Vec<OsString> = wrapper.iter().map(OsString::from).chain([NOWAIT.into()]).collect();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

/// The child's standard output, line by line, so that waiting for one can be bounded.
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

/// What a `nowait` that must not start said and how it exited.
pub(crate) struct Refusal {
    /// The exit code.
    pub(crate) code: i32,
    /// All of standard error.
    pub(crate) error: String,
}

impl Refusal {
    /// Checks the form every error has (one line, `nowait: …`, exit 1) and that it says each of `words`.
    pub(crate) fn says(&self, words: &[&str]) {
        assert_eq!(self.code, 1, "{}", self.error);
        assert!(self.error.starts_with("nowait: "), "{}", self.error);
        assert_eq!(self.error.lines().count(), 1, "{}", self.error);
        for word in words {
            assert!(self.error.contains(word), "no '{word}' in: {}", self.error);
        }
    }
}

/// Runs `nowait` with `arguments` to its end.
pub(crate) fn refusal(arguments: &[impl AsRef<OsStr>]) -> Refusal {
    refusal_under(&[], arguments)
}

/// As `refusal`, behind `wrapper`.
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

/// Runs `nowait` with `arguments`; gives what it printed. Fails the test unless it exits 0.
pub(crate) fn accepted(arguments: &[&str]) -> String {
    tool(NOWAIT).args(arguments).succeeds()
}
