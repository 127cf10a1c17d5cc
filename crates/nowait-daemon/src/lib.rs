//! The process of a server: what it opens, in which order, and what it gives up before it serves.
//!
//! Invariant: what a server can be told is a [`config::ServeConfig`]; nothing here reads a command line.

pub mod error;
pub mod size;
pub mod secrets;
pub mod sandbox;
pub mod config;
pub mod process;
pub mod disks;
pub mod upgrade;
pub mod endpoints;
pub mod control;
mod renewed_files;
mod confinement;
pub mod summary;
pub mod serve;
#[cfg(feature = "fuzz")]
pub mod fuzz;
