//! Slots with a home: every request lives in a slab that one engine owns.
//!
//! Invariant: a slot is in exactly one place: the free list, the queue, a worker, or the list of
//! what is done; `Request::state` says which and is asserted at every move.
//! Knows: request, breaks. Known by: engine. Kernel counterpart: bio_alloc_percpu_cache (block/bio.c).

use std::ops::{Index, IndexMut};

use crate::breaks::{self, Break};
use crate::request::{Request, State};

/// How often the pool was asked, and what it answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Slots handed out without the allocator.
    pub hit: u64,
    /// Slots handed out that had to be allocated: the first use of each, or all with the pool off.
    pub allocated: u64,
    /// Times that no slot was left.
    pub empty: u64,
}

/// The slab of one engine, last in, first out.
pub(crate) struct Pool {
    #[expect(clippy::vec_box, reason = "the kernel and the workers know where a slot is")]
    slots: Vec<Box<Request>>,
    /// The first free slot, `NONE` at the end; `Request::next` leads on.
    free: u32,
    /// Free slots whose memory is not used again: all of them with the switch `pool` off.
    spent: Vec<u32>,
    /// The slot that was done first and the one that was done last; `Request::next` leads from one
    /// to the other. `NONE` both when there is none.
    first_done: u32,
    last_done: u32,
    limit: u32,
    reuse: bool,
    got: u64,
    put: u64,
    allocated: u64,
    empty: u64,
}

/// No slot: beyond every limit, so that the check of an index is the check for the list's end.
const NONE: u32 = u32::MAX;

impl Pool {
    /// At most `limit` slots; `reuse` is the switch `pool`.
    pub(crate) fn new(limit: u32, reuse: bool) -> Self {
        let limit = limit.clamp(1, 1 << 15);
        Self {
            slots: Vec::with_capacity(limit as usize),
            free: NONE,
            spent: Vec::new(),
            first_done: NONE,
            last_done: NONE,
            limit,
            reuse,
            got: 0,
            put: 0,
            allocated: 0,
            empty: 0,
        }
    }

    /// The greatest number of slots.
    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// A free slot, or `None` when all are in use.
    #[inline]
    pub(crate) fn get(&mut self) -> Option<(u32, &mut Request)> {
        let slot = self.free;
        if slot as usize >= self.slots.len() {
            return self.get_allocated();
        }
        let request = &mut *self.slots[slot as usize];
        self.free = request.next;
        self.got += 1;
        Some((slot, request))
    }

    #[cold]
    #[inline(never)]
    fn get_allocated(&mut self) -> Option<(u32, &mut Request)> {
        let slot = match self.spent.pop() {
            Some(slot) => {
                self.slots[slot as usize] = allocated();
                slot
            }
            None if self.slots.len() < self.limit as usize => {
                self.slots.push(allocated());
                self.slots.len() as u32 - 1
            }
            None => {
                self.empty += 1;
                return None;
            }
        };
        self.allocated += 1;
        self.got += 1;
        Some((slot, &mut self.slots[slot as usize]))
    }

    /// Appends a slot to the list of what is done.
    #[inline]
    pub(crate) fn end(&mut self, slot: u32, result: i64) {
        let request = &mut *self.slots[slot as usize];
        debug_assert!(!matches!(request.state, State::Free | State::Done));
        request.state = State::Done;
        request.result = result;
        request.next = NONE;
        match self.slots.get_mut(self.last_done as usize) {
            Some(last) => last.next = slot,
            None => self.first_done = slot,
        }
        self.last_done = slot;
    }

    /// Takes back the slot that was done first. What it held can be read until the next `get`; a
    /// buffer must be taken out of it.
    #[inline]
    pub(crate) fn next_done(&mut self) -> Option<&mut Request> {
        let slot = self.first_done;
        let request = &mut **self.slots.get_mut(slot as usize)?;
        debug_assert_eq!(request.state, State::Done);
        self.first_done = request.next;
        if self.first_done == NONE {
            self.last_done = NONE;
        }
        Some(self.put(slot))
    }

    #[inline]
    pub(crate) fn has_done(&self) -> bool {
        self.first_done != NONE
    }

