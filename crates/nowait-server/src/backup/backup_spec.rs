//! Options of a backup, its state, and the reasons of refusals.
//!
//! Invariant: each refusal is one line, which says by itself what its caller may do.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use nowait::{Error, Storage};

use crate::dirty_bitmaps::bitmap_spec::BitmapError;
use crate::export::ExportId;
use crate::export_error::ExportError;

/// A backup that is to begin.
pub struct BackupSpec {
    /// The export whose disk it is of.
    pub export: ExportId,
    /// The name of the read-only export that it makes ([`BackupSpec::usual_name`]).
    pub name: String,
    /// The dirty bitmap of the export that is frozen: clients of the backup read it, and changes go to a successor.
    pub bitmap: Option<String>,
    /// Nothing is kept or served outside the dirty granules of the bitmap.
    pub only_dirty: bool,
    /// Clients may discard what they have read, which frees its scratch: reads of it fail from then on.
    pub discards: bool,
    /// Where old bytes go: a storage as large as the disk, rounded up to 64 KiB ([`crate::scratch_file`]).
    pub scratch: Arc<dyn Storage>,
    /// Bytes of it that may be in use; at least [`BackupSpec::BLOCK_BYTES`].
    pub scratch_bytes: u64,
}

impl BackupSpec {
    /// Bytes of a block, the least that is copied.
    pub const BLOCK_BYTES: u64 = 64 << 10;

    /// The usual name of a backup of the export called `export`.
    #[must_use]
    pub fn usual_name(export: &str) -> String {
        if export.is_empty() { "backup".into() } else { format!("{export}.backup") }
    }

    /// Bytes that the scratch of a disk of `size` bytes needs as its size.
    #[must_use]
    pub fn scratch_size(size: u64) -> u64 {
        size.checked_next_multiple_of(Self::BLOCK_BYTES).unwrap_or(size)
    }
}

/// A backup that has begun and was neither committed nor aborted.
#[derive(Clone, Debug)]
pub struct BackupStatus {
    /// The export whose disk it is of.
    pub export: ExportId,
    /// The name of that.
    pub export_name: String,
    /// The export that it makes.
    pub backup: ExportId,
    /// The name of that.
    pub name: String,
    /// The frozen bitmap.
    pub bitmap: Option<String>,
    /// Whether nothing is served outside the dirty granules of the bitmap.
    pub only_dirty: bool,
    /// The instant.
    pub since: SystemTime,
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes that were copied to scratch so far.
    pub copied_bytes: u64,
    /// Bytes of scratch in use.
    pub scratch_bytes: u64,
    /// Bytes of scratch that may be.
    pub max_scratch_bytes: u64,
    /// Why it has failed: its reads fail, too.
    pub failure: Option<String>,
}

/// The end of a backup, which decides about its frozen bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackupEnd {
    /// The backup has been read: what was noted up to its instant is forgotten.
    Commit,
    /// It has not: what was noted up to its instant is noted in the bitmap again.
    Abort,
}

/// Why a backup cannot begin or end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupError {
    /// The export for which it cannot.
    pub export: ExportId,
    /// The reason.
    pub why: BackupRefusal,
}

/// A reason why a backup cannot begin or end. Nothing has changed then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackupRefusal {
    /// The export is missing, or cannot pause; the name of the backup is taken.
    Export(ExportError),
    /// The bitmap is missing, or there is no memory for its successor.
    Bitmap(BitmapError),
    /// It has a backup already, or is named twice.
    HasBackup,
    /// It has none.
    NoBackup,
    /// It is a backup itself.
    IsBackup,
    /// The disk was exchanged or resized meanwhile.
    Changed,
    /// The disk is larger than 1 PiB, or there is no memory.
    TooLarge,
    /// Scratch may have less than a block.
    SmallScratch,
    /// Only what is dirty, but of no bitmap.
    NoBitmapNamed,
    /// The storage for scratch is smaller than the disk, or cannot tell its size.
    Scratch(Error),
    /// It has failed, so it cannot be committed.
    Failed(String),
}

impl fmt::Display for BackupRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Export(error) => return error.fmt(f),
            Self::Bitmap(error) => return error.fmt(f),
            Self::HasBackup => "it has a backup already",
            Self::NoBackup => "it has no backup",
            Self::IsBackup => "it is a backup",
            Self::Changed => "its disk was exchanged meanwhile; try again",
            Self::TooLarge => "there is no memory for the table of its blocks",
            Self::SmallScratch => "scratch has at least 65536 bytes",
            Self::NoBitmapNamed => "only what is dirty needs a bitmap",
            Self::Scratch(error) => return write!(f, "its scratch: {error}"),
            Self::Failed(why) => return write!(f, "its backup has failed ({why}): abort it"),
        })
    }
}
