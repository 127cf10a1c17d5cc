//! Names of files that survive a loss of power.
//!
//! Invariant: a directory is synced after its names have changed.

use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use crate::types::error::{Error, Operation};

/// Makes the names in the directory at `path` durable, after files in it were made, renamed or
/// removed. It blocks.
///
/// # Errors
/// The errno of open(2) and fsync(2); `ENOTDIR` for what is not a directory.
pub fn sync_directory(path: &Path) -> Result<(), Error> {
    sync(path, OFlags::DIRECTORY)
}

/// Renames a file durably: when this returns, `to` is the file that was `from`, after a loss of power as
/// well; a loss of power before leaves the old file or the new one, whole. Its data are synced first,
/// then the directories of both names. It blocks.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// let (new, name) = (dir.path().join("settings.new"), dir.path().join("settings"));
/// std::fs::write(&new, b"colour = blue")?;
/// nowait::durable_rename(&new, &name)?;
/// assert_eq!(std::fs::read(&name)?, b"colour = blue");
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The errno of open(2), fsync(2) and rename(2). If a directory could not be synced, the file has its
/// new name, but perhaps not after a loss of power.
pub fn durable_rename(from: &Path, to: &Path) -> Result<(), Error> {
    sync(from, OFlags::empty())?;
    rustix::fs::rename(from, to).map_err(|error| Error::from_os(error, Operation::Write))?;
    let (old, new) = (directory_of(from), directory_of(to));
    sync_directory(new)?;
    if old == new { Ok(()) } else { sync_directory(old) }
}

fn directory_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// fsync(2) of the file or directory at `path`, which is opened for reading or else for writing.
fn sync(path: &Path, flags: OFlags) -> Result<(), Error> {
    let open = |access| {
        let flags = flags | access | OFlags::CLOEXEC | OFlags::NONBLOCK;
        retry_on_intr(|| rustix::fs::open(path, flags, Mode::empty()))
    };
    let opened = match open(OFlags::RDONLY) {
        Err(Errno::ACCESS) => open(OFlags::WRONLY),
        other => other,
    };
    let file = opened.map_err(|error| Error::from_os(error, Operation::Open))?;
    retry_on_intr(|| rustix::fs::fsync(&file))
        .map_err(|error| Error::from_os(error, Operation::Flush))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_directory_is_in_the_present_one() {
        for (path, directory) in [("a", "."), ("./a", "."), ("b/a", "b"), ("/a", "/"), ("/", ".")] {
            assert_eq!(directory_of(Path::new(path)), Path::new(directory), "{path}");
        }
    }

    #[test]
    fn a_rename_moves_a_file_between_directories_and_says_what_is_wrong() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &str| parent.path().join(name);
        std::fs::create_dir(at("other")).unwrap();
        std::fs::write(at("new"), b"two").unwrap();
        std::fs::write(at("other/old"), b"one").unwrap();
        durable_rename(&at("new"), &at("other/old")).unwrap();
        assert_eq!(std::fs::read(at("other/old")).unwrap(), b"two");
        assert!(!at("new").exists());
        sync_directory(parent.path()).unwrap();
        let errno = |done: Result<(), Error>| done.unwrap_err().errno();
        assert_eq!(errno(durable_rename(&at("new"), &at("x"))), libc::ENOENT);
        assert_eq!(errno(durable_rename(&at("other/old"), &at("none/x"))), libc::ENOENT);
        assert_eq!(errno(sync_directory(&at("other/old"))), libc::ENOTDIR);
        assert_eq!(errno(sync_directory(&at("none"))), libc::ENOENT);
    }
}
