//! The defaults of `serve` without arguments: an image in the user's state directory and a private
//! socket.
//!
//! Invariant: only the user has access to either; an image with content is never changed here, and
//! a directory that was made for one run is removed after it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nowait_nbd::Address;

use crate::config::listen_address;
use crate::error::{CliError, os_message};
use crate::process::owned_paths;

const IMAGE_NAME: &str = "nowait.img";
const IMAGE_BYTES: u64 = 1 << 30;
const IMAGE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;
/// The mode bits by which others than its owner access a directory, and those by which they change it.
pub(crate) const OTHERS: u32 = 0o077;
const OTHERS_WRITE: u32 = 0o022;
/// The limit of names tried for a temporary directory; a name exists only if an earlier process
/// with the same PID died without removing its directory.
const TEMPORARY_NAMES: u32 = 1000;
const TEMPORARY_PREFIX: &str = "nowait-";

/// The path of the default image: `nowait/nowait.img` in the user's state directory, made as a
/// sparse file of 1 GiB if it is not there.
///
/// # Errors
/// The state directory is unknown (no `HOME`), or it or the image cannot be made.
pub(crate) fn image() -> Result<PathBuf, CliError> {
    let directory = state_directory(env::var_os("XDG_STATE_HOME"), env::var_os("HOME"))
        .ok_or_else(|| CliError::new("no IMAGE given, and HOME is not set (give an IMAGE)"))?;
    image_in(&directory.join("nowait"))
}

/// The XDG base directory specification: `XDG_STATE_HOME` if it is absolute, else
/// `~/.local/state`.
fn state_directory(state_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    state_home.and_then(absolute).or_else(|| Some(home.and_then(absolute)?.join(".local/state")))
}

fn image_in(directory: &Path) -> Result<PathBuf, CliError> {
    let cannot = |path: &Path, error: &io::Error| {
        CliError::at(path, format_args!("cannot create: {} (give an IMAGE)", os_message(error)))
    };
    private_directory(directory).map_err(|error| cannot(directory, &error))?;
    let path = directory.join(IMAGE_NAME);
    match OpenOptions::new().write(true).create(true).mode(IMAGE_MODE).open(&path) {
        Ok(file) => {
            // Empty means new, or left by a process that died here; two concurrent processes do the
            // same.
            let size = file.metadata().map_err(|error| cannot(&path, &error))?.len();
            if size == 0 {
                file.set_len(IMAGE_BYTES).map_err(|error| cannot(&path, &error))?;
            }
        }
        // A read-only file can still be served read-only.
        Err(_) if path.is_file() => {}
        Err(error) => return Err(cannot(&path, &error)),
    }
    Ok(path)
}

/// Creates `directory` and its missing parents, accessible to the user only.
fn private_directory(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(directory)
}

/// The socket of a server without an address. It must live as long as the server runs: its drop
/// removes the temporary directory that was made for the socket, and the socket in it. A socket in
/// the user's runtime directory is removed by the listener that bound it.
pub(crate) struct DefaultSocket {
    /// The address; always a Unix socket.
    pub(crate) listen: Address,
    temporary: Option<PathBuf>,
}

impl DefaultSocket {
    /// The socket at `listen` that another process has made, with its `temporary` directory.
    pub(crate) fn handed_over(listen: Address, temporary: PathBuf) -> Self {
        Self { listen, temporary: Some(temporary) }
    }

    /// The temporary directory that was made for it.
    pub(crate) fn temporary(&self) -> Option<&Path> {
        self.temporary.as_deref()
    }

    /// Removes the temporary directory and its socket. Can be called again.
    pub(crate) fn remove(&self) {
        if let Some(directory) = &self.temporary {
            // The directory holds no other file. A failure leaves an empty directory at worst.
            if let Address::Unix(socket) = &self.listen {
                let _ = owned_paths::remove_file(socket);
            }
            let _ = owned_paths::remove_directory(directory);
        }
    }
}

