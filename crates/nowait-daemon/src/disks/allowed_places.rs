//! Names that a control request may have: files, sockets and URIs.
//!
//! Invariant: a path is used without symbolic links, and only in a directory that the user has allowed;
//! a URI only if `--allow-uri` has it.

use nowait_image::snapshot_in;
use std::path::{Path, PathBuf};

use crate::error::{open_message, without_secrets};
use nowait_control::ControlError;
use nowait_remote::Location;

use crate::config::ServeConfig;
use crate::config::allowed_uri::AllowedUri;

/// The places that the user of a server has allowed.
pub(crate) struct AllowedPlaces {
    /// The directories of images, and those of sockets.
    pub(crate) directories: Vec<PathBuf>,
    pub(crate) directories_of_sockets: Vec<PathBuf>,
    pub(crate) uris: Vec<AllowedUri>,
    /// The directory of the bitmaps of raw disks.
    pub(crate) bitmaps: Option<PathBuf>,
}

impl AllowedPlaces {
    /// The places that `config` allow; `sockets` is the directory of default control sockets.
    pub(crate) fn of(config: &ServeConfig, sockets: Option<PathBuf>) -> Self {
        let directories = config.allow_dir.clone();
        let sockets = directories.iter().cloned().chain(sockets);
        Self {
            directories_of_sockets: sockets.collect(),
            directories,
            uris: config.allow_uri.clone(),
            bitmaps: config.bitmap_dir.clone(),
        }
    }

    /// The image that a request names: a URI as it is, or a path.
    pub(crate) fn image(&self, name: &str) -> Result<PathBuf, ControlError> {
        match Location::parse(&name.into()).map_err(ControlError::Invalid)? {
            Location::File(path) => {
                let path = absolute(&path)?;
                self.any_directory()?;
                inside(&self.directories, path)
            }
            _ if self.uris.iter().any(|allowed| allowed.allows(name)) => Ok(name.into()),
            _ if self.uris.is_empty() => Err(ControlError::Forbidden(
                "this server takes no URIs (it was started without --allow-uri)".into(),
            )),
            _ => Err(ControlError::Forbidden(format!(
                "--allow-uri does not allow {}",
                without_secrets(name)
            ))),
        }
    }

    /// The image below an overlay, which is not a file.
    pub(crate) fn backing(&self, name: &str) -> Result<Location, ControlError> {
        let location = Location::parse(&name.into()).map_err(ControlError::Invalid)?;
        match location {
            Location::File(_) => {
                let why = "an image below that is a file is not named, but found by its overlay";
                Err(ControlError::Invalid(why.into()))
            }
            _ => self.image(name).map(|_| location),
        }
    }

    /// The path of a file that is to be made at `path`.
    pub(crate) fn new_image(&self, path: &str) -> Result<PathBuf, ControlError> {
        self.any_directory()?;
        new_file(&self.directories, absolute(Path::new(path))?)
    }

    /// The directory for a file without a name: that of an image, `beside`, if new files are allowed there, or else the
    /// first one that is.
    pub(crate) fn directory_for_scratch(
        &self,
        beside: Option<&Path>,
    ) -> Result<PathBuf, ControlError> {
        let beside = beside.and_then(|directory| directory.canonicalize().ok());
        let allowed = beside.and_then(|directory| inside(&self.directories, &directory).ok());
        let first = || self.directories.first().cloned();
        allowed.or_else(first).ok_or_else(|| {
            ControlError::Forbidden(
                "this server makes no file for scratch (it was started without --allow-dir)".into(),
            )
        })
    }

    /// Whether the file with the bitmaps of a raw disk may be made at `path`, and replaced.
    pub(crate) fn allows_bitmaps(&self, path: &Path) -> bool {
        let directories = self.directories.iter().chain(&self.bitmaps).cloned().collect::<Vec<_>>();
        path.parent().is_some_and(|directory| inside(&directories, directory).is_ok())
    }

    /// The path of a socket that a request names: its directory is without symbolic links.
    pub(crate) fn socket(&self, path: &str) -> Result<PathBuf, ControlError> {
        new_file(&self.directories_of_sockets, absolute(Path::new(path))?)
    }

    fn any_directory(&self) -> Result<(), ControlError> {
        match self.directories.is_empty() {
            true => Err(ControlError::Forbidden(
                "this server takes no more images (it was started without --allow-dir)".into(),
            )),
            false => Ok(()),
        }
    }
}

/// `path`, which must be absolute.
///
/// # Errors
/// It is not.
pub(crate) fn absolute(path: &Path) -> Result<&Path, ControlError> {
    match path.is_absolute() {
        true => Ok(path),
        false => Err(ControlError::Invalid("a path must be absolute".into())),
    }
}

/// The file at `path`, without symbolic links, if that is in one of the directories `allowed`.
fn inside(allowed: &[PathBuf], path: &Path) -> Result<PathBuf, ControlError> {
    let allowed = allowed.iter().filter_map(|dir| dir.canonicalize().ok());
    // A path elsewhere is refused in the same words whether there is something or not.
    let (file, snapshot) = snapshot_in(path).unzip();
    match file.as_deref().unwrap_or(path).canonicalize() {
        Ok(real) if allowed.clone().any(|dir| real.starts_with(dir)) && snapshot.is_some() => {
            let mut name = real.into_os_string();
            name.push("@");
            name.push(snapshot.unwrap_or_default());
            Ok(name.into())
        }
        Ok(real) if allowed.clone().any(|dir| real.starts_with(dir)) => Ok(real),
        Err(error) if allowed.clone().any(|dir| path.starts_with(dir)) => {
            let why = open_message(path, "find it", &error);
            Err(ControlError::NotFound(format!("{}: {why}", path.display())))
        }
        _ => Err(ControlError::Forbidden(format!(
            "{} is not in a directory of --allow-dir",
            path.display()
        ))),
    }
}

/// The path of a file that is to be made at `path`, in one of the directories `allowed` or below.
fn new_file(allowed: &[PathBuf], path: &Path) -> Result<PathBuf, ControlError> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(ControlError::Invalid("the path names no file".into()));
    };
    Ok(inside(allowed, directory)?.join(name))
}
