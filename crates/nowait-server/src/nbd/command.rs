//! Translates wire requests into engine requests, and an export into its advertised properties.
//!
//! Invariant: all decisions are the export's, except for the limits of the protocol.

use nowait::{ByteRange, Flags, Op, Request};

use crate::dirty_bitmaps::BitmapName;
use crate::export::{Export, ExportId};
use crate::nbd::handshake::{ExportInfo, Negotiated};
use crate::nbd::meta_context::Contexts;
use crate::nbd::wire;
use crate::nbd::wire::{MAX_STRING_BYTES, ReplyMode, RequestHeader};

/// The longest payload of a request, in bytes; advertised in the handshake (NBD proto.md, "Block
/// size constraints").
/// Beyond it: the request fails with `EINVAL`, a read in chunks with `EOVERFLOW`.
pub(crate) const MAX_PAYLOAD_BYTES: u32 = 32 << 20;
/// The smallest preferred block size.
const PREFERRED_BLOCK_BYTES: u32 = 4096;
/// Every command may carry FUA.
const ANY_FLAGS: u16 = wire::CMD_FLAG_FUA;

/// The properties of `export` as told to clients: read from it now, neither assumed nor remembered.
pub(crate) fn export_info(id: ExportId, export: &Export, bitmaps: Vec<BitmapName>) -> ExportInfo {
    let disk = export.disk();
    // A flush on one connection covers what was completed on all of them (C49).
    let mut flags = wire::FLAG_HAS_FLAGS
        | wire::FLAG_SEND_FLUSH
        | wire::FLAG_SEND_FUA
        | wire::FLAG_SEND_DF
        | wire::FLAG_SEND_CACHE
        | wire::FLAG_CAN_MULTI_CONN;
    if export.is_read_only() {
        flags |= wire::FLAG_READ_ONLY;
    } else {
        if export.takes_writes() {
            // Where zeroing is never fast, an immediate error is what FAST_ZERO promises.
            flags |= wire::FLAG_SEND_WRITE_ZEROES | wire::FLAG_SEND_FAST_ZERO;
        }
        if disk.supports_punch_hole() {
            flags |= wire::FLAG_SEND_TRIM;
        }
    }
    ExportInfo {
        id,
        name: export.name().to_owned(),
        description: as_string(export.description()),
        // If the refresh fails, the device may be gone: then its requests fail.
        size: export.whole_blocks(disk.refresh().unwrap_or(disk.size())),
        transmission_flags: flags,
        // On a disk without a backing image everything is at depth 1.
        contexts: Contexts::FIXED,
        bitmaps,
        min_block: export.smallest_block() as u32,
        preferred_block: disk.alignment().offset.clamp(PREFERRED_BLOCK_BYTES, 1 << 20),
        max_payload: MAX_PAYLOAD_BYTES,
    }
}

/// `words` up to the first NUL and the longest string of the protocol (NBD proto.md,
/// "Conventions").
fn as_string(words: &str) -> String {
    let words = words.split('\0').next().unwrap_or_default();
    let fits = |&(start, c): &(usize, char)| start + c.len_utf8() <= MAX_STRING_BYTES;
    words.char_indices().take_while(fits).map(|(_, c)| c).collect()
}

/// The negotiated properties of the transmission phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TransmissionMode {
    pub(crate) mode: ReplyMode,
    /// The contexts of block status requests.
    pub(crate) contexts: Contexts,
}

impl From<Negotiated> for TransmissionMode {
    fn from(negotiated: Negotiated) -> Self {
        Self { mode: negotiated.mode, contexts: negotiated.contexts }
    }
}

/// The translation of a wire request.
pub(crate) enum Command {
    /// A request for the engine.
    Io(Request),
    /// Answered with this errno.
    Error(i32),
    /// Answered with success; there is nothing to do.
    NoOp,
    /// The client disconnects.
    Disconnect,
}

