//! A client's side of the protocol.
//!
//! Invariant: whatever a server sends, the outcome is a value or an error, in bounded memory.

mod handshake;
mod reply_parser;
mod split_request;
#[cfg(feature = "transport")]
mod error;
#[cfg(feature = "transport")]
mod error_messages;
#[cfg(feature = "transport")]
mod credentials;
#[cfg(feature = "transport")]
mod socket;
#[cfg(feature = "transport")]
mod tls_session;
#[cfg(feature = "transport")]
mod connection;

#[cfg(feature = "transport")]
pub use connection::{ConnectOptions, Connection, probe};
#[cfg(feature = "transport")]
pub use credentials::{CipherSuites, Credentials, CredentialsError};
#[cfg(feature = "transport")]
pub use error::ClientError;
#[cfg(feature = "transport")]
pub use error_messages::{error_words, failure};
pub use handshake::{Export, HandshakeError, Wanted, choose, greet, start_tls};
pub use reply_parser::{BROKEN, Outcome, Replies, ReplyParser};
pub use split_request::{MAX_MESSAGES, SplitRequest, UNASKED};
