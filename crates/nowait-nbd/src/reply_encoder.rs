//! Encodes the messages of a reply up to their data.
//!
//! Invariant: a header's length field is exactly what must follow it. It carries the cookie of the
//! request that it answers; in extended mode also the request's offset.

use crate::constants::{
    REPLY_FLAG_DONE, REPLY_TYPE_BLOCK_STATUS, REPLY_TYPE_BLOCK_STATUS_EXT, REPLY_TYPE_ERROR,
    REPLY_TYPE_NONE, REPLY_TYPE_OFFSET_DATA, REPLY_TYPE_OFFSET_HOLE,
};
use crate::extents::ExtentList;
use crate::reply_header::{EncodedHeader, ReplyHeader};
use crate::reply_mode::ReplyMode;
use crate::request_header::RequestHeader;

/// Whether a chunk is the last one of its reply (NBD proto.md, "Structured reply flags").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkPosition {
    /// More chunks follow for this request.
    NotLast,
    /// The last chunk.
    Last,
}

/// Encodes the reply to one request.
#[derive(Clone, Copy, Debug)]
pub struct ReplyEncoder {
    mode: ReplyMode,
    cookie: u64,
    offset: u64,
}

impl ReplyEncoder {
    /// For the request of `header` on a connection in `mode`.
    #[inline]
    #[must_use]
    pub fn to(mode: ReplyMode, header: &RequestHeader) -> Self {
        Self { mode, cookie: header.cookie, offset: header.offset }
    }

    /// For a request of which only the cookie matters.
    #[must_use]
    pub fn to_cookie(mode: ReplyMode, cookie: u64) -> Self {
        Self { mode, cookie, offset: 0 }
    }

    /// A simple reply, 16 bytes. `error` is 0 or an error value; data of a read follow if it is 0.
    /// Not in [`ReplyMode::Extended`], nor to a read in [`ReplyMode::Structured`].
    #[inline]
    #[must_use]
    pub fn simple(self, error: u32) -> EncodedHeader {
        debug_assert_ne!(self.mode, ReplyMode::Extended);
        ReplyHeader::Simple { error, cookie: self.cookie }.encode(self.mode, self.offset)
    }

    /// A data chunk of a read; `data_len` bytes follow, from byte `offset` of the export.
    /// `data_len` is 1 to `u32::MAX - 8`: the protocol has no empty data chunk (a read of 0 bytes
    /// is answered by [`ReplyEncoder::none`]), and a greater length does not fit into the chunk's
    /// length field.
    #[inline]
    #[must_use]
    pub fn data(self, place: ChunkPosition, offset: u64, data_len: u32) -> EncodedHeader {
        debug_assert!((1..=u32::MAX - 8).contains(&data_len));
        let kind = REPLY_TYPE_OFFSET_DATA;
        self.chunk(place, kind, data_len + 8).with(offset.to_be_bytes())
    }

    /// A chunk for `len` bytes of zeros, from byte `offset` of the export on; nothing follows.
    /// `len` is at least 1.
    #[inline]
    #[must_use]
    pub fn hole(self, place: ChunkPosition, offset: u64, len: u32) -> EncodedHeader {
        debug_assert_ne!(len, 0);
        let kind = REPLY_TYPE_OFFSET_HOLE;
        self.chunk(place, kind, 12).with(offset.to_be_bytes()).with(len.to_be_bytes())
    }

    /// The last chunk of a reply that succeeded unless an error chunk came before it.
    #[inline]
    #[must_use]
    pub fn none(self) -> EncodedHeader {
        self.chunk(ChunkPosition::Last, REPLY_TYPE_NONE, 0)
    }

    /// The last chunk of a reply that failed, with an empty message. `error` is an error value, not
    /// 0.
    #[inline]
    #[must_use]
    pub fn error(self, error: u32) -> EncodedHeader {
        self.error_at(ChunkPosition::Last, error)
    }

    /// A chunk that says that a part of the reply is missing, with an empty message: the request has failed, whatever
    /// other chunks say. `error` is an error value, not 0.
    #[inline]
    #[must_use]
    pub fn error_at(self, place: ChunkPosition, error: u32) -> EncodedHeader {
        debug_assert_ne!(error, 0);
        let message_len = 0u16;
        self.chunk(place, REPLY_TYPE_ERROR, 6)
            .with(error.to_be_bytes())
            .with(message_len.to_be_bytes())
    }

