//! `--log-file`: standard error in a file, which is opened again when it was moved away.
//!
//! Invariant: there is a place for messages at any time: a file that cannot be opened leaves standard
//! error as it is. What other code writes to standard error, such as a panic's line, is in the file,
//! too.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::stdio::dup2_stderr;

use crate::error::{CliError, create_message};
use crate::process::log;
use crate::process::owned_paths;

/// A file for messages.
#[derive(Clone, Debug)]
pub(crate) struct LogFile(PathBuf);

impl LogFile {
    /// The file at `path`, made if it is not there.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn prepare(path: &Path) -> Result<Self, CliError> {
        // A path that stays the same whatever the directory of the process.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let file = Self(path);
        file.open().map(|_| file)
    }

    /// From now on messages go to the file that has its name now, each with the time.
    ///
    /// # Errors
    /// It cannot be written; then they go where they went before.
    pub(crate) fn begin(&self) -> Result<(), CliError> {
        dup2_stderr(self.open()?.as_fd()).map_err(|errno| self.cannot(&errno.into()))?;
        log::in_log_file();
        Ok(())
    }

    /// Its path, which is absolute.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    fn open(&self) -> Result<File, CliError> {
        owned_paths::open_log(&self.0).map_err(|error| self.cannot(&error))
    }

    fn cannot(&self, error: &std::io::Error) -> CliError {
        CliError::at(&self.0, create_message("write the log", error))
    }
}
