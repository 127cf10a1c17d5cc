//! A transfer to a storage that ends its transfers itself, on a thread of its own: what such a
//! storage is given, and by what it ends the transfer.
//!
//! Invariant: the memory is accessed only between the push and the end of the transfer, through the
//! one `PendingTransfer` that exists of it; a transfer that is dropped ends with `EIO`.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::threads::completion_list::CompletionList;
use crate::types::byte_range::ByteRange;
use crate::types::iovec::{IoSegment, slice_segments};
use crate::types::transfer::{Outcome, Transfer};

/// A storage that makes transfers on threads of its own.
pub trait AsyncTransfers: Send + Sync {
    /// Begins all of `transfers`, at least one, in any order, and leaves the list empty. It does not wait.
    fn begin(&self, transfers: &mut Vec<PendingTransfer>);
}

/// A transfer that was begun and has not ended.
pub struct PendingTransfer {
    transfer: Transfer,
    slot: u32,
    completions: Arc<CompletionList>,
    ended: bool,
}

// SAFETY: the memory stays valid until the end of the transfer and is not accessed otherwise, as the
// caller of `PendingTransfer::new` promised; it may be accessed on any thread.
unsafe impl Send for PendingTransfer {}

impl PendingTransfer {
    /// `transfer`, whose end is reported to `completions` as that of `slot`.
    ///
    /// # Safety
    /// Until then the memory that `transfer` names is valid, initialised and not accessed otherwise
    /// (not written, for a transfer to the device).
    pub(crate) unsafe fn new(
        transfer: Transfer,
        slot: u32,
        completions: Arc<CompletionList>,
    ) -> Self {
        Self { transfer, slot, completions, ended: false }
    }

    /// The slot of its token.
    pub(crate) const fn slot(&self) -> u32 {
        self.slot
    }

    /// The bytes of the storage that are moved.
    #[must_use]
    pub fn range(&self) -> ByteRange {
        ByteRange::new(self.transfer.pos, u64::from(self.transfer.len))
    }

    /// Whether it is a write.
    #[must_use]
    pub fn is_write(&self) -> bool {
        self.transfer.write
    }

    /// Whether the bytes of a write are to be durable when it ends.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.transfer.rw_flags & libc::RWF_DSYNC != 0
    }

    fn for_each_segment(&self, mut visit: impl FnMut(IoSegment)) {
        let Transfer { base, len, segments, .. } = self.transfer;
        if segments == 0 {
            return visit(IoSegment { base, len: len as usize });
        }
        // SAFETY: `base` is an array of as many segments, valid as the memory is.
        let all = unsafe { std::slice::from_raw_parts(base.cast(), usize::from(segments)) };
        slice_segments(all, 0, u64::from(len), visit);
    }

    /// Appends the memory to `segments`, in the order of the bytes, without empty parts.
    ///
    /// Until the transfer ends it is valid and initialised; nothing else accesses it, or for a write
    /// nothing else changes it.
    pub fn segments(&self, segments: &mut Vec<IoSegment>) {
        self.for_each_segment(|segment| {
            if segment.len > 0 {
                segments.push(segment);
            }
        });
    }

    /// Appends the data of a write to `data`. Of a read nothing is appended.
    pub fn copy_data(&self, data: &mut Vec<u8>) {
        if self.transfer.write {
            self.for_each_segment(|IoSegment { base, len }| {
                // SAFETY: as promised to `new`.
                data.extend_from_slice(unsafe { std::slice::from_raw_parts(base, len) });
            });
        }
    }

    /// Ends a read with the bytes of `data`, at most all of the range, or a write of which as many
    /// bytes are in the storage.
    pub fn complete(mut self, data: &[u8]) {
        let mut rest = data;
        let mut done = 0;
        let write = self.transfer.write;
        self.for_each_segment(|IoSegment { base, len }| {
            let (now, after) = rest.split_at(len.min(rest.len()));
            if !write {
                // SAFETY: as promised to `new`; `data` is borrowed from elsewhere.
                unsafe { base.copy_from_nonoverlapping(now.as_ptr(), now.len()) };
            }
            done += now.len();
            rest = after;
        });
        self.end(done as Outcome);
    }

    /// Ends a read whose first `bytes` bytes, at most all of the range, were put into the memory of
    /// [`PendingTransfer::segments`].
    pub fn complete_filled(mut self, bytes: u64) {
        self.end(bytes.min(u64::from(self.transfer.len)) as Outcome);
    }

    /// Ends a write of all bytes.
    pub fn complete_write(mut self) {
        self.end(self.transfer.len as Outcome);
    }

    /// Ends the transfer with a positive `errno`.
    pub fn fail(mut self, errno: i32) {
        self.end(-errno);
    }

    fn end(&mut self, outcome: Outcome) {
        self.ended = true;
        self.completions.push(self.slot, i64::from(outcome));
    }
}

impl Drop for PendingTransfer {
    fn drop(&mut self) {
        if !self.ended {
            self.end(-libc::EIO);
        }
    }
}
