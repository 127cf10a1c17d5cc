//! The engine's requests on their way: started, cut, ended, continued, handed to workers.
//!
//! Invariant: a slot's state says who holds it; nothing here calls the queue from within a report
//! of the queue, so completions that start further transfers do not recurse (C44).
//! Knows: pool, remote, simple, generic, complete, worker, qualify. Known by: engine.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::align;
use crate::blocking;
use crate::buffer::{Buf, Buffers};
use crate::complete::{Ended, Leftover, judge, leftover};
use crate::completion::{Completion, Rejected, Stats};
use crate::config::Config;
use crate::disk::Disk;
use crate::error::{Doing, Error};
use crate::generic::{self, Kind, Piece, Route};
use crate::io::{Flags, Io, Op, Outcome, Transfer, UNREGISTERED};
use crate::iov::{self, Segment};
use crate::map::{Map, Span};
use crate::pool::Pool;
use crate::qualify::Qualify;
use crate::queue::{Queue, Token};
use crate::ranges::Hold;
use crate::remote::Remote;
use crate::request::{Role, State};
use crate::simple::Gate;
use crate::worker::{Job, Task, Workers};

/// Slots that are done, first in, first out. It is emptied again and again, so that it never grows
/// beyond what one look at the queue brings.
#[derive(Default)]
struct Done {
    slots: Vec<u32>,
    taken: usize,
}

impl Done {
    #[inline]
    fn push(&mut self, slot: u32) {
        self.slots.push(slot);
    }

    #[inline]
    fn pop(&mut self) -> Option<u32> {
        let slot = self.slots.get(self.taken).copied();
        if slot.is_some() {
            self.taken += 1;
        } else {
            self.slots.clear();
            self.taken = 0;
        }
        slot
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.taken == self.slots.len()
    }
}

/// The requests of one engine.
pub(crate) struct Core<M: Map> {
    pool: Pool,
    done: Done,
    /// Answers to status requests that were given back, by tag.
    spans: Vec<(u64, Vec<Span>)>,
    gate: Gate,
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
    /// Slots that are pieces: they are nobody's request.
    pieces: usize,
    /// Blocks need no protection from each other when nothing is ever read and written back.
    locks: bool,
}

