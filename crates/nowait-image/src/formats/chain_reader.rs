//! Reads the bytes of a disk through the whole chain, compressed clusters included.
//!
//! Invariant: no file is written.

use std::path::{Path, PathBuf};

use nowait::ReadCursor;

use crate::error::{ImageError, os_error};
use crate::formats::layer::{Disk, Layer};

/// A disk that is only read; several threads may read simultaneously.
pub struct ChainReader {
    disk: Disk,
    path: PathBuf,
}

impl ChainReader {
    /// A reader of the disk of the first of `layers`, each of which is followed by the image below it.
    ///
    /// # Errors
    /// Damage in the tables of one of its images; the errno of a failed system call; `EINVAL` without a
    /// layer.
    pub fn new(layers: &[Layer]) -> Result<Self, ImageError> {
        let path = layers.first().map_or(Path::new(""), |first| first.file.path()).to_owned();
        let mut below = None;
        for layer in layers.iter().rev() {
            let opened = layer.content.disk(layer, below.take());
            below = Some(opened.map_err(|e| ImageError::os(layer.file.path(), "read", &e))?);
        }
        match below {
            Some(disk) => Ok(Self { disk, path }),
            None => Err(ImageError::refused(&path, "no image")),
        }
    }

    /// Size of the disk in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.disk.size()
    }

    /// Fills `memory` with the bytes from `pos` on, all of which must be inside the disk.
    ///
    /// # Errors
    /// `EINVAL` outside the disk; damage in the metadata or in compressed data; the errno of a
    /// failed system call.
    pub fn read_at(&self, pos: u64, memory: &mut [u8]) -> Result<(), ImageError> {
        let end = pos.checked_add(memory.len() as u64);
        if end.is_none_or(|end| end > self.size()) {
            return Err(ImageError::refused(&self.path, "a read behind the end of the disk"));
        }
        let read = self.disk.read(pos, ReadCursor::from(memory));
        read.map_err(|error| ImageError::os(&self.path, "read", &os_error(error)))
    }
}
