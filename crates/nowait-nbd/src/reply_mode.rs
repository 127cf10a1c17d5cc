//! Which headers requests and replies have on a connection.
//!
//! Invariant: agreed on in the handshake, and the same to the end of the connection.

use crate::constants::{
    EXTENDED_REPLY_BYTES, EXTENDED_REQUEST_BYTES, REQUEST_BYTES, SIMPLE_REPLY_BYTES,
};

/// Which messages a connection uses after the handshake (NBD proto.md, "Transmission").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplyMode {
    /// Compact requests; a reply is one message.
    #[default]
    Simple,
    /// Compact requests; a reply with a payload comes in chunks.
    Structured,
    /// Requests and chunks with 64-bit lengths; every reply comes in chunks.
    Extended,
}

impl ReplyMode {
    /// Bytes of a request's header.
    #[inline]
    #[must_use]
    pub const fn request_bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => REQUEST_BYTES,
            Self::Extended => EXTENDED_REQUEST_BYTES,
        }
    }

    /// Bytes of the shortest header of a reply.
    #[inline]
    #[must_use]
    pub const fn reply_bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => SIMPLE_REPLY_BYTES,
            Self::Extended => EXTENDED_REPLY_BYTES,
        }
    }

    /// Whether reads are answered in chunks.
    #[inline]
    #[must_use]
    pub const fn has_chunks(self) -> bool {
        !matches!(self, Self::Simple)
    }
}
