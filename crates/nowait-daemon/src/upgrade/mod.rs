//! The exchange of a running server's program: the new program takes over what the old one has.
//!
//! Invariant: until the new program has said that it is ready, the old one can go on; at no moment
//! do both serve.

mod channel;
mod host_names;
pub(crate) mod credential_processes;
pub(crate) mod messages;
pub mod launcher;
pub(crate) mod sender;
pub(crate) mod receiver_policy;
pub mod receiver;
pub(crate) mod paused_disks;

/// The variable of the environment that says what a process was started for: its standard input is
/// one end of a channel then.
const ENVIRONMENT: &str = "NOWAIT_UPGRADE";
/// To take over from a running server.
const SUCCESSOR: &str = "successor";
