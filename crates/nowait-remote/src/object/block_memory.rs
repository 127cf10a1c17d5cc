//! The blocks that were read last, in memory: for small reads one after the other, and for what is
//! read ahead.
//!
//! Invariant: never more blocks than its limit; the one that was used longest ago goes first.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// Blocks by their number.
pub(super) struct BlockMemory {
    limit: usize,
    blocks: HashMap<u64, (u64, Rc<[u8]>)>,
    /// Each block by the time of its last use.
    uses: BTreeMap<u64, u64>,
    now: u64,
}

impl BlockMemory {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, blocks: HashMap::new(), uses: BTreeMap::new(), now: 0 }
    }

    /// Whether a block is there; that is no use of it.
    pub(super) fn has(&self, block: u64) -> bool {
        self.blocks.contains_key(&block)
    }

    pub(super) fn get(&mut self, block: u64) -> Option<Rc<[u8]>> {
        let (used, data) = self.blocks.get_mut(&block)?;
        self.uses.remove(used);
        self.now += 1;
        *used = self.now;
        self.uses.insert(self.now, block);
        Some(data.clone())
    }

    pub(super) fn put(&mut self, block: u64, data: Rc<[u8]>) {
        self.now += 1;
        if let Some((used, _)) = self.blocks.insert(block, (self.now, data)) {
            self.uses.remove(&used);
        }
        self.uses.insert(self.now, block);
        while self.blocks.len() > self.limit {
            let Some((_, oldest)) = self.uses.pop_first() else { return };
            self.blocks.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_that_was_used_longest_ago_goes_first() {
        let mut memory = BlockMemory::new(2);
        let data: Rc<[u8]> = Rc::from([1u8].as_slice());
        memory.put(1, data.clone());
        memory.put(2, data.clone());
        assert!(memory.get(1).is_some());
        memory.put(3, data.clone());
        memory.put(3, data);
        let there: Vec<_> = (1..=3).filter(|&block| memory.has(block)).collect();
        assert_eq!(there, [1, 3]);
        assert_eq!(memory.uses.len(), 2);
    }
}
