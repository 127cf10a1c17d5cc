//! The requests of one engine's files, by slot: the memory of each, its result, and the waker of its
//! task. A slot that is free is used again, so that a request costs no allocation.
//!
//! Invariant: the memory of a request stays in its slot from before the engine gets it until the
//! engine has given the request back, also if its future is dropped meanwhile (C45).

use std::task::Waker;

use crate::memory::io_buffer::IoBuffer;
use crate::types::error::Error;
use crate::types::request::Request;

/// The result of a request: bytes done or an error, and its memory.
pub(crate) type Answer = (Result<usize, Error>, IoBuffer);

/// A request that has not ended.
pub(crate) struct PendingRequest {
    /// The number of its file in the engine.
    pub(crate) file: u32,
    pub(crate) io: Request,
    pub(crate) buffer: IoBuffer,
    /// The waker of the task that waits; `None` if the future was dropped.
    pub(crate) waker: Option<Waker>,
    /// The engine has the request. Otherwise it waits for a slot of the engine.
    pub(crate) submitted: bool,
}

/// The state of a slot.
pub(crate) enum Slot {
    /// Followed by this one in the list of free slots.
    Free {
        next: u32,
    },
    Pending(PendingRequest),
    /// The request has ended, and its future has not taken the answer yet.
    Done(Answer),
}

/// No slot: the end of the list of free ones.
const NONE: u32 = u32::MAX;

/// The slots of one engine's files.
pub(crate) struct RequestSlab {
    slots: Vec<Slot>,
    /// The slot that was freed last.
    free: u32,
}

impl RequestSlab {
    pub(crate) fn new() -> Self {
        Self { slots: Vec::new(), free: NONE }
    }

    /// Puts a request into a free slot, and returns the slot's number.
    pub(crate) fn insert(&mut self, request: PendingRequest) -> u32 {
        let number = self.free;
        match self.slots.get_mut(number as usize) {
            Some(slot) => {
                if let Slot::Free { next } = *slot {
                    self.free = next;
                }
                *slot = Slot::Pending(request);
                number
            }
            None => {
                self.slots.push(Slot::Pending(request));
                self.slots.len() as u32 - 1
            }
        }
    }

    /// The request in a slot, if it has not ended.
    pub(crate) fn pending(&mut self, number: u32) -> Option<&mut PendingRequest> {
        match self.slots.get_mut(number as usize) {
            Some(Slot::Pending(request)) => Some(request),
            _ => None,
        }
    }

    /// Keeps the result of a request for its future, whose waker is returned. Frees the slot if the
    /// future was dropped.
    pub(crate) fn end(&mut self, number: u32, result: Result<usize, Error>) -> Option<Waker> {
        let request = self.pending(number)?;
        let buffer = std::mem::take(&mut request.buffer);
        let waker = request.waker.take();
        match waker {
            Some(_) => self.slots[number as usize] = Slot::Done((result, buffer)),
            None => drop(self.free(number)),
        }
        waker
    }

    /// The answer in a slot, which is then free; `None` if its request has not ended.
    pub(crate) fn take_answer(&mut self, number: u32) -> Option<Answer> {
        let Some(Slot::Done(_)) = self.slots.get(number as usize) else { return None };
        match self.free(number) {
            Slot::Done(answer) => Some(answer),
            Slot::Free { .. } | Slot::Pending(_) => None,
        }
    }

    /// Frees a slot that is in use, and returns its contents.
    pub(crate) fn free(&mut self, number: u32) -> Slot {
        let slot =
            std::mem::replace(&mut self.slots[number as usize], Slot::Free { next: self.free });
        self.free = number;
        slot
    }

    /// The slots and the requests in them that have not ended.
    pub(crate) fn all_pending(&mut self) -> impl Iterator<Item = (u32, &mut PendingRequest)> {
        (0..).zip(&mut self.slots).filter_map(|(number, slot)| match slot {
            Slot::Pending(request) => Some((number, request)),
            Slot::Free { .. } | Slot::Done(_) => None,
        })
    }
}
