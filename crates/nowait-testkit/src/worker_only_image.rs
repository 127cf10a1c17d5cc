//! An image whose requests are all served by workers: its map has no answer without waiting. It
//! stores nothing, and every byte reads as [`SEVEN`].
//!
//! Invariant: the image behind a device and its clones share their records.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nowait::{
    BlockDevice, BlockMap, ByteRange, Error, Extent, ExtentStatus, FileStorage, Flags, ImageFormat,
    Intent, OpenOptions, ReadCursor, WouldBlock, WriteCursor,
};

/// The byte that every read returns.
pub const SEVEN: u8 = 7;

/// The image, and the records of its requests.
#[derive(Clone, Debug, Default)]
pub struct WorkerOnlyImage {
    reads: Arc<Mutex<Vec<u64>>>,
    flushes: Arc<AtomicUsize>,
    bad: Option<u64>,
    held: Arc<Mutex<()>>,
}

impl WorkerOnlyImage {
    /// An image whose requests panic if they begin at `pos`, but for flushes.
    pub fn that_panic_at(pos: u64) -> Self {
        Self { bad: Some(pos), ..Self::default() }
    }

    /// Requests do not end while the result exists.
    pub fn hold(&self) -> MutexGuard<'_, ()> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device of `size` bytes with this image, on a new file at `path`.
    pub fn device(&self, path: &Path, size: u64) -> Arc<BlockDevice<Self>> {
        std::fs::File::create(path).and_then(|file| file.set_len(size)).expect("a sparse file");
        let storage = FileStorage::open(path, OpenOptions::default()).expect("the file");
        Arc::new(BlockDevice::mapped(Arc::new(storage), Vec::new(), size, false, self.clone()))
    }

    /// The positions that were read, in order.
    pub fn reads(&self) -> Vec<u64> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The number of flushes.
    pub fn flushes(&self) -> usize {
        self.flushes.load(Ordering::SeqCst)
    }

    fn check(&self, pos: u64) -> Result<(), Error> {
        assert_ne!(Some(pos), self.bad, "on purpose");
        drop(self.hold());
        Ok(())
    }
}

impl BlockMap for WorkerOnlyImage {
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

impl ImageFormat for WorkerOnlyImage {
    fn read(&self, pos: u64, mut memory: ReadCursor<'_>) -> Result<(), Error> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner).push(pos);
        memory.fill(SEVEN);
        self.check(pos)
    }

    fn write(&self, pos: u64, _: WriteCursor<'_>) -> Result<(), Error> {
        self.check(pos)
    }

    fn discard(&self, range: ByteRange) -> Result<(), Error> {
        self.check(range.pos)
    }

    fn zero(&self, range: ByteRange, _: Flags) -> Result<(), Error> {
        self.check(range.pos)
    }

    fn flush(&self) -> Result<(), Error> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn status(
        &self,
        range: ByteRange,
        _: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        extents.push(ExtentStatus { len: range.len, hole: false, depth: 1 });
        self.check(range.pos)
    }
}
