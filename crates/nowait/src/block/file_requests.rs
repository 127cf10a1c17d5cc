//! A file as a device: its writes may extend it, and it has calls that a disk does not have.
//!
//! Invariant: nothing that another handle or process can change is relied on: no hole is remembered, and
//! the size that was last seen only spares a request inside it the question for the present one.

use std::fs::Metadata;
use std::path::Path;
use std::sync::Arc;

use crate::block::allocation_cache::AllocationCache;
use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::block::device_file::DeviceFile;
use crate::storage::Storage;
use crate::storage::file::FileStorage;
use crate::storage::file_calls::{Allocate, FileLock};
use crate::storage::open_options::OpenOptions;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::request::Op;

/// The greatest size of a file in bytes, whatever the file system allows.
/// Beyond it: `EINVAL`.
const GREATEST_SIZE: u64 = i64::MAX as u64;

impl BlockDevice<AllocationCache> {
    /// Opens the file at `path`, or makes it, as one that grows: a write at its end or beyond it makes
    /// it larger, and its size is never padded. What other handles and processes write to it, or cut
    /// off, is seen by the next request. A block device keeps its size, as with [`BlockDevice::open`].
    ///
    /// Whole pages at a multiple of the page are written by direct I/O, the rest through the page cache;
    /// of two handles that write to one page at the same time, one all of it and the other a part, the
    /// bytes of one may be lost.
    ///
    /// # Errors
    /// Like [`FileStorage::open`], and the errno of open(2) and ftruncate(2) for a file that is made or
    /// truncated: `EEXIST`, `EOPNOTSUPP` for an unnamed file where the file system has none. `EINVAL`
    /// for options that contradict each other, and for `cache_holes`.
    pub fn open_file(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        options.check(false)?;
        let storage = Arc::new(FileStorage::open_file(path, options)?);
        let is_device = storage.properties().device;
        if is_device && (options.append || options.truncate || options.create_new) {
            return Err(Error::new(libc::EINVAL, Operation::Open));
        }
        let mut device = match is_device {
            true => Self::raw(storage.clone(), options)?,
            false => {
                let map = AllocationCache::new(0, false);
                let size = storage.size()?;
                Self::mapped(storage.clone(), Vec::new(), size, options.read_only, map)
            }
        };
        device.file = Some(DeviceFile::new(storage.clone()));
        device.appends = options.append;
        Ok(device.of_file(storage, options))
    }
}

impl<M: BlockMap + ?Sized> BlockDevice<M> {
    /// Bytes from `pos` on that a request of `len` bytes may have: up to the end, but a write to a file
    /// that grows has no end. A read is cut off here and not by the kernel, which would look for the
    /// end in what a file system has reserved behind it (on XFS `EIO`).
    pub(crate) fn room(&self, op: Op, pos: u64, len: u64) -> u64 {
        let size = match self.growing() {
            Some(_) if op != Op::Read => return len,
            Some(_) if pos.saturating_add(len) > self.limit() => self.size(),
            _ => self.limit(),
        };
        size.saturating_sub(pos)
    }

    /// `range` up to the end of a file that grows; what is behind it is neither zeroed nor reported.
    pub(crate) fn cut(&self, range: ByteRange) -> ByteRange {
        match self.growing() {
            Some(_) => {
                ByteRange::new(range.pos, range.len.min(self.size().saturating_sub(range.pos)))
            }
            None => range,
        }
    }

    /// The file. `EOPNOTSUPP` if the device was opened as a disk.
    fn as_file(&self) -> Result<&FileStorage, Error> {
        self.file.as_deref().ok_or(Error::new(libc::EOPNOTSUPP, Operation::Validate))
    }

    /// The file, to be changed. `EINVAL` if it is a block device or the device was opened as a disk,
    /// `EROFS` if it is read-only.
    pub(crate) fn changeable(&self) -> Result<&FileStorage, Error> {
        let failed = |errno| Error::new(errno, Operation::Validate);
        let file = self.growing().ok_or(failed(libc::EINVAL))?;
        if self.is_read_only() { Err(failed(libc::EROFS)) } else { Ok(file) }
    }

