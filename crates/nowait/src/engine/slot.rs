//! The slot of one request: whole cache lines, with all that its transfer needs.
//!
//! Invariant: while a transfer of the request is in flight (`pending` counts its fragments') or the
//! state is `Worker`, the fields that the kernel or a worker can see (`place`, `segments`, `buf`,
//! `extents`) are not changed.

use crate::engine::fragment::Fragment;
use crate::memory::buffer_pool::PooledBuffer;
use crate::types::byte_range::ByteRange;
use crate::types::iovec::IoSegment;
use crate::types::request::{ExtentStatus, Flags, Op, Request};
use crate::types::token::Target;
use crate::types::transfer::{Outcome, UNREGISTERED};

/// The state of a request (C41).
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
    /// A refused overwrite; it is submitted once more when the probe request has ended.
    Deferred,
    /// Ended; `next` has not given it back yet.
    Done,
}

/// Whether a request is to end before all of it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stop {
    No,
    /// When its time is over, which [`Deadlines`](crate::engine::deadlines::Deadlines) has.
    Later,
    /// It was cancelled.
    Cancelled,
    /// Its time is over.
    TimedOut,
}

impl Stop {
    /// The errno of a request that is to end now.
    pub(crate) const fn errno(self) -> Option<i32> {
        match self {
            Self::No | Self::Later => None,
            Self::Cancelled => Some(libc::ECANCELED),
            Self::TimedOut => Some(libc::ETIMEDOUT),
        }
    }
}

/// The role of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Role {
    /// A read served by one transfer of its own, which moves all of its bytes.
    Read,
    /// A write served by one transfer of its own, which moves all of its bytes.
    Write,
    /// A request served by fragments or by a worker.
    Split,
    /// A fragment of the request in slot `parent`.
    Fragment,
    /// A read or write whose transfer is also that of the requests in the slots behind it.
    Merged,
}

/// Segments that fit into a slot; a longer list spills into a vector that the slot keeps.
const INLINE_SEGMENTS: usize = 4;

/// The segments of a request.
pub(crate) struct SlotSegments {
    inline: [IoSegment; INLINE_SEGMENTS],
    spill: Vec<IoSegment>,
    used: u16,
}

impl SlotSegments {
    const NONE: Self =
        Self { inline: [IoSegment::EMPTY; INLINE_SEGMENTS], spill: Vec::new(), used: 0 };

    #[inline]
    pub(crate) fn set_one(&mut self, segment: IoSegment) {
        self.inline[0] = segment;
        self.used = 1;
    }

    /// Keeps a copy of `segments`, at most [`crate::types::iovec::MAX_SEGMENTS`].
    #[inline]
    pub(crate) fn set(&mut self, segments: &[IoSegment]) {
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
    pub(crate) fn as_slice(&self) -> &[IoSegment] {
        let used = usize::from(self.used);
        self.inline.get(..used).unwrap_or(&self.spill)
    }
}

/// Where the only transfer of a request moves its bytes; the request and its target say the rest.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    /// Like [`crate::Transfer::base`].
    pub(crate) base: *mut u8,
    /// First byte in the file.
    pub(crate) pos: u64,
    /// Like [`crate::Transfer::buffer`].
    pub(crate) buffer: u16,
    /// Like [`crate::Transfer::segments`].
    pub(crate) segments: u16,
}

impl Place {
    const NONE: Self =
        Self { base: std::ptr::null_mut(), pos: 0, segments: 0, buffer: UNREGISTERED };
}

/// The `RequestSlot::result` of a slot whose transfer does not end its request immediately: no outcome
/// is that great.
const NEVER: i64 = i64::MAX;
/// Set in the `RequestSlot::result` of a write with one transfer of its own: no outcome is as great as
/// the sum.
const FULL_WRITE: i64 = 1 << 62;

/// A slot: one request, or one fragment of a request.
#[repr(C, align(64))]
pub(crate) struct RequestSlot {
    pub(crate) role: Role,
    /// Whether it holds the range lock on its range.
    pub(crate) locked: bool,
    /// A transfer was refused or short, or could not be submitted: a worker does the whole request
    /// again.
    pub(crate) again: bool,
    /// It was deferred before.
    pub(crate) deferred: bool,
    /// Whether it is to end early.
    pub(crate) stop: Stop,
    /// Only in debug builds.
    pub(crate) state: State,
    /// Fragments in flight for it.
    pub(crate) pending: u16,
    /// The slot of the request that a fragment belongs to; of a merged transfer its list of
    /// segments.
    pub(crate) parent: u32,
    /// The number of requests of a merged transfer.
    pub(crate) merged: u32,
    /// The slot after this one in the list of free slots, of done ones, or of those of a merged
    /// transfer.
    pub(crate) next: u32,
    /// Its device, and the file of its only transfer.
    pub(crate) target: Target,
    pub(crate) tag: u64,
    pub(crate) io: Request,
    /// Bytes done, or a negative errno; while the slot has a transfer in flight, the outcome with
    /// which nothing is left to do for the request, that of a full write with `FULL_WRITE`, or `NEVER`.
    pub(crate) result: i64,
    /// The place of a request with one transfer of its own.
    pub(crate) place: Place,
    pub(crate) buf: Option<PooledBuffer>,
    pub(crate) segments: SlotSegments,
    /// Fragments not yet submitted, the last one first.
    pub(crate) fragments: Vec<Fragment>,
    /// The fragment that this slot serves.
    pub(crate) fragment: Fragment,
    /// The result of a status request.
    pub(crate) extents: Vec<ExtentStatus>,
}

