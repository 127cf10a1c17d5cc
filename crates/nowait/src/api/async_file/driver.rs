//! The thread behind the async API: it owns an engine and serves the requests of its channel.
//!
//! Invariant: the memory of a request is in `in_flight` from before the engine sees it until the
//! engine has given it back, and has no other owner (C45). Every request is answered once, also
//! when the queue fails or this thread panics.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::api::async_file::channel::{AsyncRequest, Channel, ChannelState};
use crate::block::allocation_cache::AllocationCache;
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::WorkerPool;
use crate::engine::Engine;
use crate::engine::attached_device::DeviceHandle;
use crate::queue::{FD_TOKEN, Interest, IoQueue, Token};
use crate::types::config::Config;
use crate::types::error::{Error, Operation};
use crate::types::iovec::IoSegment;
use crate::types::request::{Flags, Op};

/// The token under which the channel is watched.
const CHANNEL_TOKEN: Token = FD_TOKEN | 1 << 59;

pub(crate) struct Driver<Q: IoQueue> {
    engine: Engine<Q, AllocationCache>,
    disk: DeviceHandle<AllocationCache>,
    channel: Arc<Channel>,
    /// Requests taken from the channel and not yet submitted: the engine had no slot.
    requests: VecDeque<AsyncRequest>,
    /// Requests that the engine has, by tag.
    in_flight: HashMap<u64, AsyncRequest>,
    next_tag: u64,
    phase: ChannelState,
    /// The error of requests that are left when the driver ends.
    final_error: Error,
}

impl<Q: IoQueue> Driver<Q> {
    /// A driver; to be made on the thread that runs it, as a ring may be bound to the thread that
    /// made it.
    pub(crate) fn new(
        disk: Arc<BlockDevice<AllocationCache>>,
        workers: WorkerPool,
        queue: Q,
        config: Config,
        channel: Arc<Channel>,
    ) -> Result<Self, Error> {
        let mut engine = Engine::new(queue, workers, config)?;
        let disk = engine.attach(disk)?;
        engine.watch(channel.fd(), CHANNEL_TOKEN, Interest::Readable)?;
        Ok(Self {
            engine,
            disk,
            channel,
            requests: VecDeque::new(),
            in_flight: HashMap::new(),
            next_tag: 0,
            phase: ChannelState::Open,
            final_error: Error::new(libc::EIO, Operation::Wait),
        })
    }

    /// Serves until the channel is closed and everything in flight has ended, or the queue fails.
    pub(crate) fn run(mut self) {
        if let Err(error) = self.serve() {
            self.final_error = error;
        }
    }

    fn serve(&mut self) -> Result<(), Error> {
        loop {
            self.submit_all();
            if self.phase == ChannelState::Closed
                && self.requests.is_empty()
                && self.in_flight.is_empty()
            {
                return Ok(());
            }
            // One system call submits to the kernel and sleeps.
            self.engine.wait(None, &mut |_, _| {})?;
            self.complete();
        }
    }

    /// Submits requests until the engine has no slot or the channel was seen empty. A request that
    /// comes later wakes the next `wait`.
    fn submit_all(&mut self) {
        loop {
            while let Some(request) = self.requests.pop_front() {
                if let Some(request) = self.submit(request) {
                    self.requests.push_front(request);
                    return;
                }
            }
            self.phase = self.channel.drain(&mut self.requests);
            if self.requests.is_empty() {
                return;
            }
        }
    }

    /// Submits one request. Returns it if it must wait until a request in flight has ended.
    fn submit(&mut self, request: AsyncRequest) -> Option<AsyncRequest> {
        let tag = self.next_tag;
        self.next_tag += 1;
        let AsyncRequest { io, buffer, .. } =
            self.in_flight.entry(tag).insert_entry(request).into_mut();
        let io = *io;
        let submitted = match io.op {
            Op::Read | Op::Write => {
                let segment = IoSegment { base: buffer.as_mut_ptr(), len: buffer.len() };
                // SAFETY: the buffer stays in place, in `in_flight`, until the engine gives the
                // request back; if the engine is dropped before that, `drop` has leaked the memory.
                unsafe { self.engine.submit_user_memory(&self.disk, io, &[segment], tag) }
            }
            Op::Flush | Op::Discard | Op::Zero | Op::Status => {
                self.engine.submit_no_data(&self.disk, io, tag)
            }
        };
        let error = submitted.err()?.error;
        let request = self.in_flight.remove(&tag)?;
        let may_wait = !io.flags.has(Flags::NOWAIT) && self.engine.in_flight() > 0;
        if error.errno() == libc::EAGAIN && may_wait {
            return Some(request);
        }
        request.refuse(error);
        None
    }

    /// Answers the requests that have ended.
    fn complete(&mut self) {
        while let Some(completion) = self.engine.next() {
            let Some(request) = self.in_flight.remove(&completion.tag) else { continue };
            let result = completion.result().map(|bytes| bytes as usize);
            request.sender.complete((result, request.buffer));
        }
    }
}

impl<Q: IoQueue> Drop for Driver<Q> {
    /// Answers the requests that are left with the error. Memory that is still in flight is leaked:
    /// the queue has failed, and the kernel may write to it at any time (C45).
    fn drop(&mut self) {
        for request in self.in_flight.values_mut() {
            std::mem::forget(std::mem::take(&mut request.buffer));
        }
        self.channel.fail(self.final_error);
        let left =
            self.requests.drain(..).chain(self.in_flight.drain().map(|(_, request)| request));
        left.for_each(|request| request.refuse(self.final_error));
    }
}
