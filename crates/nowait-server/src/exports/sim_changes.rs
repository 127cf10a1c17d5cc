//! The changes of a disk that moves, without a server, for simulations.
//!
//! Invariant: they are noted as those of an export are.

use std::cell::RefCell;
use std::sync::Arc;

use nowait::{ByteRange, Request};

use crate::dirty_bitmaps::bitmap_spec::BitmapError;
use crate::dirty_bitmaps::dirty_bitmap::DirtyBitmap;
use crate::dirty_bitmaps::{DirtyBitmaps, EnabledBitmaps};
use crate::exports::changed_ranges::ChangedRanges;

/// Changes since this was made, or since they were taken.
pub struct SimChanges {
    all: DirtyBitmaps,
    known: RefCell<EnabledBitmaps>,
    bits: Arc<DirtyBitmap>,
    size: u64,
}

impl SimChanges {
    /// Nothing has changed yet of a disk of `size` bytes.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn new(size: u64) -> Result<Self, BitmapError> {
        let all = DirtyBitmaps::default();
        let bits = all.add_tracker(size)?;
        Ok(Self { all, known: RefCell::default(), bits, size })
    }

    /// Notes a request that has ended.
    pub fn mark(&self, io: Request) {
        self.known.borrow_mut().mark(&self.all, io);
    }
}

impl ChangedRanges for SimChanges {
    fn take(&self, from: u64, most: usize) -> Vec<ByteRange> {
        self.bits.take(from, self.size, most)
    }

    fn put_back(&self, ranges: &[ByteRange]) {
        ranges.iter().for_each(|range| _ = self.bits.set(*range));
    }
}
