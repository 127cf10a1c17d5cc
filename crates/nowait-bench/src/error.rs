//! What can keep a measurement from being made, said so that the reader knows what to do about it.
//!
//! Invariant: a server that fails is a line in the report, not an error; an error means that nothing further
//! can be measured. Knows: nothing. Known by: every other file.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why no (further) measurement can be made.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be measured on: missing, too small, read-only, a directory, no direct I/O.
    File {
        /// The file as it was named.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// An option has a value that cannot be measured with.
    Option {
        /// The field of [`PeersOptions`](crate::PeersOptions).
        name: &'static str,
        /// What it has to be.
        problem: &'static str,
    },
    /// Not one of the servers asked for is installed.
    NoServer,
    /// The system refused something the measurement cannot do without.
    System {
        /// What was being done, beginning with a verb in -ing.
        doing: &'static str,
        /// The system's answer.
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
            Error::Option { name, problem } => write!(f, "{name}: {problem}"),
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
