//! The headers of replies, and the extents of a block status reply.
//!
//! Invariant: a header's length field is exactly what must follow it. It carries the cookie of the
//! request that it answers; in extended mode also the request's offset.

use crate::nbd::wire;
use crate::nbd::wire::{ReplyMode, RequestHeader};

/// A simple reply, or one chunk of a reply up to its payload of variable length.
#[derive(Clone, Copy)]
pub(crate) struct EncodedHeader {
    bytes: [u8; Self::MAX_LEN],
    len: u8,
}

impl EncodedHeader {
    /// Bytes of the longest header: a hole with an extended header.
    const MAX_LEN: usize = 44;

    /// No header, for bytes that are no reply.
    pub(crate) const EMPTY: Self = Self { bytes: [0; Self::MAX_LEN], len: 0 };

    /// The bytes to send.
    #[inline]
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    #[inline]
    fn with<const N: usize>(mut self, field: [u8; N]) -> Self {
        let start = usize::from(self.len);
        self.bytes[start..start + N].copy_from_slice(&field);
        self.len += N as u8;
        self
    }
}

/// Whether a chunk is the last one of its reply (NBD proto.md, "Structured reply flags").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkPosition {
    /// More chunks follow for this request.
    NotLast,
    /// The last chunk.
    Last,
}

/// Encodes the reply to one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyEncoder {
    mode: ReplyMode,
    cookie: u64,
    offset: u64,
}

impl ReplyEncoder {
    /// For the request of `header` on a connection in `mode`.
    #[inline]
    pub(crate) fn to(mode: ReplyMode, header: &RequestHeader) -> Self {
        Self { mode, cookie: header.cookie, offset: header.offset }
    }

    /// For a request of which only the cookie matters.
    #[cfg(test)]
    pub(crate) fn to_cookie(mode: ReplyMode, cookie: u64) -> Self {
        Self { mode, cookie, offset: 0 }
    }

    /// A simple reply, 16 bytes. `error` is 0 or an error value; data of a read follow if it is 0.
    /// Not in [`ReplyMode::Extended`], nor to a read in [`ReplyMode::Structured`].
    #[inline]
    pub(crate) fn simple(self, error: u32) -> EncodedHeader {
        debug_assert_ne!(self.mode, ReplyMode::Extended);
        EncodedHeader::EMPTY
            .with(wire::SIMPLE_REPLY_MAGIC.to_be_bytes())
            .with(error.to_be_bytes())
            .with(self.cookie.to_be_bytes())
    }

    /// A data chunk of a read; `data_len` bytes follow, from byte `offset` of the export.
    /// `data_len` is 1 to `u32::MAX - 8`: the protocol has no empty data chunk (a read of 0 bytes
    /// is answered by [`ReplyEncoder::none`]), and a greater length does not fit into the chunk's
    /// length field.
    #[inline]
    pub(crate) fn data(self, place: ChunkPosition, offset: u64, data_len: u32) -> EncodedHeader {
        debug_assert!((1..=u32::MAX - 8).contains(&data_len));
        let kind = wire::REPLY_TYPE_OFFSET_DATA;
        self.chunk(place, kind, data_len + 8, offset.to_be_bytes(), [])
    }

    /// A chunk for `len` bytes of zeros, from byte `offset` of the export on; nothing follows.
    /// `len` is at least 1.
    #[inline]
    pub(crate) fn hole(self, place: ChunkPosition, offset: u64, len: u32) -> EncodedHeader {
        debug_assert_ne!(len, 0);
        let kind = wire::REPLY_TYPE_OFFSET_HOLE;
        self.chunk(place, kind, 12, offset.to_be_bytes(), len.to_be_bytes())
    }

    /// The last chunk of a reply that succeeded unless an error chunk came before it.
    #[inline]
    pub(crate) fn none(self) -> EncodedHeader {
        self.chunk(ChunkPosition::Last, wire::REPLY_TYPE_NONE, 0, [], [])
    }

    /// The last chunk of a reply that failed, with an empty message. `error` is an error value, not
    /// 0.
    #[inline]
    pub(crate) fn error(self, error: u32) -> EncodedHeader {
        debug_assert_ne!(error, 0);
        let message_len = 0u16;
        let kind = wire::REPLY_TYPE_ERROR;
        self.chunk(ChunkPosition::Last, kind, 6, error.to_be_bytes(), message_len.to_be_bytes())
    }

