//! Requests that are to end early: cancelled ones, and those whose time is over.
//!
//! Invariant: a request that is stopped is given back once, as every other one, and not before the kernel and
//! the workers have left its memory (C45).

use std::time::{Duration, Instant};

use crate::block::block_map::BlockMap;
use crate::engine::Engine;
use crate::engine::attached_device::{AttachedDevice, DeviceHandle};
use crate::engine::requests::Requests;
use crate::engine::slot::{Role, Stop};
use crate::queue::IoQueue;

impl<Q: IoQueue, M: BlockMap + ?Sized> Engine<Q, M> {
    /// Ends the requests of `device` with `tag` early, as far as that is possible (C84). Returns how many
    /// there are. Each is given back by [`Engine::next`] as without this call: with `ECANCELED` if a part of it
    /// had not begun, and otherwise with its result, when the device has done what it was given. A write that
    /// ends with `ECANCELED` may have written none, some or all of its bytes. It looks at every slot of the
    /// engine.
    pub fn cancel(&mut self, device: &DeviceHandle<M>, tag: u64) -> usize {
        let requests = self.dispatcher.requests_mut();
        let found = requests.of_tag(device.attached(), tag);
        found.iter().for_each(|&slot| requests.stop(slot, Stop::Cancelled));
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

impl<M: BlockMap + ?Sized> Requests<M> {
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
        self.attend_later();
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

    /// Stops the requests whose time is over.
    pub(crate) fn stop_late(&mut self) {
        if self.deadlines_mut().is_empty() {
            return;
        }
        let now = Instant::now();
        while let Some(slot) = self.deadlines_mut().pop(now) {
            // The slot may have another request meanwhile, or none.
            let is_pending = self.slot(slot).stop == Stop::Later
                && self.pool().numbers_of_pending().any(|pending| pending == slot);
            if is_pending {
                self.stop(slot, Stop::TimedOut);
            }
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
