//! The images of a running server.
//!
//! Invariant: an image is open as long as its export may have requests.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nowait_control::PatchExport;
use nowait_server::{ExportError, ExportId, Exports, UblkDevice};

use crate::disks::open_disk::OpenedDisk;

/// An open image and where its export can be reached.
pub(crate) struct ServedDisk {
    pub(crate) id: ExportId,
    pub(crate) disk: OpenedDisk,
    pub(crate) places: Vec<String>,
    /// The local block device that it was made at the start of the server.
    pub(crate) local: Option<Arc<UblkDevice>>,
}

impl ServedDisk {
    /// Its local block device, unless another process has removed that.
    pub(crate) fn node(&self) -> Option<&UblkDevice> {
        self.local.as_deref().filter(|device| device.has_node())
    }
}

/// Makes those changes of export `id` for which no image is opened: its limits, its weight, and whether
/// changes are refused.
///
/// # Errors
/// There is no such export; its image was opened for reading only; a limit is not valid.
pub(crate) fn change_settings(
    exports: &Exports,
    id: ExportId,
    change: &PatchExport,
) -> Result<(), ExportError> {
    if let Some(limits) = change.limits {
        exports.set_limits(id, limits.into())?;
    }
    if let Some(limits) = change.connection_limits {
        exports.set_client_limits(id, limits.into())?;
    }
    if let Some(weight) = change.weight {
        exports.set_weight(id, weight)?;
    }
    change.read_only.map_or(Ok(()), |read_only| exports.set_read_only(id, read_only))
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
