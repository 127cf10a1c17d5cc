//! One queue of a ublk device on a serving thread: its tags' commands are in the thread's own ring.
//!
//! Invariant: a tag's buffer is the driver's while its fetch command is in the ring, and the
//! engine's while its request is there. A queue that ends with commands in the ring leaks its
//! buffers, because the driver may still write to them (C45).
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nowait::{
    BlockMap, ByteRange, Completion, Error, Flags, IoQueue, Op, Operation, PooledBuffer, Request,
    Token,
};

use crate::export::result;
use crate::fairness::Member;
use crate::frontend::Frontend;
use crate::injected_bug::{ServerBug, injected};
use crate::loop_context::LoopContext;
use crate::statistics::FrontendKind;
use crate::ublk::request_descriptors::Descriptors;
use crate::ublk::ublk_cmd::{
    ABORTED, COMMIT_AND_FETCH_REQ, Descriptor, FETCH_REQ, IO_FUA, IO_NO_UNMAP, OP_DISCARD,
    OP_FLUSH, OP_READ, OP_WRITE, OP_WRITE_ZEROES, io_arguments,
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
    /// The buffers of the tags; taken while their request is in the engine.
    buffers: Vec<Option<PooledBuffer>>,
    /// The addresses of the buffers, which are those of the fetch commands.
    addresses: Vec<u64>,
    /// Tags whose requests are not submitted yet.
    ready: VecDeque<u16>,
    /// Tags that get requests, or have one.
    live_tags: u16,
    /// Commands in the ring.
    in_ring: u16,
    /// Requests in the engine.
    in_engine: u16,
    /// Answers were pushed in this iteration.
    has_pushed: bool,
    /// No more requests are taken: the next server gets them.
    leaving: bool,
}

impl UblkFrontend {
    /// The frontend for queue `number` of `device`; none if the device has fewer.
    pub(crate) fn new(device: Arc<UblkDevice>, number: u16, on_removed: OnRemoved) -> Option<Self> {
        (number < device.queues()).then_some(Self { device, number, on_removed, queue: None })
    }

    /// Pushes a command of `tag` into the thread's ring.
    fn push<Q: IoQueue, M: BlockMap>(
        &mut self,
        context: &mut LoopContext<Q, M>,
        op: u32,
        tag: u16,
        result: i32,
    ) -> Result<(), Error> {
        let Some(queue) = &mut self.queue else { return Ok(()) };
        let address = queue.addresses.get(usize::from(tag)).copied().unwrap_or_default();
        let arguments = io_arguments(self.number, tag, result, address);
        let token = context.engine_token(tag.into());
        // SAFETY: the buffer at the address is in `buffers`, untouched until the command's result
        // has come; see the invariant above for a queue that ends before.
        unsafe { context.engine.command(queue.descriptor.as_fd(), op, arguments, token)? };
        queue.in_ring += 1;
        queue.has_pushed = true;
        Ok(())
    }

    /// Answers the request of `tag`, and fetches its next one.
    fn answer<Q: IoQueue, M: BlockMap>(
        &mut self,
        context: &mut LoopContext<Q, M>,
        tag: u16,
        result: i32,
    ) {
        if let Err(error) = self.push(context, COMMIT_AND_FETCH_REQ, tag, result) {
            // The ring has failed, and ends the thread with the same error.
            tracing::error!("{}: {error}", self.device.node());
        }
    }

    /// Submits the request of `tag`, or answers it.
    fn submit<Q: IoQueue, M: BlockMap>(&mut self, context: &mut LoopContext<Q, M>, tag: u16) {
        let Some(queue) = &mut self.queue else { return };
        let Some(descriptor) = queue.requests.get(tag) else { return };
        let io = match translate(context, descriptor) {
            Ok(io) => io,
            Err(errno) => return self.answer(context, tag, -errno),
        };
        let engine_tag = context.tag(QUEUE, tag.into());
        queue.member.quantum.read(io.range.len);
        let has_data = matches!(io.op, Op::Read | Op::Write);
        let buffer = if has_data { queue.buffers[usize::from(tag)].take() } else { None };
        let submitted = match buffer {
            Some(buffer) => context.engine.submit(io, buffer, engine_tag),
            None => context.engine.submit_no_data(io, engine_tag),
        };
        match submitted {
            Ok(()) => {
                queue.in_engine += 1;
                if injected(ServerBug::CommitBeforeData) && io.op == Op::Read {
                    self.answer(context, tag, io.range.len as i32);
                }
            }
            Err(rejected) => {
                if has_data {
                    queue.buffers[usize::from(tag)] = rejected.buf;
                }
                // The slot was checked before: EAGAIN means that the engine's queue is stuck, and would
                // reach programs that did not ask for it.
                let errno = match rejected.error.errno() {
                    libc::EAGAIN => libc::EIO,
                    errno => errno,
                };
                self.answer(context, tag, -errno);
            }
        }
    }

