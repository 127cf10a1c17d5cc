//! The server as the control interface sees it.
//!
//! Invariant: the interface changes nothing but by these methods, which may block.

use std::fmt;

use nowait_server::{BackupEnd, ExportError};

use crate::api::{
    AddExport, ConnectionInfo, PatchExport, SnapshotReport, SnapshotRequest, UpgradeReport,
    UpgradeRequest,
};
use crate::backup_api::{BackupInfo, StartBackup};
use crate::bitmap_api::{AddBitmap, BitmapInfo, MergeBitmaps, PatchBitmap};
use crate::counted_api::{ExportInfo, ServerInfo};
use crate::move_api::{MoveInfo, ReplicationInfo, StartMove, StartReplication};

/// A server that can be asked and changed. Methods may be called by several threads simultaneously.
pub trait ControlledServer: Send + Sync + 'static {
    /// The server itself.
    fn info(&self) -> ServerInfo;

    /// The exports that clients can choose, the default first.
    fn exports(&self) -> Vec<ExportInfo>;

    /// The number of the export that clients choose by `name`.
    fn find(&self, name: &str) -> Option<u64>;

    /// Export `id` alone.
    ///
    /// # Errors
    /// There is no such export.
    fn export(&self, id: u64) -> Result<ExportInfo, ControlError>;

    /// The connections of clients, the oldest first.
    fn connections(&self) -> Vec<ConnectionInfo>;

    /// Opens an image and adds it as an export.
    ///
    /// # Errors
    /// The image is outside the allowed directories or cannot be opened; the name is taken.
    fn add(&self, export: AddExport) -> Result<ExportInfo, ControlError>;

    /// Removes export `id`: no further client can choose it. With `hard` its clients are
    /// disconnected; without, an export with clients is refused.
    ///
    /// # Errors
    /// There is no such export, it is the default one, or clients use it.
    fn remove(&self, id: u64, hard: bool) -> Result<(), ControlError>;

    /// Changes export `id`.
    ///
    /// # Errors
    /// There is no such export, or the change is not possible.
    fn change(&self, id: u64, change: PatchExport) -> Result<ExportInfo, ControlError>;

    /// Makes the completed writes of export `id` durable.
    ///
    /// # Errors
    /// There is no such export, or a flush has failed.
    fn flush(&self, id: u64) -> Result<(), ControlError>;

    /// Makes an overlay, which has what is written to export `id` from then on; its image is
    /// unchanged.
    ///
    /// # Errors
    /// There is no such export, or it is not possible: then it goes on as it was, without an overlay.
    fn snapshot(&self, id: u64, snapshot: SnapshotRequest) -> Result<SnapshotReport, ControlError>;

    /// The dirty bitmaps of export `id`, in the order of their addition.
    ///
    /// # Errors
    /// There is no such export.
    fn bitmaps(&self, id: u64) -> Result<Vec<BitmapInfo>, ControlError>;

    /// Adds a bitmap to export `id`.
    ///
    /// # Errors
    /// There is no such export, or the bitmap cannot be.
    fn add_bitmap(&self, id: u64, bitmap: AddBitmap) -> Result<BitmapInfo, ControlError>;

    /// Removes bitmap `name` of export `id`.
    ///
    /// # Errors
    /// There is no such export or bitmap.
    fn remove_bitmap(&self, id: u64, name: &str) -> Result<(), ControlError>;

    /// Marks all of bitmap `name` of export `id` as clean.
    ///
    /// # Errors
    /// There is no such export or bitmap.
    fn clear_bitmap(&self, id: u64, name: &str) -> Result<(), ControlError>;

    /// Changes bitmap `name` of export `id`.
    ///
    /// # Errors
    /// There is no such export or bitmap.
    fn change_bitmap(
        &self,
        id: u64,
        name: &str,
        change: PatchBitmap,
    ) -> Result<BitmapInfo, ControlError>;

    /// Merges bitmaps of export `id` into its bitmap `name`.
    ///
    /// # Errors
    /// There is no such export, or not all of the bitmaps: then nothing was merged.
    fn merge_bitmaps(
        &self,
        id: u64,
        name: &str,
        merge: MergeBitmaps,
    ) -> Result<BitmapInfo, ControlError>;

    /// Begins backups of exports `ids`, whose disks have one instant.
    ///
    /// # Errors
    /// Why one of them cannot begin: then none has.
    fn start_backup(
        &self,
        ids: &[u64],
        backup: StartBackup,
    ) -> Result<Vec<BackupInfo>, ControlError>;

    /// Ends the backups of exports `ids`.
    ///
    /// # Errors
    /// Why one of them cannot end: then none has.
    fn end_backup(&self, ids: &[u64], end: BackupEnd) -> Result<(), ControlError>;

    /// Begins to move the disk of export `id` to another place. Returns what the move is when it has begun.
    ///
    /// # Errors
    /// Why it cannot begin: then nothing has changed.
    fn start_move(&self, id: u64, start: StartMove) -> Result<MoveInfo, ControlError>;

    /// The move of the disk of export `id`, or the last one that has ended.
    ///
    /// # Errors
    /// There is no such export, or its disk was not moved.
    fn disk_move(&self, id: u64) -> Result<MoveInfo, ControlError>;

    /// Ends the move of the disk of export `id`, which stays where it is.
    ///
    /// # Errors
    /// There is no such export, or its disk is not being moved.
    fn cancel_move(&self, id: u64) -> Result<MoveInfo, ControlError>;

    /// Begins to replicate the disk of export `id` to an export of another server, again and again.
    ///
    /// # Errors
    /// Why it cannot begin: then nothing has changed.
    fn start_replication(
        &self,
        id: u64,
        start: StartReplication,
    ) -> Result<ReplicationInfo, ControlError>;

    /// The replication of the disk of export `id`, or the last one that has ended.
    ///
    /// # Errors
    /// There is no such export, or its disk was not replicated.
    fn replication(&self, id: u64) -> Result<ReplicationInfo, ControlError>;

    /// Ends the replication of the disk of export `id`.
    ///
    /// # Errors
    /// There is no such export, or its disk is not being replicated.
    fn stop_replication(&self, id: u64) -> Result<ReplicationInfo, ControlError>;

    /// Closes a connection.
    ///
    /// # Errors
    /// There is no such connection.
    fn disconnect(&self, id: u64) -> Result<(), ControlError>;

    /// Hands everything over to a new program, which serves from then on. This one ends when the
    /// answer has been sent.
    ///
    /// # Errors
    /// The new program cannot be started or is not ready in time: then this one goes on.
    fn upgrade(&self, upgrade: UpgradeRequest) -> Result<UpgradeReport, ControlError>;
}

