//! The NBD frontend: handshake, requests and replies.

pub(crate) mod wire;
pub(crate) mod meta_context;
pub(crate) mod reply;
pub(crate) mod tls_config;
pub(crate) mod handshake;
pub(crate) mod command;
pub(crate) mod extended_headers;
pub(crate) mod write_split;
pub(crate) mod session;
mod request_reader;
pub(crate) mod tls_session;
pub(crate) mod connection;
mod parked_connection;
pub(crate) mod connection_state;
pub(crate) mod connection_channel;
pub(crate) mod submit;
pub(crate) mod negotiate;
pub(crate) mod socket_read;
pub(crate) mod stalled_connections;
pub(crate) mod nbd_frontend;
#[cfg(feature = "fuzz")]
pub mod fuzz;
