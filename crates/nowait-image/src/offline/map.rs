//! The map of a disk: which bytes are data, zeros or unallocated, in which image of the chain, and
//! at which position. Prints what `qemu-img map --output=json` prints, byte for byte.
//!
//! Invariant: the entries cover the disk in order and without gaps; two entries that can be merged
//! are merged.

use std::io::{self, Write};

use crate::chain::{Chain, Layer, LayerFormat};
use crate::error::{ImageError, plain};
use crate::formats::qcow2::entries::Cluster;
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::layout::SECTOR_BYTES;
use crate::formats::qcow2::lookup::Tables;
use crate::formats::qcow2::refcounts::Refcounts;
use crate::image_file::ImageFile;

/// The output of `qemu-img map` for a disk of no bytes.
const NO_BYTES: &[u8] = b"{ \"start\": 0, \"length\": 0, \"depth\": 0, \"present\": false, \
                          \"zero\": false, \"data\": false}";

/// A run of bytes of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// First byte on the disk.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// The image of the chain that has the mapping; 0 is the top one.
    pub depth: usize,
    /// Whether that image has a mapping here, including zeros.
    pub present: bool,
    /// Whether it reads as zeros.
    pub zero: bool,
    /// Whether there is data, compressed or not.
    pub data: bool,
    /// Position of the data in the file, in bytes, if it is there uncompressed.
    pub offset: Option<u64>,
}

impl MapEntry {
    /// Whether `next`, which follows, can be merged into this entry.
    fn can_merge(&self, next: &Self) -> bool {
        let kind = |entry: &Self| (entry.depth, entry.present, entry.zero, entry.data);
        let follows = match (self.offset, next.offset) {
            (Some(own), Some(next)) => own + self.length == next,
            (own, next) => own == next,
        };
        kind(self) == kind(next) && follows
    }
}

/// The mapping of a run of the disk in one image.
#[derive(Clone, Copy)]
struct Status {
    len: u64,
    data: bool,
    zero: bool,
    offset: Option<u64>,
}

/// One image, prepared for lookups.
struct MapQuery<'a> {
    layer: &'a Layer,
    /// Size as QEMU counts it.
    size: u64,
    tables: Option<Tables<'a>>,
    /// Whether data clusters may be holes of the file: the image was preallocated.
    preallocated: bool,
}

/// Passes every entry of the map of `chain` to `sink`, in order.
///
/// # Errors
/// Damage in the metadata of an image; the errno of a failed read.
pub fn map(
    chain: &Chain,
    mut sink: impl FnMut(&MapEntry) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    let mut layers = Vec::new();
    for layer in chain.layers() {
        layers.push(MapQuery::new(layer)?);
    }
    let end = layers.first().map_or(0, |top| top.size);
    let mut current: Option<MapEntry> = None;
    let mut pos = 0;
    while pos < end {
        let next = entry_at(&mut layers, pos, end - pos)?;
        pos += next.length;
        match &mut current {
            Some(entry) if entry.can_merge(&next) => entry.length += next.length,
            Some(entry) => {
                sink(entry)?;
                *entry = next;
            }
            None => current = Some(next),
        }
    }
    current.map_or(Ok(()), |entry| sink(&entry))
}

/// Prints the map of `chain` as `qemu-img map --output=json` (7.2) does.
///
/// # Errors
/// As [`map`]; the error of `out`.
pub fn write_json(chain: &Chain, out: &mut impl Write) -> Result<(), ImageError> {
    let path = chain.top().file.path();
    let failed = |error: io::Error| ImageError::os(path, "print its map", &error);
    let mut first = true;
    out.write_all(b"[").map_err(failed)?;
    map(chain, |entry| {
        let MapEntry { start, length, depth, present, zero, data, offset } = entry;
        let separator = if std::mem::take(&mut first) { "" } else { ",\n" };
        let offset = offset.map_or(String::new(), |offset| format!(", \"offset\": {offset}"));
        write!(
            out,
            "{separator}{{ \"start\": {start}, \"length\": {length}, \"depth\": {depth}, \
             \"present\": {present}, \"zero\": {zero}, \"data\": {data}{offset}}}"
        )
        .map_err(failed)
    })?;
    if first {
        // For a disk of no bytes QEMU prints an entry of no bytes.
        out.write_all(NO_BYTES).map_err(failed)?;
    }
    out.write_all(b"]\n").map_err(failed)
}

