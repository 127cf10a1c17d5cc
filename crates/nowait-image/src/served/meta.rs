//! The tables of an image in use: what its clusters are, and changing that, in memory.
//!
//! Invariant: no I/O happens here; what is not at hand is asked for by [`Stop::Missing`], and then
//! nothing was changed. A pointer is entered only when the cluster it points to was taken.
//! Knows: overlay, counts, entry, header. Known by: store.

use crate::entry::{COPIED, Cluster, L1Entry, ZERO};
use crate::header::{Header, be64};

use super::counts::{Clusters, Counts, put};
use super::overlay::{Overlay, Stage, Stop};

/// The metadata of the image on top of a chain.
pub(crate) struct Meta {
    header: Header,
    pub(crate) overlay: Overlay,
    l1: Vec<u64>,
    /// Of an image that is written to.
    counts: Option<Counts>,
    /// Clusters of the file when it was opened.
    file_end: u64,
}

impl Meta {
    /// Of an image with the L1 table `l1` in a file of `file_bytes`.
    pub(crate) fn new(
        header: Header,
        overlay: Overlay,
        l1: Vec<u64>,
        counts: Option<Counts>,
        file_bytes: u64,
    ) -> Self {
        let file_end = file_bytes.div_ceil(header.cluster_bytes());
        Self { header, overlay, l1, counts, file_end }
    }

    fn counts(&mut self) -> Result<(&mut Counts, &mut Overlay, &Header), Stop> {
        let counts = self.counts.as_mut().ok_or(Stop::Damaged)?;
        Ok((counts, &mut self.overlay, &self.header))
    }

    /// The first cluster behind all that are in use.
    pub(crate) fn end(&self) -> u64 {
        self.counts.as_ref().map_or(self.file_end, Counts::end)
    }

    /// Where the L2 table is that says what `cluster` of the disk is, if there is one.
    fn table_of(&self, cluster: u64) -> Result<Option<u64>, Stop> {
        let index = (cluster / self.header.l2_entries()) as usize;
        let entry = self.l1.get(index).copied().unwrap_or_default();
        match L1Entry::parse(entry, &self.header).map_err(|_| Stop::Damaged)? {
            L1Entry::Empty => Ok(None),
            L1Entry::Table { pos, .. } if self.can_be_table(pos) => Ok(Some(pos)),
            L1Entry::Table { .. } => Err(Stop::Damaged),
        }
    }

    /// Whether the cluster at `pos` is in the file and none whose place the header tells.
    fn can_be_table(&self, pos: u64) -> bool {
        let cluster = pos >> self.header.cluster_bits;
        let l1 = self.header.l1_pos >> self.header.cluster_bits;
        let l1_bytes = u64::from(self.header.l1_entries) * 8;
        let l1_end = l1 + l1_bytes.div_ceil(self.header.cluster_bytes());
        let counts = self.counts.as_ref();
        cluster > 0
            && cluster < self.end()
            && !(l1..l1_end).contains(&cluster)
            && counts.is_none_or(|counts| !counts.is_table(&self.header, cluster))
    }

    /// Whether the cluster at `pos` can be one of data.
    fn can_be_data(&self, pos: u64) -> bool {
        self.header.has_data_file() || self.can_be_table(pos)
    }

    /// Where the block of the overlay is that says what `cluster` of the disk is, with its L2
    /// table at `table`; and where in it.
    fn entry_place(&self, table: u64, cluster: u64) -> (u64, usize) {
        let pos = table + cluster % self.header.l2_entries() * 8;
        let start = pos & !(self.overlay.block() - 1);
        (start, (pos - start) as usize)
    }

    /// What the clusters of the disk from `first` on are: at least one and at most `most`.
    pub(crate) fn look(&self, first: u64, most: u64) -> Result<Vec<Cluster>, Stop> {
        let to_table_end = self.header.l2_entries() - first % self.header.l2_entries();
        let Some(table) = self.table_of(first)? else {
            return Ok(vec![Cluster::Unallocated; most.clamp(1, to_table_end) as usize]);
        };
        let (start, at) = self.entry_place(table, first);
        let entries = self.overlay.get(start)?[at..].chunks_exact(8);
        let parse = |entry: &[u8]| {
            let cluster = Cluster::parse(be64(entry, 0), &self.header);
            let cluster = cluster.map_err(|_| Stop::Damaged)?;
            match cluster {
                Cluster::Data { host, .. } | Cluster::Zero { host: Some(host), .. }
                    if !self.can_be_data(host) =>
                {
                    Err(Stop::Damaged)
                }
                good => Ok(good),
            }
        };
        let mut found = Vec::new();
        for entry in entries.take(most.max(1) as usize) {
            match parse(entry) {
                Ok(cluster) => found.push(cluster),
                // What comes before it is good.
                Err(_) if !found.is_empty() => break,
                Err(stop) => return Err(stop),
            }
        }
        Ok(found)
    }

