//! A frontend: the part of a serving thread that speaks a protocol. The event loop owns all the
//! rest, and lends it to the frontend as a [`LoopContext`].
//!
//! Invariant: no callback blocks. Tokens, members and tags name their frontend, so that several
//! frontends of one thread never get each other's events and completions.

use std::time::Instant;

use nowait::{Completion, Error, IoQueue, Token};

use crate::frontend_kind::FrontendKind;
use crate::loop_context::LoopContext;
use crate::member::Member;

/// A frontend of a thread. Its members are what the thread schedules: the connections of NBD, the
/// queues of a paravirtual device. They have numbers of the frontend's choice.
///
/// Several frontends of a thread are a frontend, too: [`Frontends`](crate::frontends::Frontends).
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

    /// The kind that the requests of `member` are counted as.
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

    /// A turn of a member that is held up by limits: only its answers leave.
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

    /// The exports with these indices on the thread, in order, are paused: their members take no more requests, and each
    /// leaves with what it holds, for the end of the pause, once its requests in flight are answered. Or
    /// those that are left go on: [`ServedExport::is_pausing`](crate::served_export::ServedExport) says
    /// which.
    fn change_pause(&mut self, _: &mut LoopContext<Q>, _exports: &[u32]) {}
}
