//! The requests of one engine from their slot to their completion: who serves each next, and with which
//! result it is given back.
//!
//! Invariant: a slot's state names its holder. A request leaves its slot by one of two ways, with the list
//! of done ones or back to the caller that it is refused. Before that caller has it, a written range is
//! marked (C18), and then its range lock is released (C13).
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::block::range_lock::LockMode;
use crate::blocking::worker_pool::{WorkerPool, WorkerTask};
use crate::engine::attached_device::{AttachedDevice, Count};
use crate::engine::back_off::BackOffs;
use crate::engine::completion::{Completion, Rejected, Stats};
use crate::engine::deadlines::Deadlines;
use crate::engine::device_table::DeviceTable;
use crate::engine::inline_completion::{NextStep, next_step};
use crate::engine::pool::SlotPool;
use crate::engine::shared_syncs::SharedSyncs;
use crate::engine::slot::{RequestSlot, Role, State};
use crate::engine::transfer_result::{TransferResult, classify};
use crate::engine::worker_exchange::WorkerExchange;
use crate::memory::buffer_pool::PooledBuffer;
use crate::queue::IoQueue;
use crate::read_ahead::shared_inode;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::error::{Error, Operation};
use crate::types::iovec::IoSegment;
use crate::types::request::{ExtentStatus, Flags, Op, Request};
use crate::types::token::{self, Token};
use crate::types::transfer::{Outcome, Transfer};

/// The requests of one engine, and the devices that they are of.
pub(crate) struct Requests<M: BlockMap + ?Sized> {
    pool: SlotPool,
    devices: DeviceTable<M>,
    workers: WorkerExchange,
    back_offs: BackOffs,
    syncs: SharedSyncs,
    deadlines: Deadlines,
    config: Config,
    /// A poll may have more to do than to end requests by their only transfers. Whatever collects work
    /// outside of a poll, or while completions are drained, sets it.
    attention: bool,
    /// A request was stopped at some time.
    has_stopped: bool,
}

impl<M: BlockMap + ?Sized> Requests<M> {
    /// No requests and no devices.
    ///
    /// # Errors
    /// Errors of [`WorkerExchange::new`].
    pub(crate) fn new(workers: WorkerPool, config: Config) -> Result<Self, Error> {
        let pool = SlotPool::new(config.slots, config.pool);
        Ok(Self {
            workers: WorkerExchange::new(workers, pool.limit(), config.merge)?,
            pool,
            devices: DeviceTable::new(),
            back_offs: BackOffs::new(config.back_off),
            syncs: SharedSyncs::new(),
            deadlines: Deadlines::default(),
            config,
            attention: false,
            has_stopped: false,
        })
    }

    #[inline(always)]
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    #[inline(always)]
    pub(crate) fn pool(&self) -> &SlotPool {
        &self.pool
    }

    /// The slot with this number, which is not free.
    #[inline(always)]
    pub(crate) fn slot(&self, slot: u32) -> &RequestSlot {
        &self.pool[slot]
    }

    #[inline(always)]
    pub(crate) fn slot_mut(&mut self, slot: u32) -> &mut RequestSlot {
        &mut self.pool[slot]
    }

    /// A free slot, or `None` when all are in use.
    #[inline(always)]
    pub(crate) fn alloc(&mut self) -> Option<(u32, &mut RequestSlot)> {
        self.pool.alloc()
    }

    /// Frees a slot that no caller sees, or whose request is refused.
    pub(crate) fn free(&mut self, slot: u32) {
        self.pool.free(slot);
    }

    /// The device of the request in `slot`.
    #[inline(always)]
    pub(crate) fn device_of(&self, slot: u32) -> &AttachedDevice<M> {
        &self.devices[self.pool[slot].device()]
    }

    /// The device with this index.
    pub(crate) fn device(&self, index: u32) -> &AttachedDevice<M> {
        &self.devices[index]
    }

    /// Whether [`DeviceTable::serves`] it.
    #[inline(always)]
    pub(crate) fn serves(&self, device: &AttachedDevice<M>) -> bool {
        self.devices.serves(device)
    }