/// Translates `header`, in its compact form.
#[inline(always)]
pub(crate) fn translate(
    export: &Export,
    transmission: TransmissionMode,
    header: &RequestHeader,
) -> Command {
    let (op, allowed) = match header.command {
        wire::CMD_READ => (Op::Read, wire::CMD_FLAG_DF),
        wire::CMD_WRITE => (Op::Write, 0),
        wire::CMD_FLUSH => (Op::Flush, 0),
        wire::CMD_TRIM => (Op::Discard, 0),
        wire::CMD_WRITE_ZEROES => (Op::Zero, wire::CMD_FLAG_NO_HOLE | wire::CMD_FLAG_FAST_ZERO),
        wire::CMD_BLOCK_STATUS if !transmission.contexts.is_empty() => {
            (Op::Status, wire::CMD_FLAG_REQ_ONE)
        }
        wire::CMD_CACHE => return cache(export, header),
        wire::CMD_DISC => return Command::Disconnect,
        _ => return Command::Error(libc::EINVAL),
    };
    if header.flags & !(allowed | ANY_FLAGS) != 0 {
        return Command::Error(libc::EINVAL);
    }
    if op == Op::Flush {
        return Command::Io(Request { op, flags: Flags::NONE, range: ByteRange::new(0, 0) });
    }
    if op == Op::Status && header.length == 0 {
        return Command::Error(libc::EINVAL);
    }
    let range = match export.range(op, header.offset, header.length) {
        Ok(range) => range,
        Err(errno) => return Command::Error(errno),
    };
    if !export.is_whole_blocks(range) {
        return Command::Error(libc::EINVAL);
    }
    if matches!(op, Op::Read | Op::Write) && header.length > u64::from(MAX_PAYLOAD_BYTES) {
        return Command::Error(too_long(op, transmission.mode));
    }
    Command::Io(Request { op, flags: flags(op, header.flags), range })
}

/// The operation under which a refused request counts; `None` for what is none.
pub(crate) fn counted_as(header: &RequestHeader) -> Option<Op> {
    match header.command {
        wire::CMD_READ | wire::CMD_CACHE => Some(Op::Read),
        wire::CMD_WRITE => Some(Op::Write),
        wire::CMD_FLUSH => Some(Op::Flush),
        wire::CMD_TRIM => Some(Op::Discard),
        wire::CMD_WRITE_ZEROES => Some(Op::Zero),
        wire::CMD_BLOCK_STATUS => Some(Op::Status),
        _ => None,
    }
}

/// The errno for data beyond [`MAX_PAYLOAD_BYTES`]: `EOVERFLOW` tells clients with chunked replies,
/// which could expect a longer read, to read less (NBD proto.md, "NBD_CMD_READ").
fn too_long(op: Op, mode: ReplyMode) -> i32 {
    if op == Op::Read && mode.has_chunks() { libc::EOVERFLOW } else { libc::EINVAL }
}

/// Checks NBD_CMD_CACHE. Direct I/O has no cache to fill, and the protocol allows to do nothing.
fn cache(export: &Export, header: &RequestHeader) -> Command {
    if header.flags & !ANY_FLAGS != 0 {
        return Command::Error(libc::EINVAL);
    }
    match export.range(Op::Read, header.offset, header.length) {
        Ok(range) if !export.is_whole_blocks(range) => Command::Error(libc::EINVAL),
        Ok(_) => Command::NoOp,
        Err(errno) => Command::Error(errno),
    }
}

