//! Neighbours merged: simple requests of one burst that touch on storage become one vectored
//! transfer, and each is answered on its own. This saves a transfer for each of them. The switch
//! [`crate::Config::merge`] turns it off; each request then makes a transfer of its own.
//!
//! A request that begins where the one before it ends is not pushed to the queue at once: it begins
//! a run, which the requests behind it join, until one does not touch or the queue is submitted. So
//! a sequential stream makes one transfer for each submission, and any other request pays for one
//! comparison.
//!
//! Invariant: a merged transfer moves exactly the bytes of its requests, each to or from its own
//! memory, and answers them only if it has moved all of them; otherwise each request makes its own
//! transfer, as if there had been no other. The kernel reads the list of segments until the
//! transfer has ended; until then it is not changed.
#![allow(unsafe_code)]

use crate::block::block_map::BlockMap;
use crate::engine::completion::Rejected;
use crate::engine::dispatcher::{Dispatcher, push_transfer};
use crate::engine::merge_run::{PAUSE, Run};
use crate::engine::slot::{Role, State};
use crate::queue::IoQueue;
use crate::sim_hooks::injected_bug::{self, EngineBug};
use crate::types::request::Op;
use crate::types::transfer::{Outcome, UNREGISTERED};

impl<M: BlockMap + ?Sized> Dispatcher<M> {
    /// Starts the simple request in `slot`, whose transfer begins where the one before it ends: it
    /// joins the open run, or begins one, or is pushed to the queue.
    #[inline(never)]
    pub(crate) fn start_neighbour<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        slot: u32,
    ) -> Result<(), Rejected> {
        self.attention = true;
        let request = &self.pool[slot];
        let index = request.device();
        let device = &mut self.devices[index];
        let transfer =
            device.attached.simple_path.transfer(request.io, request.target, request.place);
        if !self.merger.takes(&transfer, &mut device.pause) {
            // SAFETY: the memory was promised, or is the slot's, until the request is given back.
            let pushed = unsafe { push_transfer(queue, &transfer, slot) };
            return if pushed { Ok(()) } else { Err(self.reject_queue_full(slot)) };
        }
        let run = device.run.as_mut();
        if let Some(before) = run.and_then(|run| self.merger.join(run, slot, &transfer)) {
            self.pool[before].next = slot;
            return Ok(());
        }
        let run = Run { head: slot, tail: slot, requests: 1, transfer, list: 0 };
        match device.run.replace(run) {
            Some(before) => self.push_run(queue, before),
            None => self.merger.open.push(index),
        }
        Ok(())
    }

    /// Pushes the open run of each device to the queue as one transfer; to be called before each
    /// submission.
    #[inline]
    pub(crate) fn close_runs<Q: IoQueue>(&mut self, queue: &mut Q) {
        while let Some(index) = self.merger.open.pop() {
            if let Some(run) = self.devices[index].run.take() {
                self.push_run(queue, run);
            }
        }
    }

    #[inline(never)]
    fn push_run<Q: IoQueue>(&mut self, queue: &mut Q, run: Run) {
        let Run { head, requests, mut transfer, list, .. } = run;
        if requests == 1 {
            return self.push_or_fall_back(queue, head);
        }
        match self.merger.lists[list as usize].as_slice() {
            [one] => transfer.base = one.base,
            segments => {
                transfer.base = segments.as_ptr().cast_mut().cast();
                transfer.segments = segments.len() as u16;
                transfer.buffer = UNREGISTERED;
            }
        }
        let request = &mut self.pool[head];
        request.set_role(Role::Merged);
        request.parent = list;
        request.merged = requests;
        // SAFETY: the memory of each request was promised, or is its slot's, until it is given
        // back, and no slot of the run is before the transfer has ended; until then the list is not
        // changed.
        if !unsafe { push_transfer(queue, &transfer, head) } {
            self.end_run(head, false);
            self.retry_unmerged(queue);
        }
    }

    /// Handles the end of the merged transfer whose first request is in `head`.
    #[inline(never)]
    pub(crate) fn on_merged_done(&mut self, head: u32, outcome: Outcome) {
        let bytes: usize =
            self.merger.lists[self.pool[head].parent as usize].iter().map(|one| one.len).sum();
        let full = usize::try_from(outcome).is_ok_and(|moved| moved >= bytes)
            || injected_bug::injected(EngineBug::AnswerUnmovedNeighbours);
        self.end_run(head, full);
    }

    /// Ends the requests of a run, or leaves them to [`Dispatcher::retry_unmerged`].
    fn end_run(&mut self, head: u32, full: bool) {
        let request = &mut self.pool[head];
        let requests = request.merged;
        request.set_role(if request.io.op == Op::Write { Role::Write } else { Role::Read });
        self.merger.free_lists.push(request.parent);
        let device = &mut self.devices[request.device()];
        if full {
            device.stats.merged += u64::from(requests);
        } else {
            device.pause = PAUSE;
        }
        let mut slot = head;
        for _ in 0..requests {
            let request = &self.pool[slot];
            let (next, len) = (request.next, request.io.range.len);
            match full {
                true => {
                    let inline = self.config.inline_completion;
                    self.on_transfer_done(slot.into(), len as Outcome, inline);
                }
                false => self.merger.again.push(slot),
            }
            slot = next;
        }
    }

    /// Pushes the requests of merged transfers that were not done as a whole, one by one. True if
    /// there were any.
    #[inline]
    pub(crate) fn retry_unmerged<Q: IoQueue>(&mut self, queue: &mut Q) -> bool {
        !self.merger.again.is_empty() && self.push_unmerged(queue)
    }

    #[cold]
    fn push_unmerged<Q: IoQueue>(&mut self, queue: &mut Q) -> bool {
        let mut slots = std::mem::take(&mut self.merger.again);
        for slot in slots.drain(..) {
            self.push_or_fall_back(queue, slot);
        }
        self.merger.again = slots;
        true
    }

    /// Pushes the transfer of an accepted simple request; without room in the queue a worker does
    /// the request.
    fn push_or_fall_back<Q: IoQueue>(&mut self, queue: &mut Q, slot: u32) {
        let request = &self.pool[slot];
        debug_assert_eq!(request.state, State::Queued);
        let simple_path = &self.devices[request.device()].attached.simple_path;
        let transfer = simple_path.transfer(request.io, request.target, request.place);
        // SAFETY: the memory was promised, or is the slot's, until the request is given back.
        if !unsafe { push_transfer(queue, &transfer, slot) } {
            // As after a transfer that has moved nothing.
            self.fall_back(slot, 0);
        }
    }
}

#[cfg(test)]
#[cfg(feature = "sim")]
mod tests;
