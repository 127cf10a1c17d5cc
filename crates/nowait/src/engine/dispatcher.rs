//! The dispatcher: the state of one engine's requests, the start of simple ones, and the exchange
//! with the workers.
//!
//! Invariant: a slot's state names its holder. The queue is not called from its own completion
//! callback, so completions that start further transfers do not recurse (C44).
#![allow(unsafe_code)]

#[cfg(test)]
#[cfg(feature = "sim")]
mod tests;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::block_map::{BlockMap, Extent};
use crate::block::range_lock::LockMode;
use crate::blocking::worker_pool::{WorkerJob, WorkerPool, WorkerTask};
use crate::engine::attached_device::{AttachedDevice, DeviceState, DeviceTable, count};
use crate::engine::completion::{Completion, Rejected, Stats};
use crate::engine::merge_run::Merger;
use crate::engine::pool::SlotPool;
use crate::engine::simple_path::Verdict;
use crate::engine::slot::{Place, Role, State};
use crate::memory::buffer_pool::{Budget, BufferPool, PooledBuffer};
use crate::queue::IoQueue;
use crate::threads::completion_list::CompletionList;
use crate::types::config::Config;
use crate::types::error::Error;
use crate::types::error::Operation;
use crate::types::iovec::IoSegment;
use crate::types::request::{ExtentStatus, Flags, Op, Request};
use crate::types::token;
use crate::types::transfer::{Transfer, UNREGISTERED};

/// The requests of one engine.
pub(crate) struct Dispatcher<M: BlockMap + ?Sized> {
    pub(crate) pool: SlotPool,
    /// Results of status requests that were given back, by tag.
    pub(crate) extents: Vec<(u64, Vec<ExtentStatus>)>,
    /// The number of the engine in the process.
    pub(crate) number: u64,
    pub(crate) devices: DeviceTable<M>,
    /// Devices that are detached and that a slot may still name.
    pub(crate) detaching: Vec<u32>,
    /// Devices with refusals that the next poll evaluates.
    pub(crate) refusing: Vec<u32>,
    /// Devices with deferred overwrites.
    pub(crate) deferring: Vec<u32>,
    /// Requests whose submitted fragments have all ended.
    pub(crate) resumable: Vec<u32>,
    pub(crate) work_items: Vec<WorkerJob>,
    pub(crate) completions: Arc<CompletionList>,
    pub(crate) workers: WorkerPool,
    /// Buffers for fragments that cannot use the request's memory.
    pub(crate) bounce: BufferPool,
    /// Scratch space for lists of segments.
    pub(crate) merged: Vec<IoSegment>,
    pub(crate) config: Config,
    pub(crate) merger: Merger,
    /// Something may be left for a poll to do beside ending full reads; see
    /// [`Dispatcher::attended`].
    pub(crate) attention: bool,
    /// The counts of devices that were detached.
    pub(crate) departed: Stats,
    /// Durable writes in flight, of all devices, that could share a sync.
    pub(crate) durable_writes: u32,
    /// Slots that hold fragments; they do not count as requests.
    pub(crate) fragments: usize,
}

impl<M: BlockMap + ?Sized> Dispatcher<M> {
    /// A dispatcher without devices whose bounce buffers are taken from `budget`.
    pub(crate) fn new(workers: WorkerPool, config: Config, budget: Budget) -> Result<Self, Error> {
        static ENGINES: AtomicU64 = AtomicU64::new(0);
        let pool = SlotPool::new(config.slots, config.pool);
        let completions = Arc::new(CompletionList::new(pool.limit())?);
        Ok(Self {
            pool,
            extents: Vec::new(),
            number: ENGINES.fetch_add(1, Ordering::Relaxed),
            devices: DeviceTable::new(),
            detaching: Vec::new(),
            refusing: Vec::new(),
            deferring: Vec::new(),
            resumable: Vec::with_capacity(64),
            work_items: Vec::with_capacity(64),
            completions,
            workers,
            bounce: BufferPool::new(budget),
            merged: Vec::new(),
            config,
            merger: Merger::new(config.merge),
            attention: false,
            departed: Stats::default(),
            durable_writes: 0,
            fragments: 0,
        })
    }

