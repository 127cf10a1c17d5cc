//! Replies: their headers, their bodies, and the send queue.

pub(crate) mod header;
pub(crate) mod send_queue;
pub(crate) mod builder;