    /// Takes at least one and at most `most` clusters of the file.
    pub(crate) fn take(&mut self, most: u64) -> Result<Clusters, Stop> {
        let (counts, overlay, header) = self.counts()?;
        counts.take(overlay, header, most)
    }

    /// Whether `cluster` of the file is zeros until it is first written.
    pub(crate) fn is_fresh(&self, cluster: u64) -> bool {
        self.counts.as_ref().is_some_and(|counts| counts.is_fresh(cluster))
    }

    /// Nothing points to these clusters of the file any more, or nothing ever did.
    pub(crate) fn give_up(&mut self, clusters: Clusters) {
        if let Some(counts) = &mut self.counts {
            let Clusters { first, count } = clusters;
            (first..first + count).for_each(|cluster| counts.give_up(cluster));
        }
    }

    /// Takes the clusters that were given up.
    pub(crate) fn take_given_up(&mut self) -> Vec<u64> {
        self.counts.as_mut().map(Counts::take_given_up).unwrap_or_default()
    }

    /// Lowers the count of `cluster` of the file.
    pub(crate) fn give_back(&mut self, cluster: u64) -> Result<(), Stop> {
        let (counts, overlay, header) = self.counts()?;
        counts.give_back(overlay, header, cluster)
    }

    /// `cluster` of the disk is from now on the one at `host` in the file with the data, which is
    /// nobody else's.
    pub(crate) fn set_data(&mut self, cluster: u64, host: u64) -> Result<(), Stop> {
        self.set(cluster, host | COPIED)
    }

    /// `cluster` of the disk is zeros from now on, and has no cluster of the file.
    pub(crate) fn set_zero(&mut self, cluster: u64) -> Result<(), Stop> {
        self.set(cluster, ZERO)
    }

    /// Enters what `cluster` of the disk is, and gives up what it was.
    fn set(&mut self, cluster: u64, entry: u64) -> Result<(), Stop> {
        let table = self.own_table(cluster)?;
        let (start, at) = self.entry_place(table, cluster);
        let before = be64(self.overlay.edit(start, Stage::Pointers)?, at);
        put(self.overlay.edit(start, Stage::Pointers)?, at, entry);
        let bits = self.header.cluster_bits;
        match Cluster::parse(before, &self.header) {
            Ok(Cluster::Compressed { pos, len }) => {
                let (first, last) = (pos >> bits, (pos + len - 1) >> bits);
                self.give_up(Clusters { first, count: last - first + 1 });
            }
            Ok(Cluster::Data { host, .. } | Cluster::Zero { host: Some(host), .. })
                if !self.header.has_data_file() && host != entry & !COPIED =>
            {
                self.give_up(Clusters { first: host >> bits, count: 1 });
            }
            _ => {}
        }
        Ok(())
    }

    /// The L2 table that says what `cluster` of the disk is, made if there is none. One that is
    /// shared is not written to: there are no snapshots, so nobody knows with whom.
    fn own_table(&mut self, cluster: u64) -> Result<u64, Stop> {
        let index = cluster / self.header.l2_entries();
        let entry = self.l1.get(index as usize).copied().unwrap_or_default();
        if let Some(pos) = self.table_of(cluster)? {
            return if entry & COPIED != 0 { Ok(pos) } else { Err(Stop::Damaged) };
        }
        let entry_pos = self.header.l1_pos + index * 8;
        let start = entry_pos & !(self.overlay.block() - 1);
        self.overlay.get(start)?;
        let pos = self.take(1)?.first << self.header.cluster_bits;
        self.overlay.put_new(pos, &vec![0; self.header.cluster_bytes() as usize]);
        put(self.overlay.edit(start, Stage::Pointers)?, (entry_pos - start) as usize, pos | COPIED);
        if let Some(known) = self.l1.get_mut(index as usize) {
            *known = pos | COPIED;
        }
        Ok(pos)
    }
}
