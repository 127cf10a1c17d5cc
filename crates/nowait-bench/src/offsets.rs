//! The offsets of requests: random or sequential, endless or each offset once.
//!
//! Invariant: every offset is a multiple of the block size and its block lies in the region.

use fastrand::Rng;

use crate::workload::Order;

/// Blocks of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    /// The start, a multiple of `block`.
    pub(crate) start: u64,
    /// The length; an incomplete block at the end is not used.
    pub(crate) bytes: u64,
    /// The size of one request.
    pub(crate) block: u64,
}

impl Region {
    pub(crate) fn blocks(self) -> u64 {
        self.bytes / self.block
    }

    /// The part of job number `job`, counted from 0, if `jobs` jobs share the region.
    pub(crate) fn part(self, job: u64, jobs: u64) -> Region {
        let blocks = self.blocks() / jobs;
        Region { start: self.start + job * blocks * self.block, bytes: blocks * self.block, ..self }
    }
}

enum OffsetOrder {
    Random(Rng),
    Sequential,
    /// The blocks not used yet, the next one last.
    Once(Vec<u64>),
}

/// The offsets of requests.
pub(crate) struct Offsets {
    region: Region,
    order: OffsetOrder,
    next: u64,
}

impl Offsets {
    /// Offsets without end, which repeat. Sequential ones begin with block number `first`, random
    /// ones differ for each `first`.
    pub(crate) fn endless(order: Order, region: Region, first: u64) -> Offsets {
        let order = match order {
            Order::Random => OffsetOrder::Random(Rng::with_seed(first)),
            Order::Sequential => OffsetOrder::Sequential,
        };
        Offsets { region, order, next: first }
    }

    /// Each block once.
    pub(crate) fn once(order: Order, region: Region, seed: u64) -> Offsets {
        let mut blocks: Vec<u64> = (0..region.blocks()).rev().collect();
        if order == Order::Random {
            Rng::with_seed(seed).shuffle(&mut blocks);
        }
        Offsets { region, order: OffsetOrder::Once(blocks), next: 0 }
    }

    /// The offset of the next request; `None` after each block was used once.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<u64> {
        let blocks = self.region.blocks();
        let block = match &mut self.order {
            OffsetOrder::Random(random) => random.u64(..blocks),
            OffsetOrder::Once(left) => left.pop()?,
            OffsetOrder::Sequential => {
                let block = self.next;
                self.next = if block + 1 < blocks { block + 1 } else { 0 };
                block
            }
        };
        Some(self.region.start + block * self.region.block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION: Region = Region { start: 8192, bytes: 4 * 4096 + 100, block: 4096 };

    #[test]
    fn endless_offsets_stay_in_the_region_and_repeat() {
        for order in [Order::Random, Order::Sequential] {
            let mut offsets = Offsets::endless(order, REGION, 2);
            let mut seen: Vec<u64> = (0..2000).filter_map(|_| offsets.next()).collect();
            assert_eq!(seen.len(), 2000);
            if order == Order::Sequential {
                assert_eq!(seen[..4], [16384, 20480, 8192, 12288]);
            }
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen, [8192, 12288, 16384, 20480]);
        }
    }

    #[test]
    fn offsets_of_one_pass_are_each_block_once() {
        let all = |order| {
            let mut offsets = Offsets::once(order, REGION, 3);
            std::iter::from_fn(move || offsets.next()).collect::<Vec<u64>>()
        };
        assert_eq!(all(Order::Sequential), [8192, 12288, 16384, 20480]);
        let mut random = all(Order::Random);
        random.sort_unstable();
        assert_eq!(random, [8192, 12288, 16384, 20480]);
    }

    #[test]
    fn parts_of_a_region_do_not_overlap() {
        let parts = [0, 1].map(|job| REGION.part(job, 2));
        assert_eq!(parts.map(|part| (part.start, part.bytes)), [(8192, 8192), (16384, 8192)]);
    }
}
