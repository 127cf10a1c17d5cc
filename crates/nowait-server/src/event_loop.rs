//! The event loop of a server thread. One iteration takes events, services members, submits,
//! completes, and services those again that have something to answer.
//!
//! Invariant: the thread sleeps only in the queue's `wait`, which waits for descriptors, transfers,
//! workers and other threads together. Nothing here depends on what a frontend speaks.

#[cfg(feature = "sim")]
pub(crate) mod sim_change;
#[cfg(feature = "sim")]
pub(crate) mod sim;
#[cfg(feature = "sim")]
pub(crate) mod simulated_vhost;
#[cfg(feature = "sim")]
pub(crate) mod simulated_ublk;
#[cfg(feature = "sim")]
mod sim_exports;
#[cfg(test)]
mod tests;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait::internal::AdaptivePoll;
use nowait::{
    ByteRange, Completion, DEFAULT_WEIGHT, Error, FD_TOKEN, Flags, Interest, IoQueue, Op, Request,
    Token,
};

use crate::export::result;
use crate::frontend::Frontend;
use crate::injected_bug::{ServerBug, injected};
use crate::latency::TIMED;
use crate::loop_context::{DiskEngine, LoopContext, TOKEN_BITS};
use crate::member::NO_EXPORT;
use crate::served_export::Unused;
use crate::slow_requests::KEY_MASK;
use crate::thread_handle::{InFlightQuery, ThreadHandle};
use crate::threads::{Shared, ThreadContext};

/// Retry interval of a member that waits for buffer memory while nothing of its thread is in
/// flight.
const RETRY: Duration = Duration::from_millis(10);

/// Iterations after which a thread that never sleeps looks at the clock.
const LOOK_EVERY: u32 = 1024;

/// The member of requests that are the event loop's own: frontends have smaller numbers.
const OWN_MEMBER: u64 = u32::MAX as u64;

/// The token of the thread's wake-up.
const WAKE: Token = FD_TOKEN | 1 << 59;
// Bits are left for the kinds of frontends.
const _: () = assert!(TOKEN_BITS < 59);

/// One thread with its engine and its frontend.
pub(crate) struct EventLoop<F, Q: IoQueue> {
    pub(crate) context: LoopContext<Q>,
    pub(crate) frontend: F,
    shared: Arc<Shared>,
    thread: Arc<ThreadHandle>,
    /// Events of the queue: a token and its `POLL*` bits.
    events: Vec<(Token, i32)>,
    stopping: bool,
    adaptive_poll: AdaptivePoll,
    /// Iterations since the clock was looked at.
    since_looked: u32,
}

impl<F: Frontend<Q>, Q: IoQueue> EventLoop<F, Q> {
    /// The event loop of the thread of `context`, with the engine and the frontend for it.
    ///
    /// # Errors
    /// The queue's error: a descriptor cannot be watched.
    pub(crate) fn new(
        context: &ThreadContext,
        mut engine: DiskEngine<Q>,
        mut frontend: F,
    ) -> Result<Self, Error> {
        let (shared, thread) = (context.shared.clone(), context.thread().clone());
        engine.watch(thread.as_fd(), WAKE, Interest::Readable)?;
        let memory = (shared.options.config.buffer_bytes, shared.declared.clone());
        let limit = shared.limit.clone();
        let times = (shared.options.idle, shared.options.slow_requests);
        let mut context = LoopContext::new(engine, thread.clone(), limit, memory, times);
        frontend.begin(&mut context)?;
        Ok(Self {
            context,
            frontend,
            shared,
            thread,
            events: Vec::with_capacity(64),
            stopping: false,
            adaptive_poll: AdaptivePoll::default(),
            since_looked: 0,
        })
    }

