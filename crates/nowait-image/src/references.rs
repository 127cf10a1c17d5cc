//! How often each cluster of a file is really in use, counted from all that points to it.
//!
//! Invariant: memory goes with what is in use, not with the numbers in the image: counts are kept
//! for stretches of clusters that something points to inside the file.
//! Knows: nothing. Known by: walk, check.

use std::collections::BTreeMap;

/// Clusters whose counts are kept together.
pub(crate) const STRETCH: u64 = 4096;

/// Counts of references, up to a bound that all counts in an image are compared with.
pub(crate) struct References {
    stretches: BTreeMap<u64, Box<[u16]>>,
    clusters: u64,
    cluster_bits: u32,
    file_bytes: u64,
}

/// Something points behind the end of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outside;

impl References {
    /// For a file of `file_bytes` bytes in clusters of `1 << cluster_bits`.
    pub(crate) fn new(file_bytes: u64, cluster_bits: u32) -> Self {
        let clusters = file_bytes.div_ceil(1 << cluster_bits);
        Self { stretches: BTreeMap::new(), clusters, cluster_bits, file_bytes }
    }

    /// Clusters in the file, the last one perhaps in part.
    pub(crate) fn clusters(&self) -> u64 {
        self.clusters
    }

    /// Counts one reference to each cluster that `len` bytes from `pos` on touch. What ends less
    /// than a cluster behind the end of the file is in it: the last cluster may be cut short.
    pub(crate) fn count(&mut self, pos: u64, len: u64) -> Result<(), Outside> {
        if len == 0 {
            return Ok(());
        }
        let end = pos.checked_add(len).ok_or(Outside)?;
        if end.saturating_sub(self.file_bytes) >= 1 << self.cluster_bits {
            return Err(Outside);
        }
        for cluster in pos >> self.cluster_bits..=(end - 1) >> self.cluster_bits {
            let stretch = self
                .stretches
                .entry(cluster / STRETCH)
                .or_insert_with(|| vec![0; STRETCH as usize].into_boxed_slice());
            let count = &mut stretch[(cluster % STRETCH) as usize];
            *count = count.saturating_add(1);
            self.clusters = self.clusters.max(cluster + 1);
        }
        Ok(())
    }

    /// References to `cluster`; `u16::MAX` stands for that many or more.
    pub(crate) fn of(&self, cluster: u64) -> u64 {
        let stretch = self.stretches.get(&(cluster / STRETCH));
        stretch.map_or(0, |counts| u64::from(counts[(cluster % STRETCH) as usize]))
    }

    /// Whether nothing points into the stretch that begins at `cluster`.
    pub(crate) fn is_unused(&self, cluster: u64) -> bool {
        !self.stretches.contains_key(&(cluster / STRETCH))
    }

    /// The numbers of the stretches that something points into, in order.
    pub(crate) fn used(&self) -> impl Iterator<Item = u64> {
        self.stretches.keys().copied()
    }
}
