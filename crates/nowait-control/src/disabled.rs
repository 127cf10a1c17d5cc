//! The control interface in a build without it.
//!
//! Invariant: no server, client or token has a value, so nothing is sent or answered.

use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use nowait_server::{BackupEnd, Credentials};

use crate::api::{
    AddExport, ConnectionInfo, PatchExport, SnapshotReport, SnapshotRequest, UpgradeReport,
    UpgradeRequest,
};
use crate::backup_api::{BackupInfo, EndBackup, StartBackup};
use crate::bitmap_api::{AddBitmap, BitmapInfo, MergeBitmaps, PatchBitmap};
use crate::client_error::ClientError;
use crate::controlled_server::ControlledServer;
use crate::counted_api::{ExportInfo, ServerInfo};
use crate::move_api::{MoveInfo, ReplicationInfo, StartMove, StartReplication};

const REFUSAL: &str =
    "this nowait was built without the control interface (it is the cargo feature \"control\")";

/// The reason why this build has no control interface.
pub const DISABLED: Option<&str> = Some(REFUSAL);

/// The secret of a client on the loopback network.
#[derive(Clone, Debug)]
pub struct Token(Infallible);

impl Token {
    /// Takes no token.
    ///
    /// # Errors
    /// Always.
    pub fn parse(_: &str) -> Result<Self, String> {
        Err(REFUSAL.into())
    }
}

/// How a client on TCP shows that it may.
#[derive(Clone)]
pub enum Proof {
    /// By a token.
    Token(Token),
    /// By a certificate.
    Certificate(nowait_nbd::client::Credentials),
}

/// A socket of the interface.
pub enum HttpListener {
    /// A Unix socket.
    Unix(UnixListener),
    /// A TCP socket for clients with the token.
    Token(TcpListener, Token),
    /// A TCP socket for clients with a certificate.
    Certificate(TcpListener, Credentials),
}

/// The running control interface of a server.
pub struct HttpServer(Infallible);

impl HttpServer {
    /// Starts none.
    ///
    /// # Errors
    /// Always: [`DISABLED`].
    pub fn start(_: Vec<HttpListener>, _: Arc<dyn ControlledServer>) -> io::Result<Self> {
        Err(io::Error::other(REFUSAL))
    }

    /// Accepts no more connections.
    pub const fn finish(self) {
        match self.0 {}
    }
}

/// A server's control socket.
pub struct Client(Infallible);

impl Client {
    /// Makes no client.
    ///
    /// # Errors
    /// Always: [`DISABLED`].
    pub fn new(_: &Path) -> io::Result<Self> {
        Err(io::Error::other(REFUSAL))
    }

    /// Like [`Client::new`].
    ///
    /// # Errors
    /// Always: [`DISABLED`].
    pub fn tcp(_: &str, _: u16, _: Proof) -> io::Result<Self> {
        Err(io::Error::other(REFUSAL))
    }

    /// The path of the socket, or host and port.
    #[must_use]
    pub const fn place(&self) -> &Path {
        match self.0 {}
    }

    /// The server.
    ///
    /// # Errors
    /// Never, like all methods here: a client does not exist.
    pub const fn server(&self) -> Result<ServerInfo, ClientError> {
        match self.0 {}
    }

