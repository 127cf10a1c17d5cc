//! A device whose changes are announced before they are made, so that the old bytes can be copied.
//!
//! Invariant: no change reaches storage before its range is open. A device without a guard pays nothing for it: the
//! requests of its engines do not know that there are guards.

use std::sync::Arc;

use crate::block::ahead_map::AheadMap;
use crate::block::block_map::{BlockMap, Extent, Intent, WouldBlock};
use crate::block::device::BlockDevice;
use crate::block::image_format::ImageFormat;
use crate::block::write_guard::{ReadDevice, WriteGuard};
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::request::ExtentStatus;

/// The map of a device, with a guard.
pub struct GuardedMap {
    below: Arc<BlockDevice<dyn BlockMap>>,
    guard: Arc<dyn WriteGuard>,
    /// Whether the device below is used by this one alone.
    is_lasting: bool,
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
        self.guarded_by(guard, false)
    }

    /// Like [`BlockDevice::guarded`], for as long as the storage is open: no request of this device follows. It allocates
    /// ahead if this one would.
    ///
    /// # Errors
    /// Like [`BlockDevice::guarded`].
    pub fn always_guarded(
        self: Arc<Self>,
        guard: Arc<dyn WriteGuard>,
    ) -> Result<BlockDevice<GuardedMap>, Error> {
        self.guarded_by(guard, true)
    }

    fn guarded_by(
        self: &Arc<Self>,
        guard: Arc<dyn WriteGuard>,
        is_lasting: bool,
    ) -> Result<BlockDevice<GuardedMap>, Error> {
        if self.growing().is_some() || self.appends() {
            return Err(Error::new(libc::EINVAL, Operation::SetUp));
        }
        Ok(self.with_map(GuardedMap { below: self.clone(), guard, is_lasting }))
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

    /// Itself, for the device below may have a guard, too.
    fn guard(&self) -> Option<&dyn WriteGuard> {
        Some(self)
    }

    /// None where the device below goes on later: its windows are known to that device alone.
    fn ahead(&self) -> Option<&dyn AheadMap> {
        if self.is_lasting { self.map().ahead() } else { None }
    }
}

impl WriteGuard for GuardedMap {
    fn is_open(&self, range: ByteRange) -> bool {
        self.guard.is_open(range) && self.map().guard().is_none_or(|below| below.is_open(range))
    }

    fn before_change(&self, range: ByteRange, read: ReadDevice<'_>) -> Result<(), Error> {
        self.guard.before_change(range, read)?;
        self.map().guard().map_or(Ok(()), |below| below.before_change(range, read))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::{BlockingFile, Flags, OpenOptions};

    /// The position of a change that the guard refuses.
    const REFUSED: u64 = 64 << 10;

    /// A guard that notes each change, and the first byte of the device before it.
    #[derive(Default)]
    struct Noting {
        is_open: AtomicBool,
        noted: Mutex<Vec<(u64, u64, u8)>>,
    }

    impl WriteGuard for Noting {
        fn is_open(&self, _: ByteRange) -> bool {
            self.is_open.load(Ordering::SeqCst)
        }

        fn before_change(&self, range: ByteRange, read: ReadDevice<'_>) -> Result<(), Error> {
            let mut first = [0];
            read(0, &mut first).unwrap();
            self.noted.lock().unwrap().push((range.pos, range.len, first[0]));
            match range.pos {
                REFUSED => Err(Error::new(libc::ENOSPC, Operation::Write)),
                _ => Ok(()),
            }
        }
    }

    #[test]
    fn c78_each_change_is_announced_before_it_is_made_until_its_range_is_open() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        for cache_holes in [false, true] {
            let options = OpenOptions::new().cache_holes(cache_holes);
            let disk: Arc<BlockDevice<dyn BlockMap>> =
                Arc::new(BlockDevice::open(file.path(), options).unwrap());
            let guard = Arc::new(Noting::default());
            let guarded = BlockingFile::new(Arc::new(disk.guarded(guard.clone()).unwrap()));
            let before = BlockingFile::new(disk.clone());
            before.write_at(&[1; 4096], 0, Flags::NONE).unwrap();
            guarded.write_at(&[2; 4096], 0, Flags::NONE).unwrap();
            guarded.write_at(&[3; 5], 0, Flags::NONE).unwrap();
            guarded.zero(ByteRange::new(0, 8192), Flags::NONE).unwrap();
            let discarded = guarded.discard(ByteRange::new(0, 4096)).map_err(|it| it.errno());
            assert!(matches!(discarded, Ok(()) | Err(libc::EOPNOTSUPP)));
            let noted = std::mem::take(&mut *guard.noted.lock().unwrap());
            assert_eq!(noted, [(0, 4096, 1), (0, 5, 2), (0, 8192, 3), (0, 4096, 0)]);
            guarded.flush().unwrap();
            guarded.read_at(&mut [0; 512], 0).unwrap();
            guard.is_open.store(true, Ordering::SeqCst);
            guarded.write_at(&[4; 4096], 4096, Flags::NONE).unwrap();
            let aligned = guard.noted.lock().unwrap().len();
            assert!(aligned <= 1, "reads and flushes are no changes");
            // The device below has the same bytes, and nothing hides them.
            let mut byte = [0];
            before.read_at(&mut byte, 4096).unwrap();
            assert_eq!(byte, [4]);
        }
    }

    #[test]
    fn a_guard_above_another_one_asks_both_and_what_one_refuses_is_not_changed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let disk: Arc<BlockDevice<dyn BlockMap>> =
            Arc::new(BlockDevice::open(file.path(), OpenOptions::default()).unwrap());
        let (below, above) = (Arc::new(Noting::default()), Arc::new(Noting::default()));
        let lower: Arc<BlockDevice<dyn BlockMap>> =
            Arc::new(disk.clone().always_guarded(below.clone()).unwrap());
        let both = BlockingFile::new(Arc::new(lower.guarded(above.clone()).unwrap()));
        let take = |guard: &Noting| std::mem::take(&mut *guard.noted.lock().unwrap());
        both.write_at(&[1; 512], 0, Flags::NONE).unwrap();
        assert_eq!((take(&above), take(&below)), (vec![(0, 512, 0)], vec![(0, 512, 0)]));
        above.is_open.store(true, Ordering::SeqCst);
        both.write_at(&[2; 512], 0, Flags::NONE).unwrap();
        assert_eq!(take(&below), [(0, 512, 1)], "the one below is not open");
        let refused = both.write_at(&[3; 512], REFUSED, Flags::NONE).unwrap_err();
        assert_eq!(refused.errno(), libc::ENOSPC);
        let mut byte = [9];
        both.read_at(&mut byte, REFUSED).unwrap();
        assert_eq!(byte, [0]);
    }

    #[test]
    fn c51_a_failed_flush_of_the_guarded_device_is_one_of_both() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let disk: Arc<BlockDevice<dyn BlockMap>> =
            Arc::new(BlockDevice::open(file.path(), OpenOptions::default()).unwrap());
        let guarded = disk.guarded(Arc::new(Noting::default())).unwrap();
        let lost = Error::new(libc::ENOSPC, Operation::Flush);
        guarded.flushes.flush_shared(|| Err(lost)).unwrap_err();
        assert!(disk.has_failed_flush() && disk.flush().is_err());
    }

    #[test]
    fn a_file_that_grows_has_no_guard() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let grows: Arc<BlockDevice<dyn BlockMap>> =
            Arc::new(BlockDevice::open_file(file.path(), OpenOptions::default()).unwrap());
        let refused = grows.guarded(Arc::new(Noting::default())).map(|_| ());
        assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
    }
}
