//! Other people's programs, under a time bound, and what to do where they are missing.
//!
//! Invariant: a tool that hangs is killed and fails the test. Knows: coreutils' timeout. Known by: all tests.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Far beyond what any step here takes on two cores, a guest under emulation included.
const TOOL_BOUND_SECONDS: &str = "180";
/// What timeout(1) exits with when it had to end its command.
const TIMED_OUT: i32 = 124;

/// Debian's interpreter, because Debian's libnbd binding is built for it and no other.
pub(crate) const PYTHON: &str = "/usr/bin/python3";

/// A tool to be run; ends by itself or is ended.
pub(crate) fn tool(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", TOOL_BOUND_SECONDS]).arg(name);
    command
}

/// What is asked of a tool that ran.
pub(crate) trait Finished {
    /// Runs it; fails the test with all its output unless it exits 0. Gives its standard output.
    fn succeeds(&mut self) -> String;
    /// Runs it; fails the test if it exits 0. Gives its standard output and error together.
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

/// Nobody starts a child while this is held. A child has copies of all descriptors, and with them the locks on
/// images, until its exec(2): an image that was closed is free only when none is between the two.
pub(crate) fn no_child_starts() -> MutexGuard<'static, ()> {
    static STARTING: Mutex<()> = Mutex::new(());
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs it to its end, without input; gives all that it said.
pub(crate) fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let turn = no_child_starts();
    let child = command.spawn();
    drop(turn);
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

/// True if `name` (on the path, or a path) can be run. Where not: false and a line that says so, or, with
/// `NOWAIT_REQUIRE_TOOLS=1`, a failed test.
pub(crate) fn require_tool(name: &str) -> bool {
    path_of(name).is_some() || skip(&format!("no {name}"))
}

/// Where `name`, on the path or a path, is.
pub(crate) fn path_of(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file())
}

/// As `require_tool`, for an interpreter that can talk NBD.
pub(crate) fn python_with_nbd() -> bool {
    let there = Path::new(PYTHON).is_file()
        && Command::new(PYTHON)
            .args(["-c", "import nbd"])
            .output()
            .is_ok_and(|output| output.status.success());
    there || skip("no python3-libnbd")
}

/// Says why a test does nothing here; fails it instead where everything is said to be there. Always false.
pub(crate) fn skip(why: &str) -> bool {
    assert_ne!(
        std::env::var("NOWAIT_REQUIRE_TOOLS").as_deref(),
        Ok("1"),
        "{why}, and NOWAIT_REQUIRE_TOOLS=1"
    );
    // Past libtest's capture, which would swallow it in a test that passes.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
    false
}