    pub(crate) fn completion_fd(&self) -> BorrowedFd<'_> {
        self.completions.fd()
    }

    #[inline]
    pub(crate) fn has_done(&self) -> bool {
        self.pool.has_done()
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.pool.in_use() - self.fragments
    }

    #[inline]
    pub(crate) fn has_free_slot(&self) -> bool {
        self.pool.room() > 0
    }

    pub(crate) fn stats(&self) -> Stats {
        let devices = self.devices.iter().map(DeviceState::stats);
        Stats { pool: self.pool.stats(), ..devices.fold(self.departed, Stats::plus) }
    }

    /// The counts of one device; 0 once it is detached and no slot names it.
    pub(crate) fn stats_of(&self, device: &AttachedDevice<M>) -> Stats {
        self.devices.get(device).map_or(Stats::default(), DeviceState::stats)
    }

    /// Slots that name `device`.
    pub(crate) fn in_use_of(&self, device: &AttachedDevice<M>) -> usize {
        let is_there = self.devices.get(device).is_some();
        if is_there { self.pool.in_use_of(device.index()) } else { 0 }
    }

    /// Device and tag of each request in flight.
    pub(crate) fn tags_in_flight(&self) -> impl Iterator<Item = (u32, u64)> {
        let requests = self.pool.slots_in_use().filter(|slot| slot.role != Role::Fragment);
        requests.map(|slot| (slot.device(), slot.tag))
    }

    /// Refuses requests of `device` from now on.
    ///
    /// # Errors
    /// As [`AttachedDevice::refusal`].
    pub(crate) fn detach(&mut self, device: &AttachedDevice<M>) -> Result<(), Error> {
        if device.engine.get() != self.number {
            return Err(device.refusal());
        }
        device.detach();
        self.detaching.push(device.index());
        self.attention = true;
        Ok(())
    }

    /// Forgets the detached devices that no slot names any more, and passes the numbers of their files
    /// and how many there are to `release`.
    pub(crate) fn release_detached(&mut self, mut release: impl FnMut(u32, u32)) {
        let Self { detaching, pool, devices, departed, refusing, .. } = self;
        detaching.retain(|&index| {
            if pool.in_use_of(index) > 0 {
                return true;
            }
            if let Some(device) = devices.remove(index) {
                *departed = departed.plus(device.stats());
                release(device.attached.first.file(), device.attached.files);
            }
            refusing.retain(|&other| other != index);
            false
        });
    }

    /// As [`SimplePath::map_for_simple_path`](crate::engine::simple_path::SimplePath::map_for_simple_path);
    /// a request of a device of another engine is not simple.
    #[inline(always)]
    pub(crate) fn simple(&self, device: &AttachedDevice<M>, io: Request, base: *mut u8) -> Verdict {
        if device.engine.get() != self.number {
            return Verdict::General;
        }
        device.simple_path.map_for_simple_path(&device.disk, io, base)
    }

    /// Starts a request for which [`Dispatcher::simple`] has found `extent`.
    ///
    /// # Safety
    /// `base` is valid for the range's length until the request is given back, or lies in `buf`.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "each is in a register")]
    pub(crate) unsafe fn submit_simple<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        device: &AttachedDevice<M>,
        io: Request,
        extent: Extent,
        base: *mut u8,
        buf: Option<PooledBuffer>,
        tag: u64,
    ) -> Result<(), Rejected> {
        let locked = device.simple_path.needs_range_lock(io);
        let Some((slot, request)) = self.pool.alloc() else {
            return Err(reject_no_slot(device, io, locked, buf));
        };
        let buffer = buf.as_ref().map_or(UNREGISTERED, PooledBuffer::registered);
        let target = device.target(extent.file);
        let place = Place { base, pos: extent.pos, segments: 0, buffer };
        let role = if io.op == Op::Write { Role::Write } else { Role::Read };
        request.begin(role, State::Queued, target, io, buf, tag);
        request.locked = locked;
        request.place = place;
        count(&device.simple);
        if device.end.replace(extent.pos + extent.len) == extent.pos {
            return self.start_neighbour(queue, slot);
        }
        let transfer = device.simple_path.transfer(io, target, place);
        // SAFETY: the memory is the buffer now in the slot, or promised by the caller; both last
        // until the slot is done.
        if !unsafe { push_transfer(queue, &transfer, slot) } {
            return Err(self.reject_queue_full(slot));
        }
        Ok(())
    }

    /// Starts a request for which [`Dispatcher::simple`] has said that it must wait. `base` is
    /// valid as for [`Dispatcher::submit_simple`].
    #[cold]
    pub(crate) fn submit_to_worker(
        &mut self,
        device: &AttachedDevice<M>,
        io: Request,
        base: *mut u8,
        buf: Option<PooledBuffer>,
        tag: u64,
    ) -> Result<(), Rejected> {
        let Some((slot, request)) = self.pool.alloc() else { return Err(reject_full(io, buf)) };
        request.begin(Role::Split, State::Submitting, device.first, io, buf, tag);
        request.segments.set_one(IoSegment { base, len: io.range.len as usize });
        count(&device.worker);
        self.offload(slot, WorkerTask::Run);
        Ok(())
    }

    /// Rejects a request for which the queue has no room.
    #[cold]
    pub(crate) fn reject_queue_full(&mut self, slot: u32) -> Rejected {
        self.unlock(slot);
        let request = &mut self.pool[slot];
        let (io, buf) = (request.io, request.buf.take());
        let device = &self.devices[request.device()].attached;
        device.simple.set(device.simple.get() - 1);
        self.pool.free(slot);
        reject_full(io, buf)
    }

    pub(crate) fn unlock(&mut self, slot: u32) {
        let request = &mut self.pool[slot];
        if std::mem::take(&mut request.locked) {
            let disk = &self.devices[request.device()].attached.disk;
            disk.ranges.unlock(request.io.range, LockMode::Shared);
        }
    }

    /// Hands a request to a worker; one with `NOWAIT` that a worker would have to run ends with
    /// `EAGAIN` instead (C32).
    pub(crate) fn offload(&mut self, slot: u32, task: WorkerTask) {
        let request = &mut self.pool[slot];
        if task == WorkerTask::Run && request.io.flags.has(Flags::NOWAIT) {
            return self.complete(slot, -i64::from(libc::EAGAIN));
        }
        self.enqueue_work(slot, task);
    }

    pub(crate) fn enqueue_work(&mut self, slot: u32, task: WorkerTask) {
        self.attention = true;
        let request = &mut self.pool[slot];
        request.set_state(State::Worker);
        self.work_items.push(WorkerJob {
            task,
            io: request.io,
            segments: request.segments.as_slice(),
            extents: &raw mut request.extents,
            slot,
            client: token::client_of(request.tag),
            merge: self.config.merge && task == WorkerTask::Run,
            completions: self.completions.clone(),
            device: self.devices[request.device()].jobs.clone(),
        });
    }

    /// Starts what was collected since the last poll: the open run and the work items. To be called
    /// before each submission.
    #[inline(always)]
    pub(crate) fn start_collected<Q: IoQueue>(&mut self, queue: &mut Q) {
        if self.attention {
            self.start_all_collected(queue);
        }
    }

    #[inline(never)]
    fn start_all_collected<Q: IoQueue>(&mut self, queue: &mut Q) {
        self.close_runs(queue);
        self.submit_work();
    }

    /// Whether a poll has more to do than to end full reads.
    #[inline]
    pub(crate) fn needs_attention(&self) -> bool {
        self.attention || self.completions.is_not_empty()
    }

    /// Finds out whether something is left for the next poll. Whatever adds to one of these lists
    /// or counts outside of a poll, or while completions are drained, sets `attention`.
    pub(crate) fn attended(&mut self) {
        self.attention = self.merger.is_busy()
            || !self.refusing.is_empty()
            || !self.resumable.is_empty()
            || !self.work_items.is_empty()
            || !self.deferring.is_empty()
            || !self.detaching.is_empty();
    }

    /// Hands the collected work items to the workers.
    #[inline]
    pub(crate) fn submit_work(&mut self) {
        if !self.work_items.is_empty() {
            self.workers.push(self.work_items.drain(..));
        }
    }

    /// Takes back the slots that workers have ended.
    #[inline]
    pub(crate) fn drain_completions(&mut self) {
        if self.completions.is_not_empty() {
            self.complete_remote();
        }
    }

    /// Clears the wake-up descriptor; to be called before `drain_completions`.
    pub(crate) fn ack_wakeup(&self) {
        self.completions.clear_wake();
    }

    #[cold]
    fn complete_remote(&mut self) {
        let completions = self.completions.clone();
        completions.take(|slot, result| {
            let request = &mut self.pool[slot];
            let device = &mut self.devices[request.device()];
            device.stats.remote += 1;
            if device.probe_slot == Some(slot) {
                device.probe_slot = None;
            }
            debug_assert_eq!(request.state, State::Worker);
            if request.io.op == Op::Status && result >= 0 {
                let tag = request.tag;
                self.extents.retain(|(of, _)| *of != tag);
                self.extents.push((tag, std::mem::take(&mut request.extents)));
            }
            self.push_completion(slot, result);
        });
    }

    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<Completion> {
        let request = self.pool.pop_completed()?;
        let buf = request.take_buf();
        let Request { op, flags, range } = request.io;
        Some(Completion {
            tag: request.tag,
            device: request.device(),
            io: Request { op, flags, range },
            buf,
            result: request.result,
        })
    }

    pub(crate) fn take_extents(&mut self, tag: u64) -> Vec<ExtentStatus> {
        let found = self.extents.iter().position(|(of, _)| *of == tag);
        found.map(|n| self.extents.swap_remove(n).1).unwrap_or_default()
    }

    /// Leaks all memory that the kernel or a worker may still write to.
    pub(crate) fn leak_in_flight(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.pool, SlotPool::new(1, true)));
        self.merger.leak();
        std::mem::forget(std::mem::replace(&mut self.bounce, BufferPool::new(Budget::new(0))));
    }
}

