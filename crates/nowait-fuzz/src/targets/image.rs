//! A qcow2 image, byte for byte: opened, mapped, checked, read, repaired.
//!
//! Checked: what the map says of a place is what is read there, and covers the disk; a check of
//! what was repaired says what the repair said.
//! Knows: target. Known by: changed, mod.

use std::fs;
use std::path::{Path, PathBuf};

use nowait_image::check::check;
use nowait_image::map::{MapEntry, map};
use nowait_image::repair::repair;
use nowait_image::{Chain, ChainOptions, Format, Locking, Reader};
use tempfile::TempDir;

use crate::target::{Check, Target};

/// Entries of a map that are compared with what is read.
const COMPARED_ENTRIES: usize = 64;
/// Bytes of each that are.
const COMPARED_BYTES: u64 = 4096;
/// What images may name as their backing file.
pub(super) const BACKING: &str = "below.raw";
const BACKING_BYTES: usize = 40_000;
/// Memory of one image at most: an L1 table, a refcount table and a directory at their bounds, as
/// they are in the file and as they are taken apart.
const MEMORY_BYTES: usize = 256 << 20;

pub(super) const TARGET: Target = Target {
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
    ],
    longest: 64 << 10,
    memory: MEMORY_BYTES,
};

/// The directory of the image under test. In memory where there is such a place, for speed.
pub(super) fn scratch() -> Result<TempDir, String> {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.map_err(|error| format!("no temporary directory: {error}"))
}

/// What the backing file holds.
pub(super) fn backing_bytes() -> Vec<u8> {
    (0..BACKING_BYTES).map(|at| (at / 512) as u8 | 1).collect()
}

fn prepare() -> Result<Check, String> {
    let directory = scratch()?;
    fs::write(directory.path().join(BACKING), backing_bytes()).map_err(|e| e.to_string())?;
    let path = directory.path().join("image");
    Ok(Box::new(move |input| {
        // The directory is there as long as this is.
        debug_assert!(path.starts_with(directory.path()));
        look_at(&path, input)
    }))
}

fn look_at(path: &PathBuf, input: &[u8]) -> Result<(), String> {
    fs::write(path, input).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut options = ChainOptions {
        format: Some(Format::Qcow2),
        damaged: true,
        locking: Locking::Unlocked,
        ..ChainOptions::default()
    };
    // What is refused is refused in words; there is nothing else to check.
    if let Ok(chain) = Chain::open(path, &options) {
        look_into(&chain)?;
    }
    options.writable = true;
    let Ok(chain) = Chain::open(path, &options) else { return Ok(()) };
    let Ok(repaired) = repair(&chain, &mut |_, _| {}) else { return Ok(()) };
    drop(chain);
    // Without its marks of damage it may be one that is only read here: with bitmaps, say.
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
    let Ok(reader) = Reader::new(chain) else { return Ok(()) };
    for entry in &entries {
        compare(chain, &reader, entry)?;
    }
    Ok(())
}

/// Whether what is read is what `entry` says, where it can be read.
fn compare(chain: &Chain, reader: &Reader, entry: &MapEntry) -> Result<(), String> {
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
