//! The real `nowait` binary against other people's tools, a guest, hostile peers and a model.
//!
//! One test program, so that the helpers are linked once and used in full. Invariant: every server and
//! every tool runs under a time bound, and a server that a test starts is gone when the test is.
//! Knows: the command line and NBD, nothing inside the crates but the engine's face. Known by: nobody.

mod common;

mod abuse;
mod bench_copy;
mod changes;
mod copy;
mod copy_cut;
mod copy_peers;
mod copy_qcow2;
mod copy_tls;
mod errors;
mod exports;
mod fair;
mod first_run;
mod guest;
mod images;
mod interop;
mod limits;
mod killed;
mod memory;
mod model;
mod mutated;
mod nbd_modes;
mod nbd_tools;
mod polled;
mod qcow2;
mod qemu;
mod seccomp;
mod service;
mod standstill;
mod storage_faults;
mod tls;
