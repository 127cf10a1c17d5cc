//! The mapping tables of a qcow2 image, read from its file: the position of each cluster.
//!
//! Invariant: at most one L1 table and one L2 table are in memory, whatever the size of the image;
//! no file is written.

use std::io;

use crate::error::ImageError;
use crate::formats::qcow2::entries::{BadEntry, Cluster, L1Entry};
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::subclusters::units;
use crate::image_file::ImageFile;

/// A table of eight-byte numbers at `pos`, `entries` long; zeros behind the end of the file.
pub(crate) fn read_table(file: &ImageFile, pos: u64, entries: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; entries as usize * 8];
    file.read_at(pos, &mut bytes)?;
    let (entries, _) = bytes.as_chunks();
    Ok(entries.iter().map(|&entry| u64::from_be_bytes(entry)).collect())
}

/// The tables of an image, for lookups from its beginning to its end.
pub(crate) struct Tables<'a> {
    file: &'a ImageFile,
    header: &'a Header,
    /// The end of the file's last cluster, which may be there only in part.
    end: u64,
    l1: Vec<u64>,
    /// The loaded L2 table and its position.
    l2: Option<(u64, Vec<u8>)>,
}

impl<'a> Tables<'a> {
    /// For the image in `file`, whose L1 table is read.
    pub(crate) fn read(file: &'a ImageFile, header: &'a Header) -> Result<Self, ImageError> {
        let l1 = read_table(file, header.l1_pos, u64::from(header.l1_entries))
            .map_err(|e| ImageError::os(file.path(), "read its L1 table", &e))?;
        let bytes = file.size().map_err(|e| ImageError::os(file.path(), "find its size", &e))?;
        let end = bytes.next_multiple_of(header.cluster_bytes());
        Ok(Self { file, header, end, l1, l2: None })
    }

    /// The mapping of the disk from `pos` on, and for how many bytes: at most `len`, and never
    /// beyond one L2 table.
    pub(crate) fn lookup(&mut self, pos: u64, len: u64) -> Result<(Cluster, u64), ImageError> {
        let reach = self.header.l2_reach();
        let in_table = pos % reach;
        let len = len.min(reach - in_table);
        let index = (pos / reach) as usize;
        let bad = |bad: BadEntry| self.bad(pos, bad);
        let entry = self.l1.get(index).copied().unwrap_or_default();
        let table = match L1Entry::parse(entry, self.header).map_err(bad)? {
            L1Entry::Empty => return Ok((Cluster::Unallocated, len)),
            L1Entry::Table { pos, .. } if self.has(pos) => pos,
            L1Entry::Table { .. } => return Err(bad(BadEntry::Outside)),
        };
        if self.l2.as_ref().is_none_or(|&(loaded, _)| loaded != table) {
            let mut read = vec![0; self.header.cluster_bytes() as usize];
            let done = self.file.read_at(table, &mut read);
            done.map_err(|e| ImageError::os(self.file.path(), "read an L2 table", &e))?;
            self.l2 = Some((table, read));
        }
        let entries = self.l2.as_ref().map_or(&[][..], |(_, entries)| entries);
        let unit_bytes = self.header.unit_bytes();
        let inside = in_table % unit_bytes;
        let clusters = units_from(entries, in_table / unit_bytes, self.header);
        let clusters = clusters.take((inside + len).div_ceil(unit_bytes) as usize);
        let is_cut = |cluster| match cluster {
            Cluster::Data { host, .. } => !self.header.has_data_file() && !self.has(host),
            Cluster::Compressed { pos, .. } => pos >= self.end,
            _ => false,
        };
        let bad = |bad: BadEntry| self.bad(pos, bad);
        let (first, count) = run_of(clusters, unit_bytes, |_, next| !is_cut(next)).map_err(bad)?;
        match is_cut(first) {
            true => Err(bad(BadEntry::Outside)),
            false => Ok((first, (count * unit_bytes - inside).min(len))),
        }
    }

    /// Whether the cluster at `pos` is in the file, at least in part.
    fn has(&self, pos: u64) -> bool {
        pos < self.end
    }

    fn bad(&self, pos: u64, bad: BadEntry) -> ImageError {
        let what = format!("its metadata is damaged: the entry for byte {pos} {}", bad.words());
        ImageError::refused(self.file.path(), what)
    }
}

/// The mappings of the units of an L2 table from number `first` on; `entries` is the table from its beginning on.
fn units_from<'a>(
    entries: &'a [u8],
    first: u64,
    header: &'a Header,
) -> impl Iterator<Item = Result<Cluster, BadEntry>> + 'a {
    let entry = first >> header.unit_shift();
    let from = entries.get((entry * header.entry_bytes()) as usize..).unwrap_or_default();
    units(from, first - (entry << header.unit_shift()), header)
}

/// The first of `clusters`, which is unallocated if there is none, and how many are its run: they
/// continue it in the file, and `goes_on` holds for each and the one before it.
///
/// # Errors
/// What is wrong with the first entry. A run ends before another that is invalid.
#[inline]
pub(crate) fn run_of(
    mut clusters: impl Iterator<Item = Result<Cluster, BadEntry>>,
    unit_bytes: u64,
    goes_on: impl Fn(Cluster, Cluster) -> bool,
) -> Result<(Cluster, u64), BadEntry> {
    let first = clusters.next().unwrap_or(Ok(Cluster::Unallocated))?;
    let (mut last, mut count) = (first, 1);
    while let Some(Ok(next)) = clusters.next()
        && is_contiguous(last, next, unit_bytes)
        && goes_on(last, next)
    {
        (last, count) = (next, count + 1);
    }
    Ok((first, count))
}

/// Whether `next` is of the same kind as the cluster before it and, where both have positions,
/// follows it in the file.
fn is_contiguous(last: Cluster, next: Cluster, unit_bytes: u64) -> bool {
    match (last, next) {
        (Cluster::Unallocated, Cluster::Unallocated)
        | (Cluster::Compressed { .. }, Cluster::Compressed { .. })
        | (Cluster::Zero { host: None, .. }, Cluster::Zero { host: None, .. }) => true,
        (Cluster::Zero { host: Some(a), .. }, Cluster::Zero { host: Some(b), .. })
        | (Cluster::Reserved { host: a, .. }, Cluster::Reserved { host: b, .. })
        | (Cluster::Data { host: a, .. }, Cluster::Data { host: b, .. }) => a + unit_bytes == b,
        _ => false,
    }
}