    /// Whether it is in the table, see [`DeviceTable::contains`].
    pub(crate) fn contains(&self, device: &AttachedDevice<M>) -> bool {
        self.devices.contains(device)
    }

    /// All devices.
    pub(crate) fn devices(&self) -> impl Iterator<Item = &AttachedDevice<M>> {
        self.devices.iter()
    }

    /// Adds a device, see [`DeviceTable::add`].
    pub(crate) fn attach(
        &mut self,
        disk: Arc<BlockDevice<M>>,
        files: Range<u32>,
    ) -> Rc<AttachedDevice<M>> {
        self.devices.add(disk, files, &self.config)
    }

    /// Refuses requests of `device` from now on.
    ///
    /// # Errors
    /// Errors of [`DeviceTable::detach`].
    pub(crate) fn detach(&mut self, device: &AttachedDevice<M>) -> Result<(), Error> {
        self.attention = true;
        self.devices.detach(device)
    }

    /// Forgets the detached devices that no slot names any more. `release` gets each with its counts, and
    /// returns these with those of its own.
    pub(crate) fn release_detached(
        &mut self,
        mut release: impl FnMut(&AttachedDevice<M>, Stats) -> Stats,
    ) {
        let Self { pool, devices, back_offs, syncs, .. } = self;
        devices.release(
            |index| pool.in_use_of(index) > 0,
            |device| {
                syncs.forget(device.index());
                let counts = back_offs.forget(device.index());
                release(device, device.stats().with_back_off(counts))
            },
        );
    }

    /// The counts of a device, without those of the mechanisms that stand on this one.
    pub(crate) fn stats_of(&self, device: &AttachedDevice<M>) -> Stats {
        device.stats().with_back_off(self.back_offs.counts(device.index()))
    }

    /// The counts of the devices that are gone, and those of the pool.
    pub(crate) fn departed(&self) -> Stats {
        Stats { pool: self.pool.stats(), ..self.devices.departed() }
    }
}

/// Work of a poll beside requests that end by their only transfers.
impl<M: BlockMap + ?Sized> Requests<M> {
    /// Whether a request of the engine was stopped at some time.
    pub(crate) const fn has_stopped(&self) -> bool {
        self.has_stopped
    }

    /// Takes note of a request that is stopped.
    pub(crate) fn stopped(&mut self) {
        self.has_stopped = true;
        self.attention = true;
    }

    /// Lets the next poll look for more than requests that end by their only transfers.
    #[inline(always)]
    pub(crate) fn attend_later(&mut self) {
        self.attention = true;
    }

    /// Whether something was collected for the next submission.
    #[inline(always)]
    pub(crate) fn has_collected(&self) -> bool {
        self.attention
    }

    /// Whether a poll has more to do than to end requests by their only transfers.
    #[inline(always)]
    pub(crate) fn needs_attention(&self) -> bool {
        self.attention || self.workers.has_returned()
    }

    /// Finds out whether something is left for the next poll; `others` says so of the mechanisms that
    /// stand on this one.
    pub(crate) fn attended(&mut self, others: bool) {
        self.attention = others
            || self.back_offs.is_counting()
            || self.workers.has_jobs()
            || !self.deadlines.is_empty()
            || self.devices.has_detached();
    }
}

/// The end of transfers.
impl<M: BlockMap + ?Sized> Requests<M> {
    /// The slot that `token` names, if it is a transfer's.
    #[inline(always)]
    pub(crate) fn of_transfer(&self, token: Token) -> Option<&RequestSlot> {
        self.pool.of_transfer(token)
    }

    /// Ends a request with the result that is in its slot.
    #[inline(always)]
    pub(crate) fn complete_as_is(&mut self, slot: u32) {
        self.pool.complete_as_is(slot);
    }

