//! Numbers and strings at the front of a message.
//!
//! Invariant: nothing is read behind the end; a field that is cut off is `None`.

use crate::constants::MAX_STRING_BYTES;

/// The rest of a message: each call takes a field from its front.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    /// The next `count` bytes.
    #[inline]
    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    /// The next `N` bytes.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    /// The next number of two bytes.
    #[inline]
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next number of four bytes.
    #[inline]
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next number of eight bytes.
    #[inline]
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string behind its length in 32 bits: UTF-8 without NUL, at most [`MAX_STRING_BYTES`] (NBD
    /// proto.md, "Conventions").
    pub fn string(&mut self) -> Option<&'a str> {
        let length = usize::try_from(self.u32()?).ok()?;
        valid_string(self.take(length)?)
    }

    /// Whether nothing is left.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The text of a string field that reaches to the end of its message; `None` if it breaks the rules
/// for strings: UTF-8 without NUL, at most [`MAX_STRING_BYTES`] (NBD proto.md, "Conventions").
#[must_use]
pub fn valid_string(field: &[u8]) -> Option<&str> {
    if field.len() > MAX_STRING_BYTES || field.contains(&0) {
        return None;
    }
    std::str::from_utf8(field).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_read_in_network_order_and_not_past_the_end() {
        let mut fields = Fields(&[1, 2, 0, 0, 1, 0, 3]);
        assert_eq!((fields.u16(), fields.u32()), (Some(0x102), Some(256)));
        assert_eq!((fields.u16(), fields.0), (None, &[3][..]), "a field that is cut off is left");
        assert_eq!(fields.u64(), None);
    }

    #[test]
    fn a_string_is_short_utf_8_without_nul() {
        assert_eq!(Fields(b"\0\0\0\x02abc").string(), Some("ab"));
        assert_eq!(Fields(b"\0\0\0\x04abc").string(), None);
        assert_eq!((valid_string(b"a\0"), valid_string(b"\xff")), (None, None));
        assert_eq!(valid_string(&[b'a'; MAX_STRING_BYTES + 1]), None);
    }
}
