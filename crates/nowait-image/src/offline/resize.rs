//! Grows or shrinks a disk.
//!
//! Invariant: the bytes that a disk grows by read as zeros, whatever its image or a backing file
//! has there. A kill or a power cut leaves the old size or the new one, and all bytes that both
//! sizes have.

use crate::chain::Chain;
use crate::error::ImageError;

/// Makes the disk of `chain`, which is open for writing, `size` bytes large; for a qcow2 image
/// rounded up to a multiple of 512. Returns the new size.
///
/// # Errors
/// A refusal where the disk would become smaller and `shrink` is false, where it is a block device,
/// or where the image has features that cannot be maintained here; the errno of a failed system
/// call.
pub fn resize(chain: &Chain, size: u64, shrink: bool) -> Result<u64, ImageError> {
    let top = chain.top();
    let path = top.file.path();
    let driver = top.format().driver();
    let Some(resize) = driver.resize else {
        return Err(ImageError::refused(path, top.format().cannot_be("resized")));
    };
    let size = size.next_multiple_of(driver.size_unit);
    if size == 0 {
        return Err(ImageError::refused(path, "a disk needs at least one byte"));
    }
    if size < top.size && !shrink {
        let why = format!(
            "it would become smaller, {size} of {} bytes, and lose what is behind that \
             (if that is meant: --shrink)",
            top.size
        );
        return Err(ImageError::refused(path, why));
    }
    if size != top.size {
        resize(chain.layers(), size)?;
    }
    Ok(size)
}
