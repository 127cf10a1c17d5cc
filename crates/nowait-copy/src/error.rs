//! Why a copy failed: the place concerned and one line of words.
//!
//! Invariant: the line is made where the failure was seen, says what is wrong and, where something
//! can be done, what to do; it holds no line break.
//! Knows: nothing. Known by: every other module.

use std::fmt;
use std::io;

/// Why there is no copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// Something is wrong with one of the two sides.
    At {
        /// The path or the URI, as it was given.
        place: String,
        /// What is wrong with it.
        what: String,
    },
    /// It was to stop before it was done.
    Interrupted,
}

impl Error {
    /// `what` is wrong with `place`. Control characters, which a server may have sent or a name
    /// may hold, become spaces.
    pub(crate) fn at(place: &impl ToString, what: impl fmt::Display) -> Self {
        let plain = |text: String| text.replace(char::is_control, " ");
        Self::At { place: plain(place.to_string()), what: plain(what.to_string()) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At { place, what } => write!(f, "{place}: {what}"),
            Self::Interrupted => f.write_str("interrupted, there is no copy"),
        }
    }
}

impl std::error::Error for Error {}

/// The system's words for an errno, without the number that the standard library appends.
pub(crate) fn reason(errno: i32) -> String {
    words(&io::Error::from_raw_os_error(errno))
}

/// The same for an error of the standard library.
pub(crate) fn words(error: &io::Error) -> String {
    let mut words = error.to_string();
    if let Some(end) = words.find(" (os error ") {
        words.truncate(end);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_whatever_a_server_said() {
        let error = Error::at(&"nbd://h/", "it said\n\x1b[2Jnonsense");
        assert_eq!(error.to_string(), "nbd://h/: it said  [2Jnonsense");
    }

    #[test]
    fn the_systems_words_come_without_their_number() {
        assert_eq!(reason(rustix::io::Errno::NOSPC.raw_os_error()), "No space left on device");
    }
}
