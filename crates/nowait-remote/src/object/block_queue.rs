//! Blocks that wait for something, in the order in which they came.
//!
//! Invariant: a block is in a queue at most once.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use crate::policy::block_runs;

/// A queue of blocks.
#[derive(Default)]
pub(super) struct BlockQueue {
    blocks: BTreeSet<u64>,
    /// Also those that have left.
    order: VecDeque<u64>,
}

impl BlockQueue {
    pub(super) fn push(&mut self, block: u64) {
        if self.blocks.insert(block) {
            self.order.push_back(block);
        }
    }

    /// Returns whether the block was there.
    pub(super) fn remove(&mut self, block: u64) -> bool {
        self.blocks.remove(&block)
    }

    /// Takes the block that came first, and those behind it that are there too, at most `longest`.
    pub(super) fn next_run(&mut self, longest: u64) -> Option<Range<u64>> {
        while let Some(first) = self.order.pop_front() {
            let run = block_runs(self.blocks.range(first..).copied(), longest).next();
            // It has left with another one, or alone.
            let Some(run) = run.filter(|run| run.start == first) else { continue };
            for block in run.clone() {
                self.blocks.remove(&block);
            }
            return Some(run);
        }
        None
    }

    /// Takes all blocks.
    pub(super) fn drain(&mut self) -> BTreeSet<u64> {
        self.order.clear();
        std::mem::take(&mut self.blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_come_in_the_order_of_their_first_blocks_and_each_block_once() {
        let mut queue = BlockQueue::default();
        [9, 3, 4, 3, 20, 5, 10].into_iter().for_each(|block| queue.push(block));
        assert!(queue.remove(20) && !queue.remove(20));
        let runs: Vec<_> = std::iter::from_fn(|| queue.next_run(2)).collect();
        assert_eq!(runs, [9..11, 3..5, 5..6]);
        queue.push(3);
        assert_eq!(queue.next_run(64), Some(3..4));
    }
}
