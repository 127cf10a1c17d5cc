//! The whole of nowait on simulated devices: real engines, real workers' code, clients that ask at
//! random, faults and power cuts, all of it following from a seed.
//!
//! The modules are listed in the order in which they know each other.
#![deny(unsafe_code)]

pub mod pattern;
pub mod model;
pub mod fibers;
pub mod scenario;
pub mod judge;
pub mod image;
pub mod front;
pub mod memory;
pub mod engines;
pub mod reply;
pub mod client;
pub mod server;
pub mod world;
pub mod run;
pub mod matrix;
pub mod trace;
