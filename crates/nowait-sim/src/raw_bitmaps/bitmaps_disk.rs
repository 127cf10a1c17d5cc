//! A disk with a bitmap that is served, changed and looked at: a raw one, or one in a qcow2 image.
//!
//! Invariant: the code that opens, changes and closes it is that of a served disk.

use std::sync::Arc;

use nowait::sim::{SimDevice, SimOptions};
use nowait::{BlockDevice, BlockMap, BlockingFile, OpenOptions};
use nowait_image::bitmap_changes::{self, NewBitmap};
use nowait_image::create::Features;
use nowait_image::qcow2_disk::{OpenImage, Opened, ServeOptions, new_simulated, open_simulated};
use nowait_image::{
    BitmapStore, Chain, ChainOptions, ChainReader, Format, ImageFile, SimRawDisk, SimRawImage,
};

/// The step in bytes by which the file of an image grows.
const GROW_BYTES: u64 = 16 << 10;

fn told(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The disk, as one process has it before it opens it.
pub enum BitmapsDisk {
    /// A raw disk and the file with its bitmaps.
    Raw(Box<SimRawDisk>),
    /// A qcow2 image.
    Qcow2(Arc<SimDevice>),
}

impl BitmapsDisk {
    /// The device of a disk of `disk.bytes` bytes: of a new image with clusters of `1 << cluster_bits` bytes, if that is given.
    ///
    /// # Errors
    /// The image could not be made.
    pub fn device(disk: SimOptions, cluster_bits: Option<u32>) -> Result<Arc<SimDevice>, String> {
        let Some(bits) = cluster_bits else { return Ok(Arc::new(SimDevice::new(disk))) };
        let image = new_simulated(disk.bytes, bits, Features::default(), None).map_err(told)?;
        let device = Arc::new(SimDevice::new(SimOptions { bytes: 0, grows: true, ..disk }));
        device.put_on(None, &image);
        Ok(device)
    }

    fn chain(device: &Arc<SimDevice>, writable: bool) -> Result<Chain, String> {
        let files = vec![(ImageFile::simulated(device, 0), Format::Qcow2)];
        let options = ChainOptions { writable, ..ChainOptions::default() };
        Chain::simulated(files, options).map_err(told)
    }

    /// Adds a bitmap.
    ///
    /// # Errors
    /// One line.
    pub fn add(&self, new: &NewBitmap) -> Result<(), String> {
        match self {
            Self::Raw(disk) => disk.place().add(new).map_err(told),
            Self::Qcow2(device) => {
                bitmap_changes::add(&Self::chain(device, true)?, new, None).map_err(told)
            }
        }
    }

    /// Clears the bitmap `name`.
    ///
    /// # Errors
    /// One line.
    pub fn clear(&self, name: &str) -> Result<(), String> {
        match self {
            Self::Raw(disk) => disk.place().clear(name).map_err(told),
            Self::Qcow2(device) => {
                bitmap_changes::clear(&Self::chain(device, true)?, name).map_err(told)
            }
        }
    }

    /// Removes the bitmap `name`.
    ///
    /// # Errors
    /// One line.
    pub fn remove(&self, name: &str) -> Result<(), String> {
        match self {
            Self::Raw(disk) => disk.place().remove(name).map_err(told),
            Self::Qcow2(device) => {
                bitmap_changes::remove(&Self::chain(device, true)?, name).map_err(told)
            }
        }
    }

    /// Opens the disk for writing.
    ///
    /// # Errors
    /// One line.
    pub fn open(&self, options: OpenOptions) -> Result<OpenDisk, String> {
        let device = match self {
            Self::Raw(disk) => {
                return disk.open(options).map(Box::new).map(OpenDisk::Raw).map_err(told);
            }
            Self::Qcow2(device) => device,
        };
        let OpenOptions { direct, cache_holes, .. } = options;
        let options = ServeOptions { writable: true, direct, cache_holes };
        let Opened { top, below, size, map, open_image } =
            open_simulated(Self::chain(device, true)?, options, GROW_BYTES).map_err(told)?;
        let disk = Arc::new(BlockDevice::mapped(top, below, size, false, map));
        Ok(OpenDisk::Qcow2(disk, Box::new(open_image)))
    }

    /// The content of the disk on `device`, of `size` bytes, which is in an image if `is_qcow2`.
    ///
    /// # Errors
    /// One line.
    pub fn content(device: &Arc<SimDevice>, size: u64, is_qcow2: bool) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; size as usize];
        if is_qcow2 {
            let chain = Self::chain(device, false)?;
            let reader = ChainReader::new(chain.layers()).map_err(told)?;
            reader.read_at(0, &mut bytes).map_err(told)?;
        } else {
            device.peek(0, 0, &mut bytes);
        }
        Ok(bytes)
    }
}

/// An open disk with its bitmap.
pub enum OpenDisk {
    /// A raw disk.
    Raw(Box<SimRawImage>),
    /// A qcow2 image.
    Qcow2(Arc<BlockDevice<dyn BlockMap>>, Box<OpenImage>),
}

impl OpenDisk {
    /// The disk.
    #[must_use]
    pub const fn device(&self) -> &Arc<BlockDevice<dyn BlockMap>> {
        match self {
            Self::Raw(image) => image.device(),
            Self::Qcow2(device, _) => device,
        }
    }

    /// The bitmaps, if there are any.
    #[must_use]
    pub fn store(&self) -> Option<&Arc<BitmapStore>> {
        match self {
            Self::Raw(image) => image.store(),
            Self::Qcow2(_, image) => image.bitmaps(),
        }
    }

    /// Closes it as a server does.
    ///
    /// # Errors
    /// One line.
    pub fn close(self) -> Result<(), String> {
        match self {
            Self::Raw(image) => image.close().map_err(told),
            Self::Qcow2(device, image) => {
                BlockingFile::new(device).flush().map_err(told)?;
                image.close().map_err(told)
            }
        }
    }
}
