//! The error of a command: a message of one line, made where the failure is detected.
//!
//! Invariant: the message names the object concerned first, then what is wrong, then, where the
//! user can do something about it, what to do; names are escaped by [`plain`], so that it stays one
//! line.

use std::fmt;
use std::path::Path;

pub use nowait_image::{create_message, open_message, os_message, plain};

/// The exit status of most failures. (A wrong command line, which is detected before any work, has
/// another one.)
const FAILURE: u8 = 1;

/// A failure that ends the command.
#[derive(Debug)]
pub struct CliError {
    message: String,
    status: u8,
}

impl CliError {
    /// A failure with a message.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), status: FAILURE }
    }

    /// A failure that concerns `path`; `what` is wrong with it.
    pub fn at(path: &Path, what: impl fmt::Display) -> Self {
        Self::new(format!("{}: {what}", path.display()))
    }

    /// The same failure with another exit status.
    pub fn with_status(self, status: u8) -> Self {
        Self { status, ..self }
    }

    /// The exit status.
    pub fn status(&self) -> u8 {
        self.status
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&plain(&self.message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_without_control_characters_for_any_file_name() {
        let error = CliError::at(Path::new("a\nb\x1b[2J\u{202e}é.img"), "gone");
        assert_eq!(error.to_string(), r"a\nb\u{1b}[2J\u{202e}é.img: gone");
    }
}
