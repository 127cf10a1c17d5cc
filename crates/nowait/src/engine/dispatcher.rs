//! The dispatcher: the state of one engine's requests, the start of simple ones, and the exchange
//! with the workers.
//!
//! Invariant: a slot's state names its holder. The queue is not called from its own completion
//! callback, so completions that start further transfers do not recurse (C44).
#![allow(unsafe_code)]

#[cfg(test)]
#[cfg(feature = "sim")]
mod tests;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::block::block_map::{BlockMap, Extent};
use crate::block::device::BlockDevice;
use crate::block::range_lock::LockMode;
use crate::blocking::worker_pool::{WorkerJob, WorkerPool, WorkerTask};
use crate::engine::back_off::BackOff;
use crate::engine::completion::{Completion, Rejected, Stats};
use crate::engine::merge_run::Merger;
use crate::engine::pool::SlotPool;
use crate::engine::simple_path::{SimplePath, Verdict};
use crate::engine::slot::{Place, Role, State};
use crate::memory::buffer_pool::{Budget, BufferPool, PooledBuffer};
use crate::queue::{IoQueue, Token};
use crate::threads::completion_list::CompletionList;
use crate::types::config::Config;
use crate::types::error::{Error, Operation};
use crate::types::iovec::IoSegment;
use crate::types::request::{ExtentStatus, Flags, Op, Request};
use crate::types::transfer::{Transfer, UNREGISTERED};

/// The requests of one engine.
pub(crate) struct Dispatcher<M: BlockMap> {
    pub(crate) pool: SlotPool,
    /// Results of status requests that were given back, by tag.
    pub(crate) extents: Vec<(u64, Vec<ExtentStatus>)>,
    pub(crate) simple_path: SimplePath,
    /// Requests whose submitted fragments have all ended.
    pub(crate) resumable: Vec<u32>,
    pub(crate) work_items: Vec<WorkerJob>,
    pub(crate) completions: Arc<CompletionList>,
    pub(crate) disk: Arc<BlockDevice<M>>,
    pub(crate) workers: WorkerPool,
    /// Buffers for fragments that cannot use the request's memory.
    pub(crate) bounce: BufferPool,
    /// Scratch space for lists of segments.
    pub(crate) merged: Vec<IoSegment>,
    pub(crate) config: Config,
    pub(crate) back_off: BackOff,
    pub(crate) merger: Merger,
    /// Something may be left for a poll to do beside ending full reads; see
    /// [`Dispatcher::attended`].
    pub(crate) attention: bool,
    /// Completions of this poll that are no transfers.
    pub(crate) events: usize,
    pub(crate) stats: Stats,
    /// Overwrites that wait for the probe request.
    pub(crate) deferred: VecDeque<u32>,
    /// The slot of the probe request: a refused overwrite that a worker has.
    pub(crate) probe_slot: Option<u32>,
    /// Durable writes in flight that could share a sync.
    pub(crate) durable_writes: u32,
    /// Slots handed out so far for anything but simple requests.
    pub(crate) other_slots: u64,
    /// Slots that hold fragments; they do not count as requests.
    pub(crate) fragments: usize,
}

impl<M: BlockMap> Dispatcher<M> {
    /// A dispatcher whose bounce buffers are taken from `budget`.
    pub(crate) fn new(
        disk: Arc<BlockDevice<M>>,
        workers: WorkerPool,
        config: Config,
        budget: Budget,
    ) -> Result<Self, Error> {
        let pool = SlotPool::new(config.slots, config.pool);
        let completions = Arc::new(CompletionList::new(pool.limit())?);
        let mut simple_path = SimplePath::new(&disk, &config);
        simple_path.set_on(&disk, config.simple && config.nowait_first);
        Ok(Self {
            pool,
            extents: Vec::new(),
            simple_path,
            resumable: Vec::with_capacity(64),
            work_items: Vec::with_capacity(64),
            completions,
            disk,
            workers,
            bounce: BufferPool::new(budget),
            merged: Vec::new(),
            config,
            back_off: BackOff::new(config.back_off),
            merger: Merger::new(config.merge),
            attention: false,
            events: 0,
            stats: Stats::default(),
            deferred: VecDeque::new(),
            probe_slot: None,
            durable_writes: 0,
            other_slots: 0,
            fragments: 0,
        })
    }

    #[inline]
    pub(crate) fn disk(&self) -> &BlockDevice<M> {
        &self.disk
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
        let simple = self.pool.allocs() - self.other_slots;
        Stats { simple, refused: self.back_off.total(), pool: self.pool.stats(), ..self.stats }
    }

    /// As [`SimplePath::map_for_simple_path`].
    #[inline]
    pub(crate) fn simple(&self, io: Request, base: *mut u8) -> Verdict {
        self.simple_path.map_for_simple_path(&self.disk, io, base)
    }

