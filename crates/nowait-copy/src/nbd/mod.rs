//! An export of an NBD server as one side of a copy.
//!
//! Invariant: whatever a server sends, the outcome is a result or an error: no panic, no memory
//! beyond a bound, no byte handed on that was not received.
//! Knows: error, place, port, zeros. Known by: ends.

mod wire;
mod tls_words;
mod handshake;
mod receiver;
mod credentials;
mod session;
mod connection;
mod nbd_port;
#[cfg(feature = "fuzz")]
pub mod fuzz;

pub(crate) use nbd_port::{Connecting, connect};
