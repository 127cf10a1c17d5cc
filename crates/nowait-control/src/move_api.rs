//! What requests and answers about moves of disks are made of.
//!
//! Invariant: as of the other parts of the interface.

use serde::{Deserialize, Serialize};

use crate::described::described;

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
        /// What else is to be known, a line each.
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
