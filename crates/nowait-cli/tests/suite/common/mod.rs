//! Helpers of the tests: scratch directories, servers, external tools, an NBD client, random
//! numbers.
//!
//! Invariant: every process that is started is stopped; no file outside the scratch directory is
//! written.

pub(crate) mod certificates;
mod guest;
pub(crate) mod nbd;
pub(crate) mod random;
mod scratch;
mod server;
mod tool;
pub(crate) mod loop_device;
pub(crate) mod qcow2_image;

use std::path::Path;

pub(crate) use guest::{Guest, Kernel};
pub(crate) use loop_device::LoopDevice;
pub(crate) use scratch::{Scratch, allocated};
pub(crate) use server::{NOWAIT, Server, accepted, refusal, refusal_under};
pub(crate) use tool::{
    Finished, PYTHON, path_of, python_with_nbd, require_fuse, require_tool, skip, tool,
};

/// A path of a test, as an argument.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// Bytes in a KiB.
pub(crate) const KIB: u64 = 1024;
/// Bytes in a MiB.
pub(crate) const MIB: u64 = 1024 * KIB;
/// Bytes in a GiB.
pub(crate) const GIB: u64 = 1024 * MIB;

/// Arguments of `nowait serve` that may only affect speed: each mechanism off, the other queue, the
/// page cache, more threads.
pub(crate) const VARIANTS: [&[&str]; 10] = [
    &[],
    &["--off", "simple"],
    &["--off", "inline-completion"],
    &["--off", "vectored"],
    &["--off", "pool"],
    &["--off", "nowait-first"],
    &["--off", "hint"],
    &["--queue", "threads"],
    &["--direct", "off"],
    &["--queues", "3"],
];
