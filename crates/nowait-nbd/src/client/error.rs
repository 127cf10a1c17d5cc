//! Why a connection to a server cannot be made, or has ended.
//!
//! Invariant: an error is about the connection as a whole; after it the connection is of no use.

use std::{fmt, io};

use crate::client::handshake::HandshakeError;
use crate::tls_words::{certificate_fault, tls_message};

/// Why a client has no connection, or no longer.
#[derive(Debug)]
pub enum ClientError {
    /// No connection to the address.
    Connect(io::Error),
    /// The handshake of NBD or TLS has failed.
    Handshake(HandshakeError),
    /// The server has closed the connection.
    Closed,
    /// TLS has failed: client or server has rejected the other, or the server's bytes are not TLS.
    Tls(rustls::Error),
    /// The socket has failed.
    Lost(io::Error),
    /// A reply was refused, in words.
    Reply(String),
}

/// Whether an error of this kind says that the other end has closed the connection: where bytes to it
/// were left unread, it is reset.
pub(super) fn is_closed(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(kind, UnexpectedEof | ConnectionReset | BrokenPipe)
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(error) => write!(f, "cannot connect: {error}"),
            Self::Handshake(HandshakeError::Io(error)) => match error.kind() {
                kind if is_closed(kind) => {
                    f.write_str("the server closed the connection in the handshake")
                }
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    f.write_str("the server does not answer in the handshake")
                }
                _ => error.fmt(f),
            },
            Self::Handshake(error) => error.fmt(f),
            Self::Closed => f.write_str("the server closed the connection"),
            Self::Tls(rustls::Error::InvalidCertificate(why)) => {
                write!(f, "the server's certificate is not good: it {}", certificate_fault(why))
            }
            Self::Tls(error) => write!(f, "TLS failed: {}", tls_message(error, "the server")),
            Self::Lost(error) => write!(f, "the connection is lost: {error}"),
            Self::Reply(words) => f.write_str(words),
        }
    }
}

impl std::error::Error for ClientError {}

impl From<io::Error> for ClientError {
    /// An error of the socket, or the error of TLS in it.
    fn from(error: io::Error) -> Self {
        match error.downcast() {
            Ok(tls) => Self::Tls(tls),
            Err(error) if is_closed(error.kind()) => Self::Closed,
            Err(error) => Self::Lost(error),
        }
    }
}

impl From<HandshakeError> for ClientError {
    fn from(error: HandshakeError) -> Self {
        let HandshakeError::Io(error) = error else { return Self::Handshake(error) };
        match error.downcast() {
            Ok(tls) => Self::Tls(tls),
            Err(error) => Self::Handshake(HandshakeError::Io(error)),
        }
    }
}

impl From<ClientError> for io::Error {
    /// The kind of an error of [`ClientError::Connect`] is kept.
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Connect(error) => error,
            error => Self::other(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_a_killed_server_resets_is_said_to_be_closed() {
        for kind in [io::ErrorKind::ConnectionReset, io::ErrorKind::UnexpectedEof] {
            let error = ClientError::from(HandshakeError::Io(kind.into()));
            assert!(error.to_string().contains("closed the connection in the handshake"), "{kind}");
            assert!(matches!(ClientError::from(io::Error::from(kind)), ClientError::Closed));
        }
    }
}
