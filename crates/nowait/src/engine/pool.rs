//! The slot pool: every request lives in a slot of a slab that one engine owns, and the slot that
//! was freed last is used next (C47). This saves an allocation for each request, and cache misses.
//! The switch [`crate::Config::pool`] turns it off; each request then allocates its slot.
//!
//! Invariant: a slot is in exactly one place: the free list, the queue, a worker, the list of
//! deferred requests, or the list of done ones. `RequestSlot::state` says which and is asserted at
//! every move.

use std::ops::{Index, IndexMut};

use crate::engine::slot::{RequestSlot, State};
use crate::sim_hooks::injected_bug;
use crate::sim_hooks::injected_bug::EngineBug;
use crate::types::token::{self, Token};

counts! {
    /// Counts of slots handed out.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SlotPoolStats {
        /// Slots handed out without the allocator.
        pub hit: u64 => Counter "pool_hit",
        /// Slots handed out that were allocated: the first use of each, or all with the pool off.
        pub allocated: u64 => Counter "pool_allocated",
        /// Times that no slot was free.
        pub empty: u64 => Counter "pool_empty",
    }
}

/// The slab of one engine; its free list is last in, first out.
pub(crate) struct SlotPool {
    #[expect(clippy::vec_box, reason = "the kernel and the workers point into slots")]
    slots: Vec<Box<RequestSlot>>,
    /// The first free slot of each of two lists: `RequestSlot::next` is the following one, `NONE`
    /// ends a list. The memory of those in the list `DISCARDED` is not used again: with the switch
    /// `pool` off these are all.
    free: [u32; 2],
    /// The slot that was done first and the one that was done last, linked by `RequestSlot::next`;
    /// both are `NONE` when the list is empty.
    first_done: u32,
    last_done: u32,
    limit: u32,
    reuse: bool,
    allocs: u64,
    frees: u64,
    allocated: u64,
    empty: u64,
}

/// No slot: beyond every limit, so that the bounds check of an index also finds the list's end.
const NONE: u32 = u32::MAX;
/// The lists of free slots, by the switch `pool`.
const DISCARDED: usize = 0;
const REUSED: usize = 1;

