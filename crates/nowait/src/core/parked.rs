//! Overwrites that are refused in a burst: one goes to a worker, the others have a second try.
//!
//! What refuses an overwrite without waiting is mostly one thing for the whole file, which the
//! first call that may wait puts right: a timestamp that is due, several times in a hundredth of a
//! second. All that is in flight at that moment comes back, and would go to the workers for
//! nothing.
//! Invariant: a request is parked at most once, so nothing spins (C37); it was known to be mapped,
//! so that no allocation is waited for; it keeps its slot and its memory, but not its range: who
//! waits for that may be the very workers that the first of them has to wait for.
//! Knows: core. Known by: core.
#![allow(unsafe_code)]

use crate::io::{Flags, Outcome};
use crate::map::Map;
use crate::queue::Queue;
use crate::ranges::Hold;
use crate::request::{Role, State};

use super::{Core, place};

/// Bytes that are placed again together, the last request being of any length: a device that
/// writes while it is asked to would keep the thread from everything else for the whole burst.
const UNPARK_BYTES: u64 = 1 << 20;

impl<M: Map> Core<M> {
    /// Parks a request that was refused, if it is an overwrite and a worker has another one.
    pub(super) fn parks(&mut self, slot: u32, outcome: Outcome) -> bool {
        let request = &self.pool[slot];
        if outcome != -libc::EAGAIN
            || request.role != Role::Write
            || request.parked
            || request.io.flags.has(Flags::NOWAIT)
            || !self.disk.map.is_mapped(request.io.range)
        {
            return false;
        }
        if self.pathfinder.is_none() {
            self.pathfinder = Some(slot);
            return false;
        }
        self.qualify.refused();
        self.unlock(slot);
        let request = &mut self.pool[slot];
        request.state = State::Parked;
        request.parked = true;
        self.parked.push_back(slot);
        self.stats.parked += 1;
        true
    }

    /// Places again what was parked, or as much of it as one look at the queue may place. True when
    /// that was all, so that it may go at once; otherwise other requests come between.
    #[cold]
    pub(super) fn unpark<Q: Queue>(&mut self, queue: &mut Q) -> bool {
        let mut bytes = 0;
        while bytes < UNPARK_BYTES
            && let Some(slot) = self.parked.pop_front()
        {
            let request = &mut self.pool[slot];
            debug_assert_eq!(request.state, State::Parked);
            bytes += request.io.range.len;
            request.state = State::Queued;
            let range = request.io.range;
            let holds = self.gate.holds(request.io);
            request.locked = holds && self.disk.ranges.try_take(range, Hold::Shared);
            // Before it was held again, it may have become a hole.
            let mapped = request.locked == holds && self.disk.map.is_mapped(range);
            // SAFETY: the memory was promised, or is the slot's, until the request is given back.
            let placed = mapped && unsafe { place(queue, &request.transfer, slot) };
            if !placed {
                self.single_failed(slot, -libc::EAGAIN);
            }
        }
        self.parked.is_empty()
    }
}
