//! The header of a reply.
//!
//! Invariant: a header is parsed only when all of its bytes are there; an encoded header is parsed as
//! the same header.

use crate::constants::{
    EXTENDED_REPLY_MAGIC, REPLY_FLAG_DONE, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC,
};
use crate::fields::Fields;
use crate::reply_mode::ReplyMode;

/// The head of one message of a reply (NBD proto.md, "Simple reply message", "Structured reply chunk
/// message", "Extended reply chunk message"). Only the magic has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHeader {
    /// The only message; behind it the data of a read that succeeded.
    Simple {
        /// An error value, or 0.
        error: u32,
        /// Of the request that is answered.
        cookie: u64,
    },
    /// One chunk of several.
    Chunk {
        /// `REPLY_FLAG_*`.
        flags: u16,
        /// `REPLY_TYPE_*`.
        kind: u16,
        /// Of the request that is answered.
        cookie: u64,
        /// Bytes of payload behind the head.
        length: u64,
    },
}

/// A simple reply, or one chunk of a reply up to its payload of variable length.
#[derive(Clone, Copy)]
pub struct EncodedHeader {
    bytes: [u8; Self::CAPACITY],
    len: u8,
}

impl EncodedHeader {
    /// Bytes of the longest header: a hole with an extended header.
    const CAPACITY: usize = 44;

    /// No header, for bytes that are not a reply.
    pub const EMPTY: Self = Self { bytes: [0; Self::CAPACITY], len: 0 };

    /// The bytes to send.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    #[inline]
    #[must_use]
    pub(crate) fn with<const N: usize>(mut self, field: [u8; N]) -> Self {
        let start = usize::from(self.len);
        self.bytes[start..start + N].copy_from_slice(&field);
        self.len += N as u8;
        self
    }
}

/// The four bytes that begin no message of the connection's mode, after which the stream has no
/// meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongMagic(pub u32);

impl ReplyHeader {
    /// Reads the head at the start of `bytes`, and its length in bytes; `None` if not all of it has
    /// come.
    ///
    /// # Errors
    /// Another magic than those that `mode` allows.
    #[inline]
    pub fn parse(mode: ReplyMode, bytes: &[u8]) -> Result<Option<(Self, usize)>, WrongMagic> {
        let mut fields = Fields(bytes);
        let Some(magic) = fields.u32() else { return Ok(None) };
        let head = match (magic, mode) {
            (SIMPLE_REPLY_MAGIC, ReplyMode::Simple | ReplyMode::Structured) => {
                Self::simple(&mut fields)
            }
            (STRUCTURED_REPLY_MAGIC, ReplyMode::Structured) => Self::chunk(&mut fields, false),
            (EXTENDED_REPLY_MAGIC, ReplyMode::Extended) => Self::chunk(&mut fields, true),
            _ => return Err(WrongMagic(magic)),
        };
        Ok(head.map(|head| (head, bytes.len() - fields.0.len())))
    }

    #[inline]
    fn simple(fields: &mut Fields<'_>) -> Option<Self> {
        Some(Self::Simple { error: fields.u32()?, cookie: fields.u64()? })
    }

    #[inline]
    fn chunk(fields: &mut Fields<'_>, is_extended: bool) -> Option<Self> {
        let (flags, kind, cookie) = (fields.u16()?, fields.u16()?, fields.u64()?);
        let length = match is_extended {
            true => {
                let _offset = fields.u64()?;
                fields.u64()?
            }
            false => u64::from(fields.u32()?),
        };
        Some(Self::Chunk { flags, kind, cookie, length })
    }

