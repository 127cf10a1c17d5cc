//! Reads the bytes of a disk through the whole chain, compressed clusters included.
//!
//! Invariant: no file is written.

use std::io;
use std::path::PathBuf;

use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder};

use crate::chain::{Chain, Layer, LayerFormat};
use crate::error::ImageError;
use crate::imago_adapter::ImagoStorage;

/// A disk that is only read; several threads may read at once.
pub struct ChainReader {
    disk: FormatAccess<ImagoStorage>,
    path: PathBuf,
}

impl ChainReader {
    /// A reader of the disk of `chain`.
    ///
    /// # Errors
    /// Damage in the tables of one of its images; the errno of a failed system call.
    pub fn new(chain: &Chain) -> Result<Self, ImageError> {
        Self::below(chain, 0)
    }

    /// A reader of the disk as the image with `above` images above it in `chain` has it.
    ///
    /// # Errors
    /// As [`ChainReader::new`]; `EINVAL` if there is no such image.
    pub(crate) fn below(chain: &Chain, above: usize) -> Result<Self, ImageError> {
        let layers = chain.layers().get(above..).unwrap_or_default();
        let Some(first) = layers.first() else {
            return Err(ImageError::refused(chain.top().file.path(), "no such image below it"));
        };
        let path = first.file.path().to_owned();
        let mut below = None;
        for layer in layers.iter().rev() {
            let opened = open(layer, below.take());
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
        let read = self.disk.read(memory, pos);
        read.map_err(|error| ImageError::os(&self.path, "read", &error))
    }
}

fn open(
    layer: &Layer,
    below: Option<FormatAccess<ImagoStorage>>,
) -> io::Result<FormatAccess<ImagoStorage>> {
    let gate = DenyImplicitOpenGate::default();
    match &layer.content {
        LayerFormat::Raw => Ok(FormatAccess::new(
            Raw::builder(ImagoStorage::data(&layer.file)).write(false).open(gate)?,
        )),
        LayerFormat::Qcow2 { header, data } => {
            let image = Qcow2::<ImagoStorage>::builder(ImagoStorage::qcow2(&layer.file, header))
                .write(false)
                .backing(below)
                .data_file(data.as_ref().map(ImagoStorage::data))
                .open(gate)?;
            Ok(FormatAccess::new(image))
        }
    }
}
