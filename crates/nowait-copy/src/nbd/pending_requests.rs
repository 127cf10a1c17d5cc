//! The unanswered requests of an endpoint, and what the replies of the server do to them.
//!
//! Invariant: a request is answered once and only while it is pending; a read is complete when as
//! many bytes arrived as were requested, none of them outside its range.

use nowait::{ByteRange, ExtentStatus, IoBuffer};
use nowait_nbd as nbd;
use nowait_nbd::Extents;
use nowait_nbd::client::{BROKEN, Outcome, Replies, SplitRequest, UNASKED, error_words};
use slab::Slab;

/// A request that was accepted and has not completed.
pub(crate) struct Pending {
    pub(crate) tag: u64,
    pub(crate) range: ByteRange,
    pub(crate) memory: Option<IoBuffer>,
    pub(crate) extents: Vec<ExtentStatus>,
    /// The request as it is on the wire, in parts.
    pub(crate) request: SplitRequest,
    /// The index of its connection.
    pub(crate) connection: usize,
    /// Whether EIO completes the request as unreadable instead of failing the connection.
    pub(crate) may_be_unreadable: bool,
    /// Whether the server answered EIO to the request or a part of it.
    pub(crate) unreadable: bool,
}

impl Pending {
    /// An unanswered request that was sent in one part.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn whole(command: u16, range: ByteRange) -> Self {
        let reads = command == nbd::CMD_READ;
        Self {
            tag: 0,
            range,
            memory: reads.then(|| IoBuffer::zeroed(range.len as usize).ok()).flatten(),
            extents: Vec::new(),
            request: SplitRequest::new(command, range.pos, range.len, (1, range.len)),
            connection: 0,
            may_be_unreadable: false,
            unreadable: false,
        }
    }
}

/// The meaning of the flags of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatusKind {
    /// Where the disk reads as zeros (`base:allocation`).
    Zeros,
    /// Where it is unchanged (`qemu:dirty-bitmap:NAME`, in which bit 0 is set for what is dirty).
    Clean,
}

impl StatusKind {
    /// Whether an extent with these `flags` reads as zeros, or is clean.
    fn is_hole(self, flags: u64) -> bool {
        match self {
            Self::Zeros => flags & u64::from(nbd::STATE_ZERO) != 0,
            Self::Clean => flags & 1 == 0,
        }
    }
}

/// The pending requests of all connections, as one connection answers them.
pub(crate) struct PendingReplies<'a> {
    pub(crate) pending: &'a mut Slab<Pending>,
    /// The index of the connection.
    pub(crate) connection: usize,
    /// The id of its block status context.
    pub(crate) context: Option<u32>,
    /// The meaning of the flags in that context.
    pub(crate) kind: StatusKind,
    /// The indices of the requests that have completed.
    pub(crate) completed: &'a mut Vec<usize>,
}

impl PendingReplies<'_> {
    /// The pending request of `cookie`.
    fn request(&mut self, cookie: u64) -> Outcome<&mut Pending> {
        let own = self.pending.get_mut(SplitRequest::index_of(cookie));
        let own = own.filter(|request| request.connection == self.connection);
        own.ok_or_else(|| UNASKED.into())
    }
}

impl Replies for PendingReplies<'_> {
    fn simple(&mut self, cookie: u64, error: u32) -> Outcome<Option<(u64, u64)>> {
        if error != 0 {
            return self.error(cookie, error, "").map(|()| None);
        }
        self.request(cookie)?.request.simple(cookie)
    }

    fn data(&mut self, cookie: u64, offset: u64, length: u64) -> Outcome<()> {
        self.request(cookie)?.request.content(cookie, offset, length)
    }

    fn hole(&mut self, cookie: u64, offset: u64, length: u64) -> Outcome<()> {
        self.data(cookie, offset, length)?;
        let memory = self.memory(cookie, offset).and_then(|rest| rest.get_mut(..length as usize));
        memory.ok_or(BROKEN)?.fill(0);
        Ok(())
    }

    fn status(&mut self, cookie: u64, context: u32, extents: Extents<'_>) -> Outcome<()> {
        let (own, kind) = (self.context == Some(context), self.kind);
        let pending = self.request(cookie)?;
        if !own {
            return pending.request.of_status(cookie);
        }
        let taken = pending.request.status(cookie, extents)?.into_iter();
        let extent = |(len, flags)| ExtentStatus::top(len, kind.is_hole(flags));
        pending.extents = taken.map(extent).collect();
        Ok(())
    }

    fn error(&mut self, cookie: u64, error: u32, words: &str) -> Outcome<()> {
        let pending = self.request(cookie)?;
        pending.request.message(cookie)?;
        failed(pending, error, words)
    }

    fn done(&mut self, cookie: u64) -> Outcome<()> {
        let pending = self.request(cookie)?;
        if pending.request.done(cookie, pending.unreadable)? {
            self.completed.push(SplitRequest::index_of(cookie));
        }
        Ok(())
    }

    fn memory(&mut self, cookie: u64, offset: u64) -> Option<&mut [u8]> {
        let pending = self.pending.get_mut(SplitRequest::index_of(cookie))?;
        let at = usize::try_from(offset.checked_sub(pending.range.pos)?).ok()?;
        pending.memory.as_mut()?.get_mut(at..)
    }
}

