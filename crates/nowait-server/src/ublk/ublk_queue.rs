//! One queue of a ublk device on a serving thread: its tags' commands are in the thread's own ring.
//!
//! Invariant: a request is answered once, after its data are where its user expects them. A queue
//! that leaves with commands in the ring keeps its memory until they have ended, because the driver may still write to it
//! (C45).
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use nowait::{
    ByteRange, Completion, Error, Flags, IoQueue, Op, Operation, Rejected, Request, Token,
};

use crate::export::result;
use crate::frontend_kind::FrontendKind;
use crate::injected_bug::{ServerBug, injected};
use crate::loop_context::{LoopContext, TOKEN_BITS};
use crate::member::Member;
use crate::served_export::ServedExport;
use crate::ublk::queue_memory::{LeftQueue, QueueMemory};
use crate::ublk::request_data::RequestData;
use crate::ublk::request_descriptors::Descriptors;
use crate::ublk::ublk_channel::{OnRemoved, UblkStart};
use crate::ublk::ublk_cmd::{
    ABORTED, COMMIT_AND_FETCH_REQ, Descriptor, FETCH_REQ, IO_FUA, IO_NEED_REG_BUF, IO_NO_UNMAP,
    OP_DISCARD, OP_FLUSH, OP_READ, OP_WRITE, OP_WRITE_ZEROES, io_arguments,
};
use crate::ublk::ublk_device::UblkDevice;

/// Bits of a token that name the tag; the key of the queue is above them.
const TAG_BITS: u32 = 16;

/// Bits of a token below its generation: the tag, and the key of the queue.
const NAME_BITS: u32 = 32;
/// Generations after which the numbers begin again.
pub(super) const GENERATIONS: u64 = 1 << (TOKEN_BITS - NAME_BITS);

/// The token of the first tag of the queue with this `key` and `generation`; the next ones follow.
fn first_token(generation: u64, key: usize) -> Token {
    generation << NAME_BITS | u64::from(key as u16) << TAG_BITS
}

/// The key of the queue of `token`, its first token, and the tag.
#[inline]
pub(super) fn queue_and_tag(token: Token) -> (usize, Token, u16) {
    let tag = token as u16;
    (usize::from((token >> TAG_BITS) as u16), token ^ Token::from(tag), tag)
}

/// A queue of a device.
pub(super) struct UblkQueue {
    device: Arc<UblkDevice>,
    /// Its number among the queues of the device, and among those of the thread.
    number: u16,
    key: usize,
    /// The token of its first tag. It tells this queue from an earlier one with the same key, which may have
    /// left commands in the ring.
    pub(super) first_token: Token,
    on_removed: OnRemoved,
    descriptor: OwnedFd,
    requests: Descriptors,
    pub(super) member: Member,
    /// The export of the member.
    served: Rc<ServedExport>,
    memory: QueueMemory,
    /// Tags whose requests are not submitted yet.
    ready: VecDeque<u16>,
    /// Tags that get requests, or have one.
    live_tags: u16,
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

impl UblkQueue {
    /// The queue of `start` under `key`, whose tags get requests: a member of the thread. The driver has a
    /// buffer for each tag.
    ///
    /// # Errors
    /// `ENOMEM`: there is no memory for the buffers. The errno of the driver or the ring.
    pub(super) fn begin<Q: IoQueue>(
        context: &mut LoopContext<Q>,
        start: UblkStart,
        (key, generation): (usize, u64),
    ) -> Result<Self, Error> {
        let UblkStart { device, number, used, on_removed, .. } = start;
        let mut member = Member::of(device.client.clone());
        let served = context.use_export(&mut member, used)?;
        let parts = Self::parts(context, &device, &served, number);
        let (data, descriptor, requests) = match parts {
            Ok(parts) => parts,
            Err(error) => {
                context.leave_export(&mut member);
                return Err(error);
            }
        };
        let depth = device.info.depth;
        let mut queue = Self {
            device,
            number,
            key,
            first_token: first_token(generation, key),
            on_removed,
            descriptor,
            requests,
            member,
            served,
            memory: QueueMemory { data, in_ring: 0 },
            ready: VecDeque::with_capacity(depth.into()),
            live_tags: depth,
            in_engine: 0,
            without_copy: 0,
            with_copy: 0,
            has_pushed: false,
            leaving: false,
        };
        for tag in 0..depth {
            if let Err(error) = queue.push(context, FETCH_REQ, tag, 0) {
                context.leave_export(&mut queue.member);
                return Err(error);
            }
        }
        queue.device.queue_begins();
        context.add_member();
        Ok(queue)
    }

