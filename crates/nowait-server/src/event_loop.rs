//! The event loop of a server thread. One iteration takes events, services members, submits,
//! completes, and services those again that have something to answer.
//!
//! Invariant: the thread sleeps only in the queue's `wait`, which waits for descriptors, transfers,
//! workers and other threads together. Nothing here depends on what a frontend speaks.

#[cfg(feature = "sim")]
mod sim_change;
#[cfg(feature = "sim")]
mod sim;
#[cfg(test)]
mod tests;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait::{AdaptivePoll, BlockMap, Engine, Error, FD_TOKEN, Flags, Interest, IoQueue, Token};

use crate::export::{Export, result};
use crate::export_threads::export_registry::{RegisteredExport, Retired};
use crate::export_threads::{Shared, ThreadContext};
use crate::frontend::Frontend;
use crate::injected_bug::{ServerBug, injected};
use crate::latency::TIMED;
use crate::loop_context::{LoopContext, TOKEN_BITS};
use crate::slow_requests::KEY_MASK;
use crate::statistics::MechanismCounts;
use crate::thread_handle::ThreadHandle;

#[cfg(feature = "sim")]
pub use crate::event_loop::sim::{SimParked, Simulated, SimulatedUblk, SimulatedVhost};
#[cfg(feature = "sim")]
pub use crate::event_loop::sim_change::SimChange;

/// Retry interval of a member that waits for buffer memory while nothing of its thread is in
/// flight.
const RETRY: Duration = Duration::from_millis(10);

/// Iterations after which a thread publishes its engine's counts.
const PUBLISH_EVERY: u32 = 1024;

/// The token of the thread's wake-up.
const WAKE: Token = FD_TOKEN | 1 << 59;
// Bits are left for pairs of frontends.
const _: () = assert!(TOKEN_BITS < 59);

/// One thread with its engine and its frontend.
pub(crate) struct EventLoop<F, Q: IoQueue> {
    pub(crate) context: LoopContext<Q>,
    pub(crate) frontend: F,
    shared: Arc<Shared>,
    registered: Arc<RegisteredExport>,
    thread: Arc<ThreadHandle>,
    /// Events of the queue: a token and its `POLL*` bits.
    events: Vec<(Token, i32)>,
    stopping: bool,
    /// The members leave for other threads.
    parking: bool,
    adaptive_poll: AdaptivePoll,
    /// What the engines of the threads before this one have done.
    mechanisms_before: MechanismCounts,
    /// Iterations since the engine's counts were published.
    since_published: u32,
}

impl<F: Frontend<Q>, Q: IoQueue> EventLoop<F, Q> {
    /// The event loop of `thread`, with the engine and the frontend for it.
    ///
    /// # Errors
    /// The queue's error: a descriptor cannot be watched.
    pub(crate) fn new(
        context: &ThreadContext,
        export: Arc<Export>,
        mut engine: Engine<Q, dyn BlockMap>,
        mut frontend: F,
    ) -> Result<Self, Error> {
        let ThreadContext { shared, registered, .. } = context;
        let (shared, thread) = (shared.clone(), context.thread().clone());
        engine.watch(thread.as_fd(), WAKE, Interest::Readable)?;
        let memory = (shared.options.config.buffer_bytes, shared.declared.clone());
        let statistics = registered.statistics.for_thread();
        let mechanisms_before = statistics.mechanisms();
        let limit = shared.limit.clone();
        let times = (shared.options.idle, shared.options.slow_requests);
        let mut context =
            LoopContext::new(engine, export, statistics, thread.clone(), limit, memory, times)?;
        frontend.begin(&mut context)?;
        Ok(Self {
            context,
            frontend,
            shared,
            registered: registered.clone(),
            thread,
            events: Vec::with_capacity(64),
            stopping: false,
            parking: false,
            adaptive_poll: AdaptivePoll::default(),
            mechanisms_before,
            since_published: 0,
        })
    }

    /// Serves until the server stops and nothing is in flight, or until the thread has had no
    /// member for the idle timeout.
    ///
    /// # Errors
    /// The queue's error; the members are dropped then.
    pub(crate) fn run(&mut self) -> Result<(), Error> {
        loop {
            if !self.stopping && self.shared.is_stopping() {
                self.stopping = true;
                self.context.throttle.lift(&self.registered.limits);
                self.frontend.begin_shutdown(&mut self.context);
            }
            if self.thread.is_parking() != self.parking {
                self.change_parking();
            }
            if self.stopping && self.context.members() == 0 || self.is_parked() || self.retires() {
                self.publish();
                return Ok(());
            }
            self.wait()?;
            self.expire();
            self.run_once()?;
        }
    }

