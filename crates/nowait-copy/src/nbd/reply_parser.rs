//! Parses replies from a stream of bytes that may be split anywhere.
//!
//! Invariant: a request is answered once and only while it is pending; a read is complete when as
//! many bytes arrived as were requested, none of them outside its range.

use nowait::{ByteRange, ExtentStatus, IoBuffer};
use nowait_nbd::{Fields, ReplyHeader, ReplyMode};
use slab::Slab;

use crate::nbd::wire;

/// The longest block-status or error chunk, in bytes.
const MAX_COLLECTED_BYTES: u32 = 16 << 20;
/// The longest header of a reply in bytes.
const MAX_HEAD_BYTES: usize = 32;

/// A request that was accepted and has not completed.
pub(crate) struct Pending {
    pub(crate) tag: u64,
    pub(crate) range: ByteRange,
    pub(crate) memory: Option<IoBuffer>,
    pub(crate) extents: Vec<ExtentStatus>,
    /// The command, `CMD_*`.
    pub(crate) command: u16,
    /// Requests on the wire that are not answered.
    pub(crate) left: u32,
    /// The index of its connection.
    pub(crate) connection: usize,
    /// Bytes of a read that have arrived.
    pub(crate) covered: u64,
    /// A read is requested in parts of this many bytes, at most 64 parts, from its start on.
    pub(crate) part_bytes: u64,
    /// The parts of a read that were answered, a bit each.
    pub(crate) answered: u64,
    /// Whether EIO completes the request as unreadable instead of failing the connection.
    pub(crate) may_be_unreadable: bool,
    /// Whether the server answered EIO to the request or a part of it.
    pub(crate) unreadable: bool,
}

impl Pending {
    /// An unanswered request that was sent in one part.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn whole(command: u16, range: ByteRange) -> Self {
        let reads = command == wire::CMD_READ;
        Self {
            tag: 0,
            range,
            memory: reads.then(|| IoBuffer::zeroed(range.len as usize).ok()).flatten(),
            extents: Vec::new(),
            command,
            left: 1,
            connection: 0,
            covered: 0,
            part_bytes: range.len,
            answered: 0,
            may_be_unreadable: false,
            unreadable: false,
        }
    }

    /// The range of the part with this `cookie`.
    fn part(&self, cookie: u64) -> Outcome<ByteRange> {
        let start = (cookie >> 32).saturating_mul(self.part_bytes);
        let left = self.range.len.checked_sub(start).filter(|&left| left > 0).ok_or(UNASKED)?;
        Ok(ByteRange::new(self.range.pos + start, left.min(self.part_bytes)))
    }
}

/// The cookie of a part on the wire: the index of its pending request and its number in it.
pub(crate) fn cookie(pending: usize, number: u32) -> u64 {
    u64::from(number) << 32 | pending as u64
}

fn pending_of(cookie: u64) -> usize {
    cookie as u32 as usize
}

/// The part of the stream that the next byte belongs to.
enum State {
    /// A header of this many bytes.
    Head(usize),
    /// The data of a read.
    Data { cookie: u64, at: usize, left: usize, done: bool },
    /// A payload that is parsed when it is complete.
    Collect { cookie: u64, kind: u16, left: usize, done: bool },
}

/// A result with a message as its error.
type Outcome<T> = Result<T, String>;

/// The reply parser of one connection.
pub(crate) struct ReplyParser {
    connection: usize,
    context: Option<u32>,
    state: State,
    head: [u8; MAX_HEAD_BYTES],
    have: usize,
    collected: Vec<u8>,
}

const HEAD: State = State::Head(wire::SIMPLE_REPLY_BYTES);
const UNASKED: &str = "the server answered a request that was never made";
const BROKEN: &str = "the server's replies make no sense";

impl ReplyParser {
    /// A parser for the connection with this index; `context` is the id of its block-status
    /// context.
    pub(crate) fn new(connection: usize, context: Option<u32>) -> Self {
        let (head, collected) = ([0; MAX_HEAD_BYTES], Vec::new());
        Self { connection, context, state: HEAD, head, have: 0, collected }
    }

