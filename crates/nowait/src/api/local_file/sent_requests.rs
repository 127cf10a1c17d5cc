//! The requests of one engine's files between their futures and the engine.
//!
//! Invariant: a request that was sent is in the engine, in its file's list of waiting ones, or done. No
//! call here runs an executor's code, which may drop futures: a waker goes to the caller, which
//! wakes or drops it when it has ended its borrow.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::task::Waker;

use crate::api::file_turns::FileTurns;
use crate::api::local_file::local_engine::{AnyDevice, LocalEngine};
use crate::api::local_file::request_slab::{Answer, PendingRequest, RequestSlab, Slot};
use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::memory::io_buffer::IoBuffer;
use crate::types::error::{Error, Operation};
use crate::types::request::{Flags, Request};

/// An engine, its files, and the requests that their futures have sent.
pub(crate) struct SentRequests {
    pub(crate) engine: Box<dyn LocalEngine>,
    pub(crate) slab: RequestSlab,
    /// Slots of requests for which there was no room, by file.
    files: FileTurns<u32, AnyDevice>,
    /// The error with which the queue has failed.
    pub(crate) failure: Option<Error>,
}

impl SentRequests {
    pub(crate) fn new(engine: Box<dyn LocalEngine>) -> Self {
        Self { engine, slab: RequestSlab::new(), files: FileTurns::new(), failure: None }
    }

    /// Adds a file, and returns its number.
    ///
    /// # Errors
    /// Like [`crate::Engine::attach`]; that of the queue if it has failed.
    pub(crate) fn open(&mut self, disk: Arc<BlockDevice<dyn BlockMap>>) -> Result<u32, Error> {
        match self.failure {
            Some(error) => Err(error),
            None => self.engine.attach(disk).map(|device| self.files.add(device)),
        }
    }

    /// Removes a file without futures, and returns its device, unless the engine has requests of it.
    pub(crate) fn close(&mut self, file: u32) -> Option<AnyDevice> {
        if self.failure.is_none() && self.files.in_engine(file) > 0 {
            return None;
        }
        let device = self.files.remove(file)?;
        // An engine whose queue has failed may refuse: it releases the device when it is dropped.
        let _ = self.engine.detach(&device);
        Some(device)
    }

    /// Sends a request, and returns its slot. Without room in the engine the request waits for it,
    /// or is refused with `EAGAIN` if it has `NOWAIT` (C32).
    ///
    /// # Errors
    /// The contents of the slot of a request that is refused, and the error.
    pub(crate) fn send(
        &mut self,
        file: u32,
        io: Request,
        buffer: IoBuffer,
        waker: Waker,
    ) -> Result<u32, (Slot, Error)> {
        let request = PendingRequest { file, io, buffer, waker: Some(waker), submitted: false };
        if let Some(error) = self.failure {
            return Err((Slot::Pending(request), error));
        }
        let nowait = io.flags.contains(Flags::NOWAIT);
        let is_first = nowait || self.files.waiting(file) == 0;
        let begins = is_first && self.files.begin(file, self.engine.free_slots());
        if nowait && !begins {
            let error = Error::new(libc::EAGAIN, Operation::Validate).at(io.range);
            return Err((Slot::Pending(request), error));
        }
        let slot = self.slab.insert(request);
        if !begins {
            self.files.push(file, slot);
            return Ok(slot);
        }
        match self.submit(slot) {
            Ok(true) => {}
            Ok(false) => self.files.put_back(file, slot),
            Err(error) => {
                self.files.ended(file);
                return Err((self.slab.free(slot), error));
            }
        }
        Ok(slot)
    }

    /// Submits the request in a slot to the engine. False if it has to wait until a request in
    /// flight has ended.
    fn submit(&mut self, slot: u32) -> Result<bool, Error> {
        let Some(request) = self.slab.pending(slot) else { return Ok(true) };
        let Some(device) = self.files.state(request.file) else { return Ok(true) };
        let (io, buffer) = (request.io, &mut request.buffer);
        let (arena, engine) = (buffer.arena().cloned(), &mut self.engine);
        // SAFETY: the buffer stays in its slot, and the slot in use, until the engine gives the
        // request back; `fail` and `drop` leak it where the engine cannot.
        let submitted = buffer.with_segments(io.range.len, |segments| unsafe {
            engine.submit_any(device, io, segments, arena.as_ref(), u64::from(slot))
        });
        match submitted {
            Ok(()) => {
                request.submitted = true;
                Ok(true)
            }
            Err(error) => {
                let may_wait = !io.flags.contains(Flags::NOWAIT) && self.engine.in_flight() > 0;
                match error.errno() == libc::EAGAIN && may_wait {
                    true => Ok(false),
                    false => Err(error),
                }
            }
        }
    }

    /// Ends the next request that the engine gives back, and submits waiting ones, by turns over the
    /// files. `None` when no request has ended; otherwise the waker of its task, if it has one.
    pub(crate) fn end_next(&mut self) -> Option<Option<Waker>> {
        if let Some(completion) = self.engine.next() {
            let result = completion.result().map(|bytes| bytes as usize);
            return Some(self.end(completion.tag as u32, result));
        }
        while let Some(turn) = self.files.next(self.engine.free_slots(), |_| false) {
            match self.submit(turn.request) {
                Ok(true) => {}
                Ok(false) => {
                    self.files.put_back(turn.file, turn.request);
                    return None;
                }
                Err(error) => return Some(self.end(turn.request, Err(error))),
            }
        }
        None
    }

    /// Ends a request that has begun.
    fn end(&mut self, slot: u32, result: Result<usize, Error>) -> Option<Waker> {
        if let Some(request) = self.slab.pending(slot) {
            self.files.ended(request.file);
        }
        self.slab.end(slot, result)
    }

    /// Leaves a request whose future is dropped, and returns what the caller has to drop.
    pub(crate) fn abandon(&mut self, slot: u32) -> (Option<Slot>, Option<Waker>) {
        match self.slab.pending(slot) {
            Some(request) if request.submitted => (None, request.waker.take()),
            Some(request) => {
                self.files.retain(request.file, |&waiting| waiting != slot);
                (Some(self.slab.free(slot)), None)
            }
            None => (Some(self.slab.free(slot)), None),
        }
    }

    /// Records that the queue has failed: every request ends with `error`, and later ones are
    /// refused with it. Memory in flight is leaked: the kernel may write to it at any time (C45).
    /// Returns the wakers of the requests' tasks.
    pub(crate) fn fail(&mut self, error: Error) -> Vec<Waker> {
        self.failure = Some(error);
        self.files.take_all();
        self.leak_in_flight();
        let pending: Vec<u32> = self.slab.all_pending().map(|(slot, _)| slot).collect();
        pending.into_iter().filter_map(|slot| self.slab.end(slot, Err(error))).collect()
    }

    fn leak_in_flight(&mut self) {
        for (_, request) in self.slab.all_pending().filter(|(_, request)| request.submitted) {
            std::mem::forget(std::mem::take(&mut request.buffer));
        }
    }

    /// The answer to the request in a slot, if it has ended.
    pub(crate) fn take_answer(&mut self, slot: u32) -> Option<Answer> {
        self.slab.take_answer(slot)
    }
}

impl Drop for SentRequests {
    /// Waits for the requests in flight, whose futures are gone.
    fn drop(&mut self) {
        if self.engine.settle().is_err() {
            self.leak_in_flight();
        }
    }
}
