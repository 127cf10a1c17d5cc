//! The vectored path: a request that is not simple is split into fragments, each served by one
//! transfer or none, and the transfers are in flight together. This saves the sum of their
//! latencies, and a transfer for each segment. The switch [`crate::Config::vectored`] turns it off;
//! a fragment then ends at the end of its segment, and is waited for before the next is submitted.
//!
//! Invariant: the fragments of a plan cover the request exactly, in order and without overlap. A
//! request that needs read-modify-write or allocation has no plan and goes to a worker as a whole,
//! so that it is done once (C33, C35). Each fragment has a slot of its own, which no caller sees;
//! its parent's `pending` counts it until it has ended, and the parent ends when that is 0 and no
//! fragment is left to submit.
#![allow(unsafe_code)]

use crate::block::block_map::{BlockMap, Extent, Intent};
use crate::block::device::BlockDevice;
use crate::blocking::sync_io;
use crate::blocking::worker_pool::WorkerTask;
use crate::engine::attached_device::{AttachedDevice, count};
use crate::engine::completion::Rejected;
use crate::engine::dispatcher::{Dispatcher, push_transfer, reject_full};
use crate::engine::fragment::{Fragment, FragmentKind};
use crate::engine::slot::{Place, RequestSlot, Role, State};
use crate::engine::transfer_result::{TransferResult, classify};
use crate::memory::buffer_pool::PooledBuffer;
use crate::queue::IoQueue;
use crate::sim_hooks::injected_bug::{self, EngineBug};
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::io_cursor::{ReadCursor, WriteCursor};
use crate::types::iovec::IoSegment;
use crate::types::request::{Flags, Op, Request};
use crate::types::transfer::{Outcome, Transfer, UNREGISTERED};
use crate::types::{alignment, iovec};

/// The largest fragment that goes through a pooled buffer, in bytes from the start of its first
/// block.
const BOUNCE_BYTES: u64 = 512 << 10;

/// How a request is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// By one transfer between all of the request's memory and the extent.
    Single(Extent),
    /// By the fragments of the plan.
    Split,
    /// By a worker.
    Worker,
}

/// Splits `io` into `fragments`, the last one first. `segments` are its memory, merged; `own`
/// returns the engine's buffer that they lie in, if they do; `vectored` is the switch;
/// `separate_sync` says that the request needs a sync after its data.
pub(crate) fn plan<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    io: Request,
    segments: &[IoSegment],
    own: impl Fn() -> Option<IoSegment>,
    vectored: bool,
    separate_sync: bool,
    fragments: &mut Vec<Fragment>,
) -> Path {
    fragments.clear();
    // With `vectored` off, a transfer ends at the end of its segment.
    let may_be_single = !separate_sync && (vectored || segments.len() == 1);
    let path = match io.op {
        Op::Read => plan_read(disk, io.range, segments, &own, may_be_single, fragments),
        Op::Write => plan_write(disk, io.range, segments, may_be_single, fragments),
        _ => Path::Worker,
    };
    match path {
        Path::Single(_) => {}
        Path::Worker => fragments.clear(),
        Path::Split => {
            if !vectored {
                split_per_segment(disk, io.op, segments, fragments);
            }
            // Fragments are popped from the end.
            fragments.reverse();
        }
    }
    path
}

/// Plans a read, as one transfer only if it `may_be_single`.
fn plan_read<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    segments: &[IoSegment],
    own: &impl Fn() -> Option<IoSegment>,
    may_be_single: bool,
    fragments: &mut Vec<Fragment>,
) -> Path {
    let block = disk.alignment().read_offset;
    let mut start = 0;
    while start < range.len {
        let rest = ByteRange::new(range.pos + start, range.len - start);
        let Ok(extent) = disk.extent(rest, Intent::Read) else {
            return Path::Worker;
        };
        if extent.hole {
            fragments.push(Fragment::of(extent, start, FragmentKind::Zero));
        } else if is_direct(disk, block, extent, segments, start) {
            if may_be_single && extent.len == range.len {
                return Path::Single(extent);
            }
            fragments.push(Fragment::of(extent, start, FragmentKind::Direct));
        } else if extent.len == range.len
            && let Some(skip) = room_for(extent, block, segments, own())
        {
            fragments.push(Fragment::of(extent, start, FragmentKind::PaddedRead { skip }));
        } else {
            bounce(extent, start, block, fragments);
        }
        start += extent.len;
    }
    Path::Split
}

