//! The blocks that were read last, in memory: for small reads one after the other, and for what is
//! read ahead.
//!
//! Invariant: never more blocks than its limit; the one that was used longest ago goes first.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

struct Entry {
    used: u64,
    data: Rc<[u8]>,
    /// Whether it came from the store just now, not from the cache.
    fetched: bool,
}

/// Blocks by their number.
pub(super) struct BlockMemory {
    limit: usize,
    blocks: HashMap<u64, Entry>,
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
        let entry = self.blocks.get_mut(&block)?;
        self.uses.remove(&entry.used);
        self.now += 1;
        entry.used = self.now;
        self.uses.insert(self.now, block);
        Some(entry.data.clone())
    }

    /// Whether a block is there that came from the store, not from the cache; that is no use of it.
    pub(super) fn has_fetched(&self, block: u64) -> bool {
        self.blocks.get(&block).is_some_and(|entry| entry.fetched)
    }

    pub(super) fn put(&mut self, block: u64, data: Rc<[u8]>, fetched: bool) {
        self.now += 1;
        let entry = Entry { used: self.now, data, fetched };
        if let Some(before) = self.blocks.insert(block, entry) {
            self.uses.remove(&before.used);
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
        memory.put(1, data.clone(), true);
        memory.put(2, data.clone(), true);
        assert!(memory.get(1).is_some());
        memory.put(3, data.clone(), true);
        memory.put(3, data, false);
        let there: Vec<_> = (1..=3).filter(|&block| memory.has(block)).collect();
        assert_eq!(there, [1, 3]);
        assert!(memory.has_fetched(1) && !memory.has_fetched(3));
        assert_eq!(memory.uses.len(), 2);
    }
}
