//! An export as all threads share it: its image, its limits and counts, and whether it is served.
//!
//! Invariant: a use of an export begins only while the export is neither paused nor removed, and is
//! counted until it is dropped. An export that is neither used nor attached has no request in flight.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use nowait::{DEFAULT_WEIGHT, WEIGHTS};

use crate::dirty_bitmaps::DirtyBitmaps;
use crate::export::{Export, ExportId};
use crate::locking::lock;
use crate::rate_limit::SharedLimits;
use crate::statistics::ExportStatistics;

/// The refusal of a use of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotServed {
    /// Its members wait for the end of the pause.
    Paused,
    Removed,
}

/// The uses of an export.
#[derive(Default)]
struct Uses {
    is_paused: bool,
    is_removed: bool,
    /// Connections and queues.
    members: usize,
    /// Threads that have the device in their engines.
    attached: usize,
}

/// An export of a server.
pub(crate) struct SharedExport {
    pub(crate) id: ExportId,
    /// Replaced only while no thread has it attached.
    export: RwLock<Arc<Export>>,
    pub(crate) statistics: ExportStatistics,
    pub(crate) limits: SharedLimits,
    pub(crate) bitmaps: DirtyBitmaps,
    /// Its share of a thread and of the workers beside other exports that move much, one of [`WEIGHTS`]. Its
    /// disk has the same one.
    weight: AtomicU32,
    uses: Mutex<Uses>,
    /// Copies of the flags of `uses`, for the threads.
    is_paused: AtomicBool,
    is_removed: AtomicBool,
    /// Notified when the last use or attachment has ended.
    unused: Condvar,
    /// The size that the guests and the local block device were told, in bytes.
    told_size: AtomicU64,
}

impl SharedExport {
    pub(crate) fn new(id: ExportId, export: Arc<Export>, bitmaps: DirtyBitmaps) -> Self {
        let told_size = AtomicU64::new(export.disk().size());
        Self {
            id,
            export: RwLock::new(export),
            statistics: ExportStatistics::default(),
            limits: SharedLimits::default(),
            bitmaps,
            weight: AtomicU32::new(DEFAULT_WEIGHT),
            uses: Mutex::default(),
            is_paused: AtomicBool::new(false),
            is_removed: AtomicBool::new(false),
            unused: Condvar::new(),
            told_size,
        }
    }

