//! Why something about an image failed: the file, and one line that says what is wrong.
//!
//! Invariant: the line names one file, what is wrong with it, and what to do where something can
//! be done; the errno of a failed system call is taken where it was seen.
//! Knows: nothing. Known by: every module that opens or looks into an image.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A failure that concerns one file of an image.
#[derive(Debug)]
pub struct ImageError {
    path: PathBuf,
    what: String,
    errno: i32,
}

impl ImageError {
    /// `path` is refused; `what` says why, without naming it. The errno is `EINVAL`.
    pub(crate) fn refused(path: &Path, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), what: what.into(), errno: libc::EINVAL }
    }

    /// The system said `error` when it was asked to do `doing` ("open", "read") with `path`.
    pub(crate) fn os(path: &Path, doing: &str, error: &io::Error) -> Self {
        let words = words(error);
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        Self { path: path.to_owned(), what: format!("cannot {doing}: {words}"), errno }
    }

    /// The file that it is about.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is wrong, without the name of the file.
    #[must_use]
    pub fn what(&self) -> &str {
        &self.what
    }

    /// The positive errno for programs that want a number.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.errno
    }
}

/// What the system says, without the number that the standard library puts behind it.
pub(crate) fn words(error: &io::Error) -> String {
    let mut words = error.to_string();
    if let Some(end) = words.find(" (os error ") {
        words.truncate(end);
    }
    words
}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A name out of an image may hold control characters; they do not reach a terminal.
        let path = self.path.display().to_string();
        let path: String = path.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        write!(f, "{path}: {}", self.what)
    }
}

impl std::error::Error for ImageError {}