    /// Has the members leave for other threads, or those that are left go on.
    #[cold]
    fn change_parking(&mut self) {
        self.parking = !self.parking;
        if self.parking {
            self.context.throttle.lift(&self.registered.limits);
            self.frontend.begin_parking(&mut self.context);
        } else {
            self.context.throttle.restore(&self.registered.limits);
            self.frontend.end_parking(&mut self.context);
        }
    }

    /// Whether this thread ends because all of its members have left for others.
    fn is_parked(&self) -> bool {
        self.parking
            && self.context.members() == 0
            // A queue may be on its way.
            && self.thread.is_idle()
            && self.context.engine.in_flight() == 0
            && self.registered.leave_parking(&self.thread)
    }

    /// Whether this thread ends because of the idle timeout. The last thread of a writable export
    /// flushes it, so that no data remain in memory only.
    fn retires(&mut self) -> bool {
        if self.time_until_retirement() != Some(Duration::ZERO)
            || self.context.engine.in_flight() > 0
        {
            return false;
        }
        let export = &self.context.export;
        let retired = self.registered.retire(&self.thread);
        if retired == Retired::TheLast && !export.disk().is_read_only() {
            // A failure was logged.
            let _ = export.flush();
        }
        retired != Retired::No
    }

    /// Time until this thread retires; `None` while it has members or its frontend keeps it.
    fn time_until_retirement(&self) -> Option<Duration> {
        if self.frontend.keeps_thread() { None } else { self.context.idle.remaining() }
    }

    /// One iteration: handle events, service members, submit, complete, service again.
    fn run_once(&mut self) -> Result<(), Error> {
        self.context.update_shares();
        self.take_events();
        self.release_throttled();
        if !self.service_interactive() {
            self.service_bulk();
        }
        // Requests just submitted may have completed already; then their replies are sent now.
        let has_submitted = self.context.engine.in_flight() > 0;
        self.poll()?;
        self.complete();
        if has_submitted {
            self.context.completes_inline = self.context.engine.in_flight() == 0;
        }
        self.service_interactive();
        self.service_bulk();
        self.frontend.end_iteration(&mut self.context);
        debug_assert!(
            self.context.engine.in_flight() > 0 || self.context.slow.in_flight() == 0,
            "a tag of a request that was not submitted was not given back"
        );
        if self.context.engine.has_stopped_polling() {
            self.shared.warn_stopped_polling();
        }
        self.thread.publish_in_flight(self.context.engine.in_flight());
        self.since_published += 1;
        if self.since_published == PUBLISH_EVERY {
            self.publish();
        }
        Ok(())
    }

    /// Submits, and takes completions and events without waiting.
    fn poll(&mut self) -> Result<(), Error> {
        let events = &mut self.events;
        self.context.sampler.begin_device();
        self.context.engine.poll_watched(&mut |token, bits| events.push((token, bits)))?;
        self.taken();
        Ok(())
    }

    /// Requests may have ended.
    #[inline]
    fn taken(&mut self) {
        if self.context.engine.has_done() {
            self.context.sampler.end_device();
        }
    }

    /// Whether there is something to do without an event.
    fn has_work(&mut self) -> bool {
        !self.context.run_queues.is_empty()
            || !self.events.is_empty()
            || self.context.engine.has_completions()
            || self.frontend.has_work()
    }

    /// Sleeps until there is an event, unless work is pending.
    fn wait(&mut self) -> Result<(), Error> {
        if self.has_work() {
            return self.poll();
        }
        let began = Instant::now();
        self.note_overdue(began);
        self.frontend.watch_memory(&self.context, began);
        let (engine, frontend) = (&mut self.context.engine, &self.frontend);
        let has_event = || engine.has_completions() || frontend.has_arrived();
        if self.adaptive_poll.wait(began, has_event) {
            self.frontend.poll(&mut self.context);
        } else if !self.frontend.before_sleep(&mut self.context) {
            let deadline = self.frontend.deadline().map(|due| due.saturating_duration_since(began));
            // Memory released by another thread's members causes no event here.
            let retry = (!self.context.blocked.is_empty()).then_some(RETRY);
            let release = self.context.delayed_release.release_if_due(began);
            let throttled = self.context.throttle.wait_time();
            let waits = self.context.engine.in_flight() > 0;
            let slow = if waits { self.context.slow.time_until_due(began) } else { None };
            let idle = self.time_until_retirement();
            let timeouts = [deadline, idle, retry, release, throttled, slow];
            let timeout = timeouts.into_iter().flatten().min();
            let events = &mut self.events;
            self.context.sampler.begin_device();
            self.context.engine.wait(timeout, &mut |token, bits| events.push((token, bits)))?;
            self.taken();
            self.adaptive_poll.slept(began);
            self.wake_blocked();
        }
        Ok(())
    }

    /// Logs the requests that have been found to be in flight for long. To be called once in a while
    /// with the time.
    #[inline]
    fn note_overdue(&mut self, now: Instant) {
        if let Some((count, time)) = self.context.slow.advance(now) {
            self.context.export.note_overdue(count, time);
        }
    }

