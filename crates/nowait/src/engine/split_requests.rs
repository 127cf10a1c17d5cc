//! Requests that are split: their fragments, which are served one by one or all together, each by a
//! transfer of its own.
//!
//! Invariant: each fragment has a slot of its own, which no caller sees; its parent's `pending` counts it
//! until it has ended, and the parent ends when that is 0 and no fragment is left to submit. A bounce buffer
//! is in its fragment's slot for as long as a transfer uses it.
#![allow(unsafe_code)]

use crate::block::block_map::BlockMap;
use crate::engine::attached_device::Count;
use crate::engine::fragment::{Fragment, FragmentKind};
use crate::engine::requests::{Requests, push_transfer};
use crate::engine::slot::{RequestSlot, Role, State};
use crate::engine::transfer_result::{TransferResult, classify};
use crate::memory::buffer_pool::{Budget, BufferPool, PooledBuffer};
use crate::queue::IoQueue;
use crate::sim_hooks::injected_bug::{self, EngineBug};
use crate::types::io_cursor::{ReadCursor, WriteCursor};
use crate::types::iovec::IoSegment;
use crate::types::request::{Flags, Op};
use crate::types::transfer::{Outcome, Transfer, UNREGISTERED};
use crate::types::{alignment, iovec};

/// The split requests of an engine.
pub(crate) struct SplitRequests {
    /// Requests whose submitted fragments have all ended.
    resumable: Vec<u32>,
    /// Slots that hold fragments.
    fragments: usize,
    /// Buffers for fragments that cannot use the request's memory.
    bounce: BufferPool,
    /// Scratch space for lists of segments.
    parts: Vec<IoSegment>,
}

impl SplitRequests {
    /// No requests; bounce buffers are taken from `budget`.
    pub(crate) fn new(budget: Budget) -> Self {
        let bounce = BufferPool::new(budget);
        Self { resumable: Vec::with_capacity(64), fragments: 0, bounce, parts: Vec::new() }
    }

    /// Slots that hold fragments; they do not count as requests.
    #[inline(always)]
    pub(crate) fn fragments(&self) -> usize {
        self.fragments
    }

    /// Whether a request waits for [`SplitRequests::resume`].
    pub(crate) fn is_busy(&self) -> bool {
        !self.resumable.is_empty()
    }

