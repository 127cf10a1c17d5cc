//! A file that is written under another name and gets its own when it is complete.
//!
//! Invariant: under its own name there is either what was there before or the complete file, on
//! storage; a file under the other name is not complete, and only its owner may read it.
//! Knows: error, host, lock. Known by: create, and by whoever copies to a file.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::words;
use crate::host::HostFile;
use crate::lock::{self, Access, LockError};

/// What is put behind the name of a file that is not complete.
const SUFFIX: &str = ".partial";
/// Whose bits every new file has, less the umask.
const MODE: u32 = 0o666;
const PRIVATE_MODE: u32 = 0o600;
const PERMISSION_BITS: u32 = 0o7777;

/// What stands under the name that the file is to get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replaces {
    /// Nothing; if something appears meanwhile, it stays.
    Nothing,
    /// A file with these permission bits, which the new one gets.
    File {
        /// As in `st_mode`.
        mode: u32,
    },
}

/// A file that is not complete. Removed when dropped before [`Partial::finish`].
#[derive(Debug)]
pub struct Partial {
    path: PathBuf,
    /// Holds the lock; is called by the name that it is to get.
    file: HostFile,
    replaces: Replaces,
    finished: bool,
}

impl Partial {
    /// A new file of `bytes` zeros beside `to`, locked. What a process that was killed has left
    /// there is taken over.
    ///
    /// # Errors
    /// Words that say why there is none; another process is writing one for `to`.
    pub fn create(to: &Path, bytes: u64, replaces: Replaces) -> Result<Self, String> {
        let mut name = to.file_name().ok_or("this names no file")?.to_owned();
        name.push(OsString::from(SUFFIX));
        let path = to.with_file_name(name);
        let cannot = |error: io::Error| explain(&path, &error);
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
        let file = HostFile::of(to.to_owned(), file);
        match lock::lock(file.fd(), Access::Write) {
            Ok(()) | Err(LockError::Unsupported) => {}
            Err(LockError::Conflict { .. }) => {
                return Err(format!("another process is writing {}", path.display()));
            }
            Err(error) => return Err(error.to_string()),
        }
        let partial = Self { path, file, replaces, finished: false };
        // Between open and lock another process may have given the file its name.
        if !partial.is_ours() {
            return Err("another process has just made it (try again)".into());
        }
        let cannot = |error: io::Error| explain(&partial.path, &error);
        partial.set_mode(PRIVATE_MODE).map_err(cannot)?;
        partial.file.set_len(0).and_then(|()| partial.file.set_len(bytes)).map_err(cannot)?;
        Ok(partial)
    }

    /// Where it is written.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is written to; it is called by the name that it is to get.
    #[must_use]
    pub const fn file(&self) -> &HostFile {
        &self.file
    }

    /// Gives it its name, for good: when this returns, a power cut takes neither that nor what was
    /// written back.
    ///
    /// # Errors
    /// Words that say what was in the way. The file is removed.
    pub fn finish(mut self) -> Result<(), String> {
        if !self.is_ours() {
            return Err(format!("somebody has removed {}", self.path.display()));
        }
        let mode = match self.replaces {
            Replaces::File { mode } => mode & PERMISSION_BITS,
            Replaces::Nothing => MODE & !umask(),
        };
        let synced = self.set_mode(mode).and_then(|()| Ok(rustix::fs::fsync(self.file.fd())?));
        synced.map_err(|error| words(&error))?;
        match self.rename() {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err("such a file has appeared meanwhile, and stays".into());
            }
            Err(error) => return Err(format!("cannot rename to it: {}", words(&error))),
        }
        self.finished = true;
        let directory = match self.file.path().parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let synced = File::open(directory).and_then(|directory| directory.sync_all());
        synced.map_err(|error| format!("its directory cannot be flushed: {}", words(&error)))
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        Ok(rustix::fs::fchmod(self.file.fd(), Mode::from_raw_mode(mode))?)
    }

    fn rename(&self) -> io::Result<()> {
        let to = self.file.path();
        if self.replaces != Replaces::Nothing {
            return fs::rename(&self.path, to);
        }
        match rustix::fs::renameat_with(CWD, &self.path, CWD, to, RenameFlags::NOREPLACE) {
            // The file system does not know the flag; a second name is not made where one is.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                fs::hard_link(&self.path, to)?;
                fs::remove_file(&self.path)
            }
            renamed => renamed.map_err(io::Error::from),
        }
    }

    /// Whether the file under the other name is the one that is open.
    fn is_ours(&self) -> bool {
        let (named, open) = (fs::symlink_metadata(&self.path), rustix::fs::fstat(self.file.fd()));
        matches!((named, open), (Ok(a), Ok(b)) if (a.dev(), a.ino()) == (b.st_dev, b.st_ino))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.finished && self.is_ours() {
            // What cannot be removed still does not look like the whole.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The bits that new files do not get. Read where reading does not change it (proc_pid_status(5));
/// where it cannot be read, nobody but the owner gets anything.
fn umask() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).unwrap_or(0o077)
}

