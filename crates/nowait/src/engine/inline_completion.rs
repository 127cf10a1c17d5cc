//! Inline completion: the thread that reaps the last transfer of a request also finishes the
//! request (C42). This saves the hand-over to a worker and the wake-up back. The switch
//! [`crate::Config::inline_completion`] turns it off; every completion then makes a detour over a
//! worker (`WorkerTask::CompleteOnly`).
//!
//! Invariant: `next_step` is the only place that lists the work left after the data; a request for
//! which it lists none is finished by the thread that reaps.

use crate::block::block_map::BlockMap;
use crate::block::range_lock::LockMode;
use crate::blocking::worker_pool::WorkerTask;
use crate::engine::attached_device::count;
use crate::engine::dispatcher::Dispatcher;
use crate::engine::slot::{RequestSlot, Role, State};
use crate::engine::transfer_result::{TransferResult, classify};
use crate::types::iovec::IoSegment;
use crate::types::request::{Flags, Op};
use crate::types::token::Token;
use crate::types::transfer::Outcome;

/// The work left for a request after its data.
///
/// Other work that a kernel defers is part of a queue's transfer: before the transfer ends, the
/// file system commits the allocation and the size of the file, and the kernel drops cached pages
/// around a direct write. An image that allocates by itself adds its commit to this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// No work: the request has succeeded.
    Nothing,
    /// A sync: the fragments were written without `DSYNC` (C29).
    Sync,
    /// A transfer was refused without waiting, interrupted, or short: a worker does the whole
    /// request again, and may allocate, resume, or find the end of the file (C19, C34, C35).
    Again,
    /// No work: the request has failed.
    Error,
}

/// The work left for `request`, all of whose transfers have ended.
pub(crate) fn next_step(request: &RequestSlot) -> NextStep {
    if request.result < 0 {
        NextStep::Error
    } else if request.again {
        NextStep::Again
    } else if request.role == Role::Split
        && request.io.op.changes()
        && request.io.flags.has(Flags::DSYNC)
    {
        NextStep::Sync
    } else {
        NextStep::Nothing
    }
}

impl<M: BlockMap + ?Sized> Dispatcher<M> {
    /// Handles the end of the transfer under `token`; false if that is not a transfer's.
    #[inline(always)]
    pub(crate) fn on_transfer_done(
        &mut self,
        token: Token,
        outcome: Outcome,
        inline_completion: bool,
    ) -> bool {
        let Some(request) = self.pool.of_transfer(token) else { return false };
        debug_assert_eq!(request.state, State::Queued);
        if inline_completion && i64::from(outcome) == request.result {
            self.pool.complete_as_is(token as u32);
        } else {
            self.on_transfer_done_slow(token as u32, outcome);
        }
        true
    }

    /// As `on_transfer_done`, for all cases but a full read by a request's only transfer, which it
    /// handles only with `inline_completion` off.
    #[inline(never)]
    pub(crate) fn on_transfer_done_slow(&mut self, slot: u32, outcome: Outcome) {
        self.attention = true;
        let request = &mut self.pool[slot];
        match request.role {
            Role::Fragment => return self.on_fragment_done(slot, outcome),
            Role::Merged => return self.on_merged_done(slot, outcome),
            Role::Read | Role::Write | Role::Split => {}
        }
        if i64::from(outcome) != request.io.range.len as i64 {
            return self.on_partial(slot, outcome);
        }
        if request.io.op == Op::Write {
            let range = request.io.range;
            let disk = &self.devices[request.device()].attached.disk;
            disk.map.mark_allocated(range);
            if request.locked {
                request.locked = false;
                disk.ranges.unlock(range, LockMode::Shared);
            }
        }
        self.complete(slot, i64::from(outcome));
    }

    /// Handles the end of a request's only transfer, which has not moved all bytes.
    #[inline(never)]
    fn on_partial(&mut self, slot: u32, outcome: Outcome) {
        if !self.defer_if_overwrite(slot, outcome) {
            self.fall_back(slot, outcome);
        }
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
        count(&self.devices[request.device()].attached.reaped);
        match result {
            TransferResult::Full => {}
            TransferResult::Short => request.again = true,
            TransferResult::Refused => {
                request.again = true;
                let device = request.device();
                self.count_refusal(device);
            }
            TransferResult::Failed(errno) => request.fail(i64::from(errno)),
        }
    }

    /// Does the next step of a request whose transfers have all ended.
    pub(crate) fn finish_or_continue(&mut self, slot: u32) {
        let request = &mut self.pool[slot];
        let len = request.io.range.len as i64;
        if request.io.op == Op::Write {
            let disk = &self.devices[request.device()].attached.disk;
            disk.map.mark_allocated(request.io.range);
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
                let device = self.pool[slot].device();
                self.devices[device].stats.retried += 1;
                self.offload(slot, WorkerTask::Run);
            }
        }
    }

    /// Ends the request with `result`; `next` gives it back, with `inline_completion` off only
    /// after a detour over a worker.
    #[inline]
    pub(crate) fn complete(&mut self, slot: u32, result: i64) {
        if !self.config.inline_completion {
            count(&self.devices[self.pool[slot].device()].attached.reaped);
            return self.enqueue_work(slot, WorkerTask::CompleteOnly { result });
        }
        self.push_completion(slot, result);
    }

    #[inline]
    pub(crate) fn push_completion(&mut self, slot: u32, result: i64) {
        if result < 0 || self.durable_writes > 0 {
            self.count_completion(slot, result);
        }
        self.pool.complete(slot, result);
    }

    /// Counts a failure, and the end of a durable write that could share a sync.
    #[inline(never)]
    fn count_completion(&mut self, slot: u32, result: i64) {
        let request = &self.pool[slot];
        let device = &mut self.devices[request.device()];
        device.stats.failed += u64::from(result < 0);
        let durable = &device.attached.durable_writes;
        if durable.get() > 0 && device.attached.simple_path.can_share_sync(request.io) {
            durable.set(durable.get() - 1);
            self.durable_writes -= 1;
        }
    }
}
