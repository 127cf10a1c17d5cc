//! The device of a backup: a disk as it was at an instant, for an export of its own.
//!
//! Invariant: nothing is written to it. A discard frees scratch, and is refused unless the backup takes discards.

use std::sync::Arc;

use nowait::{
    BlockDevice, BlockMap, BlockingFile, ByteRange, Error, Extent, ExtentStatus, Flags,
    ImageFormat, Intent, Operation, ReadCursor, WouldBlock, WriteCursor,
};

use crate::backup::point_in_time::PointInTime;

/// The map of a backup: every request is for a thread that may block.
pub(crate) struct BackupMap {
    point: Arc<PointInTime>,
    /// The disk as it is, with the copies before its writes.
    disk: BlockingFile<dyn BlockMap>,
}

/// The device of `point`, whose `disk` has it as its guard; it takes discards if `discards`.
pub(crate) fn device(
    point: &Arc<PointInTime>,
    disk: Arc<BlockDevice<dyn BlockMap>>,
    discards: bool,
) -> Arc<BlockDevice<dyn BlockMap>> {
    let storage = point.scratch().storage().clone();
    let map = BackupMap { point: point.clone(), disk: BlockingFile::new(disk) };
    Arc::new(BlockDevice::mapped(storage, Vec::new(), point.size(), !discards, map))
}

impl BlockMap for BackupMap {
    fn map_extent(&self, _: ByteRange, _: Intent) -> Result<Extent, WouldBlock> {
        Err(WouldBlock)
    }

    fn is_mapped(&self, _: ByteRange) -> bool {
        false
    }

    fn image(&self) -> Option<&dyn ImageFormat> {
        Some(self)
    }
}

impl ImageFormat for BackupMap {
    fn read(&self, pos: u64, mut memory: ReadCursor<'_>) -> Result<(), Error> {
        self.point.read(&self.disk, pos, &mut memory)
    }

    /// Always `EPERM`.
    fn write(&self, pos: u64, data: WriteCursor<'_>) -> Result<(), Error> {
        Err(Error::new(libc::EPERM, Operation::Write).at(ByteRange::new(pos, data.len())))
    }

    fn discard(&self, range: ByteRange) -> Result<(), Error> {
        self.point.release(range);
        Ok(())
    }

    /// Always `EPERM`.
    fn zero(&self, range: ByteRange, _: Flags) -> Result<(), Error> {
        Err(Error::new(libc::EPERM, Operation::Zero).at(range))
    }

    fn flush(&self) -> Result<(), Error> {
        Ok(())
    }

    fn status(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        self.point.status(&self.disk, range, limit, extents)
    }
}
