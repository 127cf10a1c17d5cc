//! One queue of a ublk device on a serving thread: its tags' commands are in the thread's own ring.
//!
//! Invariant: a request is answered once, after its data are where its user expects them. A queue
//! that ends with commands in the ring leaks its buffers, because the driver may still write to them
//! (C45).
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nowait::{
    ByteRange, Completion, Error, Flags, IoQueue, Op, Operation, Rejected, Request, Token,
};

use crate::export::result;
use crate::fairness::Member;
use crate::frontend::Frontend;
use crate::injected_bug::{ServerBug, injected};
use crate::loop_context::LoopContext;
use crate::statistics::FrontendKind;
use crate::ublk::request_data::RequestData;
use crate::ublk::request_descriptors::Descriptors;
use crate::ublk::ublk_cmd::{
    ABORTED, COMMIT_AND_FETCH_REQ, Descriptor, FETCH_REQ, IO_FUA, IO_NEED_REG_BUF, IO_NO_UNMAP,
    OP_DISCARD, OP_FLUSH, OP_READ, OP_WRITE, OP_WRITE_ZEROES, io_arguments,
};
use crate::ublk::ublk_device::UblkDevice;

/// The only member: the queue.
const QUEUE: usize = 0;

/// Called when another program has stopped the device.
pub(crate) type OnRemoved = Box<dyn Fn()>;

/// The queue of one thread.
pub(crate) struct UblkFrontend {
    device: Arc<UblkDevice>,
    number: u16,
    on_removed: OnRemoved,
    /// Set up when the thread begins.
    queue: Option<Queue>,
}

struct Queue {
    descriptor: OwnedFd,
    requests: Descriptors,
    member: Member,
    data: RequestData,
    /// Tags whose requests are not submitted yet.
    ready: VecDeque<u16>,
    /// Tags that get requests, or have one.
    live_tags: u16,
    /// Commands in the ring.
    in_ring: u16,
    /// Requests in the engine.
    in_engine: u16,
    /// Reads and writes so far that were done without a copy, and those that were not.
    without_copy: u64,
    with_copy: u64,
    /// Answers were pushed in this iteration.
    has_pushed: bool,
    /// No more requests are taken: the next server gets them.
    leaving: bool,
}

impl UblkFrontend {
    /// The frontend for queue `number` of `device`; none if the device has fewer.
    pub(crate) fn new(device: Arc<UblkDevice>, number: u16, on_removed: OnRemoved) -> Option<Self> {
        (number < device.queues() && !device.is_lost()).then_some(Self {
            device,
            number,
            on_removed,
            queue: None,
        })
    }

