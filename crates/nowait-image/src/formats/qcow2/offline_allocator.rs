//! Allocates and frees clusters of a qcow2 file that no other process uses.
//!
//! Invariant: a refcount in the file is never lower than it must be. Raised refcounts may be
//! written at any time; a refcount is lowered only when the pointer to the cluster is durably gone.

use std::collections::BTreeMap;
use std::io;

use crate::formats::qcow2::entries::refcount_block;
use crate::formats::qcow2::header::{Header, MAX_POS, MAX_REFCOUNT_TABLE_BYTES};
use crate::formats::qcow2::layout;
use crate::formats::qcow2::lookup::read_table;
use crate::formats::qcow2::refcounts;
use crate::image_file::ImageFile;

/// The most refcount blocks that an offline tool keeps in memory after a write.
/// Beyond it: all of them go, and are read again when they are needed.
const MAX_CLEAN_BLOCKS: usize = 64;

struct Block {
    bytes: Vec<u8>,
    changed: bool,
}

/// The refcounts of an image that is being changed.
pub(crate) struct RefcountAllocator<'a> {
    file: &'a ImageFile,
    header: Header,
    table: Vec<u64>,
    blocks: BTreeMap<u64, Block>,
    /// Indexes of new blocks that the table in the file does not name yet.
    unlisted: Vec<u64>,
    /// The cluster at which the search for a free one begins.
    first_free: u64,
}

fn damaged(what: &str) -> io::Error {
    io::Error::other(format!("its refcounts are damaged: {what} (look at it with nowait check)"))
}

impl<'a> RefcountAllocator<'a> {
    /// For the image in `file` with `header`.
    pub(crate) fn read(file: &'a ImageFile, header: &Header) -> io::Result<Self> {
        let entries = header.refcount_table_entries();
        let table = read_table(file, header.refcount_table_pos, entries)?;
        let (header, blocks, unlisted) = (header.clone(), BTreeMap::new(), Vec::new());
        Ok(Self { file, header, table, blocks, unlisted, first_free: 0 })
    }

    /// Allocates no cluster before `first`.
    pub(crate) fn begin_at(&mut self, first: u64) {
        self.first_free = first;
    }

    /// Allocates `wanted` adjacent clusters, at least 1. Returns the position of the first in
    /// bytes. Their old contents remain.
    ///
    /// # Errors
    /// [`io::ErrorKind::FileTooLarge`] if the image has reached its largest size; the errno of a failed
    /// read or write.
    pub(crate) fn allocate(&mut self, wanted: u64) -> io::Result<u64> {
        let search_start = self.first_free;
        let (mut start, mut at) = (search_start, search_start);
        while at - start < wanted {
            if at >= MAX_POS >> self.header.cluster_bits {
                return Err(layout::tables_full());
            }
            let index = at / self.header.block_entries();
            if index >= self.table.len() as u64 {
                self.grow_table(index)?;
            }
            if self.table.get(index as usize).is_some_and(|&entry| entry == 0) {
                // The block takes the first free cluster found so far, so that the others remain
                // adjacent; if there is none, it takes a cluster that it counts itself.
                self.add_block(index, start)?;
                start += 1;
                at = at.max(start);
                continue;
            }
            let used = self.count(at)?.unwrap_or_default() > 0;
            at += 1;
            if used {
                start = at;
            }
        }
        for cluster in start..at {
            self.set(cluster, 1)?;
        }
        if wanted == 1 || start == search_start {
            self.first_free = at;
        }
        Ok(start << self.header.cluster_bits)
    }

    /// Lowers the refcount of `cluster`, after a pointer to it is durably gone. At 0 the cluster
    /// becomes a hole.
    pub(crate) fn free(&mut self, cluster: u64) -> io::Result<()> {
        let Some(count) = self.count(cluster)?.filter(|&count| count > 0) else {
            return Err(damaged("a cluster in use does not count"));
        };
        self.set(cluster, count - 1)?;
        if count == 1 {
            self.first_free = self.first_free.min(cluster);
            // If the hole cannot be made, only space is lost.
            let _ =
                self.file.punch(cluster << self.header.cluster_bits, self.header.cluster_bytes());
        }
        Ok(())
    }

    /// Writes the refcounts. Pointers that rely on them may be written after the next sync.
    pub(crate) fn write(&mut self) -> io::Result<()> {
        self.write_blocks()?;
        if !self.unlisted.is_empty() {
            // The table may name a block only once the block is durable.
            self.file.sync()?;
            for index in std::mem::take(&mut self.unlisted) {
                let entry = self.table.get(index as usize).copied().unwrap_or_default();
                let at = self.header.refcount_table_pos + index * 8;
                self.file.write_at(at, &entry.to_be_bytes())?;
            }
        }
        if self.blocks.len() > MAX_CLEAN_BLOCKS {
            self.blocks.clear();
        }
        Ok(())
    }

