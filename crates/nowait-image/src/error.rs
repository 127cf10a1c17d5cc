//! Errors about images: the file, and one line that says what is wrong.
//!
//! Invariant: the line names one file, what is wrong with it, and a remedy where there is one; the
//! errno is that of the failed system call.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use rustix::process::{Resource, getrlimit};

/// A failure that concerns one file of an image.
#[derive(Debug)]
pub struct ImageError {
    path: PathBuf,
    what: String,
    errno: i32,
}

impl ImageError {
    /// `path` is refused; `what` says why, without naming it. The errno is `EINVAL`.
    #[must_use]
    pub fn refused(path: &Path, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), what: what.into(), errno: libc::EINVAL }
    }

    /// This error with another errno.
    pub(crate) fn with_errno(self, errno: i32) -> Self {
        Self { errno, ..self }
    }

    /// The system call for `doing` ("open", "read") on `path` failed with `error`.
    pub(crate) fn os(path: &Path, doing: &str, error: &io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        Self { path: path.to_owned(), what: open_message(path, doing, error), errno }
    }

    /// The file that the error is about.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The problem, without the name of the file.
    #[must_use]
    pub fn what(&self) -> &str {
        &self.what
    }

    /// The positive errno.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.errno
    }
}

/// The errno alone, without the operation and the range: a message about an image says itself what was done.
pub(crate) fn os_error(error: nowait::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

/// `text` on one line, and without characters that move a terminal's cursor or change the direction
/// of writing: these are escaped as in Rust (`\n`, `\u{1b}`).
#[must_use]
pub fn plain(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || is_invisible(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// `text` as an argument of a command in a message: in quotes where a shell needs them. `None` if it
/// has characters that [`plain`] changes, or is not UTF-8: then no message can tell it.
pub(crate) fn argument(text: &OsStr) -> Option<String> {
    let text = text.to_str().filter(|text| plain(text) == *text)?;
    let is_safe = |c: char| c.is_alphanumeric() || "@%_+=:,./?-".contains(c);
    Some(match text.chars().all(is_safe) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    })
}

/// Line and paragraph separators, and characters that change the direction of writing.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The system's message for `error`, without the number that the standard library appends. For
/// `EFBIG` it says which limit was met: the process's, or the file system's.
#[must_use]
pub fn os_message(error: &io::Error) -> String {
    if error.raw_os_error() == Some(libc::EFBIG) {
        return match getrlimit(Resource::Fsize).current {
            Some(most) => format!("no file may have more than {most} bytes here (ulimit -f)"),
            None => "the file system holds no file of this size".into(),
        };
    }
    let mut words = error.to_string();
    if let Some(end) = words.find(" (os error ") {
        words.truncate(end);
    }
    words
}

/// Why the existing file at `path` could not be used: the system call for `doing` ("open", "read")
/// failed with `error`.
#[must_use]
pub fn open_message(path: &Path, doing: &str, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound if path.is_symlink() => {
            "it is a link to a file that is not there".into()
        }
        io::ErrorKind::NotFound => "there is no such file".into(),
        _ => format!("cannot {doing}: {}", os_message(error)),
    }
}

/// Why nothing could be made at a path: the system call for `doing` ("write", "listen") failed with
/// `error`.
#[must_use]
pub fn create_message(doing: &str, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "its directory does not exist (make it first, with mkdir -p)".into()
        }
        _ => format!("cannot {doing}: {}", os_message(error)),
    }
}

impl fmt::Display for ImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A name from an image may contain control characters; they must not reach a terminal.
        write!(f, "{}: {}", plain(&self.path.display().to_string()), plain(&self.what))
    }
}

impl std::error::Error for ImageError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_too_large_is_told_with_the_limit() {
        let told = os_message(&io::Error::from_raw_os_error(libc::EFBIG));
        assert!(told.contains("ulimit -f") || told.contains("no file of this size"), "{told}");
        let other = io::Error::new(io::ErrorKind::FileTooLarge, "the tables are full");
        assert_eq!(os_message(&other), "the tables are full");
    }

    #[test]
    fn an_argument_is_quoted_where_a_shell_needs_it_and_left_out_where_it_cannot_be_told() {
        let shown = |text: &str| argument(OsStr::new(text));
        assert_eq!(shown("nbd+unix:///?socket=/a").as_deref(), Some("nbd+unix:///?socket=/a"));
        assert_eq!(shown("/a b/c'd").as_deref(), Some(r"'/a b/c'\''d'"));
        assert_eq!(shown("nbd+unix:///?a&b").as_deref(), Some("'nbd+unix:///?a&b'"));
        assert_eq!(shown("/a\nb"), None);
    }

    #[test]
    fn characters_that_control_a_terminal_are_escaped_and_others_are_kept() {
        assert_eq!(plain("disk é 盘.img: 'a' \"b\" \\"), "disk é 盘.img: 'a' \"b\" \\");
        assert_eq!(plain("a\u{1b}[2J\nb\r\t\u{9b}c"), r"a\u{1b}[2J\nb\r\t\u{9b}c");
        assert_eq!(plain("a\u{202e}gpj.\u{2028}\u{61c}"), r"a\u{202e}gpj.\u{2028}\u{61c}");
    }
}
