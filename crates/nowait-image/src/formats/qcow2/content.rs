//! An open qcow2 image: its header, as it was when it was opened.
//!
//! Invariant: the header is supported, or the caller accepts a damaged image.

use std::io;
use std::sync::Arc;

use crate::error::ImageError;
use crate::formats::driver::{OpenTerms, Opened};
use crate::formats::layer::{BackingName, Content, Disk, Layer};
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::table_reader::TableReader;
use crate::image_file::ImageFile;

impl Content for Header {
    fn unit(&self) -> Option<u64> {
        Some(self.unit_bytes())
    }

    fn backing(&self) -> Option<&BackingName> {
        self.backing.as_ref()
    }

    fn disk(&self, layer: &Layer, below: Option<Disk>) -> io::Result<Disk> {
        Ok(Box::new(TableReader::new(self, layer, below)?))
    }
}

impl Layer {
    /// The header, of a qcow2 image.
    #[must_use]
    pub fn header(&self) -> Option<&Header> {
        self.content()
    }
}

/// The header of `layer`, which must be a qcow2 image.
///
/// # Errors
/// A refusal of another format.
pub(crate) fn header_of(layer: &Layer) -> Result<&Header, ImageError> {
    let refused = || ImageError::refused(layer.file.path(), "it is not a qcow2 image");
    layer.header().ok_or_else(refused)
}

pub(crate) fn open(file: &Arc<ImageFile>, terms: &mut OpenTerms<'_>) -> Result<Opened, ImageError> {
    let mut header = Header::read(file)?;
    let marked = header.is_dirty() || header.is_corrupt();
    let supported = match terms.damaged && marked {
        true => header.understood(),
        false => header.supported(terms.writable),
    };
    supported.map_err(|why| ImageError::refused(file.path(), why))?;
    if let Some(snapshot) = terms.snapshot {
        header = header.of_snapshot(file, snapshot)?;
    }
    let bytes = file.size().map_err(|e| ImageError::os(file.path(), "find its size", &e))?;
    let fits = if terms.damaged { Ok(()) } else { header.fits(bytes) };
    fits.map_err(|why| ImageError::refused(file.path(), why))?;
    let data = match (header.has_data_file(), &header.data_file) {
        (false, _) => file.clone(),
        (true, Some(name)) => terms.files.data_file(file, name)?,
        (true, None) => {
            let why = "its data is in another file, whose name is not recorded";
            return Err(ImageError::refused(file.path(), why));
        }
    };
    let (size, marked_corrupt) = (header.size, header.is_corrupt());
    Ok(Opened { content: Box::new(header), size, data: vec![data], marked_corrupt })
}