    /// The end of the last cluster in use, in bytes of the file.
    pub(crate) fn end(&mut self) -> io::Result<u64> {
        let mut end = self.file.size()?.div_ceil(self.header.cluster_bytes());
        while end > 0 && self.count(end - 1)?.unwrap_or_default() == 0 {
            end -= 1;
        }
        Ok(end << self.header.cluster_bits)
    }

    fn write_blocks(&mut self) -> io::Result<()> {
        for (&index, block) in self.blocks.iter_mut().filter(|(_, block)| block.changed) {
            let pos = self.table.get(index as usize).copied().unwrap_or_default();
            self.file.write_at(pos, &block.bytes)?;
            block.changed = false;
        }
        Ok(())
    }

    /// The refcount of `cluster`; `None` where it has no refcount block.
    pub(crate) fn count(&mut self, cluster: u64) -> io::Result<Option<u64>> {
        let (entries, order) = (self.header.block_entries(), self.header.refcount_order);
        let block = self.block(cluster / entries)?;
        Ok(block.map(|block| refcounts::get(&block.bytes, cluster % entries, order)))
    }

    fn set(&mut self, cluster: u64, count: u64) -> io::Result<()> {
        let (entries, order) = (self.header.block_entries(), self.header.refcount_order);
        let Some(block) = self.block(cluster / entries)? else {
            return Err(damaged("a block of them is missing"));
        };
        refcounts::set(&mut block.bytes, cluster % entries, order, count);
        block.changed = true;
        Ok(())
    }

    fn block(&mut self, index: u64) -> io::Result<Option<&mut Block>> {
        if !self.blocks.contains_key(&index) {
            let entry = self.table.get(index as usize).copied().unwrap_or_default();
            let Some(pos) =
                refcount_block(entry, &self.header).map_err(|bad| damaged(bad.words()))?
            else {
                return Ok(None);
            };
            let mut bytes = vec![0; self.header.cluster_bytes() as usize];
            self.file.read_at(pos, &mut bytes)?;
            self.blocks.insert(index, Block { bytes, changed: false });
        }
        Ok(self.blocks.get_mut(&index))
    }

    /// Makes `cluster`, which is free, refcount block number `index`.
    fn add_block(&mut self, index: u64, cluster: u64) -> io::Result<()> {
        let bytes = vec![0; self.header.cluster_bytes() as usize];
        self.blocks.insert(index, Block { bytes, changed: true });
        if let Some(entry) = self.table.get_mut(index as usize) {
            *entry = cluster << self.header.cluster_bits;
        }
        self.unlisted.push(index);
        self.set(cluster, 1)
    }

    /// Makes a refcount table that has an entry number `index`, behind all clusters that the old
    /// one counts: no cluster can be in use there.
    fn grow_table(&mut self, index: u64) -> io::Result<()> {
        let cluster = self.header.cluster_bytes();
        let old = u64::from(self.header.refcount_table_clusters);
        let first_block = self.table.len() as u64;
        let first = first_block * self.header.block_entries();
        let (per_cluster, per_block) = (cluster / 8, self.header.block_entries());
        let mut blocks = 1;
        let mut clusters = (2 * old).min((MAX_REFCOUNT_TABLE_BYTES / cluster).max(1));
        loop {
            let needed = (blocks + clusters).div_ceil(per_block);
            let entries = (index + 1).max(first_block + needed);
            if needed == blocks && clusters * per_cluster >= entries {
                break;
            }
            (blocks, clusters) = (needed, clusters.max(entries.div_ceil(per_cluster)));
        }
        if clusters * cluster > MAX_REFCOUNT_TABLE_BYTES.max(cluster) {
            return Err(layout::tables_full());
        }
        self.table.resize((clusters * per_cluster) as usize, 0);
        for block in 0..blocks {
            self.add_block(first_block + block, first + block)?;
        }
        for used in first + blocks..first + blocks + clusters {
            self.set(used, 1)?;
        }
        // The new table names all blocks, also those that the old one does not name yet.
        self.write_blocks()?;
        self.unlisted.clear();
        let pos = (first + blocks) * cluster;
        let bytes: Vec<u8> = self.table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        self.file.write_at(pos, &bytes)?;
        self.file.sync()?;
        let mut field = [0; 12];
        field[..8].copy_from_slice(&pos.to_be_bytes());
        field[8..].copy_from_slice(&(clusters as u32).to_be_bytes());
        self.file.write_at(Header::REFCOUNT_TABLE_AT as u64, &field)?;
        self.file.sync()?;
        let old_pos = std::mem::replace(&mut self.header.refcount_table_pos, pos);
        self.header.refcount_table_clusters = clusters as u32;
        let old_first = old_pos >> self.header.cluster_bits;
        (old_first..old_first + old).try_for_each(|cluster| self.free(cluster))
    }
}
