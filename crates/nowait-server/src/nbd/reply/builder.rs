//! Builds the replies to completed requests: data, holes, extents, or an error.
//!
//! Invariant: all chunks of a reply are pushed together, and only the last one is marked as last.
//! Together they cover exactly the requested range.

use nowait::{ByteRange, Completion, ExtentStatus, Op, PooledBuffer, Request};

use crate::dirty_bitmaps::dirty_bitmap::DirtyExtent;
use crate::export::{Export, result};
use crate::injected_bug;
use crate::injected_bug::ServerBug;
use crate::nbd::meta_context::{Context, Contexts, dirty_flags};
use crate::nbd::reply::send_queue::{Chunk, Chunks, MAX_CHUNKS, ReplyBody, SendQueue};
use crate::nbd::reply::whole_blocks::whole_blocks;
use crate::nbd::wire;
use crate::nbd::wire::{ChunkPosition, EncodedHeader, ExtentList, ReplyEncoder};
use crate::nbd::wire::{ReplyMode, RequestHeader};

/// From this length on, a reply to a read skips the known holes; a chunk header costs the client
/// about as much as the copy of some KiB.
const SPLIT_FROM_BYTES: u64 = 64 << 10;
/// The most extents of one block status chunk, and of those of all dirty bitmaps together.
/// Beyond it: the reply ends there, and the client asks for the rest.
pub(crate) const MAX_EXTENTS: usize = 4096;

/// The part of a request that is kept until it is answered.
#[derive(Clone, Copy)]
pub(crate) struct RequestContext {
    pub(crate) header: RequestHeader,
    /// The contexts of a block status request.
    pub(crate) contexts: Contexts,
    /// Bytes of its connection's budget that it holds.
    pub(crate) budget_used: u32,
}

/// A request that the engine has completed.
pub(crate) struct CompletedRequest<'a> {
    pub(crate) completion: Completion,
    /// The extents of a status request.
    pub(crate) extents: &'a [ExtentStatus],
    /// Extents of each dirty bitmap that it asks for; `None` if there is no such bitmap any more.
    pub(crate) dirty: &'a [Option<Vec<DirtyExtent>>],
}

/// Bytes that a request holds until its reply has been sent: its payload, or the most extents that
/// it may get.
#[inline]
pub(crate) fn budget_needed(mode: ReplyMode, io: Request, contexts: Contexts) -> u32 {
    match io.op {
        Op::Read | Op::Write => io.range.len as u32,
        Op::Status => {
            // Extents of all bitmaps together are as many as those of another context.
            let lists = contexts.len() - contexts.bitmaps() + usize::from(contexts.bitmaps() > 0);
            (lists * ExtentList::extent_bytes(mode) * MAX_EXTENTS) as u32
        }
        Op::Flush | Op::Discard | Op::Zero => 0,
    }
}

/// Whether a read is answered by a hole instead of zeros: the client accepts chunks, has not asked
/// for data in one piece (DF), and all of the range is known to be a hole.
#[inline(always)]
pub(crate) fn is_hole_reply(
    export: &Export,
    mode: ReplyMode,
    request: &RequestContext,
    io: Request,
) -> bool {
    may_send_holes(mode, &request.header)
        && io.op == Op::Read
        && io.range.len > 0
        && export.disk().is_hole(io.range)
}

#[inline(always)]
fn may_send_holes(mode: ReplyMode, header: &RequestHeader) -> bool {
    mode.has_chunks() && header.flags & wire::CMD_FLAG_DF == 0
}

/// The reply without data to a request that has completed with `errno` (0: success).
#[inline]
pub(crate) fn status_reply(mode: ReplyMode, header: &RequestHeader, errno: i32) -> EncodedHeader {
    let error = if errno == 0 { 0 } else { error_number(header, errno) };
    let chunk = match mode {
        ReplyMode::Simple => false,
        ReplyMode::Structured => matches!(header.command, wire::CMD_READ | wire::CMD_BLOCK_STATUS),
        ReplyMode::Extended => true,
    };
    let answer = ReplyEncoder::to(mode, header);
    match (chunk, error) {
        (true, 0) => answer.none(),
        (true, error) => answer.error(error),
        (false, error) => answer.simple(error),
    }
}

