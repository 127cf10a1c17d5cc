//! The information about an export that answers `OPT_INFO` and `OPT_GO` (NBD proto.md, `NBD_REP_INFO`).
//!
//! Invariant: encoded information is parsed as the same information; parsing takes all of the data.

use crate::constants::{INFO_BLOCK_SIZE, INFO_EXPORT};
use crate::fields::Fields;

/// A piece of information about an export. Nothing but its length has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Info<'a> {
    /// `INFO_EXPORT`.
    Export {
        /// Bytes of the export.
        size: u64,
        /// Transmission flags, `FLAG_*`.
        flags: u16,
    },
    /// `INFO_BLOCK_SIZE`, in bytes.
    BlockSize {
        /// The unit of offsets and lengths.
        min: u32,
        /// The unit that is served efficiently.
        preferred: u32,
        /// The longest payload of a request; all bits are set where there is no limit.
        max: u32,
    },
    /// Another kind.
    Other {
        /// `INFO_*`.
        kind: u16,
        /// The bytes that follow the kind.
        data: &'a [u8],
    },
}

impl<'a> Info<'a> {
    /// Reads the data of a `REP_INFO`; `None` if they have not the length of their kind.
    #[must_use]
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        let mut fields = Fields(data);
        let info = match fields.u16()? {
            INFO_EXPORT => Self::Export { size: fields.u64()?, flags: fields.u16()? },
            INFO_BLOCK_SIZE => {
                let (min, preferred) = (fields.u32()?, fields.u32()?);
                Self::BlockSize { min, preferred, max: fields.u32()? }
            }
            kind => return Some(Self::Other { kind, data: fields.0 }),
        };
        fields.is_empty().then_some(info)
    }

    /// The data of a `REP_INFO`.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match *self {
            Self::Export { size, flags } => {
                [&INFO_EXPORT.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
            }
            Self::BlockSize { min, preferred, max } => {
                let sizes = [min, preferred, max].map(u32::to_be_bytes);
                [&INFO_BLOCK_SIZE.to_be_bytes()[..], sizes.as_flattened()].concat()
            }
            Self::Other { kind, data } => [&kind.to_be_bytes()[..], data].concat(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::INFO_NAME;

    #[test]
    fn each_kind_of_information_is_parsed_as_it_was_encoded_and_only_whole() {
        let rows: [(Info<'_>, &[u8]); 3] = [
            (Info::Export { size: 513, flags: 3 }, &[0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 3]),
            (
                Info::BlockSize { min: 1, preferred: 4096, max: u32::MAX },
                &[0, 3, 0, 0, 0, 1, 0, 0, 0x10, 0, 0xff, 0xff, 0xff, 0xff],
            ),
            (Info::Other { kind: INFO_NAME, data: b"a" }, &[0, 1, b'a']),
        ];
        for (info, bytes) in rows {
            assert_eq!((info.encode().as_slice(), Info::parse(bytes)), (bytes, Some(info)));
        }
        for (_, bytes) in &rows[..2] {
            assert_eq!(Info::parse(&bytes[..bytes.len() - 1]), None);
            assert_eq!(Info::parse(&[bytes, &[0][..]].concat()), None);
        }
    }
}
