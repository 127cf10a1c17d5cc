//! The client's half of NBD: its numbers, and a request as it goes over the wire.
//!
//! Invariant: nothing here decides anything. Names are those of NBD proto.md without `NBD_`; all
//! numbers travel big-endian.
//! Knows: nothing. Known by: the other modules here.

/// `NBDMAGIC`, the first half of a server's greeting.
pub(super) const INIT_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// `IHAVEOPT`, the second half, and the start of every option.
pub(super) const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

// "Handshake phase".
pub(super) const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
pub(super) const FLAG_NO_ZEROES: u16 = 1 << 1;

// "Option types", "Option reply types", and the types of information.
pub(super) const OPT_GO: u32 = 7;
pub(super) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(super) const OPT_SET_META_CONTEXT: u32 = 10;
pub(super) const REP_ACK: u32 = 1;
pub(super) const REP_INFO: u32 = 3;
pub(super) const REP_META_CONTEXT: u32 = 4;
pub(super) const REP_ERROR_BIT: u32 = 1 << 31;
pub(super) const REP_ERR_UNSUP: u32 = REP_ERROR_BIT + 1;
pub(super) const REP_ERR_POLICY: u32 = REP_ERROR_BIT + 2;
pub(super) const REP_ERR_TLS_REQD: u32 = REP_ERROR_BIT + 5;
pub(super) const REP_ERR_UNKNOWN: u32 = REP_ERROR_BIT + 6;
pub(super) const REP_ERR_SHUTDOWN: u32 = REP_ERROR_BIT + 7;
pub(super) const INFO_EXPORT: u16 = 0;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;

// "Transmission flags".
pub(super) const FLAG_READ_ONLY: u16 = 1 << 1;
pub(super) const FLAG_SEND_FLUSH: u16 = 1 << 2;
pub(super) const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
pub(super) const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;

// "Request types".
pub(super) const CMD_READ: u16 = 0;
pub(super) const CMD_WRITE: u16 = 1;
pub(super) const CMD_DISC: u16 = 2;
pub(super) const CMD_FLUSH: u16 = 3;
pub(super) const CMD_WRITE_ZEROES: u16 = 6;
pub(super) const CMD_BLOCK_STATUS: u16 = 7;

// "Structured reply flags" and "Structured reply types".
pub(super) const REPLY_FLAG_DONE: u16 = 1 << 0;
pub(super) const REPLY_NONE: u16 = 0;
pub(super) const REPLY_OFFSET_DATA: u16 = 1;
pub(super) const REPLY_OFFSET_HOLE: u16 = 2;
pub(super) const REPLY_BLOCK_STATUS: u16 = 5;
pub(super) const REPLY_ERROR_BIT: u16 = 1 << 15;

/// `base:allocation`: the extent reads as zeros.
pub(super) const STATE_ZERO: u32 = 1 << 1;

/// Bytes of a request header.
pub(super) const REQUEST_BYTES: usize = 28;
/// Bytes of a simple reply.
pub(super) const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of the head of a chunk of a structured reply.
pub(super) const CHUNK_HEAD_BYTES: usize = 20;

/// The 28 bytes of "Request message".
pub(super) fn request(command: u16, cookie: u64, offset: u64, len: u32) -> [u8; REQUEST_BYTES] {
    let flags = 0u16;
    let mut bytes = [0; REQUEST_BYTES];
    bytes[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&command.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..28].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// A number at the start of `bytes`, and what is behind it; `None` where `bytes` is too short.
pub(super) fn u16_of(bytes: &[u8]) -> Option<(u16, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u16::from_be_bytes(*number), rest))
}

/// As [`u16_of`].
pub(super) fn u32_of(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u32::from_be_bytes(*number), rest))
}

/// As [`u16_of`].
pub(super) fn u64_of(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u64::from_be_bytes(*number), rest))
}

/// The words for an NBD error value ("Error values").
pub(super) fn error_words(error: u32) -> String {
    let words = match error {
        1 => "operation not permitted",
        5 => "input/output error",
        12 => "the server has no memory left",
        22 => "invalid request",
        28 => "no space left",
        75 => "too large for the server",
        95 => "not supported",
        108 => "the server is shutting down",
        other => return format!("error {other}"),
    };
    words.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_laid_out_field_by_field_in_network_order() {
        let bytes = request(CMD_WRITE_ZEROES, 0x0102_0304_0506_0708, 0x9_0000_1000, 0xffff_f000);
        let wanted = [
            0x25, 0x60, 0x95, 0x13, 0, 0, 0, 6, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9, 0, 0, 0x10, 0,
            0xff, 0xff, 0xf0, 0,
        ];
        assert_eq!(bytes, wanted);
    }

    #[test]
    fn a_number_is_not_read_past_the_end() {
        assert_eq!(u16_of(&[1, 2, 3]), Some((0x102, &[3][..])));
        assert_eq!(u32_of(&[0, 0, 1, 0]), Some((256, &[][..])));
        assert_eq!((u16_of(&[1]), u32_of(&[0; 3]), u64_of(&[0; 7])), (None, None, None));
    }
}
