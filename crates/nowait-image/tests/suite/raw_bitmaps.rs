//! The bitmaps of raw disks: when they are trusted, and who may use them.
//!
//! Invariant: a disk is written to only with its bitmaps, or with none that would be trusted later.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use nowait::{BlockingFile, ByteRange, Direct, Flags};
use nowait_image::bitmap_changes::NewBitmap;
use nowait_image::lock::{Access, lock};
use nowait_image::{BitmapsPlace, ChainOptions, Header, Image, ImageError, Locking, Warning};
use nowait_testkit::{Random, seed, wait_until};

const SIZE: u64 = 64 << 20;

fn open_with(path: &Path, writable: bool, locking: Locking) -> Result<Image, ImageError> {
    let direct = Direct::Off;
    nowait_image::open(path, &ChainOptions { writable, direct, locking, ..ChainOptions::default() })
}

/// Without locks: a program that another test starts has those of a file that was just closed until its execve(2).
fn open(path: &Path, writable: bool) -> Result<Image, ImageError> {
    open_with(path, writable, Locking::Unlocked)
}

/// A raw disk of `size` bytes with bitmap `a`.
fn disk(size: u64) -> (tempfile::TempDir, PathBuf, BitmapsPlace) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    File::create_new(&path).unwrap().set_len(size).unwrap();
    let image = open(&path, true).unwrap();
    let place = image.bitmaps_place().unwrap().clone();
    image.close().unwrap();
    add(&place, "a");
    (directory, path, place)
}

fn add(place: &BitmapsPlace, name: &str) {
    place.add(&NewBitmap { name: name.into(), granularity: 65536, enabled: true }).unwrap();
}

fn is_changed(image: &Image) -> bool {
    image.warnings().iter().any(|warning| matches!(warning, Warning::ChangedDisk(_)))
}

/// The dirty granules of the first bitmap.
fn dirty(image: &Image) -> Vec<u64> {
    let (_, bits) = image.stored_bitmaps().unwrap().remove(0);
    let mut all = Vec::new();
    std::io::Read::read_to_end(&mut bits.unwrap(), &mut all).unwrap();
    (0..all.len() as u64 * 8).filter(|at| all[(at / 8) as usize] & 1 << (at % 8) != 0).collect()
}

#[test]
fn each_kind_of_change_is_in_a_bitmap_by_regions() {
    let (_directory, path, _) = disk(SIZE);
    let region = 256;
    let image = open(&path, true).unwrap();
    let file = BlockingFile::new(image.device());
    file.write_at(&[1; 5], 7, Flags::NONE).unwrap();
    file.zero(ByteRange::new(20 << 20, 65536), Flags::NONE).unwrap();
    // Where nothing can be discarded, nothing has changed.
    let _ = file.discard(ByteRange::new(40 << 20, 65536));
    file.read_at(&mut [0; 512], 60 << 20).unwrap();
    drop(file);
    image.close().unwrap();
    let image = open(&path, false).unwrap();
    assert!(!is_changed(&image));
    let found = dirty(&image);
    assert!(found.starts_with(&(0..2 * region).collect::<Vec<_>>()), "{found:?}");
    assert!(found.iter().all(|at| *at < 3 * region), "{found:?}");
}

#[test]
fn c94_bitmaps_that_another_process_has_locked_keep_the_disk_from_being_written_to() {
    let (_directory, path, place) = disk(SIZE);
    let locked = |writable| open_with(&path, writable, Locking::Locked);
    let is_of_bitmaps = |refused: &ImageError| refused.path() == place.path();
    let before = fs::read(place.path()).unwrap();
    for (other, may_read) in [(Access::Read, true), (Access::Write, false)] {
        let held = File::options().read(true).write(true).open(place.path()).unwrap();
        wait_until("the lock", || lock(held.as_fd(), other).is_ok());
        // The disk itself may be locked for a moment by a program that another test has started.
        wait_until("a refusal", || locked(true).err().is_some_and(|it| is_of_bitmaps(&it)));
        let mut reader = None;
        wait_until("a reader", || {
            reader = locked(false).ok();
            reader.is_some()
        });
        let found = reader.unwrap().stored_bitmaps().unwrap().len();
        assert_eq!(found, usize::from(may_read), "bitmaps of a disk that is only read");
        assert!(fs::read(place.path()).unwrap() == before);
    }
    let mut first = None;
    wait_until("the disk", || {
        first = locked(true).ok();
        first.is_some()
    });
    let held = File::open(place.path()).unwrap();
    assert!(lock(held.as_fd(), Access::Read).is_err(), "an open image has them locked");
}

