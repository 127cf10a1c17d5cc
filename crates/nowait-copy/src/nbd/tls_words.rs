//! Words for what TLS says when it fails.
//!
//! Invariant: nothing here decides anything. Knows: nothing. Known by: handshake, session.

use std::io;

/// What rustls said.
pub(super) fn of_tls(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(why) => {
            format!("the server's certificate is not good: {why}")
        }
        rustls::Error::AlertReceived(alert) => {
            format!("the server ended TLS ({alert:?}; it may want a client's certificate)")
        }
        error => format!("TLS failed: {error}"),
    }
}

/// The same, where rustls has put it into an error of I/O.
pub(super) fn of_io(error: &io::Error) -> Option<String> {
    error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).map(of_tls)
}
