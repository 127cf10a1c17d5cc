//! Scans all pointers to clusters in a qcow2 file.
//!
//! Invariant: each table is read once for each pointer to it, and never beyond its bounds in the
//! header; an invalid pointer is reported and not followed.

use std::collections::BTreeSet;
use std::io;

use crate::formats::driver::Progress;
use crate::formats::qcow2::bitmaps;
use crate::formats::qcow2::check::recount::RecountedClusters;
use crate::formats::qcow2::entries::{Cluster, L1Entry, refcount_block};
use crate::formats::qcow2::header::{Header, MAX_POS, be32, be64};
use crate::formats::qcow2::lookup::read_table;
use crate::formats::qcow2::subclusters::check_bitmap;
use crate::image_file::ImageFile;

/// The most bytes of a table of snapshots that a check reads (block/qcow2.h, `QCOW_MAX_SNAPSHOTS_SIZE`).
/// Beyond it: the table counts as a corruption, and its other snapshots are not read.
const MAX_SNAPSHOTS_BYTES: usize = 64 << 20;
/// The most entries of a snapshot's L1 table that a check reads (block/qcow2.h, `QCOW_MAX_L1_SIZE`).
/// Beyond it: the table counts as a corruption and is not read.
const MAX_L1_ENTRIES: u32 = 4 << 20;
/// The most entries of a bitmap's table that a check reads (block/qcow2-bitmap.c, `BME_MAX_TABLE_SIZE`).
/// Beyond it: the table counts as a corruption, and this bitmap and the ones behind it are not read.
const MAX_BITMAP_TABLE_ENTRIES: u32 = 0x800_0000 / 8;
const SNAPSHOT_HEAD_BYTES: usize = 40;
const BITMAP_POSITION: u64 = 0x00ff_ffff_ffff_fe00;

/// Totals of the scan; the names are those of qemu-img's report.
#[derive(Debug, Default)]
pub(crate) struct ScanTotals {
    /// Invalid pointers.
    pub(crate) corruptions: u64,
    /// Clusters of the disk that are allocated in this image.
    pub(crate) allocated: u64,
    /// Compressed clusters among them.
    pub(crate) compressed: u64,
    /// Clusters among them that do not follow their table's previous cluster in the file.
    pub(crate) fragmented: u64,
    /// Positions of refcount blocks that have another use, too.
    pub(crate) shared_blocks: BTreeSet<u64>,
}

/// The owner of the L1 table that is scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TableOwner {
    Disk,
    Snapshot,
}

/// Counts every reference in the image into `references`.
pub(crate) fn count(
    file: &ImageFile,
    header: &Header,
    references: &mut RecountedClusters,
    progress: Progress<'_>,
) -> io::Result<ScanTotals> {
    let mut scan =
        MetadataScan { file, header, references, totals: ScanTotals::default(), next_host: 0 };
    scan.count_reference(0, header.cluster_bytes());
    scan.l1_table(header.l1_pos, header.l1_entries, TableOwner::Disk, progress)?;
    scan.snapshots()?;
    scan.bitmaps()?;
    scan.refcounts()?;
    Ok(scan.totals)
}

struct MetadataScan<'a> {
    file: &'a ImageFile,
    header: &'a Header,
    references: &'a mut RecountedClusters,
    totals: ScanTotals,
    /// The position at which the next cluster of an L2 table would be in the file if it were not
    /// fragmented; 0 at first.
    next_host: u64,
}

