//! The mapping tables of a served image in memory: lookups and changes.
//!
//! Invariant: pure in-memory. A missing block is reported by [`MetadataError::NotCached`], without
//! side effects. A pointer is entered only after the cluster it points to was allocated.

use std::collections::BTreeSet;

use crate::formats::qcow2::entries::{COPIED, Cluster, L1Entry, ZERO, with_copied};
use crate::formats::qcow2::header::{Header, be64};
use crate::formats::qcow2::lookup::run_of;

use crate::formats::qcow2::read_ahead::{AHEAD_BYTES, near};
use crate::qcow2_disk::damage::{ClusterUse, Damage};
use crate::qcow2_disk::metadata_cache::{MetadataCache, MetadataError, WriteOrder};
use crate::qcow2_disk::metadata_clusters::MetadataClusters;
use crate::qcow2_disk::refcount_allocator::{ClusterRun, DeferredFree, RefcountAllocator, put};

/// The metadata of the top image of a chain.
pub(crate) struct Metadata {
    header: Header,
    pub(crate) cache: MetadataCache,
    l1: Vec<u64>,
    /// `None` for an image that is opened read-only.
    allocator: Option<RefcountAllocator>,
    reserved: MetadataClusters,
    damaged: bool,
    /// Calls of [`Metadata::lookup`].
    #[cfg(test)]
    pub(crate) lookups: std::sync::atomic::AtomicU64,
}

/// Most blocks that a scan looks up ahead, and of them most that are too far from the missing one:
/// each lookup costs time, too.
const MAX_AHEAD: usize = 4096;
const MAX_FAR: usize = 16;

fn is_copied(cluster: Cluster) -> bool {
    matches!(cluster, Cluster::Data { copied: true, .. } | Cluster::Zero { copied: true, .. })
}

impl Metadata {
    /// For an image with the L1 table `l1`.
    pub(crate) fn new(
        header: Header,
        cache: MetadataCache,
        l1: Vec<u64>,
        allocator: Option<RefcountAllocator>,
        reserved: MetadataClusters,
    ) -> Self {
        Self {
            header,
            cache,
            l1,
            allocator,
            reserved,
            damaged: false,
            #[cfg(test)]
            lookups: Default::default(),
        }
    }

    /// Forbids all further changes of the metadata, because damage was found. Returns false if that
    /// was already so. Only the corrupt bit is still written, for the next user of the image.
    pub(crate) fn mark_damaged(&mut self) -> bool {
        !std::mem::replace(&mut self.damaged, true)
    }

    /// Whether damage was found in the metadata.
    pub(crate) fn is_damaged(&self) -> bool {
        self.damaged
    }

    /// Sets the header's corrupt bit, which version 3 has.
    pub(crate) fn set_corrupt_bit(&mut self) -> Result<(), MetadataError> {
        if self.header.version >= 3 {
            let head = self.cache.get_mut(0, WriteOrder::Mappings)?;
            let marked = be64(head, Header::INCOMPATIBLE_AT) | Header::CORRUPT;
            put(head, Header::INCOMPATIBLE_AT, marked);
        }
        Ok(())
    }

    /// The first cluster behind all that are in use.
    pub(crate) fn end(&self) -> u64 {
        self.allocator.as_ref().map_or(self.reserved.file_end(), RefcountAllocator::end)
    }

    /// The position of the L2 table for `cluster` of the disk, if it has one.
    fn l2_table_for(&self, cluster: u64) -> Result<Option<u64>, Damage> {
        let index = (cluster / self.header.l2_entries()) as usize;
        let entry = self.l1.get(index).copied().unwrap_or_default();
        match L1Entry::parse(entry, &self.header).map_err(|bad| Damage::Entry(bad.words()))? {
            L1Entry::Empty => Ok(None),
            L1Entry::Table { pos, .. } => self.reserved.l2_table(pos).map(Some),
        }
    }

    /// The position of the cached block with the L2 entry of `cluster` of the disk, and the entry's
    /// offset in it. The L2 table is at `table`.
    fn entry_location(&self, table: u64, cluster: u64) -> (u64, usize) {
        let pos = table + cluster % self.header.l2_entries() * 8;
        let start = pos & !(self.cache.block() - 1);
        (start, (pos - start) as usize)
    }

    /// Looks up `cluster` of the disk. Returns its mapping and how many clusters continue it, at
    /// most `max`. A cluster is reported as exclusive (`copied`) only if its entry, the L2 table's
    /// use and the refcount all say so: any other is never written in place.
    pub(crate) fn lookup(&self, cluster: u64, max: u64) -> Result<(Cluster, u64), MetadataError> {
        #[cfg(test)]
        self.lookups.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (first, count, table) = self.run_from(cluster, max, true)?;
        match (first, table) {
            (Cluster::Data { host, .. } | Cluster::Zero { host: Some(host), .. }, Some(table))
                if !self.header.has_data_file() =>
            {
                self.check_entry(first, host, count, table)
            }
            _ => Ok((first, count)),
        }
    }

