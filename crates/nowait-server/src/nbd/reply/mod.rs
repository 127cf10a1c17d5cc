//! Replies: what they consist of, and the send queue.

pub(crate) mod send_queue;
pub(crate) mod whole_blocks;
pub(crate) mod builder;
