//! Neighbours merged: simple requests of one burst that touch on storage become one vectored
//! transfer, and each is answered on its own. This saves a transfer for each of them. The switch
//! [`crate::Config::merge`] turns it off; each request then makes a transfer of its own.
//!
//! A request that begins where the one before it ends is not pushed to the queue immediately: it begins
//! a run, which the requests behind it join, until one does not touch or the queue is submitted. So
//! a sequential stream makes one transfer for each submission, and any other request pays for one
//! comparison.
//!
//! Invariant: a merged transfer moves exactly the bytes of its requests, each to or from its own
//! memory, and answers them only if it has moved all of them; otherwise each request makes its own
//! transfer, as if there had been no other. The kernel reads the list of segments until the
//! transfer has ended; until then it is not changed. A run has requests of one device.
#![allow(unsafe_code)]

use crate::block::block_map::BlockMap;
use crate::blocking::joined_writes::{MAX_BYTES, MAX_PART_BYTES};
use crate::engine::completion::Rejected;
use crate::engine::per_device::PerDevice;
use crate::engine::requests::{Requests, push_transfer};
use crate::engine::slot::Role;
use crate::queue::IoQueue;
use crate::sim_hooks::injected_bug::{self, EngineBug};
use crate::types::iovec::{IoSegment, MAX_SEGMENTS};
use crate::types::request::Op;
use crate::types::transfer::{Outcome, Transfer, UNREGISTERED};

/// Segments for which a list has room from the start: blocks of 4 KiB.
const USUAL_SEGMENTS: usize = MAX_BYTES as usize / 4096;
/// Neighbours that are not merged after a merged transfer that was not done as a whole. A file that
/// refuses what spans two of its extents would refuse most of them.
const PAUSE: u32 = 64;

/// Requests that become one transfer.
#[derive(Clone, Copy)]
struct Run {
    /// Its first and its last slot; `RequestSlot::next` links them, except after the last.
    head: u32,
    tail: u32,
    requests: u32,
    /// The transfer of the first request, with the length of all.
    transfer: Transfer,
    /// The index of its list of segments; unused for one request.
    list: u32,
}

/// The neighbours of one device.
#[derive(Default)]
struct Stream {
    run: Option<Run>,
    /// Neighbours that are left to be pushed on their own.
    pause: u32,
    /// Requests that shared a transfer.
    merged: u64,
}

/// Where the transfer of a neighbour goes.
enum Placed {
    /// To the queue, by itself.
    Alone,
    /// To the open run, behind the request in this slot.
    Behind(u32),
    /// To a run that it begins. The one that was open before, if any, is to be pushed.
    First(Option<Run>),
}

/// The merged transfers of an engine.
pub(crate) struct Merging {
    /// The switch.
    on: bool,
    streams: PerDevice<Stream>,
    /// Devices with an open run, each once.
    open: Vec<u32>,
    /// The segments of the merged transfers in flight.
    lists: Vec<Vec<IoSegment>>,
    free_lists: Vec<u32>,
    /// Requests of merged transfers that were not done as a whole; each makes its own transfer.
    again: Vec<u32>,
}

impl Merging {
    /// No runs; `on` is the switch.
    pub(crate) const fn new(on: bool) -> Self {
        Self {
            on,
            streams: PerDevice::new(),
            open: Vec::new(),
            lists: Vec::new(),
            free_lists: Vec::new(),
            again: Vec::new(),
        }
    }

    /// Whether requests wait for the submission of the queue.
    #[inline]
    pub(crate) fn has_run(&self) -> bool {
        !self.open.is_empty()
    }

    /// Whether requests wait to be pushed.
    pub(crate) fn is_busy(&self) -> bool {
        self.has_run() || !self.again.is_empty()
    }

    /// Requests of `device` that shared a transfer.
    pub(crate) fn merged(&self, device: u32) -> u64 {
        self.streams.get(device).map_or(0, |stream| stream.merged)
    }

    /// Forgets a device of which nothing is in flight. Returns [`Merging::merged`].
    pub(crate) fn forget(&mut self, device: u32) -> u64 {
        let stream = self.streams.take(device);
        debug_assert!(stream.run.is_none());
        stream.merged
    }

