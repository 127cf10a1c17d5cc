//! What the event loop lends to its frontend: the engine, the buffer budget, the run queues, and
//! the counts that decide on limits and on the thread's end.
//!
//! Invariant: a number that a frontend chooses (of a member, of a watched descriptor) is told apart
//! from those of the thread's other frontends.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use nowait::{BlockMap, DeviceHandle, Engine, Error, FD_TOKEN, Interest, IoQueue, Request, Token};

use crate::buffer_budget::{BufferBudget, DeclaredUse};
use crate::delayed_release::DelayedRelease;
use crate::export::Export;
use crate::fairness::{Member, RunQueues, quantum_among};
use crate::idle_timeout::IdleTimeout;
use crate::latency::Sampler;
use crate::net::connection_limit::ConnectionLimit;
use crate::slow_requests::{KEY_MASK, SlowRequests};
use crate::statistics::{FrontendKind, ThreadStatistics};
use crate::thread_handle::ThreadHandle;
use crate::throttle::Throttle;

/// Bits of a token that a frontend may choose.
pub(crate) const TOKEN_BITS: u32 = 56;

/// What the event loop lends to its frontend.
pub(crate) struct LoopContext<Q: IoQueue> {
    /// The engine of the thread. Tags of requests come from [`LoopContext::tag`].
    pub(crate) engine: Engine<Q, dyn BlockMap>,
    /// The device of the export in the engine.
    pub(crate) device: DeviceHandle<dyn BlockMap>,
    pub(crate) export: Arc<Export>,
    /// The buffer memory that the members share. Foreign memory is not counted.
    pub(crate) budget: BufferBudget,
    /// Bytes that one service of a member may move.
    pub(crate) quantum: u64,
    /// All requests in flight in the last busy iteration completed within it.
    pub(crate) completes_inline: bool,
    pub(crate) delayed_release: DelayedRelease,
    pub(crate) idle: IdleTimeout,
    /// Members to service: the interactive ones in this iteration, the bulk ones in turn.
    pub(crate) run_queues: RunQueues,
    /// Members that have nothing in flight and wait for a slot or for memory, in order of arrival.
    pub(crate) blocked: Vec<usize>,
    /// Something was released that a blocked member may wait for.
    pub(crate) has_released: bool,
    /// The counters that only this thread changes.
    pub(crate) statistics: Arc<ThreadStatistics>,
    pub(crate) sampler: Sampler,
    pub(crate) slow: SlowRequests,
    pub(crate) throttle: Throttle,
    thread: Arc<ThreadHandle>,
    limit: Arc<ConnectionLimit>,
    members: usize,
    place: Place,
}

/// The place of a frontend in nested pairs: its numbers are shifted by one bit for each pair that
/// it is in, and the bit tells first from second.
#[derive(Clone, Copy, Default)]
struct Place {
    depth: u32,
    path: u64,
}

impl Place {
    /// The number in the event loop for `number` of the frontend.
    #[inline]
    fn number(self, number: u64) -> u64 {
        number << self.depth | self.path
    }

    fn inside(self, second: bool) -> Self {
        Self { depth: self.depth + 1, path: self.path | u64::from(second) << self.depth }
    }
}

impl<Q: IoQueue> LoopContext<Q> {
    /// The context of `thread`, which has `buffer_bytes` for all members of the server, of which
    /// `declared` are in use, and retires when it has been idle for `idle`. Requests that take longer
    /// than `slow_requests` are found.
    ///
    /// # Errors
    /// As [`Engine::attach`].
    pub(crate) fn new(
        mut engine: Engine<Q, dyn BlockMap>,
        export: Arc<Export>,
        statistics: Arc<ThreadStatistics>,
        thread: Arc<ThreadHandle>,
        limit: Arc<ConnectionLimit>,
        (buffer_bytes, declared): (usize, DeclaredUse),
        (idle, slow_requests): (Duration, Option<Duration>),
    ) -> Result<Self, Error> {
        let device = engine.attach(export.disk().clone())?;
        Ok(Self {
            engine,
            device,
            export,
            budget: BufferBudget::new(buffer_bytes as u64, declared),
            quantum: quantum_among(1),
            completes_inline: false,
            delayed_release: DelayedRelease::default(),
            idle: IdleTimeout::new(idle),
            run_queues: RunQueues::default(),
            blocked: Vec::new(),
            has_released: false,
            statistics,
            sampler: Sampler::default(),
            slow: SlowRequests::new(slow_requests),
            throttle: Throttle::default(),
            thread,
            limit,
            members: 0,
            place: Place::default(),
        })
    }

    /// A read of `member` was answered without the engine.
    #[inline]
    pub(crate) fn count_hole(&self, frontend: FrontendKind, member: &mut Member, io: Request) {
        self.statistics.count(frontend, io.op, io.range.len);
        member.quantum.count(io);
    }

    /// As [`ConnectionLimit::close_count`].
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
        self.idle.on_connection_added();
        self.thread.add_connection();
        self.members += 1;
        self.update_shares();
    }

    /// Counts a member that has left, and releases all that it holds.
    pub(crate) fn remove_member(&mut self, member: &mut Member) {
        self.members -= 1;
        self.update_shares();
        self.budget.release(&mut member.budget_used, u64::MAX);
        self.has_released = true;
        if self.members == 0 {
            self.idle.on_idle();
            self.thread.on_idle();
            self.hurry_if_asked();
        }
        self.thread.remove_connection();
    }

    /// Retires without waiting for the idle timeout if another thread has asked for it.
    pub(crate) fn hurry_if_asked(&mut self) {
        if self.thread.retires_early() {
            self.idle.hurry();
        }
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

    /// Schedules member `number` as soon as a slot or memory is free. Only for a member without
    /// requests in flight: the others are scheduled when these complete.
    pub(crate) fn block(&mut self, number: usize) {
        let number = self.place.number(number as u64) as usize;
        if !self.blocked.contains(&number) {
            self.blocked.push(number);
        }
    }

    /// Takes `bytes` of the budget from `member`.
    #[inline]
    pub(crate) fn release(&mut self, member: &mut Member, bytes: u64) {
        self.budget.release(&mut member.budget_used, bytes);
        self.has_released |= bytes > 0;
    }

    /// The tag of a request of member `number` that is submitted now, under a `key` of the frontend's
    /// choice, of 27 bits. The engine's workers serve the members in turn.
    #[inline]
    pub(crate) fn tag(&mut self, number: usize, key: u32) -> u64 {
        debug_assert_eq!(u64::from(key) & !KEY_MASK, 0);
        let epoch = self.slow.begin();
        self.sampler.mark(self.place.number(number as u64) << 32 | epoch | u64::from(key))
    }

    /// The request of the last tag was not submitted.
    #[cold]
    pub(crate) fn untag(&mut self) {
        self.slow.undo();
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

    /// Calls one of a pair of frontends.
    #[inline]
    pub(crate) fn inside<T>(&mut self, second: bool, call: impl FnOnce(&mut Self) -> T) -> T {
        let outside = self.place;
        self.place = outside.inside(second);
        let result = call(self);
        self.place = outside;
        result
    }
}