    /// Buffers, the driver's descriptor and what it shares. What takes time is done before a device is
    /// taken over: its users wait.
    fn parts<Q: IoQueue>(
        context: &mut LoopContext<Q>,
        device: &UblkDevice,
        served: &ServedExport,
        number: u16,
    ) -> Result<(RequestData, OwnedFd, Descriptors), Error> {
        let failed = |errno| Error::new(errno, Operation::SetUp);
        let (depth, bytes) = (device.info.depth, device.info.max_io_bytes);
        let engine = &mut context.engine;
        let data = match device.registers_data() {
            true => Some(RequestData::registered(engine, &served.device, depth)),
            false => RequestData::copied(engine, &served.device, depth, bytes),
        };
        let mut data = data.ok_or(failed(libc::ENOMEM))?;
        let mapped = device.descriptor().and_then(|descriptor| {
            let requests = Descriptors::map(descriptor.as_fd(), number, depth)?;
            Ok((descriptor, requests))
        });
        match mapped {
            Ok((descriptor, requests)) => Ok((data, descriptor, requests)),
            Err(errno) => {
                data.release(engine);
                Err(failed(errno))
            }
        }
    }

    /// Pushes a command of `tag` into the thread's ring.
    fn push<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        op: u32,
        tag: u16,
        result: i32,
    ) -> Result<(), Error> {
        let (of_entry, address) = self.memory.data.addresses(tag);
        let arguments = io_arguments(self.number, tag, result, address);
        let token = context.engine_token(self.first_token | Token::from(tag));
        // SAFETY: the buffer at the address is in `data`, untouched until the command's result has
        // come; see the invariant above for a queue that ends before.
        unsafe { context.engine.command(self.descriptor.as_fd(), op, of_entry, arguments, token)? };
        self.memory.in_ring += 1;
        self.has_pushed = true;
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
        let Some(descriptor) = self.requests.get(tag) else { return true };
        let (io, is_cut) = match translate(&self.served, descriptor) {
            Ok(translated) => translated,
            Err(errno) => {
                self.answer(context, tag, -errno);
                return true;
            }
        };
        self.member.quantum.read(io.range.len);
        self.member.quantum.count(io);
        let (number, key) = (self.key, u32::from(tag));
        if !matches!(io.op, Op::Read | Op::Write) {
            let submitted =
                context.submit(Some(&self.served), number, key, |engine, device, tag| {
                    engine.submit_no_data(device, io, tag)
                });
            match submitted {
                Ok(()) => self.in_engine += 1,
                Err(rejected) => self.answer(context, tag, -errno_of(&rejected)),
            }
            return true;
        }
        if is_cut {
            return self.submit_copied(context, tag, io);
        }
        if let RequestData::Registered { .. } = self.memory.data {
            if descriptor.op_flags & IO_NEED_REG_BUF == 0
                && let Some(buffer) = self.memory.data.number(tag)
                && context
                    .submit(Some(&self.served), number, key, |engine, device, tag| {
                        engine.submit_registered(device, io, buffer, tag)
                    })
                    .is_ok()
            {
                self.in_engine += 1;
                return true;
            }
            return self.submit_copied(context, tag, io);
        }
        let Some(buffer) = self.memory.data.take_buffer(tag) else { return true };
        match context.submit_buffer(Some(&self.served), number, key, (io, buffer)) {
            Ok(()) => {
                self.in_engine += 1;
                if injected(ServerBug::CommitBeforeData) && io.op == Op::Read {
                    self.answer(context, tag, io.range.len as i32);
                }
            }
            Err(rejected) => {
                let errno = errno_of(&rejected);
                if let Some(buffer) = rejected.buf {
                    self.memory.data.put_buffer(tag, buffer);
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
        let Some(mut buffer) = context.buffer(&self.member, io.range) else { return false };
        let copied = match io.op {
            Op::Write => {
                self.memory.data.copy_in((self.descriptor.as_fd(), self.number), tag, &mut buffer)
            }
            _ => Ok(()),
        };
        let submitted = copied.and_then(|()| {
            let submitted =
                context.submit_buffer(Some(&self.served), self.key, tag.into(), (io, buffer));
            submitted.map_err(|rejected| errno_of(&rejected))
        });
        match submitted {
            Ok(()) => self.in_engine += 1,
            Err(errno) => self.answer(context, tag, -errno),
        }
        true
    }

    /// Handles the end of a request whose memory is registered, or whose data were to be copied.
    /// Returns its result, or `None` if it is to be tried again with a copy.
    fn finish_data(&mut self, tag: u16, completion: &Completion) -> Option<i32> {
        let len = completion.io.range.len;
        let result = result(completion);
        if completion.buf.is_none() && result.is_err() {
            self.memory.data.set_must_copy(tag, true);
            self.ready.push_front(tag);
            return None;
        }
        self.memory.data.set_must_copy(tag, false);
        match completion.buf {
            Some(_) => self.with_copy += 1,
            None => self.without_copy += 1,
        }
        // The driver asks for more than the image has where that ends in the last sector, and expects all of it.
        let asked = self.requests.get(tag).map_or(len, |it| u64::from(it.sectors) << 9).max(len);
        let copied = match &completion.buf {
            Some(buffer) if result.is_ok() && completion.io.op == Op::Read => {
                let data = &buffer[..len as usize];
                let driver = (self.descriptor.as_fd(), self.number);
                self.memory.data.copy_out(driver, tag, data, (asked - len) as usize)
            }
            _ => Ok(()),
        };
        // The driver's longest request bounds it.
        Some(result.and(copied).map_or_else(|errno| -errno, |()| asked as i32))
    }

    /// The device may be left to the next server.
    pub(super) fn look_at_device(&mut self) {
        if self.device.is_leaving() {
            self.leaving = true;
            // The driver queues them for the next server.
            self.ready.clear();
        }
    }

    /// The command of a tag has ended: there is a request, or there will be none. Returns whether the
    /// queue has ended.
    #[inline]
    pub(super) fn on_command<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        tag: u16,
        outcome: i32,
    ) -> bool {
        self.memory.in_ring -= 1;
        if outcome < 0 {
            if outcome != ABORTED {
                let error = std::io::Error::from_raw_os_error(-outcome);
                tracing::error!("{}: queue {}: {error}", self.device.node(), self.number);
            }
            self.live_tags -= 1;
            return self.live_tags == 0;
        }
        if !self.leaving {
            self.ready.push_back(tag);
            context.schedule(self.key, &mut self.member);
        }
        false
    }

    /// Submits the requests that have come. Returns the bytes that they move.
    pub(super) fn service<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>) -> u64 {
        while !self.ready.is_empty() {
            if self.member.quantum.reads_exhausted() || self.member.quantum.is_spent() {
                context.schedule(self.key, &mut self.member);
                break;
            }
            if !context.has_free_slot(Some(&self.served)) {
                self.wait(context);
                break;
            }
            let Some(tag) = self.ready.pop_front() else { break };
            if !self.submit(context, tag) {
                self.ready.push_front(tag);
                self.wait(context);
                break;
            }
        }
        self.member.quantum.bytes_moved()
    }

    /// Goes on when something was released: one of the queue's own requests, or another's.
    fn wait<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>) {
        if self.in_engine == 0 {
            context.block(self.key, &mut self.member);
        }
    }

