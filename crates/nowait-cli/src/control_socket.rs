//! The control socket of a server, and where those of this user's servers are.
//!
//! Invariant: a directory that another user could change is not used.

use std::fs::{self, DirBuilder, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nowait_cli::error::{CliError, create_message, os_message};
use nowait_nbd::Address;
use nowait_server::Listener;
use rustix::process::{Pid, geteuid, test_kill_process};

use crate::args::control_args::ControlAddress;
use crate::default_image;
use crate::upgrade::messages::ListenerState;
use crate::upgrade::take_over::HandedListener;

const PREFIX: &str = "control-";
const SUFFIX: &str = ".sock";

/// The control socket of this process by default; `None` where there is no directory for it.
pub(crate) fn of_this_process() -> Option<PathBuf> {
    Some(directory()?.join(format!("{PREFIX}{}{SUFFIX}", std::process::id())))
}

/// The control sockets of this user's servers, in the order of their processes. Those of processes
/// that have ended are removed.
pub(crate) fn all() -> Vec<PathBuf> {
    let entries = directory().and_then(|directory| fs::read_dir(directory).ok());
    let paths = entries.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<(Pid, PathBuf)> =
        paths.filter_map(|path| Some((process_of(&path)?, path))).collect();
    found.retain(|(process, path)| {
        let runs = test_kill_process(*process) != Err(rustix::io::Errno::SRCH);
        if !runs {
            // Another command may have removed it.
            let _ = fs::remove_file(path);
        }
        runs
    });
    found.sort_by_key(|(process, _)| process.as_raw_nonzero());
    found.into_iter().map(|(_, path)| path).collect()
}

fn process_of(path: &Path) -> Option<Pid> {
    let number = path.file_name()?.to_str()?.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    Pid::from_raw(number.parse().ok()?)
}

/// `nowait` in the user's runtime directory, else `nowait-UID` in the directory for temporary files.
pub(crate) fn directory() -> Option<PathBuf> {
    if let Some(directory) = default_image::runtime_directory(std::env::var_os("XDG_RUNTIME_DIR")) {
        return Some(directory);
    }
    let user = geteuid().as_raw();
    let directory = std::env::temp_dir().join(format!("nowait-{user}"));
    // One that is there already is looked at below.
    let _ = DirBuilder::new().mode(0o700).create(&directory);
    let found = fs::symlink_metadata(&directory).ok()?;
    let is_private = found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0;
    is_private.then_some(directory)
}

/// A control socket that is bound. It is removed when this is dropped.
pub(crate) struct BoundSocket {
    pub(crate) listener: Listener,
    pub(crate) path: PathBuf,
    is_given: bool,
}

/// Binds the control socket at `address`, or the default one. Without a directory for that, or if it
/// is in use, there is none, and the log says so.
///
/// # Errors
/// The address that was given cannot be bound.
pub(crate) fn bind(
    address: Option<&ControlAddress>,
    handed: Option<HandedListener>,
) -> Result<Option<BoundSocket>, CliError> {
    if let Some(HandedListener { listener, address: Address::Unix(path), .. }) = handed {
        return Ok(Some(BoundSocket { listener, path, is_given: true }));
    }
    let (path, is_given) = match address {
        Some(ControlAddress::Off | ControlAddress::Tcp { .. }) => return Ok(None),
        Some(ControlAddress::Unix(path)) => (path.clone(), true),
        None => match of_this_process() {
            Some(path) => (path, false),
            None => {
                tracing::info!("no control socket: there is no directory for it");
                return Ok(None);
            }
        },
    };
    // What others may do with the socket: nothing. The interface also asks who connects.
    let bound = Listener::unix(&path).and_then(|listener| {
        fs::set_permissions(&path, Permissions::from_mode(0o600)).map(|()| listener)
    });
    match bound {
        Ok(listener) => Ok(Some(BoundSocket { listener, path, is_given })),
        Err(error) if is_given => Err(CliError::at(&path, create_message("listen", &error))),
        Err(error) => {
            tracing::info!("no control socket: {}: {error}", path.display());
            Ok(None)
        }
    }
}

impl BoundSocket {
    /// The socket for a program that takes over; `None` for the default one, which has the number of
    /// its process in its name.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub(crate) fn state(&self) -> Result<Option<(ListenerState, OwnedFd)>, CliError> {
        let address = Address::Unix(self.path.clone());
        let state = self.is_given.then(|| ListenerState::of(&self.listener, &address, None));
        state.transpose().map_err(|error| CliError::at(&self.path, os_message(&error)))
    }
}
