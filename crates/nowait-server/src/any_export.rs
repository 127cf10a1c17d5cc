//! An export and the devices that it comes with.
//!
//! Invariant: a device is not served before the export is registered.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use nowait_image::Image;

use crate::dirty_bitmaps::DirtyBitmaps;
use crate::dirty_bitmaps::bitmap_spec::{BitmapError, BitmapSpec, RestoreError};
use crate::export::{Export, ExportId};
use crate::frontends::NewDevice;
use crate::net::listener::Listener;
use crate::server_options::ExportOptions;
use crate::ublk::ublk_device::UblkDevice;
use crate::vhost_user::control_thread::DeviceSocket;

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

    /// An export that is also a vhost-user-blk device for the virtual machines that connect to
    /// `listener`, a Unix socket: for one after the other.
    #[must_use]
    pub fn at_vhost_user(self, listener: Listener) -> Self {
        self.with(NewDevice::VhostUser(DeviceSocket::Listener(listener)))
    }

    /// An export for the only virtual machine at the other end of `connection`. A server that clients
    /// can reach by nothing else stops when the machine has left.
    #[must_use]
    pub fn at_vhost_user_connection(self, connection: UnixStream) -> Self {
        self.with(NewDevice::VhostUser(DeviceSocket::Connected(connection)))
    }

    /// Like [`AnyExport::at_vhost_user`], for the virtual machines whose VMMs listen at the Unix socket `path`, one after the other: it is
    /// connected to, every second until it is there, and again when the VMM has left.
    #[must_use]
    pub fn at_listening_vmm(self, path: PathBuf) -> Self {
        self.with(NewDevice::VhostUser(DeviceSocket::ConnectsTo(path)))
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

    /// This export as the local block device `device`, too, whose queues the threads of the server serve.
    #[must_use]
    pub fn at_ublk(self, device: Arc<UblkDevice>) -> Self {
        self.with(NewDevice::Ublk(device))
    }

    fn with(mut self, device: NewDevice) -> Self {
        self.devices.push(device);
        self
    }
}
