//! The interface of image formats that allocate by themselves; worker threads call it.
//!
//! Invariant: a call returns when its request has ended; it borrows memory no longer than that.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};

use crate::types::byte_range::ByteRange;
use crate::types::error::Error;
use crate::types::iovec;
use crate::types::iovec::IoSegment;
use crate::types::request::{ExtentStatus, Flags};

/// An image format, as workers use it. The engine has checked the ranges against the device's size;
/// no write is in flight in a range that is discarded or zeroed.
pub trait ImageFormat: Send + Sync {
    /// Fills `bufs` with the device's bytes from `pos` on.
    ///
    /// # Errors
    /// The errno of a read of an image file; `EIO` for inconsistent metadata.
    fn read(&self, pos: u64, bufs: &mut [IoSliceMut<'_>]) -> Result<(), Error>;

    /// Writes all of `bufs` from `pos` on, and allocates the parts that are not mapped (C24). When
    /// it returns, the map reports the range as mapped.
    ///
    /// # Errors
    /// As [`ImageFormat::read`]; `ENOSPC` when the file cannot grow.
    fn write(&self, pos: u64, bufs: &[IoSlice<'_>]) -> Result<(), Error>;

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

    /// Appends at most `limit` extents from the start of `range` on.
    ///
    /// # Errors
    /// As [`ImageFormat::read`].
    fn status(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error>;
}

/// [`ImageFormat::read`] into the memory of a request of `range`.
///
/// # Safety
/// Until this returns, the memory of `segments` is valid, initialised and not accessed otherwise.
pub(crate) unsafe fn read(
    image: &dyn ImageFormat,
    range: ByteRange,
    segments: &[IoSegment],
) -> Result<u64, Error> {
    let mut bufs = Vec::with_capacity(segments.len());
    iovec::slice_segments(segments, 0, range.len, |part| {
        // SAFETY: as promised by the caller; the parts do not overlap.
        let bytes = unsafe { std::slice::from_raw_parts_mut(part.base, part.len) };
        bufs.push(IoSliceMut::new(bytes));
    });
    image.read(range.pos, &mut bufs).map(|()| range.len)
}

/// [`ImageFormat::write`] from the memory of a request of `range`.
///
/// # Safety
/// Until this returns, the memory of `segments` is valid, initialised and not written.
pub(crate) unsafe fn write(
    image: &dyn ImageFormat,
    range: ByteRange,
    segments: &[IoSegment],
) -> Result<u64, Error> {
    let mut bufs = Vec::with_capacity(segments.len());
    iovec::slice_segments(segments, 0, range.len, |part| {
        // SAFETY: as promised by the caller.
        let bytes = unsafe { std::slice::from_raw_parts(part.base, part.len) };
        bufs.push(IoSlice::new(bytes));
    });
    image.write(range.pos, &bufs).map(|()| range.len)
}