    /// As [`Metadata::lookup`], for a caller that does no I/O there: `copied` means nothing, and
    /// compressed clusters form one run.
    pub(crate) fn scan(&self, cluster: u64, max: u64) -> Result<(Cluster, u64), MetadataError> {
        let (first, count, _) = self.run_from(cluster, max, false)?;
        match first {
            Cluster::Data { host, .. } | Cluster::Zero { host: Some(host), .. }
                if !self.header.has_data_file() =>
            {
                let bits = self.header.cluster_bits;
                match self.reserved.can_be_data(host >> bits, count) {
                    0 => Err(Damage::DataAt(host).into()),
                    count => Ok((first, count)),
                }
            }
            _ => Ok((first, count)),
        }
    }

    /// The blocks of L2 tables, in order, that a scan of the `max` clusters of the disk from
    /// `first` on will need and that lie near enough to the one at `missing`, which it needs now,
    /// to be in one read.
    pub(crate) fn ahead(&self, first: u64, max: u64, missing: u64) -> Vec<u64> {
        let (block, entries) = (self.cache.block(), self.header.l2_entries());
        let (mut found, mut far) = (vec![missing], 0);
        let (mut cluster, end) = (first, first.saturating_add(max));
        for _ in 0..MAX_AHEAD {
            if cluster >= end || far > MAX_FAR || found.len() as u64 * block >= AHEAD_BYTES {
                break;
            }
            let Ok(Some(table)) = self.l2_table_for(cluster) else {
                cluster = (cluster / entries + 1) * entries;
                continue;
            };
            let (start, at) = self.entry_location(table, cluster);
            cluster += (block - at as u64) / 8;
            match start.abs_diff(missing) < AHEAD_BYTES {
                true if self.cache.get(start).is_err() => found.push(start),
                true => {}
                false => far += 1,
            }
        }
        found.sort_unstable();
        found.dedup();
        near(&found, missing, block)
    }

    /// The mapping of `cluster` of the disk, the length of its run in clusters, and the position of
    /// its L2 table, if it has one. With `for_io`, a run also ends where [`COPIED`] changes, and a
    /// compressed cluster is a run of its own.
    fn run_from(
        &self,
        cluster: u64,
        max: u64,
        for_io: bool,
    ) -> Result<(Cluster, u64, Option<u64>), MetadataError> {
        let to_table_end = self.header.l2_entries() - cluster % self.header.l2_entries();
        let Some(table) = self.l2_table_for(cluster)? else {
            let index = (cluster / self.header.l2_entries()) as usize;
            let max_tables = (max / self.header.l2_entries() + 1) as usize;
            let empty = self.l1.iter().skip(index + 1).take(max_tables);
            let empty = empty.take_while(|&&entry| entry == 0).count() as u64;
            let run = to_table_end + empty * self.header.l2_entries();
            return Ok((Cluster::Unallocated, max.clamp(1, run), None));
        };
        let (start, at) = self.entry_location(table, cluster);
        let entries = self.cache.get(start)?.get(at..).unwrap_or_default().chunks_exact(8);
        let entries = entries
            .take(max.max(1) as usize)
            .map(|entry| Cluster::parse(be64(entry, 0), &self.header));
        // Compressed clusters are decompressed one by one.
        let is_one =
            |last: Cluster, next| is_copied(last) == is_copied(next) && !last.is_compressed();
        let goes_on = |last, next| !for_io || is_one(last, next);
        let (first, count) = run_of(entries, self.header.cluster_bytes(), goes_on)
            .map_err(|bad| Damage::Entry(bad.words()))?;
        Ok((first, count, Some(table)))
    }

    /// Checks a run of `count` clusters at `host`, whose entries are in the L2 table at `table`, as
    /// described at [`Metadata::lookup`].
    fn check_entry(
        &self,
        first: Cluster,
        host: u64,
        count: u64,
        table: u64,
    ) -> Result<(Cluster, u64), MetadataError> {
        let bits = self.header.cluster_bits;
        let count = self.reserved.can_be_data(host >> bits, count);
        if count == 0 {
            return Err(Damage::DataAt(host).into());
        }
        let Some(allocator) = self.allocator.as_ref().filter(|_| is_copied(first)) else {
            return Ok((first, count));
        };
        let clusters = ClusterRun { first: host >> bits, count };
        let (mut exclusive, mut count) = (false, count);
        if !self.reserved.is_shared(table >> bits) {
            (exclusive, count) =
                allocator.exclusive_run(&self.cache, &self.header, &self.reserved, clusters)?;
        }
        let checked = match first {
            Cluster::Data { host, .. } => Cluster::Data { host, copied: exclusive },
            Cluster::Zero { host, .. } => Cluster::Zero { host, copied: exclusive },
            other => other,
        };
        Ok((checked, count))
    }

