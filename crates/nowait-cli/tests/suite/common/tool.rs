//! Runs external programs with a timeout, and skips tests where they are missing.
//!
//! Invariant: a tool that hangs is killed by coreutils' timeout and fails the test.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The timeout of a tool in seconds: far more than any step takes on two cores, an emulated guest
/// included.
const TOOL_BOUND_SECONDS: &str = "180";
/// The exit status of timeout(1) when it killed its command.
const TIMED_OUT: i32 = 124;

/// Debian's interpreter: Debian's libnbd binding is built only for it.
pub(crate) const PYTHON: &str = "/usr/bin/python3";

/// A tool to run, with a timeout.
pub(crate) fn tool(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", TOOL_BOUND_SECONDS]).arg(name);
    command
}

/// Runs a tool and checks its exit status.
pub(crate) trait Finished {
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
pub(crate) fn no_child_starts() -> MutexGuard<'static, ()> {
    static STARTING: Mutex<()> = Mutex::new(());
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs it to its end, without input; returns all its output.
pub(crate) fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
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

/// True if `name` (on the path, or a path) can be run. Otherwise false and a message, or, with
/// `NOWAIT_REQUIRE_TOOLS=1`, a failed test.
pub(crate) fn require_tool(name: &str) -> bool {
    path_of(name).is_some() || skip(&format!("no {name}"))
}

/// The path of `name`, which is a path or on `PATH`.
pub(crate) fn path_of(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file())
}

/// As `require_tool`, for a Python interpreter with libnbd.
pub(crate) fn python_with_nbd() -> bool {
    let there = Path::new(PYTHON).is_file()
        && Command::new(PYTHON)
            .args(["-c", "import nbd"])
            .output()
            .is_ok_and(|output| output.status.success());
    there || skip("no python3-libnbd")
}

/// As `require_tool`, for /dev/fuse.
pub(crate) fn require_fuse() -> bool {
    let opened = File::options().read(true).write(true).open("/dev/fuse");
    opened.map_or_else(|error| skip(&format!("/dev/fuse cannot be opened: {error}")), |_| true)
}

/// Prints why a test is skipped; fails it instead with `NOWAIT_REQUIRE_TOOLS=1`. Always false.
pub(crate) fn skip(why: &str) -> bool {
    assert_ne!(
        std::env::var("NOWAIT_REQUIRE_TOOLS").as_deref(),
        Ok("1"),
        "{why}, and NOWAIT_REQUIRE_TOOLS=1"
    );
    // Not through libtest's capture, which would hide it in a test that passes.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
    false
}
