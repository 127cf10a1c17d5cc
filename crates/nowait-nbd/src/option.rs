//! Options as a client sends them, and the head of a server's reply to one.
//!
//! Invariant: an encoded option is one whole message; its lengths are those of the bytes that follow.

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

fn string(text: &str, bytes: &mut Vec<u8>) {
    bytes.extend((text.len() as u32).to_be_bytes());
    bytes.extend(text.as_bytes());
}

/// The data of `OPT_INFO` and `OPT_GO`: an export's name, and the kinds of information, `INFO_*`,
/// that are asked for.
#[must_use]
pub fn info_request(export: &str, kinds: &[u16]) -> Vec<u8> {
    let mut data = Vec::new();
    string(export, &mut data);
    data.extend((kinds.len() as u16).to_be_bytes());
    data.extend(kinds.iter().flat_map(|kind| kind.to_be_bytes()));
    data
}

/// The data of `OPT_LIST_META_CONTEXT` and `OPT_SET_META_CONTEXT`: an export's name and queries.
#[must_use]
pub fn context_query(export: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = Vec::new();
    string(export, &mut data);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| string(query, &mut data));
    data
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
        let bytes = option(OPT_GO, &info_request("a", &[INFO_BLOCK_SIZE]));
        assert_eq!(bytes, b"IHAVEOPT\0\0\0\x07\0\0\0\x09\0\0\0\x01a\0\x01\0\x03");
        assert_eq!(context_query("", &["x:"]), b"\0\0\0\0\0\0\0\x01\0\0\0\x02x:");
    }

    #[test]
    fn a_reply_to_an_option_has_its_magic() {
        let mut bytes = [0; OptionReplyHeader::BYTES];
        bytes[..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        bytes[11] = OPT_GO as u8;
        bytes[12..16].copy_from_slice(&REP_ERR_UNKNOWN.to_be_bytes());
        bytes[19] = 3;
        let wanted = OptionReplyHeader { option: OPT_GO, kind: REP_ERR_UNKNOWN, length: 3 };
        assert_eq!(OptionReplyHeader::parse(&bytes), Some(wanted));
        assert!(wanted.is_error());
        bytes[7] ^= 1;
        assert_eq!(OptionReplyHeader::parse(&bytes), None);
    }
}