    /// The header as a server in `mode` sends it; `offset` is that of the request. A simple reply is
    /// none of [`ReplyMode::Extended`], and without extended headers the length of a chunk must fit
    /// into 32 bits; more is cut off.
    #[inline]
    #[must_use]
    pub fn encode(&self, mode: ReplyMode, offset: u64) -> EncodedHeader {
        match *self {
            Self::Simple { error, cookie } => EncodedHeader::EMPTY
                .with(SIMPLE_REPLY_MAGIC.to_be_bytes())
                .with(error.to_be_bytes())
                .with(cookie.to_be_bytes()),
            Self::Chunk { flags, kind, cookie, length } => {
                let magic = match mode {
                    ReplyMode::Extended => EXTENDED_REPLY_MAGIC,
                    ReplyMode::Simple | ReplyMode::Structured => STRUCTURED_REPLY_MAGIC,
                };
                let head = EncodedHeader::EMPTY
                    .with(magic.to_be_bytes())
                    .with(flags.to_be_bytes())
                    .with(kind.to_be_bytes())
                    .with(cookie.to_be_bytes());
                match mode {
                    ReplyMode::Extended => {
                        head.with(offset.to_be_bytes()).with(length.to_be_bytes())
                    }
                    ReplyMode::Simple | ReplyMode::Structured => {
                        head.with((length as u32).to_be_bytes())
                    }
                }
            }
        }
    }

    /// The request that is answered.
    #[inline]
    #[must_use]
    pub const fn cookie(&self) -> u64 {
        match *self {
            Self::Simple { cookie, .. } | Self::Chunk { cookie, .. } => cookie,
        }
    }

    /// Whether no other message follows for the request.
    #[inline]
    #[must_use]
    pub const fn is_last(&self) -> bool {
        match *self {
            Self::Simple { .. } => true,
            Self::Chunk { flags, .. } => flags & REPLY_FLAG_DONE != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::{REPLY_TYPE_NONE, REPLY_TYPE_OFFSET_DATA};

    const SIMPLE: [u8; 16] = [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28, 1, 2, 3, 4, 5, 6, 7, 8];
    const CHUNK: [u8; 20] =
        [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0];
    const EXTENDED: [u8; 32] = [
        0x6e, 0x8a, 0x27, 0x8c, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0,
        0, 1, 0, 0, 0, 8,
    ];
    const COOKIE: u64 = 0x0102_0304_0506_0708;

    #[test]
    fn each_head_is_written_and_read_in_network_order_and_nothing_is_read_from_a_part_of_it() {
        let (kind, length) = (REPLY_TYPE_OFFSET_DATA, (1 << 32) + 8);
        let rows: [(ReplyMode, &[u8], ReplyHeader); 3] = [
            (ReplyMode::Simple, &SIMPLE, ReplyHeader::Simple { error: 28, cookie: COOKIE }),
            (
                ReplyMode::Structured,
                &CHUNK,
                ReplyHeader::Chunk { flags: 1, kind: REPLY_TYPE_NONE, cookie: COOKIE, length: 0 },
            ),
            (
                ReplyMode::Extended,
                &EXTENDED,
                ReplyHeader::Chunk { flags: 0, kind, cookie: COOKIE, length },
            ),
        ];
        for (mode, bytes, wanted) in rows {
            assert_eq!(ReplyHeader::parse(mode, bytes), Ok(Some((wanted, bytes.len()))));
            assert_eq!(wanted.encode(mode, 9).as_slice(), bytes);
            assert_eq!(wanted.is_last(), mode != ReplyMode::Extended);
            for count in 0..bytes.len() {
                assert_eq!(ReplyHeader::parse(mode, &bytes[..count]), Ok(None), "{mode:?} {count}");
            }
        }
    }

    #[test]
    fn a_head_of_another_mode_is_refused_by_its_magic() {
        let rows: [(ReplyMode, &[u8]); 4] = [
            (ReplyMode::Simple, &CHUNK),
            (ReplyMode::Simple, &EXTENDED),
            (ReplyMode::Structured, &EXTENDED),
            (ReplyMode::Extended, &SIMPLE),
        ];
        for (mode, bytes) in rows {
            assert!(ReplyHeader::parse(mode, bytes).is_err(), "{mode:?}");
        }
    }
}
