//! Bitmaps of a qcow2 image that is not being served are added and removed, and get clusters for all of their bits.
//!
//! Invariant: a kill or a power cut at any step leaves the old list or the new one, with leaked clusters at worst. No
//! cluster is allocated that was in the file before, whatever the refcounts say; on a block device these are checked.

use std::collections::BTreeSet;
use std::io::{self, Read};

use crate::error::ImageError;
use crate::formats::qcow2::bitmap_marks::{MAX_KEPT, write_autoclear};
use crate::formats::qcow2::bitmap_slot;
use crate::formats::qcow2::bitmaps::{
    Bitmap, ENTRY_BYTES, Entry, FLAG_AUTO, FLAGS_AT, MAX_BITMAP_BYTES, TYPE_DIRTY_TRACKING,
};
use crate::formats::qcow2::check;
use crate::formats::qcow2::editor::write_entries;
use crate::formats::qcow2::header::{BitmapDirectory, Header};
use crate::formats::qcow2::lookup::read_table;
use crate::formats::qcow2::offline_allocator::RefcountAllocator;
use crate::formats::qcow2::stored_bits::{ALL_SET, POSITION};
use crate::image_file::ImageFile;

/// The most bytes of bits that all usable bitmaps of an image that is written to have together.
/// Beyond it: the image is only read.
const MAX_BITS: u64 = 256 << 20;
/// The most bytes of the clusters that their tables have entries for: each may have one more than it needs.
/// Beyond it: the image is only read.
const MAX_TABLES: u64 = 2 * MAX_BITS;
/// Bytes that are written together.
const PIECE_BYTES: usize = 1 << 20;

const TOO_MANY_BITS: &str = "its bitmaps would have too many bits (a larger granularity has fewer)";

/// A bitmap that is to be added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBitmap {
    /// 1 to 1023 bytes, of no other bitmap of the image.
    pub name: String,
    /// Bytes of the disk that a bit stands for: a power of two, 512 to 2 GiB.
    pub granularity: u64,
    /// Whether it records writes as soon as the image is open.
    pub enabled: bool,
}

/// A bitmap of the list.
struct Listed {
    bitmap: Bitmap,
    entry: Entry,
    /// The entry as it is in the file; its table may have moved since.
    bytes: Vec<u8>,
}

/// The list of bitmaps of an image, while it is changed.
pub(crate) struct BitmapEditor<'a> {
    file: &'a ImageFile,
    header: Header,
    allocator: RefcountAllocator<'a>,
    listed: Vec<Listed>,
    /// Whether the list has to be written.
    is_changed: bool,
    /// Whether it is known where clusters can be allocated.
    has_room: bool,
    /// Clusters that are free as soon as the list is durable.
    unused: Vec<u64>,
}

impl<'a> BitmapEditor<'a> {
    /// For the image in `file`, which is open for writing.
    ///
    /// # Errors
    /// The list is damaged or too long; errors of the file.
    pub(crate) fn open(file: &'a ImageFile, header: &Header) -> Result<Self, ImageError> {
        let refused = |why: &str| Err(ImageError::refused(file.path(), why));
        let failed = |error: io::Error| ImageError::os(file.path(), "read its bitmaps", &error);
        let all = Bitmap::with_entries(file, header)?;
        if all.len() > MAX_KEPT {
            return refused(
                "it has more than 32 bitmaps, and is only read (qemu-img bitmap --remove removes some)",
            );
        }
        let usable = || all.iter().filter(|(_, bitmap)| bitmap.is_usable());
        let bytes = usable().map(|(_, it)| header.size.div_ceil(it.granularity).div_ceil(8));
        let tables = usable().map(|(it, _)| u64::from(it.table_entries) << header.cluster_bits);
        if bytes.sum::<u64>() > MAX_BITS || tables.sum::<u64>() > MAX_TABLES {
            return refused(
                "its bitmaps have more than 256 MiB of bits, and it is only read (qemu-img bitmap --remove removes \
                 some)",
            );
        }
        let mut listed: Vec<Listed> = Vec::new();
        for (entry, bitmap) in all {
            if entry.extra_len > 0 || listed.iter().any(|other| other.bitmap.name == bitmap.name) {
                return refused("the list of its bitmaps is damaged, and it is only read");
            }
            let mut bytes = vec![0; entry.bytes() as usize];
            file.read_at(entry.at, &mut bytes).map_err(failed)?;
            listed.push(Listed { bitmap, entry, bytes });
        }
        let allocator = RefcountAllocator::read(file, header).map_err(failed)?;
        let (is_changed, has_room, unused) = (false, false, Vec::new());
        let header = header.clone();
        Ok(Self { file, header, allocator, listed, is_changed, has_room, unused })
    }

