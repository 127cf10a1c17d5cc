//! The extents of a VMDK image: which file has which bytes of the disk, and the grain tables of sparse ones.
//!
//! Invariant: a place that is told is inside its file, as long as that was when the image was opened.

use std::sync::Arc;

use nowait::Error;

use crate::formats::decompress::{Form, Packing};
use crate::formats::mapped_disk::{Place, RunTable, damaged};
use crate::formats::table_blocks::TableBlocks;
use crate::formats::vmdk::descriptor::SECTOR_BYTES;
use crate::formats::vmdk::sparse_header::SparseHeader;
use crate::image_file::ImageFile;

/// The bytes of a marker before a compressed grain: its sector, its length.
const MARKER_BYTES: usize = 12;
const ENTRY_BYTES: u64 = 4;
/// The entry of a grain of zeros, where the header says that there are such.
const ZERO_GRAIN: u32 = 1;

/// A sparse extent's tables.
#[derive(Debug)]
pub(super) struct Grains {
    header: SparseHeader,
    blocks: TableBlocks,
    /// Bytes of the file.
    end: u64,
}

#[derive(Debug)]
pub(super) enum Source {
    Zero,
    /// The bytes are in a file from `pos` on.
    Flat {
        pos: u64,
    },
    Sparse(Grains),
}

/// An extent in its place on the disk.
#[derive(Debug)]
pub(super) struct PlacedExtent {
    /// Its first byte on the disk, and the one behind its last.
    pub(super) start: u64,
    pub(super) end: u64,
    /// The number of its file.
    pub(super) file: u8,
    pub(super) source: Source,
}

/// All extents, in the order of the disk, without gaps.
#[derive(Debug)]
pub(super) struct Extents(pub(super) Vec<PlacedExtent>);

impl RunTable for Extents {
    fn lookup(&self, pos: u64, len: u64, reads: &mut usize) -> Result<(Place, u64), Error> {
        let at = self.0.partition_point(|extent| extent.end <= pos);
        let extent = self.0.get(at).filter(|it| it.start <= pos).ok_or_else(damaged)?;
        let (inside, len) = (pos - extent.start, len.min(extent.end - pos));
        match &extent.source {
            Source::Zero => Ok((Place::Zeros { present: true }, len)),
            Source::Flat { pos } => Ok((Place::Data { file: extent.file, pos: pos + inside }, len)),
            Source::Sparse(grains) => grains.lookup(extent.file, inside, len, reads),
        }
    }
}

impl Grains {
    pub(super) fn new(header: SparseHeader, file: Arc<ImageFile>, end: u64) -> Self {
        Self { header, blocks: TableBlocks::new(file), end }
    }

    /// Where the extent's bytes from `pos` on are, at most `len`, which are inside it.
    fn lookup(
        &self,
        file: u8,
        pos: u64,
        len: u64,
        reads: &mut usize,
    ) -> Result<(Place, u64), Error> {
        let SparseHeader { grain, table_entries, directory, .. } = self.header;
        let reach = grain * table_entries;
        let (index, inside) = (pos / reach, pos % reach);
        let entries = self.blocks.entries(directory + index * ENTRY_BYTES, reads)?;
        let mut tables = entries.map(u32::from_le_bytes);
        let unallocated = Place::Zeros { present: false };
        let table = match tables.next() {
            Some(sector) if sector > 0 => u64::from(sector) * SECTOR_BYTES,
            _ => {
                let more = tables.take_while(|&sector| sector == 0).count() as u64;
                return Ok((unallocated, len.min((more + 1) * reach - inside)));
            }
        };
        let number = inside / grain;
        if table + table_entries * ENTRY_BYTES > self.end {
            return Err(damaged());
        }
        let entries = self.blocks.entries(table + number * ENTRY_BYTES, reads)?;
        let entries = entries.map(u32::from_le_bytes).take((table_entries - number) as usize);
        self.run(file, pos, len, entries)
    }

    /// The run at `pos`, whose grain has the first of `entries`.
    fn run(
        &self,
        file: u8,
        pos: u64,
        len: u64,
        mut entries: impl Iterator<Item = u32>,
    ) -> Result<(Place, u64), Error> {
        let SparseHeader { grain, has_zero_grains, .. } = self.header;
        let first = entries.next().unwrap_or_default();
        let inside = pos % grain;
        let most = |grains: u64| len.min(grains * grain - inside);
        let is_zeros = |entry: u32| entry == 0 || has_zero_grains && entry == ZERO_GRAIN;
        if is_zeros(first) {
            let more = entries.take_while(|&entry| entry == first).count() as u64;
            return Ok((Place::Zeros { present: first != 0 }, most(more + 1)));
        }
        let start = u64::from(first) * SECTOR_BYTES;
        if self.header.is_compressed {
            return self.packed(file, start, pos).map(|place| (place, most(1)));
        }
        let step = (grain / SECTOR_BYTES) as u32;
        let mut next = first.checked_add(step);
        let follows = entries.take_while(|&entry| {
            let is_next = next == Some(entry);
            next = entry.checked_add(step);
            is_next
        });
        let len = most(1 + follows.count() as u64);
        match (start + inside).checked_add(len) {
            Some(end) if end <= self.end => Ok((Place::Data { file, pos: start + inside }, len)),
            // The grain itself may be there, and the ones that follow it not.
            _ if start + inside + most(1) <= self.end => {
                Ok((Place::Data { file, pos: start + inside }, most(1)))
            }
            _ => Err(damaged()),
        }
    }

    /// The compressed grain at `start` in the file, which has the extent's byte `pos`.
    fn packed(&self, file: u8, start: u64, pos: u64) -> Result<Place, Error> {
        let SparseHeader { grain, capacity, has_markers, .. } = self.header;
        if start >= self.end {
            return Err(damaged());
        }
        let behind = if has_markers { MARKER_BYTES } else { 0 };
        // Data that does not get smaller is stored, with five bytes more for each 16 KiB at worst.
        let len = (grain + grain / 8 + SECTOR_BYTES).min(self.end - start);
        // The last grain of the disk may be cut by its end.
        let least = grain.min(capacity - pos / grain * grain);
        let packing = Packing { bytes: grain, least, form: Form::Zlib { behind } };
        Ok(Place::Packed { file, pos: start, len, skip: pos % grain, packing })
    }
}
