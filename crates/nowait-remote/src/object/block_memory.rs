//! The blocks that were read last, in memory: for small reads one after the other, and for what is
//! read ahead.
//!
//! Invariant: never more blocks of an object than its limit, and never more bytes of all objects of this process than
//! theirs; of these the block that was used longest ago goes first.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::store_counters::MemoryCounts;

/// The least bytes of all objects: two requests.
pub const MIN_BLOCK_MEMORY: u64 = 8 << 20;
/// The most bytes of memory for blocks of all objects, unless another number is given.
/// Beyond it: the block that was used longest ago goes.
pub const BLOCK_MEMORY: u64 = 256 << 20;

static ALL: LazyLock<Arc<Pool>> = LazyLock::new(|| Arc::new(Pool::new(BLOCK_MEMORY)));

/// From now on the blocks of all objects of this process have at most `bytes` bytes of memory, at least
/// [`MIN_BLOCK_MEMORY`].
pub fn limit_block_memory(bytes: u64) {
    let mut blocks = ALL.lock();
    blocks.limit = bytes.max(MIN_BLOCK_MEMORY);
    blocks.shrink();
}

/// The memory for the blocks of all objects of this process, as of now.
#[must_use]
pub fn block_memory() -> MemoryCounts {
    let blocks = ALL.lock();
    MemoryCounts { block_memory_bytes: blocks.bytes, max_block_memory_bytes: blocks.limit }
}

struct Entry {
    used: u64,
    data: Arc<[u8]>,
    /// Whether it came from the store just now, not from the cache.
    fetched: bool,
}

/// The blocks of all objects.
struct Pool(Mutex<Blocks>);

#[derive(Default)]
struct Blocks {
    limit: u64,
    bytes: u64,
    /// By the number of the object and their own.
    entries: HashMap<(u64, u64), Entry>,
    /// Each block by the time of its last use.
    uses: BTreeMap<u64, (u64, u64)>,
    /// The uses of the blocks of each object.
    objects: HashMap<u64, BTreeMap<u64, u64>>,
    now: u64,
    next_object: u64,
}

