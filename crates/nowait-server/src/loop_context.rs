//! Parts of a thread that the event loop lends to its frontends: the engine, the exports, the buffer
//! budget, the run queues, and the counts that decide on limits.
//!
//! Invariant: a number that a frontend chooses (of a member, of a watched descriptor) is told apart
//! from those of the thread's other frontends.

use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nowait::{
    BlockMap, ByteRange, DeviceHandle, Engine, Error, FD_TOKEN, Interest, IoQueue, Op, Operation,
    PooledBuffer, Rejected, Request, Token,
};

use crate::buffer_budget::{BufferBudget, DeclaredUse};
use crate::delayed_release::DelayedRelease;
use crate::fairness::quantum_among;
use crate::frontend_kind::FrontendKind;
use crate::latency::Sampler;
use crate::member::{Member, RunQueues};
use crate::net::connection_limit::ConnectionLimit;
use crate::served_export::{ServedExport, ServedExports};
use crate::shared_export::ExportUse;
use crate::slow_requests::{KEY_MASK, SlowRequests};
use crate::thread_handle::ThreadHandle;
use crate::throttle::Throttle;

/// The engine of a thread.
pub(crate) type DiskEngine<Q> = Engine<Q, dyn BlockMap>;
/// A device of it.
pub(crate) type DiskHandle = DeviceHandle<dyn BlockMap>;

/// Bits of a token that a frontend may choose.
pub(crate) const TOKEN_BITS: u32 = 56;

/// Parts of a thread that the event loop lends to its frontends.
pub(crate) struct LoopContext<Q: IoQueue> {
    /// The engine of the thread. Requests go through [`LoopContext::submit`].
    pub(crate) engine: DiskEngine<Q>,
    /// The exports that members of the thread use.
    pub(crate) exports: ServedExports,
    /// The buffer memory that the members share. Foreign memory is not counted.
    pub(crate) budget: BufferBudget,
    /// Bytes that one service of a member may move.
    pub(crate) quantum: u64,
    /// All requests in flight in the last busy iteration completed within it.
    pub(crate) completes_inline: bool,
    pub(crate) delayed_release: DelayedRelease,
    /// Members to service: the interactive ones in this iteration, the bulk ones in turn.
    pub(crate) run_queues: RunQueues,
    /// Members that have nothing in flight and wait for a slot or for memory, in order of arrival.
    pub(crate) blocked: Vec<usize>,
    /// Something was released that a blocked member may wait for.
    pub(crate) has_released: bool,
    pub(crate) sampler: Sampler,
    pub(crate) slow: SlowRequests,
    pub(crate) throttle: Throttle,
    thread: Arc<ThreadHandle>,
    limit: Arc<ConnectionLimit>,
    members: usize,
    place: Place,
}

/// The place of a frontend among those of a thread: its numbers are shifted by [`FrontendKind::BITS`], and end
/// with its kind. The only frontend of a thread has its numbers as they are.
#[derive(Clone, Copy, Default)]
struct Place {
    shift: u32,
    kind: u64,
}

impl Place {
    /// The number in the event loop for `number` of the frontend.
    #[inline]
    fn number(self, number: u64) -> u64 {
        number << self.shift | self.kind
    }
}

impl<Q: IoQueue> LoopContext<Q> {
    /// The context of `thread`, which has `buffer_bytes` for all members of the server, of which
    /// `declared` are in use, and detaches an export when it has been idle for `idle`. Requests that take
    /// longer than `slow_requests` are found.
    pub(crate) fn new(
        engine: Engine<Q, dyn BlockMap>,
        thread: Arc<ThreadHandle>,
        limit: Arc<ConnectionLimit>,
        (buffer_bytes, declared): (usize, DeclaredUse),
        (idle, slow_requests): (Duration, Option<Duration>),
    ) -> Self {
        Self {
            engine,
            exports: ServedExports::new(idle),
            budget: BufferBudget::new(buffer_bytes as u64, declared),
            quantum: quantum_among(1),
            completes_inline: false,
            delayed_release: DelayedRelease::default(),
            run_queues: RunQueues::default(),
            blocked: Vec::new(),
            has_released: false,
            sampler: Sampler::default(),
            slow: SlowRequests::new(slow_requests),
            throttle: Throttle::default(),
            thread,
            limit,
            members: 0,
            place: Place::default(),
        }
    }