#[inline]
fn flags(op: Op, wire_flags: u16) -> Flags {
    let mut flags = Flags::NONE;
    if matches!(op, Op::Read | Op::Write) {
        flags |= Flags::ALL_OR_ERROR;
    }
    if op.changes() && wire_flags & wire::CMD_FLAG_FUA != 0 {
        flags |= Flags::DSYNC;
    }
    if op == Op::Zero && wire_flags & wire::CMD_FLAG_NO_HOLE != 0 {
        flags |= Flags::NO_UNMAP;
    }
    if op == Op::Zero && wire_flags & wire::CMD_FLAG_FAST_ZERO != 0 {
        flags |= Flags::FAST_ZERO;
    }
    flags
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nowait::{BlockDevice, OpenOptions};

    use super::*;
    use crate::block_size::BlockSize;
    use crate::nbd::meta_context::Context;

    fn export(description: &str) -> Export {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let disk = Arc::new(BlockDevice::open(file.path(), OpenOptions::default()).unwrap());
        Export::new(disk, String::new(), description.into())
    }

    fn io_of(export: &Export, command: u16, flags: u16) -> Request {
        let header = RequestHeader { flags, command, cookie: 1, offset: 4096, length: 512 };
        match translate(export, TransmissionMode::default(), &header) {
            Command::Io(io) => io,
            _ => panic!("command {command} is not a request for the engine"),
        }
    }

    /// NBD proto.md, "Ordering of messages and writes": a flush MUST cover what was answered before
    /// it, and a request with FUA MUST NOT be answered before its data are on stable storage. The
    /// engine's part is C28 and C49; a request is answered when the engine has completed it.
    #[test]
    fn nbd_must_fua_and_flush_reach_the_engine_as_such() {
        let export = export("");
        for command in [wire::CMD_WRITE, wire::CMD_WRITE_ZEROES, wire::CMD_TRIM] {
            assert!(io_of(&export, command, wire::CMD_FLAG_FUA).flags.contains(Flags::DSYNC));
            assert!(!io_of(&export, command, 0).flags.contains(Flags::DSYNC));
        }
        for flags in [0, wire::CMD_FLAG_FUA] {
            assert_eq!(io_of(&export, wire::CMD_FLUSH, flags).op, Op::Flush);
        }
    }

    #[test]
    fn requests_are_for_whole_blocks_if_there_is_a_smallest_one() {
        let commands = [
            wire::CMD_READ,
            wire::CMD_WRITE,
            wire::CMD_TRIM,
            wire::CMD_WRITE_ZEROES,
            wire::CMD_CACHE,
            wire::CMD_BLOCK_STATUS,
        ];
        let transmission = TransmissionMode {
            contexts: Contexts::NONE.with(Context::BaseAllocation),
            ..TransmissionMode::default()
        };
        for (block, info, aligned) in [
            (None, (1, 4096), [true, true, true, true]),
            (Some(BlockSize::Sector), (512, 4096), [true, true, false, false]),
            (Some(BlockSize::Page), (4096, 4096), [true, false, false, false]),
        ] {
            let export = export("").with_block_size(block);
            let told = export_info(ExportId(0), &export, Vec::new());
            assert_eq!(
                (told.min_block, told.preferred_block, told.size),
                (info.0, info.1, 1 << 20)
            );
            for command in commands {
                let ranges = [(4096, 8192), (512, 512), (4096, 511), (1, 4096)];
                let taken = ranges.map(|(offset, length)| {
                    let header = RequestHeader { flags: 0, command, cookie: 1, offset, length };
                    match translate(&export, transmission, &header) {
                        Command::Io(_) | Command::NoOp => true,
                        Command::Error(errno) => {
                            assert_eq!(errno, libc::EINVAL);
                            false
                        }
                        Command::Disconnect => panic!("{command}"),
                    }
                });
                assert_eq!(taken, aligned, "{block:?} {command}");
            }
        }
    }

    #[test]
    fn both_contexts_are_offered_of_a_raw_image_too() {
        let contexts = export_info(ExportId(0), &export(""), Vec::new()).contexts;
        assert!(contexts.has(Context::BaseAllocation) && contexts.has(Context::AllocationDepth));
    }

    /// NBD proto.md, "Conventions": a string MUST NOT contain NUL and MUST be at most 4096 bytes.
    #[test]
    fn nbd_must_the_description_of_an_export_is_a_string_of_the_protocol() {
        let info = |words: &str| export_info(ExportId(0), &export(words), Vec::new());
        let description = |words: &str| info(words).description;
        assert_eq!(description("a disk"), "a disk");
        assert_eq!(description("a\0b"), "a");
        assert_eq!(description(&"x".repeat(5000)), "x".repeat(4096));
        assert_eq!(description(&"\u{fffd}".repeat(5000)), "\u{fffd}".repeat(1365));
    }
}
