//! The engine's requests on their way: started, cut, ended, continued, handed to workers.
//!
//! Invariant: a slot's state says who holds it; nothing here calls the queue from within a report
//! of the queue, so completions that start further transfers do not recurse (C44).
//! Knows: pool, remote, simple, generic, complete, worker, qualify. Known by: engine.
#![allow(unsafe_code)]

mod parked;
mod pieces;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::blocking;
use crate::buffer::{Buf, Buffers};
use crate::complete::{Ended, Leftover, judge, leftover};
use crate::completion::{Completion, Rejected, Stats};
use crate::config::Config;
use crate::disk::Disk;
use crate::error::{Doing, Error};
use crate::generic::{self, Route};
use crate::io::{Flags, Io, Op, Outcome, Span, Transfer, UNREGISTERED};
use crate::iov::{self, Segment};
use crate::map::{Extent, Map};
use crate::pool::Pool;
use crate::qualify::Qualify;
use crate::queue::{Queue, Token};
use crate::ranges::Hold;
use crate::remote::Remote;
use crate::request::{Role, State};
use crate::simple::Gate;
use crate::worker::{Job, Task, Workers};

/// The requests of one engine.
pub(crate) struct Core<M: Map> {
    pool: Pool,
    /// Answers to status requests that were given back, by tag.
    spans: Vec<(u64, Vec<Span>)>,
    gate: Gate,
    /// The role of requests that a full transfer ends where it is reaped, with nothing left to do.
    ends_at_once: Option<Role>,
    /// Whether the simple path is tried: it is on, and trying does not rest.
    simple: bool,
    /// Requests whose placed pieces have all ended.
    more: Vec<u32>,
    jobs: Vec<Job>,
    remote: Arc<Remote>,
    disk: Arc<Disk<M>>,
    workers: Workers,
    /// Buffers for pieces that cannot use the request's memory.
    bounce: Buffers,
    merged: Vec<Segment>,
    config: Config,
    qualify: Qualify,
    stats: Stats,
    /// Overwrites that wait for `pathfinder`.
    parked: VecDeque<u32>,
    /// A refused overwrite that a worker has.
    pathfinder: Option<u32>,
    /// Slots that are pieces: they are nobody's request.
    pieces: usize,
}

impl<M: Map> Core<M> {
    pub(crate) fn new(disk: Arc<Disk<M>>, workers: Workers, config: Config) -> Result<Self, Error> {
        let pool = Pool::new(config.slots, config.pool);
        let remote = Arc::new(Remote::new(pool.limit())?);
        Ok(Self {
            pool,
            spans: Vec::new(),
            gate: Gate::new(&disk),
            ends_at_once: config.inline_completion.then_some(Role::Read),
            simple: config.simple && config.nowait_first,
            more: Vec::with_capacity(64),
            jobs: Vec::with_capacity(64),
            remote,
            disk,
            workers,
            bounce: Buffers::new(config.buffer_bytes),
            merged: Vec::new(),
            config,
            qualify: Qualify::default(),
            stats: Stats::default(),
            parked: VecDeque::new(),
            pathfinder: None,
            pieces: 0,
        })
    }

    #[inline]
    pub(crate) fn disk(&self) -> &Disk<M> {
        &self.disk
    }