    /// Leaks the lists that the kernel or another thread may still read.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(std::mem::replace(self, Self::new(false)));
    }

    /// Places the neighbour in `slot`, a request of `device` with this transfer.
    fn place(&mut self, device: u32, slot: u32, transfer: &Transfer) -> Placed {
        let Self { on, streams, open, lists, free_lists, .. } = self;
        let stream = streams.get_mut(device);
        if !*on || !takes(transfer, &mut stream.pause) {
            return Placed::Alone;
        }
        if let Some(run) = &mut stream.run
            && run.has_room_for(transfer)
        {
            return Placed::Behind(run.join(slot, transfer, lists, free_lists));
        }
        let run = Run { head: slot, tail: slot, requests: 1, transfer: *transfer, list: 0 };
        let before = stream.run.replace(run);
        if before.is_none() {
            open.push(device);
        }
        Placed::First(before)
    }

    /// Takes an open run, which is to be pushed.
    fn take_open(&mut self) -> Option<Run> {
        let device = self.open.pop()?;
        self.streams.get_mut(device).run.take()
    }

    /// The transfer of a run of several requests.
    fn transfer_of(&self, run: &Run) -> Transfer {
        let mut transfer = run.transfer;
        match self.lists[run.list as usize].as_slice() {
            [one] => transfer.base = one.base,
            segments => {
                transfer.base = segments.as_ptr().cast_mut().cast();
                transfer.segments = segments.len() as u16;
                transfer.buffer = UNREGISTERED;
            }
        }
        transfer
    }

    /// Bytes of the run with this list.
    fn bytes(&self, list: u32) -> usize {
        self.lists[list as usize].iter().map(|one| one.len).sum()
    }

    /// Frees the list of a run of `requests` of `device`. `full` says that its transfer has moved all bytes.
    fn end(&mut self, device: u32, list: u32, requests: u32, full: bool) {
        self.free_lists.push(list);
        let stream = self.streams.get_mut(device);
        if full {
            stream.merged += u64::from(requests);
        } else {
            stream.pause = PAUSE;
        }
    }

    /// Starts the simple request in `slot`, whose transfer begins where the one before it ends: it
    /// joins the open run, or begins one, or is pushed to the queue.
    #[inline(never)]
    pub(crate) fn start<Q: IoQueue, M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        queue: &mut Q,
        slot: u32,
    ) -> Result<(), Rejected> {
        let transfer = requests.transfer_of(slot);
        match self.place(requests.slot(slot).device(), slot, &transfer) {
            Placed::Behind(before) => requests.slot_mut(before).next = slot,
            Placed::First(before) => {
                requests.attend_later();
                if let Some(run) = before {
                    self.push_run(requests, queue, run);
                }
            }
            Placed::Alone => {
                // SAFETY: the memory was promised, or is the slot's, until the request is given back.
                if !unsafe { push_transfer(queue, &transfer, slot) } {
                    return Err(requests.reject_queue_full(slot));
                }
            }
        }
        Ok(())
    }

    /// Pushes the open run of each device to the queue as one transfer; to be called before each
    /// submission.
    #[inline]
    pub(crate) fn close<Q: IoQueue, M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        queue: &mut Q,
    ) {
        while let Some(run) = self.take_open() {
            self.push_run(requests, queue, run);
        }
    }

    #[inline(never)]
    fn push_run<Q: IoQueue, M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        queue: &mut Q,
        run: Run,
    ) {
        if run.requests == 1 {
            return requests.push_or_fall_back(queue, run.head);
        }
        if requests.has_stopped() && self.has_stopped(requests, &run) {
            requests.slot_mut(run.head).parent = run.list;
            requests.slot_mut(run.head).merged = run.requests;
            self.end_run(requests, run.head, false);
            self.retry(requests, queue);
            return;
        }
        let request = requests.slot_mut(run.head);
        request.set_role(Role::Merged);
        request.parent = run.list;
        request.merged = run.requests;
        // SAFETY: the memory of each request was promised, or is its slot's, until it is given
        // back, and no slot of the run is before the transfer has ended; until then the list is not
        // changed.
        if !unsafe { push_transfer(queue, &self.transfer_of(&run), run.head) } {
            self.end_run(requests, run.head, false);
            self.retry(requests, queue);
        }
    }

    /// Whether one of the requests of a run is stopped.
    fn has_stopped<M: BlockMap + ?Sized>(&self, requests: &Requests<M>, run: &Run) -> bool {
        let next = |slot: &u32| Some(requests.slot(*slot).next);
        let slots = std::iter::successors(Some(run.head), next).take(run.requests as usize);
        slots.into_iter().any(|slot| requests.slot(slot).stop.errno().is_some())
    }

    /// Handles the end of the merged transfer whose first request is in `head`.
    #[inline(never)]
    pub(crate) fn on_transfer_done<M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        head: u32,
        outcome: Outcome,
    ) {
        let bytes = self.bytes(requests.slot(head).parent);
        let full = usize::try_from(outcome).is_ok_and(|moved| moved >= bytes)
            || injected_bug::injected(EngineBug::AnswerUnmovedNeighbours);
        self.end_run(requests, head, full);
    }

    /// Ends the requests of a run, or leaves them to [`Merging::retry`].
    fn end_run<M: BlockMap + ?Sized>(&mut self, requests: &mut Requests<M>, head: u32, full: bool) {
        let first = requests.slot_mut(head);
        let count = first.merged;
        first.set_role(if first.io.op == Op::Write { Role::Write } else { Role::Read });
        self.end(first.device(), first.parent, count, full);
        let mut slot = head;
        for _ in 0..count {
            let next = requests.slot(slot).next;
            match full {
                true => requests.end_full(slot),
                false => self.again.push(slot),
            }
            slot = next;
        }
    }

    /// Pushes the requests of merged transfers that were not done as a whole, one by one. True if
    /// there were any.
    #[inline]
    pub(crate) fn retry<Q: IoQueue, M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        queue: &mut Q,
    ) -> bool {
        let any = !self.again.is_empty();
        for slot in self.again.drain(..) {
            requests.push_or_fall_back(queue, slot);
        }
        any
    }
}

