//! Why a copy failed: the location concerned and a message of one line.
//!
//! Invariant: the message is made where the failure is detected, says what is wrong and, where the
//! user can do something about it, what to do; it contains no line break.

use std::{fmt, io};

pub(crate) use nowait_image::os_message;
use nowait_image::plain;

/// The failure of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The source or the target failed.
    At {
        /// The path or the URI, as it was given.
        place: String,
        /// The reason.
        what: String,
    },
    /// The copy was cancelled before it was complete.
    Interrupted,
    /// The copy failed after the target, a block device or an export, had been written to: its
    /// content is neither the old one nor a complete copy.
    WrittenInPart {
        /// The target, as it was given.
        place: String,
        /// The failure that ended the copy.
        why: Box<Error>,
    },
    /// The copy failed, and something of it is left that no reader sees, as parts of an object.
    Remains {
        /// The failure that ended the copy.
        why: Box<Error>,
        /// A line of words about that.
        what: String,
    },
}

impl Error {
    /// `what` is wrong with `place`. Control characters, which a server may have sent or a name
    /// may hold, are shown as Rust writes them: `\n`, `\u{1b}`.
    #[must_use]
    pub fn at(place: &impl ToString, what: impl fmt::Display) -> Self {
        Self::At { place: plain(&place.to_string()), what: plain(&what.to_string()) }
    }
}

impl Error {
    /// This failure, after `place` had been written to, which cannot be undone.
    pub(crate) fn amid(self, place: &impl ToString) -> Self {
        Self::WrittenInPart { place: plain(&place.to_string()), why: Box::new(self) }
    }

    /// This failure, after which something is left.
    pub(crate) fn with_remains(self, what: &str) -> Self {
        Self::Remains { why: Box::new(self), what: plain(what) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At { place, what } => write!(f, "{place}: {what}"),
            Self::Interrupted => f.write_str("interrupted, there is no copy"),
            Self::Remains { why, what } => write!(f, "{why}; {what}"),
            Self::WrittenInPart { place, why } => match **why {
                Self::Interrupted => write!(
                    f,
                    "interrupted: {place} is written in part, and neither what it was nor a copy"
                ),
                _ => write!(f, "{why}; {place} is written in part"),
            },
        }
    }
}

impl std::error::Error for Error {}

/// The message of `error`, without the number that the standard library appends to an errno.
pub(crate) fn without_number(error: &impl fmt::Display) -> String {
    os_message(&io::Error::other(error.to_string()))
}

/// The system's words for an errno, without the number that the standard library appends.
pub(crate) fn reason(errno: i32) -> String {
    os_message(&io::Error::from_raw_os_error(errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_whatever_the_server_sent() {
        let error = Error::at(&"nbd://h/", "it said\n\x1b[2Jnonsense");
        assert_eq!(error.to_string(), r"nbd://h/: it said\n\u{1b}[2Jnonsense");
    }

    #[test]
    fn a_partly_written_target_is_named_with_the_error_of_the_copy() {
        let error = Error::Interrupted.amid(&"/dev/vdb");
        assert!(error.to_string().starts_with("interrupted: /dev/vdb is written in part"));
        let error = Error::at(&"a.img", "cannot read at byte 0").amid(&"/dev/vdb");
        let line = "a.img: cannot read at byte 0; /dev/vdb is written in part";
        assert_eq!(error.to_string(), line);
    }

    #[test]
    fn a_system_error_is_shown_without_its_number() {
        assert_eq!(reason(rustix::io::Errno::NOSPC.raw_os_error()), "No space left on device");
    }
}
