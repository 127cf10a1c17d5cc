//! The transmission phase as a client sees it, message by message, from a server in this process.
//!
//! Invariant: `must` and `should` in a name are those of NBD proto.md, extended headers those of its
//! branch extension-ext-header; the section stands at the test.
//! Knows: the public face of the server, NBD proto.md. Known by: nobody.

mod stream;
mod client;
mod scene;
mod commands;
mod encrypted;
mod exports;
mod extended;
mod long_writes;
mod reads;
mod status;
