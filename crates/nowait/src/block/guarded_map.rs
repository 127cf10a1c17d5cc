//! A device whose changes are announced before they are made, so that the old bytes can be copied.
//!
//! Invariant: no change reaches storage before its range is open. A device without a guard pays nothing for it: the
//! requests of its engines do not know that there are guards.

use std::sync::Arc;

use crate::block::ahead_map::AheadMap;
use crate::block::block_map::{BlockMap, Extent, Intent, WouldBlock};
use crate::block::device::BlockDevice;
use crate::block::image_format::ImageFormat;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::request::ExtentStatus;

/// Fills memory with the bytes of a device from a position on, as they are now.
pub type ReadDevice<'a> = &'a dyn Fn(u64, &mut [u8]) -> Result<(), Error>;

/// The receiver of the changes of a device that are about to be made.
pub trait WriteGuard: Send + Sync + 'static {
    /// Whether changes of `range` may be made without [`WriteGuard::before_change`]. Once they may, they always may.
    fn is_open(&self, range: ByteRange) -> bool;

    /// A change of `range` is made when this has returned, and not before. Called on a thread that may block, without a
    /// lock, and by several threads simultaneously.
    fn before_change(&self, range: ByteRange, read: ReadDevice<'_>);
}

/// The map of a device, with a guard.
pub struct GuardedMap {
    below: Arc<BlockDevice<dyn BlockMap>>,
    guard: Arc<dyn WriteGuard>,
}

impl BlockDevice<dyn BlockMap> {
    /// A device that has the same storage, map and size as this one, whose changes are announced to `guard`. As long as it is
    /// used, no request of this device itself may be in flight. It allocates nothing ahead. A failed flush of one is a
    /// failed flush of both (C51).
    ///
    /// # Errors
    /// `EINVAL`: the device is a file that grows.
    pub fn guarded(
        self: &Arc<Self>,
        guard: Arc<dyn WriteGuard>,
    ) -> Result<BlockDevice<GuardedMap>, Error> {
        if self.growing().is_some() || self.appends() {
            return Err(Error::new(libc::EINVAL, Operation::SetUp));
        }
        Ok(self.with_map(GuardedMap { below: self.clone(), guard }))
    }
}

impl GuardedMap {
    fn map(&self) -> &dyn BlockMap {
        &self.below.map
    }
}

impl BlockMap for GuardedMap {
    fn map_extent(&self, range: ByteRange, intent: Intent) -> Result<Extent, WouldBlock> {
        match intent {
            Intent::Write if !self.guard.is_open(range) => Err(WouldBlock),
            _ => self.map().map_extent(range, intent),
        }
    }

    fn map_extent_blocking(&self, range: ByteRange, intent: Intent) -> Extent {
        self.map().map_extent_blocking(range, intent)
    }

    fn keeps_write_extents(&self) -> bool {
        self.map().keeps_write_extents()
    }

    fn is_mapped(&self, range: ByteRange) -> bool {
        self.guard.is_open(range) && self.map().is_mapped(range)
    }

    fn mark_allocated(&self, range: ByteRange) {
        self.map().mark_allocated(range);
    }

    fn invalidate(&self, range: ByteRange) {
        self.map().invalidate(range);
    }

    fn mark_hole(&self, range: ByteRange) {
        self.map().mark_hole(range);
    }

    fn resize(&self, size: u64) {
        self.map().resize(size);
    }

    fn caches_holes(&self) -> bool {
        self.map().caches_holes()
    }

    fn cached_extents(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> bool {
        self.map().cached_extents(range, limit, extents)
    }

    fn image(&self) -> Option<&dyn ImageFormat> {
        self.map().image()
    }

    fn guard(&self) -> Option<&dyn WriteGuard> {
        Some(&*self.guard)
    }

    /// None: the windows of the device below are known to that device alone.
    fn ahead(&self) -> Option<&dyn AheadMap> {
        None
    }
}
