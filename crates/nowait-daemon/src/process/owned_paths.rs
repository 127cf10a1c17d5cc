//! The names that a confined server makes and removes: its sockets, its PID file, its log file, its token.
//!
//! Landlock has rights for what is below a directory, not for one name in it. So a server is given none of these
//! directories, and has its launcher change the names.
//!
//! Invariant: the launcher changes only names that were recorded before the server was confined, and of these only what
//! was the server's own then.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Who may read a new log file: its user and group.
const LOG_MODE: u32 = 0o640;
/// Has another process do a change.
pub(crate) type Changer = Box<dyn Fn(Change) -> io::Result<Option<File>> + Send + Sync>;

/// Changes the names of this process, once it is confined.
static CHANGER: OnceLock<Changer> = OnceLock::new();

/// Names of a server.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct OwnedPaths {
    /// Files and sockets, by their devices and inodes.
    files: Vec<(PathBuf, u64, u64)>,
    /// Directories, which are empty when they are removed.
    directories: Vec<PathBuf>,
    pid_file: Option<OwnedPidFile>,
    log_file: Option<PathBuf>,
}

/// A PID file, which appears later.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct OwnedPidFile {
    pub(crate) path: PathBuf,
    /// Its name until then.
    pub(crate) temporary: PathBuf,
    pub(crate) content: String,
}

/// A change of a name.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Change {
    RemoveFile(PathBuf),
    RemoveDirectory(PathBuf),
    AppearPidFile,
    RemovePidFile,
    OpenLog,
}

impl OwnedPaths {
    /// Records the file or socket at `path`, if there is one.
    pub(crate) fn file(&mut self, path: &Path) {
        let path = absolute(path);
        if let Ok(found) = fs::symlink_metadata(&path) {
            self.files.push((path, found.dev(), found.ino()));
        }
    }

    /// Records a directory.
    pub(crate) fn directory(&mut self, path: &Path) {
        self.directories.push(absolute(path));
    }

    /// Records the PID file.
    pub(crate) fn pid_file(&mut self, file: &OwnedPidFile) {
        self.pid_file = Some(file.clone());
    }

    /// Records the log file at `path`, which is absolute.
    pub(crate) fn log_file(&mut self, path: &Path) {
        self.log_file = Some(path.to_owned());
    }

    /// Does `change`. Returns the file that was opened.
    ///
    /// # Errors
    /// `EPERM`: the name is not recorded, or leads to another file now. The errors of the system call.
    pub(crate) fn change(&self, change: &Change) -> io::Result<Option<File>> {
        match change {
            Change::RemoveFile(path) => {
                let now = fs::symlink_metadata(path)?;
                let own = (path.clone(), now.dev(), now.ino());
                require(self.files.contains(&own)).and_then(|()| fs::remove_file(path))
            }
            Change::RemoveDirectory(path) => {
                require(self.directories.contains(path)).and_then(|()| fs::remove_dir(path))
            }
            Change::AppearPidFile => self.pid_file.as_ref().ok_or(Errno::PERM)?.rename(),
            Change::RemovePidFile => {
                self.pid_file.iter().for_each(OwnedPidFile::remove_here);
                Ok(())
            }
            Change::OpenLog => {
                return open_log_here(self.log_file.as_ref().ok_or(Errno::PERM)?).map(Some);
            }
        }
        .map(|()| None)
    }
}

impl OwnedPidFile {
    /// Gives the file its name, in place of an older one.
    ///
    /// # Errors
    /// rename(2) failed.
    pub(crate) fn appear(&self) -> io::Result<()> {
        or_by_changer(self.rename(), || Change::AppearPidFile)
    }

    /// Removes the file, if it still has the PID of this process.
    pub(crate) fn remove(&self) {
        // Each part is forbidden to a confined process, and leaves what it may not remove.
        self.remove_here();
        CHANGER.get().into_iter().for_each(|change| drop(change(Change::RemovePidFile)));
    }

    fn rename(&self) -> io::Result<()> {
        fs::rename(&self.temporary, &self.path)
    }

    fn remove_here(&self) {
        // The temporary name is absent if the file was renamed.
        let _ = fs::remove_file(&self.temporary);
        if self.is_at_its_name().unwrap_or(false) {
            let _ = fs::remove_file(&self.path);
        }
    }

