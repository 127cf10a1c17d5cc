//! A storage whose calls pass the gate and are recorded in the journal that a test has made for its
//! file.
//!
//! Invariant: transfers that the engine submits through its own queue are not observed.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nowait::{ByteRange, Error, ExtentStatus, FileStorage, Flags, Storage, StorageProperties};

use crate::qcow2_disk::tests::gate::Gate;
use crate::qcow2_disk::tests::journal::{Event, Journal};
use crate::qcow2_disk::tests::{gate, journal};

/// A storage with its observers.
pub(crate) struct ObservedStorage {
    inner: FileStorage,
    gate: Option<Arc<Gate>>,
    /// The journal, and the number of the file in it.
    journal: Option<(Journal, usize)>,
}

/// `storage` with the gate and the journal that its file has by now.
pub(crate) fn observed(storage: FileStorage) -> ObservedStorage {
    let gate = gate::of(storage.lock_fd());
    let journal = journal::find(storage.lock_fd());
    ObservedStorage { inner: storage, gate, journal }
}

impl ObservedStorage {
    fn record<T>(&self, event: impl FnOnce(usize) -> Event, call: impl FnOnce() -> T) -> T {
        let Some((journal, file)) = &self.journal else { return call() };
        let begun = journal.push(event(*file));
        let done = call();
        journal.push(Event::Ended(begun));
        done
    }
}

impl Storage for ObservedStorage {
    fn properties(&self) -> StorageProperties {
        self.inner.properties()
    }

    fn size(&self) -> Result<u64, Error> {
        self.inner.size()
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        if let Some(gate) = &self.gate {
            gate.enter();
        }
        let done = self.inner.read(bufs, pos)?;
        if let Some(gate) = &self.gate {
            gate.passed(done as u64);
        }
        Ok(done)
    }

    fn write(&self, bufs: &[IoSlice<'_>], pos: u64, flags: Flags) -> Result<usize, Error> {
        let bytes = bufs.iter().flat_map(|buf| buf.iter().copied());
        let event = |file| Event::Write { file, pos, bytes: bytes.collect() };
        self.record(event, || self.inner.write(bufs, pos, flags))
    }

    fn sync(&self) -> Result<(), Error> {
        self.record(|file| Event::Sync { file }, || self.inner.sync())
    }

    fn punch(&self, range: ByteRange) -> Result<(), Error> {
        self.record(|file| Event::Clear { file, range }, || self.inner.punch(range))
    }

    fn zero(&self, range: ByteRange) -> Result<(), Error> {
        self.record(|file| Event::Clear { file, range }, || self.inner.zero(range))
    }

    fn set_len(&self, bytes: u64) -> Result<(), Error> {
        self.record(|file| Event::SetLen { file, bytes }, || self.inner.set_len(bytes))
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
