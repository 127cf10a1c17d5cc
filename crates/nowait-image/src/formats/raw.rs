//! The raw format: the disk's bytes and nothing else.
//!
//! Invariant: an image is as long as its disk.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;

use nowait::{Error, ReadCursor};

use crate::error::ImageError;
use crate::formats::driver::{
    CreateTerms, Creation, Driver, ImageInfo, LayerMap, OpenTerms, Opened, Preallocation, Status,
};
use crate::formats::format::Format;
use crate::formats::layer::{BackingName, Content, Disk, Layer};
use crate::formats::mapped_disk::DiskReader;
use crate::image_file::{ImageFile, NO_MEDIUM};

/// QEMU counts the size of a disk in sectors, rounded up, in the output of `qemu-img map`.
const SECTOR_BYTES: u64 = 512;

pub(crate) const DRIVER: Driver = Driver {
    format: Format::Raw,
    name: "raw",
    aliases: &["file", "host_device"],
    endings: &[],
    guessed_ending: None,
    size_unit: 1,
    writable: true,
    has_snapshots: false,
    magics: &[],
    open,
    create: Some(Creation { check: check_terms, write, builder: None }),
    check: None,
    map: |layer| Ok(Box::new(FileMap { file: &layer.file, size: layer.size })),
    resize: Some(|layers, size| layers.first().map_or(Ok(()), |top| resize(top, size))),
    commit: None,
    info: no_info,
};

#[derive(Debug)]
struct RawContent;

impl Content for RawContent {
    fn unit(&self) -> Option<u64> {
        None
    }

    fn disk(&self, layer: &Layer, _: Option<Disk>) -> io::Result<Disk> {
        Ok(Box::new(FileDisk { file: layer.file.clone(), size: layer.size }))
    }
}

/// The bytes of a file.
#[derive(Debug)]
struct FileDisk {
    file: Arc<ImageFile>,
    size: u64,
}

impl DiskReader for FileDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, pos: u64, mut memory: ReadCursor<'_>) -> Result<(), Error> {
        let inside = memory.len().min(self.size.saturating_sub(pos));
        let mut part = memory.take(inside);
        self.file.storage().read_at(pos, &mut part)?;
        part.fill(0);
        memory.fill(0);
        Ok(())
    }
}

fn open(file: &Arc<ImageFile>, _: &mut OpenTerms<'_>) -> Result<Opened, ImageError> {
    let size = file.size().map_err(|e| ImageError::os(file.path(), "find its size", &e))?;
    if size == 0 && file.is_block_device() {
        return Err(ImageError::refused(file.path(), NO_MEDIUM));
    }
    let (content, data) = (Box::new(RawContent), vec![file.clone()]);
    Ok(Opened { content, size, data, marked_corrupt: false })
}

fn check_terms(terms: CreateTerms) -> Result<(), String> {
    let refused = if terms.has_backing {
        "a raw image has no backing file (take --format qcow2)"
    } else if terms.cluster_bytes.is_some() {
        "a raw image has no clusters (leave out --cluster-size, or take --format qcow2)"
    } else if terms.features.compression.is_some() {
        "a raw image has no compressed clusters (leave out --compression, or take --format qcow2)"
    } else if terms.features.extended_l2 {
        "a raw image has no L2 entries (leave out --extended-l2, or take --format qcow2)"
    } else if terms.preallocation == Preallocation::Metadata {
        "a raw image has no metadata to preallocate (take falloc, or --format qcow2)"
    } else {
        return Ok(());
    };
    Err(refused.into())
}

fn write(
    file: &ImageFile,
    size: u64,
    _: Option<BackingName>,
    terms: CreateTerms,
) -> Result<io::Result<()>, String> {
    Ok(match terms.preallocation == Preallocation::Off || size == 0 {
        true => file.set_len(size),
        false => file.reserve(size),
    })
}

/// Makes a raw image `size` bytes large.
pub(crate) fn resize(layer: &Layer, size: u64) -> Result<(), ImageError> {
    let file = &layer.file;
    let failed = |error: io::Error| ImageError::os(file.path(), "resize it", &error);
    if size == layer.size {
        return Ok(());
    }
    if file.is_block_device() {
        let why = format!("a block device of {} bytes cannot get another size", layer.size);
        return Err(ImageError::refused(file.path(), why));
    }
    file.set_len(size).and_then(|()| file.sync()).map_err(failed)
}

fn no_info(_: &ImageFile, _: &Path, _: Option<&OsStr>) -> Result<Option<ImageInfo>, ImageError> {
    Ok(None)
}

/// The data and the holes of a file.
struct FileMap<'a> {
    file: &'a ImageFile,
    size: u64,
}

impl LayerMap for FileMap<'_> {
    fn size(&self) -> u64 {
        self.size.next_multiple_of(SECTOR_BYTES)
    }

    fn status(&mut self, pos: u64, len: u64) -> Result<Status, ImageError> {
        file_status(self.file, pos, len)
    }
}

/// Whether `file` has data at `pos`, or a hole, for at most `len` bytes.
pub(crate) fn file_status(file: &ImageFile, pos: u64, len: u64) -> Result<Status, ImageError> {
    let run = file.run(pos, len).map_err(|e| ImageError::os(file.path(), "look for holes", &e));
    let status = Status { len, data: false, zero: true, offset: Some(pos), file: 0 };
    Ok(match run? {
        // Behind the end of the file all bytes are zeros.
        None => status,
        // A hole at the end of the file continues behind it.
        Some(run)
            if run.hole && run.len < len && file.size().is_ok_and(|end| pos + run.len >= end) =>
        {
            status
        }
        Some(run) => Status { len: run.len, data: !run.hole, zero: run.hole, ..status },
    })
}