    /// A request of the queue has completed.
    #[inline]
    pub(super) fn complete<Q: IoQueue>(
        &mut self,
        context: &mut LoopContext<Q>,
        tag: u16,
        completion: Completion,
    ) {
        self.in_engine -= 1;
        let completed_op = completion.io.op;
        let has_data = matches!(completed_op, Op::Read | Op::Write);
        let answer = if has_data && self.memory.data.is_copied_here(tag) {
            self.finish_data(tag, &completion)
        } else {
            // The driver expects the bytes of a transfer, which its longest request bounds.
            let bytes = if has_data { completion.io.range.len as i32 } else { 0 };
            let answer = result(&completion).map_or_else(|errno| -errno, |()| bytes);
            if let Some(buffer) = completion.buf {
                self.memory.data.put_buffer(tag, buffer);
            }
            Some(answer)
        };
        if !self.ready.is_empty() {
            context.schedule(self.key, &mut self.member);
        }
        if injected(ServerBug::CommitBeforeData) && completed_op == Op::Read {
            return;
        }
        if let Some(answer) = answer {
            self.answer(context, tag, answer);
        }
    }

    /// Whether the queue, which is left to the next server, has ended: its last answers have reached the
    /// driver.
    pub(super) fn has_left(&mut self) -> bool {
        let has_pushed = std::mem::replace(&mut self.has_pushed, false);
        self.leaving && self.in_engine == 0 && !has_pushed
    }

