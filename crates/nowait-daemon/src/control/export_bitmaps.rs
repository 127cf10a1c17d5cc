//! Dirty bitmaps of an export behind the control interface: in memory, and in its image.
//!
//! Invariant: a bitmap that is stored in the image has there what it has in memory, or more, before a change is answered.

use nowait_control::{AddBitmap, BitmapInfo, ControlError};
use nowait_image::bitmap_changes::NewBitmap;
use nowait_server::BitmapError;

use crate::control::bitmap_answers::{self, refused};
use crate::disks::allowed_places::AllowedPlaces;
use crate::disks::image_exchange::ImageExchange;

/// The bitmaps of an export.
pub(crate) struct ExportBitmaps<'a>(pub(crate) ImageExchange<'a>);

impl ExportBitmaps<'_> {
    /// All of them: those that are served, and those of the image whose bits are lost.
    ///
    /// # Errors
    /// There is no such export.
    pub(crate) fn list(&self) -> Result<Vec<BitmapInfo>, ControlError> {
        let ImageExchange { exports, id, .. } = self.0;
        let all = exports.bitmaps(id).map_err(refused)?;
        let all = all.into_iter().map(bitmap_answers::info_of);
        let lost = self.0.lost_bitmaps()?;
        Ok(all.chain(lost.into_iter().map(bitmap_answers::info_of_lost)).collect())
    }

    fn named(&self, name: &str) -> Result<BitmapInfo, ControlError> {
        let named = self.list()?.into_iter().find(|bitmap| bitmap.name == name);
        named.ok_or_else(|| refused(BitmapError::NoBitmap))
    }

    /// Adds a bitmap, in the image where it is to be stored, or beside it where that is `allowed`.
    ///
    /// # Errors
    /// Why it is not there.
    pub(crate) fn add(
        &self,
        bitmap: AddBitmap,
        allowed: &AllowedPlaces,
    ) -> Result<BitmapInfo, ControlError> {
        let ImageExchange { exports, id, .. } = self.0;
        let can_store = self.0.can_store_bitmaps(allowed)?;
        let is_stored = bitmap.persistent.unwrap_or(can_store.is_ok());
        if let (true, Err(why)) = (is_stored, can_store) {
            let why =
                format!("its bitmaps cannot be stored: {why} (leave it in memory: --temporary)");
            return Err(ControlError::Conflict(why));
        }
        let spec = bitmap_answers::spec_of(bitmap);
        if self.0.lost_bitmaps()?.iter().any(|lost| lost.name == spec.name) {
            return Err(refused(BitmapError::Exists));
        }
        exports.add_bitmap(id, &spec).map_err(refused)?;
        if is_stored {
            let added = self.0.add_bitmap(&NewBitmap::from(&spec));
            if let Err(error) = added {
                let _ = exports.remove_bitmap(id, &spec.name);
                return Err(error);
            }
        }
        self.named(&spec.name)
    }

    /// Removes a bitmap, also from the image.
    ///
    /// # Errors
    /// There is none of that name; why it stays.
    pub(crate) fn remove(&self, name: &str) -> Result<(), ControlError> {
        let ImageExchange { exports, id, .. } = self.0;
        let BitmapInfo { persistent, inconsistent, .. } = self.named(name)?;
        if persistent {
            self.0.remove_bitmap(name)?;
        }
        match inconsistent {
            true => Ok(()),
            false => exports.remove_bitmap(id, name).map_err(refused),
        }
    }

    /// Marks all of bitmap `name` as clean, also in the image.
    ///
    /// # Errors
    /// There is none of that name; why it is as it was.
    pub(crate) fn clear(&self, name: &str) -> Result<(), ControlError> {
        let ImageExchange { exports, id, .. } = self.0;
        match self.usable(name)?.persistent {
            true => self.0.clear_bitmap(name, || {
                // It cannot fail: nothing else changes bitmaps meanwhile.
                let _ = exports.clear_bitmap(id, name);
            }),
            false => exports.clear_bitmap(id, name).map_err(refused),
        }
    }

    /// Bitmap `name`, whose bits are there.
    fn usable(&self, name: &str) -> Result<BitmapInfo, ControlError> {
        let named = self.named(name)?;
        if named.inconsistent {
            let why = "its bits are lost: it can only be removed";
            return Err(ControlError::Conflict(why.into()));
        }
        Ok(named)
    }

    /// Has `change` change bitmap `name`, and the image if it is stored there. Returns what it is then.
    ///
    /// # Errors
    /// That of `change`; why it is not stored.
    pub(crate) fn change(
        &self,
        name: &str,
        change: impl FnOnce() -> Result<(), BitmapError>,
    ) -> Result<BitmapInfo, ControlError> {
        match self.usable(name)?.persistent {
            true => self.0.change_bitmaps(|| change().map_err(refused))?,
            false => change().map_err(refused)?,
        }
        self.named(name)
    }
}
