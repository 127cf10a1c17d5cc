//! The thread behind the async API: it owns an engine and serves the requests of its channel.
//!
//! Invariant: the memory of a request is in `in_flight` from before the engine sees it until the
//! engine has given it back, and has no other owner (C45). Every request is answered once, also
//! when the queue fails or this thread panics.
#![allow(unsafe_code)]

use std::sync::Arc;

use slab::Slab;

use crate::api::async_file::async_request::AsyncRequest;
use crate::api::async_file::caller_transfers::CallersWatch;
use crate::api::async_file::channel::{Batch, Channel, ChannelState};
use crate::api::file_turns::Turn;
use crate::block::block_map::BlockMap;
use crate::blocking::worker_pool::WorkerPool;
use crate::engine::Engine;
use crate::engine::attached_device::DeviceHandle;
use crate::queue::{Interest, IoQueue};
use crate::types::config::Config;
use crate::types::error::{Error, Operation};
use crate::types::request::{Flags, Op};
use crate::types::token::{CALLERS_EVENT, WAKE_EVENT};
use crate::types::transfer::UNREGISTERED;

pub(crate) struct Driver<Q: IoQueue> {
    engine: Engine<Q, dyn BlockMap>,
    /// The devices that are attached, by the numbers of their files.
    devices: Vec<Option<DeviceHandle<dyn BlockMap>>>,
    channel: Arc<Channel>,
    /// Requests taken from the channel and not yet submitted.
    batch: Batch,
    /// Requests that the engine has, with the numbers of their files, by tag.
    in_flight: Slab<(u32, AsyncRequest)>,
    callers: CallersWatch,
    /// The error of requests that are left when the driver ends.
    final_error: Error,
}

impl<Q: IoQueue> Driver<Q> {
    /// A driver; to be made on the thread that runs it, as a ring may be bound to the thread that
    /// made it.
    pub(crate) fn new(
        queue: Q,
        workers: WorkerPool,
        config: Config,
        channel: Arc<Channel>,
    ) -> Result<Self, Error> {
        let mut engine = Engine::new(queue, workers, config)?;
        engine.watch(channel.fd(), WAKE_EVENT, Interest::Readable)?;
        Ok(Self {
            engine,
            devices: Vec::new(),
            channel,
            batch: Batch::default(),
            in_flight: Slab::new(),
            callers: CallersWatch::default(),
            final_error: Error::new(libc::EIO, Operation::Wait),
        })
    }

    /// Serves until the last file is closed and everything in flight has ended, or the queue fails.
    pub(crate) fn run(mut self) {
        if let Err(error) = self.serve() {
            self.final_error = error;
        }
    }

    fn serve(&mut self) -> Result<(), Error> {
        while self.submit_all() != ChannelState::Closed {
            self.watch_callers()?;
            let mut by_callers = false;
            // One system call submits to the kernel and sleeps.
            self.engine.wait(None, &mut |token, _| by_callers |= token == CALLERS_EVENT)?;
            self.complete();
            if by_callers {
                self.end_transfers();
            }
        }
        Ok(())
    }

    /// Waits for the transfers of callers from now on, if that is wanted. The descriptor is readable if one has
    /// completed before.
    fn watch_callers(&mut self) -> Result<(), Error> {
        match &self.channel.callers {
            Some(callers) if self.callers.begins(self.batch.watches_callers) => {
                self.engine.watch(callers.fd(), CALLERS_EVENT, Interest::Readable)
            }
            _ => Ok(()),
        }
    }

    /// Ends transfers of callers; after many wake-ups for none it does not wait for them.
    fn end_transfers(&mut self) {
        let Some(callers) = &self.channel.callers else { return };
        if self.callers.woke(callers.drain()) && self.channel.unwatch_callers() {
            self.engine.unwatch(callers.fd(), CALLERS_EVENT);
            self.callers.ended();
        }
    }

    /// Submits requests until no file has one for which there is room. A request that comes later
    /// wakes the next `wait`.
    fn submit_all(&mut self) -> ChannelState {
        let mut free = self.engine.free_slots();
        loop {
            let phase = self.channel.take(&mut self.batch, free);
            self.detach_closed();
            if self.batch.turns.is_empty() {
                return phase;
            }
            free = if self.submit_batch() { self.engine.free_slots() } else { 0 };
        }
    }

