//! Everything that has counters: the server, its exports, and the stores and servers that images are in.
//! The declarations here give the structs, the keys of the JSON, the metrics and `docs/control.openapi.json`.
//!
//! Invariant: names of fields and metrics are never changed; a field that a later version adds is optional for a reader.

use std::collections::BTreeMap;

use nowait_remote::{LinkCounts, MemoryCounts, StoreCounts};
use nowait_server::{ExportStatus, FrontendKind, FrontendTotals, OpTotals};
use serde::{Deserialize, Serialize};

use crate::api::{BucketInfo, ErrnoInfo, LatencyInfo, LimitsInfo};
use crate::backup_api::BackupInfo;
use crate::described_structs::described;
use crate::move_api::{MoveInfo, ReplicationInfo};

described! {
    /// A server (`GET /v1/server`).
    #[derive(Clone, Debug, Default, Serialize, Deserialize)]
    pub struct ServerInfo as "Server" {
        /// The version of the program.
        pub version: String,
        /// Its process.
        pub pid: u32,
        /// Seconds since the server began.
        pub uptime_seconds: f64 => Gauge "nowait_uptime" "seconds",
        /// Connections of clients.
        pub connections: u64 => Gauge "nowait_connections",
        /// The most connections.
        pub max_connections: u64 => Gauge "nowait_connections_limit",
        /// Bytes of memory that the kernel has registered for transfers.
        pub registered_bytes: u64 => Gauge "nowait_registered" "bytes",
        /// Clients that follow the events.
        #[serde(default)]
        pub event_subscribers: u64,
        /// Faults of the server, each in one line.
        #[serde(default)]
        pub warnings: Vec<String>,
        /// The objects that images are read from.
        #[serde(default)]
        pub stores: Vec<StoreInfo>,
        /// The memory for blocks of these objects.
        #[serde(flatten)]
        pub block_memory: MemoryCounts,
        /// The exports of other NBD servers that images are in.
        #[serde(default)]
        pub nbd_servers: Vec<NbdServerInfo>,
    }
}

described! {
    /// An export of another NBD server, and the connection to it since it was opened.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct NbdServerInfo as "NbdServer" {
        /// Its URI.
        pub uri: String,
        /// The state of the connection.
        #[serde(flatten)]
        pub counts: LinkCounts,
    }
}

described! {
    /// An object of an object store or a web server, and how the store has answered since it was opened.
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    pub struct StoreInfo as "Store" {
        /// Its URL.
        pub url: String,
        /// The counts of its blocks and bytes.
        #[serde(flatten)]
        pub counts: StoreCounts,
        /// Requests to the store.
        pub requests: u64,
        /// How long the requests took together, in seconds.
        pub sum_seconds: f64,
        /// How long requests took.
        pub buckets: Vec<BucketInfo>,
    }
}

described! {
    /// An export (`GET /v1/exports`).
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    pub struct ExportInfo as "Export" {
        /// Its number; never used again by this server. `@ID` names it in a path.
        pub id: u64,
        /// The name by which clients choose it; empty for a default export without one.
        pub name: String,
        /// A text for people.
        pub description: String,
        /// The path of its image.
        pub image: String,
        /// The format of its image: `raw`, `qcow2` or another one.
        pub format: String,
        /// Size of the disk in bytes.
        pub size_bytes: u64 => Gauge "nowait_export_size" "bytes",
        /// Whether writes are refused.
        pub read_only: bool => Gauge "nowait_export_read_only",
        /// Whether the page cache is bypassed.
        pub direct_io: bool,
        /// Where it can be reached: URIs of NBD, `vhost-user:PATH`, the path of a block device.
        pub places: Vec<String>,
        /// Connections and queues that are served.
        pub members: u64 => Gauge "nowait_export_members",
        /// Requests in flight, as of a moment ago.
        pub in_flight: u64 => Gauge "nowait_export_in_flight",
        /// By frontend (`nbd`, `vhost-user`, `ublk`) all that was done since the export was added.
        pub frontends: BTreeMap<String, FrontendInfo>,
        /// How the engines have served the requests: `simple`, `general`, `worker`, `merged` and others.
        pub mechanisms: BTreeMap<String, u64>,
        /// The limits of all its frontends and clients together.
        pub limits: LimitsInfo,
        /// The limits of each client: a connection of NBD, a virtual machine, the local block device.
        #[serde(default)]
        pub connection_limits: LimitsInfo,
        /// Its share of a thread beside other exports that always have much to move, 1 to 10000; 100 unless it was changed.
        #[serde(default)]
        pub weight: u32,
        /// The backup of it that has not ended.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub backup: Option<BackupInfo>,
        /// The move of its disk to another place, or the last one that has ended.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub moving: Option<MoveInfo>,
        /// The replication of its disk to another server, or the last one that has ended.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub replication: Option<ReplicationInfo>,
    }
}

