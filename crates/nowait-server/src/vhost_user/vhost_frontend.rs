//! The vhost-user frontend of a thread: queues of devices, each a member of the thread.
//!
//! Invariant: memory of the guest stays mapped while the engine may use it. A stopped queue is
//! removed when none of its requests is in the engine; the memory of queues that still have some
//! when the frontend is dropped is leaked.

use std::os::fd::AsFd;
use std::sync::Arc;

use nowait::{Completion, Interest, IoQueue, Token};
use slab::Slab;

use crate::export::result;
use crate::frontend::Frontend;
use crate::frontend_kind::FrontendKind;
use crate::injected_bug::{ServerBug, injected};
use crate::loop_context::LoopContext;
use crate::member::Member;
use crate::shared_export::ExportUse;
use crate::vhost_user::block_request::{RequestReader, status_of};
use crate::vhost_user::device_queue::{DeviceQueue, Phase, Step};
use crate::vhost_user::queue_channel::{QueueChannel, QueueCommand, QueueId, QueueStart, signal};

/// The queues of a thread.
pub(crate) struct VhostFrontend {
    queues: Slab<DeviceQueue>,
    pub(crate) channel: Arc<QueueChannel>,
    reader: RequestReader,
    touched: Vec<usize>,
    /// The queues whose rings are looked at while the thread is awake. Their drivers are asked for a
    /// kick when it is about to sleep: an eventfd costs more than a look.
    idle: Vec<usize>,
    stopping: bool,
}

impl VhostFrontend {
    /// The frontend of the thread that takes queues from `channel`.
    pub(crate) fn new(channel: Arc<QueueChannel>) -> Self {
        Self {
            queues: Slab::new(),
            channel,
            reader: RequestReader::default(),
            touched: Vec::new(),
            idle: Vec::new(),
            stopping: false,
        }
    }

    fn handle_command<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>, command: QueueCommand) {
        match command {
            QueueCommand::Start(used, start) => {
                self.add(context, used, *start);
                self.channel.counted();
            }
            QueueCommand::SetCall(id, call) => {
                if let Some((_, queue)) = self.find(id) {
                    queue.start.call = call;
                    // The old descriptor may have been signalled for requests that completed meanwhile.
                    queue.start.call.iter().for_each(signal);
                }
            }
            QueueCommand::SetErr(id, err) => {
                if let Some((_, queue)) = self.find(id) {
                    queue.start.err = err;
                }
            }
            QueueCommand::Stop(id, answer) => {
                if let Some((number, queue)) = self.find(id) {
                    queue.phase = Phase::Stopping(Some(answer));
                    context.schedule(number, &mut queue.member);
                    self.touch(number);
                }
            }
            QueueCommand::Resume(id) => {
                if let Some((number, queue)) = self.find(id) {
                    queue.phase = Phase::Running;
                    context.schedule(number, &mut queue.member);
                }
            }
        }
    }

    fn find(&mut self, id: QueueId) -> Option<(usize, &mut DeviceQueue)> {
        self.queues.iter_mut().find(|(_, queue)| queue.start.id == id)
    }

    /// Adds a queue, unless the thread is stopping.
    fn add<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        used: ExportUse,
        start: QueueStart,
    ) {
        if self.stopping {
            return;
        }
        let number = self.queues.insert(DeviceQueue::new(start));
        context.add_member();
        let Some(queue) = self.queues.get_mut(number) else { return };
        if let Err(error) = context.use_export(&mut queue.member, used) {
            queue.start.device.break_down(&format!("the queue cannot be served: {error}"));
        }
        if let Err(error) =
            context.watch(queue.start.kick.as_fd(), number as Token, Interest::Readable)
        {
            queue.start.device.break_down(&format!("cannot watch a queue: {error}"));
        }
        // An earlier server may have died after it had told the driver of a request and before it
        // called it. A call too many does no harm.
        queue.start.call.iter().for_each(signal);
        // Requests may be available already, and those of an earlier server may be left.
        context.schedule(number, &mut queue.member);
    }

    /// Notes that a queue has something to do at the end of the iteration.
    fn touch(&mut self, number: usize) {
        if let Some(queue) = self.queues.get_mut(number)
            && !std::mem::replace(&mut queue.is_touched, true)
        {
            self.touched.push(number);
        }
    }
}

impl<Q: IoQueue> Frontend<Q> for VhostFrontend {
    fn on_wake(&mut self, context: &mut LoopContext<Q>) {
        while let Some(command) = self.channel.take() {
            self.handle_command(context, command);
        }
    }

    /// A kick. The eventfd is not read: each write to it is another event, and reading could block
    /// if the VMM has made it so.
    #[inline]
    fn on_event(&mut self, context: &mut LoopContext<Q>, token: Token, _: i32) {
        if let Some(queue) = self.queues.get_mut(token as usize) {
            context.schedule(token as usize, &mut queue.member);
        }
    }

