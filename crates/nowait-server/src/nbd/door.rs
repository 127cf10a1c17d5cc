//! The translation: what a request on the wire asks of the device, and what the device offers.
//!
//! Invariant: nothing is decided here that the device does not decide, but for the bounds of the
//! protocol.
//! Knows: wire, context, handshake, device. Known by: mod, conn, parse.

use nowait::{Flags, Io, Map, Op, Range};

use super::context::{Context, Contexts};
use super::handshake::{ExportInfo, Negotiated};
use super::wire::{self, MAX_STRING_BYTES, Mode, RequestHeader};
use crate::device::Device;

/// The longest payload of a request, in bytes; what the handshake advertises (NBD proto.md, "Block
/// size constraints").
pub(crate) const MAX_PAYLOAD_BYTES: u32 = 32 << 20;
/// Offsets and lengths may be any number of bytes.
const MIN_BLOCK_BYTES: u32 = 1;
/// What clients do best to use at least.
const PREFERRED_BLOCK_BYTES: u32 = 4096;
/// Every command may carry FUA.
const ANY_FLAGS: u16 = wire::CMD_FLAG_FUA;

/// What clients are told about `device`: asked of it now, not assumed and not remembered.
pub(crate) fn export_info<M: Map>(device: &Device<M>) -> ExportInfo {
    let disk = device.disk();
    // A flush on one connection covers what was completed on all of them (C49).
    let mut flags = wire::FLAG_HAS_FLAGS
        | wire::FLAG_SEND_FLUSH
        | wire::FLAG_SEND_FUA
        | wire::FLAG_SEND_DF
        | wire::FLAG_SEND_CACHE
        | wire::FLAG_CAN_MULTI_CONN;
    if disk.is_read_only() {
        flags |= wire::FLAG_READ_ONLY;
    } else {
        // Where zeroing is never fast, saying so at once is what the flag promises.
        flags |= wire::FLAG_SEND_WRITE_ZEROES | wire::FLAG_SEND_FAST_ZERO;
        if disk.punches_holes() {
            flags |= wire::FLAG_SEND_TRIM;
        }
    }
    let mut contexts = Contexts::NONE.with(Context::BaseAllocation);
    if disk.has_depths() {
        contexts = contexts.with(Context::AllocationDepth);
    }
    ExportInfo {
        name: device.name().to_owned(),
        description: as_string(device.description()),
        size: disk.size(),
        transmission_flags: flags,
        contexts,
        min_block: MIN_BLOCK_BYTES,
        preferred_block: disk.alignment().offset.clamp(PREFERRED_BLOCK_BYTES, 1 << 20),
        max_payload: MAX_PAYLOAD_BYTES,
    }
}

/// `words` as far as the protocol allows a string to go (NBD proto.md, "Conventions").
fn as_string(words: &str) -> String {
    let words = words.split('\0').next().unwrap_or_default();
    let fits = |&(start, c): &(usize, char)| start + c.len_utf8() <= MAX_STRING_BYTES;
    words.char_indices().take_while(fits).map(|(_, c)| c).collect()
}

/// What a connection agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dialect {
    pub(crate) mode: Mode,
    /// What block status requests are about.
    pub(crate) contexts: Contexts,
}

impl From<Negotiated> for Dialect {
    fn from(agreed: Negotiated) -> Self {
        Self { mode: agreed.mode, contexts: agreed.contexts }
    }
}

/// What a request on the wire comes to.
pub(crate) enum Asked {
    /// A request for the engine.
    Io(Io),
    /// It is answered with this errno.
    Refused(i32),
    /// It is answered with success; there is nothing to do.
    Nothing,
    /// The client says goodbye.
    Goodbye,
}

/// Translates `header`, in the form that a compact one has.
#[inline(always)]
pub(crate) fn translate<M: Map>(
    device: &Device<M>,
    dialect: Dialect,
    header: &RequestHeader,
) -> Asked {
    let (op, allowed) = match header.command {
        wire::CMD_READ => (Op::Read, wire::CMD_FLAG_DF),
        wire::CMD_WRITE => (Op::Write, 0),
        wire::CMD_FLUSH => (Op::Flush, 0),
        wire::CMD_TRIM => (Op::Discard, 0),
        wire::CMD_WRITE_ZEROES => (Op::Zero, wire::CMD_FLAG_NO_HOLE | wire::CMD_FLAG_FAST_ZERO),
        wire::CMD_BLOCK_STATUS if !dialect.contexts.is_empty() => {
            (Op::Status, wire::CMD_FLAG_REQ_ONE)
        }
        wire::CMD_CACHE => return cache(device, header),
        wire::CMD_DISC => return Asked::Goodbye,
        _ => return Asked::Refused(libc::EINVAL),
    };
    if header.flags & !(allowed | ANY_FLAGS) != 0 {
        return Asked::Refused(libc::EINVAL);
    }
    if op == Op::Flush {
        return Asked::Io(Io { op, flags: Flags::NONE, range: Range::new(0, 0) });
    }
    if op == Op::Status && header.length == 0 {
        return Asked::Refused(libc::EINVAL);
    }
    let range = match device.range(op, header.offset, header.length) {
        Ok(range) => range,
        Err(errno) => return Asked::Refused(errno),
    };
    if matches!(op, Op::Read | Op::Write) && header.length > u64::from(MAX_PAYLOAD_BYTES) {
        return Asked::Refused(too_long(op, dialect.mode));
    }
    Asked::Io(Io { op, flags: flags(op, header.flags), range })
}