    /// Ends the request in `slot` if it is a write whose only transfer has moved all of its bytes, no
    /// durable write in flight has to be counted, and nothing that was read ahead has to be forgotten. It is put into the
    /// list of done ones first, so that the rest of this needs no more than its range and device.
    #[inline(always)]
    pub(crate) fn end_if_full_write(&mut self, slot: u32, outcome: Outcome) -> bool {
        let request = &mut self.pool[slot];
        if !request.is_full_write(outcome)
            || !self.syncs.is_idle()
            || shared_inode::any_reads_ahead()
        {
            return false;
        }
        request.result = i64::from(outcome);
        let (range, locked, device) = (request.io.range, request.locked, request.device());
        request.locked = false;
        self.pool.complete_as_is(slot);
        let disk = &self.devices[device].disk;
        disk.map.mark_allocated(range);
        if locked {
            disk.ranges.unlock(range, LockMode::Shared);
        }
        true
    }

    /// Ends the request in `slot`, whose only transfer has moved all of its bytes.
    pub(crate) fn end_full(&mut self, slot: u32) {
        let request = &self.pool[slot];
        let len = request.io.range.len as i64;
        if request.io.op == Op::Write {
            self.mark_written(slot);
            self.unlock(slot);
        }
        self.complete(slot, len);
    }

    /// Continues on the general path after a request's only transfer has failed, was refused or was
    /// short.
    #[cold]
    pub(crate) fn fall_back(&mut self, slot: u32, outcome: Outcome) {
        let request = &mut self.pool[slot];
        let (len, place) = (request.io.range.len, request.place);
        if place.segments == 0 {
            request.segments.set_one(IoSegment { base: place.base, len: len as usize });
        }
        request.set_role(Role::Split);
        self.record_outcome(slot, classify(outcome, len));
        self.finish_or_continue(slot);
    }

    /// Records the result of a transfer in its request's `slot`.
    pub(crate) fn record_outcome(&mut self, slot: u32, result: TransferResult) {
        let request = &mut self.pool[slot];
        let device = request.device();
        if result == TransferResult::Refused {
            request.again = true;
            return self.back_offs.refused(device);
        }
        self.back_offs.reaped(device);
        match result {
            TransferResult::Full | TransferResult::Refused => {}
            TransferResult::Short => request.again = true,
            // The end of the file may have been where the file system cannot read (`BlockDevice::room`).
            TransferResult::Failed(errno)
                if errno == -libc::EIO
                    && request.io.op == Op::Read
                    && self.devices[device].disk.growing().is_some() =>
            {
                request.again = true;
            }
            // Cancelled in the kernel: the request ends with the errno of its stop.
            TransferResult::Failed(errno)
                if errno == -libc::ECANCELED && request.stop.errno().is_some() =>
            {
                request.again = true;
            }
            TransferResult::Failed(errno) => request.fail(i64::from(errno)),
        }
    }

    /// Counts a transfer of the request in `slot` as refused, which is tried again later.
    pub(crate) fn count_refusal(&mut self, slot: u32) {
        self.back_offs.refused(self.pool[slot].device());
    }

    /// Does the next step of a request whose transfers have all ended.
    pub(crate) fn finish_or_continue(&mut self, slot: u32) {
        let len = self.pool[slot].io.range.len as i64;
        if self.pool[slot].io.op == Op::Write {
            self.mark_written(slot);
        }
        self.unlock(slot);
        match next_step(&self.pool[slot]) {
            NextStep::Nothing => self.complete(slot, len),
            NextStep::Error => {
                let result = self.pool[slot].result;
                self.complete(slot, result);
            }
            NextStep::Sync => self.offload(slot, WorkerTask::Sync { result: len }),
            NextStep::Again => {
                self.device_of(slot).count(Count::Retried);
                self.offload(slot, WorkerTask::Run);
            }
        }
    }

    fn mark_written(&mut self, slot: u32) {
        let request = &self.pool[slot];
        self.devices[request.device()].disk.written(request.io.range);
    }

    /// Releases the range lock of the request, if it holds one.
    pub(crate) fn unlock(&mut self, slot: u32) {
        let request = &mut self.pool[slot];
        if std::mem::take(&mut request.locked) {
            let disk = &self.devices[request.device()].disk;
            disk.ranges.unlock(request.io.range, LockMode::Shared);
        }
    }
}

