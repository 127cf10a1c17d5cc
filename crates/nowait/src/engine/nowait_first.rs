//! Nowait first: a request is tried without waiting on the engine's thread, and goes to a worker
//! only if it is refused (C37). This saves two thread switches for each request that need not wait.
//! The switch [`crate::Config::nowait_first`] turns it off; every request then goes to a worker. Of
//! the overwrites refused in one burst only the probe request goes to a worker; the others are
//! deferred, and tried once more when it has ended.
//!
//! Invariant: a request is deferred at most once, so that no request is retried forever (C37). Only
//! a request whose range is mapped is deferred, so that it waits for no allocation. It keeps its
//! slot and its memory, but releases its range lock: the probe request's worker may be waiting for
//! it.
#![allow(unsafe_code)]

use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::block::range_lock::LockMode;
use crate::blocking::sync_io::blocks_of;
use crate::engine::attached_device::{AttachedDevice, count};
use crate::engine::slot::{RequestSlot, Role, State};
use crate::engine::vectored::{self, Path};
use crate::memory::buffer_pool::PooledBuffer;
use crate::queue::IoQueue;
use crate::types::byte_range::ByteRange;
use crate::types::iovec::IoSegment;
use crate::types::request::{Flags, Request};
use crate::types::transfer::Outcome;

use crate::engine::dispatcher::{Dispatcher, push_transfer};

/// Bytes of deferred requests after which a poll pushes no more of them. Where the submission
/// itself writes, an unlimited batch would keep the thread from other requests for the whole burst.
const RETRY_BATCH_BYTES: u64 = 1 << 20;

impl<M: BlockMap + ?Sized> Dispatcher<M> {
    /// Chooses the path of the request `io` in `slot`, whose memory is `segments`, and plans its
    /// fragments. A write's range is locked before it is mapped.
    #[inline]
    pub(crate) fn choose_path(
        &mut self,
        device: &AttachedDevice<M>,
        slot: u32,
        io: Request,
        segments: &[IoSegment],
    ) -> Path {
        if !self.config.nowait_first {
            return Path::Worker;
        }
        if device.is_backing_off.get() {
            self.back_off(device.index());
            return Path::Worker;
        }
        let request = &mut self.pool[slot];
        let range = io.range;
        let (disk, simple_path) = (&*device.disk, &device.simple_path);
        let lock = simple_path.needs_range_lock(io);
        if lock && !lock_whole_blocks(disk, range) {
            return Path::Worker;
        }
        let path = vectored::plan(
            disk,
            io,
            segments,
            || request.buf.as_ref().map(PooledBuffer::segment),
            self.config.vectored,
            simple_path.needs_separate_sync(io, device.durable_writes.get() > 1),
            &mut request.fragments,
        );
        match path {
            Path::Worker if lock => disk.ranges.unlock(range, LockMode::Shared),
            _ if lock => request.locked = true,
            _ => {}
        }
        path
    }

    /// Counts a request of a device that is not tried.
    #[cold]
    fn back_off(&mut self, device: u32) {
        let device = &mut self.devices[device];
        device.back_off.count_down();
        if !device.back_off.is_backing_off() {
            device.update_simple_path(&self.config);
        }
    }

    /// Counts a refused transfer of a device, which was reaped.
    pub(crate) fn count_refusal(&mut self, index: u32) {
        let device = &mut self.devices[index];
        let was_counting = device.back_off.is_counting();
        device.back_off.refused();
        if !was_counting && device.back_off.is_counting() {
            device.observed = device.attached.reaped.get() - 1;
            self.refusing.push(index);
        }
    }

    /// Evaluates a poll for the back-off of each device with refusals.
    pub(crate) fn observe_poll(&mut self) {
        let mut left = 0;
        for at in 0..self.refusing.len() {
            let index = self.refusing[at];
            let whole = |it: &&RequestSlot| {
                it.device() == index && matches!(it.role, Role::Read | Role::Write)
            };
            let whole = self.pool.done().filter(whole).count();
            let device = &mut self.devices[index];
            let reaped = device.attached.reaped.get();
            let others = reaped - std::mem::replace(&mut device.observed, reaped);
            if device.back_off.observe_poll(whole + others as usize) {
                device.stats.backed_off += 1;
                device.update_simple_path(&self.config);
            }
            if device.back_off.is_counting() {
                self.refusing[left] = index;
                left += 1;
            }
        }
        self.refusing.truncate(left);
    }