/// What refuses data beyond [`MAX_PAYLOAD_BYTES`]: `EOVERFLOW` tells those clients to ask for less
/// whose replies have chunks, so that they could expect more (NBD proto.md, "NBD_CMD_READ").
fn too_long(op: Op, mode: Mode) -> i32 {
    if op == Op::Read && mode.has_chunks() { libc::EOVERFLOW } else { libc::EINVAL }
}

/// Data are not cached ahead with direct I/O, and the protocol allows to do nothing.
fn cache<M: Map>(device: &Device<M>, header: &RequestHeader) -> Asked {
    if header.flags & !ANY_FLAGS != 0 {
        return Asked::Refused(libc::EINVAL);
    }
    match device.range(Op::Read, header.offset, header.length) {
        Ok(_) => Asked::Nothing,
        Err(errno) => Asked::Refused(errno),
    }
}

#[inline]
fn flags(op: Op, wire_flags: u16) -> Flags {
    let mut flags = Flags::NONE;
    if matches!(op, Op::Read | Op::Write) {
        flags = flags.with(Flags::WHOLE);
    }
    if op.changes() && wire_flags & wire::CMD_FLAG_FUA != 0 {
        flags = flags.with(Flags::DSYNC);
    }
    if op == Op::Zero && wire_flags & wire::CMD_FLAG_NO_HOLE != 0 {
        flags = flags.with(Flags::NO_UNMAP);
    }
    if op == Op::Zero && wire_flags & wire::CMD_FLAG_FAST_ZERO != 0 {
        flags = flags.with(Flags::FAST_ZERO);
    }
    flags
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nowait::{Disk, Extents, OpenOptions};

    use super::*;

    fn device(description: &str) -> Device<Extents> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let disk = Arc::new(Disk::open(file.path(), OpenOptions::default()).unwrap());
        Device::new(disk, 1, String::new(), description.into())
    }

    fn asked(device: &Device<Extents>, command: u16, flags: u16) -> Io {
        let header = RequestHeader { flags, command, cookie: 1, offset: 4096, length: 512 };
        match translate(device, Dialect::default(), &header) {
            Asked::Io(io) => io,
            _ => panic!("command {command} is no request for the engine"),
        }
    }

    /// NBD proto.md, "Ordering of messages and writes": a flush MUST cover what was answered before
    /// it, and a request with FUA MUST NOT be answered before its data are on stable storage. What
    /// these two are to the engine is C28 and C49; a request is answered when the engine is done.
    #[test]
    fn nbd_must_fua_and_flush_reach_the_engine_as_such() {
        let device = device("");
        for command in [wire::CMD_WRITE, wire::CMD_WRITE_ZEROES, wire::CMD_TRIM] {
            assert!(asked(&device, command, wire::CMD_FLAG_FUA).flags.has(Flags::DSYNC));
            assert!(!asked(&device, command, 0).flags.has(Flags::DSYNC));
        }
        for flags in [0, wire::CMD_FLAG_FUA] {
            assert_eq!(asked(&device, wire::CMD_FLUSH, flags).op, Op::Flush);
        }
    }

    /// NBD proto.md, "Conventions": a string MUST NOT contain NUL and MUST be at most 4096 bytes.
    #[test]
    fn nbd_must_what_clients_are_told_in_words_is_a_string_of_the_protocol() {
        let told = |words: &str| export_info(&device(words)).description;
        assert_eq!(told("a disk"), "a disk");
        assert_eq!(told("a\0b"), "a");
        assert_eq!(told(&"x".repeat(5000)), "x".repeat(4096));
        assert_eq!(told(&"\u{fffd}".repeat(5000)), "\u{fffd}".repeat(1365));
    }
}
