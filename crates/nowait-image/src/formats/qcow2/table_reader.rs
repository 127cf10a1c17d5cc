//! The disk of a qcow2 image, read by its tables.
//!
//! Invariant: no file is written. Where the image has nothing of its own, the bytes are those of the disk
//! below, and zeros where there is none.

use std::sync::Arc;

use nowait::{Error, ReadCursor};

use crate::formats::decompressed_cache::DecompressedCache;
use crate::formats::layer::{Disk, Layer};
use crate::formats::mapped_disk::DiskReader;
use crate::formats::qcow2::backing_tables::BackingTables;
use crate::formats::qcow2::entries::Cluster;
use crate::formats::qcow2::header::Header;
use crate::image_file::ImageFile;

/// A disk on the one below it.
#[derive(Debug)]
pub(crate) struct TableReader {
    tables: BackingTables,
    data: Arc<ImageFile>,
    below: Option<Disk>,
    unpacked: DecompressedCache,
}

impl TableReader {
    /// For the image of `layer` with this header, on `below`.
    pub(crate) fn new(
        header: &Header,
        layer: &Layer,
        below: Option<Disk>,
    ) -> std::io::Result<Self> {
        let bytes = layer.file.size()?;
        Ok(Self {
            tables: BackingTables::new(Box::new(header.clone()), layer.file.clone(), bytes),
            data: layer.data_file().clone(),
            below,
            unpacked: DecompressedCache::of(layer.file.path()),
        })
    }
}

impl DiskReader for TableReader {
    fn size(&self) -> u64 {
        self.tables.header().size
    }

    fn read(&self, mut pos: u64, mut memory: ReadCursor<'_>) -> Result<(), Error> {
        let header = self.tables.header();
        while !memory.is_empty() && pos < header.size {
            let most = memory.len().min(header.size - pos);
            let (cluster, len) = self.tables.lookup(pos, most)?;
            let mut part = memory.take(len);
            match cluster {
                Cluster::Unallocated | Cluster::Reserved { .. } | Cluster::Mixed { .. } => {
                    if let Some(below) = self.below.as_ref().filter(|below| pos < below.size()) {
                        below.read(pos, part.take(len))?;
                    }
                }
                Cluster::Zero { .. } => {}
                Cluster::Data { host, .. } => {
                    let inside = pos & (header.unit_bytes() - 1);
                    self.data.storage().read_at(host + inside, &mut part)?;
                }
                Cluster::Compressed { pos: at, len } => {
                    let packing = header.packing();
                    let storage = &**self.data.storage();
                    let cluster = self.unpacked.read((0, at), storage, len, packing)?;
                    let skip = (pos & (header.cluster_bytes() - 1)) as usize;
                    part.copy_from(cluster.get(skip..).unwrap_or_default());
                }
            }
            part.fill(0);
            pos += len;
        }
        memory.fill(0);
        Ok(())
    }
}
