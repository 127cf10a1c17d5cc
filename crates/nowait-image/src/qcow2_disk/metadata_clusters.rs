//! Which clusters of an image's file hold metadata, and which lie inside the file.
//!
//! Invariant: a cluster that is listed here is never allocated and never read or written as data.
//! The list does not depend on the refcounts, which may be wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::formats::qcow2::entries::{L1Entry, refcount_block};
use crate::formats::qcow2::header::Header;

use crate::qcow2_disk::damage::{ClusterUse, Damage};
use crate::qcow2_disk::metadata_cache::MetadataError;

#[derive(Clone, Copy)]
struct MetadataUse {
    holds: ClusterUse,
    /// Whether the tables name it more than once, for the same use or another.
    shared: bool,
}

/// The clusters with metadata, and the size of the file in clusters.
pub(crate) struct MetadataClusters {
    clusters: BTreeMap<u64, MetadataUse>,
    cluster_bits: u32,
    /// Clusters in the file when it was opened.
    file_end: u64,
    /// Clusters allocated behind that, sorted; new ones that continue the last range are merged with
    /// it.
    appended: Vec<Range<u64>>,
    /// Data clusters with a refcount of 0; `None` until the survey.
    uncounted: Option<BTreeSet<u64>>,
}

impl MetadataClusters {
    /// For an image with the L1 table `l1` and the refcount table `table`, empty if unknown, in a
    /// file of `file_bytes`.
    pub(crate) fn new(header: &Header, l1: &[u64], table: &[u64], file_bytes: u64) -> Self {
        let (bits, cluster) = (header.cluster_bits, header.cluster_bytes());
        let mut reserved = Self {
            clusters: BTreeMap::new(),
            cluster_bits: bits,
            file_end: file_bytes.div_ceil(cluster),
            appended: Vec::new(),
            uncounted: None,
        };
        let bytes = [
            (ClusterUse::Header, 0, 1),
            (ClusterUse::L1Table, header.l1_pos, u64::from(header.l1_entries) * 8),
            (
                ClusterUse::RefcountTable,
                header.refcount_table_pos,
                header.refcount_table_entries() * 8,
            ),
        ];
        for (holds, pos, len) in bytes {
            reserved.add(holds, pos >> bits, len.div_ceil(cluster));
        }
        for &entry in l1 {
            if let Ok(L1Entry::Table { pos, .. }) = L1Entry::parse(entry, header) {
                reserved.add(ClusterUse::L2Table, pos >> bits, 1);
            }
        }
        // After the L2 tables: one that the refcount table also names as a block can still be read.
        for &entry in table {
            if let Ok(Some(pos)) = refcount_block(entry, header) {
                reserved.add(ClusterUse::RefcountBlock, pos >> bits, 1);
            }
        }
        reserved
    }

    /// Lists clusters as metadata, as far as they are inside the file.
    pub(crate) fn add(&mut self, holds: ClusterUse, first: u64, count: u64) {
        for cluster in first..first.saturating_add(count) {
            if !self.is_in_file(cluster) {
                break;
            }
            self.clusters
                .entry(cluster)
                .and_modify(|entry| entry.shared = true)
                .or_insert(MetadataUse { holds, shared: false });
        }
    }

    /// Records that these clusters, which were free, are allocated.
    pub(crate) fn mark_allocated(&mut self, first: u64, count: u64) {
        let new = first.max(self.file_end)..first + count;
        match self.appended.last_mut() {
            _ if new.is_empty() => {}
            Some(last) if last.end == new.start => last.end = new.end,
            _ => {
                let at = self.appended.partition_point(|old| old.start < new.start);
                self.appended.insert(at, new);
            }
        }
    }

    /// Clusters in the file when it was opened; those behind read as zeros until they are written.
    pub(crate) fn file_end(&self) -> u64 {
        self.file_end
    }

    /// Whether `cluster` was in the file when it was opened, or was allocated since.
    pub(crate) fn is_in_file(&self, cluster: u64) -> bool {
        cluster < self.file_end || {
            let at = self.appended.partition_point(|range| range.start <= cluster);
            at > 0 && self.appended.get(at - 1).is_some_and(|range| range.contains(&cluster))
        }
    }

    /// The metadata that `cluster` holds, if any.
    pub(crate) fn holds(&self, cluster: u64) -> Option<ClusterUse> {
        self.clusters.get(&cluster).map(|entry| entry.holds)
    }

    /// How many of the `count` clusters from `first` on come before the first one with metadata.
    pub(crate) fn free_of(&self, first: u64, count: u64) -> u64 {
        let found = self.clusters.range(first..first.saturating_add(count)).next();
        found.map_or(count, |(&cluster, _)| cluster - first)
    }

    /// How many of the `count` clusters from `first` on, counted from the first, can be data.
    pub(crate) fn can_be_data(&self, first: u64, count: u64) -> u64 {
        let free = self.free_of(first, count);
        if first.saturating_add(free) <= self.file_end {
            return free;
        }
        (first..first + free).take_while(|&cluster| self.is_in_file(cluster)).count() as u64
    }

    /// Whether the tables give `cluster` more than one use.
    pub(crate) fn is_shared(&self, cluster: u64) -> bool {
        self.clusters.get(&cluster).is_some_and(|entry| entry.shared)
    }

