//! The header of a request.
//!
//! Invariant: of a parsed header only the magic has been checked; an encoded header parses as the same
//! header.

use crate::constants::{
    CMD_FLAG_PAYLOAD_LEN, CMD_WRITE, EXTENDED_REQUEST_BYTES, EXTENDED_REQUEST_MAGIC, REQUEST_BYTES,
    REQUEST_MAGIC,
};
use crate::reply_mode::ReplyMode;

/// The header of a request (NBD proto.md, "Request message"). Only the magic has been checked:
/// every field is whatever the client sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Command flags, `CMD_FLAG_*`.
    pub flags: u16,
    /// The command, `CMD_*`.
    pub command: u16,
    /// The client's name for the request; the reply returns it.
    pub cookie: u64,
    /// First byte of the export concerned.
    pub offset: u64,
    /// Bytes concerned, or bytes of payload behind the header; see [`RequestHeader::payload`].
    pub length: u64,
}

impl RequestHeader {
    /// Reads the header at the start of `bytes`, which are at least [`ReplyMode::request_bytes`];
    /// `None` if the magic is wrong, after which the stream has no meaning.
    #[inline]
    #[must_use]
    pub fn parse(mode: ReplyMode, bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (flags, rest) = rest.split_first_chunk()?;
        let (command, rest) = rest.split_first_chunk()?;
        let (cookie, rest) = rest.split_first_chunk()?;
        let (offset, rest) = rest.split_first_chunk()?;
        let (wanted, length) = match mode {
            ReplyMode::Simple | ReplyMode::Structured => {
                (REQUEST_MAGIC, u64::from(u32::from_be_bytes(*rest.first_chunk()?)))
            }
            ReplyMode::Extended => {
                (EXTENDED_REQUEST_MAGIC, u64::from_be_bytes(*rest.first_chunk()?))
            }
        };
        (u32::from_be_bytes(*magic) == wanted).then_some(Self {
            flags: u16::from_be_bytes(*flags),
            command: u16::from_be_bytes(*command),
            cookie: u64::from_be_bytes(*cookie),
            offset: u64::from_be_bytes(*offset),
            length,
        })
    }

    /// Bytes of payload that follow the header: those of a write; with extended headers those of
    /// any request with `CMD_FLAG_PAYLOAD_LEN`. QEMU (10.0) as a client sends extended writes with
    /// payload but without the flag, and its server accepts them, so this function counts them too.
    #[inline]
    #[must_use]
    pub const fn payload(&self, mode: ReplyMode) -> u64 {
        let says_so = matches!(mode, ReplyMode::Extended) && self.flags & CMD_FLAG_PAYLOAD_LEN != 0;
        if says_so || self.command == CMD_WRITE { self.length } else { 0 }
    }