described! {
    /// Requests of one frontend of an export.
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    pub struct FrontendInfo as "Frontend" {
        /// By operation: `read`, `write`, `flush`, `discard`, `zero`, `status`.
        pub operations: BTreeMap<String, OperationInfo>,
        /// The errors that requests ended with.
        pub errors: Vec<ErrnoInfo>,
    }
}

described! {
    /// The requests of an operation.
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    pub struct OperationInfo as "Operation" {
        /// Requests that were answered, those with an error included.
        pub requests: u64,
        /// Bytes of requests that succeeded.
        pub bytes: u64,
        /// Requests that failed.
        pub errors: u64,
        /// How long requests took; absent if none was timed.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub latency: Option<LatencyInfo>,
        /// How long of that the storage took, with all that waits for it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub device_latency: Option<LatencyInfo>,
    }
}

/// Everything that a server tells each second (the event `statistics` of `GET /v1/events`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Statistics {
    /// The server.
    pub server: ServerInfo,
    /// Its exports.
    pub exports: Vec<ExportInfo>,
}

impl From<&FrontendTotals> for FrontendInfo {
    fn from(totals: &FrontendTotals) -> Self {
        let operation = |(name, totals): (&str, &OpTotals)| {
            let &OpTotals { requests, bytes, errors, .. } = totals;
            let latency = LatencyInfo::of(&totals.latencies);
            let device_latency = LatencyInfo::of(&totals.device_latencies);
            let info = OperationInfo { requests, bytes, errors, latency, device_latency };
            (name.to_owned(), info)
        };
        let errno = |&(errno, requests): &(i32, u64)| ErrnoInfo {
            errno,
            message: std::io::Error::from_raw_os_error(errno).to_string(),
            requests,
        };
        Self {
            operations: totals.ops().map(operation).collect(),
            errors: totals.errnos.iter().map(errno).collect(),
        }
    }
}

impl FrontendInfo {
    /// The frontends that have done something, by their names.
    #[must_use]
    pub fn of_all(totals: &[(FrontendKind, FrontendTotals)]) -> BTreeMap<String, Self> {
        let busy = totals.iter().filter(|(_, totals)| totals.requests() > 0);
        busy.map(|(kind, totals)| (kind.name().to_owned(), totals.into())).collect()
    }
}

impl From<(String, StoreCounts)> for StoreInfo {
    fn from((url, counts): (String, StoreCounts)) -> Self {
        Self {
            url,
            requests: counts.requests(),
            sum_seconds: counts.latency_sum.as_secs_f64(),
            buckets: counts.latencies().map(BucketInfo::from).collect(),
            counts,
        }
    }
}

impl From<(String, LinkCounts)> for NbdServerInfo {
    fn from((uri, counts): (String, LinkCounts)) -> Self {
        Self { uri, counts }
    }
}

impl From<ExportStatus> for ExportInfo {
    /// The export without its image and its places.
    fn from(status: ExportStatus) -> Self {
        let mechanisms = status.mechanisms.into_iter();
        Self {
            id: status.id.number(),
            size_bytes: status.size,
            read_only: status.read_only,
            members: status.members as u64,
            in_flight: status.in_flight as u64,
            frontends: FrontendInfo::of_all(&status.totals),
            mechanisms: mechanisms.map(|(name, count)| (name.to_owned(), count)).collect(),
            limits: status.limits.into(),
            connection_limits: status.client_limits.into(),
            weight: status.weight,
            name: status.name,
            description: status.description,
            ..Self::default()
        }
    }
}
