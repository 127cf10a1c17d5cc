//! The messages for a failed handshake.
//!
//! Invariant: every failure has a message of one line, with a remedy where there is one.

use std::io;

use nowait_nbd::client::HandshakeError;

use super::wire;
use crate::error::os_message;
use crate::nbd::tls_error;

/// The metadata context that reports holes and zeros.
pub(crate) const CONTEXT: &str = "base:allocation";

/// The message for a handshake that did not open the export called `name`.
pub(crate) fn failure(error: HandshakeError, name: &str) -> String {
    match error {
        HandshakeError::Io(error) => failed_stream(&error),
        HandshakeError::Refused { option: wire::OPT_STARTTLS, .. } => {
            "the server has no TLS (without it: nbd:// or nbd+unix://)".into()
        }
        HandshakeError::Refused { kind, words, .. } => {
            let what = refusal(kind, name);
            if words.is_empty() { what } else { format!("{what}: {words}") }
        }
        error => error.to_string(),
    }
}

fn refusal(kind: u32, export: &str) -> String {
    match kind {
        wire::REP_ERR_UNKNOWN if export.is_empty() => {
            "the server has no default export (give its name in the URI)".into()
        }
        wire::REP_ERR_UNKNOWN => format!("the server has no export '{export}'"),
        wire::REP_ERR_POLICY => "the server does not allow it".into(),
        wire::REP_ERR_TLS_REQD => {
            "the server wants TLS (use nbds:// or nbds+unix://, and --tls-certs)".into()
        }
        wire::REP_ERR_SHUTDOWN => "the server is shutting down".into(),
        wire::REP_ERR_UNSUP => "the server is too old: it does not know NBD_OPT_GO".into(),
        other => format!("the server refused the export (option error {other:#x})"),
    }
}

/// Whether an error of this kind says that the other end has closed the connection: where bytes to it
/// were left unread, it is reset.
pub(crate) fn is_closed(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(kind, UnexpectedEof | ConnectionReset | BrokenPipe)
}

fn failed_stream(error: &io::Error) -> String {
    match error.kind() {
        kind if is_closed(kind) => "the server closed the connection in the handshake".into(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "the server does not answer in the handshake".into()
        }
        _ => tls_error::of_io(error).unwrap_or_else(|| os_message(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_a_killed_server_resets_is_said_to_be_closed() {
        for kind in [io::ErrorKind::ConnectionReset, io::ErrorKind::UnexpectedEof] {
            assert!(failed_stream(&kind.into()).contains("closed the connection"), "{kind}");
        }
    }
}