impl<M: Map> Core<M> {
    pub(crate) fn new(
        disk: Arc<Disk<M>>,
        workers: Workers,
        config: Config,
    ) -> Result<Self, Error> {
        let pool = Pool::new(config.slots, config.pool);
        let remote = Arc::new(Remote::new(pool.limit())?);
        let locks = disk.alignment().offset > 1;
        Ok(Self {
            pool,
            done: Done::default(),
            spans: Vec::new(),
            gate: Gate::new(&disk),
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
            pieces: 0,
            locks,
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
        !self.done.is_empty()
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

    /// Whether one transfer serves `io`, and is to be tried.
    #[inline]
    pub(crate) fn is_simple(&self, io: Io, base: *mut u8) -> bool {
        self.simple && self.gate.admits(&self.disk.map, io, base)
    }

    /// Starts a request that [`Core::is_simple`] has accepted.
    ///
    /// # Safety
    /// `base` is valid for the range's length until the request is given back, or lies in `buf`.
    #[inline(always)]
    pub(crate) unsafe fn submit_simple<Q: Queue>(
        &mut self,
        queue: &mut Q,
        io: Io,
        base: *mut u8,
        buf: Option<Buf>,
        tag: u64,
    ) -> Result<(), Rejected> {
        let write = io.op == Op::Write;
        let held = write && self.locks;
        if held && !self.disk.ranges.try_take(io.range, Hold::Shared) {
            return self.submit_one(queue, io, base, buf, tag);
        }
        let Some(slot) = self.pool.get() else { return Err(self.empty(io, held, buf)) };
        let rw_flags = self.gate.rw_flags(io.flags);
        let request = &mut self.pool[slot];
        request.begin(Role::Simple, io, tag);
        request.locked = held;
        request.transfer = Transfer {
            base,
            pos: io.range.pos,
            len: io.range.len as u32,
            rw_flags,
            segments: 0,
            buffer: buf.as_ref().map_or(UNREGISTERED, Buf::registered),
            write,
        };
        debug_assert!(request.buf.is_none());
        // SAFETY: a free slot has no buffer, so that nothing needs to be dropped.
        unsafe { (&raw mut request.buf).write(buf) };
        // SAFETY: the memory is the buffer now in the slot, or what the caller vouches for; both
        // last until the slot is done.
        if !unsafe { place(queue, &request.transfer, slot) } {
            return Err(self.unplaced(slot));
        }
        request.state = State::Queued;
        self.stats.simple += 1;
        Ok(())
    }

    /// Starts a request with one segment that is not simple after all.
    #[cold]
    fn submit_one<Q: Queue>(
        &mut self,
        queue: &mut Q,
        io: Io,
        base: *mut u8,
        buf: Option<Buf>,
        tag: u64,
    ) -> Result<(), Rejected> {
        let segment = Segment { base, len: io.range.len as usize };
        self.submit_whole(queue, io, &[segment], buf, tag)
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
        let Some(slot) = self.pool.get() else { return Err(full(io, buf)) };
        let request = &mut self.pool[slot];
        request.begin(Role::Whole, io, tag);
        request.result = 0;
        request.buf = buf;
        self.merged.clear();
        iov::merge(segments, io.range.len, &mut self.merged);
        request.segments.set(if self.config.vectored { &self.merged } else { segments });
        if io.range.len == 0 && io.op != Op::Flush {
            self.finish(slot, 0);
            return Ok(());
        }
        if self.route(slot) == Route::Worker {
            self.stats.worker += 1;
            self.to_worker(slot, Task::Run);
            return Ok(());
        }
        self.stats.generic += 1;
        self.advance(queue, slot);
        Ok(())
    }

    /// The checks that need the device; the range comes back cut to what can be done.
    fn check(&self, io: Io, segments: &[Segment]) -> Result<Io, Error> {
        let io = blocking::check(&self.disk, io)?;
        let data = matches!(io.op, Op::Read | Op::Write);
        if self.config.strict && data && !blocking::is_aligned(&self.disk, io.range, segments) {
            return Err(Error::new(libc::EINVAL, Doing::Validate).at(io.range));
        }
        Ok(io)
    }

    /// Makes the plan of a request and takes the lock that it needs.
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
        let own_room = request.buf.is_some();
        let route = generic::plan(
            &self.disk,
            request.io,
            request.segments.as_slice(),
            own_room,
            self.config.vectored,
            &mut request.pieces,
        );
        if route == Route::Pieces && request.io.op == Op::Write && self.locks {
            if !self.disk.ranges.try_take(request.io.range, Hold::Shared) {
                return Route::Worker;
            }
            request.locked = true;
        }
        route
    }

    /// Places the pieces of a request: all of them, or with `vectored` off the next one. Ends the
    /// request when none is left.
    fn advance<Q: Queue>(&mut self, queue: &mut Q, slot: u32) {
        while let Some(piece) = self.pool[slot].pieces.pop() {
            if self.pool[slot].again || self.pool[slot].result < 0 {
                continue;
            }
            if piece.kind == Kind::Zero {
                let segments = self.pool[slot].segments.as_slice();
                // SAFETY: the caller vouched for the memory; no transfer covers these bytes.
                unsafe { blocking::fill_zero(segments, piece.start, piece.len) };
                self.stats.zero_filled += piece.len;
                continue;
            }
            match self.place_piece(queue, slot, piece) {
                true if self.config.vectored => {}
                true => break,
                // No slot, buffer or room in the queue: whoever may wait does it.
                false => self.pool[slot].again = true,
            }
        }
        let request = &mut self.pool[slot];
        if request.pending == 0 {
            self.whole_ended(slot);
        } else {
            request.state = State::Queued;
        }
    }

    fn place_piece<Q: Queue>(&mut self, queue: &mut Q, parent: u32, piece: Piece) -> bool {
        let Some(slot) = self.pool.get() else { return false };
        let io = self.pool[parent].io;
        self.pool[slot].begin(Role::Piece, io, 0);
        self.pool[slot].parent = parent;
        self.pool[slot].piece = piece;
        self.pieces += 1;
        if !self.aim(parent, slot, piece) {
            self.put_piece(slot);
            return false;
        }
        // SAFETY: the memory is the parent's, kept until all of its pieces have ended, or the
        // bounce buffer in the piece's own slot.
        if !unsafe { place(queue, &self.pool[slot].transfer, slot) } {
            self.put_piece(slot);
            return false;
        }
        self.pool[slot].state = State::Queued;
        self.pool[parent].pending += 1;
        true
    }

    fn put_piece(&mut self, slot: u32) {
        self.pool[slot].buf = None;
        self.pieces -= 1;
        self.pool.put(slot);
    }

    /// Sets up the transfer of a piece. False when there is no buffer for it.
    fn aim(&mut self, parent: u32, slot: u32, piece: Piece) -> bool {
        let io = self.pool[parent].io;
        let write = io.op == Op::Write;
        let pos = io.range.pos + piece.start;
        let mut transfer = Transfer {
            pos,
            len: piece.len as u32,
            rw_flags: self.gate.rw_flags(io.flags.without(Flags::DSYNC)),
            write,
            ..Transfer::NONE
        };
        let align = self.disk.alignment();
        let block = if write { align.offset } else { align.read_offset };
        match piece.kind {
            Kind::Zero => return false,
            Kind::Direct => {
                let mut parts = std::mem::take(&mut self.merged);
                parts.clear();
                let request = &self.pool[parent];
                iov::parts(request.segments.as_slice(), piece.start, piece.len, |s| parts.push(s));
                if let [one] = parts.as_slice() {
                    transfer.base = one.base;
                    transfer.buffer = request.buf.as_ref().map_or(UNREGISTERED, Buf::registered);
                } else {
                    self.pool[slot].segments.set(&parts);
                    let list = self.pool[slot].segments.as_slice();
                    transfer.base = list.as_ptr().cast_mut().cast();
                    transfer.segments = list.len() as u16;
                }
                self.merged = parts;
            }
            Kind::Widened { skip } => {
                let request = &self.pool[parent];
                let Some(buf) = &request.buf else { return false };
                let Some(one) = request.segments.as_slice().first() else { return false };
                transfer.base = one.base.wrapping_sub(skip as usize);
                transfer.buffer = buf.registered();
                transfer.pos = pos - u64::from(skip);
                transfer.len = align::up(u64::from(skip) + piece.len, block) as u32;
            }
            Kind::Bounce { skip } => {
                let len = align::up(u64::from(skip) + piece.len, block);
                let Some(mut buf) = self.bounce.get(len as usize, |_, _| None) else {
                    return false;
                };
                if write {
                    let segments = self.pool[parent].segments.as_slice();
                    // SAFETY: the caller vouched for the memory.
                    unsafe { blocking::copy_in(segments, piece.start, piece.len, &mut buf) };
                }
                transfer.base = buf.base();
                transfer.pos = pos - u64::from(skip);
                transfer.len = len as u32;
                self.pool[slot].buf = Some(buf);
            }
        }
        self.pool[slot].transfer = transfer;
        true
    }

    /// A transfer has ended.
    #[inline(always)]
    pub(crate) fn ended(&mut self, slot: u32, outcome: Outcome) {
        let request = &mut self.pool[slot];
        debug_assert_eq!(request.state, State::Queued);
        let full = request.role == Role::Simple && outcome as u32 == request.transfer.len;
        if full && !request.transfer.write && self.config.inline_completion {
            request.result = i64::from(outcome);
            request.state = State::Done;
            self.done.push(slot);
        } else {
            self.ended_otherwise(slot, outcome);
        }
    }

    /// As `ended`, for all but the full read of a simple request.
    #[inline(never)]
    fn ended_otherwise(&mut self, slot: u32, outcome: Outcome) {
        let request = &mut self.pool[slot];
        if request.role == Role::Piece {
            return self.piece_ended(slot, outcome);
        }
        if outcome < 0 || outcome as u32 != request.transfer.len {
            return self.simple_failed(slot, outcome);
        }
        if request.transfer.write {
            let range = request.io.range;
            if request.locked {
                request.locked = false;
                self.disk.ranges.free(range, Hold::Shared);
            }
            self.disk.map.written(range);
        }
        self.finish(slot, i64::from(outcome));
    }

    #[cold]
    fn simple_failed(&mut self, slot: u32, outcome: Outcome) {
        let request = &mut self.pool[slot];
        let segment = Segment { base: request.transfer.base, len: request.transfer.len as usize };
        request.role = Role::Whole;
        request.segments.set_one(segment);
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
                if self.qualify.refused(self.stats.simple + self.stats.generic) {
                    self.stats.rested += 1;
                    self.simple = false;
                }
            }
            Ended::Failed(errno) => request.fail(i64::from(errno)),
        }
    }

