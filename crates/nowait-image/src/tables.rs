//! The mapping tables of a qcow2 image, read from its file: which cluster is where.
//!
//! Invariant: at most one L1 table and one L2 table are held, whatever the size of the image;
//! nothing is written. Knows: entry, error, header, host. Known by: map, check.

use std::io;

use crate::entry::{BadEntry, Cluster, L1Entry};
use crate::error::ImageError;
use crate::header::{Header, be64};
use crate::host::HostFile;

/// A table of eight-byte numbers at `pos`, `entries` long; zeros behind the end of the file.
pub(crate) fn read_table(file: &HostFile, pos: u64, entries: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; entries as usize * 8];
    file.read_at(pos, &mut bytes)?;
    Ok(bytes.chunks_exact(8).map(|entry| be64(entry, 0)).collect())
}

/// The tables of an image, walked through from its beginning to its end.
pub(crate) struct Tables<'a> {
    file: &'a HostFile,
    header: &'a Header,
    l1: Vec<u64>,
    /// The L2 table at hand, and where it is.
    l2: Option<(u64, Vec<u64>)>,
}

impl<'a> Tables<'a> {
    /// Of the image in `file`, whose L1 table is read.
    pub(crate) fn read(file: &'a HostFile, header: &'a Header) -> Result<Self, ImageError> {
        let l1 = read_table(file, header.l1_pos, u64::from(header.l1_entries))
            .map_err(|e| ImageError::os(file.path(), "read its L1 table", &e))?;
        Ok(Self { file, header, l1, l2: None })
    }

    /// What backs the disk from `pos` on, and for how many bytes that is known at once: `len` at
    /// most, and never beyond one L2 table.
    pub(crate) fn lookup(&mut self, pos: u64, len: u64) -> Result<(Cluster, u64), ImageError> {
        let reach = self.header.l2_reach();
        let in_table = pos % reach;
        let len = len.min(reach - in_table);
        let index = (pos / reach) as usize;
        let bad = |bad: BadEntry| self.bad(pos, bad);
        let entry = self.l1.get(index).copied().unwrap_or_default();
        let table = match L1Entry::parse(entry, self.header).map_err(bad)? {
            L1Entry::Empty => return Ok((Cluster::Unallocated, len)),
            L1Entry::Table { pos, .. } => pos,
        };
        if self.l2.as_ref().is_none_or(|&(held, _)| held != table) {
            let read = read_table(self.file, table, self.header.l2_entries());
            let read =
                read.map_err(|e| ImageError::os(self.file.path(), "read an L2 table", &e))?;
            self.l2 = Some((table, read));
        }
        let entries = self.l2.as_ref().map_or(&[][..], |(_, entries)| entries);
        let bits = self.header.cluster_bits;
        let cluster_bytes = self.header.cluster_bytes();
        let mut at = (in_table >> bits) as usize;
        let parse = |at: usize| {
            let entry = entries.get(at).copied().unwrap_or_default();
            Cluster::parse(entry, self.header).map_err(|bad| self.bad(pos, bad))
        };
        let first = parse(at)?;
        let mut found = cluster_bytes - in_table % cluster_bytes;
        let mut last = first;
        while found < len {
            at += 1;
            let next = parse(at)?;
            if !continues(last, next, cluster_bytes) {
                break;
            }
            last = next;
            found += cluster_bytes;
        }
        Ok((first, found.min(len)))
    }

    fn bad(&self, pos: u64, bad: BadEntry) -> ImageError {
        let what = format!("its metadata is damaged: the entry for byte {pos} {}", bad.words());
        ImageError::refused(self.file.path(), what)
    }
}

/// Whether `next` is of the kind of the cluster before it, and behind it in the file too.
pub(crate) fn continues(last: Cluster, next: Cluster, cluster_bytes: u64) -> bool {
    match (last, next) {
        (Cluster::Unallocated, Cluster::Unallocated)
        | (Cluster::Compressed { .. }, Cluster::Compressed { .. })
        | (Cluster::Zero { host: None, .. }, Cluster::Zero { host: None, .. }) => true,
        (Cluster::Zero { host: Some(a), .. }, Cluster::Zero { host: Some(b), .. })
        | (Cluster::Data { host: a, .. }, Cluster::Data { host: b, .. }) => a + cluster_bytes == b,
        _ => false,
    }
}