    /// Allocates at least one and at most `max` clusters of the file.
    pub(crate) fn allocate(&mut self, max: u64) -> Result<ClusterRun, MetadataError> {
        let Self { header, cache, reserved, allocator, .. } = self;
        let Some(allocator) = allocator.as_mut().filter(|_| !self.damaged) else {
            return Err(Damage::Known.into());
        };
        allocator.allocate(cache, header, reserved, max)
    }

    /// Whether `cluster` of the file reads as zeros until it is first written.
    pub(crate) fn is_beyond_eof(&self, cluster: u64) -> bool {
        cluster >= self.reserved.file_end()
    }

    /// Defers the free of clusters that an entry, `compressed` or not, names no more or never did.
    pub(crate) fn defer_free(&mut self, clusters: ClusterRun, compressed: bool) {
        if let Some(allocator) = &mut self.allocator {
            let ClusterRun { first, count } = clusters;
            let deferred = (first..first.saturating_add(count))
                .filter(|&cluster| self.reserved.can_be_data(cluster, 1) == 1);
            deferred.for_each(|cluster| allocator.defer_free(DeferredFree { cluster, compressed }));
        }
    }

    /// Takes the clusters whose free was deferred.
    pub(crate) fn take_deferred(&mut self) -> Vec<DeferredFree> {
        self.allocator.as_mut().map(RefcountAllocator::take_deferred).unwrap_or_default()
    }

    /// Sets the result of the survey: of all clusters that were in the file when it was opened,
    /// only `clusters` are in use and have a refcount of 0.
    pub(crate) fn survey(&mut self, clusters: BTreeSet<u64>) {
        self.reserved.survey(clusters);
    }

    /// Lowers the refcount of `cluster` of the file, to which `references` pointers remain.
    pub(crate) fn free(&mut self, cluster: u64, references: u64) -> Result<(), MetadataError> {
        let Self { header, cache, reserved, allocator, .. } = self;
        let Some(allocator) = allocator.as_ref().filter(|_| !self.damaged) else {
            return Err(Damage::Known.into());
        };
        allocator.free(cache, header, reserved, cluster, references)
    }

    /// Maps `cluster` of the disk to the exclusive cluster at `host` in the file with the data.
    pub(crate) fn set_data(&mut self, cluster: u64, host: u64) -> Result<(), MetadataError> {
        self.set(cluster, with_copied(host))
    }

    /// Makes `cluster` of the disk zeros, without a cluster of the file.
    pub(crate) fn set_zero(&mut self, cluster: u64) -> Result<(), MetadataError> {
        self.set(cluster, ZERO)
    }

    /// Sets the L2 entry of `cluster` of the disk, and defers the free of what it replaces.
    fn set(&mut self, cluster: u64, entry: u64) -> Result<(), MetadataError> {
        if self.damaged {
            return Err(Damage::Known.into());
        }
        let table = self.ensure_l2_table(cluster)?;
        let (start, at) = self.entry_location(table, cluster);
        let block = self.cache.get_mut(start, WriteOrder::Mappings)?;
        let before = be64(block, at);
        put(block, at, entry);
        let bits = self.header.cluster_bits;
        match Cluster::parse(before, &self.header) {
            Ok(Cluster::Compressed { pos, len }) => {
                let (first, last) = (pos >> bits, (pos + len - 1) >> bits);
                self.defer_free(ClusterRun { first, count: last - first + 1 }, true);
            }
            Ok(Cluster::Data { host, .. } | Cluster::Zero { host: Some(host), .. })
                if !self.header.has_data_file() && host != entry & !COPIED =>
            {
                self.defer_free(ClusterRun { first: host >> bits, count: 1 }, false);
            }
            _ => {}
        }
        Ok(())
    }

    /// The position of the L2 table for `cluster` of the disk, allocated if there is none. A shared
    /// table is not written to: there are no snapshots, so the other user is unknown.
    fn ensure_l2_table(&mut self, cluster: u64) -> Result<u64, MetadataError> {
        let index = cluster / self.header.l2_entries();
        let entry = self.l1.get(index as usize).copied().unwrap_or_default();
        if let Some(pos) = self.l2_table_for(cluster)? {
            return match entry & COPIED != 0 {
                _ if self.reserved.is_shared(pos >> self.header.cluster_bits) => {
                    Err(Damage::Shared(pos).into())
                }
                true => Ok(pos),
                false => Err(Damage::NotSole(pos).into()),
            };
        }
        let entry_pos = self.header.l1_pos + index * 8;
        let start = entry_pos & !(self.cache.block() - 1);
        self.cache.get(start)?;
        let first = self.allocate(1)?.first;
        self.reserved.add(ClusterUse::L2Table, first, 1);
        let pos = first << self.header.cluster_bits;
        self.cache.insert_new(pos, &vec![0; self.header.cluster_bytes() as usize]);
        put(
            self.cache.get_mut(start, WriteOrder::Mappings)?,
            (entry_pos - start) as usize,
            with_copied(pos),
        );
        if let Some(slot) = self.l1.get_mut(index as usize) {
            *slot = with_copied(pos);
        }
        Ok(pos)
    }
}
