//! Requests and answers about backups.
//!
//! Invariant: as of the other parts of the interface.

use serde::{Deserialize, Serialize};

use crate::described_structs::described;

described! {
    /// A backup of an export that was neither committed nor aborted (`GET /v1/exports/NAME/backup`).
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct BackupInfo as "Backup" {
        /// The name of the export that it makes.
        pub name: String,
        /// The dirty bitmap of which it has the bits up to its instant.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub bitmap: Option<String>,
        /// Whether nothing is served outside the dirty granules of the bitmap.
        pub only_dirty: bool,
        /// Its instant, in seconds since 1970.
        pub since_unix_seconds: u64,
        /// Bytes of the disk.
        pub size_bytes: u64,
        /// Bytes that were copied to scratch so far.
        pub copied_bytes: u64 => Gauge "nowait_backup_copied" "bytes",
        /// Bytes of scratch in use.
        pub scratch_bytes: u64 => Gauge "nowait_backup_scratch" "bytes",
        /// Bytes of scratch that may be.
        pub max_scratch_bytes: u64 => Gauge "nowait_backup_scratch_limit" "bytes",
        /// Why it has failed; its reads fail, too.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub failure: Option<String> => Gauge "nowait_backup_failed",
    }
}

/// A backup to begin (`POST /v1/exports/NAME/backup`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartBackup {
    /// The name of the export that it makes; `NAME.backup` without it. Of one export only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The dirty bitmap that is frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// Nothing is kept or served outside the dirty granules of the bitmap.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_dirty: bool,
    /// Clients may discard what they have read, which frees its scratch.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub discards: bool,
    /// The path of the file for old bytes, which is made and has no name after that. Of one export only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch: Option<String>,
    /// Bytes of it that may be in use, at least 65536; as many as the disk has without it, or half of what is free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_scratch_bytes: Option<u64>,
    /// Other exports whose backups have the same instant and the same settings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub with: Vec<String>,
}

/// Exports whose backups end together with that of another one (`POST /v1/exports/NAME/backup/commit` and
/// `…/abort`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndBackup {
    /// Their names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub with: Vec<String>,
}
