//! A served qcow2 image as the engine sees it: extents from memory, and requests that may block.
//!
//! Invariant: a writable extent keeps its position for as long as the image is served and never
//! comes to hold bytes of another range (C56). A mapping is cached only when its data is in place.

use std::sync::Arc;

use nowait::{
    BlockMap, ByteRange, Error, Extent, ExtentStatus, Flags, ImageFormat, Intent, ReadCursor,
    WouldBlock, WriteCursor,
};

use crate::qcow2_disk::backing_chain::{BackingChain, Mapping};
use crate::qcow2_disk::bitmap_store::BitmapStore;
use crate::qcow2_disk::cluster_locks::ClusterLocks;
use crate::qcow2_disk::extent_cache::{CachedMapping, ExtentCache};
use crate::qcow2_disk::status_scan::StatusScan;

/// A qcow2 image and its backing chain.
pub(crate) struct Qcow2Disk {
    pub(crate) images: BackingChain,
    pub(crate) extents: ExtentCache,
    pub(crate) cluster_locks: ClusterLocks,
    /// The dirty bitmaps of an image that is written to.
    pub(crate) bitmaps: Option<Arc<BitmapStore>>,
}

/// The map of a disk in a qcow2 image.
pub struct Qcow2Map(pub(crate) Arc<Qcow2Disk>);

impl Qcow2Map {
    pub(crate) fn new(
        images: BackingChain,
        extents: ExtentCache,
        bitmaps: Option<Arc<BitmapStore>>,
    ) -> Self {
        let cluster_locks = ClusterLocks::default();
        Self(Arc::new(Qcow2Disk { images, extents, cluster_locks, bitmaps }))
    }
}

impl BlockMap for Qcow2Map {
    #[inline]
    fn map_extent(&self, range: ByteRange, intent: Intent) -> Result<Extent, WouldBlock> {
        if intent == Intent::Write && !self.0.admits(range) {
            return Err(WouldBlock);
        }
        self.0.extents.extent(range, intent).ok_or(WouldBlock)
    }

    /// See the invariant of this file.
    fn keeps_write_extents(&self) -> bool {
        true
    }

    fn is_mapped(&self, range: ByteRange) -> bool {
        let mut pos = range.pos;
        while pos < range.end() {
            let rest = ByteRange::new(pos, range.end() - pos);
            match self.0.extents.extent(rest, Intent::Write) {
                Some(extent) => pos += extent.len,
                None => return false,
            }
        }
        true
    }

    #[inline]
    fn image(&self) -> Option<&dyn ImageFormat> {
        Some(&*self.0)
    }
}

impl ImageFormat for Qcow2Disk {
    fn read(&self, pos: u64, mut memory: ReadCursor<'_>) -> Result<(), Error> {
        let mut pos = pos;
        while !memory.is_empty() {
            self.fill_extent_cache(pos);
            pos += self.images.read_some(pos, &mut memory)?;
        }
        Ok(())
    }

    fn write(&self, pos: u64, data: WriteCursor<'_>) -> Result<(), Error> {
        self.mark(ByteRange::new(pos, data.len()))?;
        self.write_all(pos, data)
    }

    fn discard(&self, range: ByteRange) -> Result<(), Error> {
        self.mark(range)?;
        self.discard_all(range)
    }

    fn zero(&self, range: ByteRange, flags: Flags) -> Result<(), Error> {
        self.mark(range)?;
        self.zero_all(range, flags)
    }

    fn flush(&self) -> Result<(), Error> {
        self.images.writeback().flush()
    }

    fn keeps_unsynced(&self) -> bool {
        self.images.writeback().keeps_unsynced()
    }

    fn status(
        &self,
        range: ByteRange,
        limit: usize,
        spans: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        StatusScan::new(&self.images, range.end()).scan(range, limit, spans)?;
        // Adjacent spans were merged, so the scan may have found more than `limit`.
        spans.truncate(limit);
        Ok(())
    }
}

impl Qcow2Disk {
    /// Whether the bits of a write to `range` are on storage.
    #[inline]
    fn admits(&self, range: ByteRange) -> bool {
        self.bitmaps.as_ref().is_none_or(|bitmaps| bitmaps.regions.admit(range))
    }

    /// Has the bits of a change of `range` on storage, before it begins.
    fn mark(&self, range: ByteRange) -> Result<(), Error> {
        self.bitmaps.as_ref().map_or(Ok(()), |bitmaps| bitmaps.admit(range))
    }

    /// Fills the extent cache for the window around `pos`, unless it is filled already. A failed
    /// lookup is not reported here: the request that needs these bytes meets it again.
    pub(crate) fn fill_extent_cache(&self, pos: u64) {
        let size = self.images.header().size;
        let align = self.images.align();
        fill(&self.extents, size, align, pos, |pos, len| self.images.resolve(pos, len));
    }
}

/// Fills `extents`, those of a disk of `size` bytes, for the window around `pos` with what `resolve` finds,
/// unless it is filled already. A position in a file that direct I/O, which needs multiples of `align`, cannot
/// read in place is left to a worker.
pub(crate) fn fill(
    extents: &ExtentCache,
    size: u64,
    align: u64,
    pos: u64,
    resolve: impl Fn(u64, u64) -> Result<(Mapping, u64), Error>,
) {
    let Some(token) = extents.begin_fill(pos) else { return };
    let granule = extents.granule();
    let start = pos / extents.window() * extents.window();
    let end = start.saturating_add(extents.window()).min(size);
    let mut mappings = Vec::new();
    let mut pos = start;
    while pos < end {
        let Ok((found, len)) = resolve(pos, end - pos) else { break };
        let len = len.min(end - pos);
        let run = ByteRange::new(pos, len);
        // A granule that lies in two runs is not cached. The last granule of the disk may be
        // cut by its end.
        let first = pos.div_ceil(granule);
        let last = if run.end() == size { size.div_ceil(granule) } else { run.end() / granule };
        for at in first..last.max(first) {
            mappings.resize((at - start / granule) as usize, None);
            let mapping = granule_mapping(found, at * granule - pos);
            mappings.push(mapping.filter(|it| it.is_aligned(at * granule, align)));
        }
        pos += len;
    }
    extents.fill(token, &mappings);
}

/// The mapping of a granule that begins `offset` bytes into `found`; `None` for compressed data.
fn granule_mapping(found: Mapping, offset: u64) -> Option<CachedMapping> {
    match found {
        Mapping::Zeros => Some(CachedMapping::Hole),
        Mapping::Data { pos, writable: true, .. } => {
            Some(CachedMapping::Writable { pos: pos + offset })
        }
        Mapping::Data { file, pos, .. } => Some(CachedMapping::Data { file, pos: pos + offset }),
        Mapping::Compressed { .. } => None,
    }
}
