//! Parses replies from a stream of bytes that may be split anywhere.
//!
//! Invariant: bounded in memory, whatever the server sends; each message is handed on once, when the
//! part of it that decides about it is complete. Whether it answers a request is decided by the owner
//! of the requests, [`Replies`].

use crate::constants::{
    CHUNK_HEAD_BYTES, EXTENDED_REPLY_BYTES, REPLY_TYPE_BLOCK_STATUS, REPLY_TYPE_BLOCK_STATUS_EXT,
    REPLY_TYPE_ERROR_BIT, REPLY_TYPE_NONE, REPLY_TYPE_OFFSET_DATA, REPLY_TYPE_OFFSET_HOLE,
};
use crate::extents::Extents;
use crate::fields::Fields;
use crate::reply_header::ReplyHeader;
use crate::reply_mode::ReplyMode;

/// The longest block status or error chunk, in bytes.
/// Beyond it: the connection is given up.
const MAX_COLLECTED_BYTES: u64 = 16 << 20;
/// The longest header of a reply in bytes: an extended one with offset and length of a hole.
const HEAD_BYTES: usize = 44;
/// Bytes of the offset at the start of a data chunk.
const DATA_OFFSET_BYTES: usize = 8;
/// Bytes of the payload of a hole: offset and length.
const HOLE_BYTES: usize = 12;
/// The error of a reply that does not fit its request, or no request.
pub const BROKEN: &str = "the server's replies make no sense";

/// A result with a message of one line as its error, after which the connection is of no use.
pub type Outcome<T> = Result<T, String>;

/// The unanswered requests of a connection. An error of any method closes the connection. A client
/// without replies in chunks has only the methods that have no body here.
pub trait Replies {
    /// A simple reply with `error`, 0 for success. Returns offset and length of the data that follow
    /// it, in bytes of the export.
    fn simple(&mut self, cookie: u64, error: u32) -> Outcome<Option<(u64, u64)>>;

    /// A chunk of `length` bytes of data at `offset`, at least 1, which follow.
    fn data(&mut self, _cookie: u64, _offset: u64, _length: u64) -> Outcome<()> {
        Err(BROKEN.into())
    }

    /// A chunk that says that `length` bytes at `offset` are zeros.
    fn hole(&mut self, _cookie: u64, _offset: u64, _length: u64) -> Outcome<()> {
        Err(BROKEN.into())
    }

    /// A block status chunk of the context with the id `context`; at least one extent.
    fn status(&mut self, _cookie: u64, _context: u32, _extents: Extents<'_>) -> Outcome<()> {
        Err(BROKEN.into())
    }

    /// An error chunk, with the server's own words.
    fn error(&mut self, _cookie: u64, _error: u32, _words: &str) -> Outcome<()> {
        Err(BROKEN.into())
    }

    /// No other message follows for the request.
    fn done(&mut self, cookie: u64) -> Outcome<()>;

    /// The memory for data from `offset` of the export on, of a range that was accepted; without any
    /// the data are skipped.
    fn memory(&mut self, cookie: u64, offset: u64) -> Option<&mut [u8]>;
}

/// The part of the stream that the next byte belongs to.
enum State {
    /// A header of this many bytes.
    Head(usize),
    /// Data: `left` bytes from `offset` of the export on.
    Data { cookie: u64, offset: u64, left: u64, last: bool },
    /// A payload that is parsed when it is complete.
    Collect { cookie: u64, kind: u16, left: usize, last: bool },
}

/// The reply parser of one connection.
pub struct ReplyParser {
    mode: ReplyMode,
    state: State,
    head: [u8; HEAD_BYTES],
    have: usize,
    collected: Vec<u8>,
}

impl ReplyParser {
    /// A parser before the first reply of a connection in `mode`.
    #[must_use]
    pub fn new(mode: ReplyMode) -> Self {
        let state = State::Head(mode.reply_bytes());
        Self { mode, state, head: [0; HEAD_BYTES], have: 0, collected: Vec::new() }
    }

    /// The messages of the connection.
    #[must_use]
    pub fn mode(&self) -> ReplyMode {
        self.mode
    }

    /// Whether the next byte begins a message.
    #[must_use]
    pub fn is_between_messages(&self) -> bool {
        matches!(self.state, State::Head(_)) && self.have == 0
    }