    /// Pushes a command of `tag` into the thread's ring.
    fn push<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        op: u32,
        tag: u16,
        result: i32,
    ) -> Result<(), Error> {
        let Some(queue) = &mut self.queue else { return Ok(()) };
        let (of_entry, address) = queue.data.addresses(tag);
        let arguments = io_arguments(self.number, tag, result, address);
        let token = context.engine_token(tag.into());
        // SAFETY: the buffer at the address is in `data`, untouched until the command's result has
        // come; see the invariant above for a queue that ends before.
        unsafe {
            context.engine.command(queue.descriptor.as_fd(), op, of_entry, arguments, token)?
        };
        queue.in_ring += 1;
        queue.has_pushed = true;
        Ok(())
    }

    /// Answers the request of `tag`, and fetches its next one.
    fn answer<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>, tag: u16, result: i32) {
        if let Err(error) = self.push(context, COMMIT_AND_FETCH_REQ, tag, result) {
            // The ring has failed, and ends the thread with the same error.
            tracing::error!("{}: {error}", self.device.node());
        }
    }

    /// Submits the request of `tag`, or answers it. False, with nothing done, if there is no memory
    /// for it.
    fn submit<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>, tag: u16) -> bool {
        let Some(queue) = &mut self.queue else { return true };
        let Some(descriptor) = queue.requests.get(tag) else { return true };
        let (io, is_cut) = match translate(context, descriptor) {
            Ok(translated) => translated,
            Err(errno) => {
                self.answer(context, tag, -errno);
                return true;
            }
        };
        queue.member.quantum.read(io.range.len);
        queue.member.quantum.count(io);
        let engine_tag = context.tag(QUEUE, tag.into());
        if !matches!(io.op, Op::Read | Op::Write) {
            match context.engine.submit_no_data(&context.device, io, engine_tag) {
                Ok(()) => queue.in_engine += 1,
                Err(rejected) => {
                    context.untag();
                    self.answer(context, tag, -errno_of(&rejected));
                }
            }
            return true;
        }
        let is_odd = is_cut || context.device.buffer_offset(io.range.pos) > 0;
        if is_odd {
            context.untag();
            return self.submit_copied(context, tag, io);
        }
        if let RequestData::Registered { .. } = queue.data {
            if descriptor.op_flags & IO_NEED_REG_BUF == 0
                && let Some(number) = queue.data.number(tag)
                && context.engine.submit_registered(&context.device, io, number, engine_tag).is_ok()
            {
                queue.in_engine += 1;
                return true;
            }
            context.untag();
            return self.submit_copied(context, tag, io);
        }
        let Some(buffer) = queue.data.take_buffer(tag) else {
            context.untag();
            return true;
        };
        match context.engine.submit(&context.device, io, buffer, engine_tag) {
            Ok(()) => {
                queue.in_engine += 1;
                if injected(ServerBug::CommitBeforeData) && io.op == Op::Read {
                    self.answer(context, tag, io.range.len as i32);
                }
            }
            Err(rejected) => {
                context.untag();
                let errno = errno_of(&rejected);
                if let Some(buffer) = rejected.buf {
                    queue.data.put_buffer(tag, buffer);
                }
                self.answer(context, tag, -errno);
            }
        }
        true
    }

    /// Submits a request whose data are copied here, between a buffer of the engine and where the driver has them, or
    /// answers it. False, with nothing done, if there is no buffer for it.
    #[inline(never)]
    fn submit_copied<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        tag: u16,
        io: Request,
    ) -> bool {
        let Some(queue) = &mut self.queue else { return true };
        let Some(mut buffer) = context.engine.buffer(&context.device, io.range) else {
            return false;
        };
        let start = context.device.buffer_offset(io.range.pos);
        let data = &mut buffer[start..start + io.range.len as usize];
        let copied = match io.op {
            Op::Write => queue.data.copy_in((queue.descriptor.as_fd(), self.number), tag, data),
            _ => Ok(()),
        };
        let engine_tag = context.tag(QUEUE, tag.into());
        let submitted = copied.and_then(|()| {
            context
                .engine
                .submit(&context.device, io, buffer, engine_tag)
                .map_err(|rejected| errno_of(&rejected))
        });
        match submitted {
            Ok(()) => queue.in_engine += 1,
            Err(errno) => {
                context.untag();
                self.answer(context, tag, -errno);
            }
        }
        true
    }

    /// Handles the end of a request whose memory is registered, or whose data were to be copied.
    /// Returns its result, or `None` if it is to be tried again with a copy.
    fn finish_data(&mut self, tag: u16, start: usize, completion: &Completion) -> Option<i32> {
        let queue = self.queue.as_mut()?;
        let len = completion.io.range.len;
        let result = result(completion);
        if completion.buf.is_none() && result.is_err() {
            queue.data.set_must_copy(tag, true);
            queue.ready.push_front(tag);
            return None;
        }
        queue.data.set_must_copy(tag, false);
        match completion.buf {
            Some(_) => queue.with_copy += 1,
            None => queue.without_copy += 1,
        }
        // The driver asks for more than the image has where that ends in the last sector, and expects all of it.
        let asked = queue.requests.get(tag).map_or(len, |it| u64::from(it.sectors) << 9).max(len);
        let copied = match &completion.buf {
            Some(buffer) if result.is_ok() && completion.io.op == Op::Read => {
                let data = &buffer[start..start + len as usize];
                let driver = (queue.descriptor.as_fd(), self.number);
                queue.data.copy_out(driver, tag, data, (asked - len) as usize)
            }
            _ => Ok(()),
        };
        // The driver's longest request bounds it.
        Some(result.and(copied).map_or_else(|errno| -errno, |()| asked as i32))
    }

    /// A tag gets no more requests.
    fn end_tag<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>) {
        let Some(queue) = &mut self.queue else { return };
        queue.live_tags -= 1;
        if queue.live_tags == 0 {
            self.end(context);
        }
    }

    /// The queue leaves the thread.
    fn end<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>) {
        let Some(mut queue) = self.queue.take() else { return };
        if self.device.registers_data() {
            let (node, number) = (self.device.node(), self.number);
            let Queue { without_copy, with_copy, .. } = queue;
            tracing::debug!(
                "{node}: queue {number}: {without_copy} requests without a copy, {with_copy} with one"
            );
        }
        context.remove_member(&mut queue.member);
        if self.device.queue_ends() {
            (self.on_removed)();
        }
    }
}

