//! Tests of the real `nowait` binary with external tools, guests, hostile clients and a model.
//!
//! One test program, so that the helpers are linked once and used in full. Invariant: every server
//! and every tool runs with a timeout, and a server ends with the test that started it.

mod common;

mod abuse;
mod bench_copy;
mod block_devices;
mod changes;
mod copy;
mod copy_cut;
mod copy_peers;
mod copy_qcow2;
mod copy_rescue;
mod copy_tls;
mod errors;
mod exports;
mod fair;
mod first_run;
mod formats;
mod guest;
mod images;
mod interop;
mod limits;
mod listening;
mod logged;
mod killed;
mod lifetime;
mod memory;
mod model;
mod mutated;
mod nbd_modes;
mod nbd_tools;
mod opening;
mod panics;
mod polled;
mod qcow2;
mod qemu;
mod seccomp;
mod service;
mod setup;
mod signals;
mod standstill;
mod storage_faults;
mod tls;
mod zero_size;
