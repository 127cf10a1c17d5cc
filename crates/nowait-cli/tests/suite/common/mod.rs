//! Helpers of the tests of the binary: servers, guests, loop devices.
//!
//! Invariant: every process that is started is stopped; no file outside the scratch directory is
//! written.

mod guest_watchdog;
mod guest;
pub(crate) mod disk_with_bitmaps;
mod server;
pub(crate) mod loop_device;

use std::path::{Path, PathBuf};

pub(crate) use guest::{Guest, Kernel, made_by_script};
pub(crate) use loop_device::LoopDevice;
pub(crate) use nowait_testkit::{
    Finished, GIB, KIB, MIB, PYTHON, Scratch, allocated, path_of, python_with_nbd, require_fuse,
    require_qemu, require_tool, skip, tool,
};
pub(crate) use server::{NOWAIT, Server, accepted, refusal, refusal_under};

/// A path of a test, as an argument.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// The program `nowait-bench`, which is built beside `nowait` unless a single package is selected; else [`skip`].
pub(crate) fn bench_program() -> Option<PathBuf> {
    let beside = Path::new(NOWAIT).with_file_name("nowait-bench");
    let there = beside.is_file() || skip("no nowait-bench: cargo build -p nowait-bench");
    there.then_some(beside)
}
