//! When the bits of a stored bitmap are used, and what they are after an end in order (C75, C76).
//!
//! Invariant: a kill is the file as it was while the image was open.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nowait::{BlockingFile, Flags};
use nowait_image::bitmap_changes::NewBitmap;
use nowait_image::{BitmapBits, Image};
use nowait_testkit::{Random, seed};

use crate::bitmaps::{add, entry_of, image, open};

const SIZE: u64 = 64 << 20;
const GRANULARITY: u64 = 65536;
/// Where a header has its autoclear bits, and an entry of a bitmap its flags, in bytes.
const AUTOCLEAR_AT: usize = 88;
const FLAGS_AT: usize = 12;
const IN_USE: u8 = 1;
/// The granule that is written to.
const WRITTEN: u64 = 300;

/// How the bitmaps of an image are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// They say what was changed.
    Used,
    /// They are listed, and say nothing.
    Inconsistent,
    /// There are none.
    Unlisted,
}

use Found::{Inconsistent, Unlisted, Used};

/// How the bitmaps `names` of the image at `path` are found by a reader and by the next writer, which agree.
fn found<const N: usize>(path: &Path, names: [&str; N]) -> [Found; N] {
    let reader = open(path, false).unwrap();
    let mut read = names.map(|_| Unlisted);
    for (bitmap, bits) in reader.stored_bitmaps().unwrap() {
        let at = names.iter().position(|name| *name == bitmap.name).unwrap();
        let Some(mut bits) = bits else {
            read[at] = Inconsistent;
            continue;
        };
        let mut all = Vec::new();
        bits.read_to_end(&mut all).unwrap();
        let is_dirty = all[WRITTEN as usize / 8] & 1 << (WRITTEN % 8) != 0;
        assert!(is_dirty, "the bits of {} miss a change", bitmap.name);
        read[at] = Used;
    }
    let copy = path.with_extension("copy");
    fs::copy(path, &copy).unwrap();
    let writer = open(&copy, true).unwrap();
    for (name, read) in names.iter().zip(read) {
        let is_kept = writer.bitmap_store().is_some_and(|store| store.keeps(name));
        assert_eq!(is_kept, read == Used, "{name} of a writer");
    }
    read
}

fn write(image: &Image, granule: u64) {
    let file = BlockingFile::new(image.device());
    file.write_at(&[1; 512], granule * GRANULARITY, Flags::NONE).unwrap();
}

