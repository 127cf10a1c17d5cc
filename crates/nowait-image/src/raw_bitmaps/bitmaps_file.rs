//! The file with the bitmaps of a raw disk: it is made, checked, and changed while no request of the disk is in flight.
//!
//! Invariant: under its name there is a whole file or none. A file that is not one for this disk is not changed.

use std::io::{self, Read};
use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::error::ImageError;
use crate::formats::qcow2::bitmap_editor::{BitmapEditor, NewBitmap, edit};
use crate::formats::qcow2::bitmap_slot;
use crate::formats::qcow2::bitmaps::Bitmap;
use crate::formats::qcow2::empty_image::write_over_data_file;
use crate::formats::qcow2::header::{EXTENSION_DISK_STATE, Header};
use crate::formats::qcow2::layout::SECTOR_BYTES;
use crate::formats::qcow2::stored_bits::StoredBits;
use crate::image_file::{ImageFile, Opening};
use crate::raw_bitmaps::bitmaps_place::BitmapsPlace;
use crate::raw_bitmaps::disk_record::DiskRecord;

/// The logarithms of the bytes of a cluster.
const CLUSTER_BITS: RangeInclusive<u32> = 16..=21;
/// The most clusters of a disk, as far as these can be larger: each takes 8 bytes of the file.
const MANY_CLUSTERS: u64 = 1 << 16;

impl BitmapsPlace {
    /// Bytes of the disk as the file tells them: whole sectors.
    ///
    /// # Errors
    /// Like [`ImageFile::size`].
    pub(crate) fn disk_bytes(&self) -> io::Result<u64> {
        Ok(self.disk.file.size()?.next_multiple_of(SECTOR_BYTES))
    }

    /// Adds a bitmap, to a new file if there is none. No request of the disk is in flight, and all writes have ended.
    ///
    /// # Errors
    /// A refusal of a file that is not one for this disk, or that has too many bitmaps or one of that name; the errno of a
    /// failed system call.
    pub fn add(&self, new: &NewBitmap) -> Result<(), ImageError> {
        let size = self.disk_bytes().map_err(|error| self.failed("find its size", &error))?;
        if !self.is_there() {
            let record = self.disk.settled_record();
            let record = record.map_err(|error| self.failed("look at its disk", &error))?;
            let add = |bitmaps: &mut BitmapEditor<'_>| bitmaps.add(new, None);
            return self.write(size, record, false, add);
        }
        self.fit(size, None)?;
        self.change(|bitmaps| bitmaps.add(new, None))
    }

    /// Makes the file, with bitmaps of which all is dirty, until others are stored. No request of the disk is in flight.
    ///
    /// # Errors
    /// Like [`BitmapsPlace::add`]; there is something of that name.
    pub fn make_dirty(&self, new: &[NewBitmap]) -> Result<(), ImageError> {
        let size = self.disk_bytes().map_err(|error| self.failed("find its size", &error))?;
        let record = self.disk.settled_record();
        let record = record.map_err(|error| self.failed("look at its disk", &error))?;
        self.write(size, record, false, |bitmaps| {
            for bitmap in new {
                bitmaps.add(bitmap, Some(&mut io::repeat(u8::MAX)))?;
            }
            bitmaps.trim(size)
        })
    }

    /// Clears all bits of the usable bitmap `name`. No request of the disk is in flight.
    ///
    /// # Errors
    /// Like [`BitmapsPlace::add`]; there is none of that name.
    pub fn clear(&self, name: &str) -> Result<(), ImageError> {
        self.change(|bitmaps| bitmaps.clear(name))
    }

    /// Removes the bitmap `name`, whatever its state is. No request of the disk is in flight.
    ///
    /// # Errors
    /// Like [`BitmapsPlace::clear`].
    pub fn remove(&self, name: &str) -> Result<(), ImageError> {
        self.change(|bitmaps| bitmaps.remove(name))
    }

    /// Makes the bitmaps, if there are any, those of a disk that has another size now: what is new is clean. No request of
    /// the disk is in flight. A bitmap whose bits are lost is dropped.
    ///
    /// # Errors
    /// Like [`BitmapsPlace::add`].
    pub fn resize(&self) -> Result<(), ImageError> {
        if !self.is_there() {
            return Ok(());
        }
        let size = self.disk_bytes().map_err(|error| self.failed("find its size", &error))?;
        self.fit(size, None)?;
        let (file, header) = self.open(Opening::Shared)?;
        self.note(&file, &header)
    }

    fn failed(&self, doing: &str, error: &io::Error) -> ImageError {
        ImageError::os(&self.path, doing, error)
    }

