//! Requests and answers about moves of disks.
//!
//! Invariant: as of the other parts of the interface.

use serde::{Deserialize, Serialize};

use crate::described_structs::described;

described! {
    /// The move of the disk of an export to another place, or the last one that has ended
    /// (`GET /v1/exports/NAME/move`).
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    pub struct MoveInfo as "Move" {
        /// The path or URI of the disk's new place.
        pub target: String,
        /// `copying` all of it, then `following` what has changed meanwhile, `behind` if its writers are faster than
        /// that, `pivoting`; in the end `completed`, `failed` or `cancelled`.
        pub state: String,
        /// Whether it has not ended.
        pub running: bool => Gauge "nowait_move_running",
        /// Bytes of the disk.
        pub total_bytes: u64 => Gauge "nowait_move_total" "bytes",
        /// Bytes that were copied so far, those included that were copied again.
        pub copied_bytes: u64 => Gauge "nowait_move_copied" "bytes",
        /// Bytes that are still to be copied, as of now.
        pub left_bytes: u64 => Gauge "nowait_move_left" "bytes",
        /// How often what has changed was copied.
        pub rounds: u64 => Gauge "nowait_move_rounds",
        /// How long no request was served for the exchange, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub pause_ms: Option<f64>,
        /// Why it has failed; the disk is where it was.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub failure: Option<String>,
        /// Further remarks, a line each.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub notes: Vec<String>,
    }
}

/// A move to begin (`POST /v1/exports/NAME/move`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartMove {
    /// The path of a new file, of a block device, or the URI of an export of another server.
    pub target: String,
    /// The format of a new file; without it qcow2 if its name ends with `.qcow2`, or else raw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// Overwrite a block device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overwrite_device: bool,
    /// How long no request may be served for the exchange, 10 to 60000 milliseconds; 2000 without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_pause_ms: Option<u64>,
    /// Bytes a second that are copied at most, at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_bytes: Option<u64>,
}

described! {
    /// The replication of the disk of an export to an export of another server, or the last one that has ended
    /// (`GET /v1/exports/NAME/replicate`).
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    pub struct ReplicationInfo as "Replication" {
        /// The URI of the target.
        pub target: String,
        /// `copying` what has changed, `waiting` for the next round, `retrying` after an error; in the end `stopped`.
        pub state: String,
        /// Whether it has not ended.
        pub running: bool => Gauge "nowait_replicate_running",
        /// Seconds from the begin of a round to the next.
        pub every_seconds: u64,
        /// Rounds that are complete and durable on the target.
        pub rounds: u64 => Counter "nowait_replicate_rounds",
        /// Rounds that have failed.
        pub failures: u64 => Counter "nowait_replicate_failures",
        /// Bytes that were copied so far.
        pub copied_bytes: u64 => Counter "nowait_replicate_copied" "bytes",
        /// Bytes that are still to be copied, as of now.
        pub left_bytes: u64 => Gauge "nowait_replicate_left" "bytes",
        /// Whether the target is the disk as it was at the last instant; if not, it is a mixture of that and the next one.
        pub consistent: bool => Gauge "nowait_replicate_consistent",
        /// The instant of the last complete round, in seconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub instant_unix_seconds: Option<f64>,
        /// Seconds since that instant, or since the begin.
        pub lag_seconds: f64 => Gauge "nowait_replicate_lag" "seconds",
        /// Why the last round has failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub last_error: Option<String> => Gauge "nowait_replicate_failing",
    }
}

/// A replication to begin (`POST /v1/exports/NAME/replicate`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartReplication {
    /// The URI of an export of another server, of the same size.
    pub target: String,
    /// Seconds from the begin of a round to the next, 1 to 86400; 60 without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<u64>,
    /// Bytes a second that are copied at most, at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_bytes: Option<u64>,
    /// Store what the target lacks with the disk, and go on from what is stored.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub resume: bool,
}
