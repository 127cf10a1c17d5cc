//! Blocks of a simulated disk that have storage before they are written.
//!
//! Invariant: an unwritten block reads as zeros.

use crate::sim::sim_disk::{BLOCK_BYTES, Block, SimDisk};
use crate::types::byte_range::ByteRange;

impl SimDisk {
    /// Allocates the holes in `range`, as far as there is room; false if that is not all.
    pub(crate) fn preallocate(&mut self, range: ByteRange) -> bool {
        self.back(range, Block::Unwritten) == range.len
    }

    /// The blocks that `range` touches and that have storage but were never written.
    pub(crate) fn unwritten(&self, range: ByteRange) -> Vec<ByteRange> {
        let unwritten = |n: &usize| self.blocks.get(*n) == Some(&Block::Unwritten);
        let block = |n| ByteRange::new(n as u64 * BLOCK_BYTES, BLOCK_BYTES);
        Self::blocks_of(range).filter(unwritten).map(block).collect()
    }

    /// Bytes that are allocated.
    pub(crate) fn allocated(&self) -> u64 {
        self.backed * BLOCK_BYTES
    }
}
