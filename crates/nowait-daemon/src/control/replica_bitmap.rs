//! The stored bitmap of a replication: what a target may lack, also after the end of the server.
//!
//! Invariant: such a bitmap records only since all of it was dirty, durably, and only rounds that are durable on its target forget bits
//! of it. No other command clears, enables or freezes it.

use nowait_control::{AddBitmap, ControlError};

use crate::control::export_bitmaps::ExportBitmaps;
use crate::disks::allowed_places::AllowedPlaces;
use crate::disks::image_exchange::ImageExchange;

/// The begin of the names of these bitmaps.
const PREFIX: &str = "nowait-replica:";

/// The name of the bitmap of a disk of `size` bytes that is replicated to `target`.
fn name_of(size: u64, target: &str) -> String {
    format!("{PREFIX}{size}:{target}")
}

/// Whether bitmap `name` is one of a disk of some size that is replicated to `target`.
fn is_of(name: &str, target: &str) -> bool {
    let rest = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once(':'));
    rest.is_some_and(|(_, of)| of == target)
}

/// Refuses a change of bitmap `name` by which it would no longer tell what a target lacks.
///
/// # Errors
/// It is a replication's.
pub(crate) fn refuse(name: &str) -> Result<(), ControlError> {
    match name.starts_with(PREFIX) {
        true => Err(ControlError::Conflict(
            "its name is that of a replication's bitmap, which can only be removed".into(),
        )),
        false => Ok(()),
    }
}

/// The bitmap of the export of `bitmaps`, a disk of `size` bytes, for `target`: the one of an earlier replication, or a new one of which
/// all is dirty, in the image, or in a file of its own where that is `allowed`. Returns its name.
///
/// # Errors
/// Why it cannot be stored.
pub(crate) fn prepare(
    bitmaps: &ExportBitmaps<'_>,
    allowed: &AllowedPlaces,
    size: u64,
    target: &str,
) -> Result<String, ControlError> {
    let name = name_of(size, target);
    let all = bitmaps.list()?;
    // The new part of a disk that has grown is clean in these, and not on the target.
    for old in all.iter().filter(|old| is_of(&old.name, target) && old.name != name) {
        bitmaps.remove(&old.name)?;
    }
    let mut found = all.into_iter().find(|bitmap| bitmap.name == name);
    if found.as_ref().is_some_and(|found| found.inconsistent || !found.persistent) {
        bitmaps.remove(&name)?;
        found = None;
    }
    if found.as_ref().is_some_and(|found| found.enabled) {
        return Ok(name);
    }
    if found.is_none() {
        // A kill before all of it is dirty leaves one that does not record, and is not trusted.
        let (enabled, persistent) = (Some(false), Some(true));
        let new = AddBitmap { name: name.clone(), granularity_bytes: None, enabled, persistent };
        bitmaps.add(new, allowed)?;
    }
    let ImageExchange { exports, id, .. } = bitmaps.0;
    bitmaps.change(&name, || {
        exports.set_bitmap(id, &name)?;
        exports.enable_bitmap(id, &name, true)
    })?;
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bitmap_is_of_one_size_and_one_target() {
        let name = name_of(512, "nbd://[::1]:10809/a:b");
        assert!(is_of(&name, "nbd://[::1]:10809/a:b") && !is_of(&name, "nbd://[::1]:10809/a"));
        assert_ne!(name, name_of(1024, "nbd://[::1]:10809/a:b"));
        assert!(!is_of("monday", "nbd://h/") && !is_of("nowait-replica:nbd", "nbd"));
        assert!(refuse("monday").is_ok() && refuse(&name).is_err());
    }
}
