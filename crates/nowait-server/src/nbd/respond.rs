//! The replies to requests that have ended: data, holes, extents, or an error.
//!
//! Invariant: all chunks of a reply are pushed at once, the last one is marked as such and no other
//! is; together they cover exactly what was asked for.
//! Knows: breaks, wire, context, head, reply, device. Known by: conn, parse.

use nowait::{Buf, Completion, Io, Map, Op, Range, Span};

use super::breaks::{self, Mistake};
use super::context::{Context, Contexts};
use super::head::{Answer, ExtentList, Place, ReplyHead};
use super::reply::{Body, Chunk, Chunks, MAX_CHUNKS, Out};
use super::wire::{self, Mode, RequestHeader};
use crate::device::{Device, verdict};

/// From this length on the known holes in a read are left out of its reply; a head costs the
/// client about as much as the copy of some KiB.
const SPLIT_FROM_BYTES: u64 = 64 << 10;
/// Extents of one block status chunk at most.
const MAX_EXTENTS: usize = 4096;

/// What is kept of a request until it is answered.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) header: RequestHeader,
    /// What a block status request is about.
    pub(crate) contexts: Contexts,
    /// Bytes of its connection's budget that it holds.
    pub(crate) held: u32,
}

/// A request that the engine has given back.
pub(crate) struct Ended<'a> {
    pub(crate) completion: Completion,
    /// Where its bytes begin in the buffer.
    pub(crate) start: usize,
    /// The answer to a status request.
    pub(crate) spans: &'a [Span],
}

/// Bytes that a request holds until its reply has left: its payload, or the extents that it may
/// come to.
#[inline]
pub(crate) fn held(mode: Mode, io: Io, contexts: Contexts) -> u32 {
    match io.op {
        Op::Read | Op::Write => io.range.len as u32,
        Op::Status => (contexts.len() * ExtentList::extent_bytes(mode) * MAX_EXTENTS) as u32,
        Op::Flush | Op::Discard | Op::Zero => 0,
    }
}

/// Whether a read is answered by a hole instead of zeros: the client understands chunks, did not
/// ask for data in one piece (DF), and all of the range is known to be a hole.
#[inline(always)]
pub(crate) fn answers_with_hole<M: Map>(
    device: &Device<M>,
    mode: Mode,
    request: &Request,
    io: Io,
) -> bool {
    may_leave_out(mode, &request.header)
        && io.op == Op::Read
        && io.range.len > 0
        && device.disk().is_hole(io.range)
}

#[inline(always)]
fn may_leave_out(mode: Mode, header: &RequestHeader) -> bool {
    mode.has_chunks() && header.flags & wire::CMD_FLAG_DF == 0
}

/// The reply to a request that came to an errno (0: success), without data.
#[inline]
pub(crate) fn plain(mode: Mode, header: &RequestHeader, errno: i32) -> ReplyHead {
    let error = if errno == 0 { 0 } else { error_value(header, errno) };
    let chunk = match mode {
        Mode::Simple => false,
        Mode::Structured => matches!(header.command, wire::CMD_READ | wire::CMD_BLOCK_STATUS),
        Mode::Extended => true,
    };
    let answer = Answer::to(mode, header);
    match (chunk, error) {
        (true, 0) => answer.none(),
        (true, error) => answer.error(error),
        (false, error) => answer.simple(error),
    }
}

/// The error value for an errno that `header` came to. `ENOTSUP` is for zeroing that was to be fast
/// (NBD proto.md, `NBD_CMD_WRITE_ZEROES`): any other client would not know what to make of it.
fn error_value(header: &RequestHeader, errno: i32) -> u32 {
    let may_be_unsupported =
        header.command == wire::CMD_WRITE_ZEROES && header.flags & wire::CMD_FLAG_FAST_ZERO != 0;
    match wire::error_number(errno) {
        wire::ENOTSUP if !may_be_unsupported => wire::EINVAL,
        error => error,
    }
}