    fn piece_ended(&mut self, slot: u32, outcome: Outcome) {
        let request = &self.pool[slot];
        let (parent, piece) = (request.parent, request.piece);
        let skip = match piece.kind {
            Kind::Widened { skip } | Kind::Bounce { skip } => u64::from(skip),
            Kind::Zero | Kind::Direct => 0,
        };
        let ended = judge(outcome, skip + piece.len);
        let read = request.io.op == Op::Read;
        if let (Ended::Full, true, Kind::Bounce { skip }, Some(buf)) =
            (ended, read, piece.kind, &request.buf)
        {
            let segments = self.pool[parent].segments.as_slice();
            let from = &buf[skip as usize..];
            // SAFETY: the caller vouched for the memory; the buffer was read that far.
            unsafe { blocking::copy_out(from, segments, piece.start, piece.len) };
        }
        self.put_piece(slot);
        self.note(parent, ended);
        let request = &mut self.pool[parent];
        request.pending -= 1;
        if request.pending == 0 {
            self.more.push(parent);
        }
    }

    /// Goes on with the requests whose pieces have ended. True when it has placed something.
    #[inline]
    pub(crate) fn continue_pieces<Q: Queue>(&mut self, queue: &mut Q) -> bool {
        let mut placed = false;
        while let Some(slot) = self.more.pop() {
            placed |= !self.pool[slot].pieces.is_empty();
            self.advance(queue, slot);
        }
        self.post();
        placed
    }