    fn is_at_its_name(&self) -> io::Result<bool> {
        // An open of a pipe would wait for its other end.
        let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&self.path)?;
        let mut found = Vec::new();
        file.take(self.content.len() as u64 + 1).read_to_end(&mut found)?;
        Ok(found == self.content.as_bytes())
    }
}

/// From now on `changer` changes the names of this process where this process may not.
pub(crate) fn change_by(changer: Changer) {
    let _ = CHANGER.set(changer);
    nowait_server::remove_sockets_by(remove_file);
}

/// Removes the file or socket `path` of this process.
///
/// # Errors
/// The errors of unlink(2); `EPERM`: it does not belong to this process any more.
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    or_by_changer(fs::remove_file(path), || Change::RemoveFile(absolute(path)))
}

/// Removes the directory `path`, which was made by this process.
///
/// # Errors
/// Like [`remove_file`].
pub(crate) fn remove_directory(path: &Path) -> io::Result<()> {
    or_by_changer(fs::remove_dir(path), || Change::RemoveDirectory(absolute(path)))
}

/// Opens the log file at `path` to append to it, and makes it if it is not there.
///
/// # Errors
/// The errors of open(2).
pub(crate) fn open_log(path: &Path) -> io::Result<File> {
    match (open_log_here(path), CHANGER.get()) {
        (Err(error), Some(change)) if is_forbidden(&error) => change(Change::OpenLog)?.ok_or(error),
        (opened, _) => opened,
    }
}

fn open_log_here(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(LOG_MODE).open(path)
}

/// If this process was forbidden to do `change`, has it done.
fn or_by_changer(done: io::Result<()>, change: impl FnOnce() -> Change) -> io::Result<()> {
    match (done, CHANGER.get()) {
        (Err(error), Some(changer)) if is_forbidden(&error) => changer(change()).map(drop),
        (done, _) => done,
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn is_forbidden(error: &io::Error) -> bool {
    error.kind() == ErrorKind::PermissionDenied
}

fn require(is_own: bool) -> io::Result<()> {
    if is_own { Ok(()) } else { Err(Errno::PERM.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_recorded_names_change_and_only_while_they_are_the_files_that_they_were() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["own", "replaced", "other", "pid", "pid.1"] {
            fs::write(at(name), "7\n").unwrap();
        }
        let mut names = OwnedPaths::default();
        assert!(names.change(&Change::OpenLog).is_err());
        assert!(names.change(&Change::AppearPidFile).is_err());
        names.file(&at("own"));
        names.file(&at("replaced"));
        names.directory(&at("made"));
        names.log_file(&at("log"));
        let (path, temporary) = (at("pid"), at("pid.1"));
        names.pid_file(&OwnedPidFile { path, temporary, content: "8\n".into() });
        fs::rename(at("other"), at("replaced")).unwrap();
        fs::write(at("other"), "").unwrap();
        fs::create_dir(at("made")).unwrap();
        fs::create_dir(at("kept")).unwrap();
        for refused in [
            Change::RemoveFile(at("replaced")),
            Change::RemoveFile(at("other")),
            Change::RemoveFile(at("log")),
            Change::RemoveDirectory(at("kept")),
        ] {
            assert!(names.change(&refused).is_err(), "{refused:?}");
        }
        names.change(&Change::RemoveFile(at("own"))).unwrap();
        names.change(&Change::RemoveDirectory(at("made"))).unwrap();
        assert!(names.change(&Change::OpenLog).unwrap().is_some());
        assert!(at("log").exists());
        // It has another process's number.
        names.change(&Change::RemovePidFile).unwrap();
        assert!(at("pid").exists() && !at("pid.1").exists());
        fs::write(at("pid"), "8\n").unwrap();
        names.change(&Change::RemovePidFile).unwrap();
        let left: Vec<_> = fs::read_dir(directory.path()).unwrap().flatten().collect();
        let mut left: Vec<_> = left.iter().map(|entry| entry.file_name()).collect();
        left.sort();
        assert_eq!(left, ["kept", "log", "other", "replaced"]);
    }
}
