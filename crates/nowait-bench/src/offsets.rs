//! The offsets of requests: random or sequential, endless or each offset once.
//!
//! Invariant: every offset is a multiple of the block size and its block lies in the region.

use crate::workload::Order;

/// Marsaglia's xorshift with Vigna's multiplication (xorshift64*): cheap, and random enough for
/// positions and incompressible data.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn seeded(seed: u64) -> Random {
        // The state must not be zero; the odd constant spreads neighbouring seeds apart.
        Random((seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d).max(1))
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            piece.copy_from_slice(&self.next().to_ne_bytes()[..piece.len()]);
        }
    }
}

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
    Random(Random),
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
            Order::Random => OffsetOrder::Random(Random::seeded(first + 1)),
            Order::Sequential => OffsetOrder::Sequential,
        };
        Offsets { region, order, next: first }
    }

    /// Each block once.
    pub(crate) fn once(order: Order, region: Region, seed: u64) -> Offsets {
        let mut blocks: Vec<u64> = (0..region.blocks()).rev().collect();
        if order == Order::Random {
            let mut random = Random::seeded(seed);
            for last in (1..blocks.len()).rev() {
                blocks.swap(last, random.below(last as u64 + 1) as usize);
            }
        }
        Offsets { region, order: OffsetOrder::Once(blocks), next: 0 }
    }

    /// The offset of the next request; `None` after each block was used once.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<u64> {
        let blocks = self.region.blocks();
        let block = match &mut self.order {
            OffsetOrder::Random(random) => random.below(blocks),
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