/// The bytes from the start of the first block to `extent`, which is all of a request, if `own` has
/// room for all blocks around it. It may have none: the file position may differ from the device's
/// modulo the block, and the buffer may come from an engine with smaller blocks.
fn room_for(
    extent: Extent,
    block: u32,
    segments: &[IoSegment],
    own: Option<IoSegment>,
) -> Option<u32> {
    let (own, one) = (own?, segments.first()?);
    let skip = extent.pos - alignment::round_down(extent.pos, block);
    let before = (one.base as u64).wrapping_sub(own.base as u64);
    let after = (own.len as u64).checked_sub(before)?;
    (skip <= before && alignment::round_up(skip + extent.len, block) - skip <= after)
        .then_some(skip as u32)
}

/// Plans a write, as one transfer only if it `may_be_single`.
fn plan_write<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    range: ByteRange,
    segments: &[IoSegment],
    may_be_single: bool,
    fragments: &mut Vec<Fragment>,
) -> Path {
    let block = disk.alignment().offset;
    if (range.pos | range.len) & (u64::from(block) - 1) != 0 {
        return Path::Worker;
    }
    let mut start = 0;
    while start < range.len {
        let rest = ByteRange::new(range.pos + start, range.len - start);
        let Ok(extent) = disk.extent(rest, Intent::Write) else {
            return Path::Worker;
        };
        if is_direct(disk, block, extent, segments, start) {
            if may_be_single && extent.len == range.len {
                return Path::Single(extent);
            }
            fragments.push(Fragment::of(extent, start, FragmentKind::Direct));
        } else {
            bounce(extent, start, block, fragments);
        }
        start += extent.len;
    }
    Path::Split
}

/// Whether `part`, which begins at byte `start` of the request, and its memory are aligned.
fn is_direct<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    block: u32,
    part: Extent,
    segments: &[IoSegment],
    start: u64,
) -> bool {
    let memory = disk.alignment().memory;
    if let &[one] = segments {
        let base = (one.base as u64).wrapping_add(start);
        return (part.pos | part.len) & (u64::from(block) - 1) == 0
            && base & (u64::from(memory) - 1) == 0;
    }
    // The part's length is the sum of its segments' lengths, so it is checked with them.
    let mut direct = part.pos & (u64::from(block) - 1) == 0;
    iovec::slice_segments(segments, start, part.len, |segment| {
        direct &= iovec::aligned(&[segment], memory, block);
    });
    direct
}

/// Cuts `part` into fragments that fit a pooled buffer, at block boundaries.
fn bounce(part: Extent, start: u64, block: u32, fragments: &mut Vec<Fragment>) {
    let mut done = 0;
    while done < part.len {
        let pos = part.pos.wrapping_add(done);
        let skip = pos - alignment::round_down(pos, block);
        let len = (BOUNCE_BYTES - skip).min(part.len - done);
        let kind = FragmentKind::Bounce { skip: skip as u32 };
        fragments.push(Fragment { start: start + done, len, pos, file: part.file, kind });
        done += len;
    }
}

/// With `vectored` off: cuts direct fragments at the ends of their segments.
fn split_per_segment<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    op: Op,
    segments: &[IoSegment],
    fragments: &mut Vec<Fragment>,
) {
    let align = disk.alignment();
    let block = if op == Op::Read { align.read_offset } else { align.offset };
    let all = std::mem::take(fragments);
    for fragment in all {
        if fragment.kind != FragmentKind::Direct {
            fragments.push(fragment);
            continue;
        }
        let mut start = fragment.start;
        iovec::slice_segments(segments, fragment.start, fragment.len, |segment| {
            debug_assert!(iovec::aligned(&[segment], align.memory, block));
            let len = segment.len as u64;
            fragments.push(Fragment {
                start,
                len,
                pos: fragment.pos.wrapping_add(start - fragment.start),
                ..fragment
            });
            start += len;
        });
    }
}