    /// Whether a request of a member that uses `served` finds a slot of the engine.
    #[inline]
    pub(crate) fn has_free_slot(&self, served: Option<&ServedExport>) -> bool {
        self.exports.admits(served, self.engine.free_slots())
    }

    /// A read of `member` was answered without the engine.
    #[inline]
    pub(crate) fn count_hole(&self, frontend: FrontendKind, member: &mut Member, io: Request) {
        if let Some(served) = &member.served {
            served.statistics.count(frontend, io.op, io.range.len);
        }
        member.quantum.count(io);
    }

    /// A request of `member` was refused before it was submitted.
    #[cold]
    pub(crate) fn count_error(&self, kind: FrontendKind, member: &Member, op: Op, errno: i32) {
        if let Some(served) = &member.served {
            served.statistics.count_error(kind, op, errno);
        }
    }

    /// Like [`ConnectionLimit::close_count`].
    pub(crate) fn close_count(&self) -> u64 {
        self.limit.close_count()
    }

    /// Members of all frontends of the thread.
    #[inline]
    pub(crate) fn members(&self) -> usize {
        self.members
    }

    /// Counts a new member.
    pub(crate) fn add_member(&mut self) {
        self.thread.add_connection();
        self.members += 1;
        self.update_shares();
    }

    /// Has `member` use an export. References to it have to end before the member leaves.
    ///
    /// # Errors
    /// Like [`Engine::attach`].
    pub(crate) fn use_export(
        &mut self,
        member: &mut Member,
        used: ExportUse,
    ) -> Result<Rc<ServedExport>, Error> {
        let served = self.exports.add_member(&mut self.engine, used.export())?;
        self.throttle.has_limits |= served.throttle.borrow().is_on();
        (member.served, member.used) = (Some(served.clone()), Some(used));
        Ok(served)
    }

    /// A member that was not counted uses its export no more.
    pub(crate) fn leave_export(&mut self, member: &mut Member) {
        if let Some(served) = member.served.take() {
            self.exports.remove_member(&served);
        }
        member.used = None;
    }

    /// Counts a member that has left, and releases all that it holds.
    pub(crate) fn remove_member(&mut self, member: &mut Member) {
        self.members -= 1;
        self.update_shares();
        self.budget.release(&mut member.budget_used, u64::MAX);
        self.has_released = true;
        self.leave_export(member);
        self.thread.remove_connection();
    }

    /// Adapts the limits to the number of members.
    #[inline]
    pub(crate) fn update_shares(&mut self) {
        self.budget.set_connection_count(self.limit.taken(), self.members);
        self.quantum = quantum_among(self.members);
    }

    /// Puts `member`, number `number` of the frontend, into the run queues.
    #[inline]
    pub(crate) fn schedule(&mut self, number: usize, member: &mut Member) {
        self.run_queues.schedule(self.place.number(number as u64) as usize, member);
    }

    /// Schedules `member`, number `number` of the frontend, as soon as a slot or memory is free. Only for a member without
    /// requests in flight: the others are scheduled when these complete.
    pub(crate) fn block(&mut self, number: usize, member: &mut Member) {
        if !std::mem::replace(&mut member.is_blocked, true) {
            self.blocked.push(self.place.number(number as u64) as usize);
        }
    }

    /// Takes `bytes` of the budget from `member`.
    #[inline]
    pub(crate) fn release(&mut self, member: &mut Member, bytes: u64) {
        self.budget.release(&mut member.budget_used, bytes);
        self.has_released |= bytes > 0;
    }