/// Completions.
impl<M: BlockMap + ?Sized> Requests<M> {
    /// Ends the request with `result`; `next` gives it back, with `inline_completion` off only after a
    /// detour over a worker.
    #[inline]
    pub(crate) fn complete(&mut self, slot: u32, result: i64) {
        if !self.config.inline_completion {
            self.back_offs.reaped(self.pool[slot].device());
            return self.enqueue_work(slot, WorkerTask::CompleteOnly { result });
        }
        self.push_completion(slot, result);
    }

    #[inline]
    fn push_completion(&mut self, slot: u32, result: i64) {
        if result < 0 || !self.syncs.is_idle() {
            self.count_end(slot, result);
        }
        self.pool.complete(slot, result);
    }

    /// Counts a failure, and the end of a durable write that could share a sync.
    #[inline(never)]
    fn count_end(&mut self, slot: u32, result: i64) {
        let request = &self.pool[slot];
        let device = &self.devices[request.device()];
        device.add(Count::Failed, u64::from(result < 0));
        if device.simple_path.can_share_sync(request.io) {
            self.syncs.end(device.index());
        }
    }

    /// Counts a durable write of `device` that was accepted, if it could share a sync.
    #[inline(always)]
    pub(crate) fn begin_sync(&mut self, device: &AttachedDevice<M>, io: Request) {
        if device.simple_path.can_share_sync(io) {
            self.syncs.begin(device.index());
        }
    }

    /// Whether a sync follows the data of `io`, which is accepted.
    #[inline(always)]
    pub(crate) fn needs_separate_sync(&self, device: &AttachedDevice<M>, io: Request) -> bool {
        let others = !self.syncs.is_idle() && self.syncs.has_others(device.index());
        device.simple_path.needs_separate_sync(io, others)
    }

    /// The request that ended first of those that were not given back.
    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<Completion> {
        let request = self.pool.pop_completed()?;
        let buf = request.take_buf();
        let Request { op, flags, range } = request.io;
        Some(Completion {
            tag: request.tag,
            device: self.devices.completed(request.device()),
            io: Request { op, flags, range },
            buf,
            result: request.result,
        })
    }
}

/// Requests that workers have.
impl<M: BlockMap + ?Sized> Requests<M> {
    /// Hands a request to a worker; one with `NOWAIT` that a worker would have to run ends with
    /// `EAGAIN` instead (C32).
    pub(crate) fn offload(&mut self, slot: u32, task: WorkerTask) {
        let request = &self.pool[slot];
        if task == WorkerTask::Run {
            let refused = request.io.flags.contains(Flags::NOWAIT).then_some(libc::EAGAIN);
            if let Some(errno) = request.stop.errno().or(refused) {
                return self.complete(slot, -i64::from(errno));
            }
        }
        self.enqueue_work(slot, task);
    }

    fn enqueue_work(&mut self, slot: u32, task: WorkerTask) {
        self.attention = true;
        let request = &mut self.pool[slot];
        let jobs = self.devices[request.device()].jobs();
        self.workers.add(slot, request, jobs, task);
    }

    /// Ends the job of `slot` with `errno` if no worker has begun with it.
    pub(crate) fn stop_job(&mut self, slot: u32, errno: i32) {
        let request = &self.pool[slot];
        let device = self.devices[request.device()].jobs().number();
        self.workers.stop(slot, request, device, errno);
    }

    pub(crate) fn deadlines(&self) -> &Deadlines {
        &self.deadlines
    }

    pub(crate) fn deadlines_mut(&mut self) -> &mut Deadlines {
        &mut self.deadlines
    }

    /// Hands the collected requests to the workers.
    #[inline]
    pub(crate) fn submit_work(&mut self) {
        self.workers.submit();
    }