    /// The open image and its checks.
    pub(crate) fn export(&self) -> Arc<Export> {
        self.export.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Serves `export` from now on; no thread has it attached. Changes are refused as before.
    pub(crate) fn replace(&self, export: Arc<Export>) {
        let mut current = self.export.write().unwrap_or_else(PoisonError::into_inner);
        current.summarize_faults();
        if current.is_read_only() {
            // It cannot fail: nothing is allowed by it.
            let _ = export.set_read_only(true);
        }
        self.bitmaps.truncate(export.disk().size());
        self.bitmaps.attach(export.bitmap_store());
        export.disk().set_weight(self.weight());
        *current = export;
    }

    /// Its share beside other exports, one of [`WEIGHTS`].
    pub(crate) fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    /// Has another share from the next service of a thread, and the next request for a worker, on. Returns
    /// false for one that is not in [`WEIGHTS`].
    pub(crate) fn set_weight(&self, weight: u32) -> bool {
        let is_valid = WEIGHTS.contains(&weight);
        if is_valid {
            // Locked, so that an export in its place gets this weight or has it set here.
            let export = self.export.read().unwrap_or_else(PoisonError::into_inner);
            self.weight.store(weight, Ordering::Relaxed);
            export.disk().set_weight(weight);
        }
        is_valid
    }

    /// Notes that the device has `size` bytes. Returns the size before, if it was another one.
    pub(crate) fn tell_size(&self, size: u64) -> Option<u64> {
        let before = self.told_size.swap(size, Ordering::AcqRel);
        (before != size).then_some(before)
    }

    /// Begins a use by a connection or a queue.
    ///
    /// # Errors
    /// The export is paused or removed.
    pub(crate) fn begin_use(self: &Arc<Self>) -> Result<ExportUse, NotServed> {
        let mut uses = self.lock();
        match (uses.is_removed, uses.is_paused) {
            (true, _) => Err(NotServed::Removed),
            (false, true) => Err(NotServed::Paused),
            (false, false) => {
                uses.members += 1;
                Ok(ExportUse(self.clone()))
            }
        }
    }

    /// A thread has attached the device. Its use of the export has begun before.
    pub(crate) fn on_attached(&self) {
        self.lock().attached += 1;
    }

    /// A thread has detached the device.
    pub(crate) fn on_detached(&self) {
        let mut uses = self.lock();
        uses.attached -= 1;
        self.notify(&uses);
    }

    fn notify(&self, uses: &Uses) {
        if uses.members == 0 && uses.attached == 0 {
            self.unused.notify_all();
        }
    }

    /// Connections and queues that use it.
    pub(crate) fn members(&self) -> usize {
        self.lock().members
    }

    /// No use begins from now on until [`SharedExport::resume`], and the threads have to end those that
    /// there are. Returns false if that is so already.
    pub(crate) fn pause(&self) -> bool {
        self.set_paused(true)
    }

    /// Uses begin again.
    pub(crate) fn resume(&self) {
        self.set_paused(false);
    }

    /// Returns whether that is a change.
    fn set_paused(&self, is_paused: bool) -> bool {
        let mut uses = self.lock();
        self.is_paused.store(is_paused, Ordering::Release);
        std::mem::replace(&mut uses.is_paused, is_paused) != is_paused
    }

    /// No further use begins; the threads detach the device after the last one.
    pub(crate) fn remove(&self) {
        let mut uses = self.lock();
        uses.is_removed = true;
        self.is_removed.store(true, Ordering::Release);
    }

    /// Removes it, unless it is used, or `connected`. Returns whether it is removed.
    pub(crate) fn remove_unused(&self, connected: impl FnOnce() -> bool) -> bool {
        let mut uses = self.lock();
        // A connection is listed before its use begins, which takes the lock.
        if !uses.is_removed && (uses.members > 0 || connected()) {
            return false;
        }
        uses.is_removed = true;
        self.is_removed.store(true, Ordering::Release);
        true
    }

    /// Whether uses must end for a while.
    #[inline]
    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Acquire)
    }

    /// Whether no further use begins.
    #[inline]
    pub(crate) fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Acquire)
    }

    /// Waits at most `timeout` until nothing uses it and no thread has it attached. Returns whether that
    /// is so.
    pub(crate) fn wait_unused(&self, timeout: Duration) -> bool {
        let is_used = |uses: &mut Uses| uses.members > 0 || uses.attached > 0;
        let waited = self.unused.wait_timeout_while(self.lock(), timeout, is_used);
        let (uses, _) = waited.unwrap_or_else(PoisonError::into_inner);
        uses.members == 0 && uses.attached == 0
    }

    /// Locks the uses, ignoring poison: no critical section can panic half-way through a change.
    fn lock(&self) -> MutexGuard<'_, Uses> {
        lock(&self.uses)
    }
}

/// A use of an export by a connection or a queue.
pub(crate) struct ExportUse(Arc<SharedExport>);

impl ExportUse {
    /// The export.
    pub(crate) fn export(&self) -> &Arc<SharedExport> {
        &self.0
    }
}

impl Drop for ExportUse {
    fn drop(&mut self) {
        let mut uses = self.0.lock();
        uses.members -= 1;
        self.0.notify(&uses);
    }
}

#[cfg(test)]
mod tests {
    use nowait::{BlockDevice, BlockMap, OpenOptions};

    use super::*;

    type Disk = Arc<BlockDevice<dyn BlockMap>>;

    /// An export of a new disk.
    fn export() -> (Arc<Export>, Disk) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let disk: Disk = Arc::new(BlockDevice::open(file.path(), OpenOptions::default()).unwrap());
        (Arc::new(Export::new(disk.clone(), String::new(), String::new())), disk)
    }

    #[test]
    fn the_disk_has_the_weight_of_its_export_also_one_that_takes_its_place() {
        let ((first, disk), (second, other)) = (export(), export());
        let shared = SharedExport::new(ExportId(0), first, DirtyBitmaps::default());
        assert_eq!((shared.weight(), disk.weight()), (DEFAULT_WEIGHT, DEFAULT_WEIGHT));
        for (weight, is_valid, then) in
            [(1, true, 1), (0, false, 1), (10_000, true, 10_000), (10_001, false, 10_000)]
        {
            assert_eq!(shared.set_weight(weight), is_valid);
            assert_eq!((shared.weight(), disk.weight()), (then, then));
        }
        shared.replace(second);
        assert_eq!(other.weight(), 10_000);
        assert!(shared.set_weight(7));
        assert_eq!((other.weight(), disk.weight()), (7, 10_000));
    }
}