impl Drop for DefaultSocket {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A socket for the server of `image`: `NAME.sock` in the runtime directory of its unit, else in that of this user, NAME
/// being the image's file name without its extension; or, where there is no such directory, in a new temporary one that
/// no other user can enter.
///
/// # Errors
/// No directory can be made, or the path is too long for a socket.
pub(crate) fn socket(image: &Path) -> Result<DefaultSocket, CliError> {
    let name = socket_name(image);
    let (directory, temporary) = match directory_of_sockets() {
        Some(directory) => (directory, None),
        None => {
            let directory = temporary_directory(&env::temp_dir())?;
            (directory.clone(), Some(directory))
        }
    };
    let path = directory.join(name);
    match listen_address::unix(path.clone()) {
        Ok(listen) => Ok(DefaultSocket { listen, temporary }),
        Err(why) => {
            if let Some(directory) = temporary {
                let _ = fs::remove_dir(directory);
            }
            Err(CliError::at(&path, format_args!("{why} (choose one with --nbd)")))
        }
    }
}

fn socket_name(image: &Path) -> OsString {
    let mut name = image.file_stem().unwrap_or("nowait".as_ref()).to_owned();
    name.push(".sock");
    name
}

/// The directory for default sockets that is there, and stays.
pub(crate) fn directory_of_sockets() -> Option<PathBuf> {
    let of_unit = directory_of_unit(env::var_os("RUNTIME_DIRECTORY"), OTHERS_WRITE);
    of_unit.or_else(|| runtime_directory(env::var_os("XDG_RUNTIME_DIR")))
}

/// The first of the runtime directories that systemd has made for the unit of this process (systemd.exec(5)), if it is
/// this user's and has none of the mode bits `forbidden`.
pub(crate) fn directory_of_unit(all: Option<OsString>, forbidden: u32) -> Option<PathBuf> {
    let all = all?;
    let first = all.as_bytes().split(|byte| *byte == b':').next()?;
    let first = PathBuf::from(OsStr::from_bytes(first));
    (first.is_absolute() && is_own(&first, forbidden)).then_some(first)
}

/// Whether `directory` is this user's and has none of the mode bits `forbidden`.
pub(crate) fn is_own(directory: &Path, forbidden: u32) -> bool {
    let user = rustix::process::geteuid().as_raw();
    fs::metadata(directory)
        .is_ok_and(|found| found.is_dir() && found.uid() == user && found.mode() & forbidden == 0)
}

/// `nowait` in `runtime`, or `None` where it cannot be created or `runtime` belongs to another user
/// (as after su).
pub(crate) fn runtime_directory(runtime: Option<OsString>) -> Option<PathBuf> {
    let runtime = PathBuf::from(runtime?);
    let owner = fs::metadata(&runtime).ok()?.uid();
    if !runtime.is_absolute() || owner != rustix::process::geteuid().as_raw() {
        return None;
    }
    let directory = runtime.join("nowait");
    private_directory(&directory).ok()?;
    Some(directory)
}

/// Whether `directory` can be one that a server has made for its socket.
pub(crate) fn is_temporary(directory: &Path) -> bool {
    let name = directory.file_name().and_then(|name| name.to_str()?.strip_prefix(TEMPORARY_PREFIX));
    let is_numbers = name.is_some_and(|numbers| {
        numbers.split_once('-').is_some_and(|(process, n)| {
            [process, n].iter().all(|number| number.parse::<u32>().is_ok())
        })
    });
    is_numbers && directory.parent() == Some(&env::temp_dir())
}

/// A new directory in `parent`. mkdir(2) fails for an existing name, so the directory is always
/// this process's own.
fn temporary_directory(parent: &Path) -> Result<PathBuf, CliError> {
    for n in 0..TEMPORARY_NAMES {
        let directory = parent.join(format!("{TEMPORARY_PREFIX}{}-{n}", std::process::id()));
        match DirBuilder::new().mode(DIRECTORY_MODE).create(&directory) {
            Ok(()) => return Ok(directory),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => {
                let why = format!("cannot create: {} (give --nbd unix:PATH)", os_message(&error));
                return Err(CliError::at(&directory, why));
            }
        }
    }
    let why = "no free name for a temporary directory (remove old nowait-* ones)";
    Err(CliError::at(parent, why))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn the_state_directory_is_xdg_state_home_else_below_home() {
        let state = |xdg: &str, home: &str| {
            let given = |value: &str| (!value.is_empty()).then(|| OsString::from(value));
            state_directory(given(xdg), given(home))
        };
        assert_eq!(state("/s", "/h"), Some("/s".into()));
        assert_eq!(state("", "/h"), Some("/h/.local/state".into()));
        assert_eq!(state("relative", "/h"), Some("/h/.local/state".into()));
        assert_eq!(state("", "relative"), None);
        assert_eq!(state("", ""), None);
    }

    #[test]
    fn the_default_image_is_made_private_sparse_and_1_gib() {
        let state = tempfile::tempdir().unwrap();
        let directory = state.path().join("state/nowait");
        let path = image_in(&directory).unwrap();
        let found = fs::metadata(&path).unwrap();
        assert_eq!((found.len(), found.blocks()), (IMAGE_BYTES, 0));
        assert_eq!((mode(&path), mode(&directory)), (0o600, 0o700));
    }

    #[test]
    fn a_default_image_with_content_is_left_unchanged() {
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join(IMAGE_NAME);
        fs::write(&path, "precious").unwrap();
        assert_eq!(image_in(state.path()).unwrap(), path);
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn an_empty_default_image_is_completed() {
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join(IMAGE_NAME);
        fs::write(&path, "").unwrap();
        image_in(state.path()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), IMAGE_BYTES);
    }

    #[test]
    fn a_socket_is_called_like_its_image() {
        assert_eq!(socket_name(Path::new("/a/disk.img")), "disk.sock");
        assert_eq!(socket_name(Path::new("/dev/vdb")), "vdb.sock");
        assert_eq!(socket_name(Path::new("..")), "nowait.sock");
    }

    #[test]
    fn the_runtime_directory_is_used_only_where_it_exists() {
        let runtime = tempfile::tempdir().unwrap();
        let directory = runtime_directory(Some(runtime.path().into())).unwrap();
        assert_eq!(directory, runtime.path().join("nowait"));
        assert_eq!(mode(&directory), 0o700);
        assert_eq!(runtime_directory(Some(runtime.path().join("missing").into())), None);
        assert_eq!(runtime_directory(Some("relative".into())), None);
        assert_eq!(runtime_directory(None), None);
    }

    #[test]
    fn the_directory_of_a_unit_is_its_first_and_no_other_user_can_change_it() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("run");
        let of = |mode: u32, forbidden| {
            let _ = fs::remove_dir(&path);
            DirBuilder::new().create(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let all = format!("{}:/nowhere", path.display()).into();
            directory_of_unit(Some(all), forbidden)
        };
        for (mode, forbidden) in [(0o700, OTHERS), (0o755, OTHERS_WRITE), (0o700, OTHERS_WRITE)] {
            assert_eq!(of(mode, forbidden), Some(path.clone()), "{mode:o}");
        }
        for (mode, forbidden) in [(0o750, OTHERS), (0o775, OTHERS_WRITE), (0o757, OTHERS_WRITE)] {
            assert_eq!(of(mode, forbidden), None, "{mode:o}");
        }
        for no_directory in ["", "relative", "/nowhere", "/dev/null", "/nowhere:/tmp"] {
            assert_eq!(directory_of_unit(Some(no_directory.into()), 0), None, "{no_directory}");
        }
        assert_eq!(directory_of_unit(None, 0), None);
    }

    #[test]
    fn temporary_directories_are_new_private_and_removed_with_their_socket() {
        let parent = tempfile::tempdir().unwrap();
        let first = temporary_directory(parent.path()).unwrap();
        let second = temporary_directory(parent.path()).unwrap();
        assert_ne!(first, second);
        assert_eq!((mode(&first), mode(&second)), (0o700, 0o700));
        let path = first.join("disk.sock");
        fs::write(&path, "").unwrap();
        drop(DefaultSocket { listen: Address::Unix(path), temporary: Some(first.clone()) });
        assert!(!first.exists() && second.exists());
    }
}
