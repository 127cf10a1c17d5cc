//! An export: an open image, and the rules that every frontend keeps.
//!
//! Invariant: a frontend never answers with memory that was not read for the request (C55, C56),
//! and never does part of a request (C25).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nowait::{
    BlockDevice, BlockMap, BlockingFile, ByteRange, Completion, Error, Flags, Op, Request,
};
use nowait_image::BitmapStore;

use crate::block_size::BlockSize;
use crate::export_error::ExportError;
use crate::fault_log::{ExportLabel, Faults};
use crate::injected_bug::{ServerBug, injected};

/// The id of an export among those of its server; never used again for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExportId(pub(crate) u64);

impl ExportId {
    /// The id as a number.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ExportId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One image as a block device.
pub struct Export {
    disk: Arc<BlockDevice<dyn BlockMap>>,
    name: String,
    description: String,
    faults: Arc<Faults>,
    /// The smallest request, if not every one is taken.
    block_size: Option<BlockSize>,
    /// Changes are refused although the image could be written to.
    write_protected: AtomicBool,
    /// The bitmaps that are stored in the image.
    bitmap_store: Option<Arc<BitmapStore>>,
    /// Whether discards are the only changes that the disk takes.
    only_discards: bool,
}

impl Export {
    /// An export of `disk`. Clients choose it by `name`; `description` is for people.
    #[must_use]
    pub fn new(disk: Arc<BlockDevice<dyn BlockMap>>, name: String, description: String) -> Self {
        let (faults, write_protected) = (Arc::default(), AtomicBool::new(false));
        let (block_size, bitmap_store, only_discards) = (None, None, false);
        Self {
            disk,
            name,
            description,
            faults,
            block_size,
            write_protected,
            bitmap_store,
            only_discards,
        }
    }

    /// This export, whose disk refuses all changes but discards.
    #[must_use]
    pub(crate) fn with_only_discards(self) -> Self {
        Self { only_discards: true, ..self }
    }

    /// Whether the disk takes zeroing and writes, if it is not read-only.
    pub(crate) fn takes_writes(&self) -> bool {
        !self.only_discards
    }

    /// This export, but one whose clients read and write whole blocks of `block_size` only, if it is given.
    #[must_use]
    pub fn with_block_size(self, block_size: Option<BlockSize>) -> Self {
        Self { block_size, ..self }
    }

    /// This export, but one whose image keeps those of its bitmaps that are in `store`.
    #[must_use]
    pub fn with_bitmap_store(self, bitmap_store: Option<Arc<BitmapStore>>) -> Self {
        Self { bitmap_store, ..self }
    }

    /// The bitmaps that are stored in the image, if it is written to and has any.
    pub(crate) fn bitmap_store(&self) -> Option<&Arc<BitmapStore>> {
        self.bitmap_store.as_ref()
    }

    /// This export, but one that calls `callback` when a flush has failed after which every later one
    /// fails, too. It is called on a serving thread and must not block.
    #[must_use]
    pub fn when_a_flush_fails(self, callback: impl Fn() + Send + Sync + 'static) -> Self {
        Self { faults: Arc::new(Faults::with_callback(Box::new(callback))), ..self }
    }

    /// This export with `disk`, which has equal bytes. Changes of it are allowed.
    pub(crate) fn on_disk(&self, disk: Arc<BlockDevice<dyn BlockMap>>) -> Self {
        let export = Self::new(disk, self.name.clone(), self.description.clone());
        let (faults, bitmap_store) = (self.faults.clone(), self.bitmap_store.clone());
        Self { faults, block_size: self.block_size, bitmap_store, ..export }
    }

    /// Logs that `io` has failed with `errno`.
    #[cold]
    pub(crate) fn note_fault(&self, io: Request, errno: i32) {
        self.faults.note(|| self.label(), io, errno, || self.disk.has_failed_flush());
    }

    /// Logs that `io` has ended after `time`, or a little more.
    #[cold]
    pub(crate) fn note_slow(&self, io: Request, time: Duration) {
        self.faults.note_slow(|| self.label(), io, time);
    }

    /// Logs that `count` requests have not ended for `time`.
    #[cold]
    pub(crate) fn note_overdue(&self, count: u32, time: Duration) {
        self.faults.note_overdue(|| self.label(), count, time);
    }

    /// Makes the completed writes durable (C49). Blocks.
    ///
    /// # Errors
    /// The errno of the flush, which is logged.
    pub(crate) fn flush(&self) -> Result<(), Error> {
        BlockingFile::new(self.disk.clone()).flush().inspect_err(|error| {
            let flush = Request { op: Op::Flush, flags: Flags::NONE, range: ByteRange::new(0, 0) };
            self.note_fault(flush, error.errno());
        })
    }

