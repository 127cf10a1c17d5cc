//! Backups as the control interface begins and ends them, and tells of them.
//!
//! Invariant: a file for old bytes is made only where the user has allowed new files.

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use nowait_control::{BackupInfo, ControlError, StartBackup};
use nowait_server::{
    BackupEnd, BackupError, BackupRefusal, BackupSpec, BackupStatus, ExportId, Exports,
    scratch_file,
};

use crate::config::export_spec::parse_name;
use crate::control::bitmap_answers;
use crate::disks::allowed_places::AllowedPlaces;
use crate::disks::served_disks::{ServedDisk, ServedDisks};
use crate::error::os_message;

/// How long requests in flight may take to end.
/// Beyond it: no backup begins; one that ends is served through its guard until the next pause.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// A backup at a moment.
pub(crate) fn info_of(status: BackupStatus) -> BackupInfo {
    let since = status.since.duration_since(UNIX_EPOCH).unwrap_or_default();
    BackupInfo {
        name: status.name,
        bitmap: status.bitmap,
        only_dirty: status.only_dirty,
        since_unix_seconds: since.as_secs(),
        size_bytes: status.size,
        copied_bytes: status.copied_bytes,
        scratch_bytes: status.scratch_bytes,
        max_scratch_bytes: status.max_scratch_bytes,
        failure: status.failure,
    }
}

/// Begins the backups of `ids` that `start` describes.
///
/// # Errors
/// Why one of them cannot begin: then none has.
pub(crate) fn start(
    exports: &Exports,
    disks: &ServedDisks,
    allowed: &AllowedPlaces,
    ids: &[ExportId],
    start: StartBackup,
) -> Result<Vec<BackupInfo>, ControlError> {
    if ids.len() > 1 && (start.name.is_some() || start.scratch.is_some()) {
        let why = "a name and a scratch file can only be given for a single export";
        return Err(ControlError::Invalid(why.into()));
    }
    let spec = |id: &ExportId| spec_of(exports, disks, allowed, *id, &start);
    let specs = ids.iter().map(spec).collect::<Result<Vec<_>, _>>()?;
    let begun = exports.begin_backups(specs, DRAIN_TIMEOUT);
    begun.map_err(|error| refused(exports, ids, &error))?;
    let info = |id: &ExportId| exports.status_of(*id)?.backup.map(info_of);
    Ok(ids.iter().filter_map(info).collect())
}

/// Ends the backups of `ids`.
///
/// # Errors
/// Why one of them cannot end so: then none has.
pub(crate) fn end(exports: &Exports, ids: &[ExportId], end: BackupEnd) -> Result<(), ControlError> {
    let ended = exports.end_backups(ids, end, DRAIN_TIMEOUT);
    ended.map_err(|error| refused(exports, ids, &error))
}

fn spec_of(
    exports: &Exports,
    disks: &ServedDisks,
    allowed: &AllowedPlaces,
    export: ExportId,
    start: &StartBackup,
) -> Result<BackupSpec, ControlError> {
    let place = |served: &ServedDisk| {
        let image = &served.disk.named.image;
        let beside = (!served.disk.named.is_remote()).then(|| image.parent()).flatten();
        beside.map(Path::to_owned)
    };
    let place = disks.lock().iter().find(|served| served.id == export).map(place);
    let (Some(beside), Some(status)) = (place, exports.status_of(export)) else {
        // A backup has no image of its own.
        let error = BackupError { export, why: BackupRefusal::IsBackup };
        return Err(refused(exports, &[export], &error));
    };
    let (directory, name) = match &start.scratch {
        Some(path) => {
            let path = allowed.new_image(path)?;
            let directory = path.parent().map(Path::to_owned).unwrap_or_default();
            (directory, path.file_name().map(PathBuf::from))
        }
        None => (allowed.directory_for_scratch(beside.as_deref())?, None),
    };
    let name_of_backup = start.name.clone().unwrap_or_else(|| BackupSpec::usual_name(&status.name));
    let name_of_backup = parse_name(&name_of_backup).map_err(ControlError::Invalid)?;
    let needed = BackupSpec::scratch_size(status.size);
    let file = scratch_file(&directory, name.as_deref(), needed).map_err(|error| {
        let place = name.map_or(directory.clone(), |name| directory.join(name));
        let why = os_message(&error.into());
        ControlError::Conflict(format!("{}: cannot make the scratch file: {why}", place.display()))
    })?;
    let most = || needed.min(free_in(&directory) / 2).max(BackupSpec::BLOCK_BYTES);
    Ok(BackupSpec {
        export,
        name: name_of_backup,
        bitmap: start.bitmap.clone(),
        only_dirty: start.only_dirty,
        discards: start.discards,
        scratch: file,
        scratch_bytes: start.max_scratch_bytes.unwrap_or_else(most),
    })
}

/// Bytes that are free in the file system of `directory`.
fn free_in(directory: &Path) -> u64 {
    rustix::fs::statvfs(directory).map_or(u64::MAX, |it| it.f_bavail.saturating_mul(it.f_frsize))
}

/// The answer to a backup that is refused; it names the export if there are several.
fn refused(exports: &Exports, ids: &[ExportId], error: &BackupError) -> ControlError {
    let of = match ids.len() {
        0 | 1 => String::new(),
        _ => {
            let all = exports.list();
            let name = all.into_iter().find(|(id, _)| *id == error.export);
            name.map_or_else(String::new, |(id, name)| match name.is_empty() {
                true => format!("export @{id}: "),
                false => format!("export {name:?}: "),
            })
        }
    };
    let why = format!("{of}{}", error.why);
    match &error.why {
        BackupRefusal::Export(error) => named(error.clone().into(), &of),
        BackupRefusal::Bitmap(error) => named(bitmap_answers::refused(*error), &of),
        BackupRefusal::NoBackup => ControlError::NotFound(why),
        BackupRefusal::SmallScratch | BackupRefusal::NoBitmapNamed => ControlError::Invalid(why),
        BackupRefusal::HasBackup
        | BackupRefusal::IsBackup
        | BackupRefusal::Changed
        | BackupRefusal::Failed(_) => ControlError::Conflict(why),
        BackupRefusal::TooLarge | BackupRefusal::Scratch(_) => ControlError::Failed(why),
    }
}

/// Puts the name of an export in front of the reason.
fn named(error: ControlError, of: &str) -> ControlError {
    let add = |why: String| format!("{of}{why}");
    match error {
        ControlError::Invalid(why) => ControlError::Invalid(add(why)),
        ControlError::Forbidden(why) => ControlError::Forbidden(add(why)),
        ControlError::NotFound(why) => ControlError::NotFound(add(why)),
        ControlError::Conflict(why) => ControlError::Conflict(add(why)),
        ControlError::Failed(why) => ControlError::Failed(add(why)),
        ControlError::Unavailable(why) => ControlError::Unavailable(add(why)),
    }
}