/// Rejects a request for which there is no slot.
#[cold]
pub(crate) fn reject_no_slot<M: BlockMap + ?Sized>(
    device: &AttachedDevice<M>,
    io: Request,
    locked: bool,
    buf: Option<PooledBuffer>,
) -> Rejected {
    if locked {
        device.disk.ranges.unlock(io.range, LockMode::Shared);
    }
    reject_full(io, buf)
}

/// The rejection of a request for which there is no room: `EAGAIN`.
pub(crate) fn reject_full(io: Request, buf: Option<PooledBuffer>) -> Rejected {
    Rejected { error: Error::new(libc::EAGAIN, Operation::Validate).at(io.range), buf }
}

/// Pushes a transfer to the queue. If the queue is full, submits the earlier transfers and pushes
/// again; false if there is still no room.
///
/// # Safety
/// As for [`IoQueue::push`].
#[inline]
pub(crate) unsafe fn push_transfer<Q: IoQueue>(
    queue: &mut Q,
    transfer: &Transfer,
    slot: u32,
) -> bool {
    // SAFETY: as promised by the caller.
    if unsafe { queue.push(transfer, token::of_slot(slot)) }.is_ok() {
        return true;
    }
    // SAFETY: as promised by the caller.
    queue.submit().is_ok() && unsafe { queue.push(transfer, token::of_slot(slot)) }.is_ok()
}