    /// Leaks the bounce buffers that the kernel may still write to.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.bounce, BufferPool::new(Budget::new(0))));
    }

    /// Continues the requests whose submitted fragments have ended. True when the caller is to submit the
    /// queue immediately.
    #[inline]
    pub(crate) fn resume<Q: IoQueue, M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        queue: &mut Q,
    ) -> bool {
        let mut submitted = false;
        while let Some(slot) = self.resumable.pop() {
            submitted |= !requests.slot(slot).fragments.is_empty();
            self.submit(requests, queue, slot);
        }
        submitted
    }

    /// Submits the fragments of a request: all of them, or with `vectored` off the next one. Ends
    /// the request when none is left or in flight.
    pub(crate) fn submit<Q: IoQueue, M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        queue: &mut Q,
        slot: u32,
    ) {
        while let Some(fragment) = requests.slot_mut(slot).fragments.pop() {
            if requests.slot(slot).again || requests.slot(slot).result < 0 {
                continue;
            }
            if fragment.kind == FragmentKind::Zero {
                let segments = requests.slot(slot).segments.as_slice();
                // SAFETY: the memory was promised by the caller; no transfer covers these bytes.
                unsafe { ReadCursor::new(segments, fragment.start, fragment.len) }.fill(0);
                requests.device_of(slot).add(Count::ZeroFilled, fragment.len);
                continue;
            }
            match self.submit_fragment(requests, queue, slot, fragment) {
                true if requests.config().vectored => {}
                true => break,
                // No slot, no buffer or no room in the queue: a worker does the request.
                false => requests.slot_mut(slot).again = true,
            }
        }
        let request = requests.slot_mut(slot);
        if request.pending == 0 {
            requests.finish_or_continue(slot);
        } else {
            request.set_state(State::Queued);
        }
    }

    /// Submits one fragment. False, with its slot freed, when there is no slot, no buffer or no
    /// room.
    fn submit_fragment<Q: IoQueue, M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        queue: &mut Q,
        parent: u32,
        fragment: Fragment,
    ) -> bool {
        let &RequestSlot { io, target, .. } = requests.slot(parent);
        let Some((slot, request)) = requests.alloc() else { return false };
        request.begin(Role::Fragment, State::Submitting, target, io, None, 0);
        request.parent = parent;
        request.fragment = fragment;
        self.fragments += 1;
        let Some(transfer) = self.prepare_transfer(requests, parent, slot, fragment) else {
            self.free(requests, slot);
            return false;
        };
        // SAFETY: the memory is the parent's, which lasts until all of its fragments have ended, or
        // the bounce buffer in the fragment's own slot.
        if !unsafe { push_transfer(queue, &transfer, slot) } {
            self.free(requests, slot);
            return false;
        }
        requests.slot_mut(slot).set_state(State::Queued);
        requests.slot_mut(parent).pending += 1;
        true
    }

    fn free<M: BlockMap + ?Sized>(&mut self, requests: &mut Requests<M>, slot: u32) {
        requests.slot_mut(slot).buf = None;
        self.fragments -= 1;
        requests.free(slot);
    }

    /// The transfer of a fragment; none when there is no buffer for it.
    fn prepare_transfer<M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        parent: u32,
        slot: u32,
        fragment: Fragment,
    ) -> Option<Transfer> {
        let &RequestSlot { io, target, .. } = requests.slot(parent);
        let device = requests.device(target.device());
        let write = io.op == Op::Write;
        let pos = fragment.pos;
        let mut transfer = Transfer {
            pos,
            file: device.target(fragment.file).file(),
            len: fragment.len as u32,
            rw_flags: device.simple_path.rw_flags(io.flags.without(Flags::DSYNC)),
            priority: io.flags.priority_number(),
            write,
            must_not_wait: io.flags.contains(Flags::NOWAIT),
            ..Transfer::NONE
        };
        let align = device.disk.alignment();
        let block = if write { align.offset } else { align.read_offset };
        match fragment.kind {
            FragmentKind::Zero => return None,
            FragmentKind::Direct => self.place_direct(requests, parent, slot, &mut transfer),
            FragmentKind::PaddedRead { skip } => {
                let request = requests.slot(parent);
                let (buf, one) = (request.buf.as_ref()?, request.segments.as_slice().first()?);
                transfer.base = one.base.wrapping_sub(skip as usize);
                transfer.buffer = buf.registered();
                transfer.pos = pos - u64::from(skip);
                transfer.len = alignment::round_up(u64::from(skip) + fragment.len, block) as u32;
            }
            FragmentKind::Bounce { skip } => {
                let len = alignment::round_up(u64::from(skip) + fragment.len, block);
                let mut buf = self.bounce.get((len as usize, 0, len as u32), |_, _| None)?;
                if write {
                    let segments = requests.slot(parent).segments.as_slice();
                    // SAFETY: the memory was promised by the caller.
                    unsafe { WriteCursor::new(segments, fragment.start, fragment.len) }
                        .copy_to(&mut buf);
                }
                transfer.base = buf.base();
                transfer.pos = pos - u64::from(skip);
                transfer.len = len as u32;
                requests.slot_mut(slot).buf = Some(buf);
            }
        }
        Some(transfer)
    }

    /// Sets the memory of a direct fragment's transfer: a part of its parent's, or a list of such parts,
    /// which its own slot keeps.
    fn place_direct<M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        parent: u32,
        slot: u32,
        transfer: &mut Transfer,
    ) {
        let fragment = requests.slot(slot).fragment;
        let request = requests.slot(parent);
        let parts = &mut self.parts;
        parts.clear();
        let segments = request.segments.as_slice();
        iovec::slice_segments(segments, fragment.start, fragment.len, |part| parts.push(part));
        if let [one] = parts.as_slice() {
            transfer.base = one.base;
            transfer.buffer = request.buf.as_ref().map_or(UNREGISTERED, PooledBuffer::registered);
        } else {
            let list = &mut requests.slot_mut(slot).segments;
            list.set(parts);
            transfer.base = list.as_slice().as_ptr().cast_mut().cast();
            transfer.segments = list.as_slice().len() as u16;
        }
    }

    /// Handles the end of the transfer of the fragment in `slot`.
    #[inline(never)]
    pub(crate) fn on_transfer_done<M: BlockMap + ?Sized>(
        &mut self,
        requests: &mut Requests<M>,
        slot: u32,
        outcome: Outcome,
    ) {
        let request = requests.slot(slot);
        let (parent, fragment) = (request.parent, request.fragment);
        let skip = match fragment.kind {
            FragmentKind::PaddedRead { skip } | FragmentKind::Bounce { skip } => u64::from(skip),
            FragmentKind::Zero | FragmentKind::Direct => 0,
        };
        let result = classify(outcome, skip + fragment.len);
        let read = request.io.op == Op::Read;
        if let (TransferResult::Full, true, FragmentKind::Bounce { skip }, Some(buf)) =
            (result, read, fragment.kind, &request.buf)
        {
            let segments = requests.slot(parent).segments.as_slice();
            let from = &buf[skip as usize..];
            if !injected_bug::injected(EngineBug::ReplyFromStaleBuffer) {
                // SAFETY: the memory was promised by the caller.
                unsafe { ReadCursor::new(segments, fragment.start, fragment.len) }.copy_from(from);
            }
        }
        self.free(requests, slot);
        requests.record_outcome(parent, result);
        let request = requests.slot_mut(parent);
        request.pending -= 1;
        if request.pending == 0 {
            self.resumable.push(parent);
        }
    }
}
