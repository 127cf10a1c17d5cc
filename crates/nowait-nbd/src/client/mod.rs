//! A client's side of the protocol.
//!
//! Invariant: whatever a server sends, the outcome is a value or an error, in bounded memory.

mod handshake;

pub use handshake::{Export, HandshakeError, Wanted, choose, greet, start_tls};
