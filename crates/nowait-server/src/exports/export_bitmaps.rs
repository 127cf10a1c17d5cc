//! Dirty bitmaps of the exports of a server, from any thread.
//!
//! Invariant: bitmaps are an export's, not its image's: they stay when the image is exchanged.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use crate::dirty_bitmaps::bitmap_spec::{BitmapError, BitmapSpec, BitmapStatus, RestoreError};
use crate::export::ExportId;
use crate::export_error::ExportError;
use crate::exports::Exports;
use crate::exports::change_tracker::ChangeTracker;
use crate::registered_export::RegisteredExport;

impl Exports {
    /// Adds a dirty bitmap to an export: changes that end from now on are marked in it if it is enabled.
    ///
    /// # Errors
    /// Any [`BitmapError`] but [`BitmapError::NoBitmap`]; [`BitmapError::InBackup`] for an export that is a backup, as for
    /// all changes.
    pub fn add_bitmap(&self, id: ExportId, spec: &BitmapSpec) -> Result<(), BitmapError> {
        let registered = self.changeable(id)?;
        let export = registered.export();
        registered.bitmaps.add(spec, export.disk().size(), export.smallest_block())
    }

    /// Adds a bitmap that another process has saved by [`Exports::save_bitmap`] to `content`; without that, or if it
    /// is not whole, all of it is dirty.
    ///
    /// # Errors
    /// Whether and why it has all dirty, or is not there.
    pub fn restore_bitmap(
        &self,
        id: ExportId,
        spec: &BitmapSpec,
        content: Option<&mut dyn Read>,
    ) -> Result<(), RestoreError> {
        let registered = self.of_bitmaps(id).map_err(RestoreError::NotAdded)?;
        let export = registered.export();
        let restored = registered.bitmaps.restore(spec, content, export.disk().size());
        registered.bitmaps.attach(export.bitmap_store());
        restored
    }

    /// Writes the bits of a bitmap to an empty `file`, as many as the disk needs: a bit for each granule, of bytes the
    /// lowest first. The export is paused.
    ///
    /// # Errors
    /// One line that says why the file does not have them.
    pub fn save_bitmap(&self, id: ExportId, name: &str, file: &File) -> Result<(), String> {
        let registered = self.of_bitmaps(id).map_err(|error| error.to_string())?;
        registered.bitmaps.save(name, registered.export().disk().size(), file)
    }

    /// The bitmaps of an export in the order of their addition.
    ///
    /// # Errors
    /// [`BitmapError::NoExport`].
    pub fn bitmaps(&self, id: ExportId) -> Result<Vec<BitmapStatus>, BitmapError> {
        let registered = self.of_bitmaps(id)?;
        let export = registered.export();
        let mut all = registered.bitmaps.status(export.disk().size());
        for status in &mut all {
            status.persistent = export.bitmap_store().is_some_and(|it| it.keeps(&status.spec.name));
        }
        Ok(all)
    }

    /// The properties of the bitmaps of an export, in the order of their addition. `None` if there is no such export.
    #[must_use]
    pub fn bitmap_specs(&self, id: ExportId) -> Vec<BitmapSpec> {
        self.of_bitmaps(id).map(|registered| registered.bitmaps.specs()).unwrap_or_default()
    }

    /// Removes a bitmap. A client that has selected it gets errors in its place.
    ///
    /// # Errors
    /// [`BitmapError::NoExport`], [`BitmapError::NoBitmap`], [`BitmapError::InBackup`].
    pub fn remove_bitmap(&self, id: ExportId, name: &str) -> Result<(), BitmapError> {
        self.without_backup(id, name)?.bitmaps.remove(name)?;
        self.0.review_exports();
        Ok(())
    }

    /// Marks all of a bitmap as clean. A change that ends after this has returned is marked.
    ///
    /// # Errors
    /// Like [`Exports::remove_bitmap`].
    pub fn clear_bitmap(&self, id: ExportId, name: &str) -> Result<(), BitmapError> {
        self.without_backup(id, name)?.bitmaps.clear(name)
    }

