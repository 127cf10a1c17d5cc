//! A frontend: the part of a serving thread that speaks a protocol. The event loop owns all the
//! rest, and lends it to the frontend as a [`LoopContext`].
//!
//! Invariant: no callback blocks. Tokens, members and tags name their frontend, so that several
//! frontends of one thread never get each other's events and completions.

use std::time::Instant;

use nowait::{Completion, Error, IoQueue, Token};

use crate::fairness::Member;
use crate::loop_context::LoopContext;
use crate::statistics::FrontendKind;

/// A frontend of a thread. Its members are what the thread schedules: the connections of NBD, the
/// queues of a paravirtual device. They have numbers of the frontend's choice.
///
/// Several frontends on one thread are a pair, which is a frontend too; pairs nest. A pair rather
/// than a list or an enum: every call is direct, and a thread with one frontend pays nothing.
pub(crate) trait Frontend<Q: IoQueue> {
    /// The thread starts: watches the descriptors that new members come from.
    ///
    /// # Errors
    /// The queue's error.
    fn begin(&mut self, _: &mut LoopContext<Q>) -> Result<(), Error> {
        Ok(())
    }

    /// The thread was woken up: something from another thread may be waiting.
    fn on_wake(&mut self, context: &mut LoopContext<Q>);

    /// The descriptor that is watched as `token` is ready: `bits` are its `POLL*` bits.
    fn on_event(&mut self, context: &mut LoopContext<Q>, token: Token, bits: i32);

    /// All events of an iteration have been reported.
    fn after_events(&mut self, _: &mut LoopContext<Q>) {}

    /// What the requests of `member` are counted as.
    fn kind(&self, member: usize) -> FrontendKind;

    /// Whether the limits of the export and of its clients hold for `member`.
    fn is_limited(&self, _member: usize) -> bool {
        true
    }

    /// A member, if it is still there.
    fn member(&mut self, member: usize) -> Option<&mut Member>;

    /// Services a scheduled member, which moves about as many bytes as its quantum allows. Returns
    /// how many.
    fn service(&mut self, context: &mut LoopContext<Q>, member: usize) -> u64;

    /// The same for a member that is held up by limits: only its answers leave.
    fn send_answers(&mut self, _: &mut LoopContext<Q>, _member: usize) -> u64 {
        0
    }

    /// The request submitted with [`LoopContext::tag`] for `member` and `key` has completed.
    fn complete(
        &mut self,
        context: &mut LoopContext<Q>,
        member: usize,
        key: u32,
        completion: Completion,
    );

    /// The iteration ends: what is told to the other side once for many requests is told now.
    fn end_iteration(&mut self, _: &mut LoopContext<Q>) {}

    /// Whether there is something to do without an event.
    fn has_work(&self) -> bool {
        false
    }

    /// When [`Frontend::expire`] must be called.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// The deadline has passed.
    fn expire(&mut self, _: &mut LoopContext<Q>, _now: Instant) {}

    /// Called once in a while, and before the thread sleeps: members may have to be looked at again because of their
    /// memory.
    fn watch_memory(&mut self, _: &LoopContext<Q>, _now: Instant) {}

    /// Whether something has arrived that no event tells of. Asked while the thread polls instead of
    /// sleeping; [`Frontend::after_events`] finds it then.
    fn has_arrived(&self) -> bool {
        false
    }

    /// Polling has succeeded: the member that was active last probably has more to do.
    fn poll(&mut self, _: &mut LoopContext<Q>) {}

    /// The thread is about to sleep. Returns whether it must not, because a member was scheduled.
    fn before_sleep(&mut self, _: &mut LoopContext<Q>) -> bool {
        false
    }

    /// Takes no more requests. Each member leaves once its requests in flight are answered.
    fn begin_shutdown(&mut self, context: &mut LoopContext<Q>);

    /// Takes no more requests. Each member leaves with what it holds, for another thread, once its
    /// requests in flight are answered. Until then [`Frontend::end_parking`] may call it off.
    fn begin_parking(&mut self, _: &mut LoopContext<Q>) {}

    /// The members that are left go on.
    fn end_parking(&mut self, _: &mut LoopContext<Q>) {}

    /// Whether the thread goes on without members.
    fn keeps_thread(&self) -> bool {
        false
    }
}