    /// The header as a client sends it, behind which a payload may follow. Without extended headers
    /// `length` must fit into 32 bits; more is cut off.
    #[inline]
    #[must_use]
    pub fn encode(&self, mode: ReplyMode) -> ([u8; EXTENDED_REQUEST_BYTES], usize) {
        let mut bytes = [0; EXTENDED_REQUEST_BYTES];
        let magic = match mode {
            ReplyMode::Simple | ReplyMode::Structured => REQUEST_MAGIC,
            ReplyMode::Extended => EXTENDED_REQUEST_MAGIC,
        };
        bytes[0..4].copy_from_slice(&magic.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        match mode {
            ReplyMode::Simple | ReplyMode::Structured => {
                bytes[24..28].copy_from_slice(&(self.length as u32).to_be_bytes());
            }
            ReplyMode::Extended => bytes[24..32].copy_from_slice(&self.length.to_be_bytes()),
        }
        (bytes, mode.request_bytes())
    }

    /// The compact header, for connections without extended headers; `length` as for
    /// [`RequestHeader::encode`].
    #[inline]
    #[must_use]
    pub fn compact(&self) -> [u8; REQUEST_BYTES] {
        let (bytes, _) = self.encode(ReplyMode::Simple);
        let mut compact = [0; REQUEST_BYTES];
        compact.copy_from_slice(&bytes[..REQUEST_BYTES]);
        compact
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::{CMD_FLAG_FUA, CMD_READ, CMD_WRITE_ZEROES};

    const COOKIE: u64 = 0x0102_0304_0506_0708;

    #[test]
    fn a_request_header_is_read_field_by_field_in_network_order() {
        let bytes = [
            0x25, 0x60, 0x95, 0x13, 0x00, 0x01, 0x00, 0x06, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9, 0,
            0, 0x10, 0x00, 0xff, 0xff, 0xf0, 0x00,
        ];
        let wanted = RequestHeader {
            flags: CMD_FLAG_FUA,
            command: CMD_WRITE_ZEROES,
            cookie: COOKIE,
            offset: 0x9_0000_1000,
            length: 0xffff_f000,
        };
        for mode in [ReplyMode::Simple, ReplyMode::Structured] {
            assert_eq!(RequestHeader::parse(mode, &bytes), Some(wanted));
        }
        assert_eq!(wanted.compact(), bytes);
    }

    #[test]
    fn nbd_must_extended_request_headers_have_32_bytes_and_a_length_of_64_bits() {
        let bytes = [
            0x21, 0xe4, 0x1c, 0x71, 0x00, 0x20, 0x00, 0x01, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9, 0,
            0, 0x10, 0x00, 0x80, 0, 0, 0, 0, 0, 0, 7,
        ];
        let wanted = RequestHeader {
            flags: CMD_FLAG_PAYLOAD_LEN,
            command: CMD_WRITE,
            cookie: COOKIE,
            offset: 0x9_0000_1000,
            length: (1 << 63) + 7,
        };
        assert_eq!(bytes.len(), ReplyMode::Extended.request_bytes());
        assert_eq!(RequestHeader::parse(ReplyMode::Extended, &bytes), Some(wanted));
        assert_eq!(wanted.encode(ReplyMode::Extended), (bytes, 32));
    }

    #[test]
    fn a_request_header_with_any_wrong_bit_in_its_magic_is_refused() {
        let magics = [
            (ReplyMode::Simple, REQUEST_MAGIC),
            (ReplyMode::Structured, REQUEST_MAGIC),
            (ReplyMode::Extended, EXTENDED_REQUEST_MAGIC),
        ];
        for (mode, magic) in magics {
            let mut bytes = vec![0; mode.request_bytes()];
            bytes[..4].copy_from_slice(&magic.to_be_bytes());
            assert!(RequestHeader::parse(mode, &bytes).is_some());
            for bit in 0..32 {
                let mut wrong = bytes.clone();
                wrong[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(RequestHeader::parse(mode, &wrong), None, "bit {bit} in {mode:?}");
            }
        }
    }

    #[test]
    fn a_payload_follows_a_write_and_an_extended_request_that_says_so() {
        let header =
            |command, flags| RequestHeader { flags, command, cookie: 0, offset: 0, length: 9 };
        let rows = [
            (ReplyMode::Simple, CMD_WRITE, 0, 9),
            (ReplyMode::Structured, CMD_WRITE, 0, 9),
            (ReplyMode::Structured, CMD_READ, CMD_FLAG_PAYLOAD_LEN, 0),
            (ReplyMode::Extended, CMD_WRITE, 0, 9),
            (ReplyMode::Extended, CMD_WRITE, CMD_FLAG_PAYLOAD_LEN, 9),
            (ReplyMode::Extended, CMD_READ, CMD_FLAG_PAYLOAD_LEN, 9),
            (ReplyMode::Extended, CMD_READ, 0, 0),
        ];
        for (mode, command, flags, bytes) in rows {
            assert_eq!(header(command, flags).payload(mode), bytes, "{mode:?} {command} {flags}");
        }
    }
}
