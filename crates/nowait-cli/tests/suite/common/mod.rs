//! What every test starts from: a scratch directory, a server, a foreign tool, an NBD client, random numbers.
//!
//! Invariant: what these start, they stop; nothing outside the scratch directory is written.
//! Knows: the command line of `nowait`. Known by: all tests of this program.

pub(crate) mod certificates;
mod guest;
pub(crate) mod nbd;
pub(crate) mod random;
mod scratch;
mod server;
mod tool;

pub(crate) use guest::{Guest, Kernel};
pub(crate) use scratch::{Scratch, allocated};
pub(crate) use server::{NOWAIT, Server, accepted, refusal, refusal_under};
pub(crate) use tool::{Finished, PYTHON, path_of, python_with_nbd, require_tool, skip, tool};

/// Bytes in a KiB.
pub(crate) const KIB: u64 = 1024;
/// Bytes in a MiB.
pub(crate) const MIB: u64 = 1024 * KIB;
/// Bytes in a GiB.
pub(crate) const GIB: u64 = 1024 * MIB;

/// Arguments of `nowait serve` that must change speed only: each mechanism off, the other queue,
/// the page cache, more threads.
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