    /// Ends the requests that workers have returned. `returned` gets the device and the slot of each
    /// before.
    pub(crate) fn take_returned(&mut self, mut returned: impl FnMut(u32, u32)) {
        if !self.workers.has_returned() {
            return;
        }
        let Self { workers, pool, devices, syncs, .. } = self;
        workers.take_returned(|slot, result| {
            let request = &mut pool[slot];
            debug_assert_eq!(request.state, State::Worker);
            let device = &devices[request.device()];
            device.count(Count::Remote);
            returned(device.index(), slot);
            device.add(Count::Failed, u64::from(result < 0));
            if !syncs.is_idle() && device.simple_path.can_share_sync(request.io) {
                syncs.end(device.index());
            }
            let has_extents = request.io.op == Op::Status && result >= 0;
            let extents = has_extents.then(|| (request.tag, std::mem::take(&mut request.extents)));
            pool.complete(slot, result);
            extents
        });
    }

    /// The descriptor of [`WorkerExchange::fd`].
    pub(crate) fn worker_fd(&self) -> BorrowedFd<'_> {
        self.workers.fd()
    }

    /// Clears that descriptor, see [`WorkerExchange::acknowledge`].
    pub(crate) fn acknowledge_workers(&self) {
        self.workers.acknowledge();
    }

    /// Extents that [`WorkerExchange::take_extents`] has.
    pub(crate) fn take_extents(&mut self, tag: u64) -> Vec<ExtentStatus> {
        self.workers.take_extents(tag)
    }
}

/// Back-off.
impl<M: BlockMap + ?Sized> Requests<M> {
    /// Counts a request of `device`, which backs off, that is not tried.
    #[cold]
    pub(crate) fn count_untried(&mut self, device: &AttachedDevice<M>) {
        if self.back_offs.count_down(device.index()) {
            device.set_backing_off(&self.config, false);
        }
    }

    /// Evaluates a poll for the back-off of each device with refusals.
    pub(crate) fn observe_poll(&mut self) {
        let Self { back_offs, pool, devices, config, .. } = self;
        let whole = |device: u32| {
            let is_whole = |it: &&RequestSlot| {
                it.device() == device && matches!(it.role, Role::Read | Role::Write)
            };
            pool.done().filter(is_whole).count()
        };
        back_offs.observe_poll(whole, |device| devices[device].set_backing_off(config, true));
    }
}

/// Transfers that are pushed to the queue.
impl<M: BlockMap + ?Sized> Requests<M> {
    /// The only transfer of the request in `slot`.
    pub(crate) fn transfer_of(&self, slot: u32) -> Transfer {
        let request = &self.pool[slot];
        let simple_path = &self.devices[request.device()].simple_path;
        simple_path.transfer(request.io, request.target, request.place)
    }

    /// Pushes the only transfer of an accepted request; without room in the queue a worker does the
    /// request.
    pub(crate) fn push_or_fall_back<Q: IoQueue>(&mut self, queue: &mut Q, slot: u32) {
        debug_assert_eq!(self.pool[slot].state, State::Queued);
        if self.pool[slot].stop.errno().is_some() {
            return self.fall_back(slot, 0);
        }
        let transfer = self.transfer_of(slot);
        // SAFETY: the memory was promised, or is the slot's, until the request is given back.
        if !unsafe { push_transfer(queue, &transfer, slot) } {
            // A transfer that has moved nothing ends in the same way.
            self.fall_back(slot, 0);
        }
    }

    /// Refuses a request of the simple path for which the queue has no room.
    #[cold]
    pub(crate) fn reject_queue_full(&mut self, slot: u32) -> Rejected {
        self.unlock(slot);
        self.device_of(slot).uncount_simple();
        let request = &mut self.pool[slot];
        let (range, buf) = (request.io.range, request.buf.take());
        self.pool.free(slot);
        reject_full(range, buf)
    }

    /// Leaks the slots: the kernel or a worker may still write to memory that they hold.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.pool, SlotPool::new(1, true)));
    }
}

/// The rejection of a request for which there is no room: `EAGAIN`.
pub(crate) fn reject_full(range: ByteRange, buf: Option<PooledBuffer>) -> Rejected {
    Rejected { error: Error::new(libc::EAGAIN, Operation::Validate).at(range), buf }
}

/// Pushes a transfer to the queue. If the queue is full, submits the earlier transfers and pushes
/// again; false if there is still no room.
///
/// # Safety
/// The promise of [`IoQueue::push`].
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
