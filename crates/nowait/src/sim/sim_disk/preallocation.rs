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

    /// The blocks that `range` touches and that have storage but were never written. Behind the end
    /// there are none: a file that is cut loses its storage there.
    pub(crate) fn unwritten(&self, range: ByteRange) -> Vec<ByteRange> {
        let end = self.size.div_ceil(BLOCK_BYTES) as usize;
        let unwritten = |n: &usize| *n < end && self.blocks.get(*n) == Some(&Block::Unwritten);
        let block = |n| ByteRange::new(n as u64 * BLOCK_BYTES, BLOCK_BYTES);
        Self::blocks_of(range).filter(unwritten).map(block).collect()
    }

    /// Whether no block that `range` touches holds bytes that were written.
    pub(crate) fn was_never_written(&self, range: ByteRange) -> bool {
        let blocks = self.blocks.get(Self::blocks_of(range)).unwrap_or_default();
        !blocks.contains(&Block::Mapped)
    }

    /// Bytes that are allocated.
    pub(crate) fn allocated(&self) -> u64 {
        self.backed * BLOCK_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::random::Random;

    #[test]
    fn storage_behind_the_end_of_a_cut_device_is_not_listed() {
        let mut media = SimDisk::new(16384, 512, u64::MAX);
        let range = ByteRange::new(4096, 12288);
        assert!(media.preallocate(range));
        media.shrink(8192);
        assert_eq!(media.unwritten(range), [ByteRange::new(4096, 4096)]);
    }

    #[test]
    fn a_power_cut_makes_no_garbage_of_storage_that_is_given_back_unused() {
        let range = ByteRange::new(4096, 8192);
        for seed in 0..100 {
            let mut media = SimDisk::new(16384, 512, u64::MAX);
            assert!(media.preallocate(range));
            let change = media.zero(range, false).unwrap();
            media.reported(change);
            assert_eq!(media.cut(&mut Random::new(seed), u16::MAX), []);
            assert!(media.read(range).iter().all(|&byte| byte == 0));
        }
    }
}
