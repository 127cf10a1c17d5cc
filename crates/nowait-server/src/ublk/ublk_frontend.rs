//! The ublk frontend of a thread: queues of local block devices, each a member of the thread.
//!
//! Invariant: a queue stays on the thread on which it began, as the driver demands, until its last
//! command has ended.

use std::sync::Arc;

use nowait::{Completion, IoQueue, Token};
use slab::Slab;

use crate::frontend::Frontend;
use crate::frontend_kind::FrontendKind;
use crate::loop_context::LoopContext;
use crate::member::Member;
use crate::ublk::queue_memory::LeftQueue;
use crate::ublk::ublk_channel::{UblkChannel, UblkStart};
use crate::ublk::ublk_queue::{GENERATIONS, UblkQueue, queue_and_tag};

/// The queues of a thread.
pub(crate) struct UblkFrontend {
    queues: Slab<UblkQueue>,
    /// Queues that have left, of which commands are in the ring.
    left: Vec<LeftQueue>,
    /// Generation of the queue that began last.
    generation: u64,
    channel: Arc<UblkChannel>,
}

impl UblkFrontend {
    /// The frontend of the thread that takes queues from `channel`.
    pub(crate) fn new(channel: Arc<UblkChannel>) -> Self {
        Self { queues: Slab::new(), left: Vec::new(), generation: 0, channel }
    }

    /// Begins to serve a queue.
    pub(crate) fn add<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>, start: UblkStart) {
        self.generation = (self.generation + 1) % GENERATIONS;
        let (entry, started) = (self.queues.vacant_entry(), start.started.clone());
        let name = (entry.key(), self.generation);
        let begun = UblkQueue::begin(context, start, name).map(|queue| {
            entry.insert(queue);
        });
        // The receiver may not wait any more.
        let _ = started.send(begun);
    }

    fn end<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>, number: usize) {
        if let Some(queue) = self.queues.try_remove(number) {
            self.left.extend(queue.end(context));
        }
    }

    /// A command has ended that a queue has left in the ring.
    #[cold]
    fn on_left_command<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        first_token: Token,
        outcome: i32,
    ) {
        let mut left = self.left.iter_mut();
        if let Some(at) = left.position(|left| left.first_token == first_token)
            && self.left[at].on_command(outcome)
        {
            self.left.swap_remove(at).end(&mut context.engine);
        }
    }

    /// The simulated driver ends with this frontend.
    #[cfg(feature = "sim")]
    pub(crate) fn end_driver(&mut self) {
        self.queues.iter_mut().for_each(|(_, queue)| queue.end_driver());
        self.left.iter_mut().for_each(|left| left.memory.in_ring = 0);
    }
}

impl<Q: IoQueue> Frontend<Q> for UblkFrontend {
    fn on_wake(&mut self, context: &mut LoopContext<Q>) {
        for start in self.channel.take() {
            self.add(context, start);
            self.channel.counted();
        }
        self.queues.iter_mut().for_each(|(_, queue)| queue.look_at_device());
    }

    #[inline]
    fn on_event(&mut self, context: &mut LoopContext<Q>, token: Token, outcome: i32) {
        let (number, first_token, tag) = queue_and_tag(token);
        let live = self.queues.get_mut(number).filter(|queue| queue.first_token == first_token);
        let Some(queue) = live else {
            return self.on_left_command(context, first_token, outcome);
        };
        if queue.on_command(context, tag, outcome) {
            self.end(context, number);
        }
    }

    #[inline]
    fn kind(&self, _: usize) -> FrontendKind {
        FrontendKind::Ublk
    }

    #[inline]
    fn member(&mut self, member: usize) -> Option<&mut Member> {
        self.queues.get_mut(member).map(|queue| &mut queue.member)
    }

    fn service(&mut self, context: &mut LoopContext<Q>, member: usize) -> u64 {
        self.queues.get_mut(member).map_or(0, |queue| queue.service(context))
    }

    #[inline]
    fn complete(
        &mut self,
        context: &mut LoopContext<Q>,
        member: usize,
        key: u32,
        completion: Completion,
    ) {
        if let Some(queue) = self.queues.get_mut(member) {
            queue.complete(context, key as u16, completion);
        }
    }

    /// Queues that are left end when their last answers have reached the driver.
    fn end_iteration(&mut self, context: &mut LoopContext<Q>) {
        let left = |(number, queue): (usize, &mut UblkQueue)| queue.has_left().then_some(number);
        // Most threads have none; an empty list takes no memory.
        let left: Vec<_> = self.queues.iter_mut().filter_map(left).collect();
        left.into_iter().for_each(|number| self.end(context, number));
    }

    fn has_work(&self) -> bool {
        self.queues.iter().any(|(_, queue)| queue.is_about_to_leave())
    }

    /// Requests are served until the device is stopped, which writes what the kernel has cached.
    fn begin_shutdown(&mut self, _: &mut LoopContext<Q>) {
        self.channel.close();
    }
}
