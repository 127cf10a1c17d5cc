//! The bits of a persistent dirty bitmap, read cluster by cluster.
//!
//! Invariant: a table or a cluster that is not as the format says is an error, never bits that look clean.
//! Source: QEMU docs/interop/qcow2.txt, "Bitmap table" and "Bitmap data".

use std::io::{self, Read};
use std::sync::Arc;

use crate::formats::qcow2::bitmaps::Entry;
use crate::formats::qcow2::header::{Header, MAX_POS};
use crate::image_file::ImageFile;

/// Bytes of an entry of the table.
const ENTRY_BYTES: u64 = 8;
/// Where a cluster of bits is in the file.
pub(crate) const POSITION: u64 = (MAX_POS - 1) & !0x1ff;
/// A cluster without a position has all bits set.
pub(crate) const ALL_SET: u64 = 1;

/// The bits of a bitmap as a stream: one for each granule of the disk, of each byte the lowest first.
#[derive(Clone)]
pub struct StoredBits {
    file: Arc<ImageFile>,
    cluster_bytes: u64,
    table_pos: u64,
    clusters: u64,
    /// Bytes that were read.
    at: u64,
}

impl StoredBits {
    /// The bits of the bitmap of a valid `entry`.
    pub(crate) fn new(file: &Arc<ImageFile>, header: &Header, entry: &Entry) -> Self {
        let clusters = u64::from(entry.table_entries);
        let (file, cluster_bytes) = (file.clone(), header.cluster_bytes());
        Self { file, cluster_bytes, table_pos: entry.table_pos, clusters, at: 0 }
    }

    /// Where the cluster with this number is, or all of its bits.
    fn cluster(&self, number: u64) -> io::Result<Result<u64, u8>> {
        let size = self.file.size()?;
        let pos = self.table_pos + number * ENTRY_BYTES;
        if pos + ENTRY_BYTES > size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut entry = [0; ENTRY_BYTES as usize];
        self.file.read_at(pos, &mut entry)?;
        let entry = u64::from_be_bytes(entry);
        match (entry & POSITION, entry & !POSITION) {
            (0, 0) => Ok(Err(0)),
            (0, ALL_SET) => Ok(Err(u8::MAX)),
            (pos, 0) if pos.is_multiple_of(self.cluster_bytes) => {
                match pos + self.cluster_bytes <= size {
                    true => Ok(Ok(pos)),
                    false => Err(io::ErrorKind::UnexpectedEof.into()),
                }
            }
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "its table is damaged")),
        }
    }
}

impl Read for StoredBits {
    fn read(&mut self, memory: &mut [u8]) -> io::Result<usize> {
        let (number, within) = (self.at / self.cluster_bytes, self.at % self.cluster_bytes);
        if number >= self.clusters {
            return Ok(0);
        }
        let len = (self.cluster_bytes - within).min(memory.len() as u64) as usize;
        let memory = memory.get_mut(..len).unwrap_or_default();
        match self.cluster(number)? {
            Ok(pos) => self.file.read_at(pos + within, memory)?,
            Err(byte) => memory.fill(byte),
        }
        self.at += len as u64;
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    const CLUSTER: u64 = 65536;

    /// The bits of a bitmap with this table, in a file of five clusters, of which the fourth has bytes 5.
    fn bits(table: &[u64]) -> io::Result<Vec<u8>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let file = File::create_new(&path).unwrap();
        file.set_len(5 * CLUSTER).unwrap();
        let entries: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        file.write_all_at(&entries, CLUSTER).unwrap();
        file.write_all_at(&[5; CLUSTER as usize], 3 * CLUSTER).unwrap();
        let file = Arc::new(ImageFile::open(&path, false).unwrap());
        let clusters = table.len() as u64;
        let mut all = Vec::new();
        StoredBits { file, cluster_bytes: CLUSTER, table_pos: CLUSTER, clusters, at: 0 }
            .read_to_end(&mut all)
            .map(|_| all)
    }

    #[test]
    fn each_cluster_has_its_bits_or_all_or_none() {
        let all = bits(&[0, 3 * CLUSTER, 1]).unwrap();
        let clusters: Vec<_> = all.chunks(CLUSTER as usize).collect();
        let wanted = [0, 5, 255].map(|byte| vec![byte; CLUSTER as usize]);
        assert!(clusters == wanted);
    }

    #[test]
    fn a_table_that_is_wrong_is_an_error() {
        for (what, entry) in [
            ("a position inside a cluster", 3 * CLUSTER + 512),
            ("a cluster behind the end of the file", 5 * CLUSTER),
            ("a cluster far behind it", (1 << 56) - CLUSTER),
            ("a position with a flag", 3 * CLUSTER + 1),
            ("reserved bits below", 2),
            ("reserved bits above", 1 << 56),
        ] {
            assert!(bits(&[entry]).is_err(), "{what}");
        }
        // The table is behind the end of the file.
        let file = tempfile::NamedTempFile::new().unwrap();
        let file = Arc::new(ImageFile::open(file.path(), false).unwrap());
        let mut cut = StoredBits { file, cluster_bytes: CLUSTER, table_pos: 0, clusters: 1, at: 0 };
        assert!(cut.read(&mut [0; 8]).is_err());
    }
}
