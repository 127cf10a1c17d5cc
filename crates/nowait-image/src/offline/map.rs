//! The map of a disk: which bytes are data, zeros or unallocated, in which image of the chain, and
//! at which position. Prints what `qemu-img map --output=json` prints, byte for byte.
//!
//! Invariant: the entries cover the disk in order and without gaps; two entries that can be merged
//! are merged.

use std::io::{self, Write};

use crate::chain::Chain;
use crate::error::{ImageError, plain};
use crate::formats::driver::LayerMap;

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
    /// The file with the data, if the image has it in several: 0 is the first one.
    pub file: usize,
}

impl MapEntry {
    /// Whether `next`, which follows, can be merged into this entry.
    fn can_merge(&self, next: &Self) -> bool {
        let kind = |entry: &Self| (entry.depth, entry.file, entry.present, entry.zero, entry.data);
        let follows = match (self.offset, next.offset) {
            (Some(own), Some(next)) => own + self.length == next,
            (own, next) => own == next,
        };
        kind(self) == kind(next) && follows
    }
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
        layers.push((layer.format().driver().map)(layer)?);
    }
    let end = layers.first().map_or(0, |top| top.size());
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
/// Like [`map`]; the error of `out`.
pub fn write_json(chain: &Chain, out: &mut impl Write) -> Result<(), ImageError> {
    let path = chain.top().file.path();
    let failed = |error: io::Error| ImageError::os(path, "print its map", &error);
    let mut first = true;
    out.write_all(b"[").map_err(failed)?;
    map(chain, |entry| {
        let MapEntry { start, length, depth, present, zero, data, offset, .. } = entry;
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
/// Like [`map`]; the error of `out`.
pub fn write_table(chain: &Chain, out: &mut impl Write) -> Result<(), ImageError> {
    let path = chain.top().file.path();
    let failed = |error: io::Error| ImageError::os(path, "print its map", &error);
    writeln!(out, "{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to").map_err(failed)?;
    map(chain, |entry| {
        if !entry.data || entry.zero {
            return Ok(());
        }
        // Like printf's %#x, which writes 0 without a prefix.
        let number = |n: u64| if n == 0 { "0".to_owned() } else { format!("{n:#x}") };
        let place = entry.offset.map_or("-".to_owned(), number);
        let file = chain.layers().get(entry.depth).and_then(|layer| layer.data.get(entry.file));
        let file = file.map_or(path, |file| file.path());
        let (start, length) = (number(entry.start), number(entry.length));
        let file = plain(&file.display().to_string());
        writeln!(out, "{start:<16}{length:<16}{place:<16}{file}").map_err(failed)
    })
}

fn entry_at(
    layers: &mut [Box<dyn LayerMap + '_>],
    start: u64,
    mut len: u64,
) -> Result<MapEntry, ImageError> {
    let sizes: Vec<u64> = layers.iter().map(|layer| layer.size()).collect();
    for (depth, query) in layers.iter_mut().enumerate() {
        let status = query.status(start, len.min(query.size().saturating_sub(start)))?;
        len = status.len;
        let mut zero = status.zero;
        let present = status.data || status.zero;
        // Unallocated: zeros where no image below has bytes either.
        if !present && sizes.get(depth + 1).is_none_or(|&below| start >= below) {
            zero = true;
        }
        if status.data || zero {
            let (data, offset, file) = (status.data, status.offset, status.file);
            return Ok(MapEntry { start, length: len, depth, present, zero, data, offset, file });
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
        file: 0,
    })
}