#[cfg(test)]
#[cfg(feature = "sim")]
mod tests;

/// Whether a request is aligned as it was submitted, before it is cut at the device's end.
fn is_aligned<M: BlockMap + ?Sized>(
    disk: &BlockDevice<M>,
    io: Request,
    segments: &[IoSegment],
) -> bool {
    let align = disk.alignment();
    let block = match io.op {
        Op::Read => align.read_offset,
        Op::Write => align.offset,
        _ => return true,
    };
    sync_io::is_aligned_to(disk, block, io.range, segments)
}

impl<M: BlockMap + ?Sized> Dispatcher<M> {
    /// Starts any request by the general path: by one transfer, by fragments or by a worker.
    pub(crate) fn submit_general<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        device: &AttachedDevice<M>,
        io: Request,
        segments: &[IoSegment],
        buf: Option<PooledBuffer>,
        tag: u64,
    ) -> Result<(), Rejected> {
        let io = match self.check(device, io, segments) {
            Ok(io) => io,
            Err(error) => return Err(Rejected { error, buf }),
        };
        let Some((slot, request)) = self.pool.alloc() else { return Err(reject_full(io, buf)) };
        request.begin(Role::Split, State::Submitting, device.first, io, buf, tag);
        if device.simple_path.can_share_sync(io) {
            device.durable_writes.set(device.durable_writes.get() + 1);
            self.durable_writes += 1;
        }
        let &[IoSegment { base, .. }] = segments else {
            self.submit_list(queue, device, slot, io, segments);
            return Ok(());
        };
        let one = IoSegment { base, len: io.range.len as usize };
        if one.len == 0 {
            self.complete(slot, 0);
            return Ok(());
        }
        match self.choose_path(device, slot, io, &[one]) {
            Path::Single(extent) => {
                self.submit_single(queue, device, slot, io, extent, (base, 0));
            }
            path => {
                self.pool[slot].segments.set_one(one);
                self.submit_planned(queue, device, slot, path);
            }
        }
        Ok(())
    }

    /// Starts a request without memory, or with several segments.
    #[inline(never)]
    fn submit_list<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        device: &AttachedDevice<M>,
        slot: u32,
        io: Request,
        segments: &[IoSegment],
    ) {
        if io.range.len == 0 && io.op != Op::Flush {
            return self.complete(slot, 0);
        }
        let mut merged = std::mem::take(&mut self.merged);
        merged.clear();
        match self.config.vectored {
            true => iovec::merge(segments, io.range.len, &mut merged),
            false => iovec::slice_segments(segments, 0, io.range.len, |one| merged.push(one)),
        }
        let path = self.choose_path(device, slot, io, &merged);
        let kept = &mut self.pool[slot].segments;
        kept.set(&merged);
        self.merged = merged;
        match path {
            Path::Single(extent) => {
                let memory = match kept.as_slice() {
                    [one] => (one.base, 0),
                    list => (list.as_ptr().cast_mut().cast(), list.len() as u16),
                };
                self.submit_single(queue, device, slot, io, extent, memory);
            }
            path => self.submit_planned(queue, device, slot, path),
        }
    }

    /// Starts a request by the fragments of its plan or by a worker.
    #[inline(never)]
    fn submit_planned<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        device: &AttachedDevice<M>,
        slot: u32,
        path: Path,
    ) {
        if path == Path::Worker {
            count(&device.worker);
            return self.offload(slot, WorkerTask::Run);
        }
        count(&device.general);
        self.submit_fragments(queue, slot);
    }

    /// Submits the only transfer of a request that is a single direct fragment. `memory` is its
    /// only segment's address and 0, or that of the slot's list of segments and their number.
    #[inline]
    fn submit_single<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        device: &AttachedDevice<M>,
        slot: u32,
        io: Request,
        extent: Extent,
        (base, segments): (*mut u8, u16),
    ) {
        count(&device.general);
        let request = &mut self.pool[slot];
        let buffer = request.buf.as_ref().map_or(UNREGISTERED, PooledBuffer::registered);
        let target = device.target(extent.file);
        request.target = target;
        request.place = Place { base, pos: extent.pos, segments, buffer };
        let transfer = device.simple_path.transfer(io, target, request.place);
        request.set_role(if io.op == Op::Write { Role::Write } else { Role::Read });
        request.set_state(State::Queued);
        // SAFETY: the memory is the request's, and the list of segments is the slot's; both last
        // until the slot is done.
        if !unsafe { push_transfer(queue, &transfer, slot) } {
            // As after a transfer that has moved nothing: a worker does the request.
            self.fall_back(slot, 0);
        }
    }

    /// Checks a request against the device; the returned range is cut at the device's end.
    /// `EINVAL` for an unaligned request with `strict` on (C12); as [`sync_io::check`].
    /// `EINVAL` for a device of another engine, `ENODEV` for one that is detached.
    pub(crate) fn check(
        &self,
        device: &AttachedDevice<M>,
        io: Request,
        segments: &[IoSegment],
    ) -> Result<Request, Error> {
        if device.engine.get() != self.number {
            return Err(device.refusal().at(io.range));
        }
        // SAFETY: the memory of a request is valid from its submission on.
        let checked = unsafe { sync_io::check(&device.disk, io, segments) }?;
        if self.config.strict && io.range.len > 0 && !is_aligned(&device.disk, io, segments) {
            return Err(Error::new(libc::EINVAL, Operation::Validate).at(io.range));
        }
        Ok(checked)
    }

    /// Submits the fragments of a request: all of them, or with `vectored` off the next one. Ends
    /// the request when none is left or in flight.
    pub(crate) fn submit_fragments<Q: IoQueue>(&mut self, queue: &mut Q, slot: u32) {
        while let Some(fragment) = self.pool[slot].fragments.pop() {
            if self.pool[slot].again || self.pool[slot].result < 0 {
                continue;
            }
            if fragment.kind == FragmentKind::Zero {
                let segments = self.pool[slot].segments.as_slice();
                // SAFETY: the memory was promised by the caller; no transfer covers these bytes.
                unsafe { ReadCursor::new(segments, fragment.start, fragment.len) }.fill(0);
                let device = self.pool[slot].device();
                self.devices[device].stats.zero_filled += fragment.len;
                continue;
            }
            match self.submit_fragment(queue, slot, fragment) {
                true if self.config.vectored => {}
                true => break,
                // No slot, no buffer or no room in the queue: a worker does the request.
                false => self.pool[slot].again = true,
            }
        }
        let request = &mut self.pool[slot];
        if request.pending == 0 {
            self.finish_or_continue(slot);
        } else {
            request.set_state(State::Queued);
        }
    }

    /// Submits one fragment. False, with its slot freed, when there is no slot, no buffer or no
    /// room.
    fn submit_fragment<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        parent: u32,
        fragment: Fragment,
    ) -> bool {
        let RequestSlot { io, target, .. } = self.pool[parent];
        let Some((slot, request)) = self.pool.alloc() else { return false };
        request.begin(Role::Fragment, State::Submitting, target, io, None, 0);
        request.parent = parent;
        request.fragment = fragment;
        self.fragments += 1;
        let Some(transfer) = self.prepare_transfer(parent, slot, fragment) else {
            self.free_fragment(slot);
            return false;
        };
        // SAFETY: the memory is the parent's, which lasts until all of its fragments have ended, or
        // the bounce buffer in the fragment's own slot.
        if !unsafe { push_transfer(queue, &transfer, slot) } {
            self.free_fragment(slot);
            return false;
        }
        self.pool[slot].set_state(State::Queued);
        self.pool[parent].pending += 1;
        true
    }

    fn free_fragment(&mut self, slot: u32) {
        self.pool[slot].buf = None;
        self.fragments -= 1;
        self.pool.free(slot);
    }

    /// The transfer of a fragment; none when there is no buffer for it.
    fn prepare_transfer(&mut self, parent: u32, slot: u32, fragment: Fragment) -> Option<Transfer> {
        let RequestSlot { io, target, .. } = self.pool[parent];
        let device = &self.devices[target.device()].attached;
        let write = io.op == Op::Write;
        let pos = fragment.pos;
        let mut transfer = Transfer {
            pos,
            file: device.target(fragment.file).file(),
            len: fragment.len as u32,
            rw_flags: device.simple_path.rw_flags(io.flags.without(Flags::DSYNC)),
            write,
            must_not_wait: io.flags.has(Flags::NOWAIT),
            ..Transfer::NONE
        };
        let align = device.disk.alignment();
        let block = if write { align.offset } else { align.read_offset };
        match fragment.kind {
            FragmentKind::Zero => return None,
            FragmentKind::Direct => {
                let mut parts = std::mem::take(&mut self.merged);
                parts.clear();
                let request = &self.pool[parent];
                iovec::slice_segments(
                    request.segments.as_slice(),
                    fragment.start,
                    fragment.len,
                    |s| parts.push(s),
                );
                if let [one] = parts.as_slice() {
                    transfer.base = one.base;
                    transfer.buffer =
                        request.buf.as_ref().map_or(UNREGISTERED, PooledBuffer::registered);
                } else {
                    self.pool[slot].segments.set(&parts);
                    let list = self.pool[slot].segments.as_slice();
                    transfer.base = list.as_ptr().cast_mut().cast();
                    transfer.segments = list.len() as u16;
                }
                self.merged = parts;
            }
            FragmentKind::PaddedRead { skip } => {
                let request = &self.pool[parent];
                let (buf, one) = (request.buf.as_ref()?, request.segments.as_slice().first()?);
                transfer.base = one.base.wrapping_sub(skip as usize);
                transfer.buffer = buf.registered();
                transfer.pos = pos - u64::from(skip);
                transfer.len = alignment::round_up(u64::from(skip) + fragment.len, block) as u32;
            }
            FragmentKind::Bounce { skip } => {
                let len = alignment::round_up(u64::from(skip) + fragment.len, block);
                let mut buf = self.bounce.get(len as usize, |_, _| None)?;
                if write {
                    let segments = self.pool[parent].segments.as_slice();
                    // SAFETY: the memory was promised by the caller.
                    unsafe { WriteCursor::new(segments, fragment.start, fragment.len) }
                        .copy_to(&mut buf);
                }
                transfer.base = buf.base();
                transfer.pos = pos - u64::from(skip);
                transfer.len = len as u32;
                self.pool[slot].buf = Some(buf);
            }
        }
        Some(transfer)
    }

    /// Handles the end of the transfer of the fragment in `slot`.
    #[inline(never)]
    pub(crate) fn on_fragment_done(&mut self, slot: u32, outcome: Outcome) {
        let request = &self.pool[slot];
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
            let segments = self.pool[parent].segments.as_slice();
            let from = &buf[skip as usize..];
            if !injected_bug::injected(EngineBug::ReplyFromStaleBuffer) {
                // SAFETY: the memory was promised by the caller.
                unsafe { ReadCursor::new(segments, fragment.start, fragment.len) }.copy_from(from);
            }
        }
        self.free_fragment(slot);
        self.record_outcome(parent, result);
        let request = &mut self.pool[parent];
        request.pending -= 1;
        if request.pending == 0 {
            self.resumable.push(parent);
        }
    }

    /// Continues the requests whose submitted fragments have ended, and the deferred ones when
    /// there is no probe request. True when the caller is to submit the queue at once.
    #[inline]
    pub(crate) fn resume_split_requests<Q: IoQueue>(&mut self, queue: &mut Q) -> bool {
        let mut submitted = self.retry_unmerged(queue);
        while let Some(slot) = self.resumable.pop() {
            submitted |= !self.pool[slot].fragments.is_empty();
            self.submit_fragments(queue, slot);
        }
        submitted |= self.retry_deferred(queue);
        self.submit_work();
        submitted
    }
}