/// Pushes the reply to `request`, which the engine has completed.
#[inline]
pub(crate) fn ended<M: Map>(
    out: &mut Out,
    device: &Device<M>,
    mode: Mode,
    request: &Request,
    ended: Ended<'_>,
) {
    let Ended { completion, start, spans } = ended;
    let header = &request.header;
    if let Err(errno) = verdict(&completion) {
        return out.push(plain(mode, header, errno), Body::None, request.held);
    }
    let Io { op, range, .. } = completion.io;
    match (op, completion.buf) {
        (Op::Read, Some(mut buf)) if range.len > 0 => {
            breaks::spoil(&mut buf);
            if range.len >= SPLIT_FROM_BYTES
                && may_leave_out(mode, header)
                && let Some(list) = split(Answer::to(mode, header), device, range, start)
            {
                return push_chunks(out, buf, list, request.held);
            }
            let head = match mode {
                Mode::Simple => Answer::to(mode, header).simple(0),
                _ => Answer::to(mode, header).data(Place::Last, range.pos, range.len as u32),
            };
            let body = Body::Data { buf, start: start as u32, len: range.len as u32 };
            out.push(head, body, request.held);
        }
        (Op::Status, _) => status(out, mode, request, spans),
        (Op::Flush, _) if breaks::makes(Mistake::ReplyTwice) => {
            out.push(plain(mode, header, 0), Body::None, 0);
            out.push(plain(mode, header, 0), Body::None, request.held);
        }
        _ => out.push(plain(mode, header, 0), Body::None, request.held),
    }
}

/// The chunks of a read of which a part is known to be a hole by now; `None` if there is no hole
/// in it. When there are too many, the last chunk has all of the rest as data.
///
/// It is not too late to look: a range that is a hole now reads as zeros, and this read has not
/// been answered.
fn split<M: Map>(
    answer: Answer,
    device: &Device<M>,
    range: Range,
    start: usize,
) -> Option<Vec<Chunk>> {
    let first = device.disk().known_span(range);
    if !first.hole && first.len == range.len {
        return None;
    }
    let runs = runs(device, range, first);
    if let [Span { hole: false, .. }] = runs[..] {
        return None;
    }
    let mut done = 0;
    let chunks = runs.into_iter().map(|Span { len, hole, .. }| {
        let pos = range.pos + done;
        let start = start as u64 + done;
        done += len;
        let place = if done == range.len { Place::Last } else { Place::Before };
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

/// Holes and data of `range` in turns, [`MAX_CHUNKS`] at most; `first` is the span it begins with.
fn runs<M: Map>(device: &Device<M>, range: Range, first: Span) -> Vec<Span> {
    let mut runs = Vec::with_capacity(MAX_CHUNKS);
    let mut current = first;
    let mut seen = first.len;
    while seen < range.len && runs.len() + 1 < MAX_CHUNKS {
        let next = device.disk().known_span(Range::new(range.pos + seen, range.len - seen));
        if next.hole == current.hole {
            current.len += next.len;
        } else {
            runs.push(std::mem::replace(&mut current, next));
        }
        seen += next.len;
    }
    if seen < range.len {
        current = Span::on_top(current.len + range.len - seen, false);
    }
    runs.push(current);
    runs
}

fn push_chunks(out: &mut Out, buf: Buf, list: Vec<Chunk>, held: u32) {
    out.push(ReplyHead::EMPTY, Body::Chunks(Box::new(Chunks { buf, list })), held);
}

/// One chunk for each context; what the request holds goes with the last.
fn status(out: &mut Out, mode: Mode, request: &Request, spans: &[Span]) {
    let answer = Answer::to(mode, &request.header);
    let one = request.header.flags & wire::CMD_FLAG_REQ_ONE != 0;
    let mut left = request.contexts.len();
    for context in request.contexts.iter() {
        left -= 1;
        let (place, held) = match left {
            0 => (Place::Last, request.held),
            _ => (Place::Before, 0),
        };
        let list = extents(mode, context, spans, if one { 1 } else { MAX_EXTENTS });
        let head = answer.status(place, context.id(), &list);
        out.push(head, Body::Bytes(list.into_bytes()), held);
    }
}

/// At most `limit` extents. Neighbours of a kind are joined; together they are no longer than what
/// was asked for, because the spans are not.
fn extents(mode: Mode, context: Context, spans: &[Span], limit: usize) -> ExtentList {
    let mut list = ExtentList::with_capacity(mode, spans.len().min(limit));
    let mut spans = spans.iter().copied().peekable();
    while list.len() < limit
        && let Some(mut span) = spans.next()
    {
        let flags = context.flags(span);
        while let Some(next) = spans.next_if(|next| context.flags(*next) == flags) {
            span.len += next.len;
        }
        list.push(span.len, flags);
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
                assert_eq!(error_value(&header, libc::EOPNOTSUPP), wanted, "{command} {flags:#x}");
                assert_eq!(error_value(&header, libc::EIO), wire::EIO);
            }
        }
    }
}