    /// Sets the size of a file; what is new reads as zeros. It may block.
    ///
    /// # Errors
    /// `EINVAL` for a device that keeps its size and for a size beyond `i64::MAX`; `EROFS`; the errno
    /// of ftruncate(2), such as `EFBIG`.
    pub fn set_len(&self, bytes: u64) -> Result<(), Error> {
        let file = self.changeable()?;
        if bytes > GREATEST_SIZE {
            return Err(Error::new(libc::EINVAL, Operation::Validate));
        }
        file.set_len(bytes)
    }

    /// Allocates storage for the holes in `range` of a file, which still read as zeros; an empty range
    /// does nothing. It may block.
    ///
    /// # Errors
    /// `EINVAL` for a device that keeps its size and for a range beyond `i64::MAX`; `EROFS`; the errno
    /// of fallocate(2): `ENOSPC`, `EFBIG`, `EOPNOTSUPP` where the file system cannot. A part may be
    /// allocated then.
    pub fn allocate(&self, range: ByteRange, mode: Allocate) -> Result<(), Error> {
        let file = self.changeable()?;
        if range.pos.checked_add(range.len).is_none_or(|end| end > GREATEST_SIZE) {
            return Err(Error::new(libc::EINVAL, Operation::Validate).at(range));
        }
        if range.len == 0 { Ok(()) } else { file.allocate_file(range, mode) }
    }

    /// Makes every write durable that returned before, and the file's metadata, such as its times
    /// (fsync(2)). Of a disk only the writes. It blocks.
    ///
    /// # Errors
    /// The errno of fsync(2); after a failed one, or a failed flush, always `EIO` (C51).
    pub fn sync_all(&self) -> Result<(), Error> {
        self.flush()?;
        let Some(file) = &self.file else { return Ok(()) };
        let done = file.sync_all();
        if let Err(error) = done {
            // The kernel reports a lost write once: later flushes have to fail, too.
            let _ = self.flushes.flush_shared(|| Err(error));
        }
        done
    }

    /// The metadata of the file (fstat(2)). It may block where the file system is on a network.
    ///
    /// # Errors
    /// The errno of fstat(2); `EOPNOTSUPP` if the device was opened as a disk.
    pub fn metadata(&self) -> Result<Metadata, Error> {
        self.as_file()?.metadata()
    }

    /// Locks the file against other handles of any process that lock it (flock(2)), and waits for
    /// these. A lock that the handle has already is changed, not atomically. It ends with the process, with
    /// [`BlockDevice::unlock`], with the last clone of the [`AsyncFile`](crate::AsyncFile) or
    /// [`LocalAsyncFile`](crate::LocalAsyncFile) that has opened the file and the requests that they have left, or
    /// with the device, which an engine and its workers may have a moment longer than the last request (C87).
    ///
    /// # Errors
    /// The errno of flock(2): `ENOLCK`; `EOPNOTSUPP` if the device was opened as a disk.
    pub fn lock(&self, lock: FileLock) -> Result<(), Error> {
        self.as_file()?.lock(lock, true)
    }

    /// Like [`BlockDevice::lock`], without waiting.
    ///
    /// # Errors
    /// `EAGAIN` if another handle has a lock that excludes this one; as [`BlockDevice::lock`].
    pub fn try_lock(&self, lock: FileLock) -> Result<(), Error> {
        self.as_file()?.lock(lock, false)
    }

    /// Ends the lock of this handle; without one it does nothing.
    ///
    /// # Errors
    /// Like [`BlockDevice::lock`].
    pub fn unlock(&self) -> Result<(), Error> {
        self.as_file()?.unlock()
    }

    /// Whether the device was locked, and not unlocked since.
    pub(crate) fn is_locked(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.is_locked())
    }

    /// Ends the lock, if there is one.
    pub(crate) fn end_lock(&self) {
        if let Some(file) = &self.file {
            file.end_lock();
        }
    }

    /// Gives a name to a file that was opened as an [`OpenOptions::unnamed`] one. To have it there
    /// after a loss of power, sync the file before and the directory after
    /// ([`sync_directory`](crate::sync_directory)). It may block.
    ///
    /// # Errors
    /// The errno of linkat(2): `EEXIST` if the name is taken, `ENOENT` for a file whose names were all
    /// removed, and where /proc is not mounted; `EOPNOTSUPP` if the device was opened as a disk.
    pub fn link(&self, path: &Path) -> Result<(), Error> {
        self.as_file()?.link(path)
    }
}
