//! The server process's relation to others: the death of its parent, and its PID file.
//!
//! Invariant: a PID file is complete or absent, and only the process whose PID it holds removes it.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, test_kill_process};

use crate::error::{CliError, create_message, os_message};
use crate::process::owned_paths::OwnedPidFile;

/// The parent of this process at its start.
pub(crate) struct Parent(Option<Pid>);

impl Parent {
    /// The present parent. To be called as early as possible: a parent that has ended before is not
    /// detected.
    pub(crate) fn now() -> Self {
        Self(getppid())
    }

    /// From now on this process receives SIGTERM when the parent ends. The signal's handler must be
    /// installed before.
    ///
    /// # Errors
    /// The parent has already ended, or prctl(2) failed.
    pub(crate) fn end_with_it(&self) -> Result<(), CliError> {
        set_parent_process_death_signal(Some(Signal::TERM)).map_err(|errno| {
            CliError::new(format!("--exit-with-parent: cannot: {}", os_message(&errno.into())))
        })?;
        // A parent that ended before the call above causes no signal.
        if getppid() == self.0 {
            Ok(())
        } else {
            Err(CliError::new("--exit-with-parent: the parent has exited already"))
        }
    }
}

/// The PID file of this process, removed on drop.
pub(crate) struct PidFile(OwnedPidFile);

impl PidFile {
    /// Writes the file under a temporary name in the same directory.
    ///
    /// # Errors
    /// The file cannot be written, or `path` is a directory.
    pub(crate) fn prepare(path: &Path) -> Result<Self, CliError> {
        let number = std::process::id();
        // An absolute path, so that the same file is removed at the end.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if path.is_dir() {
            return Err(CliError::at(&path, "it is a directory (give a file for --pid-file)"));
        }
        remove_leftovers(&path);
        let content = format!("{number}\n");
        let mut name = path.clone().into_os_string();
        name.push(format!(".{number}"));
        let temporary = PathBuf::from(name);
        write_new(&temporary, &content)
            .map_err(|error| CliError::at(&path, create_message("write the file", &error)))?;
        Ok(Self(OwnedPidFile { path, temporary, content }))
    }

    /// Renames the file to its name, replacing an older one.
    ///
    /// # Errors
    /// rename(2) failed.
    pub(crate) fn appear(&self) -> Result<(), CliError> {
        let cannot = |error| CliError::at(&self.0.path, create_message("write the file", &error));
        self.0.appear().map_err(cannot)
    }

    /// Removes the file, if it still has the PID of this process.
    pub(crate) fn remove(&self) {
        self.0.remove();
    }

    /// Its names.
    pub(crate) fn names(&self) -> &OwnedPidFile {
        &self.0
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Removes what processes have left that were killed before the PID file at `path` was to appear.
fn remove_leftovers(path: &Path) {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return };
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in entries {
        let other = entry.file_name();
        let number = other.as_bytes().strip_prefix(name.as_bytes());
        let number = number.and_then(|rest| rest.strip_prefix(b"."));
        let number = number.and_then(|number| str::from_utf8(number).ok()?.parse().ok());
        let Some(process) = number.and_then(Pid::from_raw) else { continue };
        let content = format!("{}\n", process.as_raw_nonzero());
        let is_left = test_kill_process(process) == Err(Errno::SRCH)
            // A process may have ended while it wrote.
            && fs::read_to_string(entry.path()).is_ok_and(|found| content.starts_with(&found));
        if is_left {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn write_new(path: &Path, content: &str) -> io::Result<()> {
    let file = match File::create_new(path) {
        // An earlier process with the same PID has left it.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            File::create_new(path)
        }
        created => created,
    };
    file?.write_all(content.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_file_replaces_an_older_one_and_is_removed_unless_it_was_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        fs::write(&path, "1\n").unwrap();
        let file = PidFile::prepare(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n", "it is not to be seen yet");
        file.appear().unwrap();
        let number = format!("{}\n", std::process::id());
        assert_eq!(fs::read_to_string(&path).unwrap(), number);
        drop(file);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        let file = PidFile::prepare(&path).unwrap();
        file.appear().unwrap();
        fs::write(&path, "1\n").unwrap();
        drop(file);
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n");
    }

    #[test]
    fn what_processes_left_that_were_killed_is_removed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        let ended_number = ended.id();
        ended.wait().unwrap();
        let own = std::process::id();
        let parent = std::os::unix::process::parent_id();
        let with = |name: String, content: String| {
            fs::write(directory.path().join(&name), content).unwrap();
            name
        };
        with(format!("pid.{ended_number}"), format!("{ended_number}\n"));
        let mut kept = vec![
            with(format!("pid.{parent}"), format!("{parent}\n")),
            with(format!("pid.{ended_number}.log"), String::new()),
            with(format!("other.{ended_number}"), format!("{ended_number}\n")),
            with("pid.0".into(), "0\n".into()),
            format!("pid.{own}"),
        ];
        let file = PidFile::prepare(&path).unwrap();
        let names = fs::read_dir(directory.path()).unwrap().flatten();
        let mut names: Vec<_> = names.map(|it| it.file_name().into_string().unwrap()).collect();
        names.sort();
        kept.sort();
        assert_eq!(names, kept);
        drop(file);
        with(format!("pid.{ended_number}"), "not a number".into());
        drop(PidFile::prepare(&path).unwrap());
        assert!(directory.path().join(format!("pid.{ended_number}")).exists(), "another's file");
    }

    #[test]
    fn a_pid_file_that_cannot_be_written_is_reported_by_name_and_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let refused = |path: &Path| PidFile::prepare(path).err().unwrap().to_string();
        assert!(refused(directory.path()).contains("it is a directory"));
        assert!(
            refused(&directory.path().join("missing/pid"))
                .contains("missing/pid: its directory does not exist")
        );
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
