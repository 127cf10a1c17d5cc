//! The data of options, and the replies to them, as bytes.
//!
//! Invariant: data are understood only as a whole: what has a byte too few, or one too many, or a
//! string that breaks the rules for strings, is nothing.
//! Knows: wire. Known by: handshake.

use super::wire::{self, MAX_STRING_BYTES};

/// Appends one reply of type `kind` to `option`, with the data of all `parts`.
pub(crate) fn reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&wire::OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(length as u32).to_be_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// The data of `OPT_INFO` and `OPT_GO`.
pub(crate) struct InfoRequest<'a> {
    pub(crate) export: &'a str,
    pub(crate) kinds: Vec<u16>,
}

impl<'a> InfoRequest<'a> {
    /// `None` unless the data are exactly one request.
    pub(crate) fn parse(data: &'a [u8]) -> Option<Self> {
        let mut fields = Fields(data);
        let export = fields.string()?;
        let count = fields.u16()?;
        let kinds = (0..count).map(|_| fields.u16()).collect::<Option<_>>()?;
        fields.is_empty().then_some(Self { export, kinds })
    }
}

/// The data of `OPT_LIST_META_CONTEXT` and `OPT_SET_META_CONTEXT`.
pub(crate) struct ContextRequest<'a> {
    pub(crate) export: &'a str,
    pub(crate) queries: Vec<&'a str>,
}

impl<'a> ContextRequest<'a> {
    /// `None` unless the data are exactly one request.
    pub(crate) fn parse(data: &'a [u8]) -> Option<Self> {
        let mut fields = Fields(data);
        let export = fields.string()?;
        let count = fields.u32()?;
        let queries = (0..count).map(|_| fields.string()).collect::<Option<_>>()?;
        fields.is_empty().then_some(Self { export, queries })
    }
}

/// What is left to read of a message.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string behind its length in 32 bits.
    fn string(&mut self) -> Option<&'a str> {
        let length = usize::try_from(self.u32()?).ok()?;
        let (field, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        string(field)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The text of a string field; `None` if it breaks the rules for strings (NBD proto.md,
/// "Conventions"): UTF-8 without NUL, at most [`MAX_STRING_BYTES`].
pub(crate) fn string(field: &[u8]) -> Option<&str> {
    if field.len() > MAX_STRING_BYTES || field.contains(&0) {
        return None;
    }
    std::str::from_utf8(field).ok()
}
