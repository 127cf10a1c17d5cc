//! Checks whether the metadata of an image is consistent.
//!
//! Invariant: the check changes no file.

use crate::chain::Chain;
use crate::error::ImageError;

pub use crate::formats::driver::Report;

/// Checks the top image of `chain`. `progress` gets the work done and the total from time to time.
///
/// # Errors
/// A refusal of an image whose format has nothing that could be checked; the errno of a failed read.
pub fn check(chain: &Chain, progress: &mut dyn FnMut(u64, u64)) -> Result<Report, ImageError> {
    let top = chain.top();
    match &top.format().driver().check {
        Some(checking) => (checking.check)(top, progress),
        None => Err(ImageError::refused(top.file.path(), top.format().cannot_be("checked"))),
    }
}