    /// The memory for the next bytes of the stream, if they are data with memory. What was received
    /// there is reported by [`ReplyParser::data_received`].
    #[inline]
    pub fn data_target<'a>(&self, replies: &'a mut impl Replies) -> Option<&'a mut [u8]> {
        let State::Data { cookie, offset, left, .. } = self.state else { return None };
        let memory = replies.memory(cookie, offset)?;
        let count = memory.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        memory.get_mut(..count)
    }

    /// The next `count` bytes were received into [`ReplyParser::data_target`], or are skipped.
    ///
    /// # Errors
    /// That of [`Replies::done`].
    #[inline]
    pub fn data_received(&mut self, count: usize, replies: &mut impl Replies) -> Outcome<()> {
        let State::Data { cookie, offset, left, last } = &mut self.state else { return Ok(()) };
        *offset = offset.saturating_add(count as u64);
        *left = left.saturating_sub(count as u64);
        if *left > 0 {
            return Ok(());
        }
        let (cookie, last) = (*cookie, *last);
        self.end_message(cookie, last, replies)
    }

    /// Parses the next bytes of the stream.
    ///
    /// # Errors
    /// A message that breaks the protocol, or an error of `replies`.
    pub fn feed(&mut self, mut bytes: &[u8], replies: &mut impl Replies) -> Outcome<()> {
        while !bytes.is_empty() {
            let count = match &mut self.state {
                State::Head(need) => {
                    let count = bytes.len().min(*need - self.have);
                    copy(self.head.get_mut(self.have..), bytes, count);
                    self.have += count;
                    if self.have == *need {
                        self.on_header(replies)?;
                    }
                    count
                }
                State::Data { left, .. } => {
                    let mut count = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    if let Some(target) = self.data_target(replies) {
                        count = count.min(target.len());
                        copy(Some(target), bytes, count);
                    }
                    if count == 0 {
                        return Err(BROKEN.into());
                    }
                    self.data_received(count, replies)?;
                    count
                }
                State::Collect { left, .. } => {
                    let count = bytes.len().min(*left);
                    self.collected.extend_from_slice(bytes.get(..count).unwrap_or_default());
                    *left -= count;
                    if *left == 0 {
                        self.on_collected(replies)?;
                    }
                    count
                }
            };
            bytes = bytes.get(count..).unwrap_or_default();
        }
        Ok(())
    }

    /// The next byte begins a message.
    #[inline]
    fn end_message(&mut self, cookie: u64, last: bool, replies: &mut impl Replies) -> Outcome<()> {
        self.state = State::Head(self.mode.reply_bytes());
        self.have = 0;
        if last { replies.done(cookie) } else { Ok(()) }
    }

    #[inline]
    fn on_header(&mut self, replies: &mut impl Replies) -> Outcome<()> {
        let bytes = self.head.get(..self.have).unwrap_or_default();
        let Some((header, _)) = ReplyHeader::parse(self.mode, bytes).map_err(|_| BROKEN)? else {
            // The header of a chunk is longer: these are as many of its bytes as a simple reply has.
            self.state = State::Head(CHUNK_HEAD_BYTES);
            return Ok(());
        };
        match header {
            ReplyHeader::Simple { error, cookie } => match replies.simple(cookie, error)? {
                Some((offset, left)) if left > 0 => {
                    self.state = State::Data { cookie, offset, left, last: true };
                    Ok(())
                }
                _ => self.end_message(cookie, true, replies),
            },
            ReplyHeader::Chunk { kind, cookie, length, .. } => {
                self.on_chunk(kind, cookie, length, header.is_last(), replies)
            }
        }
    }

    fn on_chunk(
        &mut self,
        kind: u16,
        cookie: u64,
        length: u64,
        last: bool,
        replies: &mut impl Replies,
    ) -> Outcome<()> {
        match kind {
            REPLY_TYPE_NONE if length == 0 && last => self.end_message(cookie, last, replies),
            REPLY_TYPE_OFFSET_DATA if length > DATA_OFFSET_BYTES as u64 => {
                let Some(mut fields) = self.more_head(DATA_OFFSET_BYTES) else { return Ok(()) };
                let (offset, left) =
                    (fields.u64().ok_or(BROKEN)?, length - DATA_OFFSET_BYTES as u64);
                replies.data(cookie, offset, left)?;
                self.state = State::Data { cookie, offset, left, last };
                Ok(())
            }
            REPLY_TYPE_OFFSET_HOLE if length == HOLE_BYTES as u64 => {
                let Some(mut fields) = self.more_head(HOLE_BYTES) else { return Ok(()) };
                let (offset, length) = (fields.u64().ok_or(BROKEN)?, fields.u32().ok_or(BROKEN)?);
                replies.hole(cookie, offset, length.into())?;
                self.end_message(cookie, last, replies)
            }
            REPLY_TYPE_NONE | REPLY_TYPE_OFFSET_DATA | REPLY_TYPE_OFFSET_HOLE => Err(BROKEN.into()),
            _ if length == 0 || length > MAX_COLLECTED_BYTES => Err(BROKEN.into()),
            _ => {
                self.collected.clear();
                self.state = State::Collect { cookie, kind, left: length as usize, last };
                Ok(())
            }
        }
    }

    /// The `count` bytes behind the header of a chunk, once they are collected with it.
    fn more_head(&mut self, count: usize) -> Option<Fields<'_>> {
        let header = match self.mode {
            ReplyMode::Extended => EXTENDED_REPLY_BYTES,
            ReplyMode::Simple | ReplyMode::Structured => CHUNK_HEAD_BYTES,
        };
        self.state = State::Head(header + count);
        self.head.get(header..self.have).filter(|more| more.len() == count).map(Fields)
    }

    fn on_collected(&mut self, replies: &mut impl Replies) -> Outcome<()> {
        let State::Collect { cookie, kind, last, .. } = self.state else { return Ok(()) };
        let mut fields = Fields(&self.collected);
        match (kind, self.mode) {
            (REPLY_TYPE_BLOCK_STATUS, ReplyMode::Structured)
            | (REPLY_TYPE_BLOCK_STATUS_EXT, ReplyMode::Extended) => {
                let context = fields.u32().ok_or(BROKEN)?;
                let extents = Extents::parse(self.mode, fields).ok_or(BROKEN)?;
                replies.status(cookie, context, extents)?;
            }
            _ if kind & REPLY_TYPE_ERROR_BIT != 0 => {
                let (error, len) = (fields.u32().ok_or(BROKEN)?, fields.u16().ok_or(BROKEN)?);
                let words = fields.take(usize::from(len)).unwrap_or_default();
                replies.error(cookie, error, &String::from_utf8_lossy(words))?;
            }
            _ => return Err(BROKEN.into()),
        }
        self.end_message(cookie, last, replies)
    }
}

