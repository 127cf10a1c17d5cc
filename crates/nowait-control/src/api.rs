//! Requests and answers of the control interface, without those that have counters
//! (`counted_api.rs`); `docs/control.openapi.json` is the same for programs.
//!
//! Invariant: a field that a later version adds is optional for a reader; none is ever renamed.

use std::time::Duration;

use nowait_server::{Latencies, Limits, TokenBucket};
use serde::{Deserialize, Serialize};

/// The last hour (`GET /v1/history`): samples of all that was done between them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HistoryInfo {
    /// The time between two samples, in seconds; of a server that was busy it may be longer.
    pub period_seconds: u64,
    /// How long ago each sample was taken, in seconds, the oldest first.
    pub seconds_ago: Vec<f64>,
    /// All exports together.
    pub total: SeriesInfo,
    /// Each export.
    pub exports: Vec<ExportHistory>,
    /// Exports that have no history of their own, because there are too many.
    pub exports_left_out: u64,
    /// The last errors that requests ended with, the oldest first.
    pub errors: Vec<PastErrors>,
}

/// The last hour of an export.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExportHistory {
    /// Its number.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Its samples: an export that was added later has fewer samples, the last ones.
    pub series: SeriesInfo,
}

/// Rates up to each sample since the one before, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SeriesInfo {
    /// Reads.
    pub reads_per_second: Vec<f64>,
    /// Writes.
    pub writes_per_second: Vec<f64>,
    /// Bytes that were read.
    pub read_bytes_per_second: Vec<f64>,
    /// Bytes that were written.
    pub written_bytes_per_second: Vec<f64>,
    /// The time that half of the requests stayed within, in seconds, too high by at most a factor of
    /// two; null where no request was timed.
    pub p50_seconds: Vec<Option<f64>>,
    /// Seconds that 99 of 100 requests stayed within.
    pub p99_seconds: Vec<Option<f64>>,
    /// Requests that failed.
    pub errors: Vec<u64>,
}

/// Requests that failed between two samples, with one error.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PastErrors {
    /// How long ago the sample was taken that saw them first, in seconds.
    pub seconds_ago: f64,
    /// The number of the export.
    pub export: u64,
    /// Its name.
    pub name: String,
    /// The frontend that the requests came by.
    pub frontend: String,
    /// The number of the error (errno(3)).
    pub errno: i32,
    /// The error in words.
    pub message: String,
    /// Requests.
    pub requests: u64,
}

/// An export that is there no more (the event `export_removed`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RemovedExport {
    /// Its number.
    pub id: u64,
    /// The name that it had.
    pub name: String,
}

/// The exchange of the server's program (`POST /v1/upgrade`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpgradeRequest {
    /// The absolute path of the new program; without it the path from which the server was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub binary: Option<String>,
}

/// An upgrade that has succeeded.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct UpgradeReport {
    /// The process that serves now.
    pub pid: u32,
    /// The version of its program.
    pub version: String,
    /// How long no request was served, in milliseconds.
    pub pause_ms: f64,
    /// Connections that were handed over.
    pub connections: u64,
    /// Connections that were closed, because they cannot be: those with TLS, and those that had not
    /// chosen an export.
    pub closed: u64,
}

/// Limits of an export, or of each of its clients; a limit that is absent does not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitsInfo {
    /// Of requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ops: Option<BucketLimit>,
    /// Of the bytes that are read and written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<BucketLimit>,
}

/// A token bucket, in the terms of Cloud Hypervisor and Firecracker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketLimit {
    /// The most tokens, which are requests or bytes: so much can be done together after a pause.
    pub size: u64,
    /// Tokens beside these that are there once.
    #[serde(default)]
    pub one_time_burst: u64,
    /// The time in which an empty bucket is filled, in milliseconds, 1 to 86400000.
    pub refill_time: u64,
}

impl From<TokenBucket> for BucketLimit {
    fn from(bucket: TokenBucket) -> Self {
        let TokenBucket { size, one_time_burst, refill_time } = bucket;
        Self { size, one_time_burst, refill_time: refill_time.as_millis() as u64 }
    }
}

impl From<BucketLimit> for TokenBucket {
    fn from(limit: BucketLimit) -> Self {
        let BucketLimit { size, one_time_burst, refill_time } = limit;
        Self { size, one_time_burst, refill_time: Duration::from_millis(refill_time) }
    }
}

impl BucketLimit {
    /// The rate that is kept over time, a second.
    #[must_use]
    pub fn per_second(&self) -> u64 {
        let rate = u128::from(self.size) * 1000 / u128::from(self.refill_time.max(1));
        u64::try_from(rate).unwrap_or(u64::MAX)
    }
}

