//! Builds a new qcow2 image whose data the caller writes: assigns positions in the file, and
//! finally writes the tables.
//!
//! Invariant: no cluster is allocated twice; the file is not a valid image before its tables are
//! written, and its first bytes are written last. Every cluster up to the end of the file has a
//! refcount of 1, or of the number of compressed clusters in it.

use std::collections::BTreeMap;
use std::io;

use nowait::ByteRange;

use crate::formats::decompress::Compression;
use crate::formats::driver::ImageBuilder;
use crate::formats::qcow2::encode::encode;
use crate::formats::qcow2::entries::{COPIED, Cluster, with_copied};
use crate::formats::qcow2::header::{Header, MAX_POS};
use crate::formats::qcow2::layout;
use crate::formats::qcow2::layout::{RefcountLayout, SECTOR_BYTES, write_numbers};
use crate::image_file::ImageFile;

/// An unfinished image: the header, the L1 table, then clusters with data in the order of their
/// allocation, then all other tables.
///
/// Takes eight bytes of memory for each cluster of every L2 table that is needed: with clusters of
/// 64 KiB, 128 MiB for each TiB of data.
#[derive(Debug)]
pub struct Qcow2Builder {
    header: Header,
    /// L2 tables, keyed by the index in the L1 table, with the entries as they are written.
    tables: BTreeMap<u64, Box<[u64]>>,
    /// The next cluster of the file to be allocated.
    next: u64,
    /// Where the next compressed data begins, if there is room in the cluster before.
    packed_end: u64,
    /// Refcounts of clusters with compressed data.
    packed: BTreeMap<u64, u16>,
}

impl Qcow2Builder {
    /// For a disk of `size` bytes, rounded up to whole sectors, in clusters of `cluster_bytes`, a
    /// power of two in [`crate::offline::create::CLUSTER_BYTES`]; `None` is
    /// [`crate::offline::create::DEFAULT_CLUSTER_BYTES`].
    ///
    /// # Errors
    /// A message with the reason.
    pub fn new(size: u64, cluster_bytes: Option<u64>) -> Result<Self, String> {
        let bits = layout::cluster_bits(cluster_bytes)?;
        let mut header = Header::empty(size.next_multiple_of(SECTOR_BYTES), bits);
        layout::check_l1(&header)?;
        let entries = header.size.div_ceil(header.l2_reach());
        header.l1_entries = entries as u32;
        header.l1_pos = header.cluster_bytes();
        let next = 1 + (entries * 8).div_ceil(header.cluster_bytes());
        Ok(Self { header, tables: BTreeMap::new(), next, packed_end: 0, packed: BTreeMap::new() })
    }

    /// Clusters are compressed by `compression`, where they are.
    #[must_use]
    pub fn with_compression(self, compression: Compression) -> Self {
        Self { header: self.header.with_compression(compression), ..self }
    }

    /// The entry of the cluster with this number on the disk.
    fn slot(&mut self, number: u64) -> Option<&mut u64> {
        let entries = self.header.l2_entries();
        let new = || vec![0; entries as usize].into_boxed_slice();
        let table = self.tables.entry(number / entries).or_insert_with(new);
        table.get_mut((number % entries) as usize)
    }

    /// The position in the file of the cluster with this number on the disk, allocated if needed.
    fn cluster(&mut self, number: u64) -> u64 {
        let new = self.next << self.header.cluster_bits;
        let entry = match self.slot(number) {
            Some(slot) if *slot != 0 => return *slot & !COPIED,
            slot => slot,
        };
        if let Some(slot) = entry {
            *slot = with_copied(new);
        }
        self.next += 1;
        new
    }

    /// Where `len` bytes of compressed data go: behind the last ones, if they fit there without a gap, and none of
    /// their clusters has as many references as a refcount can tell.
    fn place_packed(&self, len: u64) -> u64 {
        let (bits, cluster) = (self.header.cluster_bits, self.header.cluster_bytes());
        let rest = self.packed_end.wrapping_neg() & (cluster - 1);
        let is_full = self.packed.get(&(self.packed_end >> bits)) == Some(&u16::MAX);
        let goes_on = self.packed_end + rest == self.next << bits;
        match rest > 0 && !is_full && (len <= rest || goes_on) {
            true => self.packed_end,
            false => self.next << bits,
        }
    }
}

