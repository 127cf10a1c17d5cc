//! The refcounts of an image's file, and the allocation and freeing of its clusters.
//!
//! Invariant: a cluster is allocated once. Its refcount is raised before the caller gets it, and no
//! refcount is lowered while the image is served. A cluster without a refcount block is free only
//! behind all counted clusters or behind the end that the file had when it was opened.

use crate::formats::qcow2::entries::refcount_block;
use crate::formats::qcow2::header::{Header, MAX_POS, MAX_REFCOUNT_TABLE_BYTES};
use crate::formats::qcow2::refcounts;
use crate::injected_bug;
use crate::injected_bug::ImageBug;

use crate::qcow2_disk::damage::{ClusterUse, Damage};
use crate::qcow2_disk::metadata_cache::{MetadataCache, MetadataError, WriteOrder};
use crate::qcow2_disk::metadata_clusters::MetadataClusters;

/// A run of adjacent clusters of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClusterRun {
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// A cluster whose free is deferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeferredFree {
    pub(crate) cluster: u64,
    /// Whether the entry that named it is a compressed one. Other compressed entries may name it,
    /// and its refcount is lowered. An uncompressed entry that still names it says that it is not
    /// the only one, which a refcount of 1 would contradict: then the refcount stays as it is.
    pub(crate) compressed: bool,
}

/// The most clusters of a qcow2 image whose free is deferred.
/// Beyond it: the clusters leak.
const MAX_DEFERRED_FREE: usize = 1 << 20;

/// The refcounts of an image that is writable.
pub(crate) struct RefcountAllocator {
    /// The refcount table.
    table: Vec<u64>,
    table_pos: u64,
    table_clusters: u64,
    /// Length of the table up to its last entry that is not 0. The clusters behind these entries
    /// are unused, as on a block device that is larger than its image. 0: no cluster is counted, so
    /// all of the file may be in use.
    counted: u64,
    /// No cluster before this one is free.
    cursor: u64,
    /// The first cluster behind all that were allocated or in the file.
    end: u64,
    deferred_free: Vec<DeferredFree>,
}

impl RefcountAllocator {
    /// For a file of `file_end` clusters with this refcount `table`.
    pub(crate) fn new(header: &Header, table: Vec<u64>, file_end: u64) -> Self {
        let counted = table.iter().rposition(|&entry| entry != 0).map_or(0, |last| last as u64 + 1);
        Self {
            table,
            counted,
            table_pos: header.refcount_table_pos,
            table_clusters: u64::from(header.refcount_table_clusters),
            cursor: 0,
            end: file_end,
            deferred_free: Vec::new(),
        }
    }

    /// The first cluster behind all that are in use.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// The position of refcount block number `index`, if there is one.
    fn block(
        &self,
        header: &Header,
        reserved: &MetadataClusters,
        index: u64,
    ) -> Result<Option<u64>, MetadataError> {
        let entry = self.table.get(index as usize).copied().unwrap_or_default();
        match refcount_block(entry, header) {
            Ok(None) => Ok(None),
            Ok(Some(pos)) => Ok(Some(reserved.block(pos)?)),
            Err(bad) => Err(Damage::Entry(bad.words()).into()),
        }
    }

    /// Whether the first of `clusters` has a refcount of at most 1, and for how many of them the
    /// answer is the same.
    pub(crate) fn exclusive_run(
        &self,
        cache: &MetadataCache,
        header: &Header,
        reserved: &MetadataClusters,
        clusters: ClusterRun,
    ) -> Result<(bool, u64), MetadataError> {
        let ClusterRun { first, count } = clusters;
        let refcounts_per_block = (cache.block() * 8) >> header.refcount_order;
        let Ok(Some(block)) = self.block(header, reserved, first / header.block_entries()) else {
            return Ok((true, count));
        };
        let (pos, at) = locate(cache, header, block, first);
        let block_bytes = cache.get(pos)?;
        let is_exclusive = |at| refcounts::get(block_bytes, at, header.refcount_order) <= 1;
        let first_exclusive = is_exclusive(at);
        let end = (at + count).min(refcounts_per_block);
        let run = (at..end).take_while(|&at| is_exclusive(at) == first_exclusive).count();
        Ok((first_exclusive, run as u64))
    }