    /// Serves until the server stops and nothing is in flight.
    ///
    /// # Errors
    /// The queue's error; the members are dropped then.
    pub(crate) fn run(&mut self) -> Result<(), Error> {
        loop {
            if !self.stopping && self.shared.is_stopping() {
                self.stopping = true;
                self.lift_limits();
                self.frontend.begin_shutdown(&mut self.context);
            }
            let is_over = self.context.members() == 0 && self.context.engine.in_flight() == 0;
            if self.stopping && is_over {
                self.publish();
                return Ok(());
            }
            self.wait()?;
            self.expire();
            self.run_once()?;
        }
    }

    /// The limits hold no more: the members have to leave.
    fn lift_limits(&mut self) {
        let LoopContext { exports, throttle, .. } = &mut self.context;
        exports.iter().for_each(|served| _ = served.throttle.borrow_mut().lift());
        throttle.on_change();
    }

    /// Looks at the exports after some were paused, resumed, removed or limited.
    #[cold]
    fn review_exports(&mut self) {
        let LoopContext { exports, throttle, .. } = &mut self.context;
        let (mut changed, mut has_new_limits) = (Vec::new(), false);
        for served in exports.iter() {
            served.review_bitmaps();
            let is_paused = served.shared.is_paused();
            let has_changed = served.is_pausing.replace(is_paused) != is_paused;
            if has_changed {
                changed.push(served.index());
            }
            let (limits, mut own) = (&served.shared.limits, served.throttle.borrow_mut());
            has_new_limits |= match (is_paused || self.stopping, has_changed) {
                (true, _) => own.lift(),
                (false, true) => own.restore(limits),
                (false, false) => own.update(limits),
            };
        }
        if has_new_limits {
            throttle.on_change();
        }
        throttle.has_limits = exports.iter().any(|served| served.throttle.borrow().is_on());
        exports.look_again();
        if !changed.is_empty() {
            self.frontend.change_pause(&mut self.context, &changed);
        }
    }

    /// Makes the writes of exports durable that are not used any more, and detaches them.
    #[cold]
    fn leave_unused(&mut self, now: Instant) {
        let mut waiting = Vec::new();
        while let Some(unused) = self.context.exports.next_unused(now) {
            match unused {
                // A completion frees a slot, and an iteration follows it.
                Unused::Flush(index) if self.context.engine.free_slots() == 0 => {
                    waiting.push(index)
                }
                Unused::Flush(index) => self.flush(index),
                Unused::Detach(index) => self.detach(index),
            }
        }
        self.context.exports.put_back(waiting);
    }

    /// Flushes an export that is not used any more. If that cannot begin, the export is detached, and its
    /// image is flushed at the end of the server.
    fn flush(&mut self, index: u32) {
        let LoopContext { engine, exports, slow, .. } = &mut self.context;
        let Some(served) = exports.get(index) else { return };
        let io = Request { op: Op::Flush, flags: Flags::NONE, range: ByteRange::new(0, 0) };
        let tag = OWN_MEMBER << 32 | slow.begin();
        served.begin_flush();
        match engine.submit_no_data(&served.device, io, tag) {
            Ok(()) => served.on_submitted(),
            Err(rejected) => {
                slow.undo();
                served.export.note_fault(io, rejected.error.errno());
                exports.end_flush(index);
            }
        }
    }

    fn detach(&mut self, index: u32) {
        let LoopContext { engine, exports, .. } = &mut self.context;
        let Some(id) = exports.get(index).map(|served| served.shared.id) else { return };
        exports.detach(engine, index);
        self.shared.registry.forget_if_over(id);
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
        if self.context.exports.has_unused() {
            self.leave_unused(Instant::now());
        }
        debug_assert!(
            self.context.engine.in_flight() > 0 || self.context.slow.in_flight() == 0,
            "a tag of a request that was not submitted was not given back"
        );
        if self.context.engine.has_stopped_polling() {
            self.shared.warn_stopped_polling();
        }
        self.thread.publish_in_flight(self.context.engine.in_flight());
        self.since_looked += 1;
        if self.since_looked == LOOK_EVERY {
            self.look_at_clock();
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
            let idle = self.context.exports.idle_time_left(began);
            let timeouts = [deadline, idle, retry, release, throttled, slow];
            let timeout = timeouts.into_iter().flatten().min();
            let events = &mut self.events;
            self.context.sampler.begin_device();
            self.context.engine.wait(timeout, &mut |token, bits| events.push((token, bits)))?;
            self.taken();
            self.adaptive_poll.slept(began);
            if idle.is_some() {
                self.leave_unused(Instant::now());
            }
            self.wake_blocked();
        }
        Ok(())
    }

