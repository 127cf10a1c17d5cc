//! The interface of image formats that allocate by themselves; worker threads call it.
//!
//! Invariant: a call returns when its request has ended; it borrows memory no longer than that.

use crate::types::byte_range::ByteRange;
use crate::types::error::Error;
use crate::types::io_cursor::{ReadCursor, WriteCursor};
use crate::types::request::{ExtentStatus, Flags};

/// An image format, as workers use it. The engine has checked the ranges against the device's size;
/// no write is in flight in a range that is discarded or zeroed.
pub trait ImageFormat: Send + Sync {
    /// Fills `memory` with the device's bytes from `pos` on.
    ///
    /// # Errors
    /// The errno of a read of an image file; `EIO` for inconsistent metadata.
    fn read(&self, pos: u64, memory: ReadCursor<'_>) -> Result<(), Error>;

    /// Writes all of `data` from `pos` on, and allocates the parts that are not mapped (C24). When
    /// it returns, the map reports the range as mapped.
    ///
    /// # Errors
    /// Like [`ImageFormat::read`]; `ENOSPC` when the file cannot grow.
    fn write(&self, pos: u64, data: WriteCursor<'_>) -> Result<(), Error>;

    /// Deallocates storage of `range` (C52).
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the format cannot; as [`ImageFormat::write`].
    fn discard(&self, range: ByteRange) -> Result<(), Error>;

    /// Makes `range` read as zeros; `flags` may have [`Flags::NO_UNMAP`].
    ///
    /// # Errors
    /// `EOPNOTSUPP` where only writing zeros would do it; as [`ImageFormat::write`].
    fn zero(&self, range: ByteRange, flags: Flags) -> Result<(), Error>;

    /// Makes every write durable that returned before, and the metadata to read it back (C28,
    /// C49).
    ///
    /// # Errors
    /// The errno of a metadata write or of fdatasync(2).
    fn flush(&self) -> Result<(), Error>;

    /// Like [`Storage::keeps_unsynced`](crate::Storage::keeps_unsynced), of the image's files.
    fn keeps_unsynced(&self) -> bool {
        false
    }

    /// Appends at most `limit` extents from the start of `range` on.
    ///
    /// # Errors
    /// Like [`ImageFormat::read`].
    fn status(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error>;
}
