//! The check of an image of a format that is only read.
//!
//! Checked: what is served is what the offline commands read and what the map says; no file is changed.

use std::fs;
use std::path::Path;

use nowait::BlockingFile;
use nowait_image::map::{MapEntry, map};
use nowait_image::{Chain, ChainOptions, ChainReader, Format, ImageError, ImageFile, Locking};

/// The most entries of a map that are looked at, and the most bytes of each.
const MAX_ENTRIES: usize = 64;
const MAX_BYTES: u64 = 8192;

/// Opens and reads the image at `path` in every way.
///
/// # Errors
/// The finding.
pub(crate) fn check(path: &Path, format: Format) -> Result<(), String> {
    let state = || {
        let found = fs::metadata(path).and_then(|found| Ok((found.len(), found.modified()?)));
        found.map_err(|error| error.to_string())
    };
    let before = state()?;
    let file = ImageFile::open(path, false).map_err(|error| error.to_string())?;
    let info = format.info(&file, path, None);
    let options = ChainOptions {
        format: Some(format),
        locking: Locking::Unlocked,
        ..ChainOptions::default()
    };
    // A rejection is an error with a message; there is nothing else to check.
    if let Ok(chain) = Chain::open(path, &options) {
        let size = chain.top().size;
        match info {
            Ok(Some(info)) if info.size == size => {}
            other => return Err(format!("a disk of {size} bytes is described as {other:?}")),
        }
        look_into(path, &options, &chain)?;
    }
    match state()? == before {
        true => Ok(()),
        false => Err("the image was changed".into()),
    }
}

fn look_into(path: &Path, options: &ChainOptions, chain: &Chain) -> Result<(), String> {
    let size = chain.top().size;
    let (mut end, mut entries) = (0, Vec::new());
    let mapped = map(chain, |entry| {
        if entry.start != end || entry.length == 0 {
            return Err(ImageError::refused(path, "a gap"));
        }
        end = entry.start.saturating_add(entry.length);
        if entries.len() < MAX_ENTRIES {
            entries.push(*entry);
        }
        Ok(())
    });
    if mapped.is_ok() && end != size {
        return Err(format!("the map of {size} bytes ends at {end}"));
    }
    if mapped.is_err_and(|error| error.what() == "a gap") {
        return Err(format!("the map has a gap at {end}"));
    }
    let Ok(reader) = ChainReader::new(chain.layers()) else { return Ok(()) };
    let Ok(image) = nowait_image::open(path, options) else { return Ok(()) };
    let served = BlockingFile::new(image.device());
    for entry in &entries {
        compare(chain, &reader, entry, |pos, bytes| served.read_at(bytes, pos).is_ok())?;
    }
    Ok(())
}

/// Checks that the bytes agree with `entry` at both of its ends, if they can be read, in both ways.
fn compare(
    chain: &Chain,
    reader: &ChainReader,
    entry: &MapEntry,
    read_served: impl Fn(u64, &mut [u8]) -> bool,
) -> Result<(), String> {
    let len = entry.length.min(MAX_BYTES);
    for inside in [0, entry.length - len] {
        let pos = entry.start + inside;
        let mut found = vec![0xee; len as usize];
        let is_read = reader.read_at(pos, &mut found).is_ok();
        // At first the mapping is looked up, then it is known.
        for _ in 0..2 {
            let mut served = vec![0xdd; len as usize];
            if read_served(pos, &mut served) != is_read || is_read && served != found {
                return Err(format!("{entry:?} is served otherwise than it is read"));
            }
        }
        let mut raw = vec![0; len as usize];
        let data = chain.layers().get(entry.depth).map(|layer| layer.data_files());
        let file = data.and_then(|files| files.get(entry.file));
        let expected = match (entry.zero, entry.offset, file) {
            (true, _, _) => true,
            (_, Some(at), Some(file)) => file.read_at(at + inside, &mut raw).is_ok(),
            // Compressed.
            _ => false,
        };
        if expected && is_read && found != raw {
            return Err(format!("{entry:?} does not say what is read"));
        }
    }
    Ok(())
}

/// Whether the image is opened, so that mutations of it reach more than its header.
#[cfg(test)]
pub(crate) fn opens(path: &Path, format: Format) -> bool {
    let options = ChainOptions { format: Some(format), ..ChainOptions::default() };
    nowait_image::open(path, &options).is_ok()
}
