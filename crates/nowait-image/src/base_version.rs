//! The version of a remote object that an overlay stands on.
//!
//! An overlay has the changes of some blocks; with those of another version of its base they make a disk that never was.
//! So the version is kept in an extended attribute of the overlay, from when it is made or first opened for writing.
//!
//! Invariant: an overlay with the attribute is not opened on another version.

use std::path::Path;

use rustix::fs::XattrFlags;

use crate::error::ImageError;
use crate::image_file::ImageFile;
use crate::warning::Warning;

/// The extended attribute with the version, as [`nowait::Storage::version`] has it (xattr(7)).
const MARK: &str = "user.nowait.base-version";
/// The longest name of a version in an image, in bytes; of a longer one this much is kept.
/// Beyond it: a longer one is kept up to here.
const MAX_BYTES: usize = 1024;

/// Checks that `overlay` was made on `version` of its base, which is called `base`. If it has no version yet and
/// `is_written` to, it gets that; the result is a warning where its file system has no such attributes.
///
/// # Errors
/// It stands on another version.
pub(crate) fn check(
    overlay: &ImageFile,
    base: &Path,
    version: Option<String>,
    is_written: bool,
) -> Result<Option<Warning>, ImageError> {
    let (Some(version), Ok(file)) = (version, overlay.fd()) else { return Ok(None) };
    let version = version.as_bytes();
    let version = version.get(..MAX_BYTES).unwrap_or(version);
    let mut kept = [0; MAX_BYTES];
    match rustix::fs::fgetxattr(file, MARK, &mut kept[..]) {
        Ok(len) if kept.get(..len) == Some(version) => Ok(None),
        Ok(len) => {
            let then = kept.get(..len).unwrap_or_default();
            let (now, then) = (String::from_utf8_lossy(version), String::from_utf8_lossy(then));
            let why = format!(
                "{} is another version than the one that it stands on: now {now}, then {then} (to mix them all the same: \
                 setfattr -x {MARK} {})",
                base.display(),
                overlay.path().display()
            );
            Err(ImageError::refused(overlay.path(), why))
        }
        Err(_) if !is_written => Ok(None),
        Err(_) => match rustix::fs::fsetxattr(file, MARK, version, XattrFlags::empty()) {
            Ok(()) => Ok(None),
            Err(_) => Ok(Some(Warning::NoBaseVersion(overlay.path().to_owned()))),
        },
    }
}
