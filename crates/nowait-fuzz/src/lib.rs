//! Fuzzing of all code in nowait that reads untrusted bytes.
//!
//! A target is a function of bytes that returns an error if something is wrong. The driver feeds it
//! mutations of a corpus, derived from a seed, and watches for panics, hangs and memory use.
//!
//! The modules are listed in the order of their dependencies.
#![deny(unsafe_code)]

mod counting_allocator;
mod coverage;
mod split;
mod mutate;
mod target;
mod wire;
mod socket;
mod targets;
mod crash;
mod run;

pub use coverage::is_measured;
pub use run::{Limit, Plan, Report, replay, run};
pub use target::{Check, Target};
pub use targets::{ALL, by_name};