/// Why a request is refused, in one line, and as what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlError {
    /// It cannot be understood (HTTP status 400).
    Invalid(String),
    /// It is not allowed (403).
    Forbidden(String),
    /// There is no such thing (404).
    NotFound(String),
    /// It is not possible now (409).
    Conflict(String),
    /// The system or the storage has failed (500).
    Failed(String),
    /// Another process serves since an upgrade (503).
    Unavailable(String),
}

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Invalid(why)
        | Self::Forbidden(why)
        | Self::NotFound(why)
        | Self::Conflict(why)
        | Self::Unavailable(why)
        | Self::Failed(why)) = self;
        f.write_str(why)
    }
}

impl std::error::Error for ControlError {}

/// The answer to each refusal of a change of the exports.
impl From<ExportError> for ControlError {
    fn from(error: ExportError) -> Self {
        let why = error.to_string();
        match error {
            ExportError::NotFound => Self::NotFound(why),
            ExportError::InvalidLimits | ExportError::InvalidWeight => Self::Invalid(why),
            ExportError::HasClients { .. } => {
                Self::Conflict(format!("{why} (mode=hard disconnects them)"))
            }
            ExportError::HasNode { id, .. } => {
                Self::Conflict(format!("{why} ('nowait ublk stop {id}' removes that)"))
            }
            ExportError::NameTaken
            | ExportError::IsDefault
            | ExportError::ClientsLeft
            | ExportError::ReadOnly
            | ExportError::FixedSize
            | ExportError::OtherName
            | ExportError::DoesNotEnd
            | ExportError::AlreadyPaused
            | ExportError::CannotKeepBack
            | ExportError::HasBackup { .. }
            | ExportError::IsBackup { .. }
            | ExportError::Stopping => Self::Conflict(why),
            ExportError::System(_) | ExportError::Storage(_) => Self::Failed(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Status = fn(String) -> ControlError;

    #[test]
    fn each_refusal_has_a_status_and_one_line_that_says_why() {
        let nospace = nowait::Error::new(28, nowait::Operation::Write);
        let node = || ExportError::HasNode { node: "/dev/ublkb3".into(), id: 3 };
        let (invalid, missing) =
            (ControlError::Invalid as Status, ControlError::NotFound as Status);
        let (conflict, failed) = (ControlError::Conflict as Status, ControlError::Failed as Status);
        let full = "write failed: No space left on device (os error 28)";
        let all: [(ExportError, Status, &str); 20] = [
            (ExportError::NotFound, missing, "there is no such export"),
            (ExportError::NameTaken, conflict, "there is an export of that name"),
            (ExportError::IsDefault, conflict, "the default export cannot be removed"),
            (node(), conflict, "it is /dev/ublkb3 ('nowait ublk stop 3' removes that)"),
            (
                ExportError::HasClients { count: 1 },
                conflict,
                "1 client uses it (mode=hard disconnects them)",
            ),
            (
                ExportError::HasClients { count: 2 },
                conflict,
                "2 clients use it (mode=hard disconnects them)",
            ),
            (ExportError::ClientsLeft, conflict, "clients are left; it ends with the last one"),
            (
                ExportError::InvalidLimits,
                invalid,
                "a limit has a size of at least 1 and a refill_time of 1 to 86400000",
            ),
            (ExportError::InvalidWeight, invalid, "a weight is 1 to 10000"),
            (ExportError::ReadOnly, conflict, "its image was opened for reading only"),
            (ExportError::FixedSize, conflict, "a block device gets another size elsewhere"),
            (ExportError::OtherName, conflict, "the export in its place has another name"),
            (ExportError::DoesNotEnd, conflict, "requests in flight do not end"),
            (ExportError::AlreadyPaused, conflict, "it is paused already"),
            (
                ExportError::CannotKeepBack,
                conflict,
                "the ublk driver of this kernel cannot keep requests back (Linux 6.16 can)",
            ),
            (ExportError::Stopping, conflict, "the server is stopping"),
            (
                ExportError::HasBackup { backup: "a.backup".into() },
                conflict,
                "it has a backup, \"a.backup\": commit or abort that first",
            ),
            (
                ExportError::IsBackup { of: "a".into() },
                conflict,
                "it is the backup of \"a\": commit or abort that",
            ),
            (ExportError::System(nospace), failed, full),
            (ExportError::Storage(nospace), failed, full),
        ];
        for (error, status, why) in all {
            assert_eq!(ControlError::from(error), status(why.into()));
        }
    }
}
