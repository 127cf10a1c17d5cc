//! A long write that was cut into parts: what is still to come of it, and what its parts came to.
//!
//! Invariant: it is answered once, when all of its bytes have come and all of its parts have ended;
//! when a part has failed, no further one is begun, and the rest is received and dropped.
//! Knows: respond. Known by: conn, turn, parse, parts.

use nowait::{Io, Range};

use super::respond::Request;

/// Bytes of a part, and a multiple of which each part but the last one ends at.
#[cfg(not(feature = "sim"))]
const PART_BYTES: u64 = 256 << 10;
/// The same in simulations, whose requests are short.
#[cfg(feature = "sim")]
const PART_BYTES: u64 = 8192;

/// Whether a write of `bytes` comes to more than one part.
#[inline]
pub(crate) fn is_long(bytes: u64) -> bool {
    bytes > PART_BYTES
}

/// A write that was cut, until it is answered.
pub(crate) struct Cut {
    pub(crate) request: Request,
    /// Bytes that have not ended.
    left: u64,
    /// What the first part that failed came to, or 0.
    errno: i32,
}

impl Cut {
    /// A write, of which `io` tells where it goes.
    pub(crate) fn new(request: Request, io: Io) -> Self {
        Self { request, left: io.range.len, errno: 0 }
    }

    /// A part of `bytes` has come to `errno` (0: success). Returns whether it is the first that has
    /// failed.
    pub(crate) fn part_ended(&mut self, bytes: u64, errno: i32) -> bool {
        self.left -= bytes;
        let failed = errno != 0 && self.errno == 0;
        if failed {
            self.errno = errno;
        }
        failed
    }

    /// `bytes` of it are not written.
    pub(crate) fn dropped(&mut self, bytes: u64) {
        self.left -= bytes;
    }

    /// What it came to (0: success), once all of it has ended.
    pub(crate) fn verdict(&self) -> Option<i32> {
        (self.left == 0).then_some(self.errno)
    }
}

/// A write that was cut and is still being received.
pub(crate) struct Coming {
    /// Its number.
    pub(crate) cut: usize,
    /// What no part of it was begun for, which may be nothing.
    pub(crate) rest: Io,
}

impl Coming {
    /// Where the next part goes.
    pub(crate) fn next(&self) -> Io {
        let Range { pos, len } = self.rest.range;
        let bytes = len.min(PART_BYTES - pos % PART_BYTES);
        Io { range: Range::new(pos, bytes), ..self.rest }
    }

    /// The next part has begun.
    pub(crate) fn begun(&mut self) {
        let (part, all) = (self.next().range.len, self.rest.range);
        self.rest.range = Range::new(all.pos + part, all.len - part);
    }

    /// Whether another part of it is to be begun.
    pub(crate) fn has_more(&self) -> bool {
        self.rest.range.len > 0
    }

    /// No further part is begun. Returns of how many bytes.
    pub(crate) fn end(&mut self) -> u64 {
        std::mem::take(&mut self.rest.range.len)
    }
}

#[cfg(test)]
mod tests {
    use nowait::{Flags, Op};

    use super::super::context::Contexts;
    use super::super::wire::RequestHeader;
    use super::*;

    fn write(pos: u64, len: u64) -> Io {
        Io { op: Op::Write, flags: Flags::WHOLE, range: Range::new(pos, len) }
    }

    fn cut(len: u64) -> Cut {
        let header = RequestHeader { flags: 0, command: 1, cookie: 0, offset: 0, length: len };
        Cut::new(Request { header, contexts: Contexts::NONE, held: 0 }, write(0, len))
    }

    #[test]
    fn a_write_of_one_part_is_not_long() {
        assert!(!is_long(PART_BYTES) && is_long(PART_BYTES + 1));
    }

    #[test]
    fn parts_follow_each_other_and_end_at_multiples_of_their_length() {
        for (pos, len) in [(0, PART_BYTES + 1), (PART_BYTES - 1, 3 * PART_BYTES), (513, 777)] {
            let mut coming = Coming { cut: 0, rest: write(pos, len) };
            let mut at = pos;
            while coming.has_more() {
                let part = coming.next();
                assert_eq!((part.op, part.flags), (Op::Write, Flags::WHOLE));
                let end = (at / PART_BYTES + 1) * PART_BYTES;
                assert_eq!(part.range, Range::new(at, end.min(pos + len) - at));
                at = part.range.end();
                coming.begun();
            }
            assert_eq!(at, pos + len);
        }
    }

    #[test]
    fn a_write_that_has_come_to_nothing_more_leaves_what_was_not_begun() {
        let mut coming = Coming { cut: 0, rest: write(0, 2 * PART_BYTES + 5) };
        coming.begun();
        assert_eq!(coming.end(), PART_BYTES + 5);
        assert!(!coming.has_more());
    }

    #[test]
    fn the_verdict_is_that_of_the_first_failure_and_comes_with_the_last_byte() {
        let mut cut = cut(100);
        assert!(!cut.part_ended(10, 0));
        assert!(cut.part_ended(20, libc::EIO));
        assert!(!cut.part_ended(30, libc::ENOSPC));
        assert!(!cut.part_ended(5, 0));
        cut.dropped(34);
        assert_eq!(cut.verdict(), None);
        cut.dropped(1);
        assert_eq!(cut.verdict(), Some(libc::EIO));
    }

    #[test]
    fn a_write_all_of_whose_parts_are_well_is_well() {
        let mut cut = cut(30);
        assert!(!cut.part_ended(20, 0));
        assert_eq!(cut.verdict(), None);
        assert!(!cut.part_ended(10, 0));
        assert_eq!(cut.verdict(), Some(0));
    }
}