    /// Tries the simple path from now on, if it is on and there is no back-off, or does not.
    pub(crate) fn update_simple_path(&mut self) {
        let on = self.config.simple && self.config.nowait_first && !self.back_off.is_backing_off();
        self.simple_path.set_on(&self.disk, on);
    }

    /// Starts a request for which [`Dispatcher::simple`] has found `extent`.
    ///
    /// # Safety
    /// `base` is valid for the range's length until the request is given back, or lies in `buf`.
    #[inline(always)]
    pub(crate) unsafe fn submit_simple<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        io: Request,
        extent: Extent,
        base: *mut u8,
        buf: Option<PooledBuffer>,
        tag: u64,
    ) -> Result<(), Rejected> {
        let locked = self.simple_path.needs_range_lock(io);
        let Some((slot, request)) = self.pool.alloc() else {
            return Err(self.reject_no_slot(io, locked, buf));
        };
        let buffer = buf.as_ref().map_or(UNREGISTERED, PooledBuffer::registered);
        let place = Place { base, pos: extent.pos, segments: 0, buffer, file: extent.file.into() };
        let role = if io.op == Op::Write { Role::Write } else { Role::Read };
        request.begin(role, State::Queued, io, buf, tag);
        request.locked = locked;
        request.place = place;
        let end = std::mem::replace(&mut self.merger.end, extent.pos + extent.len);
        if end == extent.pos {
            return self.start_neighbour(queue, slot);
        }
        let transfer = self.simple_path.transfer(io, place);
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
        io: Request,
        base: *mut u8,
        buf: Option<PooledBuffer>,
        tag: u64,
    ) -> Result<(), Rejected> {
        let Some((slot, request)) = self.pool.alloc() else { return Err(reject_full(io, buf)) };
        self.other_slots += 1;
        request.begin(Role::Split, State::Submitting, io, buf, tag);
        request.segments.set_one(IoSegment { base, len: io.range.len as usize });
        self.stats.worker += 1;
        self.offload(slot, WorkerTask::Run);
        Ok(())
    }

    /// Rejects a request for which there is no slot.
    #[cold]
    pub(crate) fn reject_no_slot(
        &mut self,
        io: Request,
        locked: bool,
        buf: Option<PooledBuffer>,
    ) -> Rejected {
        if locked {
            self.disk.ranges.unlock(io.range, LockMode::Shared);
        }
        reject_full(io, buf)
    }

    /// Rejects a request for which the queue has no room.
    #[cold]
    pub(crate) fn reject_queue_full(&mut self, slot: u32) -> Rejected {
        self.unlock(slot);
        self.other_slots += 1;
        let request = &mut self.pool[slot];
        let (io, buf) = (request.io, request.buf.take());
        self.pool.free(slot);
        reject_full(io, buf)
    }

    pub(crate) fn unlock(&mut self, slot: u32) {
        let request = &mut self.pool[slot];
        if std::mem::take(&mut request.locked) {
            self.disk.ranges.unlock(request.io.range, LockMode::Shared);
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
            client: (request.tag >> 32) as u32,
            merge: self.config.merge && task == WorkerTask::Run,
            completions: self.completions.clone(),
        });
    }

    /// Starts what was collected since the last poll: the open run and the work items. To be called
    /// before each submission.
    #[inline]
    pub(crate) fn start_collected<Q: IoQueue>(&mut self, queue: &mut Q) {
        if self.attention {
            self.close_run(queue);
            self.submit_work();
        }
    }

    /// Whether a poll has more to do than to end full reads.
    #[inline]
    pub(crate) fn needs_attention(&self) -> bool {
        self.attention || self.completions.is_not_empty()
    }

    /// Counts a completion that is no transfer.
    pub(crate) fn count_event(&mut self) {
        self.events += 1;
        self.attention = true;
    }

    /// Finds out whether something is left for the next poll. Whatever adds to one of these lists
    /// or counts outside of a poll, or while completions are drained, sets `attention`.
    pub(crate) fn attended(&mut self) {
        self.attention = self.merger.is_busy()
            || self.back_off.is_counting()
            || !self.resumable.is_empty()
            || !self.work_items.is_empty()
            || !self.deferred.is_empty();
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
            self.stats.remote += 1;
            if self.probe_slot == Some(slot) {
                self.probe_slot = None;
            }
            let request = &mut self.pool[slot];
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
    if unsafe { queue.push(transfer, Token::from(slot)) }.is_ok() {
        return true;
    }
    // SAFETY: as promised by the caller.
    queue.submit().is_ok() && unsafe { queue.push(transfer, Token::from(slot)) }.is_ok()
}
