//! Changes of an export while its disk is copied.
//!
//! Invariant: a change that a client was told of is in the tracker, or was taken from it after the change had ended.

use std::sync::Arc;

use nowait::ByteRange;

use crate::dirty_bitmaps::dirty_bitmap::DirtyBitmap;
use crate::exports::changed_ranges::ChangedRanges;
use crate::registered_export::RegisteredExport;

/// The changes of an export since they were taken last, in granules of 64 KiB, or larger ones of disks beyond 2 TiB. No
/// client and no user sees it. It ends when this is dropped.
pub struct ChangeTracker {
    export: Arc<RegisteredExport>,
    bits: Arc<DirtyBitmap>,
}

impl ChangeTracker {
    /// The tracker of `export` that has its changes in `bits`.
    pub(crate) fn new(export: Arc<RegisteredExport>, bits: Arc<DirtyBitmap>) -> Self {
        Self { export, bits }
    }

    fn size(&self) -> u64 {
        self.export.export().disk().size()
    }

    /// Bytes of the disk that are changed.
    #[must_use]
    pub fn changed_bytes(&self) -> u64 {
        self.bits.dirty_bytes(self.size())
    }
}

impl ChangedRanges for ChangeTracker {
    fn take(&self, from: u64, most: usize) -> Vec<ByteRange> {
        self.bits.take(from, self.size(), most)
    }

    fn put_back(&self, ranges: &[ByteRange]) {
        ranges.iter().for_each(|range| _ = self.bits.set(*range));
    }
}

impl Drop for ChangeTracker {
    fn drop(&mut self) {
        self.export.bitmaps.remove_tracker(&self.bits);
    }
}
