//! Deferred overwrites: of the overwrites of a device that are refused in one burst only the first, the
//! probe request, goes to a worker; the others are deferred, and tried once more when it has ended.
//!
//! Overwrites are mostly refused for a cause that the whole file shares and that the first call that may
//! wait removes: a timestamp update that is due, several times in a hundredth of a second. All requests in
//! flight at that moment are refused, and need no worker afterwards.
//!
//! Invariant: a request is deferred at most once, so that no request is retried forever (C37). Only a
//! request whose range is mapped is deferred, so that it waits for no allocation. It keeps its slot and its
//! memory, but releases its range lock: the probe request's worker may be waiting for it.
#![allow(unsafe_code)]

use std::collections::VecDeque;

use crate::block::block_map::BlockMap;
use crate::block::range_lock::LockMode;
use crate::engine::per_device::PerDevice;
use crate::engine::requests::{Requests, push_transfer};
use crate::engine::slot::{Role, State};
use crate::queue::IoQueue;
use crate::types::request::Flags;
use crate::types::transfer::Outcome;

/// Bytes of deferred requests after which a poll pushes no more of them. Where the submission
/// itself writes, an unlimited batch would keep the thread from other requests for the whole burst.
const RETRY_BATCH_BYTES: u64 = 1 << 20;

/// The refused overwrites of one device.
#[derive(Default)]
struct Burst {
    /// The slot of the probe request, which a worker has.
    probe: Option<u32>,
    /// The slots of the others, the first one first.
    slots: VecDeque<u32>,
    /// Overwrites that were deferred so far.
    deferred: u64,
}

/// The deferred overwrites of an engine.
pub(crate) struct DeferredOverwrites {
    bursts: PerDevice<Burst>,
    /// Devices with deferred requests, each once.
    waiting: Vec<u32>,
}

impl DeferredOverwrites {
    pub(crate) const fn new() -> Self {
        Self { bursts: PerDevice::new(), waiting: Vec::new() }
    }

    /// Whether a request is deferred.
    pub(crate) fn is_busy(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Requests of `device` that were deferred so far.
    pub(crate) fn deferred(&self, device: u32) -> u64 {
        self.bursts.get(device).map_or(0, |burst| burst.deferred)
    }

    /// Forgets a device of which nothing is in flight. Returns [`DeferredOverwrites::deferred`].
    pub(crate) fn forget(&mut self, device: u32) -> u64 {
        let burst = self.bursts.take(device);
        debug_assert!(burst.probe.is_none() && burst.slots.is_empty());
        burst.deferred
    }

    /// Makes the refused overwrite in `slot` the probe request of its device, or defers it if there is
    /// one. True if it is deferred.
    fn place(&mut self, device: u32, slot: u32) -> bool {
        let burst = self.bursts.get_mut(device);
        if burst.probe.is_none() {
            burst.probe = Some(slot);
            return false;
        }
        if burst.slots.is_empty() {
            self.waiting.push(device);
        }
        burst.slots.push_back(slot);
        burst.deferred += 1;
        true
    }

    /// A worker has returned the request in `slot`, which may have been the probe request of its device.
    pub(crate) fn on_returned(&mut self, device: u32, slot: u32) {
        if let Some(burst) = self.bursts.get(device)
            && burst.probe == Some(slot)
        {
            self.bursts.get_mut(device).probe = None;
        }
    }

    /// The deferred request of `device` that is tried next; `None` while there is a probe request.
    fn pop_ready(&mut self, device: u32) -> Option<u32> {
        let burst = self.bursts.get_mut(device);
        if burst.probe.is_some() { None } else { burst.slots.pop_front() }
    }

    fn has_deferred(&self, device: u32) -> bool {
        self.bursts.get(device).is_some_and(|burst| !burst.slots.is_empty())
    }

    /// Defers the request in `slot`, whose transfer has ended with `outcome`, if it is a refused overwrite
    /// and a worker already has the probe request. Without a probe request it becomes that, and is not
    /// deferred.
    pub(crate) fn defer<M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        slot: u32,
        outcome: Outcome,
    ) -> bool {
        let request = requests.slot(slot);
        if outcome != -libc::EAGAIN
            || request.role != Role::Write
            || request.deferred
            || request.io.flags.contains(Flags::NOWAIT)
            || !requests.device_of(slot).disk.map.is_mapped(request.io.range)
            || !self.place(request.device(), slot)
        {
            return false;
        }
        requests.count_refusal(slot);
        requests.unlock(slot);
        let request = requests.slot_mut(slot);
        request.set_state(State::Deferred);
        request.deferred = true;
        true
    }

    /// Ends the request in `slot`, which is stopped, if it is deferred.
    pub(crate) fn end<M: BlockMap + ?Sized>(&mut self, requests: &mut Requests<M>, slot: u32) {
        let device = requests.slot(slot).device();
        if self.remove(device, slot) {
            requests.slot_mut(slot).set_state(State::Queued);
            requests.fall_back(slot, -libc::EAGAIN);
        }
    }

