//! Numbers out of a server's messages, and words for its errors.
//!
//! Invariant: nothing here decides anything.
//! Knows: the numbers of the protocol. Known by: the other modules here.

pub(super) use nowait_nbd::*;

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
        EPERM => "operation not permitted",
        EIO => "input/output error",
        ENOMEM => "the server has no memory left",
        EINVAL => "invalid request",
        ENOSPC => "no space left",
        EOVERFLOW => "too large for the server",
        ENOTSUP => "not supported",
        ESHUTDOWN => "the server is shutting down",
        other => return format!("error {other}"),
    };
    words.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_not_read_past_the_end() {
        assert_eq!(u16_of(&[1, 2, 3]), Some((0x102, &[3][..])));
        assert_eq!(u32_of(&[0, 0, 1, 0]), Some((256, &[][..])));
        assert_eq!((u16_of(&[1]), u32_of(&[0; 3]), u64_of(&[0; 7])), (None, None, None));
    }
}
