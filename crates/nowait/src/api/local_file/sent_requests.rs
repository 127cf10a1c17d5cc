//! The requests of one thread's file between its futures and its engine.
//!
//! Invariant: a request that was sent is in the engine, in the list of waiting ones, or done. No
//! call here runs an executor's code, which may drop futures: a waker goes to the caller, which
//! wakes or drops it when it has ended its borrow.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::task::Waker;

use crate::api::local_file::local_engine::LocalEngine;
use crate::api::local_file::request_slab::{Answer, PendingRequest, RequestSlab, Slot};
use crate::memory::io_buffer::IoBuffer;
use crate::types::error::Error;
use crate::types::iovec::IoSegment;
use crate::types::request::{Flags, Request};

/// The engine of a file, and the requests that its futures have sent.
pub(crate) struct SentRequests {
    pub(crate) engine: Box<dyn LocalEngine>,
    pub(crate) slab: RequestSlab,
    /// Slots of requests for which the engine had no room, in their order.
    waiting: VecDeque<u32>,
    /// The error with which the queue has failed.
    pub(crate) failure: Option<Error>,
}

impl SentRequests {
    pub(crate) fn new(engine: Box<dyn LocalEngine>) -> Self {
        Self { engine, slab: RequestSlab::new(), waiting: VecDeque::new(), failure: None }
    }

    /// Sends a request, and returns its slot. Without room in the engine the request waits for it,
    /// or is refused with `EAGAIN` if it has `NOWAIT` (C32).
    ///
    /// # Errors
    /// The contents of the slot of a request that is refused, and the error.
    pub(crate) fn send(
        &mut self,
        io: Request,
        buffer: IoBuffer,
        waker: Waker,
    ) -> Result<u32, (Slot, Error)> {
        let request = PendingRequest { io, buffer, waker: Some(waker), submitted: false };
        if let Some(error) = self.failure {
            return Err((Slot::Pending(request), error));
        }
        let slot = self.slab.insert(request);
        let submitted = match self.waiting.is_empty() || io.flags.has(Flags::NOWAIT) {
            true => self.submit(slot).map_err(|error| (self.slab.free(slot), error))?,
            false => false,
        };
        if !submitted {
            self.waiting.push_back(slot);
        }
        Ok(slot)
    }

    /// Submits the request in a slot to the engine. False if it has to wait until a request in
    /// flight has ended.
    fn submit(&mut self, slot: u32) -> Result<bool, Error> {
        let Some(request) = self.slab.pending(slot) else { return Ok(true) };
        let (io, buffer) = (request.io, &mut request.buffer);
        let segment = IoSegment { base: buffer.as_mut_ptr(), len: buffer.len() };
        // SAFETY: the buffer stays in its slot, and the slot in use, until the engine gives the
        // request back; `fail` and `drop` leak it where the engine cannot.
        match unsafe { self.engine.submit(io, segment, u64::from(slot)) } {
            Ok(()) => {
                request.submitted = true;
                Ok(true)
            }
            Err(error) => {
                let may_wait = !io.flags.has(Flags::NOWAIT) && self.engine.in_flight() > 0;
                match error.errno() == libc::EAGAIN && may_wait {
                    true => Ok(false),
                    false => Err(error),
                }
            }
        }
    }

    /// Ends the next request that the engine gives back, and submits waiting ones. `None` when no
    /// request has ended; otherwise the waker of its task, if it has one.
    pub(crate) fn end_next(&mut self) -> Option<Option<Waker>> {
        if let Some(completion) = self.engine.next() {
            let result = completion.result().map(|bytes| bytes as usize);
            return Some(self.slab.end(completion.tag as u32, result));
        }
        while let Some(&slot) = self.waiting.front() {
            let submitted = self.submit(slot);
            if submitted == Ok(false) {
                break;
            }
            self.waiting.pop_front();
            if let Err(error) = submitted {
                return Some(self.slab.end(slot, Err(error)));
            }
        }
        None
    }

    /// Leaves a request whose future is dropped, and returns what the caller has to drop.
    pub(crate) fn abandon(&mut self, slot: u32) -> (Option<Slot>, Option<Waker>) {
        match self.slab.pending(slot) {
            Some(request) if request.submitted => (None, request.waker.take()),
            Some(_) => {
                self.waiting.retain(|&waiting| waiting != slot);
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
        self.waiting.clear();
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
