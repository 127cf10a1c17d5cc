//! The calls to a file that a disk does not have: appending, allocating, locking, naming.
//!
//! Invariant: the file offset of a descriptor is used by appends only, one at a time.

use std::fs::{File, Metadata};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use rustix::fs::{AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};

use crate::queue::preadv2;
use crate::storage::Storage;
use crate::storage::file::FileStorage;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::io_cursor::WriteCursor;

/// The size of a file behind which storage is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocate {
    /// The file grows to the end of the range if it was smaller.
    Extend,
    /// The size stays; a later write there grows the file without allocating.
    KeepSize,
}

/// A lock of a whole file (flock(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileLock {
    /// Others may have it, too, but none has an exclusive one.
    Shared,
    /// No other handle has a lock.
    Exclusive,
}

/// The position that stands for the file offset of the descriptor (preadv2(2)).
const FILE_OFFSET: u64 = u64::MAX;

impl FileStorage {
    /// Writes all of `data` at the end of the file, wherever that is when it is written, and returns
    /// the position of the first byte. The cursor is advanced by the bytes written. The page cache takes
    /// them: direct appends of several descriptors may go to the same place (XFS).
    ///
    /// # Errors
    /// The errno of pwritev2(2); a part of the data may then be at the end of the file. `EIO` if
    /// another process has appended between two parts of them.
    pub(crate) fn append(&self, data: &mut WriteCursor<'_>) -> Result<u64, Error> {
        let mut appending = self.appending.lock().unwrap_or_else(PoisonError::into_inner);
        let mut first = None;
        let mut next = self.size()?;
        while !data.is_empty() {
            let range = ByteRange::new(next, data.len());
            let failed = |error| Error::from_os(error, Operation::Write).at(range);
            let written = data.with_slices(|slices| match &*appending {
                Some(file) => retry_on_intr(|| rustix::io::writev(file, slices)),
                None => {
                    let append = ReadWriteFlags::APPEND;
                    retry_on_intr(|| {
                        rustix::io::pwritev2(&self.buffered, slices, FILE_OFFSET, append)
                    })
                }
            });
            if appending.is_none() && written.is_err_and(preadv2::is_forbidden) {
                *appending = Some(self.open_to_append()?);
                continue;
            }
            let count = written.map_err(failed)? as u64;
            let file = appending.as_ref().map_or(self.buffered.as_fd(), AsFd::as_fd);
            let end = rustix::fs::seek(file, SeekFrom::Current(0)).map_err(failed)?;
            if count == 0 || first.is_some() && end - count != next {
                return Err(failed(Errno::IO));
            }
            self.inode.changed(ByteRange::new(end - count, count));
            data.advance(count);
            first.get_or_insert(end - count);
            next = end;
        }
        Ok(first.unwrap_or(next))
    }

    /// The file once more, for appends without `RWF_APPEND`.
    pub(super) fn open_to_append(&self) -> Result<File, Error> {
        let path = format!("/proc/self/fd/{}", self.buffered.as_raw_fd());
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC;
        retry_on_intr(|| rustix::fs::open(path.as_str(), flags, Mode::empty()))
            .map(File::from)
            .map_err(|error| Error::from_os(error, Operation::Open))
    }

    /// Allocates storage for the holes in `range`, which still read as zeros.
    ///
    /// # Errors
    /// The errno of fallocate(2): `ENOSPC`; `EOPNOTSUPP` where the file system cannot; `EFBIG`.
    pub(crate) fn allocate_file(&self, range: ByteRange, mode: Allocate) -> Result<(), Error> {
        let flags = match mode {
            Allocate::Extend => FallocateFlags::empty(),
            Allocate::KeepSize => FallocateFlags::KEEP_SIZE,
        };
        retry_on_intr(|| rustix::fs::fallocate(&self.buffered, flags, range.pos, range.len))
            .map_err(|error| Error::from_os(error, Operation::Write).at(range))
    }

    /// fsync(2), on the descriptor of [`Storage::sync`].
    pub(crate) fn sync_all(&self) -> Result<(), Error> {
        retry_on_intr(|| rustix::fs::fsync(&self.buffered))
            .map_err(|error| Error::from_os(error, Operation::Flush))
    }

    pub(crate) fn metadata(&self) -> Result<Metadata, Error> {
        self.buffered.metadata().map_err(|error| Error::from_io(&error, Operation::Status))
    }

    /// Locks the file; if it does not `wait`, it fails with `EAGAIN`.
    pub(crate) fn lock(&self, lock: FileLock, wait: bool) -> Result<(), Error> {
        self.locked_by.store(std::process::id(), Ordering::Relaxed);
        flock(
            &self.buffered,
            match (lock, wait) {
                (FileLock::Shared, true) => FlockOperation::LockShared,
                (FileLock::Shared, false) => FlockOperation::NonBlockingLockShared,
                (FileLock::Exclusive, true) => FlockOperation::LockExclusive,
                (FileLock::Exclusive, false) => FlockOperation::NonBlockingLockExclusive,
            },
        )
    }

    pub(crate) fn unlock(&self) -> Result<(), Error> {
        flock(&self.buffered, FlockOperation::Unlock)
    }

    /// Whether this process has locked the file through this handle, and the lock has not ended.
    pub(crate) fn is_locked(&self) -> bool {
        match self.locked_by.load(Ordering::Relaxed) {
            0 => false,
            process => process == std::process::id(),
        }
    }

    /// Ends the lock of this process, if it has one: after fork(2) a handle of the child has that of its parent, too.
    pub(crate) fn end_lock(&self) {
        if self.is_locked() {
            self.locked_by.store(0, Ordering::Relaxed);
            let _ = self.unlock();
        }
    }

    /// Gives the file a name.
    pub(crate) fn link(&self, path: &Path) -> Result<(), Error> {
        let from = format!("/proc/self/fd/{}", self.buffered.as_raw_fd());
        rustix::fs::linkat(CWD, from.as_str(), CWD, path, AtFlags::SYMLINK_FOLLOW)
            .map_err(|error| Error::from_os(error, Operation::Write))
    }
}

impl Drop for FileStorage {
    /// Unlocks the file: a process that is being started has copies of all descriptors until it
    /// executes its program, and a lock lives as long as any of them.
    fn drop(&mut self) {
        self.end_lock();
    }
}

fn flock(file: &File, operation: FlockOperation) -> Result<(), Error> {
    retry_on_intr(|| rustix::fs::flock(file, operation))
        .map_err(|error| Error::from_os(error, Operation::SetUp))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::open_options::OpenOptions;

    #[test]
    fn a_closed_handle_leaves_no_lock_to_copies_of_its_descriptor() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || FileStorage::open_file(file.path(), OpenOptions::new()).unwrap();
        let (one, other) = (open(), open());
        let copy = one.buffered.try_clone().unwrap();
        one.lock(FileLock::Exclusive, false).unwrap();
        let errno = |done: Result<(), Error>| done.map_err(|error| error.errno());
        assert_eq!(errno(other.lock(FileLock::Shared, false)), Err(libc::EAGAIN));
        drop(one);
        other.lock(FileLock::Exclusive, false).unwrap();
        drop(copy);
    }
}
