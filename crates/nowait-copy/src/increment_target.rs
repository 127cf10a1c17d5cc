//! The targets of an incremental copy: an earlier copy of the disk, or a new overlay on it.
//!
//! Invariant: the target's disk is as large as the source's. An overlay gets its name when it is complete.

use std::path::{Path, PathBuf};

use nowait_image::create::{self, CreateOptions};
use nowait_image::{ChainOptions, Format, ImageError, Locking};

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::nbd::{self, Connecting};
use crate::open::{Target, TargetFormat, TargetKind, check_other, image, remote_image};
use nowait_remote::{Location, RemoteOptions};

/// A copy of what has changed since an earlier one.
#[derive(Clone, Debug)]
pub struct Increment {
    /// How what has changed is found.
    pub changes: Changes,
    /// Where the changes go.
    pub target: IncrementTarget,
}

/// How what has changed since an earlier copy is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changes {
    /// By the dirty bitmap of this name of the source, an NBD export.
    Bitmap(String),
    /// By reading both disks, and comparing them in blocks of 4 KiB.
    Compared,
}

impl Changes {
    /// The dirty bitmap, if there is one.
    #[must_use]
    pub fn bitmap(&self) -> Option<&str> {
        match self {
            Self::Bitmap(name) => Some(name),
            Self::Compared => None,
        }
    }
}

/// Where the changes of an increment go.
#[derive(Clone, Debug)]
pub enum IncrementTarget {
    /// Into the earlier copy, which is the target.
    InPlace,
    /// Into the target, a new qcow2 image that stands on the earlier copy.
    Overlay {
        /// The earlier copy, as the new image is to name it: a relative name is relative to the directory of the new image.
        backing: PathBuf,
        /// Its format; `None`: raw, and a file that begins like another format is refused.
        format: Option<Format>,
    },
}

/// How the target of an increment is opened.
pub(crate) struct IncrementTerms<'a> {
    pub(crate) target: &'a IncrementTarget,
    /// The source, if that is a file or a block device.
    pub(crate) from: Option<&'a Path>,
    /// The format of an overlay, or, if it was given, of a target that is changed in place.
    pub(crate) format: TargetFormat,
    /// Bytes of the source.
    pub(crate) size: u64,
    /// Directories that may contain backing files, in addition to that of the target.
    pub(crate) backing_dirs: &'a [PathBuf],
    pub(crate) data_files: &'a [PathBuf],
    pub(crate) allow_mounted: bool,
    pub(crate) connecting: Connecting<'a>,
}

/// Opens the target of an increment.
///
/// # Errors
/// It cannot be opened or made; its size is not that of the source.
pub(crate) fn target(location: &Location, terms: &IncrementTerms<'_>) -> Result<Target, Error> {
    match terms.target {
        IncrementTarget::InPlace => in_place(location, terms),
        IncrementTarget::Overlay { backing, format } => {
            let options = CreateOptions {
                backing: Some(backing.clone()),
                backing_format: *format,
                backing_dirs: terms.backing_dirs.to_vec(),
                data_files: terms.data_files.to_vec(),
                cluster_bytes: terms.format.cluster_bytes,
                ..CreateOptions::new(terms.format.format, None)
            };
            overlay(location, terms, &options)
        }
    }
}

fn in_place(location: &Location, terms: &IncrementTerms<'_>) -> Result<Target, Error> {
    let format = terms.format;
    let options = ChainOptions {
        format: format.given.then_some(format.format),
        writable: true,
        allow_mounted: terms.allow_mounted,
        backing_dirs: terms.backing_dirs.to_vec(),
        data_files: terms.data_files.to_vec(),
        ..ChainOptions::default()
    };
    let endpoint = match location {
        Location::File(path) => {
            check_other(location, path, terms.from)?;
            image(location, path, &options)?
        }
        Location::Nbd(uri) => nbd::connect(uri, terms.connecting, true)?,
        Location::Rbd(_) => remote_image(location, &options, &RemoteOptions::default())?,
        Location::Object(_) => {
            return Err(Error::at(location, "an object is written as a whole only"));
        }
    };
    check_size(location, &*endpoint, terms.size)?;
    Ok(Target { endpoint, kind: TargetKind::InPlace, is_zero: false })
}

fn overlay(
    location: &Location,
    terms: &IncrementTerms<'_>,
    options: &CreateOptions,
) -> Result<Target, Error> {
    let Some(path) = location.path() else {
        return Err(Error::at(location, "an image with a backing file is made as a file only"));
    };
    if terms.format.format.is_raw() {
        let what = "a raw image has no backing file (say -O qcow2)";
        return Err(Error::at(location, what));
    }
    let failed = |error: ImageError| Error::at(&error.path().display(), error.what());
    let (file, _) = create::create_overlay(path, options).map_err(failed)?;
    let chain = ChainOptions {
        format: Some(options.format),
        writable: true,
        // The new file is locked by `file`.
        locking: Locking::Unlocked,
        backing_dirs: options.backing_dirs.clone(),
        data_files: options.data_files.clone(),
        ..ChainOptions::default()
    };
    let endpoint = image(location, file.path(), &chain)?;
    check_size(location, &*endpoint, terms.size)?;
    Ok(Target { endpoint, kind: TargetKind::Overlay(file), is_zero: false })
}

/// Refuses a target of another size. A bitmap tells nothing of what a larger disk has more, and a smaller one has lost
/// what the earlier copy still has.
fn check_size(location: &Location, endpoint: &dyn Endpoint, size: u64) -> Result<(), Error> {
    let found = endpoint.capabilities().size;
    if found == size || found == size.next_multiple_of(512) {
        return Ok(());
    }
    let what = format!(
        "the disk has another size than the earlier copy: {size} bytes, which has {found} (copy it as a whole)"
    );
    Err(Error::at(location, what))
}