/// The error value of `header`'s request for `errno`. `ENOTSUP` is only for zeroing with FAST_ZERO
/// (NBD proto.md, `NBD_CMD_WRITE_ZEROES`): clients do not expect it elsewhere.
fn error_number(header: &RequestHeader, errno: i32) -> u32 {
    let may_be_unsupported =
        header.command == wire::CMD_WRITE_ZEROES && header.flags & wire::CMD_FLAG_FAST_ZERO != 0;
    match wire::error_number(errno) {
        wire::ENOTSUP if !may_be_unsupported => wire::EINVAL,
        error => error,
    }
}

/// Pushes the reply to `request`, which the engine has completed.
#[inline]
pub(crate) fn build_reply(
    out: &mut SendQueue,
    export: &Export,
    mode: ReplyMode,
    request: &RequestContext,
    completed: CompletedRequest<'_>,
) {
    let CompletedRequest { completion, extents, dirty } = completed;
    let header = &request.header;
    if let Err(errno) = result(&completion) {
        return out.push(status_reply(mode, header, errno), ReplyBody::None, request.budget_used);
    }
    let Request { op, range, .. } = completion.io;
    match (op, completion.buf) {
        (Op::Read, Some(mut buf)) if range.len > 0 => {
            injected_bug::corrupt(&mut buf);
            if range.len >= SPLIT_FROM_BYTES
                && may_send_holes(mode, header)
                && let Some(list) = split_at_holes(ReplyEncoder::to(mode, header), export, range)
            {
                return push_chunks(out, buf, list, request.budget_used);
            }
            let head = match mode {
                ReplyMode::Simple => ReplyEncoder::to(mode, header).simple(0),
                _ => ReplyEncoder::to(mode, header).data(
                    ChunkPosition::Last,
                    range.pos,
                    range.len as u32,
                ),
            };
            let body = ReplyBody::Data { buf, len: range.len as u32 };
            out.push(head, body, request.budget_used);
        }
        (Op::Status, _) => match export.smallest_block() {
            0..=1 => status(out, mode, request, (extents, dirty)),
            block => status(out, mode, request, (&whole_blocks(extents, block), dirty)),
        },
        (Op::Flush, _) if injected_bug::injected(ServerBug::ReplyTwice) => {
            out.push(status_reply(mode, header, 0), ReplyBody::None, 0);
            out.push(status_reply(mode, header, 0), ReplyBody::None, request.budget_used);
        }
        _ => out.push(status_reply(mode, header, 0), ReplyBody::None, request.budget_used),
    }
}

/// The chunks of a read of which a part is known to be a hole by now; `None` if it has no hole. If
/// there are too many, the last chunk has all of the rest as data.
///
/// It is correct to check after the read has completed: a range that is a hole now reads as zeros,
/// and this read has not been answered.
fn split_at_holes(answer: ReplyEncoder, export: &Export, range: ByteRange) -> Option<Vec<Chunk>> {
    let first = export.disk().cached_extent(range);
    if !first.hole && first.len == range.len {
        return None;
    }
    let mut runs = extent_runs(export, range, first);
    if export.smallest_block() > 1 {
        runs.iter_mut().for_each(|run| *run = ExtentStatus::top(run.len, run.hole));
        runs = whole_blocks(&runs, export.smallest_block());
    }
    if let [ExtentStatus { hole: false, .. }] = runs[..] {
        return None;
    }
    let mut done = 0;
    let chunks = runs.into_iter().map(|ExtentStatus { len, hole, .. }| {
        let pos = range.pos + done;
        let start = done;
        done += len;
        let place = if done == range.len { ChunkPosition::Last } else { ChunkPosition::NotLast };
        match hole {
            true => Chunk { head: answer.hole(place, pos, len as u32), start: 0, len: 0 },
            false => {
                let head = answer.data(place, pos, len as u32);
                Chunk { head, start: start as u32, len: len as u32 }
            }
        }
    });
    Some(chunks.collect())
}

