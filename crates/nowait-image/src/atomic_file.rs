//! Atomic files: a file is written under a temporary name and renamed when it is complete.
//!
//! Invariant: under the final name there is either the former file or the complete new one,
//! durable; a file under the temporary name is not complete, and only its owner may read it.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::{create_message, os_message};
use crate::image_file::ImageFile;
use crate::lock;
use crate::lock::{Access, LockError};

/// The temporary name is the final one with this suffix.
const SUFFIX: &str = ".partial";
/// The permission bits of a new file, before the umask is applied.
const MODE: u32 = 0o666;
const PRIVATE_MODE: u32 = 0o600;
const PERMISSION_BITS: u32 = 0o7777;

/// Handling of a file that exists under the final name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverwritePolicy {
    /// No file exists; one that appears meanwhile stays.
    Nothing,
    /// A file exists and is replaced; the new one gets these permission bits.
    File {
        /// The bits of `st_mode`.
        mode: u32,
    },
}

/// A file that is not complete. It is removed if it is dropped before [`AtomicFile::finish`].
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    /// Holds the lock; its path is the final name.
    file: ImageFile,
    replaces: OverwritePolicy,
    /// The permission bits that were asked for.
    mode: Option<u32>,
    finished: bool,
}

impl AtomicFile {
    /// A new file of `bytes` zeros beside `to`, locked. The unfinished file of a process that was
    /// killed is taken over.
    ///
    /// # Errors
    /// A message with the reason, such as another process that is writing the file for `to`.
    pub fn create(to: &Path, bytes: u64, replaces: OverwritePolicy) -> Result<Self, String> {
        let mut name = to.file_name().ok_or("this names no file")?.to_owned();
        name.push(OsString::from(SUFFIX));
        let path = to.with_file_name(name);
        let doing = format!("make {}", path.display());
        let cannot = |error: io::Error| create_message(&doing, &error);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(PRIVATE_MODE)
            .custom_flags(OFlags::NOFOLLOW.bits() as i32)
            .open(&path)
            .map_err(cannot)?;
        if !file.metadata().map_err(cannot)?.is_file() {
            return Err(format!("{} is in the way (remove it)", path.display()));
        }
        let file = ImageFile::of(to.to_owned(), file).map_err(cannot)?;
        match lock::lock(file.fd().map_err(cannot)?, Access::Write) {
            Ok(()) | Err(LockError::Unsupported) => {}
            Err(LockError::Conflict { .. }) => {
                return Err(format!("another process is writing {}", path.display()));
            }
            Err(error) => return Err(error.to_string()),
        }
        let atomic = Self { path, file, replaces, mode: None, finished: false };
        // Between open and lock another process may have renamed the file to its final name.
        if !atomic.is_ours() {
            return Err("another process has just made it (try again)".into());
        }
        atomic.set_mode(PRIVATE_MODE).map_err(cannot)?;
        atomic.file.set_len(0).and_then(|()| atomic.file.set_len(bytes)).map_err(cannot)?;
        Ok(atomic)
    }

    /// This file, which gets the permission bits of `mode`, as in `st_mode`, with its name.
    #[must_use]
    pub fn with_mode(mut self, mode: u32) -> Self {
        self.mode = Some(mode);
        self
    }

    /// The temporary name.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file to write to; its path is the final name.
    #[must_use]
    pub const fn file(&self) -> &ImageFile {
        &self.file
    }

