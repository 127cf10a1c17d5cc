//! A power cut at every step of what is written to the file with the bitmaps of a raw disk, while the disk is written to.
//!
//! Invariant: a change of the disk that has begun is in the bitmap, or the bitmap is not trusted.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nowait::{BlockingFile, ByteRange, Direct, Flags};

use crate::chain::{ChainOptions, Locking};
use crate::image::{self, Image};
use crate::image_file::ImageFile;
use crate::offline::bitmap_changes::NewBitmap;
use crate::qcow2_disk::bitmap_store::BitmapBits;
use crate::raw_bitmaps::BitmapsPlace;
use crate::tests::observed_storage::Change;
use crate::tests::write_log::{UnsyncedWrites, cut, logged_steps, record};

const SIZE: u64 = 1 << 20;
const GRANULARITY: u64 = 4096;
/// Where the disk is written to, in regions of their own.
const WRITES: [u64; 3] = [0, 300_000, SIZE - 512];

fn open(path: &Path, writable: bool) -> Image {
    let (locking, direct) = (Locking::Unlocked, Direct::Off);
    let options = ChainOptions { writable, locking, direct, ..ChainOptions::default() };
    image::open(path, &options).unwrap()
}

/// The bits that a program would have in memory: exact.
struct Exact(Vec<u8>);

impl BitmapBits for Exact {
    fn is_enabled(&self) -> bool {
        true
    }

    fn copy(&self, at: u64, memory: &mut [u8]) {
        memory.fill(0);
        let from = self.0.get(at as usize..).unwrap_or_default();
        let len = from.len().min(memory.len());
        memory[..len].copy_from_slice(&from[..len]);
    }
}

/// The bits of the only bitmap; `None` if that is not trusted.
fn stored(path: &Path) -> Option<Vec<u8>> {
    let image = open(path, false);
    let (_, bits) = image.stored_bitmaps().unwrap().pop().unwrap();
    let mut all = Vec::new();
    bits?.read_to_end(&mut all).unwrap();
    Some(all)
}

/// Whether the granules of `WRITES` are dirty in the only bitmap; `None` if that is not trusted.
fn dirty(path: &Path) -> Option<[bool; 3]> {
    let all = stored(path)?;
    Some(WRITES.map(|at| {
        let granule = (at / GRANULARITY) as usize;
        all[granule / 8] & 1 << (granule % 8) != 0
    }))
}

/// The bits of `WRITES`.
fn exact() -> Arc<dyn BitmapBits> {
    let mut bits = vec![0; (SIZE / GRANULARITY / 8) as usize];
    for at in WRITES {
        bits[(at / GRANULARITY / 8) as usize] |= 1 << (at / GRANULARITY % 8);
    }
    Arc::new(Exact(bits))
}

/// A disk in `directory` with a bitmap, and where that is.
fn disk_with_bitmap(directory: &Path) -> (PathBuf, BitmapsPlace) {
    let disk = directory.join("disk.img");
    fs::write(&disk, vec![0; SIZE as usize]).unwrap();
    let new = NewBitmap { name: "a".into(), granularity: GRANULARITY, enabled: true };
    let image = open(&disk, true);
    let place = image.bitmaps_place().unwrap().clone();
    image.close().unwrap();
    place.add(&new).unwrap();
    (disk, place)
}

#[test]
fn c74_a_change_is_in_the_bitmap_of_a_raw_disk_at_any_power_cut() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, place) = disk_with_bitmap(directory.path());
    let stored: BTreeMap<PathBuf, Vec<u8>> =
        [(place.path().to_owned(), fs::read(place.path()).unwrap())].into();
    // A file whose writes say in the log what the disk has begun to be written with.
    let marker = directory.path().join("marker");
    fs::write(&marker, "").unwrap();
    let marks = ImageFile::open(&marker, true).unwrap();
    let log = record(|| {
        let image = open(&disk, true);
        assert!(image.bitmap_store().unwrap().attach("a", &exact()));
        let file = BlockingFile::new(image.device());
        for at in WRITES {
            file.write_at(&[1; 512], at, Flags::NONE).unwrap();
            marks.write_at(0, b"written").unwrap();
        }
        image.close().unwrap();
    });
    let after = fs::read(place.path()).unwrap();
    assert_eq!(dirty(&disk), Some([true; 3]));
    let mut trusted = [0; WRITES.len() + 1];
    for end in 0..=log.len() {
        let steps = &log[..end];
        let is_mark = |step: &&(PathBuf, Change)| step.0 == marker;
        let written = steps.iter().filter(is_mark).count();
        let torn = (0..4).map(UnsyncedWrites::Torn);
        for unsynced in [UnsyncedWrites::Lost, UnsyncedWrites::There].into_iter().chain(torn) {
            for (path, bytes) in cut(&stored, steps, unsynced) {
                fs::write(path, bytes).unwrap();
            }
            if let Some(found) = dirty(&disk) {
                assert!(found[..written].iter().all(|it| *it), "{end}, {unsynced:?}: {found:?}");
                trusted[written] += 1;
            }
        }
    }
    fs::write(place.path(), after).unwrap();
    assert_eq!(dirty(&disk), Some([true; 3]));
    assert!(trusted[1..].iter().all(|count| *count > 0), "{trusted:?}");
}

#[test]
fn a_removal_of_the_last_bitmap_is_durable_before_the_disk_is_written_to() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, place) = disk_with_bitmap(directory.path());
    place.remove("a").unwrap();
    let synced = |writable| {
        let log = record(|| open(&disk, writable).close().unwrap());
        log.iter().any(|(path, change)| path == place.path() && matches!(change, Change::Sync))
    };
    assert!(synced(true), "a removal that was cut off could come undone");
    assert!(!synced(false));
}

#[test]
fn c90_a_region_that_is_not_written_to_gets_its_exact_bits_and_has_all_changes_at_any_power_cut() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, place) = disk_with_bitmap(directory.path());
    let before: BTreeMap<PathBuf, Vec<u8>> =
        [(place.path().to_owned(), fs::read(place.path()).unwrap())].into();
    let mut written = 0;
    let log = record(|| {
        let image = open(&disk, true);
        let store = image.bitmap_store().unwrap();
        assert!(store.attach("a", &exact()));
        let file = BlockingFile::new(image.device());
        for at in WRITES {
            file.write_at(&[1; 512], at, Flags::NONE).unwrap();
        }
        assert!(store.rest().is_none(), "all were written to since");
        written = logged_steps();
        let resting = store.rest().unwrap();
        store.cool(resting, &[ByteRange::new(WRITES[1], 512)]).unwrap();
        file.write_at(&[2; 512], WRITES[2], Flags::NONE).unwrap();
    });
    assert!(log.len() > written);
    for end in written..=log.len() {
        let torn = (0..8).map(UnsyncedWrites::Torn);
        for unsynced in [UnsyncedWrites::Lost, UnsyncedWrites::There].into_iter().chain(torn) {
            for (path, bytes) in cut(&before, &log[..end], unsynced) {
                fs::write(path, bytes).unwrap();
            }
            assert_eq!(dirty(&disk), Some([true; 3]), "{end}, {unsynced:?}");
        }
    }
    for (path, bytes) in cut(&before, &log, UnsyncedWrites::There) {
        fs::write(path, bytes).unwrap();
    }
    // One granule, and the 8 of a region each: that of a change in flight, and one that was opened again.
    let ones: u32 = stored(&disk).unwrap().iter().map(|byte| byte.count_ones()).sum();
    assert_eq!(ones, 1 + 8 + 8);
}
