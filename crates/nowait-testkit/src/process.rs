//! External programs with a timeout.
//!
//! Invariant: a tool that hangs is killed by coreutils' timeout and fails the test. No process
//! outlives the test that started it, also when a signal kills the test program.
#![allow(unsafe_code)]

use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

/// The timeout of a tool in seconds. It kills tools that hang, and is not a measure of speed.
const TOOL_BOUND_SECONDS: &str = "600";
/// The exit status of timeout(1) when it killed its command.
const TIMED_OUT: i32 = 124;

/// The program that every tool is started by, which asks for the signal of [`ends_with_test`] itself.
const STARTER: &str = "setpriv";

/// A tool to run, with a timeout. It ends with its test, as by [`ends_with_test`]; where the test program is killed
/// before the tool has begun, with its timeout.
///
/// It is started without a copy of this process's page tables, which took most of the time of tests that start
/// hundreds of tools: the standard library calls fork(2) only for what is to run between fork(2) and exec(2).
pub fn tool(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(STARTER);
    command
        .args(["--pdeathsig", "TERM", "timeout", "--kill-after=5", TOOL_BOUND_SECONDS])
        .arg(name);
    command
}

/// Like [`ends_with_test`], for a command that may be a [`tool`].
fn bounded(command: &mut Command) -> &mut Command {
    if command.get_program() == STARTER { command } else { ends_with_test(command) }
}

/// Lets the process that `command` starts get SIGTERM when the thread that starts it has exited, as
/// each test has a thread of its own, or the whole test program was killed.
pub fn ends_with_test(command: &mut Command) -> &mut Command {
    let test = getpid();
    // SAFETY: both calls are system calls without memory, allowed between fork(2) and exec(2).
    unsafe { command.pre_exec(move || end_with(test)) }
}

fn end_with(test: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM))?;
    // The test program may have exited before the call.
    if getppid() == Some(test) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
}

/// A process that kills others, which are not children of the test program, when that has exited. It is told their numbers by
/// its standard input, ignores the signals of a terminal, and looks whether a number is still a server's.
const GUARD: &str = "trap '' INT TERM HUP QUIT; while read -r pid; do all=\"$all $pid\"; done
for pid in $all; do tr '\\0' ' ' <\"/proc/$pid/cmdline\" | grep -q nowait && kill -9 $pid; done";

/// Has `process`, a server that left its parent, killed when this program has exited, however.
///
/// # Panics
/// There is no shell.
pub fn ends_with_program(process: Pid) {
    static GUARDED: Mutex<Option<ChildStdin>> = Mutex::new(None);
    let mut guarded = GUARDED.lock().unwrap_or_else(PoisonError::into_inner);
    let stdin = guarded.get_or_insert_with(|| {
        let mut shell = Command::new("sh");
        shell.args(["-c", GUARD]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let alone = no_child_starts();
        let started = shell.spawn();
        drop(alone);
        started.ok().and_then(|mut shell| shell.stdin.take()).expect("a shell")
    });
    writeln!(stdin, "{}", process.as_raw_nonzero()).expect("a shell that reads");
}

/// Runs a tool and checks its exit status.
pub trait Finished {
    /// Runs it; fails the test with all its output unless it exits with 0. Returns its standard
    /// output.
    fn succeeds(&mut self) -> String;
    /// Runs it; fails the test if it exits with 0. Returns its standard output and error together.
    fn fails(&mut self) -> String;
}

impl Finished for Command {
    fn succeeds(&mut self) -> String {
        let output = run(self);
        assert!(output.status.success(), "{self:?}: {}\n{}", output.status, both(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn fails(&mut self) -> String {
        let output = run(self);
        assert!(!output.status.success(), "{self:?} was to fail\n{}", both(&output));
        both(&output)
    }
}

/// Prevents the start of child processes while the guard is held. Until its exec(2) a child has
/// copies of all descriptors, and with them the locks on images: a closed image is unlocked only
/// when no child is between fork(2) and exec(2).
pub fn no_child_starts() -> MutexGuard<'static, ()> {
    static STARTING: Mutex<()> = Mutex::new(());
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs it to its end, without input; returns all its output.
pub fn output(command: &mut Command) -> Output {
    bounded(command).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let guard = no_child_starts();
    let child = command.spawn();
    drop(guard);
    let ended = child.and_then(Child::wait_with_output);
    ended.unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

fn run(command: &mut Command) -> Output {
    let output = output(command);
    assert_ne!(output.status.code(), Some(TIMED_OUT), "{command:?} hung\n{}", both(&output));
    output
}

fn both(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// The directory that cargo has built this program in.
pub(crate) fn target_directory() -> PathBuf {
    let test = std::env::current_exe().expect("this program");
    // TARGET/PROFILE/deps/TEST
    test.ancestors().nth(3).expect("a target directory").to_owned()
}

/// A process that is killed when it is dropped.
pub struct Running(pub Child);

impl Running {
    /// Starts `command`, without input and without messages.
    pub fn start(command: &mut Command) -> Self {
        Self::spawn(command.stdin(Stdio::null()).stderr(Stdio::null()))
    }

    /// Starts `command` with the files that it has been given.
    pub fn spawn(command: &mut Command) -> Self {
        let alone = no_child_starts();
        let started = bounded(command).spawn();
        drop(alone);
        Self(started.unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    /// Kills it.
    pub fn end(&mut self) {
        // Both fail only if the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}
