//! The process that does for a server what this may not do itself.
//!
//! Invariant: a confined server has one, or is not started.

use std::sync::Arc;

use rustix::process::Rlimit;

use crate::config::ServeConfig;
use crate::error::CliError;
use crate::process::background::Detached;
use crate::upgrade::credential_processes;
use crate::upgrade::launcher::{Launcher, Starts};
use crate::upgrade::receiver_policy::files_of_images;

/// The process that changes the names of this server, and the command line of the program that gives it credentials.
pub(super) type Changer = (Arc<Launcher>, Option<String>);
/// The process that starts the next program, or why there is none; the one that changes names.
pub(super) type Launchers = (Result<Arc<Launcher>, String>, Option<Changer>);

/// The process that starts the next program, or why there is none, and the one that changes the names of this server if it
/// is confined.
///
/// # Errors
/// A confined server's cannot be started; as [`credential_processes::command_of`].
pub(super) fn launchers(
    config: &ServeConfig,
    descriptors: Rlimit,
    detached: &Detached,
) -> Result<Launchers, CliError> {
    let command = credential_processes::command_of(config)?;
    let is_confined = config.sandbox.mode().is_some();
    let (starts, why) = match (why_no_upgrade(config), is_confined) {
        (Some(why), false) => return Ok((Err(why.into()), None)),
        (Some(why), true) => (Starts::Nothing, Some(why)),
        (None, true) => (Starts::Own, None),
        (None, false) => (Starts::Any, None),
    };
    let mut variables =
        if starts == Starts::Nothing { Vec::new() } else { files_of_images(config) };
    variables.extend(
        credential_processes::variable(command.as_deref()).filter(|_| starts == Starts::Own),
    );
    let launcher = Launcher::start(detached, starts, config.fork, descriptors, variables);
    let changer = match &launcher {
        Ok(launcher) => is_confined.then(|| (launcher.clone(), command)),
        Err(why) if is_confined => return Err(CliError::new(why)),
        Err(_) => None,
    };
    Ok((why.map_or(launcher, |why| Err(why.into())), changer))
}

/// Why the program of this server cannot be exchanged, if that is so.
fn why_no_upgrade(config: &ServeConfig) -> Option<&'static str> {
    if let Some(why) = config.cannot_open_twice() {
        return Some(why);
    }
    if config.exit_with_parent {
        return Some("the process that started this server would not know the new one");
    }
    if std::process::id() == 1 {
        return Some("this server is process 1, with which its container stops");
    }
    config.control_is_off().then_some("there is no control socket")
}
