//! Tests of the real `nowait` binary with external tools, guests, hostile clients and a model.
//!
//! One test program, so that the helpers are linked once and used in full. Invariant: every server
//! and every tool runs with a timeout, and a server ends with the test that started it.

mod common;

mod addresses_and_keys;
mod bench_copy;
mod bench_devices;
mod block_devices;
mod ceph;
mod ceph_s3;
mod completions_and_man;
mod copy;
mod copy_interrupted;
mod copy_other_servers;
mod copy_qcow2;
mod copy_rescue;
mod copy_tls;
mod control;
mod control_changes;
mod control_events;
mod control_tcp;
mod control_top;
mod create_resize_commit;
mod daemon;
mod errors;
mod exports;
mod fairness;
mod first_run;
mod format_detection;
mod guest;
mod hipri;
mod interop;
mod killed_server;
mod lifetime;
mod limits;
mod log_messages;
mod map_check_info;
mod memory;
mod model;
mod mutated;
mod nbd_modes;
mod nbd_tools;
mod panics;
mod polling;
mod protocol_violations;
mod qcow2;
mod qemu;
mod reachable_files;
mod sandbox;
mod remote_nbd;
mod remote_certificates;
mod remote_objects;
mod service;
mod signals;
mod snapshot;
mod stalled_storage;
mod storage_faults;
mod tls;
mod ublk;
mod ublk_pauses;
mod ublk_takeover;
mod upgrade;
mod vhost_user;
mod without_io_uring;
mod zero_size;
