//! Messages for TLS errors.
//!
//! Invariant: the functions only format errors; they make no decisions.

use std::io;

/// The message for an error of rustls.
pub(crate) fn of_tls(error: &rustls::Error) -> String {
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

/// The same for a rustls error inside an I/O error; `None` for other errors.
pub(crate) fn of_io(error: &io::Error) -> Option<String> {
    error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).map(of_tls)
}