/// The engine's request for a descriptor, and whether it is shorter because the image ends in its last sector; or the errno
/// that refuses it.
#[inline]
fn translate<Q: IoQueue>(
    context: &LoopContext<Q>,
    descriptor: Descriptor,
) -> Result<(Request, bool), i32> {
    let Descriptor { op_flags, sectors, start_sector } = descriptor;
    let op = match op_flags as u8 {
        OP_READ => Op::Read,
        OP_WRITE => Op::Write,
        OP_FLUSH => Op::Flush,
        OP_DISCARD => Op::Discard,
        OP_WRITE_ZEROES => Op::Zero,
        _ => return Err(libc::EOPNOTSUPP),
    };
    let mut flags = Flags::ALL_OR_ERROR;
    if op_flags & IO_FUA != 0 && op != Op::Flush {
        flags = flags.with(Flags::DSYNC);
    }
    if op_flags & IO_NO_UNMAP != 0 && op == Op::Zero {
        flags = flags.with(Flags::NO_UNMAP);
    }
    if op == Op::Flush {
        return Ok((Request { op, flags: Flags::NONE, range: ByteRange::new(0, 0) }, false));
    }
    let (pos, len) = (start_sector << 9, u64::from(sectors) << 9);
    let range = context.export.range_of_sectors(op, pos, len);
    let range =
        range.inspect_err(|e| context.statistics.count_error(FrontendKind::Ublk, op, *e))?;
    Ok((Request { op, flags, range }, range.len < len))
}

#[cfg(feature = "sim")]
impl UblkFrontend {
    /// The driver keeps requests back from now on.
    pub(crate) fn begin_pause(&self) {
        self.device.keep_back();
    }

    /// The simulated driver ends with this frontend: it accesses no buffer any more.
    pub(crate) fn end_driver(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.in_ring = 0;
        }
    }
}

impl<Q: IoQueue> Frontend<Q> for UblkFrontend {
    /// Gives the driver a buffer for each tag.
    fn begin(&mut self, context: &mut LoopContext<Q>) -> Result<(), Error> {
        let failed = |errno| Error::new(errno, Operation::SetUp);
        let (depth, bytes) = (self.device.info.depth, self.device.info.max_io_bytes);
        let data = match self.device.registers_data() {
            true => Some(RequestData::registered(&mut context.engine, &context.device, depth)),
            false => RequestData::copied(&mut context.engine, &context.device, depth, bytes),
        };
        let data = data.ok_or(failed(libc::ENOMEM))?;
        // What takes time is done before a device is taken over: its users wait.
        let descriptor = self.device.descriptor().map_err(failed)?;
        let requests = Descriptors::map(descriptor.as_fd(), self.number, depth).map_err(failed)?;
        self.queue = Some(Queue {
            data,
            descriptor,
            requests,
            member: Member::of(self.device.client.clone()),
            ready: VecDeque::with_capacity(depth.into()),
            live_tags: depth,
            in_ring: 0,
            in_engine: 0,
            without_copy: 0,
            with_copy: 0,
            has_pushed: false,
            leaving: false,
        });
        for tag in 0..depth {
            self.push(context, FETCH_REQ, tag, 0)?;
        }
        self.device.queue_begins();
        context.add_member();
        Ok(())
    }

    fn on_wake(&mut self, _: &mut LoopContext<Q>) {
        if let Some(queue) = &mut self.queue
            && self.device.is_leaving()
        {
            queue.leaving = true;
            // The driver queues them for the next server.
            queue.ready.clear();
        }
    }