    /// The memory for the next bytes of the stream, if they are data of a read.
    pub(crate) fn data_target<'a>(&self, pending: &'a mut Slab<Pending>) -> Option<&'a mut [u8]> {
        let State::Data { cookie, at, left, .. } = self.state else { return None };
        let memory = pending.get_mut(pending_of(cookie))?.memory.as_mut()?;
        memory.get_mut(at..)?.get_mut(..left)
    }

    /// The next `count` bytes were received into [`ReplyParser::data_target`].
    pub(crate) fn data_received(
        &mut self,
        count: usize,
        pending: &mut Slab<Pending>,
        on_completed: &mut dyn FnMut(usize),
    ) -> Outcome<()> {
        let State::Data { cookie, at, left, done } = &mut self.state else { return Ok(()) };
        *at += count;
        *left -= count.min(*left);
        if *left > 0 {
            return Ok(());
        }
        let (cookie, done) = (*cookie, *done);
        self.next_head();
        if done { self.finish(cookie, pending, on_completed) } else { Ok(()) }
    }

    /// Parses the next bytes of the stream. `on_completed` gets the index of each completed
    /// request.
    pub(crate) fn feed(
        &mut self,
        mut bytes: &[u8],
        pending: &mut Slab<Pending>,
        on_completed: &mut dyn FnMut(usize),
    ) -> Outcome<()> {
        while !bytes.is_empty() {
            let count = match &mut self.state {
                State::Head(need) => {
                    let count = bytes.len().min(*need - self.have);
                    copy(&mut self.head, self.have, bytes, count);
                    self.have += count;
                    if self.have == *need {
                        self.on_header(pending, on_completed)?;
                    }
                    count
                }
                State::Data { .. } => {
                    let target = self.data_target(pending).ok_or(BROKEN)?;
                    let count = bytes.len().min(target.len());
                    copy(target, 0, bytes, count);
                    self.data_received(count, pending, on_completed)?;
                    count
                }
                State::Collect { left, .. } => {
                    let count = bytes.len().min(*left);
                    self.collected.extend_from_slice(bytes.get(..count).unwrap_or_default());
                    *left -= count;
                    if *left == 0 {
                        self.on_collected(pending, on_completed)?;
                    }
                    count
                }
            };
            bytes = bytes.get(count..).unwrap_or_default();
        }
        Ok(())
    }

    fn next_head(&mut self) {
        self.state = HEAD;
        self.have = 0;
    }

    fn on_header(
        &mut self,
        pending: &mut Slab<Pending>,
        on_completed: &mut dyn FnMut(usize),
    ) -> Outcome<()> {
        let head = self.head.get(..self.have).unwrap_or_default();
        match ReplyHeader::parse(ReplyMode::Structured, head) {
            Ok(Some((ReplyHeader::Simple { error, cookie }, _))) => {
                self.simple_reply(error, cookie, pending, on_completed)
            }
            Ok(Some((head @ ReplyHeader::Chunk { .. }, _))) => {
                self.chunk(head, pending, on_completed)
            }
            // As many bytes as a simple reply has, of the longer head of a chunk.
            Ok(None) => {
                self.state = State::Head(wire::CHUNK_HEAD_BYTES);
                Ok(())
            }
            Err(_) => Err(BROKEN.into()),
        }
    }

    fn simple_reply(
        &mut self,
        error: u32,
        cookie: u64,
        pending: &mut Slab<Pending>,
        on_completed: &mut dyn FnMut(usize),
    ) -> Outcome<()> {
        let request = self.request(cookie, pending)?;
        if error != 0 {
            failed(request, error, "")?;
            self.next_head();
            return self.finish(cookie, pending, on_completed);
        }
        match request.command {
            wire::CMD_READ => {
                let part = request.part(cookie)?;
                request.covered += part.len;
                let (at, left) = ((part.pos - request.range.pos) as usize, part.len as usize);
                self.state = State::Data { cookie, at, left, done: true };
                Ok(())
            }
            wire::CMD_BLOCK_STATUS => Err(BROKEN.into()),
            _ => {
                self.next_head();
                self.finish(cookie, pending, on_completed)
            }
        }
    }

    fn chunk(
        &mut self,
        head: ReplyHeader,
        pending: &mut Slab<Pending>,
        on_completed: &mut dyn FnMut(usize),
    ) -> Outcome<()> {
        let ReplyHeader::Chunk { kind, cookie, length, .. } = head else { return Ok(()) };
        let len = u32::try_from(length).map_err(|_| BROKEN)?;
        let done = head.is_last();
        let request = self.request(cookie, pending)?;
        match kind {
            wire::REPLY_TYPE_NONE if len == 0 && done => {
                self.next_head();
                self.finish(cookie, pending, on_completed)
            }
            wire::REPLY_TYPE_OFFSET_DATA | wire::REPLY_TYPE_OFFSET_HOLE
                if request.command == wire::CMD_READ =>
            {
                let (with, right) = match kind {
                    wire::REPLY_TYPE_OFFSET_DATA => (8, len > 8),
                    _ => (12, len == 12),
                };
                if !right {
                    return Err(BROKEN.into());
                }
                if self.have < wire::CHUNK_HEAD_BYTES + with {
                    self.state = State::Head(wire::CHUNK_HEAD_BYTES + with);
                    return Ok(());
                }
                let mut fields = Fields(&self.head[wire::CHUNK_HEAD_BYTES..]);
                let offset = fields.u64().ok_or(BROKEN)?;
                let bytes = match kind {
                    wire::REPLY_TYPE_OFFSET_DATA => len - 8,
                    _ => fields.u32().ok_or(BROKEN)?,
                };
                let at = memory_offset(request, cookie, offset, bytes)?;
                let left = bytes as usize;
                request.covered += u64::from(bytes);
                if kind == wire::REPLY_TYPE_OFFSET_DATA {
                    self.state = State::Data { cookie, at, left, done };
                    return Ok(());
                }
                let memory = request.memory.as_mut().and_then(|memory| memory.get_mut(at..));
                memory.and_then(|rest| rest.get_mut(..left)).ok_or(BROKEN)?.fill(0);
                self.next_head();
                if done { self.finish(cookie, pending, on_completed) } else { Ok(()) }
            }
            _ if len == 0 || len > MAX_COLLECTED_BYTES => Err(BROKEN.into()),
            _ => {
                self.collected.clear();
                self.state = State::Collect { cookie, kind, left: len as usize, done };
                Ok(())
            }
        }
    }

    fn on_collected(
        &mut self,
        pending: &mut Slab<Pending>,
        on_completed: &mut dyn FnMut(usize),
    ) -> Outcome<()> {
        let State::Collect { cookie, kind, done, .. } = self.state else { return Ok(()) };
        let context = self.context;
        let collected = std::mem::take(&mut self.collected);
        let request = self.request(cookie, pending)?;
        match kind {
            wire::REPLY_TYPE_BLOCK_STATUS if request.command == wire::CMD_BLOCK_STATUS => {
                let mut fields = Fields(&collected);
                let id = fields.u32().ok_or(BROKEN)?;
                if Some(id) == context {
                    read_extents(request, fields)?;
                }
            }
            _ if kind & wire::REPLY_TYPE_ERROR_BIT != 0 => {
                let mut fields = Fields(&collected);
                let error = fields.u32().ok_or(BROKEN)?;
                let len = fields.u16().ok_or(BROKEN)?;
                let words = fields.take(usize::from(len)).unwrap_or_default();
                failed(request, error, &String::from_utf8_lossy(words))?;
            }
            _ => return Err(BROKEN.into()),
        }
        self.next_head();
        if done { self.finish(cookie, pending, on_completed) } else { Ok(()) }
    }

    /// The pending request of `cookie`.
    fn request<'a>(&self, cookie: u64, pending: &'a mut Slab<Pending>) -> Outcome<&'a mut Pending> {
        let own = pending
            .get_mut(pending_of(cookie))
            .filter(|request| request.connection == self.connection && request.left > 0);
        own.ok_or_else(|| UNASKED.into())
    }

    fn finish(
        &self,
        cookie: u64,
        pending: &mut Slab<Pending>,
        on_completed: &mut dyn FnMut(usize),
    ) -> Outcome<()> {
        let request = self.request(cookie, pending)?;
        let last = request.left == 1;
        let complete = match request.command {
            wire::CMD_READ => {
                let bit = 1u64.checked_shl((cookie >> 32) as u32).unwrap_or_default();
                if request.answered & bit != 0 || bit == 0 {
                    return Err(UNASKED.into());
                }
                request.answered |= bit;
                !last || request.unreadable || request.covered == request.range.len
            }
            wire::CMD_BLOCK_STATUS => request.unreadable || !request.extents.is_empty(),
            _ => true,
        };
        if !complete {
            return Err("the server answered a request only in part".into());
        }
        request.left -= 1;
        if request.left == 0 {
            on_completed(pending_of(cookie));
        }
        Ok(())
    }
}

