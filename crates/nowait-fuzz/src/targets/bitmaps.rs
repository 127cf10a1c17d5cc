//! A qcow2 image with dirty bitmaps, byte for byte, that is opened for writing, written to, and left as by a kill.
//!
//! Checked: a bitmap that records has each granule that was written to, also after another start and an end in order; an
//! image with consistent metadata stays consistent.

use std::fs;
use std::io::Read;
use std::path::Path;

use nowait::sim::Random;
use nowait::{BlockingFile, Direct, Flags};
use nowait_image::bitmap_changes::{self, NewBitmap};
use nowait_image::check::check;
use nowait_image::create::{CreateOptions, create};
use nowait_image::{Bitmap, Chain, ChainOptions, Format, Image, Locking, StoredBits, bitmaps_of};

use crate::split::seed_of;
use crate::target::{Check, Target};
use crate::targets::image::scratch;

/// Writes to an image.
const WRITES: u32 = 6;
/// Bytes of the disk of the seeds.
const DISK_BYTES: u64 = 2 << 20;

pub(crate) const TARGET: Target = Target {
    name: "bitmaps",
    about: "qcow2 images with dirty bitmaps that are written to",
    prepare,
    seeds,
    words: &[
        &[0x23, 0x85, 0x28, 0x75],
        // Flags, types and granularities of entries; an autoclear bit of ours.
        &[0, 0, 0, 1, 1, 9],
        &[0, 0, 0, 2, 1, 16],
        &[0, 0, 0, 3, 1, 31],
        &[0, 0, 0, 1, 0, 0, 0, 1],
        &[0, 0, 0, 0, 0, 0, 0, 1],
        &[0, 0, 0, 0, 0, 0, 2, 0],
    ],
    longest: 48 << 10,
    // The bits, and the table of each cluster of them.
    memory: 512 << 20,
};

/// Small images with one, two and no bitmaps.
fn seeds() -> Vec<Vec<u8>> {
    let make = |cluster_bytes: u64, granularities: &[u64]| {
        let directory = scratch().ok()?;
        let path = directory.path().join("image");
        let cluster_bytes = Some(cluster_bytes);
        let usual = CreateOptions::new(Format::Qcow2, Some(DISK_BYTES));
        create(&path, &CreateOptions { cluster_bytes, ..usual }).ok()?;
        for (granularity, number) in granularities.iter().zip(0..) {
            let (name, enabled) = (format!("bitmap {number}"), number != 1);
            let new = NewBitmap { name, granularity: *granularity, enabled };
            bitmap_changes::add(&open(&path, true).ok()?, &new, None).ok()?;
        }
        fs::read(&path).ok()
    };
    let all: [(u64, &[u64]); 3] = [(512, &[512]), (1024, &[4096, 512, 65536]), (4096, &[])];
    all.into_iter().filter_map(|(cluster, granularities)| make(cluster, granularities)).collect()
}

fn options(writable: bool) -> ChainOptions {
    ChainOptions {
        format: Some(Format::Qcow2),
        writable,
        locking: Locking::Unlocked,
        direct: Direct::Off,
        ..ChainOptions::default()
    }
}

fn open(path: &Path, writable: bool) -> Result<Chain, String> {
    Chain::open(path, &options(writable)).map_err(|error| error.to_string())
}

fn prepare() -> Result<Check, String> {
    let directory = scratch()?;
    let path = directory.path().join("image");
    Ok(Box::new(move |input| {
        // The closure keeps the directory alive.
        debug_assert!(path.starts_with(directory.path()));
        use_image(&path, input)
    }))
}

fn use_image(path: &Path, input: &[u8]) -> Result<(), String> {
    fs::write(path, input).map_err(|error| format!("{}: {error}", path.display()))?;
    let was_sound = is_sound(path);
    let Ok(image) = nowait_image::open(path, &options(true)) else { return Ok(()) };
    let all = image.bitmap_store().map(|it| it.bitmaps()).unwrap_or_default();
    let recording: Vec<Bitmap> = all.into_iter().filter(|it| it.auto && it.is_usable()).collect();
    let written = write(&image, seed_of(input));
    // Nothing is stored, as after a kill.
    drop(image);
    let stored = || bitmaps_of(open(path, false)?.top()).map_err(|error| error.to_string());
    compare(&stored()?, &recording, &written, "after a kill")?;
    if let Ok(image) = nowait_image::open(path, &options(true)) {
        let _ = image.close();
        compare(&stored()?, &recording, &written, "at the end")?;
    }
    match was_sound && !is_sound(path) {
        true => Err("the image is corrupt after its use".to_owned()),
        false => Ok(()),
    }
}

fn is_sound(path: &Path) -> bool {
    let checked = open(path, false).ok().and_then(|chain| check(&chain, &mut |_, _| {}).ok());
    checked.is_some_and(|report| report.corruptions == 0)
}

/// Writes here and there. Returns where that has succeeded.
pub(super) fn write(image: &Image, seed: u64) -> Vec<u64> {
    let mut random = Random::new(seed);
    let file = BlockingFile::new(image.device());
    let size = image.size();
    let mut written = Vec::new();
    for _ in 0..WRITES {
        let pos = random.below(size.max(1)) / 512 * 512;
        if pos + 512 <= size && file.write_at(&[7; 512], pos, Flags::NONE).is_ok() {
            written.push(pos);
        }
    }
    let _ = file.flush();
    written
}

/// Checks that each of `recording` is in `stored`, and has what was written.
pub(super) fn compare(
    stored: &[(Bitmap, Option<StoredBits>)],
    recording: &[Bitmap],
    written: &[u64],
    when: &str,
) -> Result<(), String> {
    for bitmap in recording {
        let named = stored.iter().find(|(it, _)| it.name == bitmap.name);
        let Some((_, Some(bits))) = named else {
            return Err(format!("{when}, bitmap {:?} is lost", bitmap.name));
        };
        let mut all = Vec::new();
        bits.clone().read_to_end(&mut all).map_err(|error| format!("{when}: {error}"))?;
        for pos in written {
            let granule = (pos / bitmap.granularity) as usize;
            if all.get(granule / 8).is_none_or(|byte| byte & 1 << (granule % 8) == 0) {
                return Err(format!("{when}, byte {pos} is clean in {:?}", bitmap.name));
            }
        }
    }
    Ok(())
}