    /// A tag gets no more requests.
    fn end_tag<Q: IoQueue, M: BlockMap>(&mut self, context: &mut LoopContext<Q, M>) {
        let Some(queue) = &mut self.queue else { return };
        queue.live_tags -= 1;
        if queue.live_tags == 0 {
            self.end(context);
        }
    }

    /// The queue leaves the thread.
    fn end<Q: IoQueue, M: BlockMap>(&mut self, context: &mut LoopContext<Q, M>) {
        let Some(mut queue) = self.queue.take() else { return };
        context.remove_member(&mut queue.member);
        if self.device.queue_ends() {
            (self.on_removed)();
        }
    }
}

/// The engine's request for a descriptor, or the errno that refuses it.
#[inline]
fn translate<Q: IoQueue, M: BlockMap>(
    context: &LoopContext<Q, M>,
    descriptor: Descriptor,
) -> Result<Request, i32> {
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
        return Ok(Request { op, flags: Flags::NONE, range: ByteRange::new(0, 0) });
    }
    let (pos, len) = (start_sector << 9, u64::from(sectors) << 9);
    Ok(Request { op, flags, range: context.export.range(op, pos, len)? })
}

#[cfg(feature = "sim")]
impl UblkFrontend {
    /// The simulated driver ends with this frontend: it accesses no buffer any more.
    pub(crate) fn end_driver(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.in_ring = 0;
        }
    }
}

impl<Q: IoQueue, M: BlockMap> Frontend<Q, M> for UblkFrontend {
    /// Gives the driver a buffer for each tag.
    fn begin(&mut self, context: &mut LoopContext<Q, M>) -> Result<(), Error> {
        let failed = |errno| Error::new(errno, Operation::SetUp);
        let (depth, bytes) = (self.device.info.depth, self.device.info.max_io_bytes);
        let whole = ByteRange::new(0, bytes.into());
        let buffers = (0..depth).map(|_| context.engine.buffer(whole));
        let buffers: Vec<_> = buffers.collect::<Option<_>>().ok_or(failed(libc::ENOMEM))?;
        // A server that takes over must not be killed from here on until it has fetched: what takes
        // time is done before.
        let descriptor = self.device.descriptor().map_err(failed)?;
        let requests = Descriptors::map(descriptor.as_fd(), self.number, depth);
        let requests = requests.inspect_err(|_| self.device.note_unmappable()).map_err(failed)?;
        let address = |buffer: &PooledBuffer| buffer.as_ptr().expose_provenance() as u64;
        self.queue = Some(Queue {
            addresses: buffers.iter().map(address).collect(),
            buffers: buffers.into_iter().map(Some).collect(),
            descriptor,
            requests,
            member: Member::default(),
            ready: VecDeque::with_capacity(depth.into()),
            live_tags: depth,
            in_ring: 0,
            in_engine: 0,
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

    fn on_wake(&mut self, _: &mut LoopContext<Q, M>) {
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
    fn on_event(&mut self, context: &mut LoopContext<Q, M>, token: Token, outcome: i32) {
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
    fn service(&mut self, context: &mut LoopContext<Q, M>, _: usize) -> u64 {
        while let Some(queue) = &mut self.queue
            && let Some(&tag) = queue.ready.front()
        {
            if queue.member.quantum.reads_exhausted() {
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
            self.submit(context, tag);
        }
        self.queue.as_ref().map_or(0, |queue| queue.member.quantum.bytes_moved())
    }

    #[inline]
    fn complete(
        &mut self,
        context: &mut LoopContext<Q, M>,
        _: usize,
        key: u32,
        completion: Completion,
    ) {
        let answer = match result(&completion) {
            Err(errno) => -errno,
            // The driver expects the bytes of a transfer, which its longest request bounds.
            Ok(()) if matches!(completion.io.op, Op::Read | Op::Write) => {
                completion.io.range.len as i32
            }
            Ok(()) => 0,
        };
        let Some(queue) = &mut self.queue else { return };
        queue.in_engine -= 1;
        if let Some(buffer) = completion.buf
            && let Some(place) = queue.buffers.get_mut(key as usize)
        {
            *place = Some(buffer);
        }
        if !queue.ready.is_empty() {
            context.schedule(QUEUE, &mut queue.member);
        }
        if injected(ServerBug::CommitBeforeData) && completion.io.op == Op::Read {
            return;
        }
        self.answer(context, key as u16, answer);
    }

    /// A queue that is left ends when its last answers have reached the driver.
    fn end_iteration(&mut self, context: &mut LoopContext<Q, M>) {
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
    fn begin_shutdown(&mut self, _: &mut LoopContext<Q, M>) {}

    fn keeps_thread(&self) -> bool {
        self.queue.is_some()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.in_ring > 0 {
            std::mem::forget(std::mem::take(&mut self.buffers));
        }
    }
}
