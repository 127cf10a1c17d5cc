//! The file system with the bitmaps of a raw disk: that of the host, or a simulated one.
//!
//! Invariant: under its name there is a whole file or none, and no link is followed.

use std::fmt::Debug;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use crate::atomic_file::{AtomicFile, OverwritePolicy, sync_directory_of};
use crate::error::ImageError;
use crate::image_file::{ImageFile, Opening};

/// Writes a new file.
pub(crate) type Fill<'a> = &'a mut dyn FnMut(&ImageFile) -> Result<(), ImageError>;

/// A file system that has the file at `path`.
pub(crate) trait BitmapsFileSystem: Debug + Send + Sync {
    /// Whether there is something of that name.
    fn is_there(&self, path: &Path) -> bool;

    /// Opens the file.
    ///
    /// # Errors
    /// A refusal of a link; the errno of a failed system call.
    fn open(&self, path: &Path, opening: Opening) -> Result<ImageFile, ImageError>;

    /// Gives the name to the file that `fill` writes, durably: a new one, or one in the place of that which is there.
    ///
    /// # Errors
    /// That of `fill`; the file cannot be made. Then nothing has changed.
    fn write(&self, path: &Path, replaces: bool, fill: Fill<'_>) -> Result<(), ImageError>;

    /// Makes the name of the file durable: a process that was killed between a rename and its sync has not.
    ///
    /// # Errors
    /// The errno of a failed system call.
    fn sync_directory_of(&self, path: &Path) -> io::Result<()>;
}

/// The file systems of the host.
#[derive(Debug)]
pub(crate) struct HostFileSystem;

impl BitmapsFileSystem for HostFileSystem {
    fn is_there(&self, path: &Path) -> bool {
        path.symlink_metadata().is_ok()
    }

    fn open(&self, path: &Path, opening: Opening) -> Result<ImageFile, ImageError> {
        let parent = path.parent().unwrap_or(Path::new("/"));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(parent, flags, Mode::empty());
        let directory = directory.map_err(|error| ImageError::os(path, "open", &error.into()))?;
        let name = path.file_name().unwrap_or_default();
        match ImageFile::open_in(directory.as_fd(), name, path, opening) {
            Err(error) if error.errno() == libc::ELOOP => {
                Err(ImageError::refused(path, "it is a symbolic link, and not followed"))
            }
            opened => opened,
        }
    }

    fn write(&self, path: &Path, replaces: bool, fill: Fill<'_>) -> Result<(), ImageError> {
        let refused = |why: String| ImageError::refused(path, why);
        let policy = if replaces {
            let found = std::fs::symlink_metadata(path);
            let found = found.map_err(|error| ImageError::os(path, "look at it", &error))?;
            OverwritePolicy::File { mode: found.mode() }
        } else {
            OverwritePolicy::Nothing
        };
        let file = AtomicFile::create(path, 0, policy).map_err(refused)?;
        fill(file.file())?;
        file.finish().map_err(refused)
    }

    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        match sync_directory_of(path) {
            // A confined process, or one that could not have renamed the file either: that takes a sync of the directory, too.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            synced => synced,
        }
    }
}