impl RequestSlot {
    pub(crate) fn new() -> Self {
        Self {
            state: State::Free,
            role: Role::Split,
            locked: false,
            again: false,
            deferred: false,
            stop: Stop::No,
            pending: 0,
            parent: 0,
            merged: 0,
            next: 0,
            target: Target::new(0, 0),
            tag: 0,
            io: Request { op: Op::Flush, flags: Flags::NONE, range: ByteRange::new(0, 0) },
            result: 0,
            place: Place::NONE,
            buf: None,
            segments: SlotSegments::NONE,
            fragments: Vec::new(),
            fragment: Fragment::NONE,
            extents: Vec::new(),
        }
    }

    /// Sets up a slot from the pool for a request or a fragment.
    #[inline]
    pub(crate) fn begin(
        &mut self,
        role: Role,
        state: State,
        target: Target,
        io: Request,
        buf: Option<PooledBuffer>,
        tag: u64,
    ) {
        debug_assert!(self.state == State::Free && self.pending == 0 && self.buf.is_none());
        if buf.is_some() {
            // A free slot has no buffer, so there is nothing to drop.
            std::mem::forget(std::mem::replace(&mut self.buf, buf));
        }
        self.set_state(state);
        self.locked = false;
        self.again = false;
        self.deferred = false;
        self.stop = Stop::No;
        self.target = target;
        self.tag = tag;
        self.io = io;
        self.set_role(role);
    }

    /// Sets the role and the outcome that ends the request immediately: a read is done when all of its
    /// bytes came.
    #[inline(always)]
    pub(crate) fn set_role(&mut self, role: Role) {
        self.role = role;
        self.result = match role {
            Role::Read => self.io.range.len as i64,
            Role::Write => self.io.range.len as i64 | FULL_WRITE,
            Role::Fragment | Role::Merged => NEVER,
            Role::Split => 0,
        };
    }

    /// Whether `outcome` is that of a write by one transfer of its own which has moved all of its bytes.
    #[inline(always)]
    pub(crate) fn is_full_write(&self, outcome: Outcome) -> bool {
        self.result == i64::from(outcome) | FULL_WRITE
    }

    /// Records who holds the slot. The state decides nothing, it is only asserted.
    #[inline(always)]
    pub(crate) fn set_state(&mut self, state: State) {
        if cfg!(debug_assertions) {
            self.state = state;
        }
    }

    /// Takes the buffer out of the slot.
    #[inline]
    pub(crate) fn take_buf(&mut self) -> Option<PooledBuffer> {
        // Most requests of the raw API have no buffer; then nothing is moved.
        if self.buf.is_some() { self.buf.take() } else { None }
    }

    /// The index of its device in the table of the engine.
    #[inline(always)]
    pub(crate) fn device(&self) -> u32 {
        self.target.device()
    }

    /// Records a negative errno; the first one stays (C22).
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
        assert_eq!(align_of::<RequestSlot>(), 64);
        assert_eq!(size_of::<RequestSlot>() % 64, 0);
    }

    #[test]
    fn only_an_outcome_of_all_bytes_ends_a_read_or_a_write_with_its_own_transfer() {
        let outcomes = [i32::MIN, -4096, -libc::EAGAIN, -1, 0, 1, 4095, 4096, 4097, i32::MAX];
        let roles = [Role::Read, Role::Write, Role::Split, Role::Fragment, Role::Merged];
        for (role, outcome) in roles.into_iter().flat_map(|role| outcomes.map(|it| (role, it))) {
            let mut slot = RequestSlot::new();
            slot.io.range.len = 4096;
            slot.set_role(role);
            assert_eq!(slot.is_full_write(outcome), role == Role::Write && outcome == 4096);
            // A slot of a request that is split has no transfer.
            let ends = slot.result == i64::from(outcome);
            assert!(role == Role::Split || ends == (role == Role::Read && outcome == 4096));
        }
    }

    #[test]
    fn five_segments_spill_and_four_do_not() {
        let mut segments = SlotSegments::NONE;
        let list = [IoSegment { base: std::ptr::null_mut(), len: 9 }; 5];
        segments.set(&list[..4]);
        assert!(segments.spill.is_empty() && segments.as_slice() == &list[..4]);
        segments.set(&list);
        assert_eq!(segments.as_slice(), &list);
    }
}
