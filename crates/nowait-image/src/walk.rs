//! The walk over everything in a qcow2 file that points to clusters of it.
//!
//! Invariant: each table is read once for each time that something points to it, and never more
//! of it than its bounds in the header allow; a pointer that is wrong is reported and not followed.
//! Knows: entry, header, host, references, tables. Known by: check.

use std::collections::BTreeSet;
use std::io;

use crate::entry::{Cluster, L1Entry, refcount_block};
use crate::header::{Header, MAX_POS, be32, be64};
use crate::host::HostFile;
use crate::references::References;
use crate::tables::read_table;

/// Bounds on what a list of snapshots or bitmaps makes anyone read (block/qcow2.h,
/// `QCOW_MAX_SNAPSHOTS_SIZE`, `QCOW_MAX_L1_SIZE`, `BME_MAX_TABLE_SIZE`).
const MAX_SNAPSHOTS_BYTES: usize = 64 << 20;
const MAX_L1_ENTRIES: u32 = 4 << 20;
const MAX_BITMAP_TABLE_ENTRIES: u32 = 0x800_0000 / 8;
const SNAPSHOT_HEAD_BYTES: usize = 40;
const BITMAP_HEAD_BYTES: usize = 24;
const BITMAP_POSITION: u64 = 0x00ff_ffff_ffff_fe00;

/// What is counted on the way; the names are those of qemu-img's report.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Pointers that are wrong.
    pub(crate) corruptions: u64,
    /// Clusters of the disk that have data of their own.
    pub(crate) allocated: u64,
    /// Those of them that are compressed.
    pub(crate) compressed: u64,
    /// Those of them that do not follow the one before of their table in the file.
    pub(crate) fragmented: u64,
    /// Positions of refcount blocks that something else points to, too.
    pub(crate) shared_blocks: BTreeSet<u64>,
}

/// Progress of something long: bytes or entries done, and of how many.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Whose L1 table is walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Disk,
    Snapshot,
}

/// Counts every reference in the image into `references`.
pub(crate) fn count(
    file: &HostFile,
    header: &Header,
    references: &mut References,
    progress: Progress<'_>,
) -> io::Result<Seen> {
    let mut walk = Walk { file, header, references, seen: Seen::default(), next_host: 0 };
    walk.point(0, header.cluster_bytes());
    walk.table(header.l1_pos, header.l1_entries, Owner::Disk, progress)?;
    walk.snapshots()?;
    walk.bitmaps()?;
    walk.refcounts()?;
    Ok(walk.seen)
}

struct Walk<'a> {
    file: &'a HostFile,
    header: &'a Header,
    references: &'a mut References,
    seen: Seen,
    /// Where the next cluster of an L2 table would be in the file if it were not fragmented; 0 at
    /// first.
    next_host: u64,
}

