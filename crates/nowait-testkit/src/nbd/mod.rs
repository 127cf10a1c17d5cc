//! NBD as a judge of servers sees it: bytes, with no code in common with any server or client.

pub mod numbers;
mod client;

pub use client::*;
pub use numbers::*;
