//! Long writes beside other connections: split into fragments, each submitted as soon as it has been
//! received.
//!
//! A write occupies a processor while the kernel copies, compresses or checks it: a millisecond for
//! a mebibyte on some devices. Between two fragments the other connections are serviced.
//!
//! Invariant: a split write is answered once, when all of its bytes have been received and all of
//! its fragments have completed. After a fragment has failed, no further one begins; the rest is
//! received and dropped. A write that must be durable before it is answered (C28) is not split, so
//! that it costs one flush.

use nowait::{ByteRange, Flags, Op, Request};

use crate::nbd::reply::builder::RequestContext;
use crate::nbd::wire::RequestHeader;

/// Which writes are split.
#[derive(Clone, Copy)]
pub(crate) struct SplitPolicy {
    /// Bytes of a fragment; only a longer write is split.
    pub(crate) fragment_bytes: u64,
    /// In strict mode (alignment is enforced) a write is refused whole.
    pub(crate) strict: bool,
}

impl SplitPolicy {
    /// Whether to split `io`, which is inside the export, beside other members if `is_alone` is
    /// false.
    #[inline]
    pub(crate) fn applies(self, io: Request, is_alone: bool) -> bool {
        io.op == Op::Write
            && io.range.len > self.fragment_bytes
            && !io.flags.contains(Flags::DSYNC)
            && !is_alone
            && !self.strict
    }
}

/// A split write, until it is answered.
pub(crate) struct SplitWrite {
    pub(crate) request: RequestContext,
    /// Bytes that are neither completed nor dropped.
    remaining: u64,
    /// The errno of the first failed fragment, or 0.
    errno: i32,
}

impl SplitWrite {
    /// A split write with the range of `io`.
    pub(crate) fn new(request: RequestContext, io: Request) -> Self {
        Self { request, remaining: io.range.len, errno: 0 }
    }

    /// Records that a fragment of `bytes` completed with `errno` (0: success). Returns whether it
    /// is the first failure.
    pub(crate) fn on_fragment_done(&mut self, bytes: u64, errno: i32) -> bool {
        self.remaining -= bytes;
        let failed = errno != 0 && self.errno == 0;
        if failed {
            self.errno = errno;
        }
        failed
    }

    /// Records that `bytes` are dropped instead of written.
    pub(crate) fn drop_bytes(&mut self, bytes: u64) {
        self.remaining -= bytes;
    }

    /// The errno of the first failed fragment, if one has failed.
    pub(crate) fn failure(&self) -> Option<i32> {
        (self.errno != 0).then_some(self.errno)
    }

    /// The errno of the write (0: success), once no bytes remain.
    pub(crate) fn result(&self) -> Option<i32> {
        (self.remaining == 0).then_some(self.errno)
    }
}

/// A split write of which some fragments have been written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitRest {
    /// The header of the whole write.
    pub(crate) header: RequestHeader,
    /// The rest; its payload follows as input.
    pub(crate) range: ByteRange,
}

/// A split write that is still being received.
pub(crate) struct IncomingSplitWrite {
    /// Its key.
    pub(crate) split: usize,
    /// The range for which no fragment has begun; may be empty.
    pub(crate) rest: Request,
    /// Bytes of a fragment; each fragment but the last one ends at a multiple of it.
    pub(crate) fragment_bytes: u64,
}

impl IncomingSplitWrite {
    /// The next fragment.
    pub(crate) fn next(&self) -> Request {
        let ByteRange { pos, len } = self.rest.range;
        let bytes = len.min(self.fragment_bytes - pos % self.fragment_bytes);
        Request { range: ByteRange::new(pos, bytes), ..self.rest }
    }

    /// Records that the next fragment has begun.
    pub(crate) fn begin_next(&mut self) {
        let (fragment, all) = (self.next().range.len, self.rest.range);
        self.rest.range = ByteRange::new(all.pos + fragment, all.len - fragment);
    }

    /// Whether another fragment is to begin.
    pub(crate) fn has_more(&self) -> bool {
        self.rest.range.len > 0
    }

    /// Cancels the remaining fragments. Returns their bytes.
    pub(crate) fn cancel(&mut self) -> u64 {
        std::mem::take(&mut self.rest.range.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::meta_context::Contexts;

    const FRAGMENT_BYTES: u64 = 8192;

    fn incoming(rest: Request) -> IncomingSplitWrite {
        IncomingSplitWrite { split: 0, rest, fragment_bytes: FRAGMENT_BYTES }
    }

    fn write(pos: u64, len: u64) -> Request {
        Request { op: Op::Write, flags: Flags::ALL_OR_ERROR, range: ByteRange::new(pos, len) }
    }

    fn split(len: u64) -> SplitWrite {
        let header = RequestHeader { flags: 0, command: 1, cookie: 0, offset: 0, length: len };
        SplitWrite::new(
            RequestContext { header, contexts: Contexts::NONE, budget_used: 0 },
            write(0, len),
        )
    }

    #[test]
    fn fragments_follow_each_other_and_end_at_multiples_of_their_length() {
        for (pos, len) in
            [(0, FRAGMENT_BYTES + 1), (FRAGMENT_BYTES - 1, 3 * FRAGMENT_BYTES), (513, 777)]
        {
            let mut incoming = incoming(write(pos, len));
            let mut at = pos;
            while incoming.has_more() {
                let fragment = incoming.next();
                assert_eq!((fragment.op, fragment.flags), (Op::Write, Flags::ALL_OR_ERROR));
                let end = (at / FRAGMENT_BYTES + 1) * FRAGMENT_BYTES;
                assert_eq!(fragment.range, ByteRange::new(at, end.min(pos + len) - at));
                at = fragment.range.end();
                incoming.begin_next();
            }
            assert_eq!(at, pos + len);
        }
    }

    #[test]
    fn a_cancelled_write_returns_the_bytes_that_were_not_begun() {
        let mut incoming = incoming(write(0, 2 * FRAGMENT_BYTES + 5));
        incoming.begin_next();
        assert_eq!(incoming.cancel(), FRAGMENT_BYTES + 5);
        assert!(!incoming.has_more());
    }

    #[test]
    fn the_result_is_the_first_failure_and_is_known_with_the_last_byte() {
        let mut split = split(100);
        assert!(!split.on_fragment_done(10, 0));
        assert!(split.on_fragment_done(20, libc::EIO));
        assert!(!split.on_fragment_done(30, libc::ENOSPC));
        assert!(!split.on_fragment_done(5, 0));
        split.drop_bytes(34);
        assert_eq!(split.result(), None);
        split.drop_bytes(1);
        assert_eq!(split.result(), Some(libc::EIO));
    }

    #[test]
    fn a_write_whose_fragments_all_succeed_succeeds() {
        let mut split = split(30);
        assert!(!split.on_fragment_done(20, 0));
        assert_eq!(split.result(), None);
        assert!(!split.on_fragment_done(10, 0));
        assert_eq!(split.result(), Some(0));
    }
}