    /// Removes a deferred request; false if it is not deferred.
    fn remove(&mut self, device: u32, slot: u32) -> bool {
        if !self.has_deferred(device) {
            return false;
        }
        let slots = &mut self.bursts.get_mut(device).slots;
        let before = slots.len();
        slots.retain(|&other| other != slot);
        let is_removed = slots.len() < before;
        if slots.is_empty() {
            self.waiting.retain(|&waiting| waiting != device);
        }
        is_removed
    }

    /// Pushes the deferred requests of each device without a probe request again. True when the caller
    /// submits the queue immediately.
    #[inline]
    pub(crate) fn retry<Q: IoQueue, M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        queue: &mut Q,
    ) -> bool {
        let mut submitted = false;
        if self.is_busy() {
            let mut waiting = std::mem::take(&mut self.waiting);
            waiting.retain(|&device| {
                submitted |= self.retry_device(requests, queue, device);
                self.has_deferred(device)
            });
            self.waiting = waiting;
        }
        submitted
    }

    /// Pushes the deferred requests of a device again, up to [`RETRY_BATCH_BYTES`]. True when some were
    /// pushed and none is left, so that the caller submits the queue immediately; otherwise other requests
    /// come between.
    #[cold]
    fn retry_device<Q: IoQueue, M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        queue: &mut Q,
        device: u32,
    ) -> bool {
        let mut bytes = 0;
        while bytes < RETRY_BATCH_BYTES
            && let Some(slot) = self.pop_ready(device)
        {
            bytes += requests.slot(slot).io.range.len;
            try_again(requests, queue, slot);
        }
        bytes > 0 && !self.has_deferred(device)
    }
}

/// Pushes the deferred request in `slot` again, if it is still an overwrite and its range is free; else a
/// worker does it.
fn try_again<Q: IoQueue, M: BlockMap + ?Sized>(
    requests: &mut Requests<M>,
    queue: &mut Q,
    slot: u32,
) {
    let request = requests.slot_mut(slot);
    debug_assert_eq!(request.state, State::Deferred);
    request.set_state(State::Queued);
    if request.stop.errno().is_some() {
        return requests.fall_back(slot, -libc::EAGAIN);
    }
    let io = request.io;
    let device = requests.device_of(slot);
    let lock = device.simple_path.needs_range_lock(io);
    let locked = lock && device.disk.ranges.try_lock(io.range, LockMode::Shared);
    // While the range was not locked, it may have become a hole.
    let mapped = locked == lock && device.disk.map.is_mapped(io.range);
    requests.slot_mut(slot).locked = locked;
    let transfer = requests.transfer_of(slot);
    // SAFETY: the memory was promised, or is the slot's, until the request is given back.
    if !mapped || !unsafe { push_transfer(queue, &transfer, slot) } {
        requests.fall_back(slot, -libc::EAGAIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_refused_overwrite_is_the_probe_and_the_others_wait_for_its_return_in_order() {
        let mut deferred = DeferredOverwrites::new();
        let placed = [7, 3, 9].map(|slot| deferred.place(0, slot));
        assert_eq!((placed, deferred.is_busy()), ([false, true, true], true));
        assert_eq!(deferred.pop_ready(0), None);
        // The worker of another request returns.
        deferred.on_returned(0, 3);
        assert_eq!(deferred.pop_ready(0), None);
        deferred.on_returned(0, 7);
        assert_eq!([(); 3].map(|()| deferred.pop_ready(0)), [Some(3), Some(9), None]);
        assert_eq!((deferred.deferred(0), deferred.has_deferred(0)), (2, false));
        // The next burst has its own probe.
        assert!(!deferred.place(0, 4) && deferred.place(0, 5));
    }

    #[test]
    fn c89_a_deferred_request_that_is_stopped_is_not_tried_again() {
        let mut deferred = DeferredOverwrites::new();
        for slot in [7, 3, 9] {
            deferred.place(0, slot);
        }
        assert!(deferred.remove(0, 3) && !deferred.remove(0, 3));
        assert!(!deferred.remove(0, 7), "a worker has the probe");
        assert!(!deferred.remove(1, 9), "it is of another device");
        assert!(deferred.is_busy() && deferred.remove(0, 9));
        assert!(!deferred.is_busy());
        deferred.on_returned(0, 7);
        assert_eq!(deferred.pop_ready(0), None);
    }

    #[test]
    fn a_burst_of_one_device_defers_nothing_of_another_and_is_forgotten_with_its_device() {
        let mut deferred = DeferredOverwrites::new();
        assert!(!deferred.place(0, 0) && deferred.place(0, 1));
        assert!(!deferred.place(1, 2));
        // A slot is of one device.
        deferred.on_returned(1, 0);
        assert_eq!(deferred.pop_ready(0), None);
        deferred.on_returned(0, 0);
        assert_eq!((deferred.pop_ready(0), deferred.pop_ready(1)), (Some(1), None));
        assert_eq!((deferred.forget(0), deferred.deferred(0), deferred.forget(5)), (1, 0, 0));
        assert!(!deferred.place(0, 6) && deferred.place(1, 7));
    }
}
