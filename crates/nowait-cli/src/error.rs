//! What the command says when it fails: one line, made where the failure was seen.
//!
//! Invariant: the line names the thing concerned first, then what is wrong, then, where something
//! can be done, what to do.
//! Knows: nothing. Known by: every other module of the command.

use std::fmt;
use std::io;
use std::path::Path;

/// A failure that ends the command with exit status 1. (A wrong command line ends it with 2; that
/// is found while parsing.)
#[derive(Debug)]
pub(crate) struct CliError(String);

impl CliError {
    /// A failure in words.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }

    /// `path` is what it is about, `what` is wrong with it.
    pub(crate) fn at(path: &Path, what: impl fmt::Display) -> Self {
        Self(format!("{}: {what}", path.display()))
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The system's words for `error`, without the number that the standard library appends.
pub(crate) fn reason(error: &io::Error) -> String {
    let words = error.to_string();
    match words.find(" (os error ") {
        Some(end) => words[..end].to_owned(),
        None => words,
    }
}
