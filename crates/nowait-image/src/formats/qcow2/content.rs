//! An open qcow2 image: its header, as it was when it was opened.
//!
//! Invariant: the header is supported, or the caller accepts a damaged image.

use std::io;
use std::sync::Arc;

use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder};

use crate::error::ImageError;
use crate::formats::decompress::Compression;
use crate::formats::driver::{OpenTerms, Opened};
use crate::formats::imago_adapter::ImagoStorage;
use crate::formats::layer::{BackingName, Content, ImagoDisk, Layer};
use crate::formats::qcow2::encode::encode;
use crate::formats::qcow2::header::{Header, INCOMPATIBLE_DATA_FILE};
use crate::formats::qcow2::table_reader::TableReader;
use crate::image_file::ImageFile;

impl Content for Header {
    fn unit(&self) -> Option<u64> {
        Some(self.unit_bytes())
    }

    fn backing(&self) -> Option<&BackingName> {
        self.backing.as_ref()
    }

    fn disk(&self, layer: &Layer, below: Option<ImagoDisk>) -> io::Result<ImagoDisk> {
        if self.compression != Compression::Deflate || self.has_extended_l2() {
            let disk = TableReader::new(self, layer, below)?;
            let storage = ImagoStorage::mapped(&layer.file, Box::new(disk));
            let gate = DenyImplicitOpenGate::default();
            return Ok(FormatAccess::new(Raw::builder(storage).write(false).open(gate)?));
        }
        let storage =
            ImagoStorage::behind_header(&layer.file, sanitized(self), self.cluster_bytes());
        let image = Qcow2::<ImagoStorage>::builder(storage)
            .write(false)
            .backing(below)
            .data_file(layer.other_files().next().map(ImagoStorage::data))
            .open(DenyImplicitOpenGate::default())?;
        Ok(FormatAccess::new(image))
    }
}

/// A header without names and extensions, and with no bit set but the one for a data file.
fn sanitized(header: &Header) -> Vec<u8> {
    encode(&Header {
        incompatible: header.incompatible & INCOMPATIBLE_DATA_FILE,
        autoclear: 0,
        backing: None,
        snapshots: 0,
        snapshots_pos: 0,
        ..header.clone()
    })
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