    /// Whether it leaves in the next iterations.
    pub(super) fn is_about_to_leave(&self) -> bool {
        self.leaving && self.in_engine == 0
    }

    /// The queue leaves the thread. Returns what it leaves there until its commands have ended, if there are any.
    pub(super) fn end<Q: IoQueue>(mut self, context: &mut LoopContext<Q>) -> Option<LeftQueue> {
        if self.device.registers_data() {
            let (node, number) = (self.device.node(), self.number);
            let Self { without_copy, with_copy, .. } = &self;
            tracing::debug!(
                "{node}: queue {number}: {without_copy} requests without a copy, {with_copy} with one"
            );
        }
        context.remove_member(&mut self.member);
        if self.device.queue_ends() {
            (self.on_removed)();
        }
        let Self { first_token, live_tags, memory, .. } = self;
        let has_requests = live_tags > memory.in_ring;
        let left = LeftQueue { first_token, memory, has_requests };
        if left.memory.in_ring > 0 {
            return Some(left);
        }
        left.end(&mut context.engine);
        None
    }

    /// The simulated driver ends before this queue: it accesses no buffer any more.
    #[cfg(feature = "sim")]
    pub(super) fn end_driver(&mut self) {
        self.memory.in_ring = 0;
    }
}

/// The engine's request for a descriptor, and whether it is shorter because the image ends in its last sector; or the errno
/// that refuses it.
#[inline(always)]
fn translate(served: &ServedExport, descriptor: Descriptor) -> Result<(Request, bool), i32> {
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
        flags |= Flags::DSYNC;
    }
    if op_flags & IO_NO_UNMAP != 0 && op == Op::Zero {
        flags |= Flags::NO_UNMAP;
    }
    if op == Op::Flush {
        return Ok((Request { op, flags: Flags::NONE, range: ByteRange::new(0, 0) }, false));
    }
    let (pos, len) = (start_sector << 9, u64::from(sectors) << 9);
    let range = served.export.range_of_sectors(op, pos, len);
    let range = range.inspect_err(|e| served.statistics.count_error(FrontendKind::Ublk, op, *e))?;
    Ok((Request { op, flags, range }, range.len < len))
}

/// The errno of a request that the engine has not taken. The slot was checked before: `EAGAIN` means
/// that the engine's queue is stuck, and would reach processes that did not ask for it.
fn errno_of(rejected: &Rejected) -> i32 {
    match rejected.error.errno() {
        libc::EAGAIN => libc::EIO,
        errno => errno,
    }
}
