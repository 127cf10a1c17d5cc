//! The file with the dirty bitmaps of a raw disk, sector by sector; the disk is opened for writing with it, written to, and left
//! as by a kill.
//!
//! Checked: a file that is not used stays as it is, byte for byte; of one that is used each bitmap that records has each
//! granule that was written to, also after another start and an end in order; the disk keeps its size.

use std::fs;
use std::path::{Path, PathBuf};

use nowait::Direct;
use nowait_image::bitmap_changes::NewBitmap;
use nowait_image::{Bitmap, ChainOptions, Format, Image, Locking, Warning};

use crate::split::seed_of;
use crate::target::{Check, Target};
use crate::targets::bitmaps::{compare, write};
use crate::targets::image::scratch;

/// Bytes of the disk.
const DISK_BYTES: u64 = 2 << 20;
const SECTOR: usize = 512;
/// The most sectors of the file.
const MAX_SECTORS: usize = 4096;
/// The type and the length of the extension of the header that says which disk the bitmaps are of.
const RECORD: [u8; 8] = [0x6e, 0x6f, 0x77, 0x62, 0, 0, 0, 24];
const RECORD_BYTES: usize = 24;
/// Bytes that stand for those of the disk under test: of its path, and of its record.
const PATH_BYTE: u8 = b'?';
const RECORD_BYTE: u8 = 0xd5;

pub(crate) const TARGET: Target = Target {
    name: "raw-bitmaps",
    about: "files with the dirty bitmaps of raw disks that are written to",
    prepare,
    seeds,
    words: &[
        &RECORD,
        &[0x23, 0x85, 0x28, 0x75],
        // Flags, types and granularities of entries; an autoclear bit of ours; a size of the disk.
        &[0, 0, 0, 1, 1, 9],
        &[0, 0, 0, 2, 1, 16],
        &[0, 0, 0, 3, 1, 31],
        &[0, 0, 0, 0, 0, 0, 0, 1],
        &[0, 0, 0, 0, 0, 0, 2, 0],
        &[0, 0, 0, 0, 0, 0x20, 0, 0],
    ],
    longest: 32 << 10,
    // The bits, and the table of each cluster of them.
    memory: 512 << 20,
};

/// A disk, and the file with its bitmaps.
struct Disk {
    path: PathBuf,
    stored: PathBuf,
}

impl Disk {
    fn new(directory: &Path) -> Result<Self, String> {
        let disk =
            Self { path: directory.join("disk"), stored: directory.join("disk.bitmaps.qcow2") };
        let file = fs::File::create(&disk.path).and_then(|file| file.set_len(DISK_BYTES));
        file.map_err(|error| error.to_string())?;
        Ok(disk)
    }

    fn open(&self, writable: bool) -> Result<Image, String> {
        let options = ChainOptions {
            format: Some(Format::Raw),
            writable,
            locking: Locking::Unlocked,
            direct: Direct::Off,
            ..ChainOptions::default()
        };
        nowait_image::open(&self.path, &options).map_err(|error| error.to_string())
    }

    /// Adds bitmaps, and leaves them closed or in use.
    fn add(&self, granularities: &[u64], in_use: bool) -> Option<()> {
        let place = self.open(true).ok()?.bitmaps_place()?.clone();
        for (granularity, number) in granularities.iter().zip(0..) {
            let (name, enabled) = (format!("bitmap {number}"), number != 1);
            place.add(&NewBitmap { name, granularity: *granularity, enabled }).ok()?;
        }
        let image = self.open(true).ok()?;
        if !in_use {
            image.close().ok()?;
        }
        Some(())
    }

    fn read(&self) -> Result<Vec<u8>, String> {
        fs::read(&self.stored).map_err(|error| format!("the file is gone: {error}"))
    }
}

/// Where `bytes` has the record of its disk.
fn record_of(bytes: &mut [u8]) -> Option<&mut [u8]> {
    let at = bytes.windows(RECORD.len()).take(4096).position(|it| it == RECORD)?;
    bytes.get_mut(at + RECORD.len()..at + RECORD.len() + RECORD_BYTES)
}

/// The sectors of `file` that are not zero, each behind its number, and first the number of all.
fn packed(file: &[u8]) -> Vec<u8> {
    let mut packed = ((file.len() / SECTOR) as u16).to_be_bytes().to_vec();
    for (sector, number) in file.chunks(SECTOR).zip(0_u16..) {
        if sector.iter().any(|byte| *byte != 0) {
            packed.extend(number.to_be_bytes());
            packed.extend(sector);
        }
    }
    packed
}

