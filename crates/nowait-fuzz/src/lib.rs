//! Mutated bytes for everything in nowait that reads bytes of strangers.
//!
//! A target is a function of bytes that says what is wrong, if something is. The driver feeds it
//! mutations of a corpus from a seed, and watches for panics, hangs and memory.
//!
//! The modules are listed in the order in which they know each other.
#![deny(unsafe_code)]

mod memory;
mod coverage;
mod pieces;
mod mutate;
mod target;
mod wire;
mod socket;
mod targets;
mod finding;
mod run;

pub use coverage::is_measured;
pub use run::{Limit, Plan, Report, replay, run};
pub use target::{Check, Target};
pub use targets::{ALL, by_name};
