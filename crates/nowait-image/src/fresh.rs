//! A file that has its name only when it is whole.
//!
//! Invariant: under the name there is nothing until everything is on storage, and what was there
//! before is never replaced; a process that is killed leaves a hidden file called `.partial` at most.
//! Knows: host. Known by: create.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use crate::host::HostFile;

const MODE: u32 = 0o644;
/// Names tried; one is taken only where an earlier process with the same number was killed.
const TEMPORARY_NAMES: u32 = 1000;

/// A file on its way. Removed when dropped before [`Fresh::finish`].
#[derive(Debug)]
pub(crate) struct Fresh {
    file: HostFile,
    temporary: PathBuf,
    finished: bool,
}

impl Fresh {
    /// A new, empty file in the directory where `path` is to be.
    ///
    /// # Errors
    /// `EEXIST` if something is there already; what open(2) says.
    pub(crate) fn new(path: &Path) -> io::Result<Self> {
        if fs::symlink_metadata(path).is_ok() {
            return Err(Errno::EXIST.into());
        }
        for n in 0..TEMPORARY_NAMES {
            let name = format!(".nowait-{}-{n}.partial", std::process::id());
            let temporary = path.with_file_name(name);
            let mut options = OpenOptions::new();
            match options.read(true).write(true).create_new(true).mode(MODE).open(&temporary) {
                Ok(file) => {
                    let file = HostFile::of(path.to_owned(), file);
                    return Ok(Self { file, temporary, finished: false });
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other("too many files called .nowait-*.partial (remove them)"))
    }

    /// What is written to; it is called by the name that it is to get.
    pub(crate) const fn file(&self) -> &HostFile {
        &self.file
    }

    /// Gives the file its name: when this returns, a power cut does not take it back.
    ///
    /// # Errors
    /// `EEXIST` if something has appeared there meanwhile, which stays; what fsync(2) or rename(2)
    /// says. There is no file then.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.file.sync()?;
        let path = self.file.path();
        match rustix::fs::renameat_with(CWD, &self.temporary, CWD, path, RenameFlags::NOREPLACE) {
            Ok(()) => self.finished = true,
            // The file system does not know the flag. A second name is not made where one is; the
            // first goes with this value.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                fs::hard_link(&self.temporary, path)?;
            }
            Err(error) => return Err(error.into()),
        }
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        File::open(directory)?.sync_all()
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        if !self.finished {
            // What cannot be removed still does not have the name of an image.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn the_name_is_there_only_at_the_end_and_nothing_else_is_left() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("disk");
        let fresh = Fresh::new(&path).unwrap();
        fresh.file().write_at(0, b"data").unwrap();
        assert!(!path.exists());
        fresh.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"data");
        assert_eq!(names(scratch.path()), ["disk"]);
    }

    #[test]
    fn what_is_there_or_appears_meanwhile_stays() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("disk");
        let fresh = Fresh::new(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        assert_eq!(fresh.finish().unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(Fresh::new(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        assert_eq!(names(scratch.path()), ["disk"]);
    }

    #[test]
    fn a_file_that_is_given_up_is_gone() {
        let scratch = tempfile::tempdir().unwrap();
        drop(Fresh::new(&scratch.path().join("disk")).unwrap());
        assert_eq!(names(scratch.path()), [""; 0]);
    }
}