    /// Its exports.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn exports(&self) -> Result<Vec<ExportInfo>, ClientError> {
        match self.0 {}
    }

    /// Its connections.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn connections(&self) -> Result<Vec<ConnectionInfo>, ClientError> {
        match self.0 {}
    }

    /// Adds an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn add(&self, _: &AddExport) -> Result<ExportInfo, ClientError> {
        match self.0 {}
    }

    /// Removes an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn remove(&self, _: &str, _: bool) -> Result<(), ClientError> {
        match self.0 {}
    }

    /// Changes an export.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn change(&self, _: &str, _: &PatchExport) -> Result<ExportInfo, ClientError> {
        match self.0 {}
    }

    /// Makes the completed writes of an export durable.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn flush(&self, _: &str) -> Result<(), ClientError> {
        match self.0 {}
    }

    /// Makes an overlay for what is written to an export from then on.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn snapshot(
        &self,
        _: &str,
        _: &SnapshotRequest,
    ) -> Result<SnapshotReport, ClientError> {
        match self.0 {}
    }

    /// The dirty bitmaps of an export.
    ///
    /// # Errors
    /// Never, as [`Client::server`].
    pub const fn bitmaps(&self, _: &str) -> Result<Vec<BitmapInfo>, ClientError> {
        match self.0 {}
    }

    /// Adds a bitmap.
    ///
    /// # Errors
    /// Never, as [`Client::server`].
    pub const fn add_bitmap(&self, _: &str, _: &AddBitmap) -> Result<BitmapInfo, ClientError> {
        match self.0 {}
    }

    /// Removes a bitmap.
    ///
    /// # Errors
    /// Never, as [`Client::server`].
    pub const fn remove_bitmap(&self, _: &str, _: &str) -> Result<(), ClientError> {
        match self.0 {}
    }

    /// Clears a bitmap.
    ///
    /// # Errors
    /// Never, as [`Client::server`].
    pub const fn clear_bitmap(&self, _: &str, _: &str) -> Result<(), ClientError> {
        match self.0 {}
    }

    /// Changes a bitmap.
    ///
    /// # Errors
    /// Never, as [`Client::server`].
    pub const fn change_bitmap(
        &self,
        _: &str,
        _: &str,
        _: &PatchBitmap,
    ) -> Result<BitmapInfo, ClientError> {
        match self.0 {}
    }

    /// Merges bitmaps.
    ///
    /// # Errors
    /// Never, as [`Client::server`].
    pub const fn merge_bitmaps(
        &self,
        _: &str,
        _: &str,
        _: &MergeBitmaps,
    ) -> Result<BitmapInfo, ClientError> {
        match self.0 {}
    }

    /// Begins to move a disk.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn start_move(&self, _: &str, _: &StartMove) -> Result<MoveInfo, ClientError> {
        match self.0 {}
    }

    /// The move of a disk.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn disk_move(&self, _: &str) -> Result<MoveInfo, ClientError> {
        match self.0 {}
    }

    /// Ends the move of a disk.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn cancel_move(&self, _: &str) -> Result<MoveInfo, ClientError> {
        match self.0 {}
    }

    /// Begins to replicate a disk.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn start_replication(
        &self,
        _: &str,
        _: &StartReplication,
    ) -> Result<ReplicationInfo, ClientError> {
        match self.0 {}
    }

    /// The replication of a disk.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn replication(&self, _: &str) -> Result<ReplicationInfo, ClientError> {
        match self.0 {}
    }

    /// Ends the replication of a disk.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn stop_replication(&self, _: &str) -> Result<ReplicationInfo, ClientError> {
        match self.0 {}
    }

    /// Begins backups.
    ///
    /// # Errors
    /// Never, as [`Client::server`].
    pub const fn start_backup(
        &self,
        _: &str,
        _: &StartBackup,
    ) -> Result<Vec<BackupInfo>, ClientError> {
        match self.0 {}
    }

    /// Ends backups.
    ///
    /// # Errors
    /// Never, as [`Client::server`].
    pub const fn end_backup(
        &self,
        _: &str,
        _: &EndBackup,
        _: BackupEnd,
    ) -> Result<(), ClientError> {
        match self.0 {}
    }

    /// Closes a connection.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn disconnect(&self, _: u64) -> Result<(), ClientError> {
        match self.0 {}
    }

    /// Has another program take over.
    ///
    /// # Errors
    /// Like [`Client::server`].
    pub const fn upgrade(&self, _: &UpgradeRequest) -> Result<UpgradeReport, ClientError> {
        match self.0 {}
    }
}
