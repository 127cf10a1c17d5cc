//! An image that is only read, as the engine sees it: extents from memory, and reads that may block.
//!
//! Invariant: no file is written. No process changes such an image, so a mapping stays valid.

use std::sync::Arc;

use nowait::{
    BlockDevice, BlockMap, ByteRange, Error, Extent, ExtentStatus, Flags, ImageFormat, Intent,
    Operation, ReadCursor, Storage, WouldBlock, WriteCursor,
};

use crate::chain::Chain;
use crate::error::ImageError;
use crate::formats::mapped_disk::{MAX_FILES, MappedDisk};
use crate::qcow2_disk::backing_chain::{Mapping, Resolved, direct_alignment};
use crate::qcow2_disk::disk::fill;
use crate::qcow2_disk::extent_cache::ExtentCache;
use crate::qcow2_disk::status_scan::{ScannedImages, StatusScan};
use crate::qcow2_disk::{ServeOptions, agree_on_direct, storage_of};

struct ReadOnlyDisk {
    disk: MappedDisk,
    extents: ExtentCache,
    /// Like [`direct_alignment`].
    align: u64,
}

/// The map of a disk that is only read.
pub(crate) struct ReadOnlyMap(Arc<ReadOnlyDisk>);

/// Opens the top image of `chain`, which has a table of runs, to be served.
///
/// # Errors
/// The errno of the open; a refusal where direct I/O was required and is not possible.
pub(crate) fn open(
    chain: &Chain,
    options: ServeOptions,
) -> Result<BlockDevice<ReadOnlyMap>, ImageError> {
    let top = chain.top();
    let refused = |why: &str| ImageError::refused(top.file.path(), why);
    let table = top.table().ok_or_else(|| refused("it has no table of its disk"))?;
    if top.data.len() > MAX_FILES {
        return Err(refused("it has too many files"));
    }
    let direct = agree_on_direct(chain, options)?;
    let files = top.data.iter().map(|file| storage_of(file, true, direct));
    let files: Vec<_> = files.collect::<Result<_, _>>()?;
    let align = direct_alignment(files.iter());
    let Some((first, others)) = files.split_first() else {
        return Err(refused("all of it is zeros, in no file (make a raw image of that size)"));
    };
    let (first, others) = (first.clone(), others.to_vec());
    let unit = top.content.unit().unwrap_or(1);
    let extents = ExtentCache::new(top.size, unit.ilog2(), options.cache_holes);
    let disk = MappedDisk::new(top.file.path(), table.clone(), files, top.size);
    let map = ReadOnlyMap(Arc::new(ReadOnlyDisk { disk, extents, align }));
    Ok(BlockDevice::mapped(first, others, top.size, true, map))
}

impl BlockMap for ReadOnlyMap {
    #[inline]
    fn map_extent(&self, range: ByteRange, intent: Intent) -> Result<Extent, WouldBlock> {
        self.0.extents.extent(range, intent).ok_or(WouldBlock)
    }

    fn is_mapped(&self, _: ByteRange) -> bool {
        false
    }

    #[inline]
    fn image(&self) -> Option<&dyn ImageFormat> {
        Some(&*self.0)
    }
}

/// The error of a write, which the device has refused already.
fn read_only() -> Error {
    Error::new(libc::EROFS, Operation::Write)
}

impl ImageFormat for ReadOnlyDisk {
    fn read(&self, pos: u64, memory: ReadCursor<'_>) -> Result<(), Error> {
        fill(&self.extents, self.disk.size(), self.align, pos, |pos, len| self.resolve(pos, len));
        self.disk.read(pos, memory)
    }

    fn write(&self, _: u64, _: WriteCursor<'_>) -> Result<(), Error> {
        Err(read_only())
    }

    fn discard(&self, _: ByteRange) -> Result<(), Error> {
        Err(read_only())
    }

    fn zero(&self, _: ByteRange, _: Flags) -> Result<(), Error> {
        Err(read_only())
    }

    fn flush(&self) -> Result<(), Error> {
        Ok(())
    }

    fn status(
        &self,
        range: ByteRange,
        limit: usize,
        spans: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        StatusScan::new(self, range.end()).scan(range, limit, spans)?;
        // Adjacent spans were merged, so the scan may have found more than `limit`.
        spans.truncate(limit);
        Ok(())
    }
}

impl ReadOnlyDisk {
    /// The mapping of the disk from `pos` on, for at most `len` bytes.
    fn resolve(&self, pos: u64, len: u64) -> Result<(Mapping, u64), Error> {
        let (place, len) = self.disk.table().lookup(pos, len, &mut 0)?;
        Ok((Mapping::of(place, 0), len))
    }
}

impl ScannedImages for ReadOnlyDisk {
    fn images(&self) -> usize {
        1
    }

    fn files(&self) -> usize {
        self.disk.files().len()
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn file(&self, file: u8) -> Option<&Arc<dyn Storage>> {
        self.disk.file(file).ok()
    }

    fn scan_image(&self, _: u8, pos: u64, len: u64) -> Result<Resolved, Error> {
        let mut reads = 0;
        let (place, len) = self.disk.table().lookup(pos, len, &mut reads)?;
        Ok(Resolved { found: Some(Mapping::of(place, 0)), len, reads })
    }
}
