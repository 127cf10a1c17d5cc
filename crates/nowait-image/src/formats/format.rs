//! The formats of images, and how one is recognised.
//!
//! Invariant: a format is guessed only by qcow2's own first bytes, and never for a block device.

use crate::error::ImageError;
use crate::formats::signature;
use crate::formats::signature::Signature;
use crate::image_file::ImageFile;

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The disk's bytes and nothing else.
    Raw,
    /// QEMU's own format, versions 2 and 3.
    Qcow2,
}

impl Format {
    /// The format's name on the command line and in headers.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }

    /// The format of `file` by its first bytes: qcow2 if they are qcow2's, else raw. A block device
    /// is always raw: as a rule its bytes are a guest's.
    ///
    /// A guess is safe only for a file whose first bytes no guest could choose: a guest with a raw
    /// disk can make it begin like qcow2. So a file that was ever served raw has to be opened with
    /// an explicit format.
    ///
    /// # Errors
    /// The errors of pread(2). `EINVAL`: the file begins like another format than these two and is not marked as raw
    /// ([`signature::mark_raw`]); or it is marked and begins like qcow2.
    pub fn probe(file: &ImageFile) -> Result<Self, ImageError> {
        let refused = |why| Err(ImageError::refused(file.path(), why));
        match signature_of(file)? {
            None => Ok(Self::Raw),
            Some(Signature::Qcow2) if file.fd().is_ok_and(signature::is_marked_raw) => {
                refused(signature::refusal_of_marked())
            }
            Some(Signature::Qcow2) => Ok(Self::Qcow2),
            // It was no such file when it was opened as a raw disk first: a guest has made it begin so.
            Some(_) if file.fd().is_ok_and(signature::is_marked_raw) => Ok(Self::Raw),
            Some(other) => refused(other.refusal()),
        }
    }
}

/// The signature that `file` begins with; none for a block device.
pub(crate) fn signature_of(file: &ImageFile) -> Result<Option<Signature>, ImageError> {
    match file.is_block_device() {
        true => Ok(None),
        false => Signature::probe(file).map_err(|e| ImageError::os(file.path(), "read", &e)),
    }
}
