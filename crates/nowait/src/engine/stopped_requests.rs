//! Requests that are to end early: cancelled ones, and those whose time is over.
//!
//! Invariant: a request that is stopped is given back once, as every other one, and not before the kernel and
//! the workers have left its memory (C45).

use std::time::{Duration, Instant};

use crate::block::block_map::BlockMap;
use crate::engine::Engine;
use crate::engine::attached_device::{AttachedDevice, DeviceHandle};
use crate::engine::dispatcher::Dispatcher;
use crate::engine::requests::Requests;
use crate::engine::slot::{Role, Stop};
use crate::queue::IoQueue;
use crate::types::token;

impl<Q: IoQueue, M: BlockMap + ?Sized> Engine<Q, M> {
    /// Ends the requests of `device` with `tag` early, as far as that is possible (C84, C89). Returns how many
    /// there are. Each is given back by [`Engine::next`] as without this call: with `ECANCELED` if a part of it
    /// had not begun, or the kernel has cancelled it, and otherwise with its result, when the device has done what it
    /// was given. A write that ends with `ECANCELED` may have written none, some or all of its bytes. It looks at
    /// every slot of the engine.
    pub fn cancel(&mut self, device: &DeviceHandle<M>, tag: u64) -> usize {
        let found = self.dispatcher.requests().of_tag(device.attached(), tag);
        found.iter().for_each(|&slot| self.dispatcher.stop(&mut self.queue, slot, Stop::Cancelled));
        found.len()
    }

    /// Gives the requests of `device` with `tag` a time at which they end early, as by [`Engine::cancel`] but
    /// with `ETIMEDOUT`; a later call replaces it. Returns how many there are. [`Engine::wait`] ends at that
    /// time. It looks at every slot of the engine.
    pub fn set_deadline(&mut self, device: &DeviceHandle<M>, tag: u64, deadline: Instant) -> usize {
        let requests = self.dispatcher.requests_mut();
        let found = requests.of_tag(device.attached(), tag);
        found.iter().for_each(|&slot| requests.stop_at(slot, deadline));
        found.len()
    }
}

impl<M: BlockMap + ?Sized> Dispatcher<M> {
    /// Stops a request: nothing of it begins any more, and what the kernel has of it is to end.
    fn stop<Q: IoQueue>(&mut self, queue: &mut Q, slot: u32, stop: Stop) {
        self.requests_mut().stop(slot, stop);
        self.end_deferred(slot);
        let transfers = self.requests().transfers_of(slot);
        transfers.into_iter().for_each(|slot| queue.cancel(token::of_slot(slot)));
    }

    /// Stops the requests whose time is over.
    pub(crate) fn stop_late<Q: IoQueue>(&mut self, queue: &mut Q) {
        if self.requests().deadlines().is_empty() {
            return;
        }
        let now = Instant::now();
        while let Some(slot) = self.requests_mut().deadlines_mut().pop(now) {
            // The slot may have another request meanwhile, or none.
            let requests = self.requests();
            let is_pending = requests.slot(slot).stop == Stop::Later
                && requests.pool().numbers_of_pending().any(|pending| pending == slot);
            if is_pending {
                self.stop(queue, slot, Stop::TimedOut);
            }
        }
    }
}

impl<M: BlockMap + ?Sized> Requests<M> {
    /// The slots of the transfers that a request may have in the queue: its own, or those of its fragments.
    fn transfers_of(&self, slot: u32) -> Vec<u32> {
        match self.slot(slot).role {
            Role::Read | Role::Write | Role::Merged => vec![slot],
            Role::Split | Role::Fragment => {
                let slots = self.pool().numbers_of_pending().filter(|&other| {
                    let fragment = self.slot(other);
                    fragment.role == Role::Fragment && fragment.parent == slot
                });
                slots.collect()
            }
        }
    }

    /// The slots of the requests of `device` with `tag` that have not ended.
    fn of_tag(&self, device: &AttachedDevice<M>, tag: u64) -> Vec<u32> {
        let is_served = self.contains(device);
        let slots = self.pool().numbers_of_pending().filter(|&slot| {
            let request = self.slot(slot);
            is_served
                && request.device() == device.index()
                && request.tag == tag
                && request.role != Role::Fragment
        });
        slots.collect()
    }

    /// Stops a request: nothing of it begins any more.
    fn stop(&mut self, slot: u32, stop: Stop) {
        self.stopped();
        let request = self.slot_mut(slot);
        request.stop = stop;
        let Some(errno) = stop.errno() else { return };
        if request.pending > 0 {
            // Its other fragments are left out.
            request.fail(-i64::from(errno));
        }
        self.stop_job(slot, errno);
    }

    fn stop_at(&mut self, slot: u32, deadline: Instant) {
        if self.slot(slot).stop.errno().is_none() {
            self.slot_mut(slot).stop = Stop::Later;
            self.deadlines_mut().set(slot, deadline);
            self.attend_later();
        }
    }

    /// How long a sleep of at most `timeout` may last.
    pub(crate) fn until_deadline(&self, timeout: Option<Duration>) -> Option<Duration> {
        match self.deadlines().is_empty() {
            true => timeout,
            false => self.deadlines().until_first(timeout),
        }
    }
}