    /// A block status chunk about one context; `extents` follow, at least one and at most 2^20.
    #[inline]
    pub(crate) fn status(
        self,
        place: ChunkPosition,
        context_id: u32,
        extents: &ExtentList,
    ) -> EncodedHeader {
        let (count, bytes) = (extents.count, extents.bytes.len() as u32);
        debug_assert!(count > 0 && self.mode == extents.mode);
        let id = context_id.to_be_bytes();
        match self.mode {
            ReplyMode::Extended => {
                let kind = wire::REPLY_TYPE_BLOCK_STATUS_EXT;
                self.chunk(place, kind, bytes + 8, id, count.to_be_bytes())
            }
            ReplyMode::Simple | ReplyMode::Structured => {
                self.chunk(place, wire::REPLY_TYPE_BLOCK_STATUS, bytes + 4, id, [])
            }
        }
    }

    /// The header of a chunk and the first fields of its payload of `length` bytes.
    #[inline]
    fn chunk<const A: usize, const B: usize>(
        self,
        place: ChunkPosition,
        kind: u16,
        length: u32,
        first: [u8; A],
        second: [u8; B],
    ) -> EncodedHeader {
        let flags = if place == ChunkPosition::Last { wire::REPLY_FLAG_DONE } else { 0 };
        if self.mode == ReplyMode::Extended {
            return EncodedHeader::EMPTY
                .with(wire::EXTENDED_REPLY_MAGIC.to_be_bytes())
                .with(flags.to_be_bytes())
                .with(kind.to_be_bytes())
                .with(self.cookie.to_be_bytes())
                .with(self.offset.to_be_bytes())
                .with(u64::from(length).to_be_bytes())
                .with(first)
                .with(second);
        }
        debug_assert_eq!(self.mode, ReplyMode::Structured);
        EncodedHeader::EMPTY
            .with(wire::STRUCTURED_REPLY_MAGIC.to_be_bytes())
            .with(flags.to_be_bytes())
            .with(kind.to_be_bytes())
            .with(self.cookie.to_be_bytes())
            .with(length.to_be_bytes())
            .with(first)
            .with(second)
    }
}

/// The extents of a block status chunk, encoded for the wire.
pub(crate) struct ExtentList {
    mode: ReplyMode,
    count: u32,
    bytes: Vec<u8>,
}

impl ExtentList {
    /// An empty list with room for `count` extents.
    pub(crate) fn with_capacity(mode: ReplyMode, count: usize) -> Self {
        Self { mode, count: 0, bytes: Vec::with_capacity(count * Self::extent_bytes(mode)) }
    }

    /// Bytes of one extent on the wire.
    pub(crate) const fn extent_bytes(mode: ReplyMode) -> usize {
        match mode {
            ReplyMode::Simple | ReplyMode::Structured => 8,
            ReplyMode::Extended => 16,
        }
    }

    /// The number of extents in the list.
    pub(crate) fn len(&self) -> usize {
        self.count as usize
    }

    /// Appends one extent: its length in bytes (at least 1; without extended headers below 2^32)
    /// and the flags that its context gives it. Each begins at the end of the previous one.
    pub(crate) fn push(&mut self, len: u64, flags: u32) {
        debug_assert_ne!(len, 0);
        self.count += 1;
        if self.mode == ReplyMode::Extended {
            self.bytes.extend_from_slice(&len.to_be_bytes());
            self.bytes.extend_from_slice(&u64::from(flags).to_be_bytes());
            return;
        }
        debug_assert!(len <= u64::from(u32::MAX));
        self.bytes.extend_from_slice(&(len as u32).to_be_bytes());
        self.bytes.extend_from_slice(&flags.to_be_bytes());
    }

    /// The bytes that follow the header made from this list.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOKIE: u64 = 0x0102_0304_0506_0708;
    const COOKIE_BYTES: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
    /// Offset of the request that is answered.
    const OFFSET: u64 = 0x0a00_0000_0000_0b00;
    const CHUNKED: [ReplyMode; 2] = [ReplyMode::Structured, ReplyMode::Extended];

    fn answer(mode: ReplyMode) -> ReplyEncoder {
        ReplyEncoder { mode, cookie: COOKIE, offset: OFFSET }
    }