/// Prints the data of `chain` as `qemu-img map` (7.2) does: a line for each run. Where QEMU ends with
/// an error, because the data is not in the file as it is, the place is "-".
///
/// # Errors
/// As [`map`]; the error of `out`.
pub fn write_table(chain: &Chain, out: &mut impl Write) -> Result<(), ImageError> {
    let path = chain.top().file.path();
    let failed = |error: io::Error| ImageError::os(path, "print its map", &error);
    writeln!(out, "{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to").map_err(failed)?;
    map(chain, |entry| {
        if !entry.data || entry.zero {
            return Ok(());
        }
        // As printf's %#x, which writes 0 without a prefix.
        let number = |n: u64| if n == 0 { "0".to_owned() } else { format!("{n:#x}") };
        let place = entry.offset.map_or("-".to_owned(), number);
        let file = chain.layers().get(entry.depth).map_or(path, |layer| layer.data_file().path());
        let (start, length) = (number(entry.start), number(entry.length));
        let file = plain(&file.display().to_string());
        writeln!(out, "{start:<16}{length:<16}{place:<16}{file}").map_err(failed)
    })
}

fn entry_at(layers: &mut [MapQuery<'_>], start: u64, mut len: u64) -> Result<MapEntry, ImageError> {
    let sizes: Vec<u64> = layers.iter().map(|layer| layer.size).collect();
    for (depth, query) in layers.iter_mut().enumerate() {
        let status = query.status(start, len.min(query.size - start))?;
        len = status.len;
        let mut zero = status.zero;
        let present = status.data || status.zero;
        // Unallocated: zeros where no image below has bytes either.
        if !present && sizes.get(depth + 1).is_none_or(|&below| start >= below) {
            zero = true;
        }
        if status.data || zero {
            let (data, offset) = (status.data, status.offset);
            return Ok(MapEntry { start, length: len, depth, present, zero, data, offset });
        }
    }
    // Not reached: the last image of a chain has none below it, so the loop has returned there.
    let depth = layers.len().saturating_sub(1);
    Ok(MapEntry {
        start,
        length: len,
        depth,
        present: false,
        zero: true,
        data: false,
        offset: None,
    })
}

impl<'a> MapQuery<'a> {
    fn new(layer: &'a Layer) -> Result<Self, ImageError> {
        let mut query = Self { layer, size: layer.size, tables: None, preallocated: false };
        match &layer.content {
            LayerFormat::Raw => query.size = layer.size.next_multiple_of(SECTOR_BYTES),
            LayerFormat::Qcow2 { header, .. } => {
                query.tables = Some(Tables::read(&layer.file, header)?);
                let preallocated = is_preallocated(&layer.file, header);
                query.preallocated =
                    preallocated.map_err(|e| ImageError::os(layer.file.path(), "read", &e))?;
            }
        }
        Ok(query)
    }

    fn status(&mut self, pos: u64, len: u64) -> Result<Status, ImageError> {
        let Some(tables) = &mut self.tables else {
            return self.file_status(&self.layer.file, pos, len);
        };
        let (cluster, len) = tables.lookup(pos, len)?;
        let inside = self.layer.header().map_or(0, |header| pos % header.cluster_bytes());
        let status = Status { len, data: false, zero: false, offset: None };
        match cluster {
            Cluster::Unallocated => Ok(status),
            Cluster::Compressed { .. } => Ok(Status { data: true, ..status }),
            Cluster::Zero { host, .. } => {
                Ok(Status { zero: true, offset: host.map(|host| host + inside), ..status })
            }
            Cluster::Data { host, .. } if self.preallocated => {
                let run = self.file_status(self.layer.data_file(), host + inside, len)?;
                Ok(Status { data: true, zero: run.zero, offset: Some(host + inside), ..run })
            }
            Cluster::Data { host, .. } => {
                Ok(Status { data: true, offset: Some(host + inside), ..status })
            }
        }
    }

    fn file_status(&self, file: &ImageFile, pos: u64, len: u64) -> Result<Status, ImageError> {
        let run = file.run(pos, len).map_err(|e| ImageError::os(file.path(), "look for holes", &e));
        let status = Status { len, data: false, zero: true, offset: Some(pos) };
        Ok(match run? {
            // Behind the end of the file all bytes are zeros.
            None => status,
            // A hole at the end of the file continues behind it.
            Some(run)
                if run.hole
                    && run.len < len
                    && file.size().is_ok_and(|end| pos + run.len >= end) =>
            {
                status
            }
            Some(run) => Status { len: run.len, data: !run.hole, zero: run.hole, ..status },
        })
    }
}

/// Whether the image has clearly more clusters in use than its file has space: then its data
/// clusters may be holes. The threshold is QEMU's (block/qcow2-refcount.c,
/// `qcow2_detect_metadata_preallocation`), so that the maps agree.
fn is_preallocated(file: &ImageFile, header: &Header) -> io::Result<bool> {
    let allocated = file.allocated()? >> header.cluster_bits;
    let bound = (allocated * 10 / 9).max(allocated + 2);
    let clusters = file.size()?.div_ceil(header.cluster_bytes());
    let mut refcounts = Refcounts::read(file, header)?;
    let mut in_use = 0;
    for cluster in 0..clusters {
        in_use += u64::from(refcounts.of(cluster)? != 0);
        if in_use >= bound {
            return Ok(true);
        }
    }
    Ok(false)
}
