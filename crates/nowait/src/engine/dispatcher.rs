//! The dispatcher: the way of a request from its submission to the mechanism that serves it, and of a
//! transfer's end to the mechanism that made it.
//!
//! Nowait first: a request is tried without waiting on the engine's thread, and goes to a worker only if it
//! is refused (C37). This saves two thread switches for each request that need not wait. The switch
//! [`crate::Config::nowait_first`] turns it off; every request then goes to a worker.
//!
//! Invariant: each mechanism changes only its own state, and the requests by their methods. The queue is not
//! called from its own completion callback, so completions that start further transfers do not recurse
//! (C44).
#![allow(unsafe_code)]

#[cfg(test)]
#[cfg(feature = "sim")]
mod tests;

use crate::block::block_map::{BlockMap, Extent};
use crate::block::device::BlockDevice;
use crate::block::range_lock::LockMode;
use crate::blocking::sync_io;
use crate::blocking::worker_pool::{WorkerPool, WorkerTask};
use crate::engine::attached_device::{AttachedDevice, Count};
use crate::engine::completion::{Rejected, Stats};
use crate::engine::deferred_overwrites::DeferredOverwrites;
use crate::engine::merge::Merging;
use crate::engine::requests::{Requests, push_transfer, reject_full};
use crate::engine::simple_path::Verdict;
use crate::engine::slot::{Place, Role, State};
use crate::engine::split_requests::SplitRequests;
use crate::engine::vectored::{self, Path};
use crate::memory::buffer_pool::{Budget, PooledBuffer};
use crate::queue::IoQueue;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::error::{Error, Operation};
use crate::types::iovec::{self, IoSegment};
use crate::types::request::{Flags, Op, Request};
use crate::types::token::{self, Token};
use crate::types::transfer::{Outcome, UNREGISTERED};

/// The requests of one engine, and the mechanisms that serve them.
pub(crate) struct Dispatcher<M: BlockMap + ?Sized> {
    requests: Requests<M>,
    merging: Merging,
    deferred: DeferredOverwrites,
    split: SplitRequests,
    /// Scratch space for lists of segments.
    segments: Vec<IoSegment>,
}

impl<M: BlockMap + ?Sized> Dispatcher<M> {
    /// A dispatcher without devices whose bounce buffers are taken from `budget`.
    pub(crate) fn new(workers: WorkerPool, config: Config, budget: Budget) -> Result<Self, Error> {
        Ok(Self {
            requests: Requests::new(workers, config)?,
            merging: Merging::new(config.merge),
            deferred: DeferredOverwrites::new(),
            split: SplitRequests::new(budget),
            segments: Vec::new(),
        })
    }

    #[inline(always)]
    pub(crate) fn requests(&self) -> &Requests<M> {
        &self.requests
    }

    #[inline(always)]
    pub(crate) fn requests_mut(&mut self) -> &mut Requests<M> {
        &mut self.requests
    }

