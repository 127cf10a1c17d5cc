//! Repairs the metadata of an image.
//!
//! Invariant: a power cut at any point leaves the image no worse than it was.

use crate::chain::Chain;
use crate::error::ImageError;

pub use crate::formats::driver::Repaired;

/// Repairs the top image of `chain`, which was opened for writing and with
/// [`crate::ChainOptions::damaged`].
///
/// # Errors
/// A refusal of an image whose format has nothing that could be repaired; the errno of a failed read or
/// write.
pub fn repair(chain: &Chain, progress: &mut dyn FnMut(u64, u64)) -> Result<Repaired, ImageError> {
    let top = chain.top();
    match &top.format().driver().check {
        Some(checking) => (checking.repair)(top, progress),
        None => Err(ImageError::refused(top.file.path(), top.format().cannot_be("repaired"))),
    }
}