impl ImageBuilder for Qcow2Builder {
    fn size(&self) -> u64 {
        self.header.size
    }

    fn data_end(&self) -> u64 {
        self.next * self.header.cluster_bytes()
    }

    fn max_data_end(&self) -> u64 {
        let cluster = self.header.cluster_bytes();
        (1 + (u64::from(self.header.l1_entries) * 8).div_ceil(cluster)) * cluster
            + self.header.size.next_multiple_of(cluster)
    }

    fn cluster_bytes(&self) -> u64 {
        self.header.cluster_bytes()
    }

    fn compression(&self) -> Compression {
        self.header.compression
    }

    fn allocate_packed(&mut self, pos: u64, len: u64) -> io::Result<u64> {
        let bits = self.header.cluster_bits;
        let at = self.place_packed(len);
        let entry = Cluster::compressed_entry(at, len, &self.header);
        let entry = entry.ok_or_else(layout::tables_full)?;
        if let Some(slot) = self.slot(pos >> bits) {
            *slot = entry;
        }
        let last = (at + len - 1) >> bits;
        for cluster in at >> bits..=last {
            let count = self.packed.entry(cluster).or_default();
            *count = count.saturating_add(1);
        }
        self.next = self.next.max(last + 1);
        self.packed_end = at + len;
        Ok(at)
    }

    fn allocate(&mut self, range: ByteRange) -> Vec<ByteRange> {
        let bits = self.header.cluster_bits;
        let cluster_bytes = self.header.cluster_bytes();
        let mut ranges: Vec<ByteRange> = Vec::new();
        let mut pos = range.pos;
        while pos < range.end() {
            let inside = pos % cluster_bytes;
            let len = (cluster_bytes - inside).min(range.end() - pos);
            let at = self.cluster(pos >> bits) + inside;
            match ranges.last_mut() {
                Some(last) if last.end() == at => last.len += len,
                _ => ranges.push(ByteRange::new(at, len)),
            }
            pos += len;
        }
        ranges
    }