    /// Logs the failures that were only counted.
    pub(crate) fn summarize_faults(&self) {
        self.faults.summarize(&self.label());
    }

    /// The export's name in the log.
    fn label(&self) -> ExportLabel {
        ExportLabel { name: self.name.clone(), description: self.description.clone() }
    }

    /// The image.
    #[must_use]
    pub fn disk(&self) -> &Arc<BlockDevice<dyn BlockMap>> {
        &self.disk
    }

    /// Whether changes are refused.
    #[inline]
    pub(crate) fn is_read_only(&self) -> bool {
        self.disk.is_read_only() || self.write_protected.load(Ordering::Acquire)
    }

    /// Refuses changes from now on, or no more.
    ///
    /// # Errors
    /// [`ExportError::ReadOnly`]: the image was opened for reading only.
    pub(crate) fn set_read_only(&self, read_only: bool) -> Result<(), ExportError> {
        if !read_only && self.disk.is_read_only() {
            return Err(ExportError::ReadOnly);
        }
        self.write_protected.store(read_only, Ordering::Release);
        Ok(())
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn description(&self) -> &str {
        &self.description
    }

    /// The blocks of its clients, if these are given.
    pub(crate) fn block_size(&self) -> Option<BlockSize> {
        self.block_size
    }

    /// Bytes of the smallest request, a power of two; 1 if every one is taken.
    #[inline]
    pub(crate) fn smallest_block(&self) -> u64 {
        self.block_size.map_or(1, |size| u64::from(size.bytes()))
    }

    /// Whether a request for `range` begins and ends with a block.
    #[inline]
    pub(crate) fn is_whole_blocks(&self, range: ByteRange) -> bool {
        (range.pos | range.len) & (self.smallest_block() - 1) == 0
    }

    /// The whole blocks in `size` bytes, in bytes.
    pub(crate) fn whole_blocks(&self, size: u64) -> u64 {
        size & !(self.smallest_block() - 1)
    }

    /// The range of a request, or the errno that refuses it as a whole (C02, C25): `EPERM` for a
    /// change on a read-only export; past the end `ENOSPC` for a write or zeroing, and `EINVAL` for
    /// the rest (NBD proto.md, "Error values").
    #[inline]
    pub(crate) fn range(&self, op: Op, pos: u64, len: u64) -> Result<ByteRange, i32> {
        let changes = op.changes();
        if changes && self.is_read_only() && !injected(ServerBug::IgnoreProtection) {
            return Err(libc::EPERM);
        }
        match pos.checked_add(len) {
            Some(end) if end <= self.disk.size() => Ok(ByteRange::new(pos, len)),
            _ if matches!(op, Op::Write | Op::Zero) => Err(libc::ENOSPC),
            _ => Err(libc::EINVAL),
        }
    }

    /// The range of a request for whole sectors. Of the last sector, which may be a part of one, only the bytes of the
    /// image are in it: the others are read as zeros, and writes of them are dropped.
    ///
    /// # Errors
    /// Like [`Export::range`].
    #[inline]
    pub(crate) fn range_of_sectors(&self, op: Op, pos: u64, len: u64) -> Result<ByteRange, i32> {
        self.range(op, pos, len).or_else(|errno| self.range_at_end(op, pos, len, errno))
    }

    #[cold]
    fn range_at_end(&self, op: Op, pos: u64, len: u64, errno: i32) -> Result<ByteRange, i32> {
        let size = self.disk.size();
        match pos.checked_add(len) {
            Some(end) if end > size && end <= sectors_of(size) * SECTOR_BYTES && pos < size => {
                self.range(op, pos, size - pos)
            }
            _ => Err(errno),
        }
    }
}

/// Bytes of a sector of vhost-user and ublk devices.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// The sectors of a disk of `size` bytes. The last one is padded with zeros, as by QEMU.
pub(crate) const fn sectors_of(size: u64) -> u64 {
    size.div_ceil(SECTOR_BYTES)
}

/// The result of a completed request for a frontend: success or an errno. A short transfer is `EIO`
/// (C55): the image was truncated behind the server's back.
#[inline]
pub(crate) fn result(completion: &Completion) -> Result<(), i32> {
    let Request { op, range, .. } = completion.io;
    match completion.result() {
        Ok(done) if done == range.len || op == Op::Flush => Ok(()),
        Ok(_) => Err(libc::EIO),
        Err(error) => Err(error.errno()),
    }
}