    fn cluster(&self) -> u64 {
        self.header.cluster_bytes()
    }

    /// Allocates `clusters` adjacent clusters: behind the end of the file, or where that cannot grow, where the refcounts
    /// say so, if the metadata is consistent.
    fn allocate(&mut self, clusters: u64) -> io::Result<u64> {
        if !std::mem::replace(&mut self.has_room, true) {
            let size = self.file.size()?;
            if self.file.is_block_device() || self.file.set_len(size).is_err() {
                let (report, _) = check::find(self.file, &self.header, &mut |_, _| {})?;
                if report.corruptions > 0 {
                    let why = "its metadata is damaged (look at it with nowait check)";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, why));
                }
            } else {
                self.allocator.begin_at(size.div_ceil(self.cluster()));
            }
        }
        self.allocator.allocate(clusters)
    }

    /// Gives each usable bitmap a cluster for each of its bits, for a disk of `size` bytes.
    ///
    /// # Errors
    /// `InvalidData`: a table is damaged. Those of the file.
    pub(crate) fn fit(&mut self, size: u64) -> io::Result<()> {
        let mut used = BTreeSet::new();
        for number in 0..self.listed.len() {
            let Some(listed) = self.listed.get(number).filter(|it| it.bitmap.is_usable()) else {
                continue;
            };
            let entry = listed.entry;
            let mut table = read_table(self.file, entry.table_pos, u64::from(entry.table_entries))?;
            self.check(&table, &mut used)?;
            let needed = entry.clusters_for(size, self.cluster()) as usize;
            let has_room = needed <= table.len();
            if has_room && table.iter().all(|&entry| entry & POSITION != 0) {
                continue;
            }
            table.resize(table.len().max(needed), 0);
            self.fill(&mut table)?;
            if has_room {
                self.allocator.write()?;
                self.file.sync()?;
                write_entries(self.file, entry.table_pos, &table)?;
                self.file.sync()?;
            } else {
                self.move_table(number, &table)?;
            }
        }
        Ok(())
    }

    /// Clears the bits behind a disk of `size` bytes, durably.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) fn trim(&mut self, size: u64) -> io::Result<()> {
        let cluster = self.cluster();
        for listed in self.listed.iter().filter(|listed| listed.bitmap.is_usable()) {
            let bits = size.div_ceil(listed.bitmap.granularity);
            let entry = listed.entry;
            let table = read_table(self.file, entry.table_pos, u64::from(entry.table_entries))?;
            let at = bits / 8;
            if let Some(pos) = table.get((at / cluster) as usize).map(|entry| entry & POSITION)
                && pos != 0
            {
                let mut byte = [0];
                self.file.read_at(pos + at % cluster, &mut byte)?;
                byte[0] &= !(u8::MAX << (bits % 8));
                self.file.write_at(pos + at % cluster, &byte)?;
                let rest = cluster - at % cluster - 1;
                if rest > 0 {
                    self.file.zero(pos + at % cluster + 1, rest)?;
                }
            }
            let behind = table.iter().skip((at / cluster + 1) as usize);
            for pos in behind.map(|entry| entry & POSITION).filter(|pos| *pos != 0) {
                self.file.zero(pos, cluster)?;
            }
        }
        self.file.sync()
    }

    /// Checks a table of a usable bitmap: no cluster has another use, and none is in `used`.
    fn check(&mut self, table: &[u64], used: &mut BTreeSet<u64>) -> io::Result<()> {
        let end = self.file.size()?;
        for &entry in table {
            let (pos, rest) = (entry & POSITION, entry & !POSITION);
            let is_inside = pos.is_multiple_of(self.cluster()) && pos + self.cluster() <= end;
            let cluster = pos >> self.header.cluster_bits;
            let is_valid = match pos {
                0 => rest & !ALL_SET == 0,
                _ => {
                    rest == 0
                        && is_inside
                        && self.allocator.count(cluster)?.unwrap_or_default() <= 1
                        && used.insert(cluster)
                }
            };
            if !is_valid {
                let why = "a bitmap is damaged (remove it with qemu-img bitmap --remove)";
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
        }
        Ok(())
    }

    /// Gives each entry of `table` that has no cluster a new one, with the bits that it stood for.
    fn fill(&mut self, table: &mut [u64]) -> io::Result<()> {
        let missing = table.iter().filter(|&&entry| entry & POSITION == 0).count() as u64;
        if missing == 0 {
            return Ok(());
        }
        let (first, cluster) = (self.allocate(missing)?, self.cluster());
        let end = first + missing * cluster;
        if end > self.file.size()? {
            self.file.set_len(end)?;
        }
        self.file.zero(first, end - first)?;
        let mut at = first;
        for entry in table.iter_mut().filter(|entry| **entry & POSITION == 0) {
            if *entry & ALL_SET != 0 {
                self.file.write_at(at, &vec![u8::MAX; cluster as usize])?;
            }
            *entry = at;
            at += cluster;
        }
        Ok(())
    }

    /// Writes `table`, that of bitmap `number`, to clusters of its own.
    fn move_table(&mut self, number: usize, table: &[u64]) -> io::Result<()> {
        let pos = self.write_table(table)?;
        let Some(listed) = self.listed.get_mut(number) else { return Ok(()) };
        let (old, entries) = (listed.entry.table_pos, u64::from(listed.entry.table_entries));
        listed.entry.table_pos = pos;
        listed.entry.table_entries = table.len() as u32;
        put_table(&mut listed.bytes, pos, table.len() as u32);
        self.is_changed = true;
        self.give_up(old, entries * 8);
        Ok(())
    }

    fn write_table(&mut self, table: &[u64]) -> io::Result<u64> {
        let clusters = (table.len() as u64 * 8).div_ceil(self.cluster());
        let pos = self.allocate(clusters)?;
        let mut padded = table.to_vec();
        padded.resize((clusters * self.cluster() / 8) as usize, 0);
        write_entries(self.file, pos, &padded)?;
        Ok(pos)
    }

    /// The clusters of `len` bytes at `pos` are used no more when the list is durable.
    fn give_up(&mut self, pos: u64, len: u64) {
        let first = pos >> self.header.cluster_bits;
        self.unused.extend(first..first + len.div_ceil(self.cluster()));
    }

    /// Adds a bitmap, whose bits are in `bits`, or are not set.
    ///
    /// # Errors
    /// `AlreadyExists`; `InvalidInput`: the list is full, or the image has no bitmaps. Those of the file and of `bits`.
    pub(crate) fn add(&mut self, new: &NewBitmap, bits: Option<&mut dyn Read>) -> io::Result<()> {
        let refused = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        if self.header.version < 3 {
            return refused("an image of qcow2 version 2 has no bitmaps");
        }
        if self.listed.len() >= MAX_KEPT {
            return refused("it has 32 bitmaps already");
        }
        if self.listed.iter().any(|listed| listed.bitmap.name == new.name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let usable = self.listed.iter().filter(|listed| listed.bitmap.is_usable());
        let granularities = usable.map(|listed| listed.bitmap.granularity);
        let bytes = |granularity| self.header.size.div_ceil(granularity).div_ceil(8);
        if granularities.chain([new.granularity]).map(bytes).sum::<u64>() > MAX_BITS {
            return refused(TOO_MANY_BITS);
        }
        let mut bytes = vec![0; ENTRY_BYTES];
        let flags = if new.enabled { FLAG_AUTO } else { 0 };
        put(&mut bytes, FLAGS_AT as usize, &flags.to_be_bytes());
        put(&mut bytes, 16, &[TYPE_DIRTY_TRACKING, new.granularity.ilog2() as u8]);
        put(&mut bytes, 18, &(new.name.len() as u16).to_be_bytes());
        bytes.extend(new.name.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let mut entry = Entry::parse(bytes.first_chunk().unwrap_or(&[0; ENTRY_BYTES]), 0);
        let clusters = entry.clusters_for(self.header.size, self.cluster());
        if clusters * self.cluster() > MAX_BITMAP_BYTES {
            return refused(TOO_MANY_BITS);
        }
        let mut table = vec![0; clusters as usize];
        self.fill(&mut table)?;
        if let Some(bits) = bits {
            self.copy(bits, &table)?;
        }
        entry.table_pos = self.write_table(&table)?;
        entry.table_entries = table.len() as u32;
        put_table(&mut bytes, entry.table_pos, entry.table_entries);
        let (name, granularity, auto) = (new.name.clone(), new.granularity, new.enabled);
        let bitmap = Bitmap { name, granularity, in_use: false, kept: false, auto };
        self.listed.push(Listed { bitmap, entry, bytes });
        self.is_changed = true;
        Ok(())
    }

    /// Writes `bits` to the clusters of `table`.
    fn copy(&self, bits: &mut dyn Read, table: &[u64]) -> io::Result<()> {
        let piece_bytes = PIECE_BYTES.min(self.cluster() as usize);
        for &pos in table {
            for at in (0..self.cluster()).step_by(piece_bytes) {
                let mut piece = Vec::with_capacity(piece_bytes);
                bits.take(piece_bytes as u64).read_to_end(&mut piece)?;
                if piece.iter().any(|byte| *byte != 0) {
                    self.file.write_at(pos + at, &piece)?;
                }
            }
        }
        Ok(())
    }

    /// Clears all bits of a usable bitmap, which gets other clusters for them: it is the old one or the cleared one.
    ///
    /// # Errors
    /// `NotFound`: there is no usable one of that name. Those of the file.
    pub(crate) fn clear(&mut self, name: &str) -> io::Result<()> {
        let is_it = |it: &Listed| it.bitmap.name == name && it.bitmap.is_usable();
        let at = self.listed.iter().position(is_it).ok_or(io::ErrorKind::NotFound)?;
        let Some(&Listed { entry, .. }) = self.listed.get(at) else { return Ok(()) };
        let old = read_table(self.file, entry.table_pos, u64::from(entry.table_entries))?;
        self.check(&old, &mut BTreeSet::new())?;
        let clusters = entry.clusters_for(self.header.size, self.cluster());
        let mut table = vec![0; clusters as usize];
        self.fill(&mut table)?;
        self.move_table(at, &table)?;
        self.give_up_bits(&old);
        Ok(())
    }

    /// The clusters that `table` names are used no more when the list is durable.
    fn give_up_bits(&mut self, table: &[u64]) {
        for pos in table.iter().map(|entry| entry & POSITION).filter(|pos| *pos != 0) {
            self.give_up(pos, self.cluster());
        }
    }

    /// Removes a bitmap, whatever its state.
    ///
    /// # Errors
    /// `NotFound`. Those of the file.
    pub(crate) fn remove(&mut self, name: &str) -> io::Result<()> {
        let at = self.listed.iter().position(|listed| listed.bitmap.name == name);
        let at = at.ok_or(io::ErrorKind::NotFound)?;
        // The marks count the bitmaps of the list as it is.
        self.settle()?;
        let entry = self.listed.remove(at).entry;
        let table = read_table(self.file, entry.table_pos, u64::from(entry.table_entries))?;
        // Clusters that a damaged table names are not freed.
        if self.check(&table, &mut BTreeSet::new()).is_ok() {
            self.give_up_bits(&table);
        }
        self.give_up(entry.table_pos, u64::from(entry.table_entries) * 8);
        self.is_changed = true;
        Ok(())
    }

    /// Has the bitmaps that are up to date although they are in use be in use no more, durably.
    pub(crate) fn settle(&mut self) -> io::Result<()> {
        if self.header.kept_bitmaps() == 0 {
            return Ok(());
        }
        for Listed { bitmap, entry, bytes } in &mut self.listed {
            if bitmap.in_use && bitmap.kept {
                let flags = if bitmap.auto { FLAG_AUTO } else { 0 };
                self.file.write_at(entry.at + FLAGS_AT, &flags.to_be_bytes())?;
                put(bytes, FLAGS_AT as usize, &flags.to_be_bytes());
                bitmap.in_use = false;
            }
            bitmap.kept = false;
        }
        self.file.sync()?;
        self.header.autoclear = self.header.autoclear_with(0);
        write_autoclear(self.file, self.header.autoclear)
    }

    /// Writes the list, if it has changed, and frees what is not used any more. Durable when this returns.
    ///
    /// # Errors
    /// Those of the file; `StorageFull`: the header has no room.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        if !self.is_changed {
            return Ok(());
        }
        let bytes = self.listed.iter().flat_map(|listed| listed.bytes.iter().copied());
        let bytes: Vec<u8> = bytes.collect();
        let (bitmaps, len) = (self.listed.len() as u32, bytes.len() as u64);
        let directory = match bitmaps {
            0 => None,
            _ => {
                let pos = self.allocate(len.div_ceil(self.cluster()))?;
                let mut padded = bytes;
                padded.resize(len.next_multiple_of(self.cluster()) as usize, 0);
                self.file.write_at(pos, &padded)?;
                Some(BitmapDirectory { bitmaps, pos, len })
            }
        };
        self.allocator.write()?;
        self.file.sync()?;
        bitmap_slot::write(self.file, &self.header, directory)?;
        if let Some(old) = self.header.bitmaps {
            self.give_up(old.pos, old.len);
        }
        for cluster in std::mem::take(&mut self.unused) {
            if self.allocator.count(cluster)? == Some(1) {
                self.allocator.free(cluster)?;
            }
        }
        self.allocator.write()?;
        self.file.sync()
    }
}

