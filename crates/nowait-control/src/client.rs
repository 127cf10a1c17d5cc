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
use crate::verb::Verb::{Delete, Get, Patch, Post};

/// The body of a request without one.
const NOTHING: Option<&()> = None;

/// Methods that send a request with a verb, a path and perhaps a body, and return what is answered.
macro_rules! requests {
    ($($(#[$about:meta])* $name:ident($($argument:ident: $of:ty),*) -> $answer:ty =
        $verb:expr, $path:expr, $body:expr;)*) => {
        $(
            $(#[$about])*
            ///
            /// # Errors
            /// Like [`Client::server`].
            pub fn $name(&self, $($argument: $of),*) -> Result<$answer, ClientError> {
                self.0.ask($verb, &$path, $body)
            }
        )*
    };
}

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
        self.0.ask(Get, &["server"], NOTHING)
    }

    requests! {
        /// Its exports, the default first.
        exports() -> Vec<ExportInfo> = Get, ["exports"], NOTHING;
        /// Its connections, the oldest first.
        connections() -> Vec<ConnectionInfo> = Get, ["connections"], NOTHING;
        /// Adds an export.
        add(export: &AddExport) -> ExportInfo = Post, ["exports"], Some(export);
        /// Removes the export called `name`, or number N for `@N`; with `hard` also while clients use it.
        remove(name: &str, hard: bool) -> () =
            Delete(if hard { "?mode=hard" } else { "?mode=safe" }), ["exports", name], NOTHING;
        /// Changes an export.
        change(name: &str, change: &PatchExport) -> ExportInfo = Patch, ["exports", name], Some(change);
        /// Makes the completed writes of an export durable.
        flush(name: &str) -> () = Post, ["exports", name, "flush"], NOTHING;
        /// Makes an overlay for what is written to an export from then on.
        snapshot(name: &str, snapshot: &SnapshotRequest) -> SnapshotReport =
            Post, ["exports", name, "snapshot"], Some(snapshot);
        /// The dirty bitmaps of an export.
        bitmaps(name: &str) -> Vec<BitmapInfo> = Get, ["exports", name, "bitmaps"], NOTHING;
        /// Adds a bitmap to an export.
        add_bitmap(name: &str, bitmap: &AddBitmap) -> BitmapInfo =
            Post, ["exports", name, "bitmaps"], Some(bitmap);
        /// Removes a bitmap of an export.
        remove_bitmap(name: &str, bitmap: &str) -> () =
            Delete(""), ["exports", name, "bitmaps", bitmap], NOTHING;
        /// Marks all of a bitmap of an export as clean.
        clear_bitmap(name: &str, bitmap: &str) -> () =
            Post, ["exports", name, "bitmaps", bitmap, "clear"], NOTHING;
        /// Changes a bitmap of an export.
        change_bitmap(name: &str, bitmap: &str, change: &PatchBitmap) -> BitmapInfo =
            Patch, ["exports", name, "bitmaps", bitmap], Some(change);
        /// Merges bitmaps of an export into one of them.
        merge_bitmaps(name: &str, bitmap: &str, merge: &MergeBitmaps) -> BitmapInfo =
            Post, ["exports", name, "bitmaps", bitmap, "merge"], Some(merge);
        /// Begins to move the disk of an export to another place.
        start_move(name: &str, start: &StartMove) -> MoveInfo =
            Post, ["exports", name, "move"], Some(start);
        /// The move of the disk of an export, or the last one that has ended.
        disk_move(name: &str) -> MoveInfo = Get, ["exports", name, "move"], NOTHING;
        /// Ends the move of the disk of an export, which stays where it is.
        cancel_move(name: &str) -> MoveInfo = Delete(""), ["exports", name, "move"], NOTHING;
        /// Begins to replicate the disk of an export to an export of another server.
        start_replication(name: &str, start: &StartReplication) -> ReplicationInfo =
            Post, ["exports", name, "replicate"], Some(start);
        /// The replication of the disk of an export, or the last one that has ended.
        replication(name: &str) -> ReplicationInfo = Get, ["exports", name, "replicate"], NOTHING;
        /// Ends the replication of the disk of an export.
        stop_replication(name: &str) -> ReplicationInfo =
            Delete(""), ["exports", name, "replicate"], NOTHING;
        /// Begins backups of an export and of those with it.
        start_backup(name: &str, backup: &StartBackup) -> Vec<BackupInfo> =
            Post, ["exports", name, "backup"], Some(backup);
        /// Ends the backups of an export and of those with it.
        end_backup(name: &str, others: &EndBackup, end: BackupEnd) -> () =
            Post, ["exports", name, "backup", word_of(end)], Some(others);
        /// Closes a connection.
        disconnect(id: u64) -> () = Delete(""), ["connections", &id.to_string()], NOTHING;
        /// Has a new program take over.
        upgrade(upgrade: &UpgradeRequest) -> UpgradeReport = Post, ["upgrade"], Some(upgrade);
    }
}

/// The last part of the path for the end of a backup.
const fn word_of(end: BackupEnd) -> &'static str {
    match end {
        BackupEnd::Commit => "commit",
        BackupEnd::Abort => "abort",
    }
}