    /// A block status chunk about one context; `extents` follow, at least one and at most 2^20.
    #[inline]
    #[must_use]
    pub fn status(
        self,
        place: ChunkPosition,
        context_id: u32,
        extents: &ExtentList,
    ) -> EncodedHeader {
        debug_assert!(!extents.is_empty());
        let (bytes, id) = (extents.bytes() as u32, context_id.to_be_bytes());
        match extents.count_field() {
            Some(count) => {
                self.chunk(place, REPLY_TYPE_BLOCK_STATUS_EXT, bytes + 8).with(id).with(count)
            }
            None => self.chunk(place, REPLY_TYPE_BLOCK_STATUS, bytes + 4).with(id),
        }
    }

    /// The header of a chunk and the first fields of its payload of `length` bytes.
    #[inline]
    fn chunk(self, place: ChunkPosition, kind: u16, length: u32) -> EncodedHeader {
        debug_assert_ne!(self.mode, ReplyMode::Simple);
        let flags = if place == ChunkPosition::Last { REPLY_FLAG_DONE } else { 0 };
        let (cookie, length) = (self.cookie, u64::from(length));
        ReplyHeader::Chunk { flags, kind, cookie, length }.encode(self.mode, self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::{EINVAL, ENOSPC, STATE_HOLE, STATE_ZERO};

    const COOKIE: u64 = 0x0102_0304_0506_0708;
    /// Offset of the request that is answered.
    const OFFSET: u64 = 0x0a00_0000_0000_0b00;
    const CHUNKED: [ReplyMode; 2] = [ReplyMode::Structured, ReplyMode::Extended];

    fn answer(mode: ReplyMode) -> ReplyEncoder {
        ReplyEncoder { mode, cookie: COOKIE, offset: OFFSET }
    }

    /// Parses the chunk as a client in `mode`: flags, type, payload length, payload.
    fn chunk(mode: ReplyMode, head: &EncodedHeader) -> (u16, u16, u64, &[u8]) {
        let bytes = head.as_slice();
        let Ok(Some((header, count))) = ReplyHeader::parse(mode, bytes) else {
            panic!("{bytes:?} in {mode:?}");
        };
        let ReplyHeader::Chunk { flags, kind, cookie, length } = header else {
            panic!("{header:?} in {mode:?}");
        };
        assert_eq!(cookie, COOKIE);
        (flags, kind, length, &bytes[count..])
    }

    #[test]
    fn a_simple_reply_is_magic_error_cookie() {
        for mode in [ReplyMode::Simple, ReplyMode::Structured] {
            let head = answer(mode).simple(ENOSPC);
            let wanted = ReplyHeader::Simple { error: ENOSPC, cookie: COOKIE };
            assert_eq!(ReplyHeader::parse(mode, head.as_slice()), Ok(Some((wanted, 16))));
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
            let head = answer(mode).error(EINVAL);
            assert_eq!(chunk(mode, &head), (1, 0x8001, 6, &[0, 0, 0, 22, 0, 0][..]));
        }
    }

    #[test]
    fn a_block_status_chunk_counts_its_context_and_the_extents_to_come() {
        let mode = ReplyMode::Structured;
        let mut extents = ExtentList::with_capacity(mode, 2);
        extents.push(0x2000, STATE_HOLE | STATE_ZERO);
        extents.push(0x200, 0);
        let head = answer(mode).status(ChunkPosition::Last, 7, &extents);
        assert_eq!(chunk(mode, &head), (1, 5, 20, &[0, 0, 0, 7][..]));
    }

    #[test]
    fn nbd_must_an_extended_block_status_chunk_counts_its_extents_of_64_bits() {
        let mode = ReplyMode::Extended;
        let mut extents = ExtentList::with_capacity(mode, 2);
        extents.push(0x2000_0000_0000, STATE_HOLE | STATE_ZERO);
        extents.push(0x200, 0);
        let head = answer(mode).status(ChunkPosition::NotLast, 7, &extents);
        assert_eq!(chunk(mode, &head), (0, 6, 40, &[0, 0, 0, 7, 0, 0, 0, 2][..]));
    }
}