    /// Logs the requests that have been found to be in flight for long. To be called once in a while
    /// with the time.
    #[inline]
    fn note_overdue(&mut self, now: Instant) {
        let LoopContext { engine, exports, slow, .. } = &mut self.context;
        if let Some((overdue, time)) = slow.advance(now) {
            let tags = engine.tags_in_flight();
            let late = tags.filter(|(_, tag)| overdue.has(*tag));
            let mut devices: Vec<u32> = late.map(|(device, _)| device).collect();
            devices.sort_unstable();
            for of_one in devices.chunk_by(PartialEq::eq) {
                if let Some(served) = of_one.first().and_then(|device| exports.get(*device)) {
                    served.export.note_overdue(of_one.len() as u32, time);
                }
            }
        }
    }

    /// Does what depends on the time, for a thread that may never sleep.
    fn look_at_clock(&mut self) {
        self.since_looked = 0;
        let now = Instant::now();
        self.note_overdue(now);
        self.frontend.watch_memory(&self.context, now);
        if self.context.exports.idle_time_left(now) == Some(Duration::ZERO) {
            self.leave_unused(now);
        }
    }

    /// Publishes how the engine has served the requests of each export.
    #[cold]
    fn publish(&mut self) {
        let LoopContext { engine, exports, .. } = &self.context;
        exports.iter().for_each(|served| served.publish(engine));
    }

