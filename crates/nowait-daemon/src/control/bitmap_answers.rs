//! Dirty bitmaps as the control interface tells of them.
//!
//! Invariant: each refusal of the server has one kind of the interface.

use nowait_control::{AddBitmap, BitmapInfo, ControlError};
use nowait_image::Bitmap;
use nowait_server::{BitmapError, BitmapSpec, BitmapStatus};

/// A bitmap that was asked for.
pub(crate) fn spec_of(bitmap: AddBitmap) -> BitmapSpec {
    let AddBitmap { name, granularity_bytes, enabled, persistent: _ } = bitmap;
    let usual = BitmapSpec::new(name);
    BitmapSpec {
        granularity: granularity_bytes.unwrap_or(usual.granularity),
        enabled: enabled.unwrap_or(usual.enabled),
        ..usual
    }
}

/// A bitmap at a moment.
pub(crate) fn info_of(status: BitmapStatus) -> BitmapInfo {
    let BitmapStatus { spec, dirty_bytes, persistent } = status;
    let BitmapSpec { name, granularity, enabled } = spec;
    let inconsistent = false;
    BitmapInfo {
        name,
        granularity_bytes: granularity,
        enabled,
        dirty_bytes,
        persistent,
        inconsistent,
    }
}

/// A bitmap of the image whose bits are lost.
pub(crate) fn info_of_lost(bitmap: Bitmap) -> BitmapInfo {
    let Bitmap { name, granularity, .. } = bitmap;
    BitmapInfo {
        name,
        granularity_bytes: granularity,
        persistent: true,
        inconsistent: true,
        ..BitmapInfo::default()
    }
}

/// The answer to a change of a bitmap that is refused.
pub(crate) fn refused(error: BitmapError) -> ControlError {
    let why = error.to_string();
    match error {
        BitmapError::NoExport | BitmapError::NoBitmap => ControlError::NotFound(why),
        BitmapError::Name | BitmapError::Granularity | BitmapError::SmallGranularity(_) => {
            ControlError::Invalid(why)
        }
        BitmapError::Exists
        | BitmapError::TooMany
        | BitmapError::TooLarge(_)
        | BitmapError::InBackup => ControlError::Conflict(why),
        BitmapError::NoMemory => ControlError::Failed(why),
    }
}
