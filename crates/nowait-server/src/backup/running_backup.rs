//! A backup that has begun and has not ended.
//!
//! Invariant: as long as there is one, the export of the disk is served through its guard, and its bitmap stays.

use std::sync::Arc;
use std::time::SystemTime;

use nowait::{BlockDevice, BlockMap};

use crate::backup::backup_spec::BackupStatus;
use crate::backup::point_in_time::PointInTime;
use crate::dirty_bitmaps::dirty_bitmap::DirtyBitmap;
use crate::export::ExportId;

/// A backup that has begun and has not ended.
pub(crate) struct RunningBackup {
    /// The export that it makes, and its name.
    pub(crate) id: ExportId,
    pub(crate) name: String,
    pub(crate) point: Arc<PointInTime>,
    /// The disk, without copies before its writes.
    pub(crate) disk: Arc<BlockDevice<dyn BlockMap>>,
    /// The bits up to the instant.
    pub(crate) frozen: Option<Arc<DirtyBitmap>>,
    pub(crate) only_dirty: bool,
    pub(crate) since: SystemTime,
}

impl RunningBackup {
    /// The status of this backup of `export`, which is called `export_name`.
    pub(crate) fn status(&self, export: ExportId, export_name: &str) -> BackupStatus {
        let scratch = self.point.scratch();
        BackupStatus {
            export,
            export_name: export_name.to_owned(),
            backup: self.id,
            name: self.name.clone(),
            bitmap: self.frozen.as_ref().map(|bitmap| bitmap.name.to_string()),
            only_dirty: self.only_dirty,
            since: self.since,
            size: self.point.size(),
            copied_bytes: self.point.copied(),
            scratch_bytes: scratch.used(),
            max_scratch_bytes: scratch.limit(),
            failure: self.point.failure().map(str::to_owned),
        }
    }

    /// Whether the bitmap called `name` has a frozen part.
    pub(crate) fn has_frozen(&self, name: &str) -> bool {
        self.frozen.as_ref().is_some_and(|bitmap| &*bitmap.name == name)
    }
}
