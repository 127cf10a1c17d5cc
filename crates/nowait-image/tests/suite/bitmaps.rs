//! Images with dirty bitmaps that are not as they should be: not written to, and not changed.
//!
//! Invariant: what is refused for writing is read as before.

use std::fs;
use std::path::{Path, PathBuf};

use nowait::{BlockingFile, Direct, Flags};
use nowait_image::bitmap_changes::{self, NewBitmap};
use nowait_image::create::{CreateOptions, create};
use nowait_image::{Bitmap, Chain, ChainOptions, Format, Image, ImageError, Locking};

const CLUSTER: u64 = 512;
const SIZE: u64 = 1 << 20;

fn options(writable: bool) -> ChainOptions {
    let (locking, direct) = (Locking::Unlocked, Direct::Off);
    ChainOptions { writable, locking, direct, ..ChainOptions::default() }
}

pub(crate) fn open(path: &Path, writable: bool) -> Result<Image, ImageError> {
    nowait_image::open(path, &options(writable))
}

pub(crate) fn add(path: &Path, name: &str, granularity: u64) -> Result<(), ImageError> {
    let new = NewBitmap { name: name.into(), granularity, enabled: true };
    bitmap_changes::add(&Chain::open(path, &options(true)).unwrap(), &new, None)
}

/// An image of `size` bytes in a directory of its own.
pub(crate) fn image(size: u64, cluster_bytes: u64) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    let usual = CreateOptions::new(Format::Qcow2, Some(size));
    create(&path, &CreateOptions { cluster_bytes: Some(cluster_bytes), ..usual }).unwrap();
    (directory, path)
}

fn refusal(path: &Path) -> String {
    let before = fs::read(path).unwrap();
    let why = open(path, true).err().expect("a refusal").to_string();
    assert!(!why.contains('\n'), "{why}");
    assert!(fs::read(path).unwrap() == before);
    assert!(open(path, false).is_ok());
    why
}

/// The position of the entry of bitmap `name` in `bytes`.
pub(crate) fn entry_of(bytes: &[u8], name: &str) -> usize {
    bytes.windows(name.len()).rposition(|found| found == name.as_bytes()).unwrap() - 24
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

#[test]
fn a_bitmap_whose_table_or_clusters_are_wrong_is_not_written_to() {
    let (_directory, path) = image(SIZE, CLUSTER);
    add(&path, "first one", 512).unwrap();
    add(&path, "second one", 512).unwrap();
    let good = fs::read(&path).unwrap();
    let [first, second] = ["first one", "second one"].map(|name| entry_of(&good, name));
    let (table, other) = (number(&good, first) as usize, number(&good, second) as usize);
    let cases: [(&str, usize, u64, &str); 6] = [
        ("a cluster of another bitmap", table, number(&good, other), "a bitmap is damaged"),
        ("a position with a flag", table, number(&good, table) + 1, "a bitmap is damaged"),
        ("a cluster behind the end", table, 1 << 40, "a bitmap is damaged"),
        ("inside a cluster", table, number(&good, table) | 0x200 >> 1, "a bitmap is damaged"),
        ("the refcount table", table, CLUSTER, "with another use"),
        ("a table inside a cluster", first, table as u64 + 8, "the list of its bitmaps is damaged"),
    ];
    for (what, at, value, why) in cases {
        let mut bytes = good.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
        fs::write(&path, &bytes).unwrap();
        match open(&path, false).unwrap().stored_bitmaps() {
            Ok(_) => {}
            Err(error) => assert!(error.to_string().contains(why), "{what}: {error}"),
        }
        let found = refusal(&path);
        assert!(found.contains(why), "{what}: {found}");
    }
    // A name twice.
    let mut bytes = good.clone();
    bytes[second + 18..second + 20].copy_from_slice(&9u16.to_be_bytes());
    bytes[second + 24..second + 33].copy_from_slice(b"first one");
    fs::write(&path, &bytes).unwrap();
    assert!(refusal(&path).contains("the list of its bitmaps is damaged"));
}

#[test]
fn the_bits_of_all_bitmaps_have_a_bound() {
    // 32 MiB of bits each.
    let (_directory, path) = image(1 << 40, 2 << 20);
    for number in 0..8 {
        add(&path, &number.to_string(), 4096).unwrap();
    }
    let why = add(&path, "one more", 4096).unwrap_err().to_string();
    assert!(why.contains("too many bits"), "{why}");
    let why = add(&path, "one more", 2 << 30).unwrap_err().to_string();
    assert!(why.contains("too many bits"), "{why}");
    let opened = open(&path, true).unwrap();
    assert_eq!(opened.bitmap_store().unwrap().bitmaps().len(), 8);
}

#[test]
fn an_image_that_nothing_has_bits_of_keeps_a_bitmap_by_regions() {
    let (_directory, path) = image(64 << 20, 65536);
    add(&path, "a", 65536).unwrap();
    let opened = open(&path, true).unwrap();
    let file = BlockingFile::new(opened.device());
    file.write_at(&[1; 512], 20 << 20, Flags::NONE).unwrap();
    drop(file);
    opened.close().unwrap();
    let opened = open(&path, false).unwrap();
    let (bitmap, bits) = opened.stored_bitmaps().unwrap().pop().unwrap();
    let expected =
        Bitmap { name: "a".into(), granularity: 65536, in_use: false, kept: false, auto: true };
    assert_eq!(bitmap, expected);
    let mut all = [0; 128];
    std::io::Read::read_exact(&mut bits.unwrap(), &mut all).unwrap();
    // 16 MiB are 256 granules.
    let dirty: Vec<usize> = (0..1024).filter(|at| all[at / 8] & 1 << (at % 8) != 0).collect();
    assert_eq!(dirty, (256..512).collect::<Vec<_>>());
}
