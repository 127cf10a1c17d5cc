//! The begin and the end of backups, of several exports together.
//!
//! Invariant: whatever can fail is done before anything changes. Backups begin while none of their exports is served.

use std::sync::Arc;
use std::time::SystemTime;

use nowait::{BlockDevice, BlockMap, ByteRange, Error, Operation};

use crate::any_export::AnyExport;
use crate::backup::backup_device;
use crate::backup::backup_spec::{BackupEnd, BackupError, BackupRefusal, BackupSpec};
use crate::backup::point_in_time::PointInTime;
use crate::backup::running_backup::RunningBackup;
use crate::backup::scratch::Scratch;
use crate::dirty_bitmaps::DirtyBitmaps;
use crate::dirty_bitmaps::dirty_bitmap::DirtyBitmap;
use crate::export::{Export, ExportId};
use crate::export_error::ExportError;
use crate::export_registry::Registry;
use crate::registered_export::RegisteredExport;

type Disk = Arc<BlockDevice<dyn BlockMap>>;

/// A backup that can begin as soon as its export is not served.
pub(crate) struct PreparedBackup {
    pub(crate) of: Arc<RegisteredExport>,
    /// The export as it is, and one in its place that copies before it writes.
    export: Arc<Export>,
    guarded: Arc<Export>,
    point: Arc<PointInTime>,
    /// The backup as an export of its own.
    backup: AnyExport,
    /// The bitmap that is frozen, and the one that takes its place.
    bitmap: Option<(Arc<DirtyBitmap>, DirtyBitmap)>,
    only_dirty: bool,
}

impl PreparedBackup {
    /// Prepares the backup of `of` that `spec` describes, in blocks of `block_bytes`.
    ///
    /// # Errors
    /// Why it cannot begin.
    pub(crate) fn new(
        of: Arc<RegisteredExport>,
        spec: BackupSpec,
        block_bytes: u64,
    ) -> Result<Self, BackupRefusal> {
        if of.backup_of().is_some() {
            return Err(BackupRefusal::IsBackup);
        }
        if of.backup().is_some() {
            return Err(BackupRefusal::HasBackup);
        }
        let export = of.export();
        let disk = export.disk().clone();
        let size = disk.size();
        let named = spec.bitmap.as_deref();
        let bitmap = named.map(|name| of.bitmaps.prepare_successor(name, size)).transpose();
        let bitmap = bitmap.map_err(BackupRefusal::Bitmap)?;
        let frozen = bitmap.as_ref().map(|(frozen, _)| frozen.clone());
        if spec.only_dirty && frozen.is_none() {
            return Err(BackupRefusal::NoBitmapNamed);
        }
        let scratch = scratch_of(&spec, size, block_bytes)?;
        let name = spec.name.clone();
        let only = frozen.clone().filter(|_| spec.only_dirty);
        let point = PointInTime::new(name.clone(), size, block_bytes, scratch, only);
        let point = Arc::new(point.ok_or(BackupRefusal::TooLarge)?);
        let guarded = disk.guarded(point.clone());
        let guarded = guarded.map_err(|error| BackupRefusal::Export(ExportError::System(error)))?;
        let guarded: Disk = Arc::new(guarded);
        let served = backup_device::device(&point, guarded.clone(), spec.discards);
        let description = format!("{} at an instant", export.description()).trim_start().to_owned();
        let served = Export::new(served, name, description)
            .with_block_size(export.block_size())
            .with_only_discards();
        let backup = AnyExport {
            bitmaps: DirtyBitmaps::of_frozen(frozen),
            backup_of: Some(of.id),
            ..AnyExport::new(served)
        };
        let guarded = Arc::new(export.on_disk(guarded));
        Ok(Self { of, export, guarded, point, backup, bitmap, only_dirty: spec.only_dirty })
    }

    /// Whether the export is as it was when this was prepared.
    fn is_current(&self) -> bool {
        Arc::ptr_eq(&self.of.export(), &self.export)
            && self.export.disk().size() == self.point.size()
            && self.bitmap.iter().all(|(frozen, _)| self.of.bitmaps.has(frozen))
    }
}

fn scratch_of(spec: &BackupSpec, size: u64, block_bytes: u64) -> Result<Scratch, BackupRefusal> {
    if spec.scratch_bytes < block_bytes {
        return Err(BackupRefusal::SmallScratch);
    }
    let has = spec.scratch.size().map_err(BackupRefusal::Scratch)?;
    if has < size.next_multiple_of(block_bytes) {
        let range = ByteRange::new(has, size - has.min(size));
        return Err(BackupRefusal::Scratch(Error::new(libc::EFBIG, Operation::Write).at(range)));
    }
    Scratch::new(spec.scratch.clone(), spec.scratch_bytes).map_err(BackupRefusal::Scratch)
}

