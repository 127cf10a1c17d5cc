//! The error of a ublk device: a message of one line, and what to do about it.

use std::fmt;

/// Why a ublk device cannot be made, found or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkError(String);

impl UblkError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }

    /// `what` has failed with `errno`.
    pub(crate) fn os(what: impl fmt::Display, errno: i32) -> Self {
        Self(format!("{what}: {}", words(errno)))
    }
}

/// The message for `errno`, without its number.
fn words(errno: i32) -> String {
    let error = std::io::Error::from_raw_os_error(errno).to_string();
    error.split(" (os error ").next().unwrap_or(&error).to_owned()
}

impl fmt::Display for UblkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for UblkError {}