    /// Marks all of a bitmap as dirty, also while a backup has a frozen part of it.
    ///
    /// # Errors
    /// [`BitmapError::NoExport`], [`BitmapError::NoBitmap`]; [`BitmapError::InBackup`] for a backup.
    pub fn set_bitmap(&self, id: ExportId, name: &str) -> Result<(), BitmapError> {
        let registered = self.changeable(id)?;
        registered.bitmaps.set_all(name, registered.export().disk().size())
    }

    /// Stores the bitmaps of an export as they are in memory. Waits at most `timeout` for requests in flight.
    ///
    /// # Errors
    /// Those of [`Exports::pause_export`]. [`ExportError::Storage`]: the image may have the bits of before.
    pub fn store_bitmaps(&self, id: ExportId, timeout: Duration) -> Result<(), ExportError> {
        let paused = self.pause_export(id, timeout)?;
        let store = self.0.registered(id)?.export().bitmap_store().cloned();
        let stored = store.map_or(Ok(()), |store| store.store());
        drop(paused);
        stored.map_err(ExportError::Storage)
    }

    /// Has changes that end from now on marked in a bitmap, or no more.
    ///
    /// # Errors
    /// Like [`Exports::remove_bitmap`].
    pub fn enable_bitmap(
        &self,
        id: ExportId,
        name: &str,
        enabled: bool,
    ) -> Result<(), BitmapError> {
        self.changeable(id)?.bitmaps.set_enabled(name, enabled)
    }

    /// Marks in bitmap `target` what is dirty in any of `sources`, which stay as they are. The granularities may
    /// differ: what a dirty granule touches is dirty.
    ///
    /// # Errors
    /// Like [`Exports::remove_bitmap`], of any of the names; then nothing was merged.
    pub fn merge_bitmaps(
        &self,
        id: ExportId,
        target: &str,
        sources: &[String],
    ) -> Result<(), BitmapError> {
        let registered = self.changeable(id)?;
        registered.bitmaps.merge(target, sources, registered.export().disk().size())
    }

    /// Has changes that end from now on noted for a copy of the disk of an export that is made meanwhile.
    ///
    /// # Errors
    /// [`BitmapError::NoExport`]; [`BitmapError::InBackup`] for a backup; [`BitmapError::NoMemory`].
    pub fn track_changes(&self, id: ExportId) -> Result<ChangeTracker, BitmapError> {
        let registered = self.changeable(id)?;
        let bits = registered.bitmaps.add_tracker(registered.export().disk().size())?;
        Ok(ChangeTracker::new(registered, bits))
    }

    /// Gives the bitmaps of an export the bits that its disk will need with `size` bytes.
    ///
    /// # Errors
    /// [`BitmapError::NoExport`], [`BitmapError::TooLarge`], [`BitmapError::NoMemory`].
    pub fn cover_with_bitmaps(&self, id: ExportId, size: u64) -> Result<(), BitmapError> {
        self.of_bitmaps(id)?.bitmaps.cover(size)
    }

    /// The export, unless a backup of it uses bitmap `name`.
    fn without_backup(
        &self,
        id: ExportId,
        name: &str,
    ) -> Result<Arc<RegisteredExport>, BitmapError> {
        let registered = self.changeable(id)?;
        match registered.backup().is_some_and(|backup| backup.has_frozen(name)) {
            true => Err(BitmapError::InBackup),
            false => Ok(registered),
        }
    }

    /// The export, unless it is a backup: its bitmap is that of another export.
    fn changeable(&self, id: ExportId) -> Result<Arc<RegisteredExport>, BitmapError> {
        let registered = self.of_bitmaps(id)?;
        match registered.backup_of() {
            Some(_) => Err(BitmapError::InBackup),
            None => Ok(registered),
        }
    }

    fn of_bitmaps(&self, id: ExportId) -> Result<Arc<RegisteredExport>, BitmapError> {
        self.0.registry.served_export(id).ok_or(BitmapError::NoExport)
    }
}