fn explain(path: &Path, error: &io::Error) -> String {
    let name = path.display();
    match error.kind() {
        ErrorKind::NotFound => "its directory does not exist (make it first, with mkdir -p)".into(),
        ErrorKind::FileTooLarge => {
            format!("cannot make {name}: no file may be as large here (see ulimit -f)")
        }
        _ => format!("cannot make {name}: {}", words(error)),
    }
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
    fn until_it_is_finished_it_has_another_name_and_is_private() {
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        let partial = Partial::create(&to, BYTES, Replaces::Nothing).unwrap();
        assert_eq!(names(directory.path()), ["a.partial"]);
        assert_eq!((mode(partial.path()), partial.file.size().unwrap()), (0o600, BYTES));
        partial.finish().unwrap();
        assert_eq!(names(directory.path()), ["a"]);
        assert_eq!(mode(&to), MODE & !umask());
    }

    #[test]
    fn one_that_is_given_up_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        drop(Partial::create(&directory.path().join("a"), BYTES, Replaces::Nothing).unwrap());
        assert!(names(directory.path()).is_empty());
    }

    #[test]
    fn what_a_killed_copy_left_is_taken_over_and_empty() {
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        fs::write(directory.path().join("a.partial"), "old").unwrap();
        let partial = Partial::create(&to, BYTES, Replaces::Nothing).unwrap();
        assert_eq!(fs::read(partial.path()).unwrap(), vec![0; BYTES as usize]);
    }

    #[test]
    fn a_second_one_is_refused_while_the_first_lives() {
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        let first = Partial::create(&to, BYTES, Replaces::Nothing).unwrap();
        let refused = Partial::create(&to, 1, Replaces::Nothing).unwrap_err();
        assert!(refused.contains("another process is writing"), "{refused}");
        assert_eq!(first.file.size().unwrap(), BYTES);
        first.finish().unwrap();
        assert_eq!(names(directory.path()), ["a"]);
    }

    #[test]
    fn a_file_that_appeared_meanwhile_is_not_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        let partial = Partial::create(&to, BYTES, Replaces::Nothing).unwrap();
        fs::write(&to, "precious").unwrap();
        assert!(partial.finish().unwrap_err().contains("appeared meanwhile"));
        assert_eq!(fs::read(&to).unwrap(), b"precious");
        assert_eq!(names(directory.path()), ["a"]);
    }

    #[test]
    fn a_file_that_is_replaced_hands_on_its_permissions() {
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("a");
        fs::write(&to, "old").unwrap();
        fs::set_permissions(&to, fs::Permissions::from_mode(0o640)).unwrap();
        let partial = Partial::create(&to, BYTES, Replaces::File { mode: 0o100_640 }).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"old");
        partial.finish().unwrap();
        assert_eq!((mode(&to), fs::metadata(&to).unwrap().len()), (0o640, BYTES));
    }

    #[test]
    fn a_link_under_the_other_name_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let victim = directory.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, directory.path().join("a.partial")).unwrap();
        let to = directory.path().join("a");
        assert!(Partial::create(&to, BYTES, Replaces::Nothing).is_err());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }
}
