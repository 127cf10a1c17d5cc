//! Tools that the tests of all crates share. A dev-dependency only, and not published.
//!
//! Invariant: the NBD client here checks servers and shares no code with them. A wait is bounded by
//! [`wait::BOUND`], and a test that cannot run says so by [`requirements::skip`].
#![deny(unsafe_code)]

pub mod wait;
pub mod random;
pub mod process;
pub mod requirements;
pub mod scratch;
pub mod written_docs;
pub mod file_systems;
pub mod instructions;
pub mod allocations;
pub mod engines;
pub mod model;
pub mod worker_only_image;
pub mod qcow2_image;
#[cfg(feature = "tls")]
pub mod certificates;
pub mod nbd;
pub mod control_socket;
#[cfg(feature = "control")]
pub mod recording_server;
#[cfg(feature = "web")]
pub mod web_request;
#[cfg(feature = "web")]
pub mod token_service;
#[cfg(feature = "web")]
pub mod signer;
#[cfg(feature = "web")]
pub mod multipart_upload;
#[cfg(feature = "web")]
pub mod bucket;
#[cfg(feature = "web")]
pub mod web_proxy;
#[cfg(feature = "web")]
pub mod web_script;
#[cfg(feature = "http2")]
mod http2_store;
#[cfg(feature = "web")]
pub mod web_server;

pub use control_socket::ControlSocket;
pub use engines::{TestQueueKind, WaitForRequests, switches};
pub use file_systems::on_each_file_system;
pub use process::{
    Finished, Running, ends_with_program, ends_with_test, no_child_starts, output, tool,
};
pub use random::{Random, seed};
pub use requirements::{
    PYTHON, path_of, python_with_nbd, require_fuse, require_qemu, require_tool, required,
    say_skipped, skip,
};
pub use scratch::{Scratch, allocated};
pub use wait::{BOUND, SetOnDrop, output_of, wait_for, wait_for_exit, wait_until, within};

/// Bytes in a KiB.
pub const KIB: u64 = 1024;
/// Bytes in a MiB.
pub const MIB: u64 = 1024 * KIB;
/// Bytes in a GiB.
pub const GIB: u64 = 1024 * MIB;
