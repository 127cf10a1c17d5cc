//! Requests and answers about dirty bitmaps.
//!
//! Invariant: as of the other parts of the interface.

use serde::{Deserialize, Serialize};

/// A dirty bitmap of an export (`GET /v1/exports/NAME/bitmaps`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BitmapInfo {
    /// Its name, unique in its export.
    pub name: String,
    /// Bytes of a granule, of which it has a bit each.
    pub granularity_bytes: u64,
    /// Whether changes are marked.
    pub enabled: bool,
    /// Bytes of the disk that are dirty.
    pub dirty_bytes: u64,
    /// Whether it is stored in the image, or beside a raw one, and there again when that is served the next time.
    #[serde(default, skip_serializing_if = "is_false")]
    pub persistent: bool,
    /// Whether its bits are lost, because a program that had the image open has not stored them: it can only be removed.
    #[serde(default, skip_serializing_if = "is_false")]
    pub inconsistent: bool,
}

/// Whether `flag` is what it is without a word.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_false(flag: &bool) -> bool {
    !*flag
}

/// A bitmap to add (`POST /v1/exports/NAME/bitmaps`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddBitmap {
    /// 1 to 1023 bytes without control characters.
    pub name: String,
    /// A power of two from 512 to 67108864; 65536 without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granularity_bytes: Option<u64>,
    /// Whether changes are marked from now on; true without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Whether it is stored in the image, or beside a raw one; without it, where that is possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
}

/// Changes of a bitmap (`PATCH /v1/exports/NAME/bitmaps/BITMAP`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PatchBitmap {
    /// Whether changes are marked from now on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// Bitmaps to merge (`POST /v1/exports/NAME/bitmaps/BITMAP/merge`).
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeBitmaps {
    /// The names of those whose dirty granules are marked in the bitmap, too; they stay as they are.
    pub sources: Vec<String>,
}
