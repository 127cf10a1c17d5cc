//! Opens the image at a location.
//!
//! Invariant: a location in an image's header is never opened here: only what the user has named.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nowait::Storage;
use nowait_image::{ChainOptions, Image, ImageError, NamedStorages};

use crate::location::Location;
use crate::nbd::{NbdOptions, NbdStorage};
use crate::object::{BootRecord, CacheOptions, MINIMUM_RATE, ObjectOptions, ObjectStorage};
use crate::rbd::RbdStorage;
use crate::rbd_options::RbdOptions;

/// How remote storages are used.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// How long requests wait for a server whose connection was lost, before they fail.
    pub reconnect: Duration,
    /// Bytes a second that have to come of an answer of an object store; 0: any number but none.
    pub minimum_rate: u64,
    /// The directory with certificates for TLS, where the URI names none.
    pub certificates: Option<PathBuf>,
    /// Where what was read of objects stays.
    pub cache: Option<CacheOptions>,
    /// Where the order in which blocks of objects are read is written.
    pub record: Option<BootRecord>,
    /// The record whose blocks are fetched into the cache.
    pub prefetch: Option<PathBuf>,
    /// The file with the headers that web servers want: tokens and passwords.
    pub http_auth: Option<PathBuf>,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        let NbdOptions { reconnect, certificates, .. } = NbdOptions::default();
        Self {
            reconnect,
            minimum_rate: MINIMUM_RATE,
            certificates,
            cache: None,
            record: None,
            prefetch: None,
            http_auth: None,
        }
    }
}

impl RemoteOptions {
    /// How objects are read.
    #[must_use]
    pub fn object(&self) -> ObjectOptions {
        let Self { reconnect, minimum_rate, cache, record, prefetch, http_auth, .. } = self.clone();
        let default = ObjectOptions::default();
        ObjectOptions { reconnect, minimum_rate, cache, record, prefetch, http_auth, ..default }
    }
}

/// Opens the image at `location`: a file as [`nowait_image::open`] does; an export or an object as
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
        _ => {
            let name = PathBuf::from(location.to_string());
            let storage = open_storage(location, !options.writable, remote)?;
            nowait_image::open_storage(&name, storage, options)
        }
    }
}

/// Opens the storage at `location`, which is not a file.
///
/// # Errors
/// One line that names the location and what is wrong with it.
pub fn open_storage(
    location: &Location,
    read_only: bool,
    remote: &RemoteOptions,
) -> Result<Arc<dyn Storage>, ImageError> {
    let name = PathBuf::from(location.to_string());
    let storage: Result<Arc<dyn Storage>, _> = match location {
        Location::File(_) => Err("it is not a URI".into()),
        Location::Nbd(uri) => {
            let RemoteOptions { reconnect, certificates, .. } = remote.clone();
            let nbd = NbdOptions { reconnect, certificates, read_only };
            NbdStorage::open(uri, &nbd).map(|storage| Arc::new(storage) as _)
        }
        Location::Object(_) if !read_only => Err("an object is only read (try --read-only)".into()),
        Location::Object(url) => {
            ObjectStorage::open(url, &remote.object()).map(|storage| Arc::new(storage) as _)
        }
        Location::Rbd(location) => {
            let options = RbdOptions { timeout: remote.reconnect, read_only };
            RbdStorage::open(location, options).map(|storage| Arc::new(storage) as _)
        }
    };
    storage.map_err(|what| refused(&name, &what))
}

/// Opens the storages that headers may name as the images below, each by its location as it was given.
///
/// # Errors
/// Like [`open_storage`].
pub fn open_backings(
    locations: &[Location],
    remote: &RemoteOptions,
) -> Result<NamedStorages, ImageError> {
    let mut storages = NamedStorages::given_by_user(is_location);
    for location in locations {
        storages.add(location.to_string(), open_storage(location, true, remote)?);
    }
    Ok(storages)
}

/// Whether `text` is the location of a storage, as [`open_backings`] takes it.
fn is_location(text: &str) -> bool {
    Location::is_left_out(text)
        || Location::parse(&text.into()).is_ok_and(|location| location.path().is_none())
}

fn refused(name: &Path, what: &str) -> ImageError {
    ImageError::refused(name, nowait_image::plain(what))
}