    /// Parses the chunk as a client in `mode` would: flags, type, payload length, payload. Checks
    /// the magic, the cookie and the offset of the request.
    fn chunk(mode: ReplyMode, head: &EncodedHeader) -> (u16, u16, u64, &[u8]) {
        let bytes = head.as_slice();
        let flags = u16::from_be_bytes(bytes[4..6].try_into().unwrap());
        let kind = u16::from_be_bytes(bytes[6..8].try_into().unwrap());
        assert_eq!(bytes[8..16], COOKIE_BYTES);
        if mode == ReplyMode::Structured {
            assert_eq!(bytes[..4], [0x66, 0x8e, 0x33, 0xef]);
            let length = u32::from_be_bytes(bytes[16..20].try_into().unwrap());
            return (flags, kind, u64::from(length), &bytes[20..]);
        }
        assert_eq!(bytes[..4], [0x6e, 0x8a, 0x27, 0x8c]);
        assert_eq!(bytes[16..24], OFFSET.to_be_bytes());
        let length = u64::from_be_bytes(bytes[24..32].try_into().unwrap());
        (flags, kind, length, &bytes[32..])
    }

    #[test]
    fn a_simple_reply_is_magic_error_cookie() {
        for mode in [ReplyMode::Simple, ReplyMode::Structured] {
            let head = answer(mode).simple(wire::ENOSPC);
            assert_eq!(head.as_slice()[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28]);
            assert_eq!(head.as_slice()[8..], COOKIE_BYTES);
        }
    }

    #[test]
    fn a_data_chunk_counts_its_offset_and_the_data_to_come() {
        for mode in CHUNKED {
            let head = answer(mode).data(ChunkPosition::NotLast, 0x1000, 512);
            assert_eq!(chunk(mode, &head), (0, 1, 520, &[0, 0, 0, 0, 0, 0, 0x10, 0][..]));
            assert_eq!(chunk(mode, &answer(mode).data(ChunkPosition::Last, 0x1000, 512)).0, 1);
        }
    }

    #[test]
    fn a_hole_chunk_is_complete_in_its_header() {
        for mode in CHUNKED {
            let head = answer(mode).hole(ChunkPosition::Last, 0x1000, 512);
            let payload = [0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0];
            assert_eq!(chunk(mode, &head), (1, 2, 12, &payload[..]));
            assert_eq!(chunk(mode, &answer(mode).hole(ChunkPosition::NotLast, 0, 512)).0, 0);
        }
    }

    #[test]
    fn nbd_must_a_none_chunk_is_empty_and_the_last() {
        for mode in CHUNKED {
            assert_eq!(chunk(mode, &answer(mode).none()), (1, 0, 0, &[][..]));
        }
    }

    #[test]
    fn an_error_chunk_carries_its_value_and_an_empty_message() {
        for mode in CHUNKED {
            let head = answer(mode).error(wire::EINVAL);
            assert_eq!(chunk(mode, &head), (1, 0x8001, 6, &[0, 0, 0, 22, 0, 0][..]));
        }
    }

    #[test]
    fn a_block_status_chunk_counts_its_context_and_the_extents_to_come() {
        let mode = ReplyMode::Structured;
        let mut extents = ExtentList::with_capacity(mode, 2);
        extents.push(0x2000, wire::STATE_HOLE | wire::STATE_ZERO);
        extents.push(0x200, 0);
        let head = answer(mode).status(ChunkPosition::Last, 7, &extents);
        assert_eq!(chunk(mode, &head), (1, 5, 20, &[0, 0, 0, 7][..]));
        assert_eq!(extents.into_bytes(), [0, 0, 0x20, 0, 0, 0, 0, 3, 0, 0, 2, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn nbd_must_an_extended_block_status_chunk_counts_its_extents_of_64_bits() {
        let mode = ReplyMode::Extended;
        let mut extents = ExtentList::with_capacity(mode, 2);
        extents.push(0x2000_0000_0000, wire::STATE_HOLE | wire::STATE_ZERO);
        extents.push(0x200, 0);
        let head = answer(mode).status(ChunkPosition::NotLast, 7, &extents);
        assert_eq!(chunk(mode, &head), (0, 6, 40, &[0, 0, 0, 7, 0, 0, 0, 2][..]));
        let first = [0, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];
        let second = [0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(extents.into_bytes(), [first, second].concat());
    }
}