    /// Submits a request of the member with this `number`, which uses `served`, by `submit`, which gets its
    /// device and its tag. [`Frontend::complete`](crate::frontend::Frontend::complete) gets `key`, of 27 bits. The
    /// engine's workers serve the members in turn.
    ///
    /// # Errors
    /// The error of `submit`; `ENODEV` for a member that uses no export.
    #[inline(always)]
    pub(crate) fn submit(
        &mut self,
        served: Option<&ServedExport>,
        number: usize,
        key: u32,
        submit: impl FnOnce(&mut DiskEngine<Q>, &DiskHandle, u64) -> Result<(), Rejected>,
    ) -> Result<(), Rejected> {
        let Some(served) = served else { return Err(no_export(None)) };
        let tag = self.begin_request(number, key);
        let submitted = submit(&mut self.engine, &served.device, tag);
        self.end_request(served, submitted)
    }

    /// Like [`LoopContext::submit`], a read or write `io` of `buf`. The path of a simple read is compiled into
    /// the caller.
    #[inline(always)]
    pub(crate) fn submit_buffer(
        &mut self,
        served: Option<&ServedExport>,
        number: usize,
        key: u32,
        (io, buf): (Request, PooledBuffer),
    ) -> Result<(), Rejected> {
        let Some(served) = served else { return Err(no_export(Some(buf))) };
        let tag = self.begin_request(number, key);
        let submitted = self.engine.submit(&served.device, io, buf, tag);
        self.end_request(served, submitted)
    }

    /// The tag for a request that is submitted now.
    #[inline(always)]
    fn begin_request(&mut self, number: usize, key: u32) -> u64 {
        debug_assert_eq!(u64::from(key) & !KEY_MASK, 0);
        let epoch = self.slow.begin();
        self.sampler.mark(self.place.number(number as u64) << 32 | epoch | u64::from(key))
    }

    /// Counts a request of `served`, if it was submitted.
    #[inline(always)]
    fn end_request(
        &mut self,
        served: &ServedExport,
        submitted: Result<(), Rejected>,
    ) -> Result<(), Rejected> {
        match &submitted {
            Ok(()) => served.on_submitted(),
            Err(_) => self.slow.undo(),
        }
        submitted
    }

    /// A buffer for a request of `member` of `range`; `None` if memory is short.
    #[inline]
    pub(crate) fn buffer(&mut self, member: &Member, range: ByteRange) -> Option<PooledBuffer> {
        self.engine.buffer(&member.served()?.device, range)
    }

    /// Reports `token`, of [`TOKEN_BITS`] bits, whenever `fd` is ready.
    ///
    /// # Errors
    /// As for [`Engine::watch`].
    pub(crate) fn watch(
        &mut self,
        fd: BorrowedFd<'_>,
        token: Token,
        interest: Interest,
    ) -> Result<(), Error> {
        self.engine.watch(fd, self.engine_token(token), interest)
    }

    /// Ends a watch; to be called before the descriptor is closed.
    pub(crate) fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        self.engine.unwatch(fd, self.engine_token(token));
    }

    /// The engine's token for `token`, of [`TOKEN_BITS`] bits: for commands to drivers.
    #[inline]
    pub(crate) fn engine_token(&self, token: Token) -> Token {
        debug_assert!(token >> TOKEN_BITS == 0);
        FD_TOKEN | self.place.number(token)
    }

    /// Calls the frontend of a kind, of several.
    #[inline]
    pub(crate) fn inside<T>(&mut self, kind: FrontendKind, call: impl FnOnce(&mut Self) -> T) -> T {
        let place = Place { shift: FrontendKind::BITS, kind: kind as u64 };
        let outside = std::mem::replace(&mut self.place, place);
        let result = call(self);
        self.place = outside;
        result
    }
}

/// The refusal of a request of a member that uses no export.
#[cold]
fn no_export(buf: Option<PooledBuffer>) -> Rejected {
    Rejected { error: Error::new(libc::ENODEV, Operation::Validate), buf }
}
