//! One request: a slot of whole cache lines with its transfer embedded.
//!
//! Invariant: while `pending` is not 0 or the state is `Worker`, nothing in the slot that the
//! kernel or a worker can see (`transfer`, `segments`, `buf`, `extents`) is touched.
//! Knows: io, iov, buffer. Known by: pool, engine. Kernel counterpart: struct iomap_dio with its
//! bio embedded (fs/iomap/direct-io.c).

use crate::buffer::Buf;
use crate::error::Range;
use crate::generic::Piece;
use crate::io::{Flags, Io, Op, Span, Transfer};
use crate::iov::Segment;

/// Where a request is on its way (C41).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// In the free list.
    Free,
    /// `submit` has not returned yet; a completion may already have run.
    Submitting,
    /// With the queue.
    Queued,
    /// With a worker.
    Worker,
    /// Refused; it is tried once more when the worker that has another such request is home.
    Parked,
    /// Ended; the caller has not been told yet.
    Done,
}

/// What a slot stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Role {
    /// A read served by one transfer of its own, which moves all of its bytes.
    Read,
    /// A write served by one transfer of its own, which moves all of its bytes.
    Write,
    /// A request served by pieces or by a worker.
    Whole,
    /// A piece of the request in slot `parent`.
    Piece,
}

/// Segments that fit into a slot; more spill into a vector that the slot keeps.
const INLINE_SEGMENTS: usize = 4;

/// The memory of a request.
pub(crate) struct Segments {
    inline: [Segment; INLINE_SEGMENTS],
    spill: Vec<Segment>,
    used: u16,
}

impl Segments {
    const NONE: Self =
        Self { inline: [Segment::EMPTY; INLINE_SEGMENTS], spill: Vec::new(), used: 0 };

    #[inline]
    pub(crate) fn set_one(&mut self, segment: Segment) {
        self.inline[0] = segment;
        self.used = 1;
    }

    /// Keeps a copy of `segments`, at most [`crate::iov::MAX_SEGMENTS`].
    #[inline]
    pub(crate) fn set(&mut self, segments: &[Segment]) {
        self.used = segments.len() as u16;
        match self.inline.get_mut(..segments.len()) {
            Some(inline) => inline.copy_from_slice(segments),
            None => {
                self.spill.clear();
                self.spill.extend_from_slice(segments);
            }
        }
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[Segment] {
        let used = usize::from(self.used);
        self.inline.get(..used).unwrap_or(&self.spill)
    }
}

/// A slot.
#[repr(C, align(64))]
pub(crate) struct Request {
    pub(crate) state: State,
    pub(crate) role: Role,
    /// Whether it holds its range of the device's locks.
    pub(crate) locked: bool,
    /// A piece came back with `EAGAIN` or short: a worker does the whole again.
    pub(crate) again: bool,
    /// It was parked before.
    pub(crate) parked: bool,
    /// Transfers in flight for it.
    pub(crate) pending: u16,
    /// The request that a piece belongs to.
    pub(crate) parent: u32,
    /// The slot after this one in the list of what is free or of what is done.
    pub(crate) next: u32,
    pub(crate) tag: u64,
    pub(crate) io: Io,
    /// What it came to: bytes, or a negative errno.
    pub(crate) result: i64,
    pub(crate) transfer: Transfer,
    pub(crate) buf: Option<Buf>,
    pub(crate) segments: Segments,
    /// Pieces not yet placed.
    pub(crate) pieces: Vec<Piece>,
    /// The piece this slot serves.
    pub(crate) piece: Piece,
    pub(crate) extents: Vec<Span>,
}

impl Request {
    pub(crate) fn new() -> Self {
        Self {
            state: State::Free,
            role: Role::Whole,
            locked: false,
            again: false,
            parked: false,
            pending: 0,
            parent: 0,
            next: 0,
            tag: 0,
            io: Io { op: Op::Flush, flags: Flags::NONE, range: Range::new(0, 0) },
            result: 0,
            transfer: Transfer::NONE,
            buf: None,
            segments: Segments::NONE,
            pieces: Vec::new(),
            piece: Piece::NONE,
            extents: Vec::new(),
        }
    }

    /// Makes a slot fresh from the pool that of a request or a piece.
    #[inline]
    pub(crate) fn begin(&mut self, role: Role, state: State, io: Io, buf: Option<Buf>, tag: u64) {
        debug_assert!(self.state == State::Free && self.pending == 0 && self.buf.is_none());
        if buf.is_some() {
            // A free slot has no buffer: there is nothing to drop.
            std::mem::forget(std::mem::replace(&mut self.buf, buf));
        }
        self.state = state;
        self.role = role;
        self.locked = false;
        self.again = false;
        self.parked = false;
        self.tag = tag;
        self.io = io;
    }

    /// The buffer leaves the slot.
    #[inline]
    pub(crate) fn take_buf(&mut self) -> Option<Buf> {
        // Most requests of the raw face have none: nothing is moved then.
        if self.buf.is_some() { self.buf.take() } else { None }
    }

    /// The first negative outcome stays (C22).
    pub(crate) fn fail(&mut self, errno: i64) {
        debug_assert!(errno < 0);
        if self.result >= 0 {
            self.result = errno;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_whole_cache_lines() {
        assert_eq!(align_of::<Request>(), 64);
        assert_eq!(size_of::<Request>() % 64, 0);
    }

    #[test]
    fn five_segments_spill_and_four_do_not() {
        let mut segments = Segments::NONE;
        let list = [Segment { base: std::ptr::null_mut(), len: 9 }; 5];
        segments.set(&list[..4]);
        assert!(segments.spill.is_empty() && segments.as_slice() == &list[..4]);
        segments.set(&list);
        assert_eq!(segments.as_slice(), &list);
    }
}
