//! An image on simulated devices.
//!
//! Invariant: what is opened is what would be served; what a thread does then, the simulation is
//! asked to do.
//! Knows: create, chain, header, host, and the modules here. Known by: simulations.

use std::fs::File;

use super::{Keeper, Opened, ServeOptions, open_all};
use crate::chain::Chain;
use crate::create;
use crate::error::ImageError;
use crate::header::{BackingName, Header};
use crate::host::HostFile;

/// Opens the image on top of `chain`, which is simulated, to be served and written to. Its file
/// grows to multiples of `step` bytes.
///
/// # Errors
/// As [`super::open`].
pub fn open_simulated(
    chain: Chain,
    options: ServeOptions,
    step: u64,
) -> Result<Opened, ImageError> {
    let opened = open_all(chain, options)?;
    opened.keeper.store.grow_by(step);
    for layer in opened.keeper.chain.layers().iter().skip(1) {
        let served = layer.file.as_simulated().map_or(Ok(()), |file| file.serve());
        served.map_err(|e| ImageError::os(layer.file.path(), "serve", &e.into()))?;
    }
    Ok(opened)
}

impl Keeper {
    /// What the thread would do that writes metadata which nobody asks to flush, if it had waited
    /// long enough. `None` if it would wait on.
    #[must_use]
    pub fn due(&self) -> Option<impl FnOnce() + 'static> {
        let store = self.store.clone();
        store.is_due().then_some(move || store.flush_for_nobody())
    }
}

/// The bytes of a new image of a disk of `size` bytes, in clusters of `1 << cluster_bits`, on top
/// of `backing` if there is one.
///
/// # Errors
/// That there is no such image; what the system said.
pub fn new_simulated(
    size: u64,
    cluster_bits: u32,
    backing: Option<BackingName>,
) -> Result<Vec<u8>, ImageError> {
    let name = std::path::PathBuf::from("image");
    let failed = |error: std::io::Error| ImageError::os(&name, "create", &error);
    let memory = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC);
    let memory = memory.map_err(|error| failed(error.into()))?;
    let file = HostFile::of(name.clone(), File::from(memory));
    create::write(&file, Header { backing, ..Header::empty(size, cluster_bits) })?;
    let mut bytes = vec![0; file.size().map_err(failed)? as usize];
    file.read_at(0, &mut bytes).map_err(failed)?;
    Ok(bytes)
}
