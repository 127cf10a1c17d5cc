//! Helpers of the tests: servers, and disks of theirs.
//!
//! Invariant: no file outside a scratch directory is written.

mod server;

use std::path::Path;

pub(crate) use nowait_testkit::{
    Finished, GIB, KIB, MIB, PYTHON, Scratch, allocated, python_with_nbd, require_fuse,
    require_tool, tool,
};
pub(crate) use server::{Server, export};

/// A path of a test as text.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// Options that may only affect speed: each mechanism off, the other queue, the page cache, more threads.
pub(crate) const VARIANTS: [&str; 11] = [
    "",
    "off = ['simple']",
    "off = ['inline-completion']",
    "off = ['vectored']",
    "off = ['pool']",
    "off = ['nowait-first']",
    "off = ['back-off']",
    "off = ['hint']",
    "queue = 'threads'",
    "direct = 'off'",
    "threads = 3",
];