    /// Returns `pos`, where an L1 entry puts an L2 table. An error if no L2 table can be there.
    pub(crate) fn l2_table(&self, pos: u64) -> Result<u64, Damage> {
        match self.holds(pos >> self.cluster_bits) {
            Some(ClusterUse::L2Table) => Ok(pos),
            _ => Err(Damage::TableAt(pos)),
        }
    }

    /// Returns `pos`, where the refcount table puts a refcount block. An error if none can be
    /// there, or if the cluster has another use that a write would destroy.
    pub(crate) fn block(&self, pos: u64) -> Result<u64, Damage> {
        let cluster = pos >> self.cluster_bits;
        match self.clusters.get(&cluster) {
            Some(MetadataUse { shared: true, .. }) => Err(Damage::Shared(pos)),
            Some(MetadataUse { holds: ClusterUse::RefcountBlock, .. }) => Ok(pos),
            _ => Err(Damage::BlockAt(pos)),
        }
    }

    /// Of the `count` clusters from `first` on, all with a refcount of 0, how many are really free.
    /// An error if the first one is in use. For a cluster that was in the file when it was opened,
    /// the survey has to be done first ([`MetadataError::Unsurveyed`]).
    pub(crate) fn check_free(&self, first: u64, count: u64) -> Result<u64, MetadataError> {
        let pos = first << self.cluster_bits;
        let free = match (self.free_of(first, count), self.holds(first)) {
            (0, Some(holds)) => return Err(Damage::CountsAsFree(holds, pos).into()),
            (free, _) => free,
        };
        if first >= self.file_end {
            return Ok(free);
        }
        let Some(uncounted) = &self.uncounted else { return Err(MetadataError::Unsurveyed) };
        match uncounted.range(first..first + free).next() {
            None => Ok(free),
            Some(&used) if used > first => Ok(used - first),
            Some(_) => Err(Damage::CountsAsFree(ClusterUse::Data, pos).into()),
        }
    }

    /// Sets the result of the survey: of all clusters that were in the file when it was opened,
    /// only `clusters` are in use and have a refcount of 0.
    pub(crate) fn survey(&mut self, clusters: BTreeSet<u64>) {
        self.uncounted = Some(clusters);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BITS: u32 = 9;

    fn reserved() -> MetadataClusters {
        // Clusters: header, refcount table, refcount block, L1 table, L2 tables at 4 and twice 6.
        let header = Header {
            l1_pos: 3 << BITS,
            l1_entries: 4,
            refcount_table_pos: 1 << BITS,
            refcount_table_clusters: 1,
            ..Header::empty(0, BITS)
        };
        MetadataClusters::new(
            &header,
            &[4 << BITS, 6 << BITS, 6 << BITS, 99 << BITS],
            &[2 << BITS],
            5000,
        )
    }

    #[test]
    fn clusters_that_the_tables_name_are_reserved_and_those_behind_the_file_are_not() {
        let mut reserved = reserved();
        let all: Vec<_> = (0..=100).map(|cluster| reserved.holds(cluster)).collect();
        let expected = [
            Some(ClusterUse::Header),
            Some(ClusterUse::RefcountTable),
            Some(ClusterUse::RefcountBlock),
            Some(ClusterUse::L1Table),
            Some(ClusterUse::L2Table),
            None,
            Some(ClusterUse::L2Table),
        ];
        assert_eq!(all[..7], expected);
        assert_eq!(all[7..], [None; 94]);
        assert!(reserved.is_shared(6) && !reserved.is_shared(4));
        let free = |holds, cluster: u64| Err(Damage::CountsAsFree(holds, cluster << BITS).into());
        assert_eq!(reserved.check_free(6, 9), free(ClusterUse::L2Table, 6));
        assert_eq!(reserved.check_free(5, 9), Err(MetadataError::Unsurveyed));
        reserved.survey([8].into());
        assert_eq!(reserved.check_free(5, 9), Ok(1));
        assert_eq!(reserved.check_free(7, 9), Ok(1));
        assert_eq!(reserved.check_free(8, 9), free(ClusterUse::Data, 8));
        assert_eq!(reserved.l2_table(99 << BITS), Err(Damage::TableAt(99 << BITS)));
        assert_eq!(reserved.l2_table(2 << BITS), Err(Damage::TableAt(2 << BITS)));
        assert_eq!(reserved.block(4 << BITS), Err(Damage::BlockAt(4 << BITS)));
    }

    #[test]
    fn behind_the_end_of_the_file_only_allocated_clusters_can_be_data() {
        let mut reserved = reserved();
        assert_eq!(
            reserved.can_be_data(8, 5),
            2,
            "the file has ten clusters, the last one in part"
        );
        reserved.mark_allocated(9, 3);
        reserved.mark_allocated(20, 2);
        reserved.mark_allocated(12, 1);
        assert_eq!(reserved.can_be_data(8, 9), 5);
        let inside: Vec<_> = (8..30).filter(|&cluster| reserved.is_in_file(cluster)).collect();
        assert_eq!(inside, [8, 9, 10, 11, 12, 20, 21]);
    }
}
