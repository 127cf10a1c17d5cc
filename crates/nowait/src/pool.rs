//! Slots with a home: every request lives in a slab that one engine owns.
//!
//! Invariant: a slot is in exactly one place: the free list, the queue, a worker, or the list of
//! what is done; `Request::state` says which and is asserted at every move.
//! Knows: request. Known by: engine. Kernel counterpart: bio_alloc_percpu_cache (block/bio.c).

use std::ops::{Index, IndexMut};

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
    slots: Vec<Box<Request>>,
    free: Vec<u32>,
    limit: u32,
    reuse: bool,
    stats: PoolStats,
}

impl Pool {
    /// At most `limit` slots; `reuse` is the switch `pool`.
    pub(crate) fn new(limit: u32, reuse: bool) -> Self {
        let limit = limit.clamp(1, 1 << 15);
        Self {
            slots: Vec::with_capacity(limit as usize),
            free: Vec::with_capacity(limit as usize),
            limit,
            reuse,
            stats: PoolStats::default(),
        }
    }

    /// The greatest number of slots.
    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// A free slot, or `None` when all are in use.
    #[inline]
    pub(crate) fn get(&mut self) -> Option<u32> {
        if self.reuse && let Some(slot) = self.free.pop() {
            self.stats.hit += 1;
            return Some(slot);
        }
        self.get_allocated()
    }

    #[cold]
    fn get_allocated(&mut self) -> Option<u32> {
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Box::new(Request::new());
                slot
            }
            None if self.slots.len() < self.limit as usize => {
                self.slots.push(Box::new(Request::new()));
                self.slots.len() as u32 - 1
            }
            None => {
                self.stats.empty += 1;
                return None;
            }
        };
        self.stats.allocated += 1;
        Some(slot)
    }

    /// Takes a slot back that is done.
    #[inline]
    pub(crate) fn put(&mut self, slot: u32) {
        let request = &mut self.slots[slot as usize];
        debug_assert_ne!(request.state, State::Free);
        debug_assert_eq!(request.pending, 0);
        request.state = State::Free;
        self.free.push(slot);
    }

    /// Slots that are not free.
    #[inline]
    pub(crate) fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Slots that can still be handed out.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.limit as usize - self.in_use()
    }

    pub(crate) fn stats(&self) -> PoolStats {
        self.stats
    }
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
        let slot = pool.get().unwrap();
        let io = Io { op: Op::Flush, flags: Flags::NONE, range: Range::default() };
        pool[slot].begin(Role::Whole, io, 0);
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
    fn c32_an_empty_pool_says_so_and_is_counted() {
        let mut pool = Pool::new(1, true);
        take(&mut pool);
        assert_eq!(pool.get(), None);
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
