//! How the format of a file is guessed.
//!
//! Invariant: a format is guessed only by its own first bytes, and never for a block device.

use crate::error::ImageError;
use crate::formats::format::Format;
use crate::formats::signature;
use crate::formats::signature::Signature;
use crate::image_file::ImageFile;

impl Format {
    /// The format of `file` by its first bytes: qcow2 if they are qcow2's, else raw; for other formats
    /// its name must have their ending, too. A block device is always raw: as a rule its bytes are a
    /// guest's.
    ///
    /// A guess is safe only for a file whose first bytes no guest could choose: a guest with a raw
    /// disk can make it begin like qcow2. So a file that was ever served raw has to be opened with
    /// an explicit format.
    ///
    /// # Errors
    /// The errors of pread(2). `EINVAL`: the file begins like a format that is not supported and is not marked as raw
    /// ([`signature::mark_raw`]); or it is marked and would be guessed to be of another one than raw.
    pub fn probe(file: &ImageFile) -> Result<Self, ImageError> {
        let refused = |why| Err(ImageError::refused(file.path(), why));
        let is_marked = || file.fd().is_ok_and(signature::is_marked_raw);
        match signature_of(file)? {
            None => Ok(Self::Raw),
            Some(Signature::Supported(format)) if is_guessed(format, file) => match is_marked() {
                true => refused(signature::refusal_of_marked(format)),
                false => Ok(format),
            },
            // It was no such file when it was opened as a raw disk first: a guest has made it begin so.
            Some(_) if is_marked() => Ok(Self::Raw),
            Some(Signature::Supported(format)) => refused(signature::refusal_of_unnamed(format)),
            Some(other) => refused(other.refusal()),
        }
    }
}

/// Whether `file`, which begins like `format`, is guessed to be of it by its name, too.
pub(crate) fn is_guessed(format: Format, file: &ImageFile) -> bool {
    format.driver().is_guessed_by_name(file.path())
}

/// The signature that `file` begins with; none for a block device.
pub(crate) fn signature_of(file: &ImageFile) -> Result<Option<Signature>, ImageError> {
    match file.is_block_device() {
        true => Ok(None),
        false => Signature::probe(file).map_err(|e| ImageError::os(file.path(), "read", &e)),
    }
}
