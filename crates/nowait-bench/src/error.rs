//! The errors that prevent a measurement, worded so that the reader can fix them.
//!
//! Invariant: a server that fails is a line in the report, not an error; an error means that
//! nothing further can be measured.

use std::path::PathBuf;
use std::{fmt, io};

/// The reason why no (further) measurement can be made.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be measured on: missing, too small, read-only, a directory, no direct I/O.
    File {
        /// The path as it was given.
        path: PathBuf,
        /// The mistake, and the remedy.
        problem: String,
    },
    /// No row has the text of `--only` in its title.
    NoRow {
        /// The text.
        only: String,
    },
    /// None of the requested servers is installed.
    NoServer,
    /// A system call failed that the measurement needs.
    System {
        /// The action that failed, beginning with a verb in -ing.
        doing: &'static str,
        /// The error of the system.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn system(doing: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::System { doing, source }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::File { path, problem } => write!(f, "{}: {problem}", path.display()),
            Error::NoRow { only } => write!(f, "--only {only}: no row has this in its title"),
            Error::NoServer => write!(
                f,
                "no server to measure (install qemu-utils, qemu-system or nbdkit, or name a nowait program)"
            ),
            Error::System { doing, source } => write!(f, "{doing}: {source}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::System { source, .. } => Some(source),
            _ => None,
        }
    }
}