/// The file of which `input` is the packed form, for the disk at `path` with `record`.
fn unpacked(input: &[u8], path: &[u8], record: &[u8]) -> Vec<u8> {
    let number = |at: &[u8]| at.iter().fold(0, |number, byte| number << 8 | usize::from(*byte));
    let (count, rest) = input.split_at(input.len().min(2));
    let mut file = vec![0; number(count).min(MAX_SECTORS) * SECTOR];
    for sector in rest.chunks(2 + SECTOR) {
        let (at, bytes) = sector.split_at(sector.len().min(2));
        let place = file.get_mut(number(at) * SECTOR..).unwrap_or_default();
        place.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    }
    let unknown = vec![PATH_BYTE; path.len()];
    let found = file.windows(path.len()).take(4096).position(|it| it == unknown);
    if let Some(place) = found.and_then(|at| file.get_mut(at..at + path.len())) {
        place.copy_from_slice(path);
    }
    match record_of(&mut file) {
        Some(place) if *place == [RECORD_BYTE; RECORD_BYTES] => place.copy_from_slice(record),
        _ => {}
    }
    file
}

/// Files with one and three bitmaps, closed and in use, and with none.
fn seeds() -> Vec<Vec<u8>> {
    let make = |granularities: &[u64], in_use: bool| {
        let directory = scratch().ok()?;
        let disk = Disk::new(directory.path()).ok()?;
        disk.add(granularities, in_use)?;
        let mut file = disk.read().ok()?;
        record_of(&mut file)?.fill(RECORD_BYTE);
        let path = disk.path.as_os_str().as_encoded_bytes();
        let at = file.windows(path.len()).position(|it| it == path)?;
        file.get_mut(at..at + path.len())?.fill(PATH_BYTE);
        Some(packed(&file))
    };
    let all: [(&[u64], bool); 3] =
        [(&[4096], true), (&[65536], false), (&[65536, 512, 4096], true)];
    all.into_iter().filter_map(|(granularities, in_use)| make(granularities, in_use)).collect()
}

fn prepare() -> Result<Check, String> {
    let directory = scratch()?;
    let disk = Disk::new(directory.path())?;
    disk.add(&[4096], true).ok_or("a disk gets no bitmap")?;
    let mut own = disk.read()?;
    let record = record_of(&mut own).ok_or("a file without a record")?.to_vec();
    Ok(Box::new(move |input| {
        // The closure keeps the directory alive.
        debug_assert!(disk.path.starts_with(directory.path()));
        let file = unpacked(input, disk.path.as_os_str().as_encoded_bytes(), &record);
        use_file(&disk, &file, seed_of(input))
    }))
}

fn use_file(disk: &Disk, file: &[u8], seed: u64) -> Result<(), String> {
    fs::write(&disk.stored, file).map_err(|error| error.to_string())?;
    for writable in [false, true] {
        let opened = disk.open(writable);
        let is_used = opened.as_ref().is_ok_and(|image| {
            !image.warnings().iter().any(|it| matches!(it, Warning::UnusedBitmaps(..)))
        });
        if (!is_used || !writable) && disk.read()? != file {
            return Err(format!("a file that is not used was changed (to write: {writable})"));
        }
        if let (Ok(image), true) = (opened, is_used && writable) {
            write_and_compare(disk, image, seed)?;
        }
    }
    match fs::metadata(&disk.path).map(|found| found.len()) {
        Ok(DISK_BYTES) => Ok(()),
        other => Err(format!("the disk has another size: {other:?}")),
    }
}

fn write_and_compare(disk: &Disk, image: Image, seed: u64) -> Result<(), String> {
    let all = image.bitmap_store().map(|it| it.bitmaps()).unwrap_or_default();
    let recording: Vec<Bitmap> = all.into_iter().filter(|it| it.auto && it.is_usable()).collect();
    let written = write(&image, seed);
    // Nothing is stored, as after a kill.
    drop(image);
    let stored = || disk.open(false)?.stored_bitmaps().map_err(|error| error.to_string());
    compare(&stored()?, &recording, &written, "after a kill")?;
    if let Ok(image) = disk.open(true) {
        let _ = image.close();
        compare(&stored()?, &recording, &written, "at the end")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_are_files_that_are_used_and_whose_bitmaps_get_what_is_written() {
        let seeds = seeds();
        assert_eq!(seeds.len(), 3);
        let directory = scratch().unwrap();
        let disk = Disk::new(directory.path()).unwrap();
        disk.add(&[4096], true).unwrap();
        let record = record_of(&mut disk.read().unwrap()).unwrap().to_vec();
        for seed in seeds {
            assert!(seed.len() <= TARGET.longest, "{}", seed.len());
            let path = disk.path.as_os_str().as_encoded_bytes();
            let file = unpacked(&seed, path, &record);
            use_file(&disk, &file, 1).unwrap();
            assert!(disk.read().unwrap() != file, "it was not used");
        }
    }
}
