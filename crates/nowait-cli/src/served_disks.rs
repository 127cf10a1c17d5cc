//! The images of a running server.
//!
//! Invariant: an image is open as long as its export may have requests.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nowait_server::ExportId;

use crate::open_disk::OpenedDisk;

/// An open image and where its export can be reached.
pub(crate) struct ServedDisk {
    pub(crate) id: ExportId,
    pub(crate) disk: OpenedDisk,
    pub(crate) places: Vec<String>,
}

/// The images of a server; clones share them.
#[derive(Clone, Default)]
pub(crate) struct ServedDisks(Arc<Mutex<Vec<ServedDisk>>>);

impl ServedDisks {
    /// The images of `all`.
    pub(crate) fn new(all: Vec<ServedDisk>) -> Self {
        Self(Arc::new(Mutex::new(all)))
    }

    /// Takes all images, to be closed.
    pub(crate) fn take(&self) -> Vec<OpenedDisk> {
        self.lock().drain(..).map(|served| served.disk).collect()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<ServedDisk>> {
        // No critical section here can panic half-way through a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
