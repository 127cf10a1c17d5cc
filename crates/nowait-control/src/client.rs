//! A client of a server, in every build: one without the interface has no transport to make one of.
//!
//! Invariant: names are parts of paths, which the transport escapes.

use std::io;
use std::path::Path;

use nowait_server::BackupEnd;

use crate::api::{
    AddExport, ConnectionInfo, PatchExport, SnapshotReport, SnapshotRequest, UpgradeReport,
    UpgradeRequest,
};
use crate::backup_api::{BackupInfo, EndBackup, StartBackup};
use crate::bitmap_api::{AddBitmap, BitmapInfo, MergeBitmaps, PatchBitmap};
use crate::client_error::ClientError;
use crate::counted_api::{ExportInfo, ServerInfo};
use crate::http::{ClientTransport, Proof};
use crate::move_api::{MoveInfo, ReplicationInfo, StartMove, StartReplication};
use crate::verb::Verb;

/// The body of a request without one.
const NOTHING: Option<&()> = None;

/// A client of a server's control interface. Its calls wait for the answer.
pub struct Client(ClientTransport);

impl Client {
    /// A client of the server at `socket`. Nothing is sent yet.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for it. Always, in a build without the interface.
    pub fn new(socket: &Path) -> io::Result<Self> {
        ClientTransport::new(socket).map(Self)
    }

    /// A client of the server at `port` of `host`. Nothing is sent yet.
    ///
    /// # Errors
    /// Like [`Client::new`].
    pub fn tcp(host: &str, port: u16, proof: Proof) -> io::Result<Self> {
        ClientTransport::tcp(host, port, proof).map(Self)
    }

    /// The path of the socket, or host and port.
    #[must_use]
    pub fn place(&self) -> &Path {
        self.0.place()
    }

    /// The server.
    ///
    /// # Errors
    /// Any [`ClientError`], as of all methods here.
    pub fn server(&self) -> Result<ServerInfo, ClientError> {
        self.0.ask(Verb::Get, &["server"], NOTHING)
    }

