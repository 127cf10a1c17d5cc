//! HTTP: the interface of a server, and its client.

mod metrics;
mod blocking_calls;
mod events;
mod history;
mod refusal;
mod bounds;
mod origin;
mod connection_slots;
mod http_line_endings;
mod token;
mod page;
mod routes;
mod http_listener;
mod http_server;
mod client_transport;
#[cfg(feature = "fuzz")]
pub mod fuzz;

pub(crate) use client_transport::ClientTransport;
pub use client_transport::Proof;
pub use http_listener::HttpListener;
pub use http_server::HttpServer;
pub use token::Token;

/// The reason why this build has no control interface: it has one.
pub const DISABLED: Option<&str> = None;
