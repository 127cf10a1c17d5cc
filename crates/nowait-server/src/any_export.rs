//! An export and the devices that it comes with.
//!
//! Invariant: a device is not served before the export is registered.

use std::io::Read;
use std::sync::Arc;

use nowait_image::Image;

use crate::dirty_bitmaps::DirtyBitmaps;
use crate::dirty_bitmaps::bitmap_spec::{BitmapError, BitmapSpec, RestoreError};
use crate::export::{Export, ExportId};
use crate::frontends::export_device::NewDevice;
use crate::server_options::ExportOptions;

/// An export that clients can choose.
pub struct AnyExport {
    pub(crate) export: Arc<Export>,
    /// The devices that it is for other clients than NBD's.
    pub(crate) devices: Vec<NewDevice>,
    pub(crate) bitmaps: DirtyBitmaps,
    /// The export whose backup it is.
    pub(crate) backup_of: Option<ExportId>,
}

impl AnyExport {
    /// Clients see the name and the description of `export`.
    #[must_use]
    pub fn new(export: Export) -> Self {
        let (export, bitmaps) = (Arc::new(export), DirtyBitmaps::default());
        Self { export, devices: Vec::new(), bitmaps, backup_of: None }
    }

    /// The export of an open image, which has to stay open until the server has stopped.
    #[must_use]
    pub fn of_image(image: &Image, options: ExportOptions) -> Self {
        let export = Export::new(image.device(), options.name, options.description)
            .with_block_size(options.block_size)
            .with_bitmap_store(image.bitmap_store().cloned());
        Self::new(match options.when_a_flush_fails {
            Some(callback) => export.when_a_flush_fails(callback),
            None => export,
        })
    }

    /// This export as `device`, too: a [`DeviceSocket`](crate::DeviceSocket) of virtual machines, or a local block device,
    /// [`UblkDevice`](crate::UblkDevice), whose queues the threads of the server serve.
    #[must_use]
    pub fn with_device(mut self, device: impl Into<NewDevice>) -> Self {
        self.devices.push(device.into());
        self
    }

    /// An export with a dirty bitmap, in which all changes are from the first on.
    ///
    /// # Errors
    /// Like [`crate::Exports::add_bitmap`].
    pub fn with_bitmap(self, spec: &BitmapSpec) -> Result<Self, BitmapError> {
        let (size, block) = (self.export.disk().size(), self.export.smallest_block());
        self.bitmaps.add(spec, size, block)?;
        Ok(self)
    }

    /// Whether it has a dirty bitmap of this name.
    #[must_use]
    pub fn has_bitmap(&self, name: &str) -> bool {
        self.bitmaps.names().iter().any(|bitmap| &*bitmap.name == name)
    }

    /// Adds a dirty bitmap whose bits are in `content`: one for each granule of the disk, of each byte the lowest first.
    ///
    /// # Errors
    /// Like [`crate::Exports::restore_bitmap`].
    pub fn add_stored_bitmap(
        &self,
        spec: &BitmapSpec,
        content: &mut dyn Read,
    ) -> Result<(), RestoreError> {
        let restored = self.bitmaps.restore(spec, Some(content), self.export.disk().size());
        self.bitmaps.attach(self.export.bitmap_store());
        restored
    }
}
