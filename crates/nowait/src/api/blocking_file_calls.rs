//! The calls of a blocking file that a disk does not have.
//!
//! Invariant: a call returns when its request has ended.

use std::fs::Metadata;
use std::path::Path;

use crate::api::blocking_file::BlockingFile;
use crate::block::block_map::BlockMap;
use crate::blocking::sync_io;
use crate::storage::file_calls::{Allocate, FileLock};
use crate::types::byte_range::ByteRange;
use crate::types::error::Error;
use crate::types::io_cursor::WriteCursor;
use crate::types::request::Flags;

impl<M: BlockMap + ?Sized> BlockingFile<M> {
    /// Writes `buf` at the end of the file, and returns the position of its first byte (C26): all of it
    /// in one piece, also beside other processes that append. With [`Flags::DSYNC`] it is durable (C28).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("log");
    /// use nowait::{BlockingFile, Flags, OpenOptions};
    /// let log = BlockingFile::open(&path, OpenOptions::new().create(true))?;
    /// assert_eq!(log.append(b"first", Flags::NONE)?, 0);
    /// assert_eq!(log.append(b"second", Flags::DSYNC)?, 5); // both are on storage
    /// assert_eq!(std::fs::read(&path)?, b"firstsecond");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `EINVAL` for a device that keeps its size, `EROFS`; the errno of pwritev2(2), such as `ENOSPC`,
    /// after which a part may be at the end of the file, and of fdatasync(2); `EIO` if another process
    /// has appended between two parts, which happens only where the kernel cuts a write short.
    pub fn append(&self, buf: &[u8], flags: Flags) -> Result<u64, Error> {
        sync_io::append(self.disk(), &mut WriteCursor::from(buf), flags | self.flags())
    }

    /// Sets the size of the file; what is new reads as zeros. It has no order with requests in flight.
    ///
    /// # Errors
    /// Like [`BlockDevice::set_len`](crate::BlockDevice::set_len).
    pub fn set_len(&self, bytes: u64) -> Result<(), Error> {
        self.disk().set_len(bytes)
    }

    /// Allocates storage for the holes in `range`, which still read as zeros.
    ///
    /// # Errors
    /// Like [`BlockDevice::allocate`](crate::BlockDevice::allocate).
    pub fn allocate(&self, range: ByteRange, mode: Allocate) -> Result<(), Error> {
        self.disk().allocate(range, mode)
    }

    /// Makes every write durable that returned before, and the file's metadata.
    ///
    /// # Errors
    /// Like [`BlockDevice::sync_all`](crate::BlockDevice::sync_all).
    pub fn sync_all(&self) -> Result<(), Error> {
        self.disk().sync_all()
    }

    /// The metadata of the file.
    ///
    /// # Errors
    /// Like [`BlockDevice::metadata`](crate::BlockDevice::metadata).
    pub fn metadata(&self) -> Result<Metadata, Error> {
        self.disk().metadata()
    }

    /// Locks the file against the handles that lock it, and waits for these.
    ///
    /// # Errors
    /// Like [`BlockDevice::lock`](crate::BlockDevice::lock).
    pub fn lock(&self, lock: FileLock) -> Result<(), Error> {
        self.disk().lock(lock)
    }

    /// Like [`BlockingFile::lock`], without waiting.
    ///
    /// # Errors
    /// Like [`BlockDevice::try_lock`](crate::BlockDevice::try_lock).
    pub fn try_lock(&self, lock: FileLock) -> Result<(), Error> {
        self.disk().try_lock(lock)
    }

    /// Ends the lock of this handle.
    ///
    /// # Errors
    /// Like [`BlockDevice::unlock`](crate::BlockDevice::unlock).
    pub fn unlock(&self) -> Result<(), Error> {
        self.disk().unlock()
    }

    /// Gives a name to a file that was opened as an [`OpenOptions::unnamed`](crate::OpenOptions::unnamed)
    /// one.
    ///
    /// # Errors
    /// Like [`BlockDevice::link`](crate::BlockDevice::link).
    pub fn link(&self, path: &Path) -> Result<(), Error> {
        self.disk().link(path)
    }
}
