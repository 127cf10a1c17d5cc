//! The header extension that names the list of bitmaps, as it is added, changed and removed.
//!
//! Invariant: a kill or a power cut at any step leaves the old list or the new one; the name of a backing file is never
//! missing. Only where the fields of the extension lie in two sectors are the bitmaps lost, as in QEMU.
//! Source: QEMU docs/interop/qcow2.txt, "Bitmaps extension".

use std::io;

use crate::error::ImageError;
use crate::formats::qcow2::bitmap_marks::write_autoclear;
use crate::formats::qcow2::header::{
    AUTOCLEAR_BITMAPS, BITMAPS_BYTES as FIELDS, BitmapDirectory, EXTENSION_BITMAPS,
    EXTENSION_SPARE, Header, V3_BYTES, be32, be64,
};
use crate::image_file::ImageFile;
use crate::injected_bug::{self, ImageBug};

const EXTENSION_END: u32 = 0;
/// Bytes of a type and a length.
const HEAD: usize = 8;
/// Where a header has the position of the backing file's name, and its own length.
const BACKING_AT: usize = 8;
const LENGTH_AT: usize = 100;
/// Bytes that storage writes whole or not at all.
const SECTOR: usize = 512;

/// Has what the header says of bitmaps be durable, before the disk of the image is changed: a removal that a kill has cut off, or a
/// bitmap that was disabled, could otherwise come undone by a loss of power, without what was changed since.
///
/// # Errors
/// The errno of the sync.
pub(crate) fn settle_bitmaps(file: &ImageFile, header: &Header) -> Result<(), ImageError> {
    if !header.had_bitmaps || injected_bug::injected(ImageBug::ForgetRemoval) {
        return Ok(());
    }
    file.sync().map_err(|error| ImageError::os(file.path(), "sync its bitmaps", &error))
}

/// Writes `directory`, which is durable, to the header of the image in `file`; `None` removes the extension. Durable when
/// this returns.
///
/// # Errors
/// [`io::ErrorKind::StorageFull`]: the header has no room. Those of the file.
pub(crate) fn write(
    file: &ImageFile,
    header: &Header,
    directory: Option<BitmapDirectory>,
) -> io::Result<()> {
    let mut bytes = vec![0; header.cluster_bytes().min(64 << 10) as usize];
    file.read_at(0, &mut bytes)?;
    let bits = be64(&bytes, Header::AUTOCLEAR_AT as usize);
    let slot = find(&bytes, |kind| kind == EXTENSION_BITMAPS);
    let Some(directory) = directory else {
        if let Some(at) = slot {
            set_kind(file, at, EXTENSION_SPARE)?;
        }
        return write_autoclear(file, bits & !AUTOCLEAR_BITMAPS);
    };
    let mut fields = [0; FIELDS];
    fields[..4].copy_from_slice(&directory.bitmaps.to_be_bytes());
    fields[8..16].copy_from_slice(&directory.len.to_be_bytes());
    fields[16..].copy_from_slice(&directory.pos.to_be_bytes());
    let write_fields = |at: usize| {
        file.write_at((at + HEAD) as u64, &fields)?;
        file.sync()
    };
    match slot {
        Some(at) if bits & AUTOCLEAR_BITMAPS != 0 => {
            let is_whole = (at + HEAD) / SECTOR == (at + HEAD + FIELDS - 1) / SECTOR;
            if is_whole {
                return write_fields(at);
            }
            write_autoclear(file, bits & !AUTOCLEAR_BITMAPS)?;
            write_fields(at)?;
            return write_autoclear(file, bits);
        }
        // The list of a time before another program wrote to the image.
        Some(at) => set_kind(file, at, EXTENSION_SPARE)?,
        None => {}
    }
    let at = match slot.or_else(|| find(&bytes, |kind| kind == EXTENSION_SPARE)) {
        Some(at) => at,
        None => append(file, &bytes)?,
    };
    write_autoclear(file, bits | AUTOCLEAR_BITMAPS)?;
    write_fields(at)?;
    set_kind(file, at, EXTENSION_BITMAPS)
}

/// Writes `fields`, those of the extension of type `kind`, to the header of the image in `file`. Durable when this returns; a
/// power cut leaves the old ones, the new ones or none.
///
/// # Errors
/// Like [`write`].
pub(crate) fn write_fields(
    file: &ImageFile,
    header: &Header,
    kind: u32,
    fields: &[u8; FIELDS],
) -> io::Result<()> {
    let mut bytes = vec![0; header.cluster_bytes().min(64 << 10) as usize];
    file.read_at(0, &mut bytes)?;
    let slot = find(&bytes, |found| found == kind);
    let at = match slot.or_else(|| find(&bytes, |found| found == EXTENSION_SPARE)) {
        Some(at) => at,
        None => append(file, &bytes)?,
    };
    file.write_at((at + HEAD) as u64, fields)?;
    file.sync()?;
    if slot.is_some() { Ok(()) } else { set_kind(file, at, kind) }
}

/// The position of the extension of 24 bytes whose type `is_it`.
fn find(bytes: &[u8], is_it: impl Fn(u32) -> bool) -> Option<usize> {
    extensions(bytes).find(|&(_, kind, len)| is_it(kind) && len == FIELDS).map(|(at, ..)| at)
}