impl LimitsInfo {
    /// These, and those of `others` of which there are none here.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self { ops: self.ops.or(others.ops), bandwidth: self.bandwidth.or(others.bandwidth) }
    }
}

impl From<Limits> for LimitsInfo {
    fn from(limits: Limits) -> Self {
        Self { ops: limits.requests.map(Into::into), bandwidth: limits.bytes.map(Into::into) }
    }
}

impl From<LimitsInfo> for Limits {
    fn from(info: LimitsInfo) -> Self {
        Self { requests: info.ops.map(Into::into), bytes: info.bandwidth.map(Into::into) }
    }
}

/// How long requests took, from their submission to the engine to their completion. One in sixteen is
/// timed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyInfo {
    /// Requests that were timed.
    pub timed: u64,
    /// The time that they took together, in seconds.
    pub sum_seconds: f64,
    /// The time that half of them stayed within, in seconds, too high by at most a factor of two.
    pub p50_seconds: f64,
    /// Seconds that 99 of 100 requests stayed within.
    pub p99_seconds: f64,
    /// The buckets, which are always the same: an upper bound in seconds (absent for the last) and the
    /// requests that took less than it, and not less than the bound before.
    pub buckets: Vec<BucketInfo>,
}

/// A bucket of a histogram.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BucketInfo {
    /// The upper bound in seconds; absent for the last bucket, which has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub below_seconds: Option<f64>,
    /// Requests.
    pub requests: u64,
}

impl From<(f64, u64)> for BucketInfo {
    /// The bucket of a bound in seconds, infinite for the last one, and its requests.
    fn from((bound, requests): (f64, u64)) -> Self {
        Self { below_seconds: bound.is_finite().then_some(bound), requests }
    }
}

impl LatencyInfo {
    /// Figures of `latencies`, unless there are none.
    pub(crate) fn of(latencies: &Latencies) -> Option<Self> {
        Some(Self {
            timed: latencies.count(),
            sum_seconds: latencies.sum().as_secs_f64(),
            p50_seconds: latencies.quantile(0.5)?,
            p99_seconds: latencies.quantile(0.99)?,
            buckets: latencies.buckets().map(BucketInfo::from).collect(),
        })
    }
}

/// An error and how many requests had it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrnoInfo {
    /// The number of the error (errno(3)).
    pub errno: i32,
    /// The error in words.
    pub message: String,
    /// Requests.
    pub requests: u64,
}

/// A connection (`GET /v1/connections`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ConnectionInfo {
    /// Its number; never used again by this server.
    pub id: u64,
    /// `nbd` or `vhost-user`.
    pub frontend: String,
    /// The client: a TCP address, or the user and the process at the other end of a Unix socket.
    pub peer: String,
    /// The name of the export that the client has chosen; absent during the handshake.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// Whether it is encrypted.
    pub tls: bool,
    /// Time since its acceptance, in seconds.
    pub age_seconds: f64,
}

/// An export to add (`POST /v1/exports`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddExport {
    /// The name by which clients choose it, at most 4096 bytes.
    pub name: String,
    /// The absolute path of the image, in a directory that the server allows, or a URI that it allows.
    pub path: String,
    /// The URLs that a qcow2 image may name as that below it, at most 16, which the server allows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backing: Vec<String>,
    /// `raw` or `qcow2`; without it the image is looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// Whether writes are refused.
    #[serde(default)]
    pub read_only: bool,
    /// A text for people; the name of the file without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Where it can be reached beside the addresses of the server, at most 16 places.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frontends: Vec<AddFrontend>,
}

/// A place where an export that is added can be reached, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AddFrontend {
    /// The absolute path of a socket for virtual machines, in a directory that the server allows or
    /// in that of its control sockets.
    VhostUser(String),
}

/// Changes of an export (`PATCH /v1/exports/NAME`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PatchExport {
    /// The new size in bytes; of a qcow2 image rounded up to a multiple of 512.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Whether it may be smaller than the present one: what is behind the new end is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shrink: bool,
    /// The new limits in place of all that there are; `{}` for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsInfo>,
    /// Limits of each client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_limits: Option<LimitsInfo>,
    /// The new share beside other exports, 1 to 10000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Whether changes are refused from the next request on. An image that was opened for reading only
    /// stays read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
}

/// A snapshot to take (`POST /v1/exports/NAME/snapshot`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// The absolute path of the qcow2 image that is made, in a directory that the server allows.
    pub overlay: String,
}

/// A snapshot that was taken.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SnapshotReport {
    /// The path of the image that is written to from now on.
    pub image: String,
    /// The path of the image that is unchanged from now on: its backing image.
    pub backing: String,
    /// How long no request of the export was served, in milliseconds.
    pub pause_ms: f64,
}
