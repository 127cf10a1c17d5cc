//! The NBD client: an export as an endpoint of a copy.
//!
//! Invariant: whatever a server sends, the outcome is a result or an error: no panic, no memory
//! beyond a bound, no byte returned that was not received.

mod pending_requests;
mod connection;
mod nbd_endpoint;
#[cfg(feature = "fuzz")]
pub mod fuzz;

pub(crate) use nbd_endpoint::{Connecting, connect};
