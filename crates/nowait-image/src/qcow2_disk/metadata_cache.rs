//! Cache of an image's metadata blocks: dirty ones until they are written back, and clean copies.
//!
//! Invariant: a dirty block stays here until it is durable in the file. Only one batch is in
//! writeback at a time, and blocks changed meanwhile belong to the next one. So each batch is a
//! snapshot of the metadata at one moment.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use crate::qcow2_disk::damage::Damage;

/// Most bytes of clean blocks.
const CLEAN_BYTES: u64 = 4 << 20;
/// Fewest clean blocks that the limit allows: all blocks that one step needs have to be cached at
/// once.
const MIN_CLEAN: u64 = 8;

/// The stage in which a block is written. All blocks of one stage are durable before the first of
/// the next is written, so that a power cut at any moment leaves leaks at worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum WriteOrder {
    /// Raised refcounts, and new tables that no pointer refers to yet. Data becomes durable in this
    /// stage, too.
    DataAndRefcounts,
    /// Pointers to refcount blocks, and the header's pointer to the refcount table.
    RefcountTable,
    /// Pointers to clusters and L2 tables.
    Mappings,
}

impl WriteOrder {
    /// In the order of writing.
    pub(crate) const ALL: [Self; 3] = [Self::DataAndRefcounts, Self::RefcountTable, Self::Mappings];
}

impl From<Damage> for MetadataError {
    fn from(damage: Damage) -> Self {
        Self::Corrupt(damage)
    }
}

/// Why an operation on the metadata in memory failed. It had no side effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetadataError {
    /// The blocks in these `len` bytes of the file at `pos` are needed.
    NotCached { pos: u64, len: u64 },
    /// The metadata contradicts itself.
    Corrupt(Damage),
    /// A survey has to find the clusters that are in use and have a refcount of 0.
    Unsurveyed,
    /// No room: the file or a table has reached its largest size.
    NoSpace,
}

/// Generation counter. Bumped when a once-dirty block is evicted; a read that started before may
/// return stale data and must not be cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheGeneration(u64);

struct Dirty {
    stage: WriteOrder,
    bytes: Box<[u8]>,
}

struct Clean {
    bytes: Arc<[u8]>,
    was_dirty: bool,
}

/// A block in writeback.
pub(crate) struct WritebackBlock {
    pub(crate) stage: WriteOrder,
    pub(crate) pos: u64,
    pub(crate) bytes: Arc<[u8]>,
}

/// The blocks, keyed by their positions in the file.
pub(crate) struct MetadataCache {
    block: u64,
    dirty: BTreeMap<u64, Dirty>,
    /// The batch that is being written.
    in_writeback: BTreeMap<u64, Arc<[u8]>>,
    clean: HashMap<u64, Clean>,
    /// Positions of clean blocks, the oldest first; some are no longer in `clean`.
    order: VecDeque<u64>,
    generation: u64,
}

impl MetadataCache {
    /// A cache of blocks of `block` bytes, a power of two.
    pub(crate) fn new(block: u64) -> Self {
        Self {
            block,
            dirty: BTreeMap::new(),
            in_writeback: BTreeMap::new(),
            clean: HashMap::new(),
            order: VecDeque::new(),
            generation: 0,
        }
    }

    /// Block size in bytes.
    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    /// Bytes of dirty blocks that are not in writeback yet.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty.len() as u64 * self.block
    }

    /// The block that begins at `pos`.
    pub(crate) fn get(&self, pos: u64) -> Result<&[u8], MetadataError> {
        if let Some(dirty) = self.dirty.get(&pos) {
            return Ok(&dirty.bytes);
        }
        let cached = self.in_writeback.get(&pos).or_else(|| self.clean.get(&pos).map(|c| &c.bytes));
        cached.map(|bytes| &bytes[..]).ok_or(MetadataError::NotCached { pos, len: self.block })
    }

    /// The block that begins at `pos`, to be changed. It is written in `stage`; a block that is
    /// dirty already, such as a new one, keeps its stage.
    pub(crate) fn get_mut(
        &mut self,
        pos: u64,
        stage: WriteOrder,
    ) -> Result<&mut [u8], MetadataError> {
        if !self.dirty.contains_key(&pos) {
            let bytes = Box::from(self.get(pos)?);
            self.clean.remove(&pos);
            self.dirty.insert(pos, Dirty { stage, bytes });
        }
        let missing = MetadataError::NotCached { pos, len: self.block };
        self.dirty.get_mut(&pos).map(|dirty| &mut dirty.bytes[..]).ok_or(missing)
    }

    /// Inserts `bytes` as new dirty blocks from `pos` on. No pointer refers to them yet.
    pub(crate) fn insert_new(&mut self, pos: u64, bytes: &[u8]) {
        let size = self.block as usize;
        for (block, pos) in bytes.chunks(size).zip((pos..).step_by(size)) {
            let mut padded = vec![0; size].into_boxed_slice();
            padded[..block.len()].copy_from_slice(block);
            self.clean.remove(&pos);
            self.dirty.insert(pos, Dirty { stage: WriteOrder::DataAndRefcounts, bytes: padded });
        }
    }

    /// The current generation, to be taken before blocks are read from the file.
    pub(crate) fn generation(&self) -> CacheGeneration {
        CacheGeneration(self.generation)
    }

    /// Caches `bytes`, read from `pos` on. Does nothing if the generation has changed since
    /// `generation` was taken, which was before the read.
    pub(crate) fn insert_clean(&mut self, pos: u64, bytes: &[u8], generation: CacheGeneration) {
        if generation != self.generation() {
            return;
        }
        let size = self.block as usize;
        for (block, pos) in bytes.chunks_exact(size).zip((pos..).step_by(size)) {
            if self.get(pos).is_err() {
                self.insert(pos, Clean { bytes: Arc::from(block), was_dirty: false });
            }
        }
    }

    fn insert(&mut self, pos: u64, clean: Clean) {
        self.clean.insert(pos, clean);
        self.order.push_back(pos);
        let max_blocks = (CLEAN_BYTES / self.block).max(MIN_CLEAN) as usize;
        while self.clean.len() > max_blocks || self.order.len() > 2 * max_blocks {
            let Some(oldest) = self.order.pop_front() else { break };
            let evicted = self.clean.remove(&oldest);
            self.generation += u64::from(evicted.is_some_and(|clean| clean.was_dirty));
        }
    }

    /// Moves all dirty blocks into writeback and returns them sorted by position.
    pub(crate) fn take_batch(&mut self) -> Vec<WritebackBlock> {
        debug_assert!(self.in_writeback.is_empty());
        let mut batch = Vec::with_capacity(self.dirty.len());
        for (pos, Dirty { stage, bytes }) in std::mem::take(&mut self.dirty) {
            let bytes: Arc<[u8]> = Arc::from(bytes);
            self.in_writeback.insert(pos, bytes.clone());
            batch.push(WritebackBlock { stage, pos, bytes });
        }
        batch
    }

    /// Ends the writeback: the batch is durable, and its blocks become clean.
    pub(crate) fn finish_writeback(&mut self) {
        for (pos, bytes) in std::mem::take(&mut self.in_writeback) {
            if !self.dirty.contains_key(&pos) {
                self.insert(pos, Clean { bytes, was_dirty: true });
            }
        }
    }
}
