//! A round of a replication whose bits are stored, so that the next server goes on with them.
//!
//! Invariant: the bits of a round are forgotten only when its bytes are durable on the target; a target that is found to be another one
//! gets all of the disk.

use std::time::SystemTime;

use nowait_image::Image;
use nowait_server::{BackupEnd, ExportId, FrozenChanges};
use tracing::info;

use crate::error::plain;
use crate::moves::Task;
use crate::moves::replica_thread::{DRAIN_TIMEOUT, ReplicaThread, Rounds};
use crate::moves::target_comparison::TargetComparison;

impl ReplicaThread {
    /// Brings the target, `image`, to an instant, which is returned, by what is dirty in the stored bitmap `name`.
    pub(super) fn resumed_round(
        &self,
        rounds: &mut Rounds,
        image: &Image,
        name: &str,
    ) -> Result<SystemTime, String> {
        if rounds.is_other_target {
            // Durably, before any of it is copied: part of a copy may look like all of it.
            let set = self.exports.set_bitmap(self.id, name);
            set.map_err(|error| error.to_string())?;
            let stored = self.exports.store_bitmaps(self.id, DRAIN_TIMEOUT);
            stored.map_err(|error| error.to_string())?;
            rounds.is_other_target = false;
        }
        let instant = SystemTime::now();
        if rounds.is_compared && self.dirty_bytes(name) == Some(0) {
            return Ok(instant);
        }
        let backup = self.begin_backup(Some(name.to_owned()))?;
        self.replica.begin_copying();
        let copied = self.copy_frozen(rounds, image, backup);
        let end = if copied.is_ok() { BackupEnd::Commit } else { BackupEnd::Abort };
        let closed = self.exports.end_backups(&[self.id], end, DRAIN_TIMEOUT);
        match (copied, closed) {
            (Ok(()), Ok(())) => Ok(instant),
            (copied, Err(error)) => {
                let why = copied.err().unwrap_or_else(|| error.why.to_string());
                let _ = self.exports.end_backups(&[self.id], BackupEnd::Abort, DRAIN_TIMEOUT);
                Err(why)
            }
            (Err(why), Ok(())) => Err(why),
        }
    }

    /// Bytes of the disk that are dirty in bitmap `name`.
    pub(super) fn dirty_bytes(&self, name: &str) -> Option<u64> {
        let all = self.exports.bitmaps(self.id).ok()?;
        all.iter().find(|it| it.spec.name == name).map(|it| it.dirty_bytes)
    }

    fn copy_frozen(
        &self,
        rounds: &mut Rounds,
        image: &Image,
        backup: ExportId,
    ) -> Result<(), String> {
        let gone = || "its backup is gone".to_owned();
        let changes = self.exports.frozen_changes(backup).ok_or_else(gone)?;
        if !rounds.is_compared {
            let found = self.compare(image, backup, &changes)?;
            rounds.is_other_target = found.is_some();
            if let Some(at) = found {
                let target = self.replica.target();
                return Err(format!(
                    "{target}: it is not the copy of this disk that it was, at byte {at}: all is copied next"
                ));
            }
        }
        let changed = changes.changed_bytes();
        let copied = if changed >= self.size {
            self.copy(image, backup, None::<(&FrozenChanges, fn(u64) -> u64)>)
        } else {
            self.copy(image, backup, Some((&changes, |done| changed.saturating_sub(done))))
        };
        copied.map_err(|error| error.to_string())
    }

    /// Compares some places of the target with the disk at its instant. Returns a byte that differs, if one was found.
    fn compare(
        &self,
        image: &Image,
        backup: ExportId,
        changes: &FrozenChanges,
    ) -> Result<Option<u64>, String> {
        let device = self.exports.device(backup).ok_or("its backup is gone")?;
        let comparison = TargetComparison::new(device, image.device(), changes);
        let found = comparison.find_difference(&|| self.replica.state.is_cancelled());
        let target = self.replica.target();
        let found = found.map_err(|error| format!("{target}: cannot compare it: {error}"))?;
        if found.is_none() {
            let (source, left) = (plain(&self.source), changes.changed_bytes());
            info!("{source}: its copy {} has all but {left} bytes", plain(&target));
        }
        Ok(found)
    }
}
