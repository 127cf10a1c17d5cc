//! The messages for failures of a connection, and for a server's error values.
//!
//! Invariant: every failure has a message of one line, with a remedy where there is one.

use std::fmt;

use crate as nbd;
use crate::client::error::ClientError;
use crate::client::handshake::HandshakeError;

/// The message for the failure of a connection to the export called `name`.
#[must_use]
pub fn failure(error: &ClientError, name: &str) -> String {
    match error {
        ClientError::Connect(_) => without_number(error) + " (is the server running?)",
        ClientError::Handshake(HandshakeError::Refused { option: nbd::OPT_STARTTLS, .. }) => {
            "the server has no TLS (without it: nbd:// or nbd+unix://)".into()
        }
        ClientError::Handshake(HandshakeError::Refused { kind, words, .. }) => {
            let what = refusal(*kind, name);
            if words.is_empty() { what } else { format!("{what}: {words}") }
        }
        error => without_number(error),
    }
}

fn refusal(kind: u32, export: &str) -> String {
    match kind {
        nbd::REP_ERR_UNKNOWN if export.is_empty() => {
            "the server has no default export (give its name in the URI)".into()
        }
        nbd::REP_ERR_UNKNOWN => format!("the server has no export '{export}'"),
        nbd::REP_ERR_POLICY => "the server does not allow it".into(),
        nbd::REP_ERR_TLS_REQD => {
            "the server wants TLS (use nbds:// or nbds+unix://, and --tls-certs)".into()
        }
        nbd::REP_ERR_SHUTDOWN => "the server is shutting down".into(),
        nbd::REP_ERR_UNSUP => "the server is too old: it does not know NBD_OPT_GO".into(),
        other => format!("the server refused the export (option error {other:#x})"),
    }
}

/// The message for an NBD error value (NBD proto.md, "Error values").
#[must_use]
pub fn error_words(error: u32) -> String {
    let words = match error {
        nbd::EPERM => "operation not permitted",
        nbd::EIO => "input/output error",
        nbd::ENOMEM => "the server has no memory left",
        nbd::EINVAL => "invalid request",
        nbd::ENOSPC => "no space left",
        nbd::EOVERFLOW => "too large for the server",
        nbd::ENOTSUP => "not supported",
        nbd::ESHUTDOWN => "the server is shutting down",
        other => return format!("error {other}"),
    };
    words.to_owned()
}

/// The message of `error`, without the number that the standard library appends to an errno.
fn without_number(error: &impl fmt::Display) -> String {
    let mut words = error.to_string();
    if let Some(end) = words.find(" (os error ") {
        words.truncate(end);
    }
    words
}