/// The server answered `request` with `error`: marks the request unreadable if that is allowed,
/// else fails the connection.
fn failed(request: &mut Pending, error: u32, words: &str) -> Outcome<()> {
    if request.may_be_unreadable && error == nbd::EIO {
        request.unreadable = true;
        return Ok(());
    }
    Err(failure(request, error, words))
}

fn failure(request: &Pending, error: u32, words: &str) -> String {
    let doing = match request.request.command() {
        nbd::CMD_READ => "read",
        nbd::CMD_WRITE => "write",
        nbd::CMD_WRITE_ZEROES => "make zero",
        nbd::CMD_BLOCK_STATUS => "find the holes",
        _ => return format!("cannot flush: {}", error_words(error)),
    };
    let (at, reason) = (request.range.pos, error_words(error));
    let words = if words.is_empty() { String::new() } else { format!(" ({words})") };
    format!("cannot {doing} at byte {at}: {reason}{words}")
}

#[cfg(test)]
mod tests {
    use nowait_nbd::client::ReplyParser;
    use nowait_nbd::{ReplyHeader, ReplyMode};

    use super::*;

    const CONTEXT: u32 = 7;
    const AT: u64 = 1 << 33;

    fn pending(command: u16, len: u64) -> Pending {
        Pending::whole(command, ByteRange::new(AT, len))
    }

    fn chunk(done: bool, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
        let (flags, length) = (u16::from(done), payload.len() as u64);
        let header = ReplyHeader::Chunk { flags, kind, cookie, length };
        [header.encode(ReplyMode::Structured, AT).as_slice(), payload].concat()
    }

    fn simple(error: u32, cookie: u64) -> Vec<u8> {
        ReplyHeader::Simple { error, cookie }.encode(ReplyMode::Structured, AT).as_slice().to_vec()
    }

    fn data(done: bool, cookie: u64, offset: u64, bytes: &[u8]) -> Vec<u8> {
        let payload = [&offset.to_be_bytes(), bytes].concat();
        chunk(done, nbd::REPLY_TYPE_OFFSET_DATA, cookie, &payload)
    }

