//! Needs of a test of this system: without it the test is skipped, or fails where all is required.
//!
//! Invariant: a test that does not run prints a line that begins with `skipped: `.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::output;

/// Debian's interpreter: Debian's libnbd binding is built only for it.
pub const PYTHON: &str = "/usr/bin/python3";

/// Ends the test, which returns nothing, without what it needs: `needs!(require_qemu() && require_tool("fio"))`. A need
/// that is not there says so by [`skip`].
#[macro_export]
macro_rules! needs {
    ($is_there:expr) => {
        if !$is_there {
            return;
        }
    };
}

/// Prints why a test is skipped; fails it instead with `NOWAIT_REQUIRE_TOOLS=1`. Always false.
pub fn skip(why: &str) -> bool {
    assert_ne!(
        std::env::var("NOWAIT_REQUIRE_TOOLS").as_deref(),
        Ok("1"),
        "{why}, and NOWAIT_REQUIRE_TOOLS=1"
    );
    say_skipped(why);
    false
}

/// Prints why a test is skipped where no tool could help: for another user or kernel it has effect.
pub fn say_skipped(why: &str) {
    // Not through libtest's capture, which would hide it in a test that passes.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
    list_skipped();
}

/// Appends the name of the test, which is the name of its thread, to the file that
/// `NOWAIT_SKIPPED` names, so that another user can run what was skipped.
fn list_skipped() {
    let Some(list) = std::env::var_os("NOWAIT_SKIPPED") else { return };
    let thread = std::thread::current();
    let name = thread.name().expect("a test skips in its own thread");
    let file = File::options().append(true).create(true).open(&list);
    // One write for a line: other tests append, too.
    let written = file.and_then(|mut file| file.write_all(format!("{name}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("{}: {error}", list.display()));
}

/// The value of `result`; without one, skips the test because there is no `what`.
pub fn required<T, E: Display>(what: &str, result: Result<T, E>) -> Option<T> {
    result.map_err(|error| skip(&format!("no {what}: {error}"))).ok()
}

/// True if `name` (on the path, or a path) can be run; else [`skip`].
pub fn require_tool(name: &str) -> bool {
    path_of(name).is_some() || skip(&format!("no {name}"))
}

/// The path of `name`, which is a path or on `PATH`.
pub fn path_of(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file())
}

/// Whether there are `qemu-img` and `qemu-io`; else [`skip`].
pub fn require_qemu() -> bool {
    require_tool("qemu-img") && require_tool("qemu-io")
}

/// Like [`require_tool`], for a Python interpreter with libnbd.
pub fn python_with_nbd() -> bool {
    let there = Path::new(PYTHON).is_file()
        && output(Command::new(PYTHON).args(["-c", "import nbd"])).status.success();
    there || skip("no python3-libnbd")
}

/// Like [`require_tool`], for /dev/fuse.
pub fn require_fuse() -> bool {
    let opened = File::options().read(true).write(true).open("/dev/fuse");
    opened.map_or_else(|error| skip(&format!("/dev/fuse cannot be opened: {error}")), |_| true)
}
