//! The real number of references to each cluster of a file, counted from all pointers in it.
//!
//! Invariant: memory is proportional to the clusters in use, not to the numbers in the image:
//! counts are kept for groups of clusters inside the file that a pointer refers to.

use std::collections::BTreeMap;

/// Clusters in a group.
pub(crate) const GROUP_CLUSTERS: u64 = 4096;

/// Numbers of references, saturating at `u16::MAX`; refcounts of the image are capped likewise for
/// the comparison.
pub(crate) struct RecountedClusters {
    groups: BTreeMap<u64, Box<[u16]>>,
    clusters: u64,
    cluster_bits: u32,
    file_bytes: u64,
}

/// A pointer refers to bytes behind the end of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutOfBounds;

impl RecountedClusters {
    /// For a file of `file_bytes` bytes in clusters of `1 << cluster_bits` bytes.
    pub(crate) fn new(file_bytes: u64, cluster_bits: u32) -> Self {
        let clusters = file_bytes.div_ceil(1 << cluster_bits);
        Self { groups: BTreeMap::new(), clusters, cluster_bits, file_bytes }
    }

    /// Clusters in the file, the last one perhaps in part.
    pub(crate) fn clusters(&self) -> u64 {
        self.clusters
    }

    /// Counts one reference to each cluster that `len` bytes from `pos` on touch. A range that ends
    /// less than a cluster behind the end of the file is accepted: the last cluster may be cut
    /// short.
    pub(crate) fn count(&mut self, pos: u64, len: u64) -> Result<(), OutOfBounds> {
        if len == 0 {
            return Ok(());
        }
        let end = pos.checked_add(len).ok_or(OutOfBounds)?;
        if end.saturating_sub(self.file_bytes) >= 1 << self.cluster_bits {
            return Err(OutOfBounds);
        }
        for cluster in pos >> self.cluster_bits..=(end - 1) >> self.cluster_bits {
            let group = self
                .groups
                .entry(cluster / GROUP_CLUSTERS)
                .or_insert_with(|| vec![0; GROUP_CLUSTERS as usize].into_boxed_slice());
            let count = &mut group[(cluster % GROUP_CLUSTERS) as usize];
            *count = count.saturating_add(1);
            self.clusters = self.clusters.max(cluster + 1);
        }
        Ok(())
    }

    /// References to `cluster`; `u16::MAX` stands for that many or more.
    pub(crate) fn of(&self, cluster: u64) -> u64 {
        let group = self.groups.get(&(cluster / GROUP_CLUSTERS));
        group.map_or(0, |counts| u64::from(counts[(cluster % GROUP_CLUSTERS) as usize]))
    }

    /// The clusters with references, in order.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = u64> {
        self.groups.iter().flat_map(|(group, counts)| {
            let clusters = (group * GROUP_CLUSTERS..).zip(counts.iter());
            clusters.filter(|&(_, &count)| count > 0).map(|(cluster, _)| cluster)
        })
    }

    /// Whether the group that begins at `cluster` has no references.
    pub(crate) fn is_unused(&self, cluster: u64) -> bool {
        !self.groups.contains_key(&(cluster / GROUP_CLUSTERS))
    }

    /// The indexes of the groups with references, in order.
    pub(crate) fn used(&self) -> impl Iterator<Item = u64> {
        self.groups.keys().copied()
    }
}
