//! The extents of a block status chunk (NBD proto.md, "Structured reply types").
//!
//! Invariant: an encoded list is parsed as the same extents.

use crate::fields::Fields;
use crate::reply_mode::ReplyMode;

/// The extents of a block status chunk, encoded for the wire.
pub struct ExtentList {
    mode: ReplyMode,
    count: u32,
    bytes: Vec<u8>,
}

impl ExtentList {
    /// An empty list with room for `count` extents.
    #[must_use]
    pub fn with_capacity(mode: ReplyMode, count: usize) -> Self {
        Self { mode, count: 0, bytes: Vec::with_capacity(count * Self::extent_bytes(mode)) }
    }

    /// Bytes of one extent on the wire.
    #[must_use]
    pub const fn extent_bytes(mode: ReplyMode) -> usize {
        match mode {
            ReplyMode::Simple | ReplyMode::Structured => 8,
            ReplyMode::Extended => 16,
        }
    }

    /// The number of extents in the list.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether no extent is in the list.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes of the extents on the wire.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The number of extents, which stands before them in extended mode.
    pub(crate) fn count_field(&self) -> Option<[u8; 4]> {
        (self.mode == ReplyMode::Extended).then(|| self.count.to_be_bytes())
    }

    /// Appends one extent: its length in bytes (at least 1; without extended headers below 2^32)
    /// and the flags that its context gives it. Each begins at the end of the previous one.
    pub fn push(&mut self, len: u64, flags: u32) {
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
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// The extents of a block status chunk: length in bytes, and flags.
#[derive(Clone, Copy, Debug)]
pub struct Extents<'a> {
    fields: Fields<'a>,
    is_extended: bool,
}

impl<'a> Extents<'a> {
    /// The extents in the payload of a block status chunk in `mode`, behind the id of the context;
    /// `None` unless it has at least one and ends with one.
    #[must_use]
    pub fn parse(mode: ReplyMode, mut fields: Fields<'a>) -> Option<Self> {
        let is_extended = mode == ReplyMode::Extended;
        let announced = if is_extended { Some(fields.u32()? as usize) } else { None };
        let (bytes, each) = (fields.0.len(), ExtentList::extent_bytes(mode));
        let is_whole = bytes > 0 && bytes.is_multiple_of(each);
        let fits = announced.is_none_or(|count| count == bytes / each);
        (is_whole && fits).then_some(Self { fields, is_extended })
    }
}

impl Iterator for Extents<'_> {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        let Self { fields, is_extended } = self;
        let mut number = || match is_extended {
            true => fields.u64(),
            false => fields.u32().map(u64::from),
        };
        Some((number()?, number()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(mode: ReplyMode, extents: &[(u64, u32)]) -> ExtentList {
        let mut list = ExtentList::with_capacity(mode, extents.len());
        extents.iter().for_each(|&(len, flags)| list.push(len, flags));
        list
    }

    #[test]
    fn extended_extents_have_64_bits_and_are_counted() {
        let first = [0, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];
        let second = [0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let list = list(ReplyMode::Extended, &[(0x2000_0000_0000, 3), (0x200, 0)]);
        assert_eq!(list.count_field(), Some([0, 0, 0, 2]));
        assert_eq!(list.into_bytes(), [first, second].concat());
    }

    #[test]
    fn extents_are_parsed_as_they_were_encoded_and_only_whole() {
        for mode in [ReplyMode::Structured, ReplyMode::Extended] {
            let list = list(mode, &[(0x2000, 3), (0x200, 0)]);
            let count = list.count_field().unwrap_or_default();
            let count = if mode == ReplyMode::Extended { &count[..] } else { &[] };
            let bytes = [count, &list.into_bytes()].concat();
            let parsed = |bytes: &[u8]| Extents::parse(mode, Fields(bytes)).map(Vec::from_iter);
            assert_eq!(parsed(&bytes), Some(vec![(0x2000, 3), (0x200, 0)]));
            for cut in 0..bytes.len() {
                let is_one = mode == ReplyMode::Structured && cut == bytes.len() / 2;
                assert_eq!(parsed(&bytes[..cut]).is_some(), is_one, "{cut} bytes in {mode:?}");
            }
        }
        let compact = list(ReplyMode::Structured, &[(0x2000, 3), (0x200, 0)]).into_bytes();
        assert_eq!(compact, [0, 0, 0x20, 0, 0, 0, 0, 3, 0, 0, 2, 0, 0, 0, 0, 0]);
    }
}
