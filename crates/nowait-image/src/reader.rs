//! The bytes of a disk, read through the whole chain, compressed clusters included.
//!
//! Invariant: nothing is written. Knows: chain, error, storage. Known by: offline commands.

use std::io;
use std::path::PathBuf;

use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder};

use crate::chain::{Chain, Content, Layer};
use crate::error::ImageError;
use crate::storage::Below;

/// A disk that is read, by several threads at once if need be.
pub struct Reader {
    disk: FormatAccess<Below>,
    path: PathBuf,
}

impl Reader {
    /// Reads the disk of `chain`.
    ///
    /// # Errors
    /// What is wrong with the tables of one of its images, or what the system said.
    pub fn new(chain: &Chain) -> Result<Self, ImageError> {
        Self::below(chain, 0)
    }

    /// Reads the disk that the image with `above` images above it is in `chain`.
    ///
    /// # Errors
    /// As [`Reader::new`]; `EINVAL` if there is no such image.
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
    /// `EINVAL` outside the disk; what is wrong with the metadata or with compressed data; what
    /// the system said.
    pub fn read_at(&self, pos: u64, memory: &mut [u8]) -> Result<(), ImageError> {
        let end = pos.checked_add(memory.len() as u64);
        if end.is_none_or(|end| end > self.size()) {
            return Err(ImageError::refused(&self.path, "a read behind the end of the disk"));
        }
        let read = self.disk.read(memory, pos);
        read.map_err(|error| ImageError::os(&self.path, "read", &error))
    }
}

fn open(layer: &Layer, below: Option<FormatAccess<Below>>) -> io::Result<FormatAccess<Below>> {
    let gate = DenyImplicitOpenGate::default();
    match &layer.content {
        Content::Raw => {
            Ok(FormatAccess::new(Raw::builder(Below::data(&layer.file)).write(false).open(gate)?))
        }
        Content::Qcow2 { header, data } => {
            let image = Qcow2::<Below>::builder(Below::qcow2(&layer.file, header))
                .write(false)
                .backing(below)
                .data_file(data.as_ref().map(Below::data))
                .open(gate)?;
            Ok(FormatAccess::new(image))
        }
    }
}
