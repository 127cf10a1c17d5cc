//! The sandbox of a server: what the process gives up when everything it needs is open.
//!
//! Invariant: what is given up holds for all threads of the process, also for those that were
//! started before, and never comes back.

mod all_threads;
mod file_access;
mod system_calls;

pub use file_access::FileAccess;

use crate::error::{CliError, os_message};

/// Whether a server is confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Confined as far as the kernel can do it.
    Auto,
    /// Confined, and a kernel without landlock or seccomp is an error.
    On,
}

/// Confines this process: no new privileges, no files and no TCP connections but those of `files`, no
/// system calls but those that a server makes. Returns what is in force, for the log.
///
/// # Errors
/// With [`Mode::On`] the kernel lacks landlock or seccomp, or they are forbidden here. In either
/// mode one of several threads could not be confined.
pub fn enter(mode: Mode, files: &FileAccess) -> Result<String, CliError> {
    rustix::thread::set_no_new_privs(true)
        .map_err(|errno| failed(format!("no_new_privs: {}", os_message(&errno.into()))))?;
    let mut parts = vec!["no_new_privs".to_owned()];
    // The filter of system calls comes last: it has no calls of landlock.
    parts.push(required(mode, "landlock", file_access::enter(files)?)?);
    parts.push(required(mode, "seccomp", system_calls::enter(files))?);
    Ok(parts.join(", "))
}

/// The text for a part that is in force, or for one that may be missing.
fn required(mode: Mode, part: &str, entered: Result<(), String>) -> Result<String, CliError> {
    match (mode, entered) {
        (_, Ok(())) => Ok(part.to_owned()),
        (Mode::Auto, Err(why)) => Ok(format!("no {part} ({why})")),
        (Mode::On, Err(why)) => Err(failed(format!("{part}: {why}"))),
    }
}

fn failed(why: impl std::fmt::Display) -> CliError {
    CliError::new(format!("--sandbox: {why} (leave it out, or give --sandbox off)"))
}