    fn change(
        &self,
        change: impl FnOnce(&mut BitmapEditor<'_>) -> io::Result<()>,
    ) -> Result<(), ImageError> {
        let (file, header) = self.open(Opening::Shared)?;
        edit(&file, &header, change)?;
        self.note(&file, &header)
    }

    /// Notes that the bitmaps are those of the disk as it is now.
    fn note(&self, file: &ImageFile, header: &Header) -> Result<(), ImageError> {
        let record = self.disk.settled_record();
        let noted = record.and_then(|record| write_record(file, header, &record));
        noted.map_err(|error| self.failed("note the state of the disk", &error))
    }

    /// The file and its header, if it is one for this disk. It is not locked.
    ///
    /// # Errors
    /// A refusal of any other file; the errno of a failed system call.
    pub(crate) fn open(&self, opening: Opening) -> Result<(Arc<ImageFile>, Header), ImageError> {
        let refused = |why: &str| Err(ImageError::refused(&self.path, why));
        let file = self.file_system.open(&self.path, opening)?;
        if opening == Opening::Shared {
            // Before any of it changes: after a loss of power an older file would lack that.
            let synced = self.file_system.sync_directory_of(&self.path);
            synced.map_err(|error| self.failed("sync the directory of", &error))?;
        }
        if file.is_block_device() {
            return refused("it is a block device, and no file with bitmaps");
        }
        let header = Header::read(&file)?;
        self.check(&file, &header).map_err(|why| ImageError::refused(&self.path, why))?;
        Ok((Arc::new(file), header))
    }

    /// Checks that the file with this header is one for this disk.
    fn check(&self, file: &ImageFile, header: &Header) -> Result<(), String> {
        header.supported(true)?;
        if !header.has_data_file() || !header.is_data_file_raw() || header.backing.is_some() {
            return Err("it is not the file with the bitmaps of a raw disk".into());
        }
        let bytes = file.size().map_err(|error| error.to_string())?;
        header.fits(bytes)?;
        let known = header.disk_state.as_ref().and_then(DiskRecord::parse);
        let now = self.disk.record().map_err(|error| error.to_string())?;
        let is_same_disk = known.is_some_and(|known| known.is_of_same_disk(&now));
        match &header.data_file {
            Some(name) if is_same_disk || *name == self.disk_path => Ok(()),
            Some(name) => Err(format!(
                "it has the bitmaps of {}, another disk",
                crate::error::plain(&name.to_string_lossy())
            )),
            None => Err("it names no disk".into()),
        }
    }

    /// Puts a file for a disk of `size` bytes in the place of the one that is there, if that has another size. All is dirty
    /// from byte `dirty_from` on, if that is given. The state of the disk is not known then.
    ///
    /// # Errors
    /// Like [`BitmapsPlace::add`].
    pub(crate) fn fit(&self, size: u64, dirty_from: Option<u64>) -> Result<(), ImageError> {
        let (file, header) = self.open(Opening::ReadOnly)?;
        if header.size == size {
            return Ok(());
        }
        let all = Bitmap::with_entries(&file, &header)?;
        let record = self.disk.record().map(DiskRecord::in_use);
        let record = record.map_err(|error| self.failed("look at its disk", &error))?;
        self.write(size, record, true, |bitmaps| {
            for (entry, bitmap) in all.iter().filter(|(_, bitmap)| bitmap.is_usable()) {
                let Bitmap { name, granularity, auto, .. } = bitmap.clone();
                let bits = StoredBits::new(&file, &header, entry);
                let ones_from = dirty_from.map_or(u64::MAX, |from| from / granularity);
                let mut bits = WithOnes { bits, at: 0, ones_from };
                bitmaps.add(&NewBitmap { name, granularity, enabled: auto }, Some(&mut bits))?;
            }
            bitmaps.trim(size)
        })
    }

    /// Writes a file for a disk of `size` bytes with the bitmaps that `fill` adds, which `replaces` the one that is there.
    fn write(
        &self,
        size: u64,
        record: DiskRecord,
        replaces: bool,
        fill: impl FnOnce(&mut BitmapEditor<'_>) -> io::Result<()>,
    ) -> Result<(), ImageError> {
        let has_few = |bits: &u32| size.div_ceil(1 << bits) <= MANY_CLUSTERS;
        let bits = CLUSTER_BITS.clone().find(has_few).unwrap_or(*CLUSTER_BITS.end());
        let header = Header::empty(size, bits);
        let header = header.with_raw_data_file(self.disk_path.clone().into_os_string());
        let mut new = Some((Header { disk_state: Some(record.bytes()), ..header }, fill));
        self.file_system.write(&self.path, replaces, &mut |file| {
            let Some((header, fill)) = new.take() else { return Ok(()) };
            let written = write_over_data_file(file, header);
            let written = written.map_err(|why| ImageError::refused(&self.path, why))?;
            written.map_err(|error| self.failed("make it", &error))?;
            edit(file, &Header::read(file)?, fill)
        })
    }
}

/// The bits of a bitmap, all of which are set from one on.
struct WithOnes {
    bits: StoredBits,
    /// Bytes that were read.
    at: u64,
    /// The number of the first bit that is set in any case.
    ones_from: u64,
}

impl Read for WithOnes {
    fn read(&mut self, memory: &mut [u8]) -> io::Result<usize> {
        let found = self.bits.read(memory)?;
        let first = self.ones_from / 8;
        let len = match found {
            0 if self.ones_from == u64::MAX => 0,
            0 => {
                memory.fill(0);
                memory.len()
            }
            found => found,
        };
        for (byte, at) in memory.iter_mut().take(len).zip(self.at..) {
            *byte = match at {
                _ if at > first => u8::MAX,
                _ if at == first => *byte | u8::MAX << (self.ones_from % 8),
                _ => *byte,
            };
        }
        self.at += len as u64;
        Ok(len)
    }
}

/// Writes `record` to the header of the image in `file`, durably.
///
/// # Errors
/// Like [`bitmap_slot::write`].
pub(crate) fn write_record(
    file: &ImageFile,
    header: &Header,
    record: &DiskRecord,
) -> io::Result<()> {
    bitmap_slot::write_fields(file, header, EXTENSION_DISK_STATE, &record.bytes())
}
