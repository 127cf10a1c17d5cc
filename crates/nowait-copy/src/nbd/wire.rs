//! The NBD protocol, and messages for a server's error values.
//!
//! Invariant: every error value has a message.

pub(crate) use nowait_nbd::*;

/// The message for an NBD error value (NBD proto.md, "Error values").
pub(crate) fn error_words(error: u32) -> String {
    let words = match error {
        EPERM => "operation not permitted",
        EIO => "input/output error",
        ENOMEM => "the server has no memory left",
        EINVAL => "invalid request",
        ENOSPC => "no space left",
        EOVERFLOW => "too large for the server",
        ENOTSUP => "not supported",
        ESHUTDOWN => "the server is shutting down",
        other => return format!("error {other}"),
    };
    words.to_owned()
}