impl MetadataScan<'_> {
    fn count_reference(&mut self, pos: u64, len: u64) -> bool {
        let inside = self.references.count(pos, len).is_ok();
        self.totals.corruptions += u64::from(!inside);
        inside
    }

    /// Whether some of the `len` bytes at `pos` are behind the end of the file. A table has to be
    /// there in full, even where the last cluster is cut short.
    fn is_cut(&self, pos: u64, len: u64) -> io::Result<bool> {
        Ok(len > 0 && pos.saturating_add(len) > self.file.size()?)
    }

    fn l1_table(
        &mut self,
        pos: u64,
        entries: u32,
        owner: TableOwner,
        progress: Progress<'_>,
    ) -> io::Result<()> {
        let bytes = u64::from(entries) * 8;
        if entries > MAX_L1_ENTRIES || pos >= MAX_POS || !self.count_reference(pos, bytes) {
            self.totals.corruptions += u64::from(entries > MAX_L1_ENTRIES || pos >= MAX_POS);
            return Ok(());
        }
        self.totals.corruptions += u64::from(self.is_cut(pos, bytes)?);
        for (done, entry) in read_table(self.file, pos, u64::from(entries))?.iter().enumerate() {
            progress(done as u64, u64::from(entries));
            match L1Entry::parse(*entry, self.header) {
                Ok(L1Entry::Empty) => {}
                Ok(L1Entry::Table { pos, .. }) => {
                    // A table that is in use already was read before; the refcount comparison
                    // reports it.
                    let again = self.references.of(pos >> self.header.cluster_bits) > 0;
                    if self.count_reference(pos, self.header.cluster_bytes())
                        && (owner == TableOwner::Snapshot || !again)
                    {
                        self.l2_table(pos, owner)?;
                    }
                }
                Err(_) => self.totals.corruptions += 1,
            }
        }
        Ok(())
    }

    fn l2_table(&mut self, pos: u64, owner: TableOwner) -> io::Result<()> {
        self.next_host = 0;
        let words = self.header.entry_words();
        let table = read_table(self.file, pos, self.header.l2_entries() * words as u64)?;
        for entry in table.chunks_exact(words) {
            let (&[first] | &[first, _]) = entry else { continue };
            let cluster = match Cluster::parse(first, self.header) {
                Ok(cluster) => cluster,
                Err(_) => {
                    self.totals.corruptions += 1;
                    continue;
                }
            };
            // Its cluster is in use even if the states of its subclusters contradict each other.
            if let &[_, bitmap] = entry {
                self.totals.corruptions += u64::from(check_bitmap(cluster, bitmap).is_err());
            }
            if owner == TableOwner::Disk {
                self.add_to_totals(cluster);
            }
            match cluster {
                Cluster::Compressed { pos, len } => {
                    self.count_reference(pos, len);
                }
                Cluster::Data { host, .. } | Cluster::Zero { host: Some(host), .. }
                    if !self.header.has_data_file() =>
                {
                    self.count_reference(host, self.header.cluster_bytes());
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Adds one cluster of the disk to the totals.
    fn add_to_totals(&mut self, cluster: Cluster) {
        match cluster {
            Cluster::Compressed { .. } => {
                self.totals.allocated += 1;
                self.totals.compressed += 1;
                // A compressed cluster begins where the last one ended, which counts as fragmented.
                self.totals.fragmented += 1;
            }
            Cluster::Data { host, .. } | Cluster::Zero { host: Some(host), .. } => {
                self.totals.allocated += 1;
                if self.next_host != 0 && host != self.next_host {
                    self.totals.fragmented += 1;
                }
                self.next_host = host + self.header.cluster_bytes();
            }
            Cluster::Zero { host: None, .. }
            | Cluster::Unallocated
            | Cluster::Reserved { .. }
            | Cluster::Mixed { .. } => {}
        }
    }

    fn snapshots(&mut self) -> io::Result<()> {
        let mut at = self.header.snapshots_pos;
        for _ in 0..self.header.snapshots {
            let mut head = [0; SNAPSHOT_HEAD_BYTES];
            self.file.read_at(at, &mut head)?;
            let names = u64::from(be32(&head, 12) >> 16) + u64::from(be32(&head, 12) & 0xffff);
            let len = SNAPSHOT_HEAD_BYTES as u64 + u64::from(be32(&head, 36)) + names;
            let is_cut = self.is_cut(at, len)?;
            at = at.saturating_add(len.next_multiple_of(8));
            if is_cut || at - self.header.snapshots_pos > MAX_SNAPSHOTS_BYTES as u64 {
                self.totals.corruptions += 1;
                return Ok(());
            }
            let aligned = be64(&head, 0).is_multiple_of(self.header.cluster_bytes());
            if aligned {
                self.l1_table(
                    be64(&head, 0),
                    be32(&head, 8),
                    TableOwner::Snapshot,
                    &mut |_, _| {},
                )?;
            } else {
                self.totals.corruptions += 1;
            }
        }
        self.count_reference(self.header.snapshots_pos, at - self.header.snapshots_pos);
        Ok(())
    }

    fn bitmaps(&mut self) -> io::Result<()> {
        let Some(list) = self.header.bitmaps else { return Ok(()) };
        if !self.count_reference(list.pos, list.len) {
            return Ok(());
        }
        let mut at = list.pos;
        for _ in 0..list.bitmaps {
            let entry = bitmaps::Entry::read(self.file, at)?;
            let (pos, entries) = (entry.table_pos, entry.table_entries);
            at = at.saturating_add(entry.bytes());
            let aligned = pos.is_multiple_of(self.header.cluster_bytes());
            let bounded = entries <= MAX_BITMAP_TABLE_ENTRIES && at <= list.pos + list.len;
            if !aligned || !bounded || pos >= MAX_POS {
                self.totals.corruptions += 1;
                return Ok(());
            }
            if !self.count_reference(pos, u64::from(entries) * 8) {
                continue;
            }
            for entry in read_table(self.file, pos, u64::from(entries))? {
                let bits = entry & BITMAP_POSITION;
                if bits != 0 {
                    self.count_reference(bits, self.header.cluster_bytes());
                }
            }
        }
        Ok(())
    }

    fn refcounts(&mut self) -> io::Result<()> {
        let entries = self.header.refcount_table_entries();
        let pos = self.header.refcount_table_pos;
        if !self.count_reference(pos, entries * 8) {
            return Ok(());
        }
        for entry in read_table(self.file, pos, entries)? {
            match refcount_block(entry, self.header) {
                Ok(None) => {}
                Ok(Some(block)) => {
                    self.count_reference(block, self.header.cluster_bytes());
                    if self.references.of(block >> self.header.cluster_bits) > 1 {
                        self.totals.corruptions += 1;
                        self.totals.shared_blocks.insert(block);
                    }
                }
                Err(_) => self.totals.corruptions += 1,
            }
        }
        Ok(())
    }
}
