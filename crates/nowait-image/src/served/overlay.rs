//! Blocks of an image's metadata in memory: changed ones on their way to the file, and copies.
//!
//! Invariant: a block that was changed is here until it is in the file and durable; between the
//! taking of a batch and its settling no other is taken, and what is changed meanwhile belongs to
//! the next one. So each batch is the metadata as it was at one moment.
//! Knows: nothing. Known by: counts, meta, store.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

/// Bytes of unchanged blocks that are kept.
const CLEAN_BYTES: u64 = 4 << 20;

/// When a block is written, so that at any moment a power cut leaves leaks at worst. Everything of
/// one stage is durable before anything of the next is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// Counts that go up, and tables that nothing points to yet. With these goes the data.
    Ahead,
    /// Where the counts are: the refcount table, and where that is.
    CountTables,
    /// Pointers to clusters and tables.
    Pointers,
}

impl Stage {
    /// In the order of writing.
    pub(crate) const ALL: [Self; 3] = [Self::Ahead, Self::CountTables, Self::Pointers];
}

/// Why something could not be done with what is in memory. Nothing was changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The blocks in these bytes of the file are needed.
    Missing { pos: u64, len: u64 },
    /// The metadata contradicts itself.
    Damaged,
    /// There is no room: the file or a table is as large as can be.
    Full,
}

/// A number that changes when a block is forgotten that was changed before: what was read from the
/// file earlier may be older.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

struct Dirty {
    stage: Stage,
    bytes: Box<[u8]>,
}

struct Clean {
    bytes: Arc<[u8]>,
    was_changed: bool,
}

/// A block that is to be written.
pub(crate) struct Outgoing {
    pub(crate) stage: Stage,
    pub(crate) pos: u64,
    pub(crate) bytes: Arc<[u8]>,
}

/// The blocks, by their positions in the file.
pub(crate) struct Overlay {
    block: u64,
    dirty: BTreeMap<u64, Dirty>,
    /// Being written.
    moving: BTreeMap<u64, Arc<[u8]>>,
    clean: HashMap<u64, Clean>,
    /// Clean ones, the oldest first; some are there no more.
    order: VecDeque<u64>,
    forgotten: u64,
}

impl Overlay {
    /// With blocks of `block` bytes, a power of two.
    pub(crate) fn new(block: u64) -> Self {
        Self {
            block,
            dirty: BTreeMap::new(),
            moving: BTreeMap::new(),
            clean: HashMap::new(),
            order: VecDeque::new(),
            forgotten: 0,
        }
    }

    /// Bytes of a block.
    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    /// Bytes that are changed and not on their way yet.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty.len() as u64 * self.block
    }

    /// The block that begins at `pos`.
    pub(crate) fn get(&self, pos: u64) -> Result<&[u8], Stop> {
        if let Some(dirty) = self.dirty.get(&pos) {
            return Ok(&dirty.bytes);
        }
        let copy = self.moving.get(&pos).or_else(|| self.clean.get(&pos).map(|c| &c.bytes));
        copy.map(|bytes| &bytes[..]).ok_or(Stop::Missing { pos, len: self.block })
    }

    /// The block that begins at `pos`, to be changed: it will be written in `stage`, or with what
    /// nothing points to yet if it is new itself.
    pub(crate) fn edit(&mut self, pos: u64, stage: Stage) -> Result<&mut [u8], Stop> {
        if !self.dirty.contains_key(&pos) {
            let bytes = Box::from(self.get(pos)?);
            self.clean.remove(&pos);
            self.dirty.insert(pos, Dirty { stage, bytes });
        }
        let missing = Stop::Missing { pos, len: self.block };
        self.dirty.get_mut(&pos).map(|dirty| &mut dirty.bytes[..]).ok_or(missing)
    }

    /// Makes the bytes from `pos` on, whole blocks that nothing points to yet, be `bytes`.
    pub(crate) fn put_new(&mut self, pos: u64, bytes: &[u8]) {
        let size = self.block as usize;
        for (block, pos) in bytes.chunks(size).zip((pos..).step_by(size)) {
            let mut whole = vec![0; size].into_boxed_slice();
            whole[..block.len()].copy_from_slice(block);
            self.clean.remove(&pos);
            self.dirty.insert(pos, Dirty { stage: Stage::Ahead, bytes: whole });
        }
    }

    /// To be taken before blocks are read from the file.
    pub(crate) fn ticket(&self) -> Ticket {
        Ticket(self.forgotten)
    }

    /// Keeps what was read from the file since `ticket`, from `pos` on.
    pub(crate) fn supply(&mut self, pos: u64, bytes: &[u8], ticket: Ticket) {
        if ticket != self.ticket() {
            return;
        }
        let size = self.block as usize;
        for (block, pos) in bytes.chunks_exact(size).zip((pos..).step_by(size)) {
            if self.get(pos).is_err() {
                self.keep(pos, Clean { bytes: Arc::from(block), was_changed: false });
            }
        }
    }

    fn keep(&mut self, pos: u64, clean: Clean) {
        self.clean.insert(pos, clean);
        self.order.push_back(pos);
        let most = (CLEAN_BYTES / self.block).max(2) as usize;
        while self.clean.len() > most || self.order.len() > 2 * most {
            let Some(oldest) = self.order.pop_front() else { break };
            let gone = self.clean.remove(&oldest);
            self.forgotten += u64::from(gone.is_some_and(|clean| clean.was_changed));
        }
    }

    /// Takes all that is changed, in the order of positions.
    pub(crate) fn take_batch(&mut self) -> Vec<Outgoing> {
        debug_assert!(self.moving.is_empty());
        let mut batch = Vec::with_capacity(self.dirty.len());
        for (pos, Dirty { stage, bytes }) in std::mem::take(&mut self.dirty) {
            let bytes: Arc<[u8]> = Arc::from(bytes);
            self.moving.insert(pos, bytes.clone());
            batch.push(Outgoing { stage, pos, bytes });
        }
        batch
    }

    /// The batch that was taken is durable.
    pub(crate) fn settle(&mut self) {
        for (pos, bytes) in std::mem::take(&mut self.moving) {
            if !self.dirty.contains_key(&pos) {
                self.keep(pos, Clean { bytes, was_changed: true });
            }
        }
    }
}