    fn finish(&mut self, file: &ImageFile) -> io::Result<()> {
        let cluster = self.header.cluster_bytes();
        let l2_pos = self.next * cluster;
        let tables = self.tables.len() as u64;
        let Ok(refcount_layout) = RefcountLayout::of(&self.header, self.next + tables) else {
            return Err(layout::tables_full());
        };
        let RefcountLayout { table, blocks, clusters } = refcount_layout;
        if clusters >= MAX_POS >> self.header.cluster_bits {
            return Err(layout::tables_full());
        }
        let block_pos = l2_pos + tables * cluster;
        self.header.refcount_table_pos = block_pos + blocks * cluster;
        self.header.refcount_table_clusters = table as u32;
        let end = clusters * cluster;
        file.set_len(end)?;
        for (pos, l2) in (l2_pos..).step_by(cluster as usize).zip(self.tables.values()) {
            write_numbers(file, pos, l2.len() as u64, |index| {
                l2.get(index as usize).copied().unwrap_or_default().to_be_bytes()
            })?;
        }
        for (pos, &index) in (l2_pos..).step_by(cluster as usize).zip(self.tables.keys()) {
            file.write_at(self.header.l1_pos + index * 8, &with_copied(pos).to_be_bytes())?;
        }
        let count = |cluster| self.packed.get(&cluster).copied().unwrap_or(1);
        write_numbers(file, block_pos, clusters, |cluster| count(cluster).to_be_bytes())?;
        write_numbers(file, self.header.refcount_table_pos, blocks, |index| {
            (block_pos + index * cluster).to_be_bytes()
        })?;
        file.write_at(0, &encode(&self.header))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;

    use nowait_testkit::Random;

    use super::*;
    use crate::chain::{Chain, ChainOptions};
    use crate::formats::chain_reader::ChainReader;
    use crate::formats::format::Format;
    use crate::offline::check::check;

    const KIB: u64 = 1024;

    fn chain(path: &Path) -> Result<Chain, crate::ImageError> {
        Chain::open(path, &ChainOptions { format: Some(Format::Qcow2), ..ChainOptions::default() })
    }

    #[test]
    fn clusters_follow_each_other_in_the_order_of_allocation() {
        let mut image = Qcow2Builder::new(1 << 30, None).unwrap();
        let first = image.max_data_end() - (1 << 30);
        let at = |pos, len| ByteRange::new(first + pos * KIB, len * KIB);
        let mut allocate = |pos, len| image.allocate(ByteRange::new(pos * KIB, len * KIB));
        assert_eq!(allocate(640, 128), [at(0, 128)]);
        assert_eq!(allocate(4, 8), [at(132, 8)]);
        assert_eq!(allocate(0, 128), [at(128, 128)]);
        assert_eq!(allocate(572, 72), [at(316, 68), at(0, 4)]);
    }

    #[test]
    fn data_written_in_any_order_is_read_back_and_no_cluster_leaks() {
        for (cluster, size) in [(512, 3 << 20), (4096, (9 << 20) + 512), (64 << 10, 70 << 20)] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("image");
            let file = ImageFile::of(path.clone(), File::create_new(&path).unwrap()).unwrap();
            let mut image = Qcow2Builder::new(size - 100, Some(cluster)).unwrap();
            assert_eq!(image.size(), size);
            file.set_len(image.max_data_end()).unwrap();
            let mut disk = vec![0; size as usize];
            let mut random = Random::from_seed(1);
            for fill in 1..60 {
                let pos = random.below(size);
                let range = ByteRange::new(pos, (1 + random.below(200 * KIB)).min(size - pos));
                disk[range.pos as usize..range.end() as usize].fill(fill);
                for part in image.allocate(range) {
                    file.write_at(part.pos, &vec![fill; part.len as usize]).unwrap();
                }
            }
            assert!(chain(&path).is_err(), "it is not an image yet");
            image.finish(&file).unwrap();
            let chain = chain(&path).unwrap();
            let report = check(&chain, &mut |_, _| {}).unwrap();
            assert_eq!((report.corruptions, report.leaks), (0, 0));
            assert_eq!(report.image_end, file.size().unwrap());
            let mut read = vec![0; size as usize];
            ChainReader::new(chain.layers()).unwrap().read_at(0, &mut read).unwrap();
            assert!(read == disk, "clusters of {cluster}");
        }
    }

    #[test]
    fn the_data_end_follows_what_is_allocated() {
        let mut image = Qcow2Builder::new(200 << 30, None).unwrap();
        let first = image.data_end();
        assert!(first <= 128 * KIB, "{first}");
        image.allocate(ByteRange::new(100 << 30, 1));
        assert_eq!(image.data_end(), first + 64 * KIB);
        assert!(image.data_end() <= image.max_data_end());
    }

    #[test]
    fn compressed_data_is_packed_until_a_refcount_is_full() {
        let mut image = Qcow2Builder::new(1 << 40, Some(2 << 20)).unwrap();
        let (cluster, first) = (2 << 20, image.data_end());
        for number in 0..u64::from(u16::MAX) {
            let at = image.allocate_packed(number * cluster, 1).unwrap();
            assert_eq!(at, first + number);
        }
        let mut next = u64::from(u16::MAX) * cluster;
        let mut pack = |image: &mut Qcow2Builder, len| {
            next += cluster;
            image.allocate_packed(next, len).unwrap() - first
        };
        assert_eq!(pack(&mut image, 1), cluster, "the refcount is full");
        assert_eq!(pack(&mut image, cluster - 1), cluster + 1, "it goes on in the next cluster");
        assert_eq!(pack(&mut image, cluster - 1), 2 * cluster);
        image.allocate(ByteRange::new(0, 0));
        let whole = image.allocate(ByteRange::new(1 << 39, 1));
        assert_eq!(whole, [ByteRange::new(first + 3 * cluster, 1)]);
        assert_eq!(pack(&mut image, 2), 4 * cluster, "the next cluster is taken");
    }

    #[test]
    fn a_disk_that_no_image_can_hold_is_refused() {
        assert!(Qcow2Builder::new(1 << 40, Some(512)).unwrap_err().contains("larger clusters"));
        assert!(Qcow2Builder::new(1 << 40, Some(1000)).unwrap_err().contains("power of two"));
        assert!(Qcow2Builder::new(1 << 40, None).is_ok());
    }
}
