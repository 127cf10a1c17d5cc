//! Options and the replies to them.
//!
//! Invariant: an encoded message is whole; its lengths are those of the bytes that follow. Data are
//! parsed only as a whole: a missing byte, an extra byte, or a string that breaks the rules for
//! strings makes all of them invalid.

use crate::constants::{OPTION_MAGIC, OPTION_REPLY_MAGIC, REP_ERR_BIT};
use crate::fields::Fields;

/// The option `kind`, `OPT_*`, with its data, of less than 4 GiB (NBD proto.md, "Option types").
#[must_use]
pub fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(16 + data.len());
    bytes.extend(OPTION_MAGIC.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// The head of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// The option, `OPT_*`.
    pub option: u32,
    /// Bytes of data behind the head.
    pub length: u32,
}

impl OptionHeader {
    /// Bytes of the head.
    pub const BYTES: usize = 16;

    /// Reads the head; `None` if the magic is wrong, or bytes are missing.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let magic = fields.u64()?;
        let (option, length) = (fields.u32()?, fields.u32()?);
        (magic == OPTION_MAGIC).then_some(Self { option, length })
    }
}

fn string(text: &str, bytes: &mut Vec<u8>) {
    bytes.extend((text.len() as u32).to_be_bytes());
    bytes.extend(text.as_bytes());
}

/// The data of `OPT_INFO` and `OPT_GO`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InfoOption<'a> {
    /// The export's name; empty for the default one.
    pub export: &'a str,
    /// The kinds of information that are asked for, `INFO_*`.
    pub kinds: Vec<u16>,
}

impl<'a> InfoOption<'a> {
    /// `None` unless the data are exactly one request.
    #[must_use]
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        let mut fields = Fields(data);
        let export = fields.string()?;
        let count = fields.u16()?;
        let kinds = (0..count).map(|_| fields.u16()).collect::<Option<_>>()?;
        fields.is_empty().then_some(Self { export, kinds })
    }

    /// The data of the option.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::new();
        string(self.export, &mut data);
        data.extend((self.kinds.len() as u16).to_be_bytes());
        data.extend(self.kinds.iter().flat_map(|kind| kind.to_be_bytes()));
        data
    }
}

/// The data of `OPT_LIST_META_CONTEXT` and `OPT_SET_META_CONTEXT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContextOption<'a> {
    /// The export's name; empty for the default one.
    pub export: &'a str,
    /// Names of contexts, or of namespaces.
    pub queries: Vec<&'a str>,
}

impl<'a> MetaContextOption<'a> {
    /// `None` unless the data are exactly one request.
    #[must_use]
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        let mut fields = Fields(data);
        let export = fields.string()?;
        let count = fields.u32()?;
        let queries = (0..count).map(|_| fields.string()).collect::<Option<_>>()?;
        fields.is_empty().then_some(Self { export, queries })
    }

    /// The data of the option.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::new();
        string(self.export, &mut data);
        data.extend((self.queries.len() as u32).to_be_bytes());
        self.queries.iter().for_each(|query| string(query, &mut data));
        data
    }
}

/// Appends a reply of type `kind`, `REP_*`, to `option`, with the data of all `parts`.
pub fn option_reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let length = parts.iter().map(|part| part.len()).sum::<usize>() as u32;
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend([option, kind, length].map(u32::to_be_bytes).as_flattened());
    parts.iter().for_each(|part| out.extend_from_slice(part));
}

/// The head of a reply to an option (NBD proto.md, "Option reply types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that is answered, `OPT_*`.
    pub option: u32,
    /// `REP_*`.
    pub kind: u32,
    /// Bytes of data behind the head.
    pub length: u32,
}

impl OptionReplyHeader {
    /// Bytes of the head.
    pub const BYTES: usize = 20;

    /// Reads the head; `None` if the magic is wrong.
    #[must_use]
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let magic = fields.u64()?;
        let (option, kind, length) = (fields.u32()?, fields.u32()?, fields.u32()?);
        (magic == OPTION_REPLY_MAGIC).then_some(Self { option, kind, length })
    }

    /// Whether the server refuses the option.
    #[must_use]
    pub const fn is_error(&self) -> bool {
        self.kind & REP_ERR_BIT != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::{INFO_BLOCK_SIZE, OPT_GO, REP_ERR_UNKNOWN};

    #[test]
    fn an_option_is_its_magic_its_kind_and_its_data_behind_their_length() {
        let info = InfoOption { export: "a", kinds: vec![INFO_BLOCK_SIZE] };
        let bytes = option(OPT_GO, &info.encode());
        assert_eq!(bytes, b"IHAVEOPT\0\0\0\x07\0\0\0\x09\0\0\0\x01a\0\x01\0\x03");
        assert_eq!(OptionHeader::parse(&bytes), Some(OptionHeader { option: OPT_GO, length: 9 }));
        assert_eq!(InfoOption::parse(&bytes[OptionHeader::BYTES..]), Some(info));
        let contexts = MetaContextOption { export: "", queries: vec!["x:"] };
        assert_eq!(contexts.encode(), b"\0\0\0\0\0\0\0\x01\0\0\0\x02x:");
        assert_eq!(MetaContextOption::parse(&contexts.encode()), Some(contexts));
    }

    #[test]
    fn data_of_an_option_are_parsed_only_as_a_whole() {
        let info = InfoOption { export: "a", kinds: vec![1, 2] }.encode();
        let contexts = MetaContextOption { export: "a", queries: vec!["b:", "c:d"] }.encode();
        for cut in 0..info.len() {
            assert_eq!(InfoOption::parse(&info[..cut]), None, "{cut} bytes");
        }
        for cut in 0..contexts.len() {
            assert_eq!(MetaContextOption::parse(&contexts[..cut]), None, "{cut} bytes");
        }
        assert_eq!(InfoOption::parse(&[&info[..], &[0]].concat()), None);
        assert_eq!(MetaContextOption::parse(&[&contexts[..], &[0]].concat()), None);
    }

    #[test]
    fn a_reply_to_an_option_has_its_magic() {
        let mut bytes = Vec::new();
        option_reply(&mut bytes, OPT_GO, REP_ERR_UNKNOWN, &[b"n", b"o!"]);
        let (head, data) = bytes.split_first_chunk().unwrap();
        let magic = [0, 3, 0xe8, 0x89, 4, 0x55, 0x65, 0xa9, 0, 0, 0, 7, 0x80, 0, 0, 6, 0, 0, 0, 3];
        assert_eq!((head, data), (&magic, &b"no!"[..]));
        let wanted = OptionReplyHeader { option: OPT_GO, kind: REP_ERR_UNKNOWN, length: 3 };
        assert_eq!(OptionReplyHeader::parse(head), Some(wanted));
        assert!(wanted.is_error());
        assert_eq!(OptionReplyHeader::parse(&[1; OptionReplyHeader::BYTES]), None);
    }
}
