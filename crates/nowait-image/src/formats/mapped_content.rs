//! The content of an image that is only read, whatever its format: a table of runs.
//!
//! Invariant: as for [`RunTable`].

use std::io;
use std::sync::Arc;

use crate::error::{ImageError, os_error};
use crate::formats::driver::{LayerMap, Status};
use crate::formats::layer::{Content, Disk, Layer};
use crate::formats::mapped_disk::{MappedDisk, Place, RunTable};
use crate::formats::raw::file_status;

/// A table, and the unit of its runs.
#[derive(Debug)]
pub(crate) struct MappedContent {
    pub(crate) table: Arc<dyn RunTable>,
    /// Like [`Content::unit`]; a power of two.
    pub(crate) unit: u64,
}

impl Content for MappedContent {
    fn unit(&self) -> Option<u64> {
        Some(self.unit)
    }

    fn disk(&self, layer: &Layer, _: Option<Disk>) -> io::Result<Disk> {
        let files = layer.data.iter().map(|file| file.storage().clone()).collect();
        let table = self.table.clone();
        Ok(Box::new(MappedDisk::new(layer.file.path(), table, files, layer.size)))
    }
}

impl Layer {
    /// Its table, if it is an image that is only read.
    pub(crate) fn table(&self) -> Option<&Arc<dyn RunTable>> {
        self.content::<MappedContent>().map(|content| &content.table)
    }
}

/// Prepares the image of `layer`, which has a [`MappedContent`], for lookups.
///
/// # Errors
/// A refusal of another one.
pub(crate) fn map(layer: &Layer) -> Result<Box<dyn LayerMap + '_>, ImageError> {
    match layer.table() {
        Some(table) => Ok(Box::new(TableMap { layer, table: &**table })),
        None => Err(ImageError::refused(layer.file.path(), "it has no table of its disk")),
    }
}

struct TableMap<'a> {
    layer: &'a Layer,
    table: &'a dyn RunTable,
}

impl LayerMap for TableMap<'_> {
    fn size(&self) -> u64 {
        self.layer.size
    }

    fn status(&mut self, pos: u64, len: u64) -> Result<Status, ImageError> {
        let looked_up = self.table.lookup(pos, len, &mut 0);
        let (place, len) = looked_up.map_err(|error| match error.errno() {
            libc::EIO => ImageError::refused(
                self.layer.file.path(),
                format!("its metadata is damaged: the entry for byte {pos}, or it was cut off"),
            ),
            _ => ImageError::os(self.layer.file.path(), "read its tables", &os_error(error)),
        })?;
        let status = Status { len, data: false, zero: false, offset: None, file: 0 };
        match place {
            Place::Zeros { present } => Ok(Status { zero: present, ..status }),
            Place::Packed { .. } => Ok(Status { data: true, ..status }),
            Place::Data { file, pos } => {
                let file = usize::from(file);
                let Some(host) = self.layer.data.get(file) else { return Ok(status) };
                let run = file_status(host, pos, len)?;
                Ok(Status { data: true, offset: Some(pos), file, ..run })
            }
        }
    }
}
