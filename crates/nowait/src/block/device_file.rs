//! The storage of a device that was opened as a file.
//!
//! Invariant: the lock of the file ends with the device: a thread that reads ahead may have the storage for longer.

use std::ops::Deref;
use std::sync::Arc;

use crate::storage::file::FileStorage;

pub(super) struct DeviceFile(Arc<FileStorage>);

impl DeviceFile {
    pub(super) const fn new(storage: Arc<FileStorage>) -> Self {
        Self(storage)
    }
}

impl Deref for DeviceFile {
    type Target = FileStorage;

    #[inline]
    fn deref(&self) -> &FileStorage {
        &self.0
    }
}

impl Drop for DeviceFile {
    fn drop(&mut self) {
        self.0.end_lock();
    }
}
