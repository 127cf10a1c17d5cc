//! NBD clients that check servers. They have no code in common with any server or client of the
//! workspace.

pub mod constants;
mod handshake;
mod wire_client;
mod client;
mod status_client;
pub mod load;

pub use client::*;
pub use constants::*;
pub use handshake::{
    Mode, export_request, go, greet, is_refusal, option_bytes, read_option_reply, read_size,
    send_option,
};
pub use status_client::StatusClient;
pub use wire_client::{Extents, Message, Outcome, Request, WireClient};