    /// Publishes how the engine has served its requests. Called when the thread is woken up, as a
    /// reader of the counts does, and once in a while.
    fn publish(&mut self) {
        self.since_published = 0;
        // A thread that never sleeps has no other time to look at the clock.
        let now = Instant::now();
        self.note_overdue(now);
        self.frontend.watch_memory(&self.context, now);
        let stats = self.context.engine.stats();
        self.context.statistics.publish(&self.mechanisms_before, &stats);
    }

    /// Tells the frontend if its deadline has passed. Without one, the clock is not read.
    fn expire(&mut self) {
        if let Some(due) = self.frontend.deadline() {
            let now = Instant::now();
            if now >= due {
                self.frontend.expire(&mut self.context, now);
            }
        }
    }

    fn take_events(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        for (token, bits) in events.drain(..) {
            if token == WAKE {
                self.thread.acknowledge();
                self.publish();
                self.context.hurry_if_asked();
                self.frontend.on_wake(&mut self.context);
            } else {
                self.frontend.on_event(&mut self.context, token & !FD_TOKEN, bits);
            }
        }
        self.events = events;
        self.frontend.after_events(&mut self.context);
        self.complete();
    }

    /// Services every scheduled interactive member. Returns whether there was one.
    fn service_interactive(&mut self) -> bool {
        // Members scheduled meanwhile are serviced in the next pass.
        let mut scheduled = self.context.run_queues.take_interactive();
        let any = !scheduled.is_empty();
        for member in scheduled.drain(..) {
            self.service(member);
        }
        self.context.run_queues.keep(scheduled);
        any
    }

    /// Services bulk members round robin until they have moved one quantum together.
    fn service_bulk(&mut self) {
        let mut left = self.context.quantum;
        for _ in 0..self.context.run_queues.bulk.len() {
            let Some(member) = self.context.run_queues.bulk.pop_front() else { return };
            let moved = self.service(member);
            if moved >= left {
                return;
            }
            left -= moved;
        }
    }

    /// Services a member. Returns the number of bytes moved.
    fn service(&mut self, member: usize) -> u64 {
        let is_limited = self.context.throttle.is_on() && self.frontend.is_limited(member);
        let Some(state) = self.frontend.member(member) else { return 0 };
        state.scheduled = false;
        if is_limited {
            // Those of requests that were submitted between its services.
            self.context.throttle.charge(state);
        }
        state.quantum.begin(self.context.quantum);
        let throttle = &mut self.context.throttle;
        let moved = match is_limited && throttle.holds(member, state, Instant::now()) {
            true => self.frontend.send_answers(&mut self.context, member),
            false => self.frontend.service(&mut self.context, member),
        };
        if is_limited && let Some(state) = self.frontend.member(member) {
            self.context.throttle.charge(state);
        }
        if self.context.has_released {
            self.wake_blocked();
        }
        moved
    }

    /// Takes over changed limits, and schedules the members that waited for tokens once there are
    /// some.
    fn release_throttled(&mut self) {
        if !self.stopping && !self.parking {
            self.context.throttle.update(&self.registered.limits);
        }
        self.context.throttle.begin_release();
        while let Some(member) = self.context.throttle.released() {
            if injected(ServerBug::ForgetHeld) {
                continue;
            }
            if let Some(state) = self.frontend.member(member) {
                state.is_held = false;
                self.context.run_queues.schedule(member, state);
            }
        }
    }

    /// Schedules the blocked members after a slot or memory became free.
    fn wake_blocked(&mut self) {
        self.context.has_released = false;
        for member in self.context.blocked.drain(..) {
            if let Some(state) = self.frontend.member(member) {
                self.context.run_queues.schedule(member, state);
            }
        }
    }

    /// Hands the completed requests to the frontend.
    fn complete(&mut self) {
        if self.context.engine.has_done() {
            self.wake_blocked();
        }
        while let Some(completion) = self.context.engine.next() {
            let tag = completion.tag;
            let (member, key) = ((tag >> 32) as usize, (tag & KEY_MASK) as u32);
            let (kind, io) = (self.frontend.kind(member), completion.io);
            if tag & TIMED != 0
                && let Some(times) = self.context.sampler.end(tag)
            {
                self.context.statistics.record(kind, io.op, times);
            }
            if let Some(time) = self.context.slow.end(tag) {
                self.context.export.note_slow(io, time);
            }
            match result(&completion) {
                Ok(()) => {
                    self.context.statistics.count(kind, io.op, io.range.len);
                }
                // One that may not wait is done again if it has failed.
                Err(_) if io.flags.has(Flags::NOWAIT) => {}
                Err(errno) => {
                    self.context.export.note_fault(io, errno);
                    self.context.statistics.count_error(kind, io.op, errno);
                }
            }
            self.frontend.complete(&mut self.context, member, key, completion);
        }
    }
}
