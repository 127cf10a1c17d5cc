//! Commits an overlay's data to its backing file, and then empties the overlay.
//!
//! Invariant: a raw backing file that a guest's bytes would make begin like another format is refused
//! before it is changed, or marked.

use crate::chain::Chain;
use crate::error::ImageError;
use crate::formats::chain_reader::ChainReader;
use crate::formats::driver::CommitTerms;
use crate::formats::signature::{PROBE_BYTES, settle_raw};

pub use crate::formats::driver::{Committed, Overlay};

/// Commits the top image of `chain` to the one below it. Both were opened for writing, the top one
/// only if it is to be emptied. `progress` gets the bytes done and the total.
///
/// Any other overlay of the backing file has other data than before. A raw backing file that would
/// begin like another format is refused, unless the user declared it raw (`raw_named`): then it is
/// marked as raw.
///
/// # Errors
/// One line: there is no backing file, one of the two has features that cannot be maintained here,
/// or a system call failed. The overlay is as it was, unless it was being emptied: then it lacks
/// only data that the backing file has.
pub fn commit(
    chain: &Chain,
    overlay: Overlay,
    raw_named: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Committed, ImageError> {
    let top = chain.top();
    let (Some(commit), Some(below)) = (top.format().driver().commit, chain.layers().get(1)) else {
        let why = "it has no backing file that it could be committed to";
        return Err(ImageError::refused(top.file.path(), why));
    };
    let settle = &mut |reader: &ChainReader| {
        if !below.format().is_raw() || below.file.is_block_device() {
            return Ok(());
        }
        let mut first = vec![0; reader.size().min(PROBE_BYTES as u64) as usize];
        reader.read_at(0, &mut first)?;
        let fd = below.file.fd().map_err(|e| ImageError::os(below.file.path(), "mark it", &e))?;
        settle_raw(fd, &first, raw_named, "--backing-format raw")
            .map_err(|why| ImageError::refused(below.file.path(), why))
    };
    commit(chain.layers(), &mut CommitTerms { overlay, before: settle, progress })
}
