//! Asks and changes a running nowait server: HTTP with JSON, and a client for it.
//!
//! The HTTP server runs on one thread of its own, and reaches the data path only through the
//! methods of [`ControlledServer`].
#![forbid(unsafe_code)]

mod api;
mod load;
mod controlled_server;
mod metrics;
mod blocking_calls;
mod events;
mod history;
mod refusal;
mod bounds;
mod origin;
mod connection_slots;
mod http_line_endings;
mod token;
mod page;
mod routes;
mod http_listener;
mod http_server;
mod client;
#[cfg(feature = "fuzz")]
pub mod fuzz;

pub use api::{
    AddExport, AddFrontend, BucketInfo, BucketLimit, ConnectionInfo, ErrnoInfo, ExportHistory,
    ExportInfo, FrontendInfo, HistoryInfo, LatencyInfo, LimitsInfo, NbdServerInfo, OperationInfo,
    PastErrors, PatchExport, RemovedExport, SeriesInfo, ServerInfo, SnapshotReport,
    SnapshotRequest, Statistics, StoreInfo, UpgradeReport, UpgradeRequest,
};
pub use client::{Client, ClientError, Proof};
pub use controlled_server::{ControlError, ControlledServer};
pub use http_listener::HttpListener;
pub use http_server::HttpServer;
pub use load::{Load, paths};
pub use token::Token;
