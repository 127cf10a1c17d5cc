//! The mapping tables of a served image in memory: lookups and changes.
//!
//! Invariant: pure in-memory. A missing block is reported by [`MetadataError::NotCached`], without
//! side effects. A pointer is entered only after the cluster it points to was allocated.

use std::collections::BTreeSet;

use crate::formats::qcow2::entries::{COPIED, Cluster, L1Entry, ZERO, with_copied};
use crate::formats::qcow2::header::{Header, be64};
use crate::formats::qcow2::lookup::run_of;
use crate::formats::qcow2::subclusters::{ALL_ZEROS, mask, units};

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

/// The most blocks of L2 tables that a scan looks up ahead of the missing one: each lookup costs time, too.
/// Beyond it: the read has those that were found.
const MAX_AHEAD: usize = 4096;
/// The most of them that are too far from the missing one.
/// Beyond it: the read has those that were found.
const MAX_FAR: usize = 16;

fn is_copied(cluster: Cluster) -> bool {
    matches!(
        cluster,
        Cluster::Data { copied: true, .. }
            | Cluster::Zero { copied: true, .. }
            | Cluster::Reserved { copied: true, .. }
    )
}

/// The position that `cluster` has in the file with the data, if any.
fn host_of(cluster: Cluster) -> Option<u64> {
    match cluster {
        Cluster::Data { host, .. }
        | Cluster::Zero { host: Some(host), .. }
        | Cluster::Reserved { host, .. } => Some(host),
        _ => None,
    }
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

    /// The position of the L2 table for unit number `unit` of the disk, if it has one.
    fn l2_table_for(&self, unit: u64) -> Result<Option<u64>, Damage> {
        let index = (unit / self.header.l2_units()) as usize;
        let entry = self.l1.get(index).copied().unwrap_or_default();
        match L1Entry::parse(entry, &self.header).map_err(|bad| Damage::Entry(bad.words()))? {
            L1Entry::Empty => Ok(None),
            L1Entry::Table { pos, .. } => self.reserved.l2_table(pos).map(Some),
        }
    }

    /// The position of the cached block with the L2 entry of `unit` of the disk, and the entry's
    /// offset in it. The L2 table is at `table`.
    fn entry_location(&self, table: u64, unit: u64) -> (u64, usize) {
        let entry = (unit % self.header.l2_units()) >> self.header.unit_shift();
        let pos = table + entry * self.header.entry_bytes();
        let start = pos & !(self.cache.block() - 1);
        (start, (pos - start) as usize)
    }

    /// Looks up `unit` of the disk. Returns its mapping and how many units continue it, at
    /// most `max`. One is reported as exclusive (`copied`) only if its entry, the L2 table's
    /// use and the refcount all say so: any other is never written in place.
    pub(crate) fn lookup(&self, unit: u64, max: u64) -> Result<(Cluster, u64), MetadataError> {
        #[cfg(test)]
        self.lookups.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (first, count, table) = self.run_from(unit, max, true)?;
        match (host_of(first), table) {
            (Some(host), Some(table)) if !self.header.has_data_file() => {
                self.check_entry(first, host, count, table)
            }
            _ => Ok((first, count)),
        }
    }

    /// Like [`Metadata::lookup`], for a caller that does no I/O there: `copied` means nothing, and
    /// compressed clusters form one run.
    pub(crate) fn scan(&self, unit: u64, max: u64) -> Result<(Cluster, u64), MetadataError> {
        let (first, count, _) = self.run_from(unit, max, false)?;
        match host_of(first) {
            Some(host) if !self.header.has_data_file() => {
                let clusters = self.clusters_at(host, count);
                match self.reserved.can_be_data(clusters.first, clusters.count) {
                    0 => Err(Damage::DataAt(host).into()),
                    clusters => Ok((first, self.units_at(host, clusters).min(count))),
                }
            }
            _ => Ok((first, count)),
        }
    }

    /// The clusters of the file with the `count` units at `host`.
    fn clusters_at(&self, host: u64, count: u64) -> ClusterRun {
        let (bits, end) = (self.header.cluster_bits, host + (count << self.header.unit_bits()));
        let first = host >> bits;
        ClusterRun { first, count: end.div_ceil(self.header.cluster_bytes()) - first }
    }

    /// The units from `host` on in `clusters` clusters of the file, the first of which contains it.
    fn units_at(&self, host: u64, clusters: u64) -> u64 {
        let inside = (host & (self.header.cluster_bytes() - 1)) >> self.header.unit_bits();
        (clusters << self.header.unit_shift()) - inside
    }

    /// The blocks of L2 tables, in order, that a scan of the `max` units of the disk from
    /// `first` on will need and that lie near enough to the one at `missing`, which it needs now,
    /// to be in one read.
    pub(crate) fn ahead(&self, first: u64, max: u64, missing: u64) -> Vec<u64> {
        let (block, in_table) = (self.cache.block(), self.header.l2_units());
        let (mut found, mut far) = (vec![missing], 0);
        let (mut unit, end) = (first, first.saturating_add(max));
        for _ in 0..MAX_AHEAD {
            if unit >= end || far > MAX_FAR || found.len() as u64 * block >= AHEAD_BYTES {
                break;
            }
            let Ok(Some(table)) = self.l2_table_for(unit) else {
                unit = (unit / in_table + 1) * in_table;
                continue;
            };
            let (start, at) = self.entry_location(table, unit);
            let (shift, entries) = (self.header.unit_shift(), block - at as u64);
            unit = ((unit >> shift) + entries / self.header.entry_bytes()) << shift;
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

    /// The mapping of `unit` of the disk, the length of its run in units, and the position of
    /// its L2 table, if it has one. With `for_io`, a run also ends where [`COPIED`] changes, and a
    /// compressed cluster is a run of its own.
    fn run_from(
        &self,
        unit: u64,
        max: u64,
        for_io: bool,
    ) -> Result<(Cluster, u64, Option<u64>), MetadataError> {
        let in_table = self.header.l2_units();
        let to_table_end = in_table - unit % in_table;
        let Some(table) = self.l2_table_for(unit)? else {
            let index = (unit / in_table) as usize;
            let max_tables = (max / in_table + 1) as usize;
            let empty = self.l1.iter().skip(index + 1).take(max_tables);
            let empty = empty.take_while(|&&entry| entry == 0).count() as u64;
            let run = to_table_end + empty * in_table;
            return Ok((Cluster::Unallocated, max.clamp(1, run), None));
        };
        let (start, at) = self.entry_location(table, unit);
        let entries = self.cache.get(start)?.get(at..).unwrap_or_default();
        let inside = unit & ((1 << self.header.unit_shift()) - 1);
        let units = units(entries, inside, &self.header).take(max.max(1) as usize);
        // Compressed clusters are decompressed one by one.
        let is_one =
            |last: Cluster, next| is_copied(last) == is_copied(next) && !last.is_compressed();
        let goes_on = |last, next| !for_io || is_one(last, next);
        let (first, count) = run_of(units, self.header.unit_bytes(), goes_on)
            .map_err(|bad| Damage::Entry(bad.words()))?;
        Ok((first, count, Some(table)))
    }

    /// Checks a run of `count` units at `host`, whose entries are in the L2 table at `table`, as
    /// described at [`Metadata::lookup`].
    fn check_entry(
        &self,
        first: Cluster,
        host: u64,
        count: u64,
        table: u64,
    ) -> Result<(Cluster, u64), MetadataError> {
        let mut clusters = self.clusters_at(host, count);
        clusters.count = self.reserved.can_be_data(clusters.first, clusters.count);
        if clusters.count == 0 {
            return Err(Damage::DataAt(host).into());
        }
        let units = |clusters| self.units_at(host, clusters).min(count);
        let Some(allocator) = self.allocator.as_ref().filter(|_| is_copied(first)) else {
            return Ok((first, units(clusters.count)));
        };
        let mut exclusive = false;
        if !self.reserved.is_shared(table >> self.header.cluster_bits) {
            (exclusive, clusters.count) =
                allocator.exclusive_run(&self.cache, &self.header, &self.reserved, clusters)?;
        }
        let checked = match first {
            Cluster::Data { host, .. } => Cluster::Data { host, copied: exclusive },
            Cluster::Zero { host, .. } => Cluster::Zero { host, copied: exclusive },
            Cluster::Reserved { host, .. } => Cluster::Reserved { host, copied: exclusive },
            other => other,
        };
        Ok((checked, units(clusters.count)))
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

    /// Notes that dirty bitmaps are in the clusters of `runs`. Returns false, and notes nothing more, at one that has
    /// another use.
    pub(crate) fn reserve_bitmaps(&mut self, runs: &[ClusterRun]) -> bool {
        runs.iter().all(|&ClusterRun { first, count }| {
            let is_free = self.reserved.free_of(first, count) == count;
            self.reserved.add(ClusterUse::Bitmaps, first, count);
            is_free
        })
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

    /// Maps `count` units of the disk from `unit` on, all of one cluster, to those at `host` in the file with the
    /// data, whose cluster is exclusive. Where that replaces another cluster or compressed data, the units are all of
    /// the cluster.
    pub(crate) fn set_data(
        &mut self,
        unit: u64,
        count: u64,
        host: u64,
    ) -> Result<(), MetadataError> {
        let inside = unit & ((1 << self.header.unit_shift()) - 1);
        let entry = with_copied(host - (inside << self.header.unit_bits()));
        let set = mask(inside, count);
        self.set(unit, |old, words| {
            let kept = match old {
                Cluster::Data { host, .. } if with_copied(host) == entry => words[1],
                Cluster::Unallocated => words[1],
                _ => 0,
            };
            [entry, kept & !(set | set << 32) | set]
        })
    }

    /// Makes `count` units of the disk from `unit` on, all of one cluster, zeros: a cluster without a cluster of the
    /// file, a subcluster by its bit. Of a compressed cluster they are all.
    pub(crate) fn set_zero(&mut self, unit: u64, count: u64) -> Result<(), MetadataError> {
        let set = mask(unit & ((1 << self.header.unit_shift()) - 1), count);
        let has_bitmap = self.header.has_extended_l2();
        self.set(unit, |old, [entry, bitmap]| match old {
            _ if !has_bitmap => [ZERO, 0],
            Cluster::Compressed { .. } => [0, ALL_ZEROS],
            _ => [entry, bitmap & !set | set << 32],
        })
    }

    /// Changes the words of the L2 entry of `unit` of the disk, and defers the free of what it replaces.
    fn set(
        &mut self,
        unit: u64,
        change: impl Fn(Cluster, [u64; 2]) -> [u64; 2],
    ) -> Result<(), MetadataError> {
        if self.damaged {
            return Err(Damage::Known.into());
        }
        let table = self.ensure_l2_table(unit)?;
        let (start, at) = self.entry_location(table, unit);
        let block = self.cache.get_mut(start, WriteOrder::Mappings)?;
        let before = be64(block, at);
        let old = Cluster::parse(before, &self.header);
        let entry = match self.header.has_extended_l2() {
            false => {
                let [entry, _] = change(old.unwrap_or(Cluster::Unallocated), [before, 0]);
                put(block, at, entry);
                entry
            }
            true => {
                let old = old.map_err(|bad| Damage::Entry(bad.words()))?;
                let [entry, bitmap] = change(old, [before, be64(block, at + 8)]);
                put(block, at, entry);
                put(block, at + 8, bitmap);
                entry
            }
        };
        let bits = self.header.cluster_bits;
        match old {
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

    /// The position of the L2 table for `unit` of the disk, allocated if there is none. A shared
    /// table is not written to: there are no snapshots, so the other user is unknown.
    fn ensure_l2_table(&mut self, unit: u64) -> Result<u64, MetadataError> {
        let index = unit / self.header.l2_units();
        let entry = self.l1.get(index as usize).copied().unwrap_or_default();
        if let Some(pos) = self.l2_table_for(unit)? {
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
