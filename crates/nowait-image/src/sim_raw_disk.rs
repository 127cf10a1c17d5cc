//! A raw disk with bitmaps, on simulated devices.
//!
//! Invariant: the bitmaps are opened, changed and closed exactly as those of a disk that is served; a process that has ended
//! changes nothing any more.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use nowait::sim::SimDevice;
use nowait::{BlockDevice, BlockMap, BlockingFile, Error, OpenOptions, SimStorage};

use crate::chain::{ChainOptions, Locking};
use crate::error::{ImageError, os_error};
use crate::image_file::{ImageFile, Opening};
use crate::open_bitmaps::RawBitmaps;
use crate::qcow2_disk::bitmap_store::BitmapStore;
use crate::raw_bitmaps::BitmapsPlace;
use crate::raw_bitmaps::bitmaps_file_system::{BitmapsFileSystem, Fill};
use crate::raw_bitmaps::disk_record::RawDisk;
use crate::warning::Warning;

/// The file with the bitmaps, which is a device of its own; there is none while that is empty.
struct SimFile {
    device: Arc<SimDevice>,
    /// The ends of processes before this one.
    power_cuts: u64,
}

impl fmt::Debug for SimFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimFile").finish_non_exhaustive()
    }
}

impl BitmapsFileSystem for SimFile {
    fn is_there(&self, _: &Path) -> bool {
        self.device.bytes() > 0
    }

    fn open(&self, _: &Path, _: Opening) -> Result<ImageFile, ImageError> {
        Ok(ImageFile::simulated(&self.device, 0))
    }

    fn write(&self, path: &Path, _: bool, fill: Fill<'_>) -> Result<(), ImageError> {
        let failed = |error: std::io::Error| ImageError::os(path, "write", &error);
        let file = ImageFile::in_memory(path).map_err(failed)?;
        fill(&file)?;
        let bytes = file.content().map_err(failed)?;
        if self.device.power_cuts() != self.power_cuts {
            return Err(failed(std::io::Error::from_raw_os_error(libc::EIO)));
        }
        self.device.put_on(None, &bytes);
        Ok(())
    }

    fn sync_directory_of(&self, _: &Path) -> std::io::Result<()> {
        Ok(())
    }
}

/// A raw disk and its bitmaps, as one process sees them.
pub struct SimRawDisk {
    disk: Arc<SimDevice>,
    place: BitmapsPlace,
}

impl SimRawDisk {
    /// The disk on `disk` with the bitmaps in `bitmaps`, a file that grows and is empty as long as there are none.
    #[must_use]
    pub fn new(disk: &Arc<SimDevice>, bitmaps: &Arc<SimDevice>) -> Self {
        let file = Arc::new(ImageFile::simulated(disk, 0));
        let file_system = SimFile { device: bitmaps.clone(), power_cuts: bitmaps.power_cuts() };
        let place = BitmapsPlace {
            path: "bitmaps".into(),
            disk_path: "disk".into(),
            disk: RawDisk::simulated(file),
            file_system: Arc::new(file_system),
        };
        Self { disk: disk.clone(), place }
    }

    /// Where the bitmaps are.
    #[must_use]
    pub const fn place(&self) -> &BitmapsPlace {
        &self.place
    }

    /// Opens the disk for writing.
    ///
    /// # Errors
    /// Like [`crate::open()`]. Also a file with bitmaps that is not used, for which a served disk has a warning only.
    pub fn open(&self, options: OpenOptions) -> Result<SimRawImage, ImageError> {
        let locking = Locking::Unlocked;
        let chain = ChainOptions { writable: true, locking, ..ChainOptions::default() };
        let mut warnings = Vec::new();
        let bitmaps = RawBitmaps::at(Some(self.place.clone()), false, &chain, &mut warnings)?;
        if let Some(Warning::UnusedBitmaps(path, why)) = warnings.first() {
            return Err(ImageError::refused(path, why.clone()));
        }
        let failed = |error| ImageError::os(self.place.path(), "open", &os_error(error));
        let storage = Arc::new(SimStorage::open(&self.disk, 0, options));
        let device = BlockDevice::raw(storage, options).map_err(failed)?;
        device.scan();
        let device: Arc<BlockDevice<dyn BlockMap>> = Arc::new(device);
        let store = bitmaps.open.as_ref().and_then(|open| open.store.clone());
        let device = match store {
            Some(store) => Arc::new(device.always_guarded(store).map_err(failed)?),
            None => device,
        };
        Ok(SimRawImage { device, bitmaps })
    }
}

/// An open disk with its bitmaps.
pub struct SimRawImage {
    device: Arc<BlockDevice<dyn BlockMap>>,
    bitmaps: RawBitmaps,
}

impl SimRawImage {
    /// The disk.
    #[must_use]
    pub const fn device(&self) -> &Arc<BlockDevice<dyn BlockMap>> {
        &self.device
    }

    /// The bitmaps, if there are any.
    #[must_use]
    pub fn store(&self) -> Option<&Arc<BitmapStore>> {
        self.bitmaps.open.as_ref().and_then(|open| open.store.as_ref())
    }

    /// Like [`crate::Image::close`].
    ///
    /// # Errors
    /// Like [`crate::Image::close`].
    pub fn close(self) -> Result<(), Error> {
        self.device.give_back();
        BlockingFile::new(self.device.clone()).flush()?;
        self.store().map_or(Ok(()), |store| store.release())
    }
}
