//! The transmission phase as a client sees it, message by message, from a server in this process.
//!
//! Invariant: `must` and `should` in a test name are those of NBD proto.md, extended headers those
//! of its branch extension-ext-header; the test's comment names the section.

mod stream;
mod client;
mod scene;
mod commands;
mod encrypted;
mod exports;
mod extended;
mod long_writes;
mod parking;
mod reads;
mod status;