    /// Defers a refused request if it is an overwrite and a worker already has the probe request.
    /// Without a probe request, `slot` becomes it and is not deferred.
    ///
    /// Overwrites are mostly refused for a cause that the whole file shares and that the first call
    /// that may wait removes: a timestamp update that is due, several times in a hundredth of a
    /// second. All requests in flight at that moment are refused, and need no worker afterwards.
    pub(crate) fn defer_if_overwrite(&mut self, slot: u32, outcome: Outcome) -> bool {
        let request = &self.pool[slot];
        let index = request.device();
        if outcome != -libc::EAGAIN
            || request.role != Role::Write
            || request.deferred
            || request.io.flags.has(Flags::NOWAIT)
            || !self.devices[index].attached.disk.map.is_mapped(request.io.range)
        {
            return false;
        }
        if self.devices[index].probe_slot.is_none() {
            self.devices[index].probe_slot = Some(slot);
            return false;
        }
        count(&self.devices[index].attached.reaped);
        self.count_refusal(index);
        self.unlock(slot);
        let request = &mut self.pool[slot];
        request.set_state(State::Deferred);
        request.deferred = true;
        let device = &mut self.devices[index];
        if device.deferred.is_empty() {
            self.deferring.push(index);
        }
        device.deferred.push_back(slot);
        device.stats.deferred += 1;
        true
    }

    /// Pushes the deferred requests of each device without a probe request again. True when the caller
    /// submits the queue immediately.
    #[inline]
    pub(crate) fn retry_deferred<Q: IoQueue>(&mut self, queue: &mut Q) -> bool {
        let mut submitted = false;
        if !self.deferring.is_empty() {
            for index in std::mem::take(&mut self.deferring) {
                if self.devices[index].probe_slot.is_none() {
                    submitted |= self.retry_deferred_of(queue, index);
                }
                if !self.devices[index].deferred.is_empty() {
                    self.deferring.push(index);
                }
            }
        }
        submitted
    }

    /// Pushes the deferred requests of a device again, up to [`RETRY_BATCH_BYTES`]. True when none is
    /// left, so that the caller submits the queue immediately; otherwise other requests come between.
    #[cold]
    fn retry_deferred_of<Q: IoQueue>(&mut self, queue: &mut Q, index: u32) -> bool {
        let attached = self.devices[index].attached.clone();
        let (disk, simple_path) = (&*attached.disk, &attached.simple_path);
        let mut bytes = 0;
        while bytes < RETRY_BATCH_BYTES
            && let Some(slot) = self.devices[index].deferred.pop_front()
        {
            let request = &mut self.pool[slot];
            debug_assert_eq!(request.state, State::Deferred);
            bytes += request.io.range.len;
            request.set_state(State::Queued);
            let range = request.io.range;
            let lock = simple_path.needs_range_lock(request.io);
            request.locked = lock && disk.ranges.try_lock(range, LockMode::Shared);
            // While the range was not locked, it may have become a hole.
            let mapped = request.locked == lock && disk.map.is_mapped(range);
            let transfer = simple_path.transfer(request.io, request.target, request.place);
            // SAFETY: the memory was promised, or is the slot's, until the request is given back.
            let submitted = mapped && unsafe { push_transfer(queue, &transfer, slot) };
            if !submitted {
                self.fall_back(slot, -libc::EAGAIN);
            }
        }
        self.devices[index].deferred.is_empty()
    }
}

/// Locks the range of a write, if it can: a read-modify-write is left to a worker, which locks it.
#[inline(never)]
fn lock_whole_blocks<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, range: ByteRange) -> bool {
    blocks_of(disk, range) == range && disk.ranges.try_lock(range, LockMode::Shared)
}
