//! The run of requests that touch on storage: which requests it takes, and their memory as a list.
//!
//! Invariant: a run has the bytes of its requests in their order, without a gap, and no more than
//! one transfer may move.

use crate::blocking::joined_writes::{MAX_BYTES, MAX_PART_BYTES};
use crate::types::iovec::{IoSegment, MAX_SEGMENTS};
use crate::types::transfer::{Transfer, UNREGISTERED};

/// Segments for which a list has room from the start: blocks of 4 KiB.
const USUAL_SEGMENTS: usize = MAX_BYTES as usize / 4096;
/// Neighbours that are not merged after a merged transfer that was not done as a whole. A file that
/// refuses what spans two of its extents would refuse most of them.
pub(crate) const PAUSE: u32 = 64;

/// The requests that become one transfer.
pub(crate) struct Run {
    /// Its first and its last slot; `RequestSlot::next` links them, except after the last.
    pub(crate) head: u32,
    pub(crate) tail: u32,
    pub(crate) requests: u32,
    /// That of the first request, with the length of all.
    pub(crate) transfer: Transfer,
    /// The index of its list of segments; unused for one request.
    pub(crate) list: u32,
}

/// The merged transfers of an engine.
pub(crate) struct Merger {
    on: bool,
    /// Devices with an open run.
    pub(crate) open: Vec<u32>,
    /// The segments of the merged transfers in flight.
    pub(crate) lists: Vec<Vec<IoSegment>>,
    pub(crate) free_lists: Vec<u32>,
    /// Requests of merged transfers that were not done as a whole; each makes its own transfer.
    pub(crate) again: Vec<u32>,
}

impl Merger {
    pub(crate) fn new(on: bool) -> Self {
        let (open, lists, free_lists, again) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { on, open, lists, free_lists, again }
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

    /// Leaks the lists that the kernel or another thread may still read.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(std::mem::replace(self, Self::new(false)));
    }

    /// Whether a request with this transfer may be merged with others; `pause` is that of its device.
    pub(crate) fn takes(&self, transfer: &Transfer, pause: &mut u32) -> bool {
        if !self.on || transfer.len > MAX_PART_BYTES {
            return false;
        }
        if *pause > 0 {
            *pause -= 1;
            return false;
        }
        // What is durable or polled for, is so as the transfer of one request.
        transfer.rw_flags & (libc::RWF_DSYNC | libc::RWF_HIPRI) == 0
    }

    /// If the request in `slot` now belongs to the open `run` of its device, the slot before it.
    pub(crate) fn join(&mut self, run: &mut Run, slot: u32, next: &Transfer) -> Option<u32> {
        let all = &mut run.transfer;
        let touches = next.pos == all.pos + u64::from(all.len)
            && (next.file, next.write) == (all.file, all.write)
            && (next.rw_flags, next.must_not_wait) == (all.rw_flags, all.must_not_wait);
        if !touches || all.len + next.len > MAX_BYTES || run.requests as usize == MAX_SEGMENTS {
            return None;
        }
        if run.requests == 1 {
            run.list = self.free_lists.pop().unwrap_or_else(|| {
                self.lists.push(Vec::with_capacity(USUAL_SEGMENTS));
                self.lists.len() as u32 - 1
            });
            let list = &mut self.lists[run.list as usize];
            list.clear();
            list.push(IoSegment { base: all.base, len: all.len as usize });
        }
        let list = &mut self.lists[run.list as usize];
        let len = next.len as usize;
        match list.last_mut() {
            Some(last) if last.base.wrapping_add(last.len) == next.base => last.len += len,
            _ => list.push(IoSegment { base: next.base, len }),
        }
        if all.buffer != next.buffer {
            all.buffer = UNREGISTERED;
        }
        all.len += next.len;
        run.requests += 1;
        Some(std::mem::replace(&mut run.tail, slot))
    }
}