    /// Answers which changes of exports are in flight. All others are in the bitmaps.
    fn answer_queries(&self) {
        let LoopContext { engine, exports, .. } = &self.context;
        for InFlightQuery { export, answer } in self.thread.take_queries() {
            let served = exports.iter().filter(|served| served.shared.id == export);
            let changes = served.flat_map(|served| engine.changes_in_flight(&served.device));
            // An answer that is late is not received.
            let _ = answer.send(changes.collect());
        }
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
                self.wake_up();
            } else {
                self.frontend.on_event(&mut self.context, token & !FD_TOKEN, bits);
            }
        }
        self.events = events;
        self.frontend.after_events(&mut self.context);
        self.complete();
    }

    /// Another thread has woken this one up.
    fn wake_up(&mut self) {
        self.thread.acknowledge();
        self.look_at_clock();
        if self.thread.takes_review() {
            self.review_exports();
        }
        if self.thread.takes_publication() {
            self.publish();
        }
        self.answer_queries();
        self.frontend.on_wake(&mut self.context);
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

    /// Services bulk members by turns until they have moved one quantum together.
    fn service_bulk(&mut self) {
        let mut left = self.context.quantum;
        for _ in 0..self.context.run_queues.bulk.len() {
            let Some(member) = self.context.run_queues.bulk.pop() else { return };
            let export = self.frontend.member(member).map_or(NO_EXPORT, |state| state.export());
            let moved = self.service(member);
            let served = self.context.exports.get(export);
            let weight = served.map_or(DEFAULT_WEIGHT, |served| served.shared.weight());
            self.context.run_queues.bulk.serviced(moved, weight);
            if moved >= left {
                return;
            }
            left -= moved;
        }
    }

    /// Services a member. Returns the number of bytes moved.
    fn service(&mut self, member: usize) -> u64 {
        let Some(state) = self.frontend.member(member) else { return 0 };
        state.scheduled = false;
        if self.context.throttle.has_limits && self.is_limited(member) {
            return self.service_limited(member);
        }
        let Some(state) = self.frontend.member(member) else { return 0 };
        state.quantum.begin(self.context.quantum);
        let moved = self.frontend.service(&mut self.context, member);
        if self.context.has_released {
            self.wake_blocked();
        }
        moved
    }

    /// Whether limits hold for a member.
    fn is_limited(&mut self, member: usize) -> bool {
        let served = self.frontend.member(member).and_then(|state| state.served.as_deref());
        served.is_some_and(|served| served.throttle.borrow().is_on())
            && self.frontend.is_limited(member)
    }

    /// Services a member under limits.
    #[cold]
    fn service_limited(&mut self, member: usize) -> u64 {
        let Some(state) = self.frontend.member(member) else { return 0 };
        let LoopContext { throttle, quantum, .. } = &mut self.context;
        let Some(served) = state.served.clone() else { return 0 };
        // Tokens of requests that were submitted between its services.
        served.throttle.borrow().charge(&mut state.quantum, &state.client);
        state.quantum.begin(*quantum);
        let now = Instant::now();
        let is_held = throttle.holds(member, state, &mut served.throttle.borrow_mut(), now);
        // Its reference must end before its export is detached.
        drop(served);
        let moved = match is_held {
            true => self.frontend.send_answers(&mut self.context, member),
            false => self.frontend.service(&mut self.context, member),
        };
        if let Some(state) = self.frontend.member(member)
            && let Some(served) = state.served.clone()
        {
            served.throttle.borrow().charge(&mut state.quantum, &state.client);
        }
        if self.context.has_released {
            self.wake_blocked();
        }
        moved
    }

    /// Schedules the members that waited for tokens once there are some.
    fn release_throttled(&mut self) {
        if self.context.throttle.wait_time() != Some(Duration::ZERO) {
            return;
        }
        self.context.throttle.begin_release();
        while let Some((member, export)) = self.context.throttle.released() {
            if injected(ServerBug::ForgetHeld) {
                continue;
            }
            let LoopContext { exports, throttle, run_queues, .. } = &mut self.context;
            if let Some(served) = exports.get(export) {
                served.throttle.borrow_mut().on_released(throttle.round);
            }
            if let Some(state) = self.frontend.member(member) {
                state.is_held = false;
                run_queues.schedule(member, state);
            }
        }
    }

    /// Schedules the blocked members after a slot or memory became free.
    fn wake_blocked(&mut self) {
        self.context.has_released = false;
        for member in self.context.blocked.drain(..) {
            if let Some(state) = self.frontend.member(member) {
                state.is_blocked = false;
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
            self.count(&completion, member);
            if member as u64 == OWN_MEMBER {
                self.context.exports.end_flush(completion.device);
                continue;
            }
            self.frontend.complete(&mut self.context, member, key, completion);
        }
    }

    /// Counts a completed request.
    #[inline(always)]
    fn count(&mut self, completion: &Completion, member: usize) {
        let (tag, io) = (completion.tag, completion.io);
        let LoopContext { exports, slow, sampler, .. } = &mut self.context;
        let slow_for = slow.end(tag);
        let Some(served) = exports.on_completed(completion.device, io) else { return };
        if let Some(time) = slow_for {
            served.export.note_slow(io, time);
        }
        let outcome = result(completion);
        if member as u64 == OWN_MEMBER {
            return if let Err(errno) = outcome {
                served.export.note_fault(io, errno)
            };
        }
        let kind = self.frontend.kind(member);
        if tag & TIMED != 0
            && let Some(times) = sampler.end(tag)
        {
            served.statistics.record(kind, io.op, times);
        }
        match outcome {
            Ok(()) => served.statistics.count(kind, io.op, io.range.len),
            // One that may not wait is done again if it has failed.
            Err(_) if io.flags.contains(Flags::NOWAIT) => {}
            Err(errno) => {
                served.export.note_fault(io, errno);
                served.statistics.count_error(kind, io.op, errno);
            }
        }
    }
}