/// Alternating holes and data of `range`, [`MAX_CHUNKS`] at most; `first` is its first extent.
fn extent_runs(export: &Export, range: ByteRange, first: ExtentStatus) -> Vec<ExtentStatus> {
    let mut runs = Vec::with_capacity(MAX_CHUNKS);
    let mut current = first;
    let mut seen = first.len;
    while seen < range.len && runs.len() + 1 < MAX_CHUNKS {
        let next = export.disk().cached_extent(ByteRange::new(range.pos + seen, range.len - seen));
        if next.hole == current.hole {
            current.len += next.len;
        } else {
            runs.push(std::mem::replace(&mut current, next));
        }
        seen += next.len;
    }
    if seen < range.len {
        current = ExtentStatus::top(current.len + range.len - seen, false);
    }
    runs.push(current);
    runs
}

fn push_chunks(out: &mut SendQueue, buf: PooledBuffer, list: Vec<Chunk>, held: u32) {
    out.push(EncodedHeader::EMPTY, ReplyBody::Chunks(Box::new(Chunks { buf, list })), held);
}

/// Pushes one chunk for each context, an error for a dirty bitmap that was removed; the request's budget is released
/// with the last.
fn status(
    out: &mut SendQueue,
    mode: ReplyMode,
    request: &RequestContext,
    (extents, dirty): (&[ExtentStatus], &[Option<Vec<DirtyExtent>>]),
) {
    let mut dirty = dirty.iter();
    let answer = ReplyEncoder::to(mode, &request.header);
    let one = request.header.flags & wire::CMD_FLAG_REQ_ONE != 0;
    let mut left = request.contexts.len();
    for context in request.contexts.iter() {
        left -= 1;
        let (place, held) = match left {
            0 => (ChunkPosition::Last, request.budget_used),
            _ => (ChunkPosition::NotLast, 0),
        };
        let list = match context {
            Context::DirtyBitmap(_) => {
                match dirty.next().and_then(Option::as_ref).filter(|extents| !extents.is_empty()) {
                    Some(extents) => dirty_list(mode, extents),
                    None => {
                        out.push(answer.error_at(place, wire::EINVAL), ReplyBody::None, held);
                        continue;
                    }
                }
            }
            _ => extent_list(mode, context, extents, if one { 1 } else { MAX_EXTENTS }),
        };
        let head = answer.status(place, context.id(), &list);
        out.push(head, ReplyBody::Bytes(list.into_bytes()), held);
    }
}

/// The extents of a dirty bitmap.
fn dirty_list(mode: ReplyMode, extents: &[DirtyExtent]) -> ExtentList {
    let mut list = ExtentList::with_capacity(mode, extents.len());
    extents.iter().for_each(|extent| list.push(extent.len, dirty_flags(extent.is_dirty)));
    list
}

/// At most `limit` extents. Neighbours with equal flags are merged; together they are no longer
/// than the requested range, because `extents` are not.
fn extent_list(
    mode: ReplyMode,
    context: Context,
    extents: &[ExtentStatus],
    limit: usize,
) -> ExtentList {
    let mut list = ExtentList::with_capacity(mode, extents.len().min(limit));
    let mut extents = extents.iter().copied().peekable();
    while list.len() < limit
        && let Some(mut extent) = extents.next()
    {
        let flags = context.flags(extent);
        while let Some(next) = extents.next_if(|next| context.flags(*next) == flags) {
            extent.len += next.len;
        }
        list.push(extent.len, flags);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NBD proto.md, `NBD_CMD_WRITE_ZEROES`: without the flag "the server MUST NOT fail with
    /// `NBD_ENOTSUP`"; "Error values": nor SHOULD any other command.
    #[test]
    fn nbd_must_not_supported_is_said_to_fast_zeroing_only() {
        for command in 0..10 {
            for flags in [0, wire::CMD_FLAG_NO_HOLE, wire::CMD_FLAG_FAST_ZERO, u16::MAX] {
                let header = RequestHeader { flags, command, cookie: 1, offset: 0, length: 512 };
                let fast = command == 6 && flags & 1 << 4 != 0;
                let wanted = if fast { wire::ENOTSUP } else { wire::EINVAL };
                assert_eq!(error_number(&header, libc::EOPNOTSUPP), wanted, "{command} {flags:#x}");
                assert_eq!(error_number(&header, libc::EIO), wire::EIO);
            }
        }
    }
}