/// Begins all of `prepared`, whose exports are not served. Returns the ids of their backups.
///
/// # Errors
/// Why one of them cannot begin: then none has.
pub(crate) fn begin(
    registry: &Registry,
    prepared: Vec<PreparedBackup>,
) -> Result<Vec<ExportId>, BackupError> {
    let refused = |of: &RegisteredExport, why| BackupError { export: of.id, why };
    if let Some(changed) = prepared.iter().find(|it| !it.is_current()) {
        return Err(refused(&changed.of, BackupRefusal::Changed));
    }
    let mut added: Vec<(ExportId, PreparedParts)> = Vec::new();
    for it in prepared {
        let (backup, parts) = PreparedParts::of(it);
        match registry.add(backup) {
            Ok(backup) => added.push((backup.id, parts)),
            Err(error) => {
                for (id, _) in added {
                    registry.remove_backup(id);
                    registry.forget_if_over(id);
                }
                return Err(refused(&parts.of, BackupRefusal::Export(error)));
            }
        }
    }
    Ok(added.into_iter().map(|(id, parts)| parts.begin(id)).collect())
}

/// A prepared backup whose export is registered.
struct PreparedParts {
    of: Arc<RegisteredExport>,
    guarded: Arc<Export>,
    bitmap: Option<(Arc<DirtyBitmap>, DirtyBitmap)>,
    running: RunningBackup,
}

impl PreparedParts {
    fn of(prepared: PreparedBackup) -> (AnyExport, Self) {
        let PreparedBackup { of, export, guarded, point, backup, bitmap, only_dirty } = prepared;
        let running = RunningBackup {
            // Its number is known when it is registered.
            id: of.id,
            name: backup.export.name().to_owned(),
            point,
            disk: export.disk().clone(),
            frozen: bitmap.as_ref().map(|(frozen, _)| frozen.clone()),
            only_dirty,
            since: SystemTime::now(),
        };
        (backup, Self { of, guarded, bitmap, running })
    }

    /// The instant: nothing fails here.
    fn begin(self, id: ExportId) -> ExportId {
        let Self { of, guarded, bitmap, running } = self;
        of.replace(guarded);
        if let Some((frozen, successor)) = bitmap {
            of.bitmaps.succeed(&frozen, successor);
            of.bitmaps.attach(of.export().bitmap_store());
        }
        tracing::info!("backup {:?} of export {:?} begins", running.name, of.export().name());
        of.set_backup(Some(Arc::new(RunningBackup { id, ..running })));
        id
    }
}

/// The backups of `exports`, all of which can end so.
///
/// # Errors
/// Why one of them cannot.
pub(crate) fn check_end(
    exports: &[Arc<RegisteredExport>],
    end: BackupEnd,
) -> Result<Vec<Arc<RunningBackup>>, BackupError> {
    let check = |of: &Arc<RegisteredExport>| {
        let running = of.backup().ok_or(BackupRefusal::NoBackup)?;
        match running.point.failure() {
            Some(why) if end == BackupEnd::Commit => Err(BackupRefusal::Failed(why.to_owned())),
            _ => Ok(running),
        }
    };
    let checked =
        exports.iter().map(|of| check(of).map_err(|why| BackupError { export: of.id, why }));
    checked.collect()
}

/// Ends the backup of an export, which is served through its guard until [`restore`].
pub(crate) fn end(of: &RegisteredExport, running: &RunningBackup, end: BackupEnd) {
    if let (Some(frozen), BackupEnd::Abort) = (&running.frozen, end) {
        of.bitmaps.merge_back(frozen, of.export().disk().size());
    }
    running.frozen.iter().for_each(|frozen| of.bitmaps.thaw(frozen));
    running.point.finish();
    let how = if end == BackupEnd::Commit { "committed" } else { "aborted" };
    tracing::info!("backup {:?} of export {:?} is {how}", running.name, of.export().name());
    of.set_backup(None);
}

/// Aborts all backups of a server that has ended, so that their bitmaps have all that was noted.
pub(crate) fn abort_all(registry: &Registry) {
    for of in registry.all() {
        if let Some(running) = of.backup() {
            end(&of, &running, BackupEnd::Abort);
            of.bitmaps.attach(of.export().bitmap_store());
        }
    }
}

/// Serves the disk of an ended backup without its guard; the export is not served.
pub(crate) fn restore(of: &RegisteredExport, running: &RunningBackup) {
    // It may have another size by now, if it is a block device.
    if let Err(error) = running.disk.refresh() {
        tracing::warn!("export {:?}: its size: {error}", of.export().name());
    }
    of.replace(Arc::new(of.export().on_disk(running.disk.clone())));
    let of_frozen = running.frozen.as_ref().and(of.export().bitmap_store().cloned());
    let Some(store) = of_frozen else { return };
    of.bitmaps.attach(Some(&store));
    if let Err(error) = store.store() {
        // The image has the bits of before, or more.
        tracing::warn!("export {:?}: its bitmaps are not stored: {error}", of.export().name());
    }
}
