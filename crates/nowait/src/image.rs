//! Images that allocate by themselves: what serves their requests on a thread that may block.
//!
//! Invariant: a call returns when its request has ended; memory is borrowed for no longer.
//! Knows: error, io, iov. Known by: map, blocking. Kernel counterpart: the part of iomap_begin
//! that takes locks and reads metadata.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};

use crate::error::{Error, Range};
use crate::io::{Flags, Span};
use crate::iov::{self, Segment};

/// An image format, as workers use it. The ranges were checked against the device's size; no
/// write is in flight in a range that is discarded or zeroed.
pub trait Image: Send + Sync {
    /// Fills `bufs` with the device's bytes from `pos` on.
    ///
    /// # Errors
    /// What reading a file of the image said; `EIO` for metadata that contradicts itself.
    fn read(&self, pos: u64, bufs: &mut [IoSliceMut<'_>]) -> Result<(), Error>;

    /// Writes all of `bufs` from `pos` on, and allocates what is not mapped (C24). When it returns,
    /// the map knows the range as mapped.
    ///
    /// # Errors
    /// As [`Image::read`]; `ENOSPC` when the file cannot grow.
    fn write(&self, pos: u64, bufs: &[IoSlice<'_>]) -> Result<(), Error>;

    /// Gives storage of `range` back (C52).
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the format cannot; as [`Image::write`].
    fn discard(&self, range: Range) -> Result<(), Error>;

    /// Makes `range` read as zeros; `flags` may have [`Flags::NO_UNMAP`].
    ///
    /// # Errors
    /// `EOPNOTSUPP` where that means writing zeros; as [`Image::write`].
    fn zero(&self, range: Range, flags: Flags) -> Result<(), Error>;

    /// Makes every write durable that returned before, and the metadata to read it back (C28,
    /// C49).
    ///
    /// # Errors
    /// What writing the metadata or fdatasync(2) said.
    fn flush(&self) -> Result<(), Error>;

    /// Appends at most `limit` spans from the start of `range` on.
    ///
    /// # Errors
    /// As [`Image::read`].
    fn status(&self, range: Range, limit: usize, spans: &mut Vec<Span>) -> Result<(), Error>;
}

/// [`Image::read`] into the memory of a request of `range`.
///
/// # Safety
/// The memory of `segments` is valid, initialised, and not touched by anyone else, until this
/// returns.
pub(crate) unsafe fn read(
    image: &dyn Image,
    range: Range,
    segments: &[Segment],
) -> Result<u64, Error> {
    let mut bufs = Vec::with_capacity(segments.len());
    iov::parts(segments, 0, range.len, |part| {
        // SAFETY: as promised by the caller; the parts do not overlap.
        let bytes = unsafe { std::slice::from_raw_parts_mut(part.base, part.len) };
        bufs.push(IoSliceMut::new(bytes));
    });
    image.read(range.pos, &mut bufs).map(|()| range.len)
}

/// [`Image::write`] from the memory of a request of `range`.
///
/// # Safety
/// The memory of `segments` is valid, initialised, and not written by anyone, until this returns.
pub(crate) unsafe fn write(
    image: &dyn Image,
    range: Range,
    segments: &[Segment],
) -> Result<u64, Error> {
    let mut bufs = Vec::with_capacity(segments.len());
    iov::parts(segments, 0, range.len, |part| {
        // SAFETY: as promised by the caller.
        let bytes = unsafe { std::slice::from_raw_parts(part.base, part.len) };
        bufs.push(IoSlice::new(bytes));
    });
    image.write(range.pos, &bufs).map(|()| range.len)
}