impl SlotPool {
    /// A pool of at most `limit` slots, clamped to 1 to 32768; `reuse` is the switch `pool`.
    pub(crate) fn new(limit: u32, reuse: bool) -> Self {
        let limit = limit.clamp(1, 1 << 15);
        Self {
            slots: Vec::with_capacity(limit as usize),
            free: [NONE; 2],
            first_done: NONE,
            last_done: NONE,
            limit,
            reuse,
            allocs: 0,
            frees: 0,
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
    pub(crate) fn alloc(&mut self) -> Option<(u32, &mut RequestSlot)> {
        let slot = self.free[REUSED];
        let (slot, request) = match (slot as usize) < self.slots.len() {
            true => {
                let request = &mut *self.slots[slot as usize];
                self.free[REUSED] = request.next;
                (slot, request)
            }
            false => {
                let slot = self.allocate()?;
                (slot, &mut *self.slots[slot as usize])
            }
        };
        self.allocs += 1;
        Some((slot, request))
    }

    #[cold]
    #[inline(never)]
    fn allocate(&mut self) -> Option<u32> {
        let may_grow = self.slots.len() < self.limit as usize;
        let discarded = self.free[DISCARDED];
        let slot = match self.slots.get_mut(discarded as usize) {
            Some(request) => {
                self.free[DISCARDED] = request.next;
                *request = allocated();
                discarded
            }
            None if may_grow => {
                self.slots.push(allocated());
                self.slots.len() as u32 - 1
            }
            None => {
                self.empty += 1;
                return None;
            }
        };
        self.allocated += 1;
        Some(slot)
    }

    /// The slot that `token` names, if it is a transfer's: that of a watched descriptor, with its
    /// uppermost bit, is beyond every limit.
    #[inline(always)]
    pub(crate) fn of_transfer(&self, token: Token) -> Option<&RequestSlot> {
        let request = self.slots.get(token::index_of(token));
        debug_assert_eq!(request.is_some(), token::is_transfer(token));
        request.map(|request| &**request)
    }

    /// Appends a slot to the list of done ones.
    #[inline]
    pub(crate) fn complete(&mut self, slot: u32, result: i64) {
        self[slot].result = result;
        self.complete_as_is(slot);
    }

    /// Appends a slot whose result is set to the list of done ones.
    #[inline]
    pub(crate) fn complete_as_is(&mut self, slot: u32) {
        if cfg!(debug_assertions) {
            assert!(!matches!(self[slot].state, State::Free | State::Done));
            self[slot].set_state(State::Done);
        }
        match self.slots.get_mut(self.last_done as usize) {
            Some(last) => last.next = slot,
            None => self.first_done = slot,
        }
        self.last_done = slot;
    }

    /// Frees the slot that was done first. Its fields can be read until the next `alloc`; the
    /// caller must take its buffer out.
    #[inline]
    pub(crate) fn pop_completed(&mut self) -> Option<&mut RequestSlot> {
        let slot = self.first_done;
        let request = &mut **self.slots.get_mut(slot as usize)?;
        debug_assert_eq!(request.state, State::Done);
        if slot == self.last_done {
            (self.first_done, self.last_done) = (NONE, NONE);
        } else {
            self.first_done = request.next;
        }
        Some(self.free(slot))
    }

    /// The done slots, in the order in which they were done.
    pub(crate) fn done(&self) -> impl Iterator<Item = &RequestSlot> {
        let mut next = self.first_done;
        std::iter::from_fn(move || {
            let request = &**self.slots.get(next as usize)?;
            next = if next == self.last_done { NONE } else { request.next };
            Some(request)
        })
    }

    /// Slots of a device that are not free.
    pub(crate) fn in_use_of(&self, device: u32) -> usize {
        self.slots_in_use().filter(|slot| slot.device() == device).count()
    }

    /// Slots that are not free. It looks at every slot.
    pub(crate) fn slots_in_use(&self) -> impl Iterator<Item = &RequestSlot> {
        self.numbers_in_use().map(|slot| &self[slot])
    }

    /// Numbers of the slots that are neither free nor done. It looks at every slot.
    pub(crate) fn numbers_of_pending(&self) -> impl Iterator<Item = u32> {
        let mut is_done = vec![false; self.slots.len()];
        let mut next = self.first_done;
        while let Some(done) = is_done.get_mut(next as usize) {
            *done = true;
            next = if next == self.last_done { NONE } else { self[next].next };
        }
        self.numbers_in_use().filter(move |&slot| !is_done[slot as usize])
    }

    /// Numbers of the slots that are not free. It looks at every slot.
    fn numbers_in_use(&self) -> impl Iterator<Item = u32> + use<> {
        let mut free = self.free[usize::from(self.reuse)];
        let mut is_free = vec![false; self.slots.len()];
        while let Some(slot) = is_free.get_mut(free as usize) {
            *slot = true;
            free = self.slots[free as usize].next;
        }
        (0..).zip(is_free).filter(|(_, free)| !free).map(|(slot, _)| slot)
    }

    #[inline]
    pub(crate) fn has_done(&self) -> bool {
        self.first_done != NONE
    }

    /// Frees a slot. Its fields can be read until the next `alloc`; the caller must take its buffer
    /// out.
    #[inline]
    pub(crate) fn free(&mut self, slot: u32) -> &mut RequestSlot {
        let request = &mut *self.slots[slot as usize];
        debug_assert_ne!(request.state, State::Free);
        debug_assert_eq!(request.pending, 0);
        request.set_state(State::Free);
        self.frees += 1;
        let first = &mut self.free[usize::from(self.reuse)];
        request.next = std::mem::replace(first, slot);
        if injected_bug::injected(EngineBug::FreeSlotTwice) {
            request.next = slot;
        }
        request
    }

    /// Slots that are not free.
    #[inline]
    pub(crate) fn in_use(&self) -> usize {
        (self.allocs - self.frees) as usize
    }

    /// Slots that are free or not yet allocated.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.limit as usize - self.in_use()
    }

    pub(crate) fn stats(&self) -> SlotPoolStats {
        let Self { allocs, allocated, empty, .. } = *self;
        SlotPoolStats { hit: allocs - allocated, allocated, empty }
    }
}

fn allocated() -> Box<RequestSlot> {
    Box::new(RequestSlot::new())
}

impl Index<u32> for SlotPool {
    type Output = RequestSlot;
    #[inline]
    fn index(&self, slot: u32) -> &RequestSlot {
        &self.slots[slot as usize]
    }
}

impl IndexMut<u32> for SlotPool {
    #[inline]
    fn index_mut(&mut self, slot: u32) -> &mut RequestSlot {
        &mut self.slots[slot as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::slot::Role;
    use crate::types::byte_range::ByteRange;
    use crate::types::request::{Flags, Op, Request};
    use crate::types::token::Target;

    fn take(pool: &mut SlotPool) -> u32 {
        let (slot, request) = pool.alloc().unwrap();
        let io = Request { op: Op::Flush, flags: Flags::NONE, range: ByteRange::default() };
        request.begin(Role::Split, State::Submitting, Target::new(0, 0), io, None, 0);
        slot
    }

    #[test]
    fn c47_the_slot_freed_last_is_the_next_one_allocated() {
        let mut pool = SlotPool::new(4, true);
        let (a, b) = (take(&mut pool), take(&mut pool));
        pool.free(a);
        pool.free(b);
        assert_eq!((take(&mut pool), take(&mut pool)), (b, a));
        assert_eq!(pool.stats(), SlotPoolStats { hit: 2, allocated: 2, empty: 0 });
    }

    #[test]
    fn slots_are_given_back_in_the_order_in_which_they_ended() {
        let mut pool = SlotPool::new(4, true);
        for round in 0..3 {
            let slots = [take(&mut pool), take(&mut pool), take(&mut pool)];
            let next_result =
                |pool: &mut SlotPool| pool.pop_completed().map(|request| request.result);
            pool.complete(slots[2], round);
            pool.complete(slots[0], round + 10);
            assert_eq!(next_result(&mut pool), Some(round));
            pool.complete(slots[1], round + 20);
            assert!(pool.has_done());
            assert_eq!(
                [next_result(&mut pool), next_result(&mut pool)],
                [Some(round + 10), Some(round + 20)]
            );
            assert!(!pool.has_done() && next_result(&mut pool).is_none());
        }
        assert_eq!(pool.in_use(), 0);
    }

    #[test]
    fn a_pool_has_from_1_to_32768_slots() {
        let limits = [0, 1, 4, 1 << 15, u32::MAX].map(|limit| SlotPool::new(limit, true).limit());
        assert_eq!(limits, [1, 1, 4, 1 << 15, 1 << 15]);
        let mut pool = SlotPool::new(4, true);
        let slot = take(&mut pool);
        assert_eq!((pool.in_use(), pool.room()), (1, 3));
        pool.free(slot);
        assert_eq!((pool.in_use(), pool.room()), (0, 4));
    }

    #[test]
    fn c32_a_pool_without_a_free_slot_returns_none_and_counts_it() {
        let mut pool = SlotPool::new(1, true);
        take(&mut pool);
        assert!(pool.alloc().is_none());
        assert_eq!((pool.stats().empty, pool.room()), (1, 0));
    }

    #[test]
    fn the_pool_switched_off_allocates_each_slot() {
        let mut pool = SlotPool::new(1, false);
        for _ in 0..3 {
            let slot = take(&mut pool);
            pool.free(slot);
        }
        assert_eq!(pool.stats(), SlotPoolStats { hit: 0, allocated: 3, empty: 0 });
    }
}
