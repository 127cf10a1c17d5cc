//! The translation: what a request on the wire asks of the device, and what the device offers.
//!
//! Invariant: nothing is decided here that the device does not decide; every refusal is a number
//! of the protocol.
//! Knows: wire, device. Known by: mod, turn.

use nowait::{Completion, Flags, Io, Map, Op, Range, Span};

use super::handshake::{ExportInfo, Negotiated};
use super::reply::Body;
use super::wire::{self, ReplyHead, RequestHeader};
use crate::device::{Device, verdict};

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
        flags |= wire::FLAG_SEND_WRITE_ZEROES;
        if disk.punches_holes() {
            flags |= wire::FLAG_SEND_TRIM | wire::FLAG_SEND_FAST_ZERO;
        }
    }
    ExportInfo {
        name: device.name().to_owned(),
        description: device.description().to_owned(),
        size: disk.size(),
        transmission_flags: flags,
        min_block: MIN_BLOCK_BYTES,
        preferred_block: disk.alignment().offset.clamp(PREFERRED_BLOCK_BYTES, 1 << 20),
        max_payload: MAX_PAYLOAD_BYTES,
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

/// Translates `header`. `with_status` says that the client selected a context for block status.
#[inline]
pub(crate) fn translate<M: Map>(
    device: &Device<M>,
    header: &RequestHeader,
    with_status: bool,
) -> Asked {
    let (op, allowed) = match header.command {
        wire::CMD_READ => (Op::Read, wire::CMD_FLAG_DF),
        wire::CMD_WRITE => (Op::Write, 0),
        wire::CMD_FLUSH => (Op::Flush, 0),
        wire::CMD_TRIM => (Op::Discard, 0),
        wire::CMD_WRITE_ZEROES => (Op::Zero, wire::CMD_FLAG_NO_HOLE | wire::CMD_FLAG_FAST_ZERO),
        wire::CMD_BLOCK_STATUS if with_status => (Op::Status, wire::CMD_FLAG_REQ_ONE),
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
    let data = matches!(op, Op::Read | Op::Write);
    if data && header.length > MAX_PAYLOAD_BYTES || op == Op::Status && header.length == 0 {
        return Asked::Refused(libc::EINVAL);
    }
    let flags = flags(op, header.flags);
    match device.range(op, header.offset, u64::from(header.length)) {
        Ok(range) => Asked::Io(Io { op, flags, range }),
        Err(errno) => Asked::Refused(errno),
    }
}

/// Data are not cached ahead with direct I/O, and the protocol allows to do nothing.
fn cache<M: Map>(device: &Device<M>, header: &RequestHeader) -> Asked {
    if header.flags & !ANY_FLAGS != 0 {
        return Asked::Refused(libc::EINVAL);
    }
    match device.range(Op::Read, header.offset, u64::from(header.length)) {
        Ok(_) => Asked::Nothing,
        Err(errno) => Asked::Refused(errno),
    }
}

#[inline]
fn flags(op: Op, wire_flags: u16) -> Flags {
    let mut flags = Flags::NONE;
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

/// What a connection agreed on for its replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dialect {
    pub(crate) structured: bool,
    pub(crate) base_allocation: Option<u32>,
}

impl From<Negotiated> for Dialect {
    fn from(agreed: Negotiated) -> Self {
        Self { structured: agreed.structured, base_allocation: agreed.base_allocation }
    }
}

/// Whether a read is answered by a hole instead of zeros: the client understands chunks, did not
/// ask for data in one piece (DF), and all of the range is known to be a hole.
#[inline]
pub(crate) fn answers_with_hole<M: Map>(
    device: &Device<M>,
    dialect: Dialect,
    header: &RequestHeader,
    io: Io,
) -> bool {
    dialect.structured
        && io.op == Op::Read
        && io.range.len > 0
        && header.flags & wire::CMD_FLAG_DF == 0
        && device.disk().is_hole(io.range)
}

/// The reply to a request that came to an errno (0: success), without data.
#[inline]
pub(crate) fn plain_reply(dialect: Dialect, command: u16, cookie: u64, errno: i32) -> ReplyHead {
    let must = matches!(command, wire::CMD_READ | wire::CMD_BLOCK_STATUS);
    let error = if errno == 0 { 0 } else { wire::error_number(errno) };
    match (dialect.structured && must, error) {
        (true, 0) => ReplyHead::none(cookie),
        (true, error) => ReplyHead::error(cookie, error),
        (false, error) => ReplyHead::simple(error, cookie),
    }
}

/// The reply to `header`, which the engine has completed; `start` is where its bytes begin in the
/// buffer, `spans` answer a status request.
#[inline]
pub(crate) fn reply(
    dialect: Dialect,
    header: &RequestHeader,
    completion: Completion,
    start: usize,
    spans: &[Span],
) -> (ReplyHead, Body) {
    let RequestHeader { command, cookie, offset, length, .. } = *header;
    if let Err(errno) = verdict(&completion) {
        return (plain_reply(dialect, command, cookie, errno), Body::None);
    }
    match (completion.io.op, completion.buf) {
        (Op::Read, Some(buf)) if length > 0 => {
            let head = match dialect.structured {
                true => ReplyHead::offset_data(true, cookie, offset, length),
                false => ReplyHead::simple(0, cookie),
            };
            (head, Body::Data { buf, start: start as u32, len: length })
        }
        (Op::Status, _) => {
            let one = header.flags & wire::CMD_FLAG_REQ_ONE != 0;
            let bytes = extents(spans, one);
            let context = dialect.base_allocation.unwrap_or_default();
            (ReplyHead::block_status(cookie, bytes.len() as u32, context), Body::Bytes(bytes))
        }
        _ => (plain_reply(dialect, command, cookie, 0), Body::None),
    }
}

/// The payload of a block status chunk. Neighbours of a kind are joined; no extent is longer than
/// what was asked for (32 bits), because the spans are not.
fn extents(spans: &[Span], one: bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(spans.len() * 8);
    let mut spans = spans.iter().copied().peekable();
    while let Some(mut span) = spans.next() {
        while let Some(next) = spans.next_if(|next| next.hole == span.hole) {
            span.len += next.len;
        }
        let state = if span.hole { wire::STATE_HOLE | wire::STATE_ZERO } else { 0 };
        wire::push_extent(&mut bytes, span.len as u32, state);
        if one {
            break;
        }
    }
    bytes
}
