//! A qcow2 image, byte for byte, and one of its snapshots: opened, mapped, checked, read, described, repaired.
//!
//! Checked: the map agrees with the bytes that are read and covers the disk; a check after a repair
//! agrees with the result of the repair.

use std::fs;
use std::path::{Path, PathBuf};

use nowait_image::check::check;
use nowait_image::map::{MapEntry, map};
use nowait_image::repair::repair;
use nowait_image::{Chain, ChainOptions, ChainReader, Format, ImageFile, Locking};
use tempfile::TempDir;

use crate::target::{Check, Target};

/// The most entries of a map that are compared with the bytes read.
const COMPARED_ENTRIES: usize = 64;
/// The most bytes of each entry that are compared.
const COMPARED_BYTES: u64 = 4096;
/// The snapshot that the seeds have.
const SNAPSHOT: &str = "one";
/// The backing file that images may name.
pub(crate) const BACKING: &str = "below.raw";
const BACKING_BYTES: usize = 40_000;
/// The most memory of one image: an L1 table, a refcount table and a directory of the largest size,
/// as stored and as parsed.
const MEMORY_BYTES: usize = 256 << 20;

pub(crate) const TARGET: Target = Target {
    name: "image",
    about: "qcow2 headers and tables: open, map, check, read, repair",
    prepare,
    seeds: || Vec::new(),
    words: &[
        b"QFI\xfb",
        &[0, 0, 0, 9],
        &[0, 0, 0, 21],
        &[0x80, 0, 0, 0, 0, 0, 0, 0],
        &[0xc0, 0, 0, 0, 0, 0, 0, 0],
        &[0x40, 0, 0, 0, 0, 0, 0, 0],
        &[0, 0, 0, 0, 0, 0, 0, 1],
        &[0, 0, 0, 0, 0, 0, 2, 0],
        &[0, 0, 0, 0, 0, 0, 0x10, 0],
        &[0x80, 0, 0, 0, 0, 0, 2, 0],
        &[0xe2, 0x79, 0x2a, 0xca],
        &[0x44, 0x41, 0x54, 0x41],
        &[0x23, 0x85, 0x28, 0x75],
        BACKING.as_bytes(),
        b"raw",
        // A frame of zstd; and subclusters that are allocated, or zeros.
        &[0x28, 0xb5, 0x2f, 0xfd],
        &[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
        &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0],
    ],
    // An image with subclusters has clusters of 16 KiB at least, and some six of them.
    longest: 100 << 10,
    memory: MEMORY_BYTES,
};

/// The directory of the image under test; in memory if possible, for speed.
pub(crate) fn scratch() -> Result<TempDir, String> {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.map_err(|error| format!("no temporary directory: {error}"))
}

/// The content of the backing file.
pub(crate) fn backing_bytes() -> Vec<u8> {
    (0..BACKING_BYTES).map(|at| (at / 512) as u8 | 1).collect()
}

fn prepare() -> Result<Check, String> {
    let directory = scratch()?;
    fs::write(directory.path().join(BACKING), backing_bytes()).map_err(|e| e.to_string())?;
    let path = directory.path().join("image");
    Ok(Box::new(move |input| {
        // The closure keeps the directory alive.
        debug_assert!(path.starts_with(directory.path()));
        check_input(&path, input)
    }))
}

fn check_input(path: &PathBuf, input: &[u8]) -> Result<(), String> {
    fs::write(path, input).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut options = ChainOptions {
        format: Some(Format::Qcow2),
        damaged: true,
        locking: Locking::Unlocked,
        ..ChainOptions::default()
    };
    // A rejection is an error with a message; there is nothing else to check.
    if let Ok(chain) = Chain::open(path, &options) {
        look_into(&chain)?;
    }
    let snapshot = PathBuf::from(format!("{}@{SNAPSHOT}", path.display()));
    if let Ok(chain) = Chain::open(&snapshot, &options) {
        look_into(&chain)?;
    }
    let file = ImageFile::open(path, false).map_err(|error| error.to_string())?;
    let _ = Format::Qcow2.info(&file, path, None);
    options.writable = true;
    let Ok(chain) = Chain::open(path, &options) else { return Ok(()) };
    let Ok(repaired) = repair(&chain, &mut |_, _| {}) else { return Ok(()) };
    drop(chain);
    // Without its damage marks the image may be one that can only be read, for example with
    // bitmaps.
    options.writable = false;
    let again = Chain::open(path, &options).and_then(|chain| check(&chain, &mut |_, _| {}));
    match again {
        Ok(report) if report == repaired.report => Ok(()),
        other => Err(format!("after a repair that says {repaired:?} it is {other:?}")),
    }
}

fn look_into(chain: &Chain) -> Result<(), String> {
    let size = chain.top().size;
    let (mut end, mut entries) = (0, Vec::new());
    let mapped = map(chain, |entry| {
        if entry.start == end && entry.length > 0 && entries.len() < COMPARED_ENTRIES {
            entries.push(*entry);
        }
        end = entry.start.saturating_add(entry.length);
        Ok(())
    });
    if mapped.is_ok() && end != size {
        return Err(format!("the map of {size} bytes ends at {end}"));
    }
    let _ = check(chain, &mut |_, _| {});
    let Ok(reader) = ChainReader::new(chain.layers()) else { return Ok(()) };
    for entry in &entries {
        compare(chain, &reader, entry)?;
    }
    Ok(())
}

/// Checks that the bytes agree with `entry`, if they can be read.
fn compare(chain: &Chain, reader: &ChainReader, entry: &MapEntry) -> Result<(), String> {
    let len = entry.length.min(COMPARED_BYTES) as usize;
    let (mut read, mut raw) = (vec![0xee; len], vec![0; len]);
    if reader.read_at(entry.start, &mut read).is_err() {
        return Ok(());
    }
    let expected = match (entry.zero, entry.offset) {
        (true, _) => true,
        (false, Some(offset)) => match chain.layers().get(entry.depth) {
            Some(layer) => layer.data_file().read_at(offset, &mut raw).is_ok(),
            None => return Err(format!("{entry:?} is in no image of the chain")),
        },
        // Compressed.
        (false, None) => false,
    };
    if expected && read != raw {
        return Err(format!("{entry:?} does not say what is read"));
    }
    Ok(())
}