impl Pool {
    fn new(limit: u64) -> Self {
        Self(Mutex::new(Blocks { limit, ..Blocks::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Blocks {
    /// Adds `entry`, as used now.
    fn insert(&mut self, (object, block): (u64, u64), data: Arc<[u8]>, fetched: bool) {
        self.remove((object, block));
        self.now += 1;
        self.bytes += data.len() as u64;
        self.uses.insert(self.now, (object, block));
        self.objects.entry(object).or_default().insert(self.now, block);
        self.entries.insert((object, block), Entry { used: self.now, data, fetched });
    }

    fn remove(&mut self, (object, block): (u64, u64)) -> Option<Entry> {
        let entry = self.entries.remove(&(object, block))?;
        self.bytes -= entry.data.len() as u64;
        self.uses.remove(&entry.used);
        if let Some(uses) = self.objects.get_mut(&object) {
            uses.remove(&entry.used);
        }
        Some(entry)
    }

    /// Removes the least recently used block, if there is no room for `bytes` more.
    fn take_oldest_for(&mut self, bytes: u64) -> Option<Arc<[u8]>> {
        let oldest = self.uses.first_key_value().map(|(_, &oldest)| oldest);
        let oldest = oldest.filter(|_| self.bytes + bytes > self.limit)?;
        self.remove(oldest).map(|entry| entry.data)
    }

    /// Removes blocks until the limit is kept.
    fn shrink(&mut self) {
        while self.bytes > self.limit {
            let Some((_, &oldest)) = self.uses.first_key_value() else { return };
            self.remove(oldest);
        }
    }
}

/// The blocks of one object by their number.
pub(super) struct BlockMemory {
    pool: Arc<Pool>,
    object: u64,
    /// The most blocks.
    limit: usize,
}

impl BlockMemory {
    /// At most `limit` blocks.
    pub(super) fn new(limit: usize) -> Self {
        Self::of(ALL.clone(), limit)
    }

    fn of(pool: Arc<Pool>, limit: usize) -> Self {
        let object = {
            let mut blocks = pool.lock();
            blocks.next_object += 1;
            blocks.next_object
        };
        Self { pool, object, limit }
    }

    /// Whether a block is there; a look is not a use.
    pub(super) fn has(&self, block: u64) -> bool {
        self.pool.lock().entries.contains_key(&(self.object, block))
    }

    pub(super) fn get(&self, block: u64) -> Option<Arc<[u8]>> {
        let mut blocks = self.pool.lock();
        let Entry { data, fetched, .. } = blocks.remove((self.object, block))?;
        blocks.insert((self.object, block), data.clone(), fetched);
        Some(data)
    }

    /// Whether a block is there that came from the store, not from the cache; a look is not a use.
    pub(super) fn has_fetched(&self, block: u64) -> bool {
        self.pool.lock().entries.get(&(self.object, block)).is_some_and(|entry| entry.fetched)
    }

    /// A copy of `bytes`, to be put here. If the limit is reached, it reuses the memory of the least recently used block, so
    /// that the allocator of no thread keeps memory of removed blocks.
    pub(super) fn copied(&self, bytes: &[u8]) -> Arc<[u8]> {
        let oldest = self.pool.lock().take_oldest_for(bytes.len() as u64);
        if let Some(mut block) = oldest
            && let Some(memory) = Arc::get_mut(&mut block).filter(|it| it.len() == bytes.len())
        {
            memory.copy_from_slice(bytes);
            return block;
        }
        Arc::from(bytes)
    }

    pub(super) fn put(&self, block: u64, data: Arc<[u8]>, fetched: bool) {
        let mut blocks = self.pool.lock();
        blocks.insert((self.object, block), data, fetched);
        while let Some(uses) = blocks.objects.get(&self.object).filter(|it| it.len() > self.limit) {
            let Some((_, &oldest)) = uses.first_key_value() else { break };
            blocks.remove((self.object, oldest));
        }
        blocks.shrink();
    }
}

impl Drop for BlockMemory {
    fn drop(&mut self) {
        let mut blocks = self.pool.lock();
        let uses = blocks.objects.remove(&self.object).unwrap_or_default();
        for block in uses.into_values() {
            blocks.remove((self.object, block));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(len: usize) -> Arc<[u8]> {
        vec![1; len].into()
    }

    fn there(memory: &BlockMemory) -> Vec<u64> {
        (1..=9).filter(|&block| memory.has(block)).collect()
    }

    #[test]
    fn the_block_that_was_used_longest_ago_goes_first() {
        let memory = BlockMemory::of(Arc::new(Pool::new(100)), 2);
        memory.put(1, data(1), true);
        memory.put(2, data(1), true);
        assert!(memory.get(1).is_some());
        memory.put(3, data(1), true);
        memory.put(3, data(1), false);
        assert_eq!(there(&memory), [1, 3]);
        assert!(memory.has_fetched(1) && !memory.has_fetched(3));
        assert_eq!(memory.pool.lock().uses.len(), 2);
    }

    #[test]
    fn a_new_block_has_the_memory_of_the_one_that_goes_unless_a_read_has_it_still() {
        let memory = BlockMemory::of(Arc::new(Pool::new(20)), 9);
        (1..=2).for_each(|block| memory.put(block, memory.copied(&[1; 10]), true));
        let first = Arc::as_ptr(&memory.get(1).unwrap());
        let held = memory.get(2).unwrap();
        let third = memory.copied(&[3; 10]);
        assert!(std::ptr::addr_eq(Arc::as_ptr(&third), first) && third[..] == [3; 10]);
        memory.put(3, third, true);
        let fourth = memory.copied(&[4; 10]);
        assert!(held[..] == [1; 10] && fourth[..] == [4; 10]);
        memory.put(4, fourth, true);
        assert_eq!(there(&memory), [3, 4]);
    }

    #[test]
    fn all_objects_have_one_limit_and_the_block_of_any_that_was_used_longest_ago_goes_first() {
        let pool = Arc::new(Pool::new(40));
        let [one, two] = [0, 1].map(|_| BlockMemory::of(pool.clone(), 9));
        (1..=3).for_each(|block| one.put(block, data(10), true));
        two.put(1, data(10), true);
        assert!(one.get(1).is_some());
        two.put(2, data(10), true);
        assert_eq!((there(&one), there(&two)), (vec![1, 3], vec![1, 2]));
        // One that is longer than another two.
        two.put(3, data(15), true);
        assert_eq!((there(&one), there(&two)), (vec![1], vec![2, 3]));
        assert_eq!(pool.lock().bytes, 35);
        pool.lock().limit = 20;
        pool.lock().shrink();
        assert_eq!((there(&one), there(&two)), (vec![], vec![3]));
        one.put(7, data(5), true);
        drop(two);
        let blocks = pool.lock();
        assert_eq!((blocks.bytes, blocks.entries.len(), blocks.uses.len()), (5, 1, 1));
        assert_eq!(blocks.objects.len(), 1);
    }
}