/// Copies `count` bytes from the start of `from` to the start of `to`.
#[inline]
fn copy(to: Option<&mut [u8]>, from: &[u8], count: usize) {
    if let (Some(to), Some(from)) = (to.and_then(|to| to.get_mut(..count)), from.get(..count)) {
        to.copy_from_slice(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::REPLY_TYPE_ERROR;
    use crate::extents::ExtentList;
    use crate::reply_encoder::{ChunkPosition, ReplyEncoder};

    /// A client that writes down what it is told; its memory begins at byte `AT` of the export.
    #[derive(Debug, Default, PartialEq, Eq)]
    struct Notes {
        lines: Vec<String>,
        memory: Vec<u8>,
    }

    const AT: u64 = 1 << 40;

    impl Replies for Notes {
        fn simple(&mut self, cookie: u64, error: u32) -> Outcome<Option<(u64, u64)>> {
            self.lines.push(format!("{cookie}: error {error}"));
            Ok((cookie == 1).then_some((AT, 4)))
        }

        fn data(&mut self, cookie: u64, offset: u64, length: u64) -> Outcome<()> {
            self.lines.push(format!("{cookie}: {length} at {}", offset - AT));
            Ok(())
        }

        fn hole(&mut self, cookie: u64, offset: u64, length: u64) -> Outcome<()> {
            self.lines.push(format!("{cookie}: no {length} at {}", offset - AT));
            Ok(())
        }

        fn status(&mut self, cookie: u64, context: u32, extents: Extents<'_>) -> Outcome<()> {
            self.lines.push(format!("{cookie}: {context} {:?}", extents.collect::<Vec<_>>()));
            Ok(())
        }

        fn error(&mut self, cookie: u64, error: u32, words: &str) -> Outcome<()> {
            self.lines.push(format!("{cookie}: error {error} {words}"));
            Ok(())
        }

        fn done(&mut self, cookie: u64) -> Outcome<()> {
            self.lines.push(format!("{cookie}: done"));
            Ok(())
        }

        fn memory(&mut self, cookie: u64, offset: u64) -> Option<&mut [u8]> {
            let at = (offset - AT) as usize;
            (cookie == 1).then(|| self.memory.get_mut(at..))?
        }
    }

    /// A chunk in `mode` that answers request 1.
    fn chunk(mode: ReplyMode, flags: u16, kind: u16, payload: &[u8]) -> Vec<u8> {
        let header = ReplyHeader::Chunk { flags, kind, cookie: 1, length: payload.len() as u64 };
        [header.encode(mode, AT).as_slice(), payload].concat()
    }

    /// Replies that a client in `mode` is told when its bytes arrive in `pieces`.
    fn told(mode: ReplyMode, pieces: &[&[u8]]) -> Outcome<Notes> {
        let mut parser = ReplyParser::new(mode);
        let mut notes = Notes { memory: vec![0xee; 6], ..Notes::default() };
        pieces.iter().try_for_each(|piece| parser.feed(piece, &mut notes)).map(|()| notes)
    }

    #[test]
    fn every_chunk_is_told_once_wherever_the_stream_is_split() {
        for mode in [ReplyMode::Structured, ReplyMode::Extended] {
            let at = |at: u64| (AT + at).to_be_bytes();
            let long = if mode == ReplyMode::Extended { 1u64 << 40 } else { 1 << 30 };
            let mut extents = ExtentList::with_capacity(mode, 2);
            extents.push(long, 3);
            extents.push(512, 0);
            let answer = ReplyEncoder::to_cookie(mode, 1);
            let status = answer.status(ChunkPosition::NotLast, 9, &extents);
            let stream = [
                chunk(mode, 0, REPLY_TYPE_OFFSET_DATA, &[&at(2)[..], &[7, 8]].concat()),
                chunk(mode, 0, REPLY_TYPE_OFFSET_HOLE, &[&at(4)[..], &[0, 0, 2, 0]].concat()),
                [status.as_slice(), &extents.into_bytes()].concat(),
                chunk(mode, 0, REPLY_TYPE_ERROR, b"\0\0\0\x1c\0\x04full"),
                chunk(mode, 1, REPLY_TYPE_NONE, &[]),
            ]
            .concat();
            let lines = [
                "1: 2 at 2".to_owned(),
                "1: no 512 at 4".into(),
                format!("1: 9 [({long}, 3), (512, 0)]"),
                "1: error 28 full".into(),
                "1: done".into(),
            ];
            let wanted = Notes { lines: lines.into(), memory: vec![0xee, 0xee, 7, 8, 0xee, 0xee] };
            for first in 0..=stream.len() {
                for second in (first..=stream.len()).step_by(5) {
                    let pieces = [&stream[..first], &stream[first..second], &stream[second..]];
                    assert_eq!(told(mode, &pieces).as_ref(), Ok(&wanted), "{first} {second}");
                }
            }
        }
    }

    #[test]
    fn the_data_of_a_simple_reply_are_skipped_without_memory() {
        let reply = |cookie: u8| [&[0x67, 0x44, 0x66, 0x98][..], &[0; 11], &[cookie]].concat();
        let stream = [reply(2), reply(1), vec![5, 6, 7, 8], reply(2)].concat();
        for cut in 0..=stream.len() {
            let notes = told(ReplyMode::Simple, &[&stream[..cut], &stream[cut..]]).unwrap();
            assert_eq!(notes.memory, [5, 6, 7, 8, 0xee, 0xee]);
            assert_eq!(notes.lines.len(), 6);
        }
    }

    #[test]
    fn a_message_that_breaks_the_protocol_is_refused() {
        let (structured, extended) = (ReplyMode::Structured, ReplyMode::Extended);
        for (mode, flags, kind, payload) in [
            (structured, 0, REPLY_TYPE_NONE, &[][..]),
            (structured, 1, REPLY_TYPE_NONE, &[0]),
            (structured, 1, REPLY_TYPE_OFFSET_DATA, &[0; 8]),
            (structured, 1, REPLY_TYPE_OFFSET_HOLE, &[0; 13]),
            (structured, 1, REPLY_TYPE_BLOCK_STATUS, &[0; 4]),
            (structured, 1, REPLY_TYPE_BLOCK_STATUS, &[0; 13]),
            (structured, 1, REPLY_TYPE_BLOCK_STATUS_EXT, &[0; 24]),
            (extended, 1, REPLY_TYPE_BLOCK_STATUS, &[0; 12]),
            (extended, 1, REPLY_TYPE_BLOCK_STATUS_EXT, &[0; 8]),
            (extended, 1, REPLY_TYPE_BLOCK_STATUS_EXT, &[0, 0, 0, 9, 0, 0, 0, 2, 0, 0, 0, 0]),
            (structured, 1, REPLY_TYPE_ERROR, &[0; 5]),
            (structured, 1, 77, &[0; 8]),
        ] {
            let stream = chunk(mode, flags, kind, payload);
            assert!(told(mode, &[&stream]).is_err(), "{mode:?} {kind} {payload:?}");
        }
        assert!(
            told(extended, &[&chunk(structured, 1, REPLY_TYPE_NONE, &[])[..], &[0; 12]]).is_err()
        );
    }

    #[test]
    fn a_payload_longer_than_any_server_needs_is_refused_before_it_comes() {
        let mut stream = chunk(ReplyMode::Extended, 1, REPLY_TYPE_ERROR, &[]);
        stream[24..].copy_from_slice(&(MAX_COLLECTED_BYTES + 1).to_be_bytes());
        assert!(told(ReplyMode::Extended, &[&stream]).is_err());
    }
}
