//! The process of a nowait server: what `nowait serve` does when its command line is read.
//!
//! For programs that start servers by other means than the command: a manager of virtual machines, a container that is
//! one server, a test. What a server can be told is a [`config::ServeConfig`], plain data, which
//! [`config::config_file`] reads and writes as TOML. [`serve::run`] opens and locks images, binds sockets, confines the
//! process, serves until a signal comes, and flushes. [`serve::EmbeddedServer`] is one of several servers in a process with
//! other work; an export there is `nowait-server`.
//!
//! ```no_run
//! use std::fmt;
//! use std::path::Path;
//!
//! use nowait_daemon::config::config_file;
//! use nowait_daemon::{process, serve, upgrade};
//!
//! struct Quiet;
//!
//! impl serve::Output for Quiet {
//!     fn ready(&self, _lines: &str) {}
//!     fn note(&self, _text: fmt::Arguments<'_>) {}
//! }
//!
//! process::set_up();
//! // A server starts its own program again, for what a confined process may not do: the first of all.
//! if let Some(status) = upgrade::launcher::run_if_asked() {
//!     process::end(status);
//! }
//! let config = config_file::read(Path::new("/etc/nowait/disks.toml")).and_then(|config| {
//!     config.check()?;
//!     Ok(config)
//! });
//! match config {
//!     Ok(config) => {
//!         process::log::start(config.verbose);
//!         if let Err(error) = serve::run(&config, &Quiet) {
//!             eprintln!("{error}");
//!             process::end(error.status());
//!         }
//!     }
//!     Err(why) => {
//!         // A program that this one was to take over from goes on, and says why.
//!         upgrade::receiver::refuse(&why);
//!         eprintln!("{why}");
//!         process::end(2);
//!     }
//! }
//! ```
//!
//! Invariant: nothing here reads a command line, or prints but to the log; the process is this crate's: it forks, sets
//! signal handlers and limits, and ends.

pub mod error;
pub mod size;
pub mod secrets;
pub mod sandbox;
pub mod config;
pub mod process;
pub mod disks;
pub(crate) mod moves;
mod devices;
pub mod upgrade;
pub mod endpoints;
pub mod control;
mod renewed_files;
mod confinement;
pub mod summary;
pub mod serve;
#[cfg(feature = "fuzz")]
pub mod fuzz;
