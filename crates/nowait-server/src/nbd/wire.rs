//! The header of a request, and errno as the protocol's error values.
//!
//! Invariant: nothing here decides anything. A header that parses has the right magic and no
//! other check behind it.
//! Knows: the numbers of the protocol. Known by: handshake and the transmission phase.

pub(crate) use nowait_nbd::*;

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

/// Which messages a connection uses after the handshake (NBD proto.md, "Transmission").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Compact requests; a reply is one message.
    #[default]
    Simple,
    /// Compact requests; a reply with a payload comes in chunks.
    Structured,
    /// Requests and chunks with 64-bit lengths; every reply comes in chunks.
    Extended,
}

impl Mode {
    /// Bytes of a request's header.
    #[inline]
    pub(crate) const fn request_bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => REQUEST_BYTES,
            Self::Extended => EXTENDED_REQUEST_BYTES,
        }
    }

    /// Whether reads are answered in chunks.
    #[inline]
    pub(crate) const fn has_chunks(self) -> bool {
        !matches!(self, Self::Simple)
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
    /// Bytes concerned, or bytes of payload behind the header; see [`RequestHeader::payload`].
    pub(crate) length: u64,
}

impl RequestHeader {
    /// Reads the header at the start of `bytes`, which are at least [`Mode::request_bytes`];
    /// `None` if the magic is wrong, after which the stream has no meaning.
    #[inline]
    pub(crate) fn parse(mode: Mode, bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (flags, rest) = rest.split_first_chunk()?;
        let (command, rest) = rest.split_first_chunk()?;
        let (cookie, rest) = rest.split_first_chunk()?;
        let (offset, rest) = rest.split_first_chunk()?;
        let (wanted, length) = match mode {
            Mode::Simple | Mode::Structured => {
                (REQUEST_MAGIC, u64::from(u32::from_be_bytes(*rest.first_chunk()?)))
            }
            Mode::Extended => (EXTENDED_REQUEST_MAGIC, u64::from_be_bytes(*rest.first_chunk()?)),
        };
        (u32::from_be_bytes(*magic) == wanted).then_some(Self {
            flags: u16::from_be_bytes(*flags),
            command: u16::from_be_bytes(*command),
            cookie: u64::from_be_bytes(*cookie),
            offset: u64::from_be_bytes(*offset),
            length,
        })
    }

    /// Bytes of payload that follow the header: those of a write; with extended headers those of
    /// any request that says so by `CMD_FLAG_PAYLOAD_LEN`. A write has to say so, but as a client
    /// QEMU (10.0) does not, and sends them; its server takes such a write too.
    #[inline]
    pub(crate) const fn payload(&self, mode: Mode) -> u64 {
        let says_so = matches!(mode, Mode::Extended) && self.flags & CMD_FLAG_PAYLOAD_LEN != 0;
        if says_so || self.command == CMD_WRITE { self.length } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOKIE: u64 = 0x0102_0304_0506_0708;

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
        for mode in [Mode::Simple, Mode::Structured] {
            assert_eq!(RequestHeader::parse(mode, &bytes), Some(wanted));
        }
    }

    #[test]
    fn nbd_must_extended_request_headers_have_32_bytes_and_a_length_of_64_bits() {
        let bytes = [
            0x21, 0xe4, 0x1c, 0x71, 0x00, 0x20, 0x00, 0x01, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9, 0,
            0, 0x10, 0x00, 0x80, 0, 0, 0, 0, 0, 0, 7,
        ];
        let wanted = RequestHeader {
            flags: CMD_FLAG_PAYLOAD_LEN,
            command: CMD_WRITE,
            cookie: COOKIE,
            offset: 0x9_0000_1000,
            length: (1 << 63) + 7,
        };
        assert_eq!(bytes.len(), Mode::Extended.request_bytes());
        assert_eq!(RequestHeader::parse(Mode::Extended, &bytes), Some(wanted));
    }

    #[test]
    fn a_request_header_with_any_wrong_bit_in_its_magic_is_refused() {
        let magics = [
            (Mode::Simple, REQUEST_MAGIC),
            (Mode::Structured, REQUEST_MAGIC),
            (Mode::Extended, EXTENDED_REQUEST_MAGIC),
        ];
        for (mode, magic) in magics {
            let mut bytes = vec![0; mode.request_bytes()];
            bytes[..4].copy_from_slice(&magic.to_be_bytes());
            assert!(RequestHeader::parse(mode, &bytes).is_some());
            for bit in 0..32 {
                let mut wrong = bytes.clone();
                wrong[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(RequestHeader::parse(mode, &wrong), None, "bit {bit} in {mode:?}");
            }
        }
    }

    #[test]
    fn a_payload_follows_a_write_and_an_extended_request_that_says_so() {
        let header =
            |command, flags| RequestHeader { flags, command, cookie: 0, offset: 0, length: 9 };
        let rows = [
            (Mode::Simple, CMD_WRITE, 0, 9),
            (Mode::Structured, CMD_WRITE, 0, 9),
            (Mode::Structured, CMD_READ, CMD_FLAG_PAYLOAD_LEN, 0),
            (Mode::Extended, CMD_WRITE, 0, 9),
            (Mode::Extended, CMD_WRITE, CMD_FLAG_PAYLOAD_LEN, 9),
            (Mode::Extended, CMD_READ, CMD_FLAG_PAYLOAD_LEN, 9),
            (Mode::Extended, CMD_READ, 0, 0),
        ];
        for (mode, command, flags, bytes) in rows {
            assert_eq!(header(command, flags).payload(mode), bytes, "{mode:?} {command} {flags}");
        }
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