    /// Submits the requests of the batch. False if some must wait until a request in flight has ended.
    fn submit_batch(&mut self) -> bool {
        let mut turns = std::mem::take(&mut self.batch.turns);
        let mut waiting = Vec::new();
        for Turn { file, request, has_begun } in turns.drain(..) {
            if has_begun {
                waiting.extend(self.submit(file, request).map(|request| (file, request)));
            } else {
                let error = Error::new(libc::EAGAIN, Operation::Validate).at(request.io.range);
                request.refuse(error);
            }
        }
        self.batch.turns = turns;
        let all = waiting.is_empty();
        for (file, request) in waiting.into_iter().rev() {
            self.channel.put_back(file, request);
        }
        all
    }

    /// Submits one request. Returns it if it must wait until a request in flight has ended.
    fn submit(&mut self, file: u32, request: AsyncRequest) -> Option<AsyncRequest> {
        if let Err(error) = self.attach(file) {
            self.answer(file, request, Err(error));
            return None;
        }
        let device = self.devices.get(file as usize)?.as_ref()?;
        let io = request.io;
        let entry = self.in_flight.vacant_entry();
        let tag = entry.key();
        let (_, AsyncRequest { buffer, .. }) = entry.insert((file, request));
        let submitted = match io.op {
            Op::Read | Op::Write => {
                let number = buffer.arena().map(|arena| self.engine.number_of(arena));
                let (number, engine) = (number.unwrap_or(UNREGISTERED), &mut self.engine);
                // SAFETY: the buffer stays in place, in `in_flight`, until the engine gives the
                // request back; if the engine is dropped before that, `drop` has leaked the memory.
                buffer.with_segments(io.range.len, |segments| unsafe {
                    engine.submit_numbered(device, io, segments, number, tag as u64)
                })
            }
            Op::Flush | Op::Discard | Op::Zero | Op::Status => {
                self.engine.submit_no_data(device, io, tag as u64)
            }
        };
        let error = submitted.err()?.error;
        let (_, request) = self.in_flight.try_remove(tag)?;
        let may_wait = !io.flags.contains(Flags::NOWAIT) && self.engine.in_flight() > 0;
        if error.errno() == libc::EAGAIN && may_wait {
            return Some(request);
        }
        self.answer(file, request, Err(error));
        None
    }

    /// Attaches the device of a file, if it is not attached yet.
    fn attach(&mut self, file: u32) -> Result<(), Error> {
        let number = file as usize;
        if self.devices.get(number).is_some_and(Option::is_some) {
            return Ok(());
        }
        let missing = Error::new(libc::ENODEV, Operation::Validate);
        let disk = self.channel.disk(file).ok_or(missing)?;
        let device = self.engine.attach(disk)?;
        if self.devices.len() <= number {
            self.devices.resize_with(number + 1, || None);
        }
        self.devices[number] = Some(device);
        Ok(())
    }

    /// Detaches the closed files of the batch, none of which has a request.
    fn detach_closed(&mut self) {
        for &file in &self.batch.detached {
            let device = self.devices.get_mut(file as usize).and_then(Option::take);
            if let Some(device) = device {
                // It is attached to this engine, once.
                let _ = self.engine.detach(&device);
            }
        }
        self.channel.forget(&mut self.batch);
    }

    /// Answers the requests that have ended.
    fn complete(&mut self) {
        while let Some(completion) = self.engine.next() {
            let tag = completion.tag as usize;
            let Some((file, request)) = self.in_flight.try_remove(tag) else { continue };
            self.answer(file, request, completion.result().map(|bytes| bytes as usize));
        }
    }

    /// Answers a request that has begun. Its task may close the file then, and a lock ends with the last request:
    /// that one is counted before.
    fn answer(&mut self, file: u32, request: AsyncRequest, result: Result<usize, Error>) {
        self.batch.ended.push(file);
        let device = self.devices.get(file as usize).and_then(Option::as_ref);
        if device.is_some_and(|device| device.disk().is_locked()) {
            self.channel.count_ended(&mut self.batch.ended);
        }
        request.sender.complete((result, request.buffer));
    }
}

impl<Q: IoQueue> Drop for Driver<Q> {
    /// Answers the requests that are left with the error. Memory that is still in flight is leaked:
    /// the queue has failed, and the kernel may write to it at any time (C45).
    fn drop(&mut self) {
        for (_, (_, request)) in &mut self.in_flight {
            std::mem::forget(std::mem::take(&mut request.buffer));
        }
        self.channel.fail(self.final_error);
        if let Some(callers) = &self.channel.callers {
            callers.settle();
        }
        let left = self.batch.turns.drain(..).map(|turn| turn.request);
        let left = left.chain(self.in_flight.drain().map(|(_, request)| request));
        left.for_each(|request| request.refuse(self.final_error));
    }
}
