//! Adds bitmaps to images and removes them.
//!
//! Invariant: a kill or a power cut at any step leaves the bitmaps that were there or those that are wanted.

use std::io::Read;
use std::path::Path;

use crate::chain::Chain;
use crate::error::ImageError;
use crate::formats::layer::Layer;
use crate::formats::qcow2::bitmap_editor::edit;
use crate::formats::qcow2::header::Header;
use crate::image_file::ImageFile;

pub use crate::formats::qcow2::bitmap_editor::NewBitmap;

/// Adds a bitmap to the top image of `chain`, which is open for writing; its bits are in `bits`, one for each granule of the
/// disk, of each byte the lowest first, or are not set.
///
/// # Errors
/// A refusal of an image that has no bitmaps or too many, or one of that name; the errno of a failed system call.
pub fn add(chain: &Chain, new: &NewBitmap, bits: Option<&mut dyn Read>) -> Result<(), ImageError> {
    let header = header_of(chain.top())?;
    edit(&chain.top().file, &header, |bitmaps| bitmaps.add(new, bits))
}

/// Clears all bits of the usable bitmap `name` of the top image of `chain`, which is open for writing.
///
/// # Errors
/// A refusal where there is none; the errno of a failed system call.
pub fn clear(chain: &Chain, name: &str) -> Result<(), ImageError> {
    let header = header_of(chain.top())?;
    edit(&chain.top().file, &header, |bitmaps| bitmaps.clear(name))
}

/// Removes the bitmap `name` of the top image of `chain`, which is open for writing, whatever its state is.
///
/// # Errors
/// A refusal where there is none; the errno of a failed system call.
pub fn remove(chain: &Chain, name: &str) -> Result<(), ImageError> {
    let header = header_of(chain.top())?;
    edit(&chain.top().file, &header, |bitmaps| bitmaps.remove(name))
}

/// Adds bitmaps without a bit to the image at `path`, which was made just now and that nothing else uses.
///
/// # Errors
/// Like [`add`].
pub fn add_to_new(path: &Path, new: &[NewBitmap]) -> Result<(), ImageError> {
    if new.is_empty() {
        return Ok(());
    }
    let file = ImageFile::open(path, true)?;
    let header = Header::read(&file)?;
    edit(&file, &header, |bitmaps| new.iter().try_for_each(|new| bitmaps.add(new, None)))
}

fn header_of(top: &Layer) -> Result<Header, ImageError> {
    match top.header() {
        Some(_) => Header::read(&top.file),
        None => Err(ImageError::refused(top.file.path(), "only qcow2 images have bitmaps")),
    }
}