    /// All transfers of a request have ended.
    fn whole_ended(&mut self, slot: u32) {
        self.unlock(slot);
        let request = &mut self.pool[slot];
        let len = request.io.range.len as i64;
        if request.io.op == Op::Write {
            self.disk.map.written(request.io.range);
        }
        match leftover(&self.pool[slot]) {
            Leftover::Nothing => self.finish(slot, len),
            Leftover::Error => {
                let result = self.pool[slot].result;
                self.finish(slot, result);
            }
            Leftover::Sync => self.to_worker(slot, Task::Sync { result: len }),
            Leftover::Again => {
                self.stats.retried += 1;
                self.to_worker(slot, Task::Run);
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
    fn to_worker(&mut self, slot: u32, task: Task) {
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
    pub(crate) fn came_home(&mut self) {
        let remote = self.remote.clone();
        remote.clear_wake();
        remote.take(|slot, result| {
            let request = &mut self.pool[slot];
            debug_assert_eq!(request.state, State::Worker);
            if request.io.op == Op::Status {
                self.spans.push((request.tag, std::mem::take(&mut request.extents)));
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
        let request = &mut self.pool[slot];
        request.result = result;
        request.state = State::Done;
        self.stats.failed += u64::from(result < 0);
        self.done.push(slot);
    }

    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<Completion> {
        let slot = self.done.pop()?;
        let request = &mut self.pool[slot];
        debug_assert_eq!(request.state, State::Done);
        let completion = Completion {
            tag: request.tag,
            io: request.io,
            buf: request.buf.take(),
            result: request.result,
        };
        self.pool.put(slot);
        Some(completion)
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
