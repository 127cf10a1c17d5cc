//! Tests of a whole server in the process of the tests: what it is asked by control requests and clients of NBD.
//!
//! Invariant: a test depends on no state of the process, and several servers run simultaneously. What is about a process
//! (its command line, signals, messages, sandbox, memory, upgrades) is tested with the command `nowait`.

mod common;

mod embedded;
mod exports;
mod fairness;
mod interop;
mod limits;
mod model;
mod nbd_modes;
mod nbd_tools;
mod protocol_violations;
mod qemu;
