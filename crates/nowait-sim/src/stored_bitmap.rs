//! A dirty bitmap in the images of some scenarios, and what it has to say whenever the image is opened.
//!
//! Invariant: the bitmap is added to an image that has nothing of its own, so each byte of the disk that is not as in the
//! image below is in a dirty granule, whatever has ended the use of the image (C74).

use std::io::Read;

use nowait::sim::Random;
use nowait_image::bitmap_changes::{self, NewBitmap};
use nowait_image::{Chain, ChainReader, Layer};

use crate::model::Violation;
use crate::scenario::Scenario;

const NAME: &str = "changes";
/// Bytes of a granule.
const GRANULARITY: u64 = 1024;

fn wrong(error: impl std::fmt::Display) -> Violation {
    Violation::new(error.to_string())
}

/// Whether the images of a scenario have a bitmap: those of a half, if their storage has room for it.
pub fn is_wanted(scenario: &Scenario) -> bool {
    let has_room = scenario.qcow2.is_some() && scenario.device.capacity == u64::MAX;
    has_room && Random::part(scenario.seed, u64::MAX - 32).below(2) == 0
}

/// Adds the bitmap to the top image of `chain`, which is new.
///
/// # Errors
/// It cannot be added.
pub fn add(chain: &Chain) -> Result<(), Violation> {
    let new = NewBitmap { name: NAME.into(), granularity: GRANULARITY, enabled: true };
    bitmap_changes::add(chain, &new, None).map_err(wrong)
}

/// Removes the bitmap of the top image of `chain`, if it has it.
///
/// # Errors
/// It cannot be removed.
pub fn remove(chain: &Chain) -> Result<(), Violation> {
    match bits_of(chain)? {
        Some(_) => bitmap_changes::remove(chain, NAME).map_err(wrong),
        None => Ok(()),
    }
}

/// The disk of `chain` is about to have `size` bytes. What was cut off comes back as zeros, and clean: the bitmap goes where
/// that may not be what the image below has.
///
/// # Errors
/// Like [`remove`].
pub fn before_resize(chain: &Chain, size: u64) -> Result<(), Violation> {
    let top = chain.top().size;
    let below = chain.layers().get(1).map_or(0, |below| below.size);
    if size < top || below > top { remove(chain) } else { Ok(()) }
}

/// The bits of the bitmap, if the image has it.
fn bits_of(chain: &Chain) -> Result<Option<Vec<u8>>, Violation> {
    let all = nowait_image::bitmaps_of(chain.top()).map_err(wrong)?;
    let Some((bitmap, bits)) = all.into_iter().next() else { return Ok(None) };
    let Some(mut bits) = bits else {
        return Err(Violation::new(format!("C75: a bitmap is lost: {bitmap:?}")));
    };
    let mut all = Vec::new();
    bits.read_to_end(&mut all).map_err(wrong)?;
    Ok(Some(all))
}

/// Checks that each byte of the disk of `chain` that is not as in the images below is dirty.
///
/// # Errors
/// One is clean, or the bitmap is lost.
pub fn check(chain: &Chain) -> Result<(), Violation> {
    let Some(bits) = bits_of(chain)? else { return Ok(()) };
    let disk = contents(chain.layers(), chain.top().size)?;
    let below = contents(chain.layers().get(1..).unwrap_or_default(), chain.top().size)?;
    let granules = disk.chunks(GRANULARITY as usize).zip(below.chunks(GRANULARITY as usize));
    for ((now, before), granule) in granules.zip(0..) {
        let is_dirty = bits.get(granule / 8).is_some_and(|byte| byte & 1 << (granule % 8) != 0);
        if now != before && !is_dirty {
            return Err(Violation::new(format!("C74: granule {granule} has changed and is clean")));
        }
    }
    Ok(())
}

/// The first `size` bytes of the disk of `layers`; zeros behind its end.
fn contents(layers: &[Layer], size: u64) -> Result<Vec<u8>, Violation> {
    let mut disk = vec![0; size as usize];
    if !layers.is_empty() {
        let reader = ChainReader::new(layers).map_err(wrong)?;
        let inside = reader.size().min(size) as usize;
        reader.read_at(0, disk.get_mut(..inside).unwrap_or_default()).map_err(wrong)?;
    }
    Ok(disk)
}