    pub(crate) fn home(&self) -> BorrowedFd<'_> {
        self.remote.fd()
    }

    #[inline]
    pub(crate) fn has_done(&self) -> bool {
        self.pool.has_done()
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.pool.in_use() - self.pieces
    }

    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.pool.room() > 0
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats { pool: self.pool.stats(), ..self.stats }
    }

    /// The extent that serves `io` by one transfer, if one does and is to be tried; see
    /// [`Gate::admits`].
    #[inline]
    pub(crate) fn simple(&self, io: Io, base: *mut u8) -> Option<Extent> {
        if self.simple { self.gate.admits(&self.disk, io, base) } else { None }
    }

    /// Starts a request for which [`Core::simple`] has found `extent`.
    ///
    /// # Safety
    /// `base` is valid for the range's length until the request is given back, or lies in `buf`.
    #[inline(always)]
    pub(crate) unsafe fn submit_simple<Q: Queue>(
        &mut self,
        queue: &mut Q,
        io: Io,
        extent: Extent,
        base: *mut u8,
        buf: Option<Buf>,
        tag: u64,
    ) -> Result<(), Rejected> {
        let held = self.gate.holds(io);
        let Some((slot, request)) = self.pool.get() else { return Err(self.empty(io, held, buf)) };
        let buffer = buf.as_ref().map_or(UNREGISTERED, Buf::registered);
        let transfer = self.gate.transfer(io, extent, base, 0, buffer);
        let role = if io.op == Op::Write { Role::Write } else { Role::Read };
        request.begin(role, State::Queued, io, buf, tag);
        request.locked = held;
        request.transfer = transfer;
        // SAFETY: the memory is the buffer now in the slot, or what the caller vouches for; both
        // last until the slot is done.
        if !unsafe { place(queue, &request.transfer, slot) } {
            return Err(self.unplaced(slot));
        }
        self.stats.simple += 1;
        Ok(())
    }

    /// Refuses a request for which there is no slot.
    #[cold]
    fn empty(&mut self, io: Io, held: bool, buf: Option<Buf>) -> Rejected {
        if held {
            self.disk.ranges.free(io.range, Hold::Shared);
        }
        full(io, buf)
    }

    /// Takes back a request that the queue has no room for.
    #[cold]
    fn unplaced(&mut self, slot: u32) -> Rejected {
        self.unlock(slot);
        let request = &mut self.pool[slot];
        let (io, buf) = (request.io, request.buf.take());
        self.pool.put(slot);
        full(io, buf)
    }

    /// Starts any request, by pieces or by a worker.
    pub(crate) fn submit_whole<Q: Queue>(
        &mut self,
        queue: &mut Q,
        io: Io,
        segments: &[Segment],
        buf: Option<Buf>,
        tag: u64,
    ) -> Result<(), Rejected> {
        let io = match self.check(io, segments) {
            Ok(io) => io,
            Err(error) => return Err(Rejected { error, buf }),
        };
        let Some((slot, request)) = self.pool.get() else { return Err(full(io, buf)) };
        request.begin(Role::Whole, State::Submitting, io, buf, tag);
        request.result = 0;
        match segments {
            [one] => {
                let len = one.len.min(io.range.len as usize);
                request.segments.set_one(Segment { base: one.base, len });
            }
            _ => {
                let (merged, len) = (&mut self.merged, io.range.len);
                merged.clear();
                match self.config.vectored {
                    true => iov::merge(segments, len, merged),
                    false => iov::parts(segments, 0, len, |segment| merged.push(segment)),
                }
                request.segments.set(merged);
            }
        }
        if io.range.len == 0 && io.op != Op::Flush {
            self.finish(slot, 0);
            return Ok(());
        }
        match self.route(slot) {
            Route::Single(extent) => self.place_single(queue, slot, extent),
            Route::Pieces => self.advance(queue, slot),
            Route::Worker => {
                self.stats.worker += 1;
                self.send_out(slot, Task::Run);
                return Ok(());
            }
        }
        self.stats.generic += 1;
        Ok(())
    }

    /// Places the one transfer of a request that is a single direct piece.
    #[inline]
    fn place_single<Q: Queue>(&mut self, queue: &mut Q, slot: u32, extent: Extent) {
        let request = &mut self.pool[slot];
        let io = request.io;
        let (base, segments) = match request.segments.as_slice() {
            [one] => (one.base, 0),
            list => (list.as_ptr().cast_mut().cast(), list.len() as u16),
        };
        let buffer = request.buf.as_ref().map_or(UNREGISTERED, Buf::registered);
        request.transfer = self.gate.transfer(io, extent, base, segments, buffer);
        request.role = if io.op == Op::Write { Role::Write } else { Role::Read };
        request.state = State::Queued;
        // SAFETY: the memory is the request's, and the list of segments its slot's; both are kept
        // until the slot is done.
        if !unsafe { place(queue, &request.transfer, slot) } {
            // No room in the queue: whoever may wait does it.
            request.role = Role::Whole;
            request.again = true;
            self.whole_ended(slot);
        }
    }

    /// The checks that need the device; the range comes back cut to what can be done.
    fn check(&self, io: Io, segments: &[Segment]) -> Result<Io, Error> {
        let checked = blocking::check(&self.disk, io)?;
        if self.config.strict && io.range.len > 0 && !self.is_aligned(io, segments) {
            return Err(Error::new(libc::EINVAL, Doing::Validate).at(io.range));
        }
        Ok(checked)
    }

    /// Whether a request is aligned as it was asked for, before it is cut to the device.
    fn is_aligned(&self, io: Io, segments: &[Segment]) -> bool {
        let align = self.disk.alignment();
        let block = match io.op {
            Op::Read => align.read_offset,
            Op::Write => align.offset,
            _ => return true,
        };
        blocking::is_aligned_to(&self.disk, block, io.range, segments)
    }

    /// Makes the plan of a request; of a write's, once the lock is taken that it needs.
    fn route(&mut self, slot: u32) -> Route {
        if !self.config.nowait_first {
            return Route::Worker;
        }
        if self.qualify.rests() {
            self.qualify.count_rest();
            self.simple = self.config.simple && !self.qualify.rests();
            return Route::Worker;
        }
        let request = &mut self.pool[slot];
        let (range, own_room) = (request.io.range, request.buf.is_some());
        let held = self.gate.holds(request.io);
        if held && !self.disk.ranges.try_take(range, Hold::Shared) {
            return Route::Worker;
        }
        let route = generic::plan(
            &self.disk,
            request.io,
            request.segments.as_slice(),
            own_room,
            self.config.vectored,
            self.gate.syncs_apart(request.io),
            &mut request.pieces,
        );
        match route {
            Route::Worker if held => self.disk.ranges.free(range, Hold::Shared),
            _ => request.locked = held,
        }
        route
    }

    /// A transfer has ended.
    #[inline(always)]
    pub(crate) fn ended(&mut self, slot: u32, outcome: Outcome) {
        let request = &mut self.pool[slot];
        debug_assert_eq!(request.state, State::Queued);
        if Some(request.role) == self.ends_at_once && outcome as u32 == request.transfer.len {
            self.pool.end(slot, i64::from(outcome));
        } else {
            self.ended_otherwise(slot, outcome);
        }
    }

    /// As `ended`, for all but the full read by a request's one transfer.
    #[inline(never)]
    fn ended_otherwise(&mut self, slot: u32, outcome: Outcome) {
        let request = &mut self.pool[slot];
        if request.role == Role::Piece {
            return self.piece_ended(slot, outcome);
        }
        if outcome < 0 || outcome as u32 != request.transfer.len {
            if !self.parks(slot, outcome) {
                self.single_failed(slot, outcome);
            }
            return;
        }
        if request.transfer.write {
            let range = request.io.range;
            self.disk.map.written(range);
            if request.locked {
                request.locked = false;
                self.disk.ranges.free(range, Hold::Shared);
            }
        }
        self.finish(slot, i64::from(outcome));
    }

    #[cold]
    fn single_failed(&mut self, slot: u32, outcome: Outcome) {
        let request = &mut self.pool[slot];
        let transfer = &request.transfer;
        if transfer.segments == 0 {
            let segment = Segment { base: transfer.base, len: transfer.len as usize };
            request.segments.set_one(segment);
        }
        request.role = Role::Whole;
        request.result = 0;
        self.note(slot, judge(outcome, u64::from(self.pool[slot].transfer.len)));
        self.whole_ended(slot);
    }

    /// Keeps what a transfer of the request in `slot` came to.
    fn note(&mut self, slot: u32, ended: Ended) {
        let request = &mut self.pool[slot];
        match ended {
            Ended::Full => {}
            Ended::Short => request.again = true,
            Ended::Refused => {
                request.again = true;
                self.qualify.refused();
            }
            Ended::Failed(errno) => request.fail(i64::from(errno)),
        }
    }

    /// A look at the queue has brought so many transfers.
    #[inline]
    pub(crate) fn judge(&mut self, transfers: usize) {
        if self.qualify.judge(transfers) {
            self.stats.rested += 1;
            self.simple = false;
        }
    }

    /// All transfers of a request have ended.
    fn whole_ended(&mut self, slot: u32) {
        let request = &mut self.pool[slot];
        let len = request.io.range.len as i64;
        if request.io.op == Op::Write {
            self.disk.map.written(request.io.range);
        }
        self.unlock(slot);
        match leftover(&self.pool[slot]) {
            Leftover::Nothing => self.finish(slot, len),
            Leftover::Error => {
                let result = self.pool[slot].result;
                self.finish(slot, result);
            }
            Leftover::Sync => self.send_out(slot, Task::Sync { result: len }),
            Leftover::Again => {
                self.stats.retried += 1;
                self.send_out(slot, Task::Run);
            }
        }
    }

    fn unlock(&mut self, slot: u32) {
        let request = &mut self.pool[slot];
        if std::mem::take(&mut request.locked) {
            self.disk.ranges.free(request.io.range, Hold::Shared);
        }
    }

    /// Hands a request to a worker, unless its caller does not want to wait (C32).
    fn send_out(&mut self, slot: u32, task: Task) {
        let request = &mut self.pool[slot];
        if task == Task::Run && request.io.flags.has(Flags::NOWAIT) {
            return self.finish(slot, -i64::from(libc::EAGAIN));
        }
        self.give(slot, task);
    }

    fn give(&mut self, slot: u32, task: Task) {
        let request = &mut self.pool[slot];
        request.state = State::Worker;
        self.jobs.push(Job {
            task,
            io: request.io,
            segments: request.segments.as_slice(),
            spans: &raw mut request.extents,
            slot,
            home: self.remote.clone(),
        });
    }

    /// Hands the collected jobs over.
    #[inline]
    pub(crate) fn post(&mut self) {
        if !self.jobs.is_empty() {
            self.workers.post(self.jobs.drain(..));
        }
    }

    /// Takes the slots that workers have ended.
    #[inline]
    pub(crate) fn look_home(&mut self) {
        if self.remote.has_some() {
            self.came_home();
        }
    }

    /// The wake-up descriptor was reported: it is made quiet, before `look_home`.
    pub(crate) fn hears_home(&self) {
        self.remote.clear_wake();
    }

    #[cold]
    fn came_home(&mut self) {
        let remote = self.remote.clone();
        remote.take(|slot, result| {
            self.stats.remote += 1;
            if self.pathfinder == Some(slot) {
                self.pathfinder = None;
            }
            let request = &mut self.pool[slot];
            debug_assert_eq!(request.state, State::Worker);
            if request.io.op == Op::Status && result >= 0 {
                let tag = request.tag;
                self.spans.retain(|(of, _)| *of != tag);
                self.spans.push((tag, std::mem::take(&mut request.extents)));
            }
            self.tell(slot, result);
        });
    }

    /// The request came to `result`; its caller is told by the next `next`, or after a detour over
    /// a worker with `inline_completion` off.
    #[inline]
    fn finish(&mut self, slot: u32, result: i64) {
        if !self.config.inline_completion {
            return self.give(slot, Task::Echo { result });
        }
        self.tell(slot, result);
    }

    #[inline]
    fn tell(&mut self, slot: u32, result: i64) {
        self.stats.failed += u64::from(result < 0);
        self.pool.end(slot, result);
    }

    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<Completion> {
        let request = self.pool.next_done()?;
        let buf = request.take_buf();
        let Io { op, flags, range } = request.io;
        Some(Completion {
            tag: request.tag,
            io: Io { op, flags, range },
            buf,
            result: request.result,
        })
    }

    pub(crate) fn take_spans(&mut self, tag: u64) -> Vec<Span> {
        let found = self.spans.iter().position(|(of, _)| *of == tag);
        found.map(|n| self.spans.swap_remove(n).1).unwrap_or_default()
    }

    /// Gives up all memory that somebody may still write to.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.pool, Pool::new(1, true)));
        std::mem::forget(std::mem::replace(&mut self.bounce, Buffers::new(0)));
    }
}

fn full(io: Io, buf: Option<Buf>) -> Rejected {
    Rejected { error: Error::new(libc::EAGAIN, Doing::Validate).at(io.range), buf }
}

/// Places a transfer, handing over what was placed before if there is no room.
///
/// # Safety
/// As for [`Queue::place`].
#[inline]
unsafe fn place<Q: Queue>(queue: &mut Q, transfer: &Transfer, slot: u32) -> bool {
    // SAFETY: as promised by the caller.
    if unsafe { queue.place(transfer, Token::from(slot)) }.is_ok() {
        return true;
    }
    // SAFETY: as promised by the caller.
    queue.kick().is_ok() && unsafe { queue.place(transfer, Token::from(slot)) }.is_ok()
}

#[cfg(test)]
#[cfg(feature = "sim")]
mod tests;