/// Copies `count` bytes from the start of `from` to `to`, from `at` on.
fn copy(to: &mut [u8], at: usize, from: &[u8], count: usize) {
    let to = to.get_mut(at..).and_then(|to| to.get_mut(..count));
    if let (Some(to), Some(from)) = (to, from.get(..count)) {
        to.copy_from_slice(from);
    }
}

/// The offset in the memory of `request` for `bytes` bytes at byte `offset` of the export, which
/// answer the part with this `cookie`.
fn memory_offset(request: &Pending, cookie: u64, offset: u64, bytes: u32) -> Outcome<usize> {
    let part = request.part(cookie)?;
    let end = offset.checked_add(u64::from(bytes));
    let fits = bytes > 0 && offset >= part.pos && end.is_some_and(|end| end <= part.end());
    if fits { Ok((offset - request.range.pos) as usize) } else { Err(BROKEN.into()) }
}

/// Parses the extents within the range; the last one is cut at its end.
fn read_extents(request: &mut Pending, mut extents: Fields<'_>) -> Outcome<()> {
    request.extents.clear();
    let mut left = request.range.len;
    while left > 0
        && let Some(len) = extents.u32()
    {
        let flags = extents.u32().ok_or(BROKEN)?;
        if len == 0 {
            return Err(BROKEN.into());
        }
        let len = u64::from(len).min(left);
        request.extents.push(ExtentStatus::top(len, flags & wire::STATE_ZERO != 0));
        left -= len;
    }
    Ok(())
}