impl Walk<'_> {
    fn point(&mut self, pos: u64, len: u64) -> bool {
        let inside = self.references.count(pos, len).is_ok();
        self.seen.corruptions += u64::from(!inside);
        inside
    }

    fn table(
        &mut self,
        pos: u64,
        entries: u32,
        owner: Owner,
        progress: Progress<'_>,
    ) -> io::Result<()> {
        let bytes = u64::from(entries) * 8;
        if entries > MAX_L1_ENTRIES || pos >= MAX_POS || !self.point(pos, bytes) {
            self.seen.corruptions += u64::from(entries > MAX_L1_ENTRIES || pos >= MAX_POS);
            return Ok(());
        }
        for (done, entry) in read_table(self.file, pos, u64::from(entries))?.iter().enumerate() {
            progress(done as u64, u64::from(entries));
            match L1Entry::parse(*entry, self.header) {
                Ok(L1Entry::Empty) => {}
                Ok(L1Entry::Table { pos, .. }) => {
                    // A table that is in use already was read, and is reported by its count.
                    let again = self.references.of(pos >> self.header.cluster_bits) > 0;
                    if self.point(pos, self.header.cluster_bytes())
                        && (owner == Owner::Snapshot || !again)
                    {
                        self.l2_table(pos, owner)?;
                    }
                }
                Err(_) => self.seen.corruptions += 1,
            }
        }
        Ok(())
    }

    fn l2_table(&mut self, pos: u64, owner: Owner) -> io::Result<()> {
        self.next_host = 0;
        for entry in read_table(self.file, pos, self.header.l2_entries())? {
            let cluster = match Cluster::parse(entry, self.header) {
                Ok(cluster) => cluster,
                Err(_) => {
                    self.seen.corruptions += 1;
                    continue;
                }
            };
            if owner == Owner::Disk {
                self.note(cluster);
            }
            match cluster {
                Cluster::Compressed { pos, len } => {
                    self.point(pos, len);
                }
                Cluster::Data { host, .. } | Cluster::Zero { host: Some(host), .. }
                    if !self.header.has_data_file() =>
                {
                    self.point(host, self.header.cluster_bytes());
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The statistics of one cluster of the disk.
    fn note(&mut self, cluster: Cluster) {
        match cluster {
            Cluster::Compressed { .. } => {
                self.seen.allocated += 1;
                self.seen.compressed += 1;
                // A compressed cluster is where the last one ended, which is fragmented by nature.
                self.seen.fragmented += 1;
            }
            Cluster::Data { host, .. } | Cluster::Zero { host: Some(host), .. } => {
                self.seen.allocated += 1;
                if self.next_host != 0 && host != self.next_host {
                    self.seen.fragmented += 1;
                }
                self.next_host = host + self.header.cluster_bytes();
            }
            Cluster::Zero { host: None, .. } | Cluster::Unallocated => {}
        }
    }

    fn snapshots(&mut self) -> io::Result<()> {
        let mut at = self.header.snapshots_pos;
        for _ in 0..self.header.snapshots {
            let mut head = [0; SNAPSHOT_HEAD_BYTES];
            self.file.read_at(at, &mut head)?;
            let names = u64::from(be32(&head, 12) >> 16) + u64::from(be32(&head, 12) & 0xffff);
            let len = SNAPSHOT_HEAD_BYTES as u64 + u64::from(be32(&head, 36)) + names;
            at = at.saturating_add(len.next_multiple_of(8));
            if at - self.header.snapshots_pos > MAX_SNAPSHOTS_BYTES as u64 {
                self.seen.corruptions += 1;
                return Ok(());
            }
            let aligned = be64(&head, 0).is_multiple_of(self.header.cluster_bytes());
            if aligned {
                self.table(be64(&head, 0), be32(&head, 8), Owner::Snapshot, &mut |_, _| {})?;
            } else {
                self.seen.corruptions += 1;
            }
        }
        self.point(self.header.snapshots_pos, at - self.header.snapshots_pos);
        Ok(())
    }

    fn bitmaps(&mut self) -> io::Result<()> {
        let Some(list) = self.header.bitmaps else { return Ok(()) };
        if !self.point(list.pos, list.len) {
            return Ok(());
        }
        let mut at = list.pos;
        for _ in 0..list.bitmaps {
            let mut head = [0; BITMAP_HEAD_BYTES];
            self.file.read_at(at, &mut head)?;
            let (pos, entries) = (be64(&head, 0), be32(&head, 8));
            let len = BITMAP_HEAD_BYTES as u64
                + u64::from(be32(&head, 16) & 0xffff)
                + u64::from(be32(&head, 20));
            at = at.saturating_add(len.next_multiple_of(8));
            let aligned = pos.is_multiple_of(self.header.cluster_bytes());
            let bounded = entries <= MAX_BITMAP_TABLE_ENTRIES && at <= list.pos + list.len;
            if !aligned || !bounded || pos >= MAX_POS {
                self.seen.corruptions += 1;
                return Ok(());
            }
            if !self.point(pos, u64::from(entries) * 8) {
                continue;
            }
            for entry in read_table(self.file, pos, u64::from(entries))? {
                let bits = entry & BITMAP_POSITION;
                if bits != 0 {
                    self.point(bits, self.header.cluster_bytes());
                }
            }
        }
        Ok(())
    }

    fn refcounts(&mut self) -> io::Result<()> {
        let entries = self.header.refcount_table_entries();
        let pos = self.header.refcount_table_pos;
        if !self.point(pos, entries * 8) {
            return Ok(());
        }
        for entry in read_table(self.file, pos, entries)? {
            match refcount_block(entry, self.header) {
                Ok(None) => {}
                Ok(Some(block)) => {
                    self.point(block, self.header.cluster_bytes());
                    if self.references.of(block >> self.header.cluster_bits) > 1 {
                        self.seen.corruptions += 1;
                        self.seen.shared_blocks.insert(block);
                    }
                }
                Err(_) => self.seen.corruptions += 1,
            }
        }
        Ok(())
    }
}
