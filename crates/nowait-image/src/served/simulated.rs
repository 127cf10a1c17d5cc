//! An image on a simulated device.
//!
//! Invariant: what is read from the file at open is what the device holds; nothing is written to
//! the file.
//! Knows: chain, medium, known, layers, store, image. Known by: simulations.

use std::sync::Arc;

use nowait::Storage;

use super::image::Qcow2;
use super::known::Known;
use super::layers::Layers;
use super::medium::Medium;
use super::store_on;
use crate::chain::{Chain, Content};
use crate::error::ImageError;
use crate::header::Header;

/// The image on top of `chain`, qcow2 without a backing file, where the file holds a copy of what
/// is on the device behind `storage`; with `hint`, it is remembered where the bytes are. Nobody
/// writes metadata but who flushes.
///
/// # Errors
/// That it is not qcow2, or what reading the file said.
pub fn open_simulated(chain: &Chain, storage: Storage, hint: bool) -> Result<Qcow2, ImageError> {
    let top = chain.top();
    let Content::Qcow2 { header, .. } = &top.content else {
        return Err(ImageError::refused(top.file.path(), "it is no qcow2 image"));
    };
    let store = Arc::new(store_on(&top.file, header, Medium::new(storage), None, true)?);
    let known = Known::new(header.size, header.cluster_bits, hint);
    Ok(Qcow2::new(Layers::new(store, Header::clone(header), Vec::new()), known))
}