#[test]
fn a_disk_of_any_size_has_a_file_for_it() {
    for (size, cluster_bits) in [
        (0, 16),
        (1, 16),
        (513, 16),
        (4 << 30, 16),
        ((4 << 30) + 1, 17),
        (128 << 30, 21),
        ((1 << 40) + 512, 21),
    ] {
        let (_directory, path, place) = disk(size);
        let header = Header::parse(&fs::read(place.path()).unwrap()).unwrap();
        assert_eq!(header.size, size.next_multiple_of(512), "{size}");
        assert_eq!(header.cluster_bits, cluster_bits, "{size}");
        let image = open(&path, true).unwrap();
        assert!(!is_changed(&image) && image.bitmap_store().is_some(), "{size}");
        if size > 0 {
            let file = BlockingFile::new(image.device());
            file.write_at(&[1], size - 1, Flags::NONE).unwrap();
        }
        image.close().unwrap();
        let image = open(&path, false).unwrap();
        let last = (size > 0).then(|| (size - 1) / 65536);
        assert_eq!(dirty(&image).last().copied(), last, "{size}");
        if nowait_testkit::require_tool("qemu-img") && size > 0 {
            let check = ["check", "-q"];
            nowait_testkit::Finished::succeeds(
                nowait_testkit::tool("qemu-img").args(check).arg(place.path()),
            );
        }
    }
}

#[test]
fn bits_come_along_with_another_size_and_what_is_new_is_clean() {
    let (_directory, path, place) = disk(SIZE);
    let image = open(&path, true).unwrap();
    BlockingFile::new(image.device()).write_at(&[1; 512], SIZE - 512, Flags::NONE).unwrap();
    image.close().unwrap();
    let before = dirty(&open(&path, false).unwrap());
    let file = File::options().write(true).open(&path).unwrap();
    for size in [SIZE + 1, 1 << 34, SIZE - 1] {
        file.set_len(size).unwrap();
        place.resize().unwrap();
        let image = open(&path, false).unwrap();
        assert!(!is_changed(&image), "{size}");
        assert_eq!(dirty(&image), before, "{size}");
    }
    file.set_len(1 << 20).unwrap();
    place.resize().unwrap();
    file.set_len(SIZE).unwrap();
    place.resize().unwrap();
    assert!(dirty(&open(&path, false).unwrap()).is_empty(), "what was cut off comes back clean");
}

#[test]
fn c93_a_size_that_no_server_has_given_makes_all_dirty() {
    for size in [SIZE / 2, SIZE - 512, SIZE + 512, 2 * SIZE, 1 << 34] {
        let (_directory, path, _) = disk(SIZE);
        File::options().write(true).open(&path).unwrap().set_len(size).unwrap();
        let image = open(&path, true).unwrap();
        assert!(is_changed(&image), "{size}");
        assert_eq!(dirty(&image), (0..size.div_ceil(65536)).collect::<Vec<_>>(), "{size}");
    }
}

#[test]
fn c94_random_damage_of_the_bitmaps_never_keeps_a_raw_file_from_being_served() {
    let (_directory, path, place) = disk(SIZE);
    add(&place, "b");
    let good = fs::read(place.path()).unwrap();
    let used: Vec<usize> = (0..good.len()).filter(|at| good[*at] != 0).collect();
    let mut random = Random::from_seed(seed());
    for _ in 0..60 {
        let mut bytes = good.clone();
        for _ in 0..1 + random.below(4) {
            // Where something is, or in the header.
            let at = match random.below(2) {
                0 => used[random.below(used.len() as u64) as usize],
                _ => random.below(512) as usize,
            };
            bytes[at] = random.below(256) as u8;
        }
        fs::write(place.path(), &bytes).unwrap();
        for writable in [false, true] {
            let image = open(&path, writable).unwrap();
            let file = BlockingFile::new(image.device());
            let _ = image.stored_bitmaps();
            if writable {
                file.write_at(&[1; 512], SIZE / 2, Flags::NONE).unwrap();
            }
            file.read_at(&mut [0; 512], SIZE / 2).unwrap();
            drop(file);
            image.close().unwrap();
        }
    }
}
