//! Asks and changes a running nowait server: HTTP with JSON, and a client for it.
//!
//! For programs that ask a server ([`Client`]), and for servers that are asked ([`ControlledServer`]).
//!
//! The HTTP server runs on one thread of its own, and reaches the data path only through the
//! methods of [`ControlledServer`].
//!
//! The cargo feature `http`, on by default, can be left out: the types are the same then, but no server starts, no client
//! asks, and [`DISABLED`] says why.
#![forbid(unsafe_code)]

mod described_structs;
mod backup_api;
mod move_api;
mod api;
mod counted_api;
mod bitmap_api;
mod load;
mod controlled_server;
mod client_error;
mod verb;
#[cfg(feature = "http")]
mod http;
#[cfg(not(feature = "http"))]
mod disabled;
mod client;

#[cfg(not(feature = "http"))]
use disabled as http;

pub use api::{
    AddExport, AddFrontend, BucketInfo, BucketLimit, ConnectionInfo, ErrnoInfo, ExportHistory,
    HistoryInfo, LatencyInfo, LimitsInfo, PastErrors, PatchExport, RemovedExport, SeriesInfo,
    SnapshotReport, SnapshotRequest, UpgradeReport, UpgradeRequest,
};
pub use backup_api::{BackupInfo, EndBackup, StartBackup};
pub use bitmap_api::{AddBitmap, BitmapInfo, MergeBitmaps, PatchBitmap};
pub use client::Client;
pub use client_error::ClientError;
pub use controlled_server::{ControlError, ControlledServer};
pub use counted_api::{
    ExportInfo, FrontendInfo, NbdServerInfo, OperationInfo, ServerInfo, Statistics, StoreInfo,
};
#[cfg(feature = "fuzz")]
pub use http::fuzz;
pub use http::{DISABLED, HttpListener, HttpServer, Proof, Token};
pub use load::{Load, paths};
pub use move_api::{MoveInfo, ReplicationInfo, StartMove, StartReplication};
