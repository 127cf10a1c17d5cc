//! An NBD client that checks servers. It has no code in common with any server or client of the
//! workspace.

pub mod constants;
mod client;

pub use client::*;
pub use constants::*;
