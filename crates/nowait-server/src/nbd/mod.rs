//! The NBD protocol: handshake, requests and replies.

pub(crate) mod wire;
pub(crate) mod meta_context;
pub(crate) mod reply;
pub(crate) mod tls_config;
pub(crate) mod handshake;
pub(crate) mod command;
pub(crate) mod extended_headers;
pub(crate) mod write_split;
pub(crate) mod tls_session;
pub(crate) mod connection;
#[cfg(feature = "fuzz")]
pub mod fuzz;
