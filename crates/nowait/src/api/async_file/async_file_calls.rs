//! The calls of AsyncFile that a disk does not have.
//!
//! Invariant: the thread of the executor waits in none of them but locks, which do not wait.

use std::fs::Metadata;
use std::future::Future;
use std::path::Path;

use crate::api::async_file::AsyncFile;
use crate::api::file_call;
use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::memory::io_buffer::IoBuffer;
use crate::storage::file_calls::{Allocate, FileLock};
use crate::types::byte_range::ByteRange;
use crate::types::error::Error;
use crate::types::request::Flags;

/// Each future makes its call when it is first polled, on a thread of the process. If it is dropped
/// later, or its time is over (`with_timeout`), the call goes on.
impl AsyncFile {
    /// Writes `buffer` at the end of the file, and returns the position of its first byte (C26): all of
    /// it in one piece, also beside other processes that append. With [`Flags::DSYNC`] it is durable
    /// (C28).
    ///
    /// # Errors
    /// Like [`BlockingFile::append`](crate::BlockingFile::append). The buffer is given back.
    pub fn append(
        &self,
        buffer: IoBuffer,
        flags: Flags,
    ) -> impl Future<Output = (Result<u64, Error>, IoBuffer)> + Send + use<> {
        file_call::append(self.shared.disk.clone(), self.timeout, buffer, flags | self.flags)
    }

    /// Sets the size of the file; what is new reads as zeros. It has no order with requests in flight.
    ///
    /// # Errors
    /// Like [`BlockDevice::set_len`].
    pub fn set_len(&self, bytes: u64) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.call(move |disk| disk.set_len(bytes))
    }

    /// Allocates storage for the holes in `range`, which still read as zeros.
    ///
    /// # Errors
    /// Like [`BlockDevice::allocate`].
    pub fn allocate(
        &self,
        range: ByteRange,
        mode: Allocate,
    ) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.call(move |disk| disk.allocate(range, mode))
    }

    /// Makes every write durable that had ended when this is first polled, and the file's metadata.
    ///
    /// # Errors
    /// Like [`BlockDevice::sync_all`].
    pub fn sync_all(&self) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.call(|disk| disk.sync_all())
    }

    /// The metadata of the file.
    ///
    /// # Errors
    /// Like [`BlockDevice::metadata`].
    pub fn metadata(&self) -> impl Future<Output = Result<Metadata, Error>> + Send + use<> {
        self.call(|disk| disk.metadata())
    }

    /// Locks the file against the handles that lock it, without waiting. The lock ends with the last clone of a file that
    /// was opened by its path, and otherwise with the device (C87).
    ///
    /// # Errors
    /// Like [`BlockDevice::try_lock`].
    pub fn try_lock(&self, lock: FileLock) -> Result<(), Error> {
        self.shared.disk.try_lock(lock)
    }

    /// Ends the lock of this file and its clones.
    ///
    /// # Errors
    /// Like [`BlockDevice::unlock`].
    pub fn unlock(&self) -> Result<(), Error> {
        self.shared.disk.unlock()
    }

    /// Gives a name to a file that was opened as an [`OpenOptions::unnamed`](crate::OpenOptions::unnamed)
    /// one.
    ///
    /// # Errors
    /// Like [`BlockDevice::link`].
    pub fn link(&self, path: &Path) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        let path = path.to_owned();
        self.call(move |disk| disk.link(&path))
    }

    fn call<T, F>(&self, make: F) -> impl Future<Output = Result<T, Error>> + Send + use<T, F>
    where
        T: Send + 'static,
        F: FnOnce(&BlockDevice<dyn BlockMap>) -> Result<T, Error> + Send + 'static,
    {
        file_call::call_fallible(self.shared.disk.clone(), self.timeout, make)
    }
}
