//! The control socket of a server, and where those of this user's servers are.
//!
//! Invariant: a directory that another user could change is not used.

use std::fs::{self, DirBuilder, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::{CliError, create_message, os_message};
use nowait_nbd::Address;
use nowait_server::Listener;
use rustix::process::geteuid;

use crate::config::control_address::ControlAddress;
use crate::disks::default_image;
use crate::upgrade::messages::ListenerState;
use crate::upgrade::receiver::ReceivedListener;

/// Where the system's units have their runtime directories.
const SYSTEM_UNITS: &str = "/run/nowait";
const PREFIX: &str = "control-";
const SUFFIX: &str = ".sock";

/// The control socket of this process by default; `None` where there is no directory for it.
pub(crate) fn of_this_process() -> Option<PathBuf> {
    Some(directory()?.join(format!("{PREFIX}{}{SUFFIX}", std::process::id())))
}

/// The control sockets of this user's servers, in the order of their processes; root's include those of the system's
/// units. Those that refuse connections are removed: a process that is not seen from here may run in another PID
/// namespace.
pub fn all() -> Vec<PathBuf> {
    let own = directory_of_user();
    let of_units = own.iter().cloned().chain(geteuid().is_root().then(|| SYSTEM_UNITS.into()));
    // Each unit has a directory of its own.
    let of_units = of_units.flat_map(|directory| entries(&directory)).filter(|path| path.is_dir());
    let directories = own.iter().cloned().chain(of_units);
    let paths = directories.flat_map(|directory| entries(&directory));
    let mut found: Vec<(u32, PathBuf)> =
        paths.filter_map(|path| Some((process_of(&path)?, path))).collect();
    found.retain(|(_, path)| {
        let refused = Listener::is_refused(path);
        if refused {
            // Another command may have removed it.
            let _ = fs::remove_file(path);
        }
        !refused
    });
    found.sort_by_key(|(process, _)| *process);
    found.into_iter().map(|(_, path)| path).collect()
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path()))
}

fn process_of(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok()
}

/// The runtime directory that systemd has made for the unit of this process, else that of all servers of this user.
pub(crate) fn directory() -> Option<PathBuf> {
    let of_unit = std::env::var_os("RUNTIME_DIRECTORY");
    let of_unit = default_image::directory_of_unit(of_unit, default_image::OTHERS);
    of_unit.or_else(directory_of_user)
}

/// `nowait` in the user's runtime directory, else `nowait-UID` in the directory for temporary files.
fn directory_of_user() -> Option<PathBuf> {
    if let Some(directory) = default_image::runtime_directory(std::env::var_os("XDG_RUNTIME_DIR")) {
        return Some(directory);
    }
    let user = geteuid().as_raw();
    let directory = std::env::temp_dir().join(format!("nowait-{user}"));
    // One that is there already is looked at below.
    let _ = DirBuilder::new().mode(0o700).create(&directory);
    (!directory.is_symlink() && default_image::is_own(&directory, default_image::OTHERS))
        .then_some(directory)
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
    handed: Option<ReceivedListener>,
) -> Result<Option<BoundSocket>, CliError> {
    if let Some(ReceivedListener { listener, address: Address::Unix(path), .. }) = handed {
        return Ok(Some(BoundSocket { listener, path, is_given: true }));
    }
    let (path, is_given) = match address {
        Some(ControlAddress::Off | ControlAddress::Tcp { .. }) => return Ok(None),
        Some(ControlAddress::Unix(path)) => (path.clone(), true),
        None if nowait_control::DISABLED.is_some() => return Ok(None),
        None => match of_this_process() {
            Some(path) => (path, false),
            None => {
                tracing::info!("no control socket: there is no directory for it");
                return Ok(None);
            }
        },
    };
    // Others have no access to the socket. The interface also checks who connects.
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