#[test]
fn c75_the_bits_of_a_bitmap_are_used_only_if_no_other_program_can_have_written_without_it() {
    let (_directory, path) = image(SIZE, 65536);
    let names = ["first one", "second one"];
    names.iter().for_each(|name| add(&path, name, GRANULARITY).unwrap());
    let opened = open(&path, true).unwrap();
    write(&opened, WRITTEN);
    let killed = fs::read(&path).unwrap();
    opened.close().unwrap();
    let closed = fs::read(&path).unwrap();
    let flags = names.map(|name| entry_of(&closed, name) + FLAGS_AT + 3);
    let (low, [of_first, of_second]) = (AUTOCLEAR_AT + 7, [1, 2]);
    // The byte of the autoclear bits that are of this program: one for each bitmap.
    let own = AUTOCLEAR_AT + 3;
    assert_eq!((killed[own], killed[low] & 1), (of_first | of_second, 1));
    assert_eq!((closed[own], closed[low] & 1), (0, 1));
    type Changes<'a> = &'a [(usize, u8)];
    let cases: [(&str, &[u8], Changes<'_>, [Found; 2]); 9] = [
        ("an end in order", &closed, &[], [Used; 2]),
        ("a kill", &killed, &[], [Used; 2]),
        ("then a program without bitmaps", &closed, &[(low, 0)], [Unlisted; 2]),
        ("a kill, then a program without bitmaps", &killed, &[(low, 0), (own, 0)], [Unlisted; 2]),
        ("a kill, then a program with bitmaps", &killed, &[(own, 0)], [Inconsistent; 2]),
        ("one has been written without", &killed, &[(own, of_first)], [Used, Inconsistent]),
        ("the other one", &killed, &[(own, of_second)], [Inconsistent, Used]),
        (
            "a program with bitmaps that was killed",
            &closed,
            &[(flags[0], IN_USE), (flags[1], IN_USE)],
            [Inconsistent; 2],
        ),
        ("one of which it had in use", &closed, &[(flags[1], IN_USE)], [Used, Inconsistent]),
    ];
    for (what, bytes, changes, expected) in cases {
        let mut bytes = bytes.to_vec();
        changes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        fs::write(&path, &bytes).unwrap();
        assert_eq!(found(&path, names), expected, "{what}");
        // Bits that are not used stay so, whatever this program writes, and whether it closes the image or is killed.
        let opened = open(&path, true).unwrap();
        write(&opened, WRITTEN + 1);
        let killed = fs::read(&path).unwrap();
        opened.close().unwrap();
        assert_eq!(found(&path, names), expected, "{what}, and an end");
        fs::write(&path, &killed).unwrap();
        assert_eq!(found(&path, names), expected, "{what}, and a kill");
    }
}

/// A bitmap in memory.
struct Memory {
    bits: Vec<u8>,
    is_enabled: bool,
}

impl Memory {
    fn new(random: &mut Random, granularity: u64, is_enabled: bool) -> Arc<Self> {
        Arc::new(Self { bits: random.bytes((SIZE / granularity / 8) as usize), is_enabled })
    }
}

impl BitmapBits for Memory {
    fn is_enabled(&self) -> bool {
        self.is_enabled
    }

    fn copy(&self, at: u64, memory: &mut [u8]) {
        memory.fill(0xff);
        let from = self.bits.get(at as usize..).unwrap_or_default();
        let len = from.len().min(memory.len());
        memory[..len].copy_from_slice(&from[..len]);
    }
}

/// A disk with bitmaps of these names and granularities: a qcow2 image whose bits have several clusters, or a raw file.
fn disk_with(bitmaps: [(&str, u64); 2], is_raw: bool) -> (tempfile::TempDir, PathBuf) {
    if !is_raw {
        let (directory, path) = image(SIZE, 4096);
        bitmaps.iter().for_each(|(name, granularity)| add(&path, name, *granularity).unwrap());
        return (directory, path);
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    File::create_new(&path).unwrap().set_len(SIZE).unwrap();
    let opened = open(&path, true).unwrap();
    let place = opened.bitmaps_place().unwrap().clone();
    opened.close().unwrap();
    for (name, granularity) in bitmaps {
        place.add(&NewBitmap { name: name.into(), granularity, enabled: true }).unwrap();
    }
    (directory, path)
}

#[test]
fn c76_after_an_end_in_order_a_bitmap_is_what_it_was_in_memory_and_not_in_use() {
    let mut random = Random::from_seed(seed());
    let named = [("fine", 512), ("coarse", GRANULARITY)];
    for (is_raw, is_released) in [(false, false), (false, true), (true, false), (true, true)] {
        let what = format!("raw: {is_raw}, released: {is_released}");
        let (_directory, path) = disk_with(named, is_raw);
        // The last one has nothing more than the ones before.
        for enabled in [[true, false], [false, true], [true, true]] {
            let opened = open(&path, true).unwrap();
            let store = opened.bitmap_store().unwrap();
            let [fine, coarse] = [0, 1].map(|n| Memory::new(&mut random, named[n].1, enabled[n]));
            let in_memory = [fine, coarse];
            for ((name, _), bits) in named.iter().zip(&in_memory) {
                let bits: Arc<dyn BitmapBits> = bits.clone();
                assert!(store.attach(name, &bits), "{what}");
            }
            // On storage the bitmaps that record have whole regions then.
            (0..4).for_each(|n| write(&opened, n * 256 + random.below(256)));
            let meanwhile = open(&path, false).unwrap().stored_bitmaps().unwrap();
            assert!(meanwhile.iter().all(|(bitmap, _)| bitmap.in_use), "{what}");
            match is_released {
                // The image stays open until another process has it.
                true => {
                    opened.settle().unwrap();
                    opened.release_bitmaps().unwrap();
                }
                false => opened.close().unwrap(),
            }
            let reader = open(&path, false).unwrap();
            let stored = reader.stored_bitmaps().unwrap();
            assert_eq!(stored.len(), 2, "{what}");
            for (((bitmap, bits), memory), (name, granularity)) in
                stored.into_iter().zip(&in_memory).zip(named)
            {
                let flags = (bitmap.in_use, bitmap.kept, bitmap.auto);
                assert_eq!(flags, (false, false, memory.is_enabled), "{what}, {name}");
                assert_eq!((&*bitmap.name, bitmap.granularity), (name, granularity), "{what}");
                let mut found = vec![0; memory.bits.len()];
                bits.unwrap().read_exact(&mut found).unwrap();
                assert!(found == memory.bits, "{what}, {name}");
            }
        }
    }
}
