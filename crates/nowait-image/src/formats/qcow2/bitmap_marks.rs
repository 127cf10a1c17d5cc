//! The autoclear bits that say which bitmaps of an image can be relied on.
//!
//! Invariant: a program that does not know a bit clears it before it writes to the image, so that one which is set says
//! that nothing was written since by such a program. Bit 0 is that of the format. Bit 32 and those behind it are of this
//! program: each stands for a bitmap of the directory, in its order, whose bits on storage are never too few although it
//! is marked as in use.

use std::io;

use crate::formats::qcow2::header::{AUTOCLEAR_BITMAPS, AUTOCLEAR_DATA_FILE_RAW, Header};
use crate::image_file::ImageFile;

/// The lowest bit of this program.
const FIRST_KEPT: u32 = 32;
/// The most bitmaps of an image that is written to.
/// Beyond it: the image is only read.
pub(crate) const MAX_KEPT: usize = 32;

impl Header {
    /// The bitmaps, by their numbers in the directory, that are up to date although they are in use.
    pub(crate) const fn kept_bitmaps(&self) -> u32 {
        match self.bitmaps {
            Some(_) => (self.autoclear >> FIRST_KEPT) as u32,
            None => 0,
        }
    }

    /// The autoclear bits with those of `kept` bitmaps.
    pub(crate) const fn autoclear_with(&self, kept: u32) -> u64 {
        let others = self.autoclear & (AUTOCLEAR_BITMAPS | AUTOCLEAR_DATA_FILE_RAW);
        others | (kept as u64) << FIRST_KEPT
    }

    /// The autoclear bits to keep when this program writes to the image; `None` if all that are set
    /// can stay.
    pub(crate) const fn autoclear_to_write(&self) -> Option<u64> {
        match self.autoclear_with(self.kept_bitmaps()) {
            kept if kept == self.autoclear => None,
            kept => Some(kept),
        }
    }
}

/// Writes the autoclear bits, durably.
pub(crate) fn write_autoclear(file: &ImageFile, bits: u64) -> io::Result<()> {
    file.write_at(Header::AUTOCLEAR_AT, &bits.to_be_bytes())?;
    file.sync()
}