/// The server answered `request` with `error`: marks the request unreadable if that is allowed,
/// else fails the connection.
fn failed(request: &mut Pending, error: u32, words: &str) -> Outcome<()> {
    if request.may_be_unreadable && error == wire::EIO {
        request.unreadable = true;
        return Ok(());
    }
    Err(failure(request, error, words))
}

fn failure(request: &Pending, error: u32, words: &str) -> String {
    let doing = match request.command {
        wire::CMD_READ => "read",
        wire::CMD_WRITE => "write",
        wire::CMD_WRITE_ZEROES => "make zero",
        wire::CMD_BLOCK_STATUS => "find the holes",
        _ => return format!("cannot flush: {}", wire::error_words(error)),
    };
    let (at, reason) = (request.range.pos, wire::error_words(error));
    let words = if words.is_empty() { String::new() } else { format!(" ({words})") };
    format!("cannot {doing} at byte {at}: {reason}{words}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: u32 = 7;
    const AT: u64 = 1 << 33;

    fn pending(command: u16, len: u64) -> Pending {
        Pending::whole(command, ByteRange::new(AT, len))
    }

    fn chunk(done: bool, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = wire::STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(u16::from(done).to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend((payload.len() as u32).to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    fn simple(error: u32, cookie: u64) -> Vec<u8> {
        let mut bytes = wire::SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(error.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes
    }

    fn data(done: bool, cookie: u64, offset: u64, bytes: &[u8]) -> Vec<u8> {
        let payload = [&offset.to_be_bytes(), bytes].concat();
        chunk(done, wire::REPLY_TYPE_OFFSET_DATA, cookie, &payload)
    }

    fn hole(done: bool, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
        let payload = [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat();
        chunk(done, wire::REPLY_TYPE_OFFSET_HOLE, cookie, &payload)
    }

    fn status(cookie: u64, context: u32, extents: &[(u32, u32)]) -> Vec<u8> {
        let mut payload = context.to_be_bytes().to_vec();
        for (len, flags) in extents {
            payload.extend(len.to_be_bytes());
            payload.extend(flags.to_be_bytes());
        }
        chunk(true, wire::REPLY_TYPE_BLOCK_STATUS, cookie, &payload)
    }

    /// Receives `pieces` as a connection does: data of a read directly into its memory.
    fn receive(pieces: &[&[u8]], table: &mut Slab<Pending>) -> Outcome<Vec<usize>> {
        let mut receiver = ReplyParser::new(0, Some(CONTEXT));
        let mut on_completed = Vec::new();
        for piece in pieces {
            let direct = receiver.data_target(table).map_or(0, |target| {
                let count = target.len().min(piece.len());
                target[..count].copy_from_slice(&piece[..count]);
                count
            });
            let mut note = |index| on_completed.push(index);
            if direct > 0 {
                receiver.data_received(direct, table, &mut note)?;
            }
            receiver.feed(&piece[direct..], table, &mut note)?;
        }
        Ok(on_completed)
    }

    #[test]
    fn replies_are_parsed_wherever_the_stream_is_split() {
        let stream = [
            data(false, 0, AT + 6, &[3, 4]),
            simple(0, 1),
            hole(false, 0, AT + 2, 4),
            status(2, CONTEXT, &[(5, 3), (100, 0)]),
            data(true, 0, AT, &[1, 2]),
            simple(0, 3),
            vec![9, 8, 7],
        ]
        .concat();
        for first in 0..=stream.len() {
            for second in (first..=stream.len()).step_by(7) {
                let mut table = Slab::new();
                for (command, len) in [
                    (wire::CMD_READ, 8),
                    (wire::CMD_WRITE, 8),
                    (wire::CMD_BLOCK_STATUS, 20),
                    (wire::CMD_READ, 3),
                ] {
                    table.insert(pending(command, len));
                }
                table[0].memory.as_mut().unwrap().fill(0xee);
                let pieces = [&stream[..first], &stream[first..second], &stream[second..]];
                assert_eq!(receive(&pieces, &mut table), Ok(vec![1, 2, 0, 3]), "{first} {second}");
                let bytes = |index: usize| table[index].memory.as_deref().unwrap();
                assert_eq!(bytes(0), [1, 2, 0, 0, 0, 0, 3, 4]);
                assert_eq!(bytes(3), [9, 8, 7]);
                let extents = [ExtentStatus::top(5, true), ExtentStatus::top(15, false)];
                assert_eq!(table[2].extents, extents);
            }
        }
    }

    #[test]
    fn the_parts_of_a_read_are_answered_once_each_and_in_any_order() {
        let two = || {
            let mut table = Slab::new();
            table.insert(Pending { left: 2, part_bytes: 6, ..pending(wire::CMD_READ, 8) });
            table
        };
        let (first, second) = (cookie(0, 0), cookie(0, 1));
        let simple_reply = |cookie, bytes: &[u8]| [&simple(0, cookie), bytes].concat();
        for answers in [
            [simple_reply(second, &[7, 8]), simple_reply(first, &[1, 2, 3, 4, 5, 6])],
            [data(true, first, AT, &[1, 2, 3, 4, 5, 6]), data(true, second, AT + 6, &[7, 8])],
        ] {
            let mut table = two();
            assert_eq!(receive(&[&answers[0]], &mut table), Ok(vec![]));
            assert_eq!(receive(&[&answers[1]], &mut table), Ok(vec![0]));
            assert_eq!(table[0].memory.as_deref().unwrap(), [1, 2, 3, 4, 5, 6, 7, 8]);
        }
        for wrong in [
            [simple_reply(second, &[7, 8]), simple_reply(second, &[7, 8])].concat(),
            simple_reply(cookie(0, 2), &[0; 6]),
            simple_reply(cookie(0, u32::MAX), &[0; 6]),
            data(true, second, AT, &[1, 2]),
            data(true, first, AT + 5, &[6, 7]),
        ] {
            assert!(receive(&[&wrong], &mut two()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn an_invalid_reply_is_an_error() {
        let read = wire::CMD_READ;
        for (command, stream) in [
            (read, vec![0; 16]),
            (read, simple(0, 1)),
            (read, data(true, 1, AT, &[0; 8])),
            (read, data(true, 0, AT - 1, &[0; 8])),
            (read, data(true, 0, AT + 1, &[0; 8])),
            (read, data(true, 0, AT, &[])),
            (read, data(true, 0, AT, &[0; 7])),
            (read, data(true, 0, u64::MAX, &[0; 8])),
            (read, hole(true, 0, AT, 9)),
            (read, hole(true, 0, AT, 0)),
            (read, chunk(true, wire::REPLY_TYPE_NONE, 0, &[])),
            (read, chunk(false, wire::REPLY_TYPE_NONE, 0, &[])),
            (read, chunk(true, wire::REPLY_TYPE_OFFSET_DATA, 0, &[0; 4])),
            (read, status(0, CONTEXT, &[(8, 0)])),
            (read, chunk(true, 77, 0, &[0; 8])),
            (wire::CMD_WRITE, data(true, 0, AT, &[0; 8])),
            (wire::CMD_BLOCK_STATUS, simple(0, 0)),
            (wire::CMD_BLOCK_STATUS, status(0, CONTEXT, &[])),
            (wire::CMD_BLOCK_STATUS, status(0, CONTEXT, &[(0, 0)])),
            (wire::CMD_BLOCK_STATUS, status(0, CONTEXT + 1, &[(8, 0)])),
            (wire::CMD_BLOCK_STATUS, chunk(true, wire::REPLY_TYPE_NONE, 0, &[])),
            (read, chunk(true, wire::REPLY_TYPE_ERROR_BIT, 0, &[0, 0, 0, 5])),
        ] {
            let mut table = Slab::new();
            table.insert(pending(command, 8));
            assert!(receive(&[&stream], &mut table).is_err(), "{command}: {stream:?}");
        }
    }

    #[test]
    fn an_answer_on_another_connection_is_an_error() {
        let mut table = Slab::new();
        table.insert(Pending { connection: 1, ..pending(wire::CMD_WRITE, 8) });
        assert!(receive(&[&simple(0, 0)], &mut table).is_err());
    }

    #[test]
    fn a_failure_is_reported_with_its_offset_and_the_servers_words() {
        let mut table = Slab::new();
        table.insert(pending(wire::CMD_WRITE, 8));
        let payload = [&28u32.to_be_bytes()[..], &4u16.to_be_bytes(), b"full"].concat();
        let reply = chunk(true, wire::REPLY_TYPE_ERROR_BIT + 1, 0, &payload);
        let error = receive(&[&reply], &mut table).unwrap_err();
        assert_eq!(error, format!("cannot write at byte {AT}: no space left (full)"));
        let error = receive(&[&simple(1, 0)], &mut table).unwrap_err();
        assert_eq!(error, format!("cannot write at byte {AT}: operation not permitted"));
    }
}