    /// Allocates at least one and at most `max` free clusters.
    pub(crate) fn allocate(
        &mut self,
        cache: &mut MetadataCache,
        header: &Header,
        reserved: &mut MetadataClusters,
        max: u64,
    ) -> Result<ClusterRun, MetadataError> {
        let per_block = header.block_entries();
        // Refcounts in one block of the cache.
        let refcounts_per_block = (cache.block() * 8) >> header.refcount_order;
        loop {
            let first = self.cursor;
            if first >= MAX_POS >> header.cluster_bits {
                return Err(MetadataError::NoSpace);
            }
            let index = first / per_block;
            if index >= self.table.len() as u64 {
                self.grow(cache, header, reserved)?;
                continue;
            }
            let Some(block) = self.block(header, reserved, index)? else {
                if first < reserved.file_end() && (self.counted == 0 || index < self.counted) {
                    self.cursor = ((index + 1) * per_block).min(reserved.file_end());
                } else {
                    self.add_block(cache, header, reserved, index)?;
                }
                continue;
            };
            let (pos, at) = locate(cache, header, block, first);
            let block_bytes = cache.get(pos).map_err(|error| whole_block(error, block, header))?;
            let free = |at: u64| refcounts::get(block_bytes, at, header.refcount_order) == 0;
            let Some(skip) = (at..refcounts_per_block).position(&free) else {
                self.cursor = first + (refcounts_per_block - at);
                continue;
            };
            let (first, at) = (first + skip as u64, at + skip as u64);
            let count =
                (at..refcounts_per_block).take(max as usize).take_while(|&at| free(at)).count();
            let mut count = count as u64;
            if !injected_bug::injected(ImageBug::ForgetOverlapCheck) {
                count = reserved.check_free(first, count)?;
            }
            let block_bytes = cache.get_mut(pos, WriteOrder::DataAndRefcounts)?;
            for at in at..at + count {
                refcounts::set(block_bytes, at, header.refcount_order, 1);
            }
            self.record_allocated(reserved, first, count);
            return Ok(ClusterRun { first, count });
        }
    }

    /// Records that these clusters are no longer free, nor any before them.
    fn record_allocated(&mut self, reserved: &mut MetadataClusters, first: u64, count: u64) {
        self.cursor = first + count;
        self.end = self.end.max(self.cursor);
        reserved.mark_allocated(first, count);
    }

    /// Allocates the cluster at the cursor for the refcount block that counts it.
    fn add_block(
        &mut self,
        cache: &mut MetadataCache,
        header: &Header,
        reserved: &mut MetadataClusters,
        index: u64,
    ) -> Result<(), MetadataError> {
        let first = self.cursor;
        reserved.check_free(first, 1)?;
        let mut block = vec![0; header.cluster_bytes() as usize];
        let own = first % header.block_entries();
        refcounts::set(&mut block, own, header.refcount_order, 1);
        let entry_pos = self.table_pos + index * 8;
        let start = entry_pos & !(cache.block() - 1);
        let entry = first << header.cluster_bits;
        put(cache.get_mut(start, WriteOrder::RefcountTable)?, (entry_pos - start) as usize, entry);
        cache.insert_new(entry, &block);
        if let Some(slot) = self.table.get_mut(index as usize) {
            *slot = entry;
        }
        self.record_allocated(reserved, first, 1);
        reserved.add(ClusterUse::RefcountBlock, first, 1);
        Ok(())
    }