/// The positions, types and lengths of the extensions in a header of version 3; the last one is the end.
fn extensions(bytes: &[u8]) -> impl Iterator<Item = (usize, u32, usize)> {
    let mut at = (be32(bytes, LENGTH_AT) as usize).max(V3_BYTES);
    let end = match be64(bytes, BACKING_AT) {
        0 => bytes.len(),
        name => (name as usize).min(bytes.len()),
    };
    let mut is_over = false;
    std::iter::from_fn(move || {
        if is_over || at + HEAD > end {
            return None;
        }
        let (kind, len) = (be32(bytes, at), be32(bytes, at + 4) as usize);
        is_over = kind == EXTENSION_END;
        let found = (at, kind, if is_over { 0 } else { len });
        at = at.saturating_add(HEAD).saturating_add(len.next_multiple_of(8));
        Some(found)
    })
}

/// Changes the type of the extension at `at`, of 24 bytes, durably. The type and the length are one write of 8 bytes.
fn set_kind(file: &ImageFile, at: usize, kind: u32) -> io::Result<()> {
    let head = [kind.to_be_bytes(), (FIELDS as u32).to_be_bytes()].concat();
    file.write_at(at as u64, &head)?;
    file.sync()
}

/// Adds a spare extension behind the last one; returns its position. First its fields and the new end are written, where
/// nothing is read; the name of the backing file makes room for them before.
fn append(file: &ImageFile, bytes: &[u8]) -> io::Result<usize> {
    let full = || io::Error::new(io::ErrorKind::StorageFull, "its header has no room for bitmaps");
    let last = extensions(bytes).last();
    let (at, ..) = last.filter(|&(_, kind, _)| kind == EXTENSION_END).ok_or_else(full)?;
    let end = at + HEAD + FIELDS + HEAD;
    let (name, len) = (be64(bytes, BACKING_AT) as usize, be32(bytes, 16) as usize);
    if name == 0 {
        let room = bytes.get(at..end).ok_or_else(full)?;
        if room.iter().any(|byte| *byte != 0) {
            return Err(full());
        }
    } else if name < end {
        // Not over the old name, which counts until the new position is durable.
        let moved = (name + len).max(end).next_multiple_of(8);
        let old = bytes.get(name..name + len).ok_or_else(full)?;
        if moved + len > bytes.len() {
            return Err(full());
        }
        file.write_at(moved as u64, old)?;
        file.sync()?;
        file.write_at(BACKING_AT as u64, &(moved as u64).to_be_bytes())?;
        file.sync()?;
    }
    file.write_at((at + HEAD) as u64, &[0; FIELDS + HEAD])?;
    file.sync()?;
    set_kind(file, at, EXTENSION_SPARE)?;
    Ok(at)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::formats::layer::BackingName;
    use crate::formats::qcow2::encode::encode;

    const CLUSTER_BITS: u32 = 9;
    const DIRECTORY: BitmapDirectory = BitmapDirectory { bitmaps: 1, pos: 4096, len: 32 };

    /// An image that is all header, with the name of a backing file of `name` bytes.
    fn image(name: usize) -> (tempfile::NamedTempFile, ImageFile, Header) {
        let backing = BackingName { name: OsString::from("n".repeat(name)), format: None };
        let header = Header {
            l1_pos: 1024,
            l1_entries: 1,
            refcount_table_pos: 512,
            refcount_table_clusters: 1,
            backing: (name > 0).then_some(backing),
            ..Header::empty(512, CLUSTER_BITS)
        };
        let mut bytes = encode(&header);
        bytes.resize(8192, 0);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let opened = ImageFile::open(file.path(), true).unwrap();
        (file, opened, header)
    }

    #[test]
    fn the_list_is_added_changed_removed_and_added_again_beside_the_name_of_a_backing_file() {
        for name in [0, 1, 100] {
            let (_file, image, header) = image(name);
            let read = || Header::read(&image).unwrap();
            assert_eq!(read().bitmaps, None);
            for directory in [
                Some(DIRECTORY),
                Some(BitmapDirectory { bitmaps: 2, pos: 2048, len: 64 }),
                None,
                Some(DIRECTORY),
            ] {
                write(&image, &header, directory).unwrap();
                let found = read();
                assert_eq!(found.bitmaps, directory, "a name of {name} bytes");
                assert_eq!(
                    (found.backing, found.has_stale_bitmaps),
                    (header.backing.clone(), false)
                );
            }
            // Another program has written to the image.
            write_autoclear(&image, 0).unwrap();
            assert!(read().has_stale_bitmaps);
            let other = BitmapDirectory { pos: 6144, ..DIRECTORY };
            write(&image, &header, Some(other)).unwrap();
            assert_eq!((read().bitmaps, read().has_stale_bitmaps), (Some(other), false));
        }
    }

    #[test]
    fn a_header_without_room_stays_as_it_is() {
        // The name, its copy and the extension need more than a cluster.
        let fits = |name| {
            let (file, image, header) = image(name);
            let before = std::fs::read(file.path()).unwrap();
            let written = write(&image, &header, Some(DIRECTORY));
            if let Err(error) = &written {
                assert_eq!(error.kind(), io::ErrorKind::StorageFull);
                assert_eq!(Header::read(&image).unwrap().backing, header.backing);
                assert!(std::fs::read(file.path()).unwrap() == before);
            }
            written.is_ok()
        };
        let longest = (0..390).rev().find(|name| fits(*name)).unwrap();
        assert_eq!(longest, 200);
        assert!(!fits(longest + 1) && fits(longest - 1));
    }
}