impl<Q, A, B> Frontend<Q> for (A, B)
where
    Q: IoQueue,
    A: Frontend<Q>,
    B: Frontend<Q>,
{
    fn begin(&mut self, context: &mut LoopContext<Q>) -> Result<(), Error> {
        context.inside(false, |context| self.0.begin(context))?;
        context.inside(true, |context| self.1.begin(context))
    }

    fn on_wake(&mut self, context: &mut LoopContext<Q>) {
        context.inside(false, |context| self.0.on_wake(context));
        context.inside(true, |context| self.1.on_wake(context));
    }

    fn on_event(&mut self, context: &mut LoopContext<Q>, token: Token, bits: i32) {
        let second = token & 1 == 1;
        context.inside(second, |context| match second {
            false => self.0.on_event(context, token >> 1, bits),
            true => self.1.on_event(context, token >> 1, bits),
        });
    }

    fn after_events(&mut self, context: &mut LoopContext<Q>) {
        context.inside(false, |context| self.0.after_events(context));
        context.inside(true, |context| self.1.after_events(context));
    }

    #[inline]
    fn kind(&self, member: usize) -> FrontendKind {
        match member & 1 {
            0 => self.0.kind(member >> 1),
            _ => self.1.kind(member >> 1),
        }
    }

    fn is_limited(&self, member: usize) -> bool {
        match member & 1 {
            0 => self.0.is_limited(member >> 1),
            _ => self.1.is_limited(member >> 1),
        }
    }

    fn member(&mut self, member: usize) -> Option<&mut Member> {
        match member & 1 {
            0 => self.0.member(member >> 1),
            _ => self.1.member(member >> 1),
        }
    }

    fn service(&mut self, context: &mut LoopContext<Q>, member: usize) -> u64 {
        let second = member & 1 == 1;
        context.inside(second, |context| match second {
            false => self.0.service(context, member >> 1),
            true => self.1.service(context, member >> 1),
        })
    }

    fn send_answers(&mut self, context: &mut LoopContext<Q>, member: usize) -> u64 {
        let second = member & 1 == 1;
        context.inside(second, |context| match second {
            false => self.0.send_answers(context, member >> 1),
            true => self.1.send_answers(context, member >> 1),
        })
    }

    fn complete(
        &mut self,
        context: &mut LoopContext<Q>,
        member: usize,
        key: u32,
        completion: Completion,
    ) {
        let second = member & 1 == 1;
        context.inside(second, |context| match second {
            false => self.0.complete(context, member >> 1, key, completion),
            true => self.1.complete(context, member >> 1, key, completion),
        });
    }

    fn end_iteration(&mut self, context: &mut LoopContext<Q>) {
        context.inside(false, |context| self.0.end_iteration(context));
        context.inside(true, |context| self.1.end_iteration(context));
    }

    fn has_work(&self) -> bool {
        self.0.has_work() || self.1.has_work()
    }

    fn deadline(&self) -> Option<Instant> {
        self.0.deadline().into_iter().chain(self.1.deadline()).min()
    }

    fn expire(&mut self, context: &mut LoopContext<Q>, now: Instant) {
        context.inside(false, |context| self.0.expire(context, now));
        context.inside(true, |context| self.1.expire(context, now));
    }

    fn watch_memory(&mut self, context: &LoopContext<Q>, now: Instant) {
        self.0.watch_memory(context, now);
        self.1.watch_memory(context, now);
    }

    fn has_arrived(&self) -> bool {
        self.0.has_arrived() || self.1.has_arrived()
    }

    fn poll(&mut self, context: &mut LoopContext<Q>) {
        context.inside(false, |context| self.0.poll(context));
        context.inside(true, |context| self.1.poll(context));
    }

    fn before_sleep(&mut self, context: &mut LoopContext<Q>) -> bool {
        let first = context.inside(false, |context| self.0.before_sleep(context));
        let second = context.inside(true, |context| self.1.before_sleep(context));
        first || second
    }

    fn begin_shutdown(&mut self, context: &mut LoopContext<Q>) {
        context.inside(false, |context| self.0.begin_shutdown(context));
        context.inside(true, |context| self.1.begin_shutdown(context));
    }

    fn begin_parking(&mut self, context: &mut LoopContext<Q>) {
        context.inside(false, |context| self.0.begin_parking(context));
        context.inside(true, |context| self.1.begin_parking(context));
    }

    fn end_parking(&mut self, context: &mut LoopContext<Q>) {
        context.inside(false, |context| self.0.end_parking(context));
        context.inside(true, |context| self.1.end_parking(context));
    }

    fn keeps_thread(&self) -> bool {
        self.0.keeps_thread() || self.1.keeps_thread()
    }
}