    /// Makes a longer refcount table behind all that the old one counts: first the refcount blocks
    /// that count the new clusters, themselves included, then the table.
    fn grow(
        &mut self,
        cache: &mut MetadataCache,
        header: &Header,
        reserved: &mut MetadataClusters,
    ) -> Result<(), MetadataError> {
        let cluster = header.cluster_bytes();
        let per_block = header.block_entries();
        let base = self.cursor.max(self.end);
        let first_block = base / per_block;
        let (mut blocks, mut clusters) = (1, 1);
        loop {
            let needed = (first_block + blocks).max(self.table.len() as u64 * 3 / 2);
            let table = (needed * 8).div_ceil(cluster);
            let last = base + blocks + table - 1;
            let counting_blocks = last / per_block - first_block + 1;
            if (blocks, clusters) == (counting_blocks, table) {
                break;
            }
            (blocks, clusters) = (counting_blocks, table);
        }
        if clusters * cluster > MAX_REFCOUNT_TABLE_BYTES.max(cluster) {
            return Err(MetadataError::NoSpace);
        }
        let head = cache.get_mut(0, WriteOrder::RefcountTable)?;
        let table_pos = (base + blocks) << header.cluster_bits;
        put(head, Header::REFCOUNT_TABLE_AT, table_pos);
        let clusters_at = Header::REFCOUNT_TABLE_AT + 8;
        if let Some(slot) = head.get_mut(clusters_at..clusters_at + 4) {
            slot.copy_from_slice(&(clusters as u32).to_be_bytes());
        }
        let mut table = self.table.clone();
        table.resize((clusters * cluster / 8) as usize, 0);
        let end = base + blocks + clusters;
        for block in 0..blocks {
            let (pos, index) = ((base + block) << header.cluster_bits, first_block + block);
            let mut bytes = vec![0; cluster as usize];
            for counted in base.max(index * per_block)..end.min((index + 1) * per_block) {
                refcounts::set(&mut bytes, counted % per_block, header.refcount_order, 1);
            }
            cache.insert_new(pos, &bytes);
            if let Some(entry) = table.get_mut(index as usize) {
                *entry = pos;
            }
        }
        let old = self.table_pos >> header.cluster_bits;
        (old..old + self.table_clusters)
            .for_each(|cluster| self.defer_free(DeferredFree { cluster, compressed: false }));
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        cache.insert_new(table_pos, &bytes);
        (self.table, self.table_pos, self.table_clusters) = (table, table_pos, clusters);
        self.record_allocated(reserved, base, end - base);
        reserved.add(ClusterUse::RefcountBlock, base, blocks);
        reserved.add(ClusterUse::RefcountTable, base + blocks, clusters);
        Ok(())
    }

    /// Defers the free of a cluster, which an entry names no more or never did. It is freed when
    /// the image is closed: until then a request may still be reading it, and a power cut
    /// could bring back the pointer.
    pub(crate) fn defer_free(&mut self, deferred: DeferredFree) {
        if self.deferred_free.len() < MAX_DEFERRED_FREE {
            self.deferred_free.push(deferred);
        }
    }

    /// Takes the clusters whose free was deferred.
    pub(crate) fn take_deferred(&mut self) -> Vec<DeferredFree> {
        std::mem::take(&mut self.deferred_free)
    }

    /// Lowers the refcount of `cluster`, but not below the `references` pointers that remain in the
    /// file.
    pub(crate) fn free(
        &self,
        cache: &mut MetadataCache,
        header: &Header,
        reserved: &MetadataClusters,
        cluster: u64,
        references: u64,
    ) -> Result<(), MetadataError> {
        let block = self.block(header, reserved, cluster / header.block_entries())?;
        let block = block.ok_or(Damage::Entry("counts nothing where something is"))?;
        let (pos, at) = locate(cache, header, block, cluster);
        let count = refcounts::get(cache.get(pos)?, at, header.refcount_order);
        if count > references {
            let block_bytes = cache.get_mut(pos, WriteOrder::DataAndRefcounts)?;
            refcounts::set(block_bytes, at, header.refcount_order, count - 1);
        }
        Ok(())
    }
}

/// The position of the cached block with the refcount of `cluster`, and its index in that. The
/// refcount block begins at `block`.
fn locate(cache: &MetadataCache, header: &Header, block: u64, cluster: u64) -> (u64, u64) {
    let refcounts_per_block = (cache.block() * 8) >> header.refcount_order;
    let index = cluster % header.block_entries();
    (block + index / refcounts_per_block * cache.block(), index % refcounts_per_block)
}

/// A search for free clusters reads whole refcount blocks.
fn whole_block(error: MetadataError, block: u64, header: &Header) -> MetadataError {
    match error {
        MetadataError::NotCached { .. } => {
            MetadataError::NotCached { pos: block, len: header.cluster_bytes() }
        }
        other => other,
    }
}

/// Puts a big-endian number at `at`, if that is in `bytes`.
pub(crate) fn put(bytes: &mut [u8], at: usize, value: u64) {
    if let Some(slot) = bytes.get_mut(at..at + 8) {
        slot.copy_from_slice(&value.to_be_bytes());
    }
}
