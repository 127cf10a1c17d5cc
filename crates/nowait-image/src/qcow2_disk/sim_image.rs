//! An image on simulated devices.
//!
//! Invariant: the image is opened exactly as for serving; the simulation runs the work of the
//! flusher thread.

use crate::chain::Chain;
use crate::error::ImageError;
use crate::formats::driver::{CreateTerms, Features, Preallocation};
use crate::formats::layer::BackingName;
use crate::formats::qcow2::empty_image;
use crate::image_file::ImageFile;
use crate::qcow2_disk::{OpenImage, Opened, ServeOptions, open_all};

/// Opens the top image of `chain`, which is simulated. Its file grows to multiples of `step` bytes.
///
/// # Errors
/// Like [`crate::qcow2_disk::open`].
pub fn open_simulated(
    chain: Chain,
    options: ServeOptions,
    step: u64,
) -> Result<Opened, ImageError> {
    let opened = open_all(chain, options)?;
    opened.open_image.writeback.grow_by(step);
    for layer in opened.open_image.chain.layers().iter().skip(1) {
        if let Some(file) = layer.file.as_simulated() {
            file.serve();
        }
    }
    Ok(opened)
}

impl OpenImage {
    /// The next run of the flusher thread, as if its time had passed. `None` if no metadata is due.
    #[must_use]
    pub fn due(&self) -> Option<impl FnOnce() + 'static> {
        let writeback = self.writeback.clone();
        writeback.is_due().then_some(move || writeback.background_flush())
    }
}

/// The bytes of a new image of a disk of `size` bytes, with clusters of `1 << cluster_bits` bytes and these
/// `features`, on top of `backing` if there is one.
///
/// # Errors
/// A refusal of these parameters; the errno of a failed system call.
pub fn new_simulated(
    size: u64,
    cluster_bits: u32,
    features: Features,
    backing: Option<BackingName>,
) -> Result<Vec<u8>, ImageError> {
    let name = std::path::PathBuf::from("image");
    let failed = |error: std::io::Error| ImageError::os(&name, "create", &error);
    let file = ImageFile::in_memory(&name).map_err(failed)?;
    let refused = |why: String| ImageError::refused(&name, why);
    let terms = CreateTerms {
        has_backing: backing.is_some(),
        cluster_bytes: Some(1 << cluster_bits),
        preallocation: Preallocation::Off,
        features,
    };
    empty_image::write(&file, size, backing, terms).map_err(refused)?.map_err(failed)?;
    file.content().map_err(failed)
}
