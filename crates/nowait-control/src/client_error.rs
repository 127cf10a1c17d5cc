//! Failures of requests to a server.
//!
//! Invariant: none shows the number of an error of the system.

use std::fmt;
use std::io;

use nowait_nbd::tls_words::tls_message;

/// Why a request has failed.
#[derive(Debug)]
pub enum ClientError {
    /// No server listens at the socket, or it is not this user's.
    Unreachable(io::Error),
    /// The server has refused the request, and why.
    Refused(String),
    /// The answer was none of this interface.
    Answer(String),
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(error) => {
                let tls = error.get_ref().and_then(|inner| inner.downcast_ref());
                let why = tls.map_or_else(|| plain_words(error), |e| tls_message(e, "the server"));
                write!(f, "no server answers there: {why}")
            }
            Self::Refused(why) => f.write_str(why),
            Self::Answer(why) => write!(f, "its answer is not understood: {why}"),
        }
    }
}

/// An error of the socket in words, without its number.
fn plain_words(error: &io::Error) -> String {
    let words = error.to_string();
    match error.kind() {
        io::ErrorKind::NotFound => "there is no such socket".into(),
        _ => words.split_once(" (os error").map_or(words.as_str(), |(words, _)| words).into(),
    }
}

impl std::error::Error for ClientError {}