    /// Requests that were accepted and not given back.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.requests.pool().in_use() - self.split.fragments()
    }

    /// Whether requests wait for the submission of the queue.
    #[inline]
    pub(crate) fn has_run(&self) -> bool {
        self.merging.has_run()
    }

    pub(crate) fn stats(&self) -> Stats {
        let devices = self.requests.devices().map(|device| self.counts(device));
        devices.fold(self.requests.departed(), Stats::plus)
    }

    /// The counts of one device; 0 once it is detached and no slot names it.
    pub(crate) fn stats_of(&self, device: &AttachedDevice<M>) -> Stats {
        if self.requests.contains(device) { self.counts(device) } else { Stats::default() }
    }

    fn counts(&self, device: &AttachedDevice<M>) -> Stats {
        Stats {
            merged: self.merging.merged(device.index()),
            deferred: self.deferred.deferred(device.index()),
            ..self.requests.stats_of(device)
        }
    }

    /// Slots that name `device`.
    pub(crate) fn in_use_of(&self, device: &AttachedDevice<M>) -> usize {
        let is_there = self.requests.contains(device);
        if is_there { self.requests.pool().in_use_of(device.index()) } else { 0 }
    }

    /// Forgets the detached devices that no slot names any more; `release` gets each of them.
    pub(crate) fn release_detached(&mut self, mut release: impl FnMut(&AttachedDevice<M>)) {
        let Self { requests, merging, deferred, .. } = self;
        requests.release_detached(|device, counts| {
            release(device);
            let merged = merging.forget(device.index());
            let deferred = deferred.forget(device.index());
            Stats { merged, deferred, ..counts }
        });
    }

    /// Leaks all memory that the kernel or a worker may still write to.
    pub(crate) fn leak_in_flight(&mut self) {
        self.requests.leak();
        self.merging.leak();
        self.split.leak();
    }

    /// The verdict of the device's simple path; a request of a device of another engine is not simple.
    #[inline(always)]
    pub(crate) fn simple(&self, device: &AttachedDevice<M>, io: Request, base: *mut u8) -> Verdict {
        if !self.requests.serves(device) {
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
        let Some((slot, request)) = self.requests.alloc() else {
            return Err(reject_no_slot(device, io.range, locked, buf));
        };
        let buffer = buf.as_ref().map_or(UNREGISTERED, PooledBuffer::registered);
        let target = device.target(extent.file);
        let place = Place { base, pos: extent.pos, segments: 0, buffer };
        request.begin(own_transfer(io.op), State::Queued, target, io, buf, tag);
        request.locked = locked;
        request.place = place;
        device.count(Count::Simple);
        if device.continues(extent) {
            return self.merging.start(&mut self.requests, queue, slot);
        }
        let transfer = device.simple_path.transfer(io, target, place);
        // SAFETY: the memory is the buffer now in the slot, or promised by the caller; both last
        // until the slot is done.
        if !unsafe { push_transfer(queue, &transfer, slot) } {
            return Err(self.requests.reject_queue_full(slot));
        }
        Ok(())
    }

    /// Starts a request as [`Dispatcher::submit_simple`] does, for memory at `base` that is registered
    /// under `number`; that of a driver has no address. Its transfer is not merged with others: the list of a merged
    /// one has addresses.
    ///
    /// # Safety
    /// `base` is null or valid for the range's length until the request is given back.
    pub(crate) unsafe fn submit_registered<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        device: &AttachedDevice<M>,
        io: Request,
        extent: Extent,
        (base, number): (*mut u8, u16),
        tag: u64,
    ) -> Result<(), Rejected> {
        let locked = device.simple_path.needs_range_lock(io);
        let Some((slot, request)) = self.requests.alloc() else {
            return Err(reject_no_slot(device, io.range, locked, None));
        };
        let target = device.target(extent.file);
        request.begin(own_transfer(io.op), State::Queued, target, io, None, tag);
        device.count(Count::Simple);
        request.locked = locked;
        request.place = Place { base, pos: extent.pos, segments: 0, buffer: number };
        let transfer = device.simple_path.transfer(io, target, request.place);
        // SAFETY: the transfer names no address of this process, and the kernel holds the driver's
        // memory until it has ended; or the memory was promised by the caller.
        if unsafe { push_transfer(queue, &transfer, slot) } {
            return Ok(());
        }
        Err(self.requests.reject_queue_full(slot))
    }

    /// Starts a request for which [`Dispatcher::simple`] has said that it must wait. `base` is
    /// valid as for [`Dispatcher::submit_simple`]. It takes the request's fields one by one, so that a
    /// simple request needs no memory before it is in its slot.
    #[cold]
    pub(crate) fn submit_to_worker(
        &mut self,
        device: &AttachedDevice<M>,
        (op, flags): (Op, Flags),
        range: ByteRange,
        base: *mut u8,
        buf: Option<PooledBuffer>,
        tag: u64,
    ) -> Result<(), Rejected> {
        let io = Request { op, flags, range };
        let Some((slot, request)) = self.requests.alloc() else {
            return Err(reject_full(io.range, buf));
        };
        request.begin(Role::Split, State::Submitting, device.first(), io, buf, tag);
        request.segments.set_one(IoSegment { base, len: io.range.len as usize });
        device.count(Count::Worker);
        self.requests.offload(slot, WorkerTask::Run);
        Ok(())
    }

    /// Starts any request by the general path: by one transfer, by fragments or by a worker.
    pub(crate) fn submit_general<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        device: &AttachedDevice<M>,
        io: Request,
        segments: &[IoSegment],
        buf: Option<PooledBuffer>,
        tag: u64,
    ) -> Result<(), Rejected> {
        let io = match self.check(device, io, segments) {
            Ok(io) => io,
            Err(error) => return Err(Rejected { error, buf }),
        };
        let Some((slot, request)) = self.requests.alloc() else {
            return Err(reject_full(io.range, buf));
        };
        request.begin(Role::Split, State::Submitting, device.first(), io, buf, tag);
        self.requests.begin_sync(device, io);
        let &[IoSegment { base, .. }] = segments else {
            self.submit_list(queue, device, slot, io, segments);
            return Ok(());
        };
        let one = IoSegment { base, len: io.range.len as usize };
        if one.len == 0 {
            self.requests.complete(slot, 0);
            return Ok(());
        }
        if device.reads_ahead && self.serve_ahead(device, slot, io, &[one]) {
            return Ok(());
        }
        match self.choose_path(device, slot, io, &[one]) {
            Path::Single(extent) => {
                self.submit_single(queue, device, slot, io, extent, (base, 0));
            }
            path => {
                self.requests.slot_mut(slot).segments.set_one(one);
                self.submit_planned(queue, device, slot, path);
            }
        }
        Ok(())
    }

    /// Checks a request against the device; the returned range is cut at the device's end.
    /// `EINVAL` for an unaligned request with `strict` on (C12); as [`sync_io::check`].
    /// `EINVAL` for a device of another engine, `ENODEV` for one that is detached.
    fn check(
        &self,
        device: &AttachedDevice<M>,
        io: Request,
        segments: &[IoSegment],
    ) -> Result<Request, Error> {
        if !self.requests.serves(device) {
            return Err(device.refusal().at(io.range));
        }
        // SAFETY: the memory of a request is valid from its submission on.
        let checked = unsafe { sync_io::check(&device.disk, io, segments) }?;
        let strict = self.requests.config().strict;
        if strict && io.range.len > 0 && !is_aligned(&device.disk, io, segments) {
            return Err(Error::new(libc::EINVAL, Operation::Validate).at(io.range));
        }
        Ok(checked)
    }

    /// Chooses the path of the request `io` in `slot`, whose memory is `segments`, and plans its
    /// fragments. A write's range is locked before it is mapped.
    #[inline]
    fn choose_path(
        &mut self,
        device: &AttachedDevice<M>,
        slot: u32,
        io: Request,
        segments: &[IoSegment],
    ) -> Path {
        let Config { nowait_first, vectored, .. } = *self.requests.config();
        if !nowait_first {
            return Path::Worker;
        }
        if device.is_backing_off() {
            self.requests.count_untried(device);
            return Path::Worker;
        }
        let range = io.range;
        let (disk, simple_path) = (&*device.disk, &device.simple_path);
        let lock = simple_path.needs_range_lock(io);
        if lock && !lock_whole_blocks(disk, range) {
            return Path::Worker;
        }
        let separate_sync = self.requests.needs_separate_sync(device, io);
        let request = self.requests.slot_mut(slot);
        let path = vectored::plan(
            disk,
            io,
            segments,
            || request.buf.as_ref().map(PooledBuffer::segment),
            vectored,
            separate_sync,
            &mut request.fragments,
        );
        match path {
            Path::Worker if lock => disk.ranges.unlock(range, LockMode::Shared),
            _ if lock => request.locked = true,
            _ => {}
        }
        path
    }

    /// Starts a request without memory, or with several segments.
    #[inline(never)]
    fn submit_list<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        device: &AttachedDevice<M>,
        slot: u32,
        io: Request,
        segments: &[IoSegment],
    ) {
        if io.range.len == 0 && io.op != Op::Flush {
            return self.requests.complete(slot, 0);
        }
        let mut merged = std::mem::take(&mut self.segments);
        merged.clear();
        match self.requests.config().vectored {
            true => iovec::merge(segments, io.range.len, &mut merged),
            false => iovec::slice_segments(segments, 0, io.range.len, |one| merged.push(one)),
        }
        if device.reads_ahead && self.serve_ahead(device, slot, io, &merged) {
            self.segments = merged;
            return;
        }
        let path = self.choose_path(device, slot, io, &merged);
        let kept = &mut self.requests.slot_mut(slot).segments;
        kept.set(&merged);
        self.segments = merged;
        match path {
            Path::Single(extent) => {
                let memory = match kept.as_slice() {
                    [one] => (one.base, 0),
                    list => (list.as_ptr().cast_mut().cast(), list.len() as u16),
                };
                self.submit_single(queue, device, slot, io, extent, memory);
            }
            path => self.submit_planned(queue, device, slot, path),
        }
    }

    /// Starts a request by the fragments of its plan or by a worker.
    #[inline(never)]
    fn submit_planned<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        device: &AttachedDevice<M>,
        slot: u32,
        path: Path,
    ) {
        if path == Path::Worker {
            device.count(Count::Worker);
            return self.requests.offload(slot, WorkerTask::Run);
        }
        device.count(Count::General);
        self.split.submit(&mut self.requests, queue, slot);
    }

    /// Submits the only transfer of a request that is a single direct fragment. `memory` is its
    /// only segment's address and 0, or that of the slot's list of segments and their number.
    #[inline]
    fn submit_single<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        device: &AttachedDevice<M>,
        slot: u32,
        io: Request,
        extent: Extent,
        (base, segments): (*mut u8, u16),
    ) {
        device.count(Count::General);
        let request = self.requests.slot_mut(slot);
        let buffer = request.buf.as_ref().map_or(UNREGISTERED, PooledBuffer::registered);
        let target = device.target(extent.file);
        request.target = target;
        request.place = Place { base, pos: extent.pos, segments, buffer };
        let transfer = device.simple_path.transfer(io, target, request.place);
        request.set_role(own_transfer(io.op));
        request.set_state(State::Queued);
        // SAFETY: the memory is the request's, and the list of segments is the slot's; both last
        // until the slot is done.
        if !unsafe { push_transfer(queue, &transfer, slot) } {
            // A transfer that has moved nothing ends in the same way: a worker does the request.
            self.requests.fall_back(slot, 0);
        }
    }

    /// Starts what was collected since the last poll: the open runs and the workers' jobs. To be called
    /// before each submission.
    #[inline(always)]
    pub(crate) fn start_collected<Q: IoQueue>(&mut self, queue: &mut Q) {
        if self.requests.has_collected() {
            self.start_all_collected(queue);
        }
    }

    #[inline(never)]
    fn start_all_collected<Q: IoQueue>(&mut self, queue: &mut Q) {
        self.merging.close(&mut self.requests, queue);
        self.requests.submit_work();
    }

    /// Handles the end of the transfer under `token`; false if that is not a transfer's.
    /// `INLINE_COMPLETION` is the switch.
    #[inline(always)]
    pub(crate) fn on_transfer_done<const INLINE_COMPLETION: bool>(
        &mut self,
        token: Token,
        outcome: Outcome,
    ) -> bool {
        let Some(request) = self.requests.of_transfer(token) else { return false };
        debug_assert_eq!(request.state, State::Queued);
        let slot = token::slot_of(token);
        if INLINE_COMPLETION && i64::from(outcome) == request.result {
            self.requests.complete_as_is(slot);
        } else {
            self.on_other_done::<INLINE_COMPLETION>(slot, outcome);
        }
        true
    }

    /// Handles the end of a transfer in all cases but a full read by a request's only transfer, which it
    /// handles only with `inline_completion` off.
    #[inline(never)]
    fn on_other_done<const INLINE_COMPLETION: bool>(&mut self, slot: u32, outcome: Outcome) {
        if !INLINE_COMPLETION || !self.requests.end_if_full_write(slot, outcome) {
            self.on_uncommon_done(slot, outcome);
        }
    }

    #[inline(never)]
    fn on_uncommon_done(&mut self, slot: u32, outcome: Outcome) {
        let Self { requests, merging, deferred, split, .. } = self;
        requests.attend_later();
        let request = requests.slot(slot);
        let is_full = i64::from(outcome) == request.io.range.len as i64;
        let role = request.role;
        match role {
            Role::Fragment => split.on_transfer_done(requests, slot, outcome),
            Role::Merged => merging.on_transfer_done(requests, slot, outcome),
            _ if is_full => requests.end_full(slot),
            _ if deferred.defer(requests, slot, outcome) => {}
            _ => requests.fall_back(slot, outcome),
        }
    }

    /// Steps of a poll beside the completion of requests by their only transfers.
    ///
    /// # Errors
    /// Errors of [`IoQueue::submit`].
    pub(crate) fn attend<Q: IoQueue>(&mut self, queue: &mut Q) -> Result<(), Error> {
        self.requests.observe_poll();
        self.stop_late(queue);
        let Self { requests, merging, deferred, split, .. } = self;
        requests.take_returned(|device, slot| deferred.on_returned(device, slot));
        loop {
            let mut submitted = merging.retry(requests, queue);
            submitted |= split.resume(requests, queue);
            submitted |= deferred.retry(requests, queue);
            requests.submit_work();
            if !submitted {
                return Ok(());
            }
            queue.submit()?;
        }
    }

    /// Ends the request in `slot`, which is stopped, if it is deferred.
    pub(crate) fn end_deferred(&mut self, slot: u32) {
        self.deferred.end(&mut self.requests, slot);
    }

    /// Finds out whether something is left for the next poll.
    pub(crate) fn attended(&mut self) {
        let Self { requests, merging, deferred, split, .. } = self;
        requests.attended(merging.is_busy() || deferred.is_busy() || split.is_busy());
    }
}

/// The role of a request with one transfer of its own.
#[inline(always)]
fn own_transfer(op: Op) -> Role {
    if op == Op::Write { Role::Write } else { Role::Read }
}

/// Rejects a request for which there is no slot.
#[cold]
fn reject_no_slot<M: BlockMap + ?Sized>(
    device: &AttachedDevice<M>,
    range: ByteRange,
    locked: bool,
    buf: Option<PooledBuffer>,
) -> Rejected {
    if locked {
        device.disk.ranges.unlock(range, LockMode::Shared);
    }
    reject_full(range, buf)
}

/// Whether a request is aligned as it was submitted, before it is cut at the device's end.
fn is_aligned<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    io: Request,
    segments: &[IoSegment],
) -> bool {
    let align = disk.alignment();
    let block = match io.op {
        Op::Read => align.read_offset,
        Op::Write => align.offset,
        _ => return true,
    };
    sync_io::is_aligned_to(disk, block, io.range, segments)
}

/// Locks the range of a write, if it can: a read-modify-write is left to a worker, which locks it.
#[inline(never)]
fn lock_whole_blocks<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, range: ByteRange) -> bool {
    sync_io::blocks_of(disk, range) == range && disk.ranges.try_lock(range, LockMode::Shared)
}
