//! A server without disks, which notes what the control interface asks it to do.
//!
//! Invariant: a note is the name of the method and its arguments, in the JSON of the interface.

use std::sync::{Mutex, PoisonError};

use nowait_control::{
    AddBitmap, AddExport, BackupInfo, BitmapInfo, ConnectionInfo, ControlError, ControlledServer,
    ExportInfo, MergeBitmaps, MoveInfo, PatchBitmap, PatchExport, ReplicationInfo, ServerInfo,
    SnapshotReport, SnapshotRequest, StartBackup, StartMove, StartReplication, UpgradeReport,
    UpgradeRequest,
};
use nowait_server::BackupEnd;
use serde_json::{Value, json};

/// The server. It has one export, number 3, and one connection.
#[derive(Default)]
pub struct RecordingServer {
    refused: &'static [&'static str],
    notes: Mutex<Vec<String>>,
}

impl RecordingServer {
    /// A server that refuses these methods, with the reason `no`.
    pub fn refusing(refused: &'static [&'static str]) -> Self {
        Self { refused, notes: Mutex::default() }
    }

    /// The only export.
    pub fn only_export() -> ExportInfo {
        let (backup, moving) = (Some(BackupInfo::default()), Some(MoveInfo::default()));
        let (id, name, replication) = (3, "a/b c".into(), Some(ReplicationInfo::default()));
        ExportInfo { id, name, backup, moving, replication, ..ExportInfo::default() }
    }

    /// Takes the notes so far.
    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut *self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note<T: Default>(&self, method: &str, arguments: &[Value]) -> Result<T, ControlError> {
        let words = arguments.iter().map(|argument| format!(" {argument}"));
        let note = std::iter::once(method.to_owned()).chain(words).collect();
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).push(note);
        match self.refused.contains(&method) {
            true => Err(ControlError::Conflict("no".into())),
            false => Ok(T::default()),
        }
    }
}

/// Methods that note what they are called with.
macro_rules! noted {
    ($($method:ident($($argument:ident: $kind:ty),*) -> $answer:ty;)*) => {
        $(fn $method(&self, $($argument: $kind),*) -> Result<$answer, ControlError> {
            self.note(stringify!($method), &[$(json!($argument)),*])
        })*
    };
}

impl ControlledServer for RecordingServer {
    fn info(&self) -> ServerInfo {
        ServerInfo::default()
    }

    fn exports(&self) -> Vec<ExportInfo> {
        vec![Self::only_export()]
    }

    fn find(&self, name: &str) -> Option<u64> {
        (name == Self::only_export().name).then_some(3)
    }

    fn export(&self, id: u64) -> Result<ExportInfo, ControlError> {
        match id {
            3 => Ok(Self::only_export()),
            _ => Err(ControlError::NotFound("there is no such export".into())),
        }
    }

    fn connections(&self) -> Vec<ConnectionInfo> {
        vec![ConnectionInfo::default()]
    }

    fn end_backup(&self, ids: &[u64], end: BackupEnd) -> Result<(), ControlError> {
        self.note("end_backup", &[json!(ids), json!(format!("{end:?}"))])
    }

    noted! {
        add(export: AddExport) -> ExportInfo;
        remove(id: u64, hard: bool) -> ();
        change(id: u64, change: PatchExport) -> ExportInfo;
        flush(id: u64) -> ();
        snapshot(id: u64, snapshot: SnapshotRequest) -> SnapshotReport;
        bitmaps(id: u64) -> Vec<BitmapInfo>;
        add_bitmap(id: u64, bitmap: AddBitmap) -> BitmapInfo;
        remove_bitmap(id: u64, name: &str) -> ();
        clear_bitmap(id: u64, name: &str) -> ();
        change_bitmap(id: u64, name: &str, change: PatchBitmap) -> BitmapInfo;
        merge_bitmaps(id: u64, name: &str, merge: MergeBitmaps) -> BitmapInfo;
        start_backup(ids: &[u64], backup: StartBackup) -> Vec<BackupInfo>;
        start_move(id: u64, start: StartMove) -> MoveInfo;
        disk_move(id: u64) -> MoveInfo;
        cancel_move(id: u64) -> MoveInfo;
        start_replication(id: u64, start: StartReplication) -> ReplicationInfo;
        replication(id: u64) -> ReplicationInfo;
        stop_replication(id: u64) -> ReplicationInfo;
        disconnect(id: u64) -> ();
        upgrade(upgrade: UpgradeRequest) -> UpgradeReport;
    }
}
