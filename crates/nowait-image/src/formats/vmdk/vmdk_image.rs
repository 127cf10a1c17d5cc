//! Opens a VMDK image: its descriptor, and the files that it names.
//!
//! Invariant: each file was open before its bytes are told to be in it, and is long enough for them.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, json};

use crate::error::{ImageError, plain};
use crate::formats::driver::{Fact, ImageInfo, OpenTerms, Opened};
use crate::formats::format::Format;
use crate::formats::mapped_content::MappedContent;
use crate::formats::vmdk::descriptor::{Descriptor, Extent, FIRST_LINE, Kind, MAX_BYTES};
use crate::formats::vmdk::grains::{Extents, Grains, PlacedExtent, Source};
use crate::formats::vmdk::sparse_header::{MAGIC, SparseHeader};
use crate::image_file::ImageFile;

/// The unit of the runs of flat extents.
const FLAT_UNIT: u64 = 64 << 10;

/// Contents of the file of an image.
struct Found {
    descriptor: Descriptor,
    /// The header, if the file itself is a sparse extent, which has all of the disk.
    header: Option<SparseHeader>,
}

impl Found {
    fn read(file: &ImageFile) -> Result<Self, ImageError> {
        let failed = |error: std::io::Error| ImageError::os(file.path(), "read", &error);
        let refused = |why: String| ImageError::refused(file.path(), why);
        let bytes = file.size().map_err(failed)?;
        let mut first = MAGIC.map(|_| 0);
        file.read_at(0, &mut first).map_err(failed)?;
        let header = (first == MAGIC).then(|| SparseHeader::read(file)).transpose()?;
        let (at, len) = header.map_or((0, bytes), |header| header.descriptor);
        if len == 0 {
            let why = "it is a part of an image, without a descriptor (name the file with the descriptor)";
            return Err(refused(why.into()));
        }
        // The sectors of one in a sparse extent are not all used.
        if header.is_none() && len > MAX_BYTES {
            return Err(refused(format!("its descriptor has more than {MAX_BYTES} bytes")));
        }
        let mut text = vec![0; len.min(MAX_BYTES) as usize];
        file.read_at(at, &mut text).map_err(failed)?;
        if header.is_none() && !text.starts_with(FIRST_LINE) {
            return Err(refused("it does not begin like a vmdk image".into()));
        }
        let descriptor = Descriptor::parse(&text).map_err(refused)?;
        match (&header, &*descriptor.extents) {
            (_, []) => Err(refused("its descriptor names no extents".into())),
            (None, _) | (Some(_), [Extent { kind: Kind::Sparse { .. }, .. }]) => {
                Ok(Self { descriptor, header })
            }
            _ => Err(refused("its descriptor is damaged: it is in one of several extents".into())),
        }
    }

    fn size(&self) -> u64 {
        self.header.map_or_else(|| self.descriptor.size(), |header| header.capacity)
    }
}

pub(super) fn open(file: &Arc<ImageFile>, terms: &mut OpenTerms<'_>) -> Result<Opened, ImageError> {
    let found = Found::read(file)?;
    let size = found.size();
    let mut opened = Placing { extents: Vec::new(), data: Vec::new(), unit: u64::MAX };
    match found.header {
        Some(header) => opened.sparse(header, file.clone(), header.capacity)?,
        None => {
            for extent in &found.descriptor.extents {
                opened.place(file, extent, terms)?;
            }
        }
    }
    let Placing { extents, mut data, unit } = opened;
    if data.is_empty() {
        data.push(file.clone());
    }
    let unit = if unit == u64::MAX { FLAT_UNIT } else { unit };
    let content = Box::new(MappedContent { table: Arc::new(Extents(extents)), unit });
    Ok(Opened { content, size, data, marked_corrupt: false })
}

/// The extents that have their place already.
struct Placing {
    extents: Vec<PlacedExtent>,
    data: Vec<Arc<ImageFile>>,
    /// The smallest unit of their runs.
    unit: u64,
}

impl Placing {
    fn place(
        &mut self,
        image: &Arc<ImageFile>,
        extent: &Extent,
        terms: &mut OpenTerms<'_>,
    ) -> Result<(), ImageError> {
        let mut open = |name: &str| terms.files.extent_file(image, OsStr::new(name));
        match &extent.kind {
            Kind::Zero => {
                self.push(extent.len, Source::Zero);
                Ok(())
            }
            Kind::Flat { name, pos } => {
                let file = open(name)?;
                let end = bytes_of(&file)?;
                if pos.checked_add(extent.len).is_none_or(|needed| needed > end) {
                    let needed = pos.saturating_add(extent.len);
                    let why = format!("it was cut off: it has {end} bytes of {needed}");
                    return Err(ImageError::refused(file.path(), why));
                }
                self.push(extent.len, Source::Flat { pos: *pos });
                self.data.push(file);
                self.unit = self.unit.min(FLAT_UNIT);
                Ok(())
            }
            Kind::Sparse { name } => {
                let file = open(name)?;
                let header = SparseHeader::read(&file)?;
                if header.capacity < extent.len {
                    let why = "it has less of the disk than the descriptor says";
                    return Err(ImageError::refused(file.path(), why));
                }
                self.sparse(header, file, extent.len)
            }
        }
    }

    fn sparse(
        &mut self,
        header: SparseHeader,
        file: Arc<ImageFile>,
        len: u64,
    ) -> Result<(), ImageError> {
        let end = bytes_of(&file)?;
        self.push(len, Source::Sparse(Grains::new(header, file.clone(), end)));
        self.data.push(file);
        self.unit = self.unit.min(header.grain);
        Ok(())
    }

    fn push(&mut self, len: u64, source: Source) {
        let start = self.extents.last().map_or(0, |last| last.end);
        // The descriptor has no more extents than fit.
        let file = u8::try_from(self.data.len()).unwrap_or(u8::MAX);
        self.extents.push(PlacedExtent { start, end: start + len, file, source });
    }
}

fn bytes_of(file: &ImageFile) -> Result<u64, ImageError> {
    file.size().map_err(|error| ImageError::os(file.path(), "find its size", &error))
}

pub(super) fn info(
    file: &ImageFile,
    _: &Path,
    _: Option<&OsStr>,
) -> Result<Option<ImageInfo>, ImageError> {
    let found = Found::read(file)?;
    let (size, Found { descriptor, header }) = (found.size(), found);
    let kind = plain(&descriptor.create_type);
    let mut json = Map::new();
    json.insert("virtual-size".into(), json!(size));
    let data = json!({ "create-type": descriptor.create_type, "cid": descriptor.cid });
    json.insert("format-specific".into(), json!({ "type": "vmdk", "data": data }));
    let mut lines = vec![("type", Fact::Words(kind))];
    if let Some(header) = header {
        json.insert("cluster-size".into(), json!(header.grain));
        lines.push(("grain size", Fact::Bytes(header.grain)));
    }
    let count = descriptor.extents.len();
    lines.push(("extents", Fact::Words(count.to_string())));
    Ok(Some(ImageInfo {
        format: Format::Vmdk,
        title: "vmdk".into(),
        size,
        json,
        lines,
        note: Some("it is only read".into()),
    }))
}
