//! A storage that reports its calls to an observer: a log of its changes, a gate, or one by which they
//! fail.
//!
//! Invariant: transfers that an engine submits through its own queue are not observed.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;

use nowait::{
    ByteRange, Error, ExtentStatus, FileStorage, Flags, Operation, Storage, StorageProperties,
};

/// A change of a file, or a sync.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Write(u64, Vec<u8>),
    /// The range becomes zeros.
    Clear(ByteRange),
    SetLen(u64),
    Sync,
}

/// The observer of a storage.
pub(crate) trait Observer: Send + Sync {
    /// A change begins; returns the number that its end is reported with.
    fn begin(&self, change: Change) -> usize;

    /// The change with this number has completed.
    fn completed(&self, _begun: usize) {}

    /// A read begins.
    fn reading(&self) {}

    /// A read has moved this many bytes.
    fn read(&self, _bytes: u64) {}

    /// Whether the change that begins now fails.
    fn fails(&self) -> bool {
        false
    }

    /// Whether the storage says that it keeps what was written.
    fn keeps_unsynced(&self) -> bool {
        false
    }
}

/// A storage and its observer.
pub(crate) struct ObservedStorage<O> {
    pub(crate) inner: FileStorage,
    pub(crate) observer: O,
}

impl<O: Observer> ObservedStorage<O> {
    fn change<T>(
        &self,
        change: Change,
        call: impl FnOnce(&FileStorage) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if self.observer.fails() {
            return Err(Error::new(libc::EIO, Operation::Write));
        }
        let begun = self.observer.begin(change);
        let done = call(&self.inner);
        self.observer.completed(begun);
        done
    }
}

impl<O: Observer> Storage for ObservedStorage<O> {
    fn properties(&self) -> StorageProperties {
        self.inner.properties()
    }

    fn size(&self) -> Result<u64, Error> {
        self.inner.size()
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        self.observer.reading();
        let done = self.inner.read(bufs, pos)?;
        self.observer.read(done as u64);
        Ok(done)
    }

    fn write(&self, bufs: &[IoSlice<'_>], pos: u64, flags: Flags) -> Result<usize, Error> {
        let bytes = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
        self.change(Change::Write(pos, bytes), |it| it.write(bufs, pos, flags))
    }

    fn sync(&self) -> Result<(), Error> {
        self.change(Change::Sync, Storage::sync)
    }

    fn keeps_unsynced(&self) -> bool {
        self.observer.keeps_unsynced()
    }

    fn punch(&self, range: ByteRange) -> Result<(), Error> {
        self.change(Change::Clear(range), |it| it.punch(range))
    }

    fn zero(&self, range: ByteRange) -> Result<(), Error> {
        self.change(Change::Clear(range), |it| it.zero(range))
    }

    fn set_len(&self, bytes: u64) -> Result<(), Error> {
        self.change(Change::SetLen(bytes), |it| it.set_len(bytes))
    }

    fn extents(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        self.inner.extents(range, limit, extents)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }
}
