//! Opens the image at a location.
//!
//! Invariant: a location in an image's header is never opened here: only what the user has named.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nowait_image::{ChainOptions, Image, ImageError};

use crate::location::Location;
use crate::nbd::{NbdOptions, NbdStorage};

/// How remote storages are used.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// How long requests wait for a server whose connection was lost, before they fail.
    pub reconnect: Duration,
    /// The directory with certificates for TLS, where the URI names none.
    pub certificates: Option<PathBuf>,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        let NbdOptions { reconnect, certificates, .. } = NbdOptions::default();
        Self { reconnect, certificates }
    }
}

/// Opens the image at `location`: a file as [`nowait_image::open`] does; an export as
/// [`nowait_image::open_storage`] does, so it is raw unless the options say otherwise.
///
/// # Errors
/// One line that names the location and what is wrong with it.
pub fn open(
    location: &Location,
    options: &ChainOptions,
    remote: &RemoteOptions,
) -> Result<Image, ImageError> {
    match location {
        Location::File(path) => nowait_image::open(path, options),
        Location::Nbd(uri) => {
            let RemoteOptions { reconnect, certificates } = remote.clone();
            let nbd = NbdOptions { reconnect, certificates, read_only: !options.writable };
            let name = PathBuf::from(location.to_string());
            let storage = NbdStorage::open(uri, &nbd);
            let storage = storage.map_err(|what| refused(&name, &what))?;
            nowait_image::open_storage(&name, Arc::new(storage), options)
        }
    }
}

fn refused(name: &Path, what: &str) -> ImageError {
    ImageError::refused(name, nowait_image::plain(what))
}