    /// Renames the file to its final name, durably: after the return a power cut loses neither the
    /// name nor the bytes.
    ///
    /// # Errors
    /// A message with the reason. The file is removed.
    pub fn finish(mut self) -> Result<(), String> {
        if !self.is_ours() {
            return Err(format!("somebody has removed {}", self.path.display()));
        }
        let mode = match (self.mode, self.replaces) {
            (Some(mode), _) | (None, OverwritePolicy::File { mode }) => mode & PERMISSION_BITS,
            (None, OverwritePolicy::Nothing) => MODE & !umask(),
        };
        let synced = self.set_mode(mode).and_then(|()| Ok(rustix::fs::fsync(self.file.fd()?)?));
        synced.map_err(|error| os_message(&error))?;
        match self.rename() {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err("such a file has appeared meanwhile, and stays".into());
            }
            Err(error) => return Err(format!("cannot rename to it: {}", os_message(&error))),
        }
        self.finished = true;
        let synced = sync_directory_of(self.file.path());
        synced.map_err(|error| format!("its directory cannot be flushed: {}", os_message(&error)))
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        Ok(rustix::fs::fchmod(self.file.fd()?, Mode::from_raw_mode(mode))?)
    }

    fn rename(&self) -> io::Result<()> {
        let to = self.file.path();
        if self.replaces != OverwritePolicy::Nothing {
            return fs::rename(&self.path, to);
        }
        match rustix::fs::renameat_with(CWD, &self.path, CWD, to, RenameFlags::NOREPLACE) {
            // The file system does not support the flag; link(2) fails where the name exists.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                fs::hard_link(&self.path, to)?;
                fs::remove_file(&self.path)
            }
            renamed => renamed.map_err(io::Error::from),
        }
    }

    /// Whether the file under the temporary name is the one that is open.
    fn is_ours(&self) -> bool {
        let open = self.file.fd().and_then(|fd| Ok(rustix::fs::fstat(fd)?));
        let named = fs::symlink_metadata(&self.path);
        matches!((named, open), (Ok(a), Ok(b)) if (a.dev(), a.ino()) == (b.st_dev, b.st_ino))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.finished && self.is_ours() {
            // A file that cannot be removed still has its temporary name.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes the name of the file at `path` durable.
///
/// # Errors
/// The errno of open(2) and fsync(2).
pub(crate) fn sync_directory_of(path: &Path) -> io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(directory)?.sync_all()
}

/// The umask, read from proc_pid_status(5), because umask(2) would change it; if it cannot be read,
/// only the owner gets access.
fn umask() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).unwrap_or(0o077)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const BYTES: u64 = 12_345;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & PERMISSION_BITS
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn an_unfinished_file_has_a_temporary_name_and_is_private() {
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        let atomic = AtomicFile::create(&to, BYTES, OverwritePolicy::Nothing).unwrap();
        assert_eq!(names(directory.path()), ["a.partial"]);
        assert_eq!((mode(atomic.path()), atomic.file.size().unwrap()), (0o600, BYTES));
        atomic.finish().unwrap();
        assert_eq!(names(directory.path()), ["a"]);
        assert_eq!(mode(&to), MODE & !umask());
    }

    #[test]
    fn a_file_gets_the_permissions_that_were_asked_for_with_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        let atomic = AtomicFile::create(&to, BYTES, OverwritePolicy::Nothing).unwrap();
        let atomic = atomic.with_mode(0o100_640);
        assert_eq!(mode(atomic.path()), 0o600);
        atomic.finish().unwrap();
        assert_eq!(mode(&to), 0o640);
    }

    #[test]
    fn a_dropped_file_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        drop(
            AtomicFile::create(&directory.path().join("a"), BYTES, OverwritePolicy::Nothing)
                .unwrap(),
        );
        assert!(names(directory.path()).is_empty());
    }

    #[test]
    fn the_unfinished_file_of_a_killed_process_is_taken_over_and_emptied() {
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        fs::write(directory.path().join("a.partial"), "old").unwrap();
        let atomic = AtomicFile::create(&to, BYTES, OverwritePolicy::Nothing).unwrap();
        assert_eq!(fs::read(atomic.path()).unwrap(), vec![0; BYTES as usize]);
    }

    #[test]
    fn a_second_file_for_the_same_name_is_refused_while_the_first_one_exists() {
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        let first = AtomicFile::create(&to, BYTES, OverwritePolicy::Nothing).unwrap();
        let refused = AtomicFile::create(&to, 1, OverwritePolicy::Nothing).unwrap_err();
        assert!(refused.contains("another process is writing"), "{refused}");
        assert_eq!(first.file.size().unwrap(), BYTES);
        first.finish().unwrap();
        assert_eq!(names(directory.path()), ["a"]);
    }

    #[test]
    fn a_file_that_appeared_meanwhile_is_not_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        let atomic = AtomicFile::create(&to, BYTES, OverwritePolicy::Nothing).unwrap();
        fs::write(&to, "precious").unwrap();
        assert!(atomic.finish().unwrap_err().contains("appeared meanwhile"));
        assert_eq!(fs::read(&to).unwrap(), b"precious");
        assert_eq!(names(directory.path()), ["a"]);
    }

    #[test]
    fn a_replaced_file_passes_its_permissions_to_the_new_one() {
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        fs::write(&to, "old").unwrap();
        fs::set_permissions(&to, fs::Permissions::from_mode(0o640)).unwrap();
        let atomic =
            AtomicFile::create(&to, BYTES, OverwritePolicy::File { mode: 0o100_640 }).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"old");
        atomic.finish().unwrap();
        assert_eq!((mode(&to), fs::metadata(&to).unwrap().len()), (0o640, BYTES));
    }

    #[test]
    fn a_link_under_the_temporary_name_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let victim = directory.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, directory.path().join("a.partial")).unwrap();
        let to = directory.path().join("a");
        assert!(AtomicFile::create(&to, BYTES, OverwritePolicy::Nothing).is_err());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }
}
