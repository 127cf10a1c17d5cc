//! A request of one thread's file as a future.
//!
//! Invariant: a sent request has a slot until its answer was taken or its future was dropped.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::api::local_file::file_state::FileState;
use crate::api::local_file::request_slab::{Answer, Slot};
use crate::memory::io_buffer::IoBuffer;
use crate::types::error::{Error, Operation};
use crate::types::request::Request;

/// A request; it is sent by the first poll.
#[must_use = "a request is sent when it is awaited"]
#[allow(unreachable_pub, reason = "with the features of `FileStream` its trait names it")]
pub struct RequestFuture {
    file: Rc<FileState>,
    stage: Stage,
}

enum Stage {
    Unsent(Request, IoBuffer),
    /// The request has this slot.
    Sent(u32),
    Ended,
}

impl RequestFuture {
    pub(crate) fn new(file: Rc<FileState>, io: Request, buffer: IoBuffer) -> Self {
        Self { file, stage: Stage::Unsent(io, buffer) }
    }

    fn send(&mut self, io: Request, buffer: IoBuffer, context: &Context<'_>) -> Poll<Answer> {
        let waker = context.waker().clone();
        let sent = self.file.engine.requests.borrow_mut().send(self.file.number, io, buffer, waker);
        match sent {
            Ok(slot) => {
                self.stage = Stage::Sent(slot);
                self.file.engine.wake_driver();
                Poll::Pending
            }
            Err((Slot::Pending(request), error)) => Poll::Ready((Err(error), request.buffer)),
            Err((Slot::Free { .. } | Slot::Done(_), error)) => {
                Poll::Ready((Err(error), IoBuffer::default()))
            }
        }
    }

    fn take_answer(&mut self, slot: u32, context: &Context<'_>) -> Poll<Answer> {
        let mut requests = self.file.engine.requests.borrow_mut();
        if let Some(answer) = requests.take_answer(slot) {
            self.stage = Stage::Ended;
            return Poll::Ready(answer);
        }
        let waker = requests.slab.pending(slot).and_then(|request| request.waker.as_ref());
        if !waker.is_some_and(|waker| waker.will_wake(context.waker())) {
            drop(requests);
            let waker = context.waker().clone();
            let mut requests = self.file.engine.requests.borrow_mut();
            let place = requests.slab.pending(slot).map(|request| &mut request.waker);
            let old = place.and_then(|place| place.replace(waker));
            drop(requests);
            drop(old);
        }
        Poll::Pending
    }
}

impl Future for RequestFuture {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Answer> {
        match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Unsent(io, buffer) => self.send(io, buffer, context),
            Stage::Sent(slot) => {
                self.stage = Stage::Sent(slot);
                self.take_answer(slot, context)
            }
            // A future that has ended is not to be polled.
            Stage::Ended => {
                let error = Error::new(libc::EINVAL, Operation::Validate);
                Poll::Ready((Err(error), IoBuffer::default()))
            }
        }
    }
}

impl Drop for RequestFuture {
    fn drop(&mut self) {
        if let Stage::Sent(slot) = self.stage {
            let left = self.file.engine.requests.borrow_mut().abandon(slot);
            drop(left);
        }
    }
}
