//! The greeting of a server (NBD proto.md, "Newstyle negotiation").
//!
//! Invariant: an encoded greeting is parsed as the same flags.

use crate::constants::{INIT_MAGIC, OPTION_MAGIC};
use crate::fields::Fields;

/// Bytes of the greeting.
pub const GREETING_BYTES: usize = 18;

/// The greeting of a newstyle server with these handshake flags, `FLAG_*`.
#[must_use]
pub fn greeting(flags: u16) -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..8].copy_from_slice(&INIT_MAGIC.to_be_bytes());
    bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    bytes[16..].copy_from_slice(&flags.to_be_bytes());
    bytes
}

/// The handshake flags of a greeting; `None` if it is not that of a newstyle server.
#[must_use]
pub fn parse_greeting(bytes: &[u8; GREETING_BYTES]) -> Option<u16> {
    let mut fields = Fields(bytes);
    let magics = (fields.u64()?, fields.u64()?);
    (magics == (INIT_MAGIC, OPTION_MAGIC)).then_some(fields.u16()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_is_two_magics_and_flags_and_no_other_bytes_are_one() {
        let bytes = greeting(3);
        assert_eq!(&bytes, b"NBDMAGICIHAVEOPT\0\x03");
        assert_eq!(parse_greeting(&bytes), Some(3));
        for bit in 0..128 {
            let mut wrong = bytes;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(parse_greeting(&wrong), None, "bit {bit}");
        }
    }
}