    /// The command of a tag has ended: there is a request, or there will be none.
    #[inline]
    fn on_event(&mut self, context: &mut LoopContext<Q>, token: Token, outcome: i32) {
        let Some(queue) = &mut self.queue else { return };
        queue.in_ring -= 1;
        if outcome < 0 {
            if outcome != ABORTED {
                let error = std::io::Error::from_raw_os_error(-outcome);
                tracing::error!("{}: queue {}: {error}", self.device.node(), self.number);
            }
            return self.end_tag(context);
        }
        if !queue.leaving {
            queue.ready.push_back(token as u16);
            context.schedule(QUEUE, &mut queue.member);
        }
    }

    #[inline]
    fn kind(&self, _: usize) -> FrontendKind {
        FrontendKind::Ublk
    }

    fn member(&mut self, member: usize) -> Option<&mut Member> {
        self.queue.as_mut().filter(|_| member == QUEUE).map(|queue| &mut queue.member)
    }

    /// Submits the requests that have come.
    fn service(&mut self, context: &mut LoopContext<Q>, _: usize) -> u64 {
        while let Some(queue) = &mut self.queue
            && let Some(&tag) = queue.ready.front()
        {
            if queue.member.quantum.reads_exhausted() || queue.member.quantum.is_spent() {
                context.schedule(QUEUE, &mut queue.member);
                break;
            }
            if !context.engine.has_free_slot() {
                if queue.in_engine == 0 {
                    context.block(QUEUE);
                }
                break;
            }
            queue.ready.pop_front();
            if !self.submit(context, tag)
                && let Some(queue) = &mut self.queue
            {
                queue.ready.push_front(tag);
                if queue.in_engine == 0 {
                    context.block(QUEUE);
                }
                break;
            }
        }
        self.queue.as_ref().map_or(0, |queue| queue.member.quantum.bytes_moved())
    }

    #[inline]
    fn complete(
        &mut self,
        context: &mut LoopContext<Q>,
        _: usize,
        key: u32,
        completion: Completion,
    ) {
        let Some(queue) = &mut self.queue else { return };
        queue.in_engine -= 1;
        let tag = key as u16;
        let completed_op = completion.io.op;
        let has_data = matches!(completed_op, Op::Read | Op::Write);
        let answer = if has_data && queue.data.is_copied_here(tag) {
            let start = context.device.buffer_offset(completion.io.range.pos);
            self.finish_data(tag, start, &completion)
        } else {
            // The driver expects the bytes of a transfer, which its longest request bounds.
            let bytes = if has_data { completion.io.range.len as i32 } else { 0 };
            let answer = result(&completion).map_or_else(|errno| -errno, |()| bytes);
            if let Some(buffer) = completion.buf {
                queue.data.put_buffer(tag, buffer);
            }
            Some(answer)
        };
        if let Some(queue) = &mut self.queue
            && !queue.ready.is_empty()
        {
            context.schedule(QUEUE, &mut queue.member);
        }
        if injected(ServerBug::CommitBeforeData) && completed_op == Op::Read {
            return;
        }
        if let Some(answer) = answer {
            self.answer(context, tag, answer);
        }
    }

    /// A queue that is left ends when its last answers have reached the driver.
    fn end_iteration(&mut self, context: &mut LoopContext<Q>) {
        let Some(queue) = &mut self.queue else { return };
        let has_pushed = std::mem::replace(&mut queue.has_pushed, false);
        if queue.leaving && queue.in_engine == 0 && !has_pushed {
            self.end(context);
        }
    }

    fn has_work(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.leaving && queue.in_engine == 0)
    }

    /// Requests are served until the device is stopped, which writes what the kernel has cached.
    fn begin_shutdown(&mut self, _: &mut LoopContext<Q>) {}

    fn keeps_thread(&self) -> bool {
        self.queue.is_some()
    }
}

/// The errno of a request that the engine has not taken. The slot was checked before: `EAGAIN` means
/// that the engine's queue is stuck, and would reach programs that did not ask for it.
fn errno_of(rejected: &Rejected) -> i32 {
    match rejected.error.errno() {
        libc::EAGAIN => libc::EIO,
        errno => errno,
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.in_ring > 0 {
            self.data.leak();
        }
    }
}
