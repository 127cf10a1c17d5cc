//! The mapping of a device's bytes to the storage that backs them.
//!
//! Invariant: an extent is never longer than the requested range, wherever it is used: the device
//! cuts it, because a map may derive it from an image's untrusted bytes.

use crate::block::ahead_map::AheadMap;
use crate::block::image_format::ImageFormat;
use crate::block::write_guard::WriteGuard;
use crate::types::byte_range::ByteRange;
use crate::types::request::ExtentStatus;

/// The purpose of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// The range will be read.
    Read,
    /// The range will be written.
    Write,
}

/// The storage behind the first `len` bytes of a requested range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The number of the file it lies in; 0 is the file that is written to.
    pub file: u16,
    /// Position of its first byte in that file, in bytes; aligned for direct I/O if the requested
    /// range is.
    pub pos: u64,
    /// Length in bytes, at least 1 and at most that of the requested range.
    pub len: u64,
    /// Whether it reads as zeros, so that no I/O is needed.
    pub hole: bool,
}

impl Extent {
    /// The extent of `range` at the same position of file 0.
    #[inline]
    pub(crate) const fn identical(range: ByteRange, len: u64, hole: bool) -> Self {
        Self { file: 0, pos: range.pos, len, hole }
    }
}

/// The error of a lookup that only a thread that may block can complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WouldBlock;

/// A mapping of a device's bytes to those of files.
///
/// The trait is safe: no return value of a map can make the engine access memory outside the
/// request. The engine cuts every extent to the requested range, with at least one byte. Image
/// formats implement the trait and read untrusted images; a wrong mapping gives wrong bytes or an
/// errno, and nothing worse.
pub trait BlockMap: Send + Sync + 'static {
    /// The extent at the start of `range`, without waiting.
    ///
    /// # Errors
    /// [`WouldBlock`] when only a thread that may block can look it up, and for a write to a range
    /// that is known to need allocation (C36).
    fn map_extent(&self, range: ByteRange, intent: Intent) -> Result<Extent, WouldBlock>;

    /// Like [`BlockMap::map_extent`], on a thread that may block; for a write, with its range locked.
    /// A file system allocates during the write. Not called for image formats, which serve such
    /// requests as a whole.
    fn map_extent_blocking(&self, range: ByteRange, intent: Intent) -> Extent {
        self.map_extent(range, intent).unwrap_or(Extent::identical(range, range.len, false))
    }

    /// Whether an extent for a write stays valid for as long as the device is open. If so, it is
    /// looked up before its range is locked, and a write that must wait takes the lock only on a
    /// worker. If not, an extent is valid only while its range is locked.
    fn keeps_write_extents(&self) -> bool {
        false
    }

    /// Whether all of `range` is known to be mapped, so that a write to it allocates nothing.
    fn is_mapped(&self, range: ByteRange) -> bool;

    /// A write to `range` has ended, with success or not.
    #[inline]
    fn mark_allocated(&self, _range: ByteRange) {}

    /// The state of `range` is unknown from now on: it is about to be deallocated or written, or
    /// the device has changed.
    fn invalidate(&self, _range: ByteRange) {}

    /// `range` is a hole, found or made, and was not written since it was last invalidated.
    fn mark_hole(&self, _range: ByteRange) {}

    /// The device has `size` bytes from now on, and nothing that was known about it is valid any more:
    /// a range that was cut off and came back may hold other bytes.
    fn resize(&self, _size: u64) {
        self.invalidate(ByteRange::new(0, u64::MAX));
    }

    /// Whether [`BlockMap::mark_hole`] has an effect. If so, the range lock excludes writes while a
    /// hole is being made or marked.
    fn caches_holes(&self) -> bool {
        false
    }

    /// Appends at most `limit` known extents from the start of `range` on, in order; false when it
    /// meets an unknown one.
    fn cached_extents(
        &self,
        _range: ByteRange,
        _limit: usize,
        _extents: &mut Vec<ExtentStatus>,
    ) -> bool {
        false
    }

    /// The image format that serves requests that must wait, if it is not the file system that
    /// does. With an image format [`BlockMap::map_extent`] returns mapped extents only, and none
    /// for a range that is being allocated.
    #[inline]
    fn image(&self) -> Option<&dyn ImageFormat> {
        None
    }

    /// The receiver of changes that are about to be made, if the device has one ([`BlockDevice::guarded`]). With a guard
    /// no extent is returned for a write to a range that is not open.
    ///
    /// [`BlockDevice::guarded`]: crate::BlockDevice::guarded
    #[inline]
    fn guard(&self) -> Option<&dyn WriteGuard> {
        None
    }

    /// The ranges that are allocated ahead, if the device allocates ahead
    /// ([`crate::OpenOptions::allocate_ahead`]).
    #[inline]
    fn ahead(&self) -> Option<&dyn AheadMap> {
        None
    }
}

/// The identity: each byte is backed by the byte at the same position, as on block devices and in
/// preallocated files.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinearMap;

impl BlockMap for LinearMap {
    #[inline]
    fn map_extent(&self, range: ByteRange, _: Intent) -> Result<Extent, WouldBlock> {
        Ok(Extent::identical(range, range.len, false))
    }

    fn is_mapped(&self, _: ByteRange) -> bool {
        true
    }

    fn cached_extents(&self, range: ByteRange, _: usize, extents: &mut Vec<ExtentStatus>) -> bool {
        extents.push(ExtentStatus::top(range.len, false));
        true
    }
}