    fn hole(done: bool, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
        let payload = [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat();
        chunk(done, nbd::REPLY_TYPE_OFFSET_HOLE, cookie, &payload)
    }

    fn status(cookie: u64, context: u32, extents: &[(u32, u32)]) -> Vec<u8> {
        let mut payload = context.to_be_bytes().to_vec();
        for (len, flags) in extents {
            payload.extend(len.to_be_bytes());
            payload.extend(flags.to_be_bytes());
        }
        chunk(true, nbd::REPLY_TYPE_BLOCK_STATUS, cookie, &payload)
    }

    /// Receives `pieces`, and returns the requests that they complete.
    fn received(pieces: &[&[u8]], pending: &mut Slab<Pending>) -> Outcome<Vec<usize>> {
        received_of(StatusKind::Zeros, pieces, pending)
    }

    fn received_of(
        kind: StatusKind,
        pieces: &[&[u8]],
        pending: &mut Slab<Pending>,
    ) -> Outcome<Vec<usize>> {
        let mut parser = ReplyParser::new(ReplyMode::Structured);
        let mut completed = Vec::new();
        let (context, all) = (Some(CONTEXT), &mut completed);
        let mut replies = PendingReplies { pending, connection: 0, context, kind, completed: all };
        pieces.iter().try_for_each(|piece| parser.feed(piece, &mut replies))?;
        Ok(completed)
    }

    #[test]
    fn each_reply_is_matched_to_its_request_and_a_hole_is_zeros() {
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
        let mut table = Slab::new();
        let asked = [nbd::CMD_READ, nbd::CMD_WRITE, nbd::CMD_BLOCK_STATUS, nbd::CMD_READ];
        for (command, len) in asked.into_iter().zip([8, 8, 20, 3]) {
            table.insert(pending(command, len));
        }
        table[0].memory.as_mut().unwrap().fill(0xee);
        assert_eq!(received(&[&stream], &mut table), Ok(vec![1, 2, 0, 3]));
        let bytes = |index: usize| table[index].memory.as_deref().unwrap();
        assert_eq!((bytes(0), bytes(3)), (&[1, 2, 0, 0, 0, 0, 3, 4][..], &[9, 8, 7][..]));
        let extents = [ExtentStatus::top(5, true), ExtentStatus::top(15, false)];
        assert_eq!(table[2].extents, extents);
    }

    #[test]
    fn a_bitmap_tells_what_is_clean_by_its_first_bit() {
        let mut table = Slab::new();
        table.insert(pending(nbd::CMD_BLOCK_STATUS, 20));
        let reply = status(0, CONTEXT, &[(5, 0), (6, 1), (4, 2), (100, 3)]);
        assert_eq!(received_of(StatusKind::Clean, &[&reply], &mut table), Ok(vec![0]));
        let clean = table[0].extents.iter().map(|extent| (extent.len, extent.hole));
        let wanted = [(5, true), (6, false), (4, true), (5, false)];
        assert_eq!(clean.collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn the_parts_of_a_read_are_answered_once_each_and_in_any_order() {
        let two = || {
            let mut table = Slab::new();
            let request = SplitRequest::new(nbd::CMD_READ, AT, 8, (2, 6));
            table.insert(Pending { request, ..pending(nbd::CMD_READ, 8) });
            table
        };
        let (first, second) = (SplitRequest::cookie(0, 0), SplitRequest::cookie(0, 1));
        let simple_reply = |cookie, bytes: &[u8]| [&simple(0, cookie), bytes].concat();
        for answers in [
            [simple_reply(second, &[7, 8]), simple_reply(first, &[1, 2, 3, 4, 5, 6])],
            [data(true, first, AT, &[1, 2, 3, 4, 5, 6]), data(true, second, AT + 6, &[7, 8])],
        ] {
            let mut table = two();
            assert_eq!(received(&[&answers[0]], &mut table), Ok(vec![]));
            assert_eq!(received(&[&answers[1]], &mut table), Ok(vec![0]));
            assert_eq!(table[0].memory.as_deref().unwrap(), [1, 2, 3, 4, 5, 6, 7, 8]);
        }
        for wrong in [
            [simple_reply(second, &[7, 8]), simple_reply(second, &[7, 8])].concat(),
            simple_reply(SplitRequest::cookie(0, 2), &[0; 6]),
            simple_reply(SplitRequest::cookie(0, u32::MAX as usize), &[0; 6]),
            data(true, second, AT, &[1, 2]),
            data(true, first, AT + 5, &[6, 7]),
        ] {
            assert!(received(&[&wrong], &mut two()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn an_invalid_reply_is_an_error() {
        let read = nbd::CMD_READ;
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
            (read, chunk(true, nbd::REPLY_TYPE_NONE, 0, &[])),
            (read, chunk(false, nbd::REPLY_TYPE_NONE, 0, &[])),
            (read, chunk(true, nbd::REPLY_TYPE_OFFSET_DATA, 0, &[0; 4])),
            (read, status(0, CONTEXT, &[(8, 0)])),
            (read, chunk(true, 77, 0, &[0; 8])),
            (nbd::CMD_WRITE, data(true, 0, AT, &[0; 8])),
            (nbd::CMD_BLOCK_STATUS, simple(0, 0)),
            (nbd::CMD_BLOCK_STATUS, status(0, CONTEXT, &[])),
            (nbd::CMD_BLOCK_STATUS, status(0, CONTEXT, &[(0, 0)])),
            (nbd::CMD_BLOCK_STATUS, status(0, CONTEXT + 1, &[(8, 0)])),
            (nbd::CMD_BLOCK_STATUS, chunk(true, nbd::REPLY_TYPE_NONE, 0, &[])),
            (read, chunk(true, nbd::REPLY_TYPE_ERROR_BIT, 0, &[0, 0, 0, 5])),
        ] {
            let mut table = Slab::new();
            table.insert(pending(command, 8));
            assert!(received(&[&stream], &mut table).is_err(), "{command}: {stream:?}");
        }
    }

    #[test]
    fn an_answer_on_another_connection_is_an_error() {
        let mut table = Slab::new();
        table.insert(Pending { connection: 1, ..pending(nbd::CMD_WRITE, 8) });
        assert!(received(&[&simple(0, 0)], &mut table).is_err());
    }

    #[test]
    fn a_failure_is_reported_with_its_offset_and_the_servers_words() {
        let mut table = Slab::new();
        table.insert(pending(nbd::CMD_WRITE, 8));
        let payload = [&28u32.to_be_bytes()[..], &4u16.to_be_bytes(), b"full"].concat();
        let reply = chunk(true, nbd::REPLY_TYPE_ERROR_BIT + 1, 0, &payload);
        let error = received(&[&reply], &mut table).unwrap_err();
        assert_eq!(error, format!("cannot write at byte {AT}: no space left (full)"));
        let error = received(&[&simple(1, 0)], &mut table).unwrap_err();
        assert_eq!(error, format!("cannot write at byte {AT}: operation not permitted"));
    }
}