    /// Its exports, the default first.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn exports(&self) -> Result<Vec<ExportInfo>, ClientError> {
        self.0.ask(Verb::Get, &["exports"], NOTHING)
    }

    /// Its connections, the oldest first.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn connections(&self) -> Result<Vec<ConnectionInfo>, ClientError> {
        self.0.ask(Verb::Get, &["connections"], NOTHING)
    }

    /// Adds an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn add(&self, export: &AddExport) -> Result<ExportInfo, ClientError> {
        self.0.ask(Verb::Post, &["exports"], Some(export))
    }

    /// Removes the export called `name`, or number N for `@N`; with `hard` also while clients use it.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn remove(&self, name: &str, hard: bool) -> Result<(), ClientError> {
        let query = if hard { "?mode=hard" } else { "?mode=safe" };
        self.0.tell(Verb::Delete(query), &["exports", name], NOTHING)
    }

    /// Changes an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn change(&self, name: &str, change: &PatchExport) -> Result<ExportInfo, ClientError> {
        self.0.ask(Verb::Patch, &["exports", name], Some(change))
    }

    /// Makes the completed writes of an export durable.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn flush(&self, name: &str) -> Result<(), ClientError> {
        self.0.tell(Verb::Post, &["exports", name, "flush"], NOTHING)
    }

    /// Makes an overlay for what is written to an export from then on.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn snapshot(
        &self,
        name: &str,
        snapshot: &SnapshotRequest,
    ) -> Result<SnapshotReport, ClientError> {
        self.0.ask(Verb::Post, &["exports", name, "snapshot"], Some(snapshot))
    }

    /// The dirty bitmaps of an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn bitmaps(&self, name: &str) -> Result<Vec<BitmapInfo>, ClientError> {
        self.0.ask(Verb::Get, &["exports", name, "bitmaps"], NOTHING)
    }

    /// Adds a bitmap to an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn add_bitmap(&self, name: &str, bitmap: &AddBitmap) -> Result<BitmapInfo, ClientError> {
        self.0.ask(Verb::Post, &["exports", name, "bitmaps"], Some(bitmap))
    }

    /// Removes a bitmap of an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn remove_bitmap(&self, name: &str, bitmap: &str) -> Result<(), ClientError> {
        self.0.tell(Verb::Delete(""), &["exports", name, "bitmaps", bitmap], NOTHING)
    }

    /// Marks all of a bitmap of an export as clean.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn clear_bitmap(&self, name: &str, bitmap: &str) -> Result<(), ClientError> {
        self.0.tell(Verb::Post, &["exports", name, "bitmaps", bitmap, "clear"], NOTHING)
    }

    /// Changes a bitmap of an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn change_bitmap(
        &self,
        name: &str,
        bitmap: &str,
        change: &PatchBitmap,
    ) -> Result<BitmapInfo, ClientError> {
        self.0.ask(Verb::Patch, &["exports", name, "bitmaps", bitmap], Some(change))
    }

    /// Merges bitmaps of an export into one of them.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn merge_bitmaps(
        &self,
        name: &str,
        bitmap: &str,
        merge: &MergeBitmaps,
    ) -> Result<BitmapInfo, ClientError> {
        self.0.ask(Verb::Post, &["exports", name, "bitmaps", bitmap, "merge"], Some(merge))
    }

    /// Begins to move the disk of an export to another place.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn start_move(&self, name: &str, start: &StartMove) -> Result<MoveInfo, ClientError> {
        self.0.ask(Verb::Post, &["exports", name, "move"], Some(start))
    }

    /// The move of the disk of an export, or the last one that has ended.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn disk_move(&self, name: &str) -> Result<MoveInfo, ClientError> {
        self.0.ask(Verb::Get, &["exports", name, "move"], NOTHING)
    }

    /// Ends the move of the disk of an export, which stays where it is.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn cancel_move(&self, name: &str) -> Result<MoveInfo, ClientError> {
        self.0.ask(Verb::Delete(""), &["exports", name, "move"], NOTHING)
    }

    /// Begins to replicate the disk of an export to an export of another server.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn start_replication(
        &self,
        name: &str,
        start: &StartReplication,
    ) -> Result<ReplicationInfo, ClientError> {
        self.0.ask(Verb::Post, &["exports", name, "replicate"], Some(start))
    }

    /// The replication of the disk of an export, or the last one that has ended.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn replication(&self, name: &str) -> Result<ReplicationInfo, ClientError> {
        self.0.ask(Verb::Get, &["exports", name, "replicate"], NOTHING)
    }

    /// Ends the replication of the disk of an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn stop_replication(&self, name: &str) -> Result<ReplicationInfo, ClientError> {
        self.0.ask(Verb::Delete(""), &["exports", name, "replicate"], NOTHING)
    }

    /// Begins backups of an export and of those with it.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn start_backup(
        &self,
        name: &str,
        backup: &StartBackup,
    ) -> Result<Vec<BackupInfo>, ClientError> {
        self.0.ask(Verb::Post, &["exports", name, "backup"], Some(backup))
    }

    /// Ends the backups of an export and of those with it.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn end_backup(
        &self,
        name: &str,
        others: &EndBackup,
        end: BackupEnd,
    ) -> Result<(), ClientError> {
        let word = if end == BackupEnd::Commit { "commit" } else { "abort" };
        self.0.tell(Verb::Post, &["exports", name, "backup", word], Some(others))
    }

    /// Closes a connection.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn disconnect(&self, id: u64) -> Result<(), ClientError> {
        self.0.tell(Verb::Delete(""), &["connections", &id.to_string()], NOTHING)
    }

    /// Has a new program take over.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub fn upgrade(&self, upgrade: &UpgradeRequest) -> Result<UpgradeReport, ClientError> {
        self.0.ask(Verb::Post, &["upgrade"], Some(upgrade))
    }
}