    /// Takes a slot back; as for `next_done`.
    #[inline]
    pub(crate) fn put(&mut self, slot: u32) -> &mut Request {
        let request = &mut *self.slots[slot as usize];
        debug_assert_ne!(request.state, State::Free);
        debug_assert_eq!(request.pending, 0);
        request.state = State::Free;
        self.put += 1;
        if self.reuse {
            request.next = self.free;
            self.free = slot;
            if breaks::is(Break::FreeSlotTwice) {
                request.next = slot;
            }
        } else {
            self.spent.push(slot);
        }
        request
    }

    /// Slots that are not free.
    #[inline]
    pub(crate) fn in_use(&self) -> usize {
        (self.got - self.put) as usize
    }

    /// Slots that can still be handed out.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.limit as usize - self.in_use()
    }

    pub(crate) fn stats(&self) -> PoolStats {
        let Self { got, allocated, empty, .. } = *self;
        PoolStats { hit: got - allocated, allocated, empty }
    }
}

fn allocated() -> Box<Request> {
    Box::new(Request::new())
}

impl Index<u32> for Pool {
    type Output = Request;
    #[inline]
    fn index(&self, slot: u32) -> &Request {
        &self.slots[slot as usize]
    }
}

impl IndexMut<u32> for Pool {
    #[inline]
    fn index_mut(&mut self, slot: u32) -> &mut Request {
        &mut self.slots[slot as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Range;
    use crate::io::{Flags, Io, Op};
    use crate::request::Role;

    fn take(pool: &mut Pool) -> u32 {
        let (slot, request) = pool.get().unwrap();
        let io = Io { op: Op::Flush, flags: Flags::NONE, range: Range::default() };
        request.begin(Role::Whole, State::Submitting, io, None, 0);
        slot
    }

    #[test]
    fn c47_the_last_slot_put_is_the_next_one_got() {
        let mut pool = Pool::new(4, true);
        let (a, b) = (take(&mut pool), take(&mut pool));
        pool.put(a);
        pool.put(b);
        assert_eq!((take(&mut pool), take(&mut pool)), (b, a));
        assert_eq!(pool.stats(), PoolStats { hit: 2, allocated: 2, empty: 0 });
    }

    #[test]
    fn slots_are_told_in_the_order_in_which_they_ended() {
        let mut pool = Pool::new(4, true);
        for round in 0..3 {
            let slots = [take(&mut pool), take(&mut pool), take(&mut pool)];
            let told = |pool: &mut Pool| pool.next_done().map(|request| request.result);
            pool.end(slots[2], round);
            pool.end(slots[0], round + 10);
            assert_eq!(told(&mut pool), Some(round));
            pool.end(slots[1], round + 20);
            assert!(pool.has_done());
            assert_eq!([told(&mut pool), told(&mut pool)], [Some(round + 10), Some(round + 20)]);
            assert!(!pool.has_done() && told(&mut pool).is_none());
        }
        assert_eq!(pool.in_use(), 0);
    }

    #[test]
    fn a_pool_has_a_slot_and_no_more_than_fit_their_numbers() {
        let limits = [0, 1, 4, 1 << 15, u32::MAX].map(|limit| Pool::new(limit, true).limit());
        assert_eq!(limits, [1, 1, 4, 1 << 15, 1 << 15]);
        let mut pool = Pool::new(4, true);
        let slot = take(&mut pool);
        assert_eq!((pool.in_use(), pool.room()), (1, 3));
        pool.put(slot);
        assert_eq!((pool.in_use(), pool.room()), (0, 4));
    }

    #[test]
    fn c32_an_empty_pool_says_so_and_is_counted() {
        let mut pool = Pool::new(1, true);
        take(&mut pool);
        assert!(pool.get().is_none());
        assert_eq!((pool.stats().empty, pool.room()), (1, 0));
    }

    #[test]
    fn the_pool_switched_off_allocates_each_slot() {
        let mut pool = Pool::new(1, false);
        for _ in 0..3 {
            let slot = take(&mut pool);
            pool.put(slot);
        }
        assert_eq!(pool.stats(), PoolStats { hit: 0, allocated: 3, empty: 0 });
    }
}