/// Changes the bitmaps of the image in `file`, which is open for writing and that no request uses, if it has any.
///
/// # Errors
/// Like [`BitmapEditor::open`]; those of `change`, and of the file.
pub(crate) fn change_bitmaps(
    file: &ImageFile,
    change: impl FnOnce(&mut BitmapEditor<'_>) -> io::Result<()>,
) -> Result<(), ImageError> {
    let header = Header::read(file)?;
    if header.bitmaps.is_none() {
        return Ok(());
    }
    edit(file, &header, change)
}

/// Like [`change_bitmaps`], also of an image without any.
///
/// # Errors
/// Like [`change_bitmaps`].
pub(crate) fn edit(
    file: &ImageFile,
    header: &Header,
    change: impl FnOnce(&mut BitmapEditor<'_>) -> io::Result<()>,
) -> Result<(), ImageError> {
    let mut editor = BitmapEditor::open(file, header)?;
    let done = change(&mut editor).and_then(|()| editor.finish());
    done.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::StorageFull
            if error.raw_os_error().is_none() =>
        {
            ImageError::refused(file.path(), error.to_string())
        }
        io::ErrorKind::AlreadyExists if error.raw_os_error().is_none() => {
            ImageError::refused(file.path(), "it has a bitmap of that name")
        }
        io::ErrorKind::NotFound if error.raw_os_error().is_none() => {
            ImageError::refused(file.path(), "it has no bitmap of that name")
        }
        _ => ImageError::os(file.path(), "change its bitmaps", &error),
    })
}

/// Puts `part` at `at` of an entry.
fn put(bytes: &mut [u8], at: usize, part: &[u8]) {
    if let Some(slot) = bytes.get_mut(at..at + part.len()) {
        slot.copy_from_slice(part);
    }
}

fn put_table(bytes: &mut [u8], pos: u64, entries: u32) {
    put(bytes, 0, &pos.to_be_bytes());
    put(bytes, 8, &entries.to_be_bytes());
}
