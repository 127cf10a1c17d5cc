//! The numbers and the fixed-size messages of NBD: what the bytes on the socket mean.
//!
//! Invariant: nothing here decides anything. A header that parses has the right magic and no
//! other check behind it; a reply head says in its length exactly what must follow it.
//! Names are those of NBD proto.md without `NBD_`; all numbers travel big-endian.
//! Knows: nothing. Known by: handshake and the transmission phase.

/// `NBDMAGIC`: the first eight bytes of a server's greeting.
pub(crate) const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`: the second eight bytes of the greeting and the start of every option.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The start of every reply to an option.
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The start of every request of the transmission phase.
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The start of a simple reply.
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The start of every chunk of a structured reply.
pub(crate) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// The longest string of the protocol, in bytes (NBD proto.md, "Conventions").
pub(crate) const MAX_STRING_BYTES: usize = 4096;

/// Handshake flag, and client flag in answer to it: options other than `OPT_EXPORT_NAME` work.
pub(crate) const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag, and client flag in answer to it: no padding after `OPT_EXPORT_NAME`.
pub(crate) const FLAG_NO_ZEROES: u16 = 1 << 1;

// Option types (NBD proto.md, "Option types"); one that is missing here is not supported.
pub(crate) const OPT_EXPORT_NAME: u32 = 1;
pub(crate) const OPT_ABORT: u32 = 2;
pub(crate) const OPT_LIST: u32 = 3;
pub(crate) const OPT_STARTTLS: u32 = 5;
pub(crate) const OPT_INFO: u32 = 6;
pub(crate) const OPT_GO: u32 = 7;
pub(crate) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(crate) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(crate) const OPT_SET_META_CONTEXT: u32 = 10;

// Option reply types (NBD proto.md, "Option reply types"); bit 31 marks an error.
pub(crate) const REP_ACK: u32 = 1;
pub(crate) const REP_SERVER: u32 = 2;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const REP_META_CONTEXT: u32 = 4;
pub(crate) const REP_ERR_UNSUP: u32 = (1 << 31) + 1;
pub(crate) const REP_ERR_POLICY: u32 = (1 << 31) + 2;
pub(crate) const REP_ERR_INVALID: u32 = (1 << 31) + 3;
pub(crate) const REP_ERR_TLS_REQD: u32 = (1 << 31) + 5;
pub(crate) const REP_ERR_UNKNOWN: u32 = (1 << 31) + 6;
pub(crate) const REP_ERR_TOO_BIG: u32 = (1 << 31) + 9;

// Information types of `REP_INFO`.
pub(crate) const INFO_EXPORT: u16 = 0;
pub(crate) const INFO_NAME: u16 = 1;
pub(crate) const INFO_DESCRIPTION: u16 = 2;
pub(crate) const INFO_BLOCK_SIZE: u16 = 3;

// Transmission flags (NBD proto.md, "Transmission flags"): what an export can do.
pub(crate) const FLAG_HAS_FLAGS: u16 = 1 << 0;
pub(crate) const FLAG_READ_ONLY: u16 = 1 << 1;
pub(crate) const FLAG_SEND_FLUSH: u16 = 1 << 2;
pub(crate) const FLAG_SEND_FUA: u16 = 1 << 3;
pub(crate) const FLAG_SEND_TRIM: u16 = 1 << 5;
pub(crate) const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
pub(crate) const FLAG_SEND_DF: u16 = 1 << 7;
pub(crate) const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
pub(crate) const FLAG_SEND_CACHE: u16 = 1 << 10;
pub(crate) const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;

// Commands (NBD proto.md, "Request types").
pub(crate) const CMD_READ: u16 = 0;
pub(crate) const CMD_WRITE: u16 = 1;
pub(crate) const CMD_DISC: u16 = 2;
pub(crate) const CMD_FLUSH: u16 = 3;
pub(crate) const CMD_TRIM: u16 = 4;
pub(crate) const CMD_CACHE: u16 = 5;
pub(crate) const CMD_WRITE_ZEROES: u16 = 6;
pub(crate) const CMD_BLOCK_STATUS: u16 = 7;

// Command flags (NBD proto.md, "Command flags").
pub(crate) const CMD_FLAG_FUA: u16 = 1 << 0;
pub(crate) const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub(crate) const CMD_FLAG_DF: u16 = 1 << 2;
pub(crate) const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
pub(crate) const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;

/// Structured reply flag: no chunk follows for this request.
const REPLY_FLAG_DONE: u16 = 1 << 0;

// Structured reply types (NBD proto.md, "Structured reply types"); bit 15 marks an error.
const REPLY_TYPE_NONE: u16 = 0;
const REPLY_TYPE_OFFSET_DATA: u16 = 1;
const REPLY_TYPE_OFFSET_HOLE: u16 = 2;
const REPLY_TYPE_BLOCK_STATUS: u16 = 5;
const REPLY_TYPE_ERROR: u16 = (1 << 15) + 1;

/// `base:allocation`: the extent has no storage behind it.
pub(crate) const STATE_HOLE: u32 = 1 << 0;
/// `base:allocation`: the extent reads as zeros.
pub(crate) const STATE_ZERO: u32 = 1 << 1;

// Error values (NBD proto.md, "Error values"): the only ones a reply may carry.
pub(crate) const EPERM: u32 = 1;
pub(crate) const EIO: u32 = 5;
pub(crate) const ENOMEM: u32 = 12;
pub(crate) const EINVAL: u32 = 22;
pub(crate) const ENOSPC: u32 = 28;
pub(crate) const EOVERFLOW: u32 = 75;
pub(crate) const ENOTSUP: u32 = 95;
pub(crate) const ESHUTDOWN: u32 = 108;

/// Error numbers of Linux, as in errno(3) on the architectures that share asm-generic/errno.h
/// (x86, ARM, RISC-V, POWER and others).
mod linux {
    pub(super) const EPERM: i32 = 1;
    pub(super) const ENOMEM: i32 = 12;
    pub(super) const EINVAL: i32 = 22;
    pub(super) const EFBIG: i32 = 27;
    pub(super) const ENOSPC: i32 = 28;
    pub(super) const EROFS: i32 = 30;
    pub(super) const EOVERFLOW: i32 = 75;
    /// The same number as `ENOTSUP`.
    pub(super) const EOPNOTSUPP: i32 = 95;
    pub(super) const ESHUTDOWN: i32 = 108;
    pub(super) const EDQUOT: i32 = 122;
}

/// The error value for a positive Linux errno; `EIO` for one the protocol has no value for
/// (NBD proto.md, "Error values"). Never 0, so a failure cannot look like a success.
pub(crate) fn error_number(errno: i32) -> u32 {
    match errno {
        linux::EPERM | linux::EROFS => EPERM,
        linux::ENOMEM => ENOMEM,
        linux::EINVAL => EINVAL,
        linux::ENOSPC | linux::EDQUOT | linux::EFBIG => ENOSPC,
        linux::EOVERFLOW => EOVERFLOW,
        linux::EOPNOTSUPP => ENOTSUP,
        linux::ESHUTDOWN => ESHUTDOWN,
        _ => EIO,
    }
}

/// The header of a request (NBD proto.md, "Request message"). Only the magic has been checked:
/// every field is whatever the client sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestHeader {
    /// Command flags, `CMD_FLAG_*`.
    pub(crate) flags: u16,
    /// The command, `CMD_*`.
    pub(crate) command: u16,
    /// The client's name for the request; goes back in the reply as it is.
    pub(crate) cookie: u64,
    /// First byte of the export concerned.
    pub(crate) offset: u64,
    /// Bytes concerned; for `CMD_WRITE` as many follow the header.
    pub(crate) length: u32,
}

impl RequestHeader {
    /// Bytes of a request header on the wire.
    pub(crate) const LEN: usize = 28;

    /// Reads a header; `None` if the magic is wrong, after which the stream has no meaning.
    #[inline]
    pub(crate) fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (flags, rest) = rest.split_first_chunk()?;
        let (command, rest) = rest.split_first_chunk()?;
        let (cookie, rest) = rest.split_first_chunk()?;
        let (offset, rest) = rest.split_first_chunk()?;
        let (length, _) = rest.split_first_chunk()?;
        (u32::from_be_bytes(*magic) == REQUEST_MAGIC).then_some(Self {
            flags: u16::from_be_bytes(*flags),
            command: u16::from_be_bytes(*command),
            cookie: u64::from_be_bytes(*cookie),
            offset: u64::from_be_bytes(*offset),
            length: u32::from_be_bytes(*length),
        })
    }
}

/// The fixed part of a reply: a simple reply, or one chunk of a structured reply up to its
/// payload of variable length.
#[derive(Clone, Copy)]
pub(crate) struct ReplyHead {
    bytes: [u8; Self::MAX_LEN],
    len: u8,
}

impl ReplyHead {
    /// Bytes of the longest head.
    const MAX_LEN: usize = 32;

    /// No bytes at all, before what is no reply.
    pub(crate) const EMPTY: Self = Self { bytes: [0; Self::MAX_LEN], len: 0 };

    /// The bytes to send.
    #[inline]
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// A simple reply, 16 bytes. `error` is 0 or an error value; data of a read follow if it is 0.
    #[inline]
    pub(crate) fn simple(error: u32, cookie: u64) -> Self {
        Self::EMPTY
            .with(SIMPLE_REPLY_MAGIC.to_be_bytes())
            .with(error.to_be_bytes())
            .with(cookie.to_be_bytes())
    }

    /// A chunk of read data, 28 bytes; `data_len` bytes of data follow, which begin at byte
    /// `offset` of the export. `data_len` is 1 to `u32::MAX - 8`: the protocol has no empty data
    /// chunk (a read of 0 bytes is answered by [`ReplyHead::none`]), and a greater length does
    /// not fit into the chunk's own.
    #[inline]
    pub(crate) fn offset_data(done: bool, cookie: u64, offset: u64, data_len: u32) -> Self {
        debug_assert!((1..=u32::MAX - 8).contains(&data_len));
        Self::chunk(done, REPLY_TYPE_OFFSET_DATA, cookie, data_len + 8).with(offset.to_be_bytes())
    }

    /// A chunk that stands for `len` bytes of zeros, from byte `offset` of the export on; 32
    /// bytes, nothing follows. `len` is at least 1.
    #[inline]
    pub(crate) fn offset_hole(cookie: u64, offset: u64, len: u32, done: bool) -> Self {
        debug_assert_ne!(len, 0);
        Self::chunk(done, REPLY_TYPE_OFFSET_HOLE, cookie, 12)
            .with(offset.to_be_bytes())
            .with(len.to_be_bytes())
    }

    /// The last chunk of a reply that succeeded unless an error chunk came before it; 20 bytes.
    #[inline]
    pub(crate) fn none(cookie: u64) -> Self {
        Self::chunk(true, REPLY_TYPE_NONE, cookie, 0)
    }

    /// The last chunk of a reply that failed, 26 bytes, with no message for a human. `error` is
    /// an error value, not 0.
    #[inline]
    pub(crate) fn error(cookie: u64, error: u32) -> Self {
        debug_assert_ne!(error, 0);
        let message_len = 0u16;
        Self::chunk(true, REPLY_TYPE_ERROR, cookie, 6)
            .with(error.to_be_bytes())
            .with(message_len.to_be_bytes())
    }

    /// The last chunk of a block status reply, 24 bytes; `payload_len` bytes of extents follow
    /// (see [`push_extent`]), at least one and at most 2^20 of them.
    #[inline]
    pub(crate) fn block_status(cookie: u64, payload_len: u32, context_id: u32) -> Self {
        debug_assert!(payload_len >= EXTENT_BYTES && payload_len.is_multiple_of(EXTENT_BYTES));
        Self::chunk(true, REPLY_TYPE_BLOCK_STATUS, cookie, payload_len + 4)
            .with(context_id.to_be_bytes())
    }

    #[inline]
    fn chunk(done: bool, kind: u16, cookie: u64, length: u32) -> Self {
        let flags = if done { REPLY_FLAG_DONE } else { 0 };
        Self::EMPTY
            .with(STRUCTURED_REPLY_MAGIC.to_be_bytes())
            .with(flags.to_be_bytes())
            .with(kind.to_be_bytes())
            .with(cookie.to_be_bytes())
            .with(length.to_be_bytes())
    }

    #[inline]
    fn with<const N: usize>(mut self, field: [u8; N]) -> Self {
        let start = usize::from(self.len);
        self.bytes[start..start + N].copy_from_slice(&field);
        self.len += N as u8;
        self
    }
}

/// Bytes of one extent in the payload of a block status chunk.
pub(crate) const EXTENT_BYTES: u32 = 8;

/// Appends one extent to the payload of a block status chunk: its length in bytes (at least 1)
/// and `STATE_*` flags. Each extent begins where the one before it ends.
#[inline]
pub(crate) fn push_extent(payload: &mut Vec<u8>, len: u32, flags: u32) {
    debug_assert_ne!(len, 0);
    payload.extend_from_slice(&len.to_be_bytes());
    payload.extend_from_slice(&flags.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOKIE: u64 = 0x0102_0304_0506_0708;
    const COOKIE_BYTES: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

    /// The chunk that a client would take off the stream: flags, type, cookie, length, payload.
    fn chunk(head: &ReplyHead) -> (u16, u16, &[u8], u32, &[u8]) {
        let bytes = head.as_slice();
        assert_eq!(bytes[..4], [0x66, 0x8e, 0x33, 0xef]);
        let flags = u16::from_be_bytes(bytes[4..6].try_into().unwrap());
        let kind = u16::from_be_bytes(bytes[6..8].try_into().unwrap());
        let length = u32::from_be_bytes(bytes[16..20].try_into().unwrap());
        (flags, kind, &bytes[8..16], length, &bytes[20..])
    }

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
        assert_eq!(RequestHeader::parse(&bytes), Some(wanted));
    }

    #[test]
    fn a_request_header_with_any_wrong_bit_in_its_magic_is_refused() {
        let mut bytes = [0; RequestHeader::LEN];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        assert!(RequestHeader::parse(&bytes).is_some());
        for bit in 0..32 {
            let mut wrong = bytes;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(RequestHeader::parse(&wrong), None, "bit {bit}");
        }
    }

    #[test]
    fn a_simple_reply_is_magic_error_cookie() {
        let head = ReplyHead::simple(ENOSPC, COOKIE);
        assert_eq!(head.as_slice()[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28]);
        assert_eq!(head.as_slice()[8..], COOKIE_BYTES);
    }

    #[test]
    fn a_data_chunk_counts_its_offset_and_the_data_to_come() {
        let head = ReplyHead::offset_data(false, COOKIE, 0x1000, 512);
        let offset = [0, 0, 0, 0, 0, 0, 0x10, 0];
        assert_eq!(chunk(&head), (0, 1, &COOKIE_BYTES[..], 520, &offset[..]));
        assert_eq!(chunk(&ReplyHead::offset_data(true, COOKIE, 0x1000, 512)).0, 1);
    }

    #[test]
    fn a_hole_chunk_is_complete_in_its_32_bytes() {
        let head = ReplyHead::offset_hole(COOKIE, 0x1000, 512, true);
        let payload = [0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0];
        assert_eq!(chunk(&head), (1, 2, &COOKIE_BYTES[..], 12, &payload[..]));
        assert_eq!(head.as_slice().len(), 32);
        assert_eq!(chunk(&ReplyHead::offset_hole(COOKIE, 0, 512, false)).0, 0);
    }

    #[test]
    fn nbd_must_a_none_chunk_is_empty_and_the_last() {
        let head = ReplyHead::none(COOKIE);
        assert_eq!(chunk(&head), (1, 0, &COOKIE_BYTES[..], 0, &[][..]));
    }

    #[test]
    fn an_error_chunk_carries_its_value_and_an_empty_message() {
        let head = ReplyHead::error(COOKIE, EINVAL);
        let payload = [0, 0, 0, 22, 0, 0];
        assert_eq!(chunk(&head), (1, 0x8001, &COOKIE_BYTES[..], 6, &payload[..]));
    }

    #[test]
    fn a_block_status_chunk_counts_its_context_and_the_extents_to_come() {
        let mut extents = Vec::new();
        push_extent(&mut extents, 0x2000, STATE_HOLE | STATE_ZERO);
        push_extent(&mut extents, 0x200, 0);
        assert_eq!(extents, [0, 0, 0x20, 0, 0, 0, 0, 3, 0, 0, 2, 0, 0, 0, 0, 0]);
        let head = ReplyHead::block_status(COOKIE, extents.len() as u32, 7);
        let context = [0, 0, 0, 7];
        assert_eq!(chunk(&head), (1, 5, &COOKIE_BYTES[..], 20, &context[..]));
    }

    #[test]
    fn nbd_should_quota_and_file_size_errors_are_enospc_and_read_only_is_eperm() {
        let rows = [
            (1, EPERM),
            (5, EIO),
            (12, ENOMEM),
            (22, EINVAL),
            (27, ENOSPC),
            (28, ENOSPC),
            (30, EPERM),
            (75, EOVERFLOW),
            (95, ENOTSUP),
            (108, ESHUTDOWN),
            (122, ENOSPC),
        ];
        for (errno, wanted) in rows {
            assert_eq!(error_number(errno), wanted, "errno {errno}");
        }
    }

    #[test]
    fn every_other_errno_is_eio_and_none_is_success() {
        let known = [1, 12, 22, 27, 28, 30, 75, 95, 108, 122];
        for errno in (-200..200).filter(|errno| !known.contains(errno)) {
            assert_eq!(error_number(errno), EIO, "errno {errno}");
        }
    }
}