impl Run {
    /// Whether `next` touches the run and both are of one kind and within the limits.
    fn has_room_for(&self, next: &Transfer) -> bool {
        let all = &self.transfer;
        let touches = next.pos == all.pos + u64::from(all.len)
            && (next.file, next.write) == (all.file, all.write)
            && (next.rw_flags, next.must_not_wait) == (all.rw_flags, all.must_not_wait)
            && next.priority == all.priority;
        touches && all.len + next.len <= MAX_BYTES && (self.requests as usize) < MAX_SEGMENTS
    }

    /// Adds the request in `slot`. Returns the slot before it.
    fn join(
        &mut self,
        slot: u32,
        next: &Transfer,
        lists: &mut Vec<Vec<IoSegment>>,
        free_lists: &mut Vec<u32>,
    ) -> u32 {
        let all = &mut self.transfer;
        if self.requests == 1 {
            self.list = free_lists.pop().unwrap_or_else(|| {
                lists.push(Vec::with_capacity(USUAL_SEGMENTS));
                lists.len() as u32 - 1
            });
            let list = &mut lists[self.list as usize];
            list.clear();
            list.push(IoSegment { base: all.base, len: all.len as usize });
        }
        let list = &mut lists[self.list as usize];
        let len = next.len as usize;
        match list.last_mut() {
            Some(last) if last.base.wrapping_add(last.len) == next.base => last.len += len,
            _ => list.push(IoSegment { base: next.base, len }),
        }
        if all.buffer != next.buffer {
            all.buffer = UNREGISTERED;
        }
        all.len += next.len;
        self.requests += 1;
        std::mem::replace(&mut self.tail, slot)
    }
}

/// Whether a request with this transfer may be merged with others; `pause` is that of its device.
fn takes(transfer: &Transfer, pause: &mut u32) -> bool {
    if transfer.len > MAX_PART_BYTES {
        return false;
    }
    if *pause > 0 {
        *pause -= 1;
        return false;
    }
    // Durable, polled and untorn transfers are so for one request.
    transfer.rw_flags & !(libc::RWF_NOWAIT | libc::RWF_DONTCACHE) == 0
}

#[cfg(test)]
mod run_tests;
#[cfg(test)]
#[cfg(feature = "sim")]
mod tests;