    /// Schedules the queues that got a request meanwhile.
    #[inline]
    fn after_events(&mut self, context: &mut LoopContext<Q>) {
        let queues = &mut self.queues;
        self.idle.retain(|&number| {
            let Some(queue) = queues.get_mut(number) else { return false };
            if queue.has_next() {
                queue.is_idle = false;
                context.schedule(number, &mut queue.member);
            }
            queue.is_idle
        });
    }

    #[inline]
    fn has_arrived(&self) -> bool {
        let has_next = |&number: &usize| self.queues.get(number).is_some_and(DeviceQueue::has_next);
        self.idle.iter().any(has_next)
    }

    /// Asks the drivers of idle queues for a kick.
    fn before_sleep(&mut self, context: &mut LoopContext<Q>) -> bool {
        let mut has_more = false;
        for number in self.idle.drain(..) {
            let Some(queue) = self.queues.get_mut(number) else { continue };
            queue.is_idle = false;
            if !queue.takes_requests() {
                continue;
            }
            match queue.start.virtqueue.ask_for_kick() {
                Ok(false) => {}
                Ok(true) => {
                    context.schedule(number, &mut queue.member);
                    has_more = true;
                }
                Err(reason) => queue.break_down(reason),
            }
        }
        has_more
    }

    #[inline]
    fn kind(&self, _: usize) -> FrontendKind {
        FrontendKind::VhostUser
    }

    #[inline]
    fn member(&mut self, member: usize) -> Option<&mut Member> {
        self.queues.get_mut(member).map(|queue| &mut queue.member)
    }

    fn service(&mut self, context: &mut LoopContext<Q>, member: usize) -> u64 {
        let Some(queue) = self.queues.get_mut(member) else { return 0 };
        // A driver that makes requests available all the time is serviced in turn with the others.
        let mut left = queue.size();
        while !queue.start.device.is_broken() {
            if left == 0 {
                context.schedule(member, &mut queue.member);
                break;
            }
            left -= 1;
            match queue.step(member, &mut self.reader, context) {
                Ok(Step::Next) => {}
                Ok(Step::Pause) => break,
                Ok(Step::Idle) => {
                    if !std::mem::replace(&mut queue.is_idle, true) {
                        self.idle.push(member);
                    }
                    break;
                }
                Err(reason) => queue.break_down(reason),
            }
        }
        let moved = queue.member.quantum.bytes_moved();
        self.touch(member);
        moved
    }

    #[inline]
    fn complete(
        &mut self,
        context: &mut LoopContext<Q>,
        member: usize,
        key: u32,
        completion: Completion,
    ) {
        let Some(queue) = self.queues.get_mut(member) else { return };
        let outcome = result(&completion).map(|()| 0).map_err(status_of);
        if let Err(reason) = queue.complete(member, key as u16, outcome, &mut self.reader, context)
        {
            queue.break_down(reason);
        }
        context.schedule(member, &mut queue.member);
        self.touch(member);
    }

    fn end_iteration(&mut self, context: &mut LoopContext<Q>) {
        for number in self.touched.drain(..) {
            let Some(queue) = self.queues.get_mut(number) else { continue };
            if !queue.end_iteration() {
                continue;
            }
            let mut queue = self.queues.remove(number);
            self.idle.retain(|idle| *idle != number);
            context.unwatch(queue.start.kick.as_fd(), number as Token);
            context.remove_member(&mut queue.member);
            if let Phase::Stopping(Some(answer)) = &queue.phase {
                // The control thread may have gone meanwhile.
                let skipped = u16::from(injected(ServerBug::SkipAtStop));
                let _ = answer.try_send(queue.start.virtqueue.base().wrapping_add(skipped));
            }
        }
    }

    fn begin_shutdown(&mut self, context: &mut LoopContext<Q>) {
        self.stopping = true;
        self.on_wake(context);
        let numbers: Vec<usize> = self.queues.iter().map(|(number, _)| number).collect();
        for number in numbers {
            if let Some(queue) = self.queues.get_mut(number) {
                if let Phase::Running = queue.phase {
                    queue.phase = Phase::Stopping(None);
                }
                context.schedule(number, &mut queue.member);
            }
            self.touch(number);
        }
    }
}

impl Drop for VhostFrontend {
    /// Leaks the memory of queues with requests in flight: the engine may not have ended them (C45).
    fn drop(&mut self) {
        for (_, queue) in &self.queues {
            if queue.in_flight > 0 {
                std::mem::forget(queue.start.virtqueue.memory().clone());
            }
        }
    }
}
