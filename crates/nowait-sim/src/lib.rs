//! A deterministic simulation of nowait: real engines and workers on simulated devices, random
//! requests, faults and power cuts, all derived from a seed.
//!
//! Each module uses only modules listed before it.
#![deny(unsafe_code)]

pub mod pattern;
pub mod model;
pub mod coroutines;
pub mod mode;
pub mod scenario;
pub mod protection;
pub mod oracle;
pub mod stored_bitmap;
pub mod image;
pub mod count_damage;
pub mod system_under_test;
pub mod guarded_memory;
pub mod engines;
pub mod reply;
pub mod client;
pub mod clients;
pub mod neighbours;
pub mod server;
pub mod virtio_driver;
pub mod vhost_server;
pub mod ublk_server;
pub mod simulation;
mod random_disk;
pub mod remote;
pub mod log;
pub mod backup;
pub mod raw_bitmaps;
pub mod moves;
pub mod run;
pub mod fault_matrix;
pub mod trace;
pub mod hosts;
