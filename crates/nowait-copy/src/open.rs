//! Opens the source and the target of a copy: locks files, connects to exports, and refuses before
//! anything is changed.
//!
//! Invariant: a source is never written to; a target with content is not changed without
//! permission, nor if it is too small.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use nowait::{AllocationCache, BlockDevice, FileStorage, OpenOptions};
use nowait_image::lock::{self, Access, LockError};
use nowait_image::lock_holder;
use nowait_image::{
    AtomicFile, ChainOptions, Compression, Format, ImageFile, Locking, OverwritePolicy,
    PROBE_BYTES, Signature, settle_raw,
};
use rustix::io::Errno;

use crate::endpoint::Endpoint;
use crate::error::{Error, os_message, reason};
use crate::file_endpoint::{Content, NewImage};
use crate::nbd::Connecting;
use crate::{compressed_endpoint, file_endpoint, nbd, object_endpoint};
use nowait_remote::{Location, RemoteOptions};

/// The target, ready to be written to.
pub(crate) struct Target {
    pub(crate) endpoint: Box<dyn Endpoint>,
    pub(crate) kind: TargetKind,
    /// Whether all of the target reads as zeros.
    pub(crate) is_zero: bool,
}

/// Whether the target is written in place or under a temporary name.
pub(crate) enum TargetKind {
    /// A block device or an export, written in place.
    InPlace,
    /// A file that is written under a temporary name until it is complete.
    Replaced {
        file: AtomicFile,
        /// The format of the new file.
        format: TargetFormat,
        /// The file that it replaces, held locked so that no other program begins to use it.
        _replaced: Option<File>,
    },
    /// A new image on an earlier copy, under a temporary name until it is complete.
    Overlay(AtomicFile),
    /// An object, which its endpoint makes visible when it is complete.
    Object,
    /// A disk of the program, which completes it.
    Disk,
}

impl TargetKind {
    /// Renames a complete file to its name. No writer of the file may remain.
    pub(crate) fn finish(self) -> Result<(), String> {
        match self {
            Self::InPlace | Self::Object | Self::Disk => Ok(()),
            Self::Overlay(file) => file.finish(),
            Self::Replaced { file, format, .. } => {
                if format.format.is_raw() {
                    let mut first = [0; PROBE_BYTES];
                    file.file().read_at(0, &mut first).map_err(|error| os_message(&error))?;
                    let fd = file.file().fd().map_err(|error| os_message(&error))?;
                    settle_raw(fd, &first, format.given, "-O raw")?;
                }
                file.finish()
            }
        }
    }

    /// Opens the complete target again for reading, if the endpoint that wrote it is write-only.
    pub(crate) fn reopened(&self, location: &Location) -> Result<Option<Box<dyn Endpoint>>, Error> {
        match self {
            Self::Replaced { file, format, .. } if !format.format.is_raw() => {
                let options = ChainOptions {
                    format: Some(format.format),
                    locking: Locking::Unlocked,
                    ..ChainOptions::default()
                };
                image(location, file.path(), &options).map(Some)
            }
            Self::Object => {
                let raw = Some(Format::Raw);
                let options = ChainOptions { format: raw, ..ChainOptions::default() };
                remote_image(location, &options, &RemoteOptions::default()).map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// Opens the source. Without a format in `chain_options`, a file that begins like a qcow2 image is
/// opened as one.
pub(crate) fn source(
    location: &Location,
    chain_options: ChainOptions,
    remote: &RemoteOptions,
    connecting: Connecting<'_>,
) -> Result<Box<dyn Endpoint>, Error> {
    let path = match location {
        Location::Nbd(uri) => return nbd::connect(uri, connecting, false),
        Location::File(path) => path,
        Location::Object(_) | Location::Rbd(_) => {
            return remote_image(location, &chain_options, remote);
        }
    };
    image(location, path, &chain_options)
}

/// Opens an image of a store or of a Ceph cluster.
pub(crate) fn remote_image(
    location: &Location,
    options: &ChainOptions,
    remote: &RemoteOptions,
) -> Result<Box<dyn Endpoint>, Error> {
    let opened = nowait_remote::open(location, options, remote);
    let opened = opened.map_err(|error| Error::at(location, error.what()))?;
    file_endpoint::of_image(location.to_string(), opened)
}

/// Opens an image. `path` is the current path of `location`.
pub(crate) fn image(
    location: &Location,
    path: &Path,
    options: &ChainOptions,
) -> Result<Box<dyn Endpoint>, Error> {
    let opened = nowait_image::open(path, options).map_err(|error| {
        let what = match error.errno() {
            errno if errno == Errno::ISDIR.raw_os_error() => "it is a directory",
            _ => error.what(),
        };
        match Some(error.path()) == location.path() {
            true => Error::at(location, what),
            false => Error::at(&error.path().display(), what),
        }
    })?;
    file_endpoint::of_image(location.to_string(), opened)
}

/// Which existing targets may be overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OverwriteOptions {
    /// A file that is not empty, or a block device.
    pub(crate) force: bool,
    /// A block device that is mounted or otherwise in use.
    pub(crate) mounted: bool,
}

/// The format of a target, as requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TargetFormat {
    pub(crate) format: Format,
    /// Whether the user gave the format.
    pub(crate) given: bool,
    /// Bytes of a cluster of a qcow2 image.
    pub(crate) cluster_bytes: Option<u64>,
    /// How its clusters are compressed, if they are.
    pub(crate) compression: Option<Compression>,
}

impl TargetFormat {
    /// Refuses a raw file at `path` that a later open would mistake for another format, unless
    /// the user gave the format. `first` are the first bytes of the disk.
    pub(crate) fn check_signature(self, path: Option<&Path>, first: &[u8]) -> Result<(), Error> {
        let Some(path) = path else { return Ok(()) };
        let device = fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
        match Signature::of(first) {
            Some(known) if self.format.is_raw() && !self.given && !device => {
                let what = format!(
                    "it would begin like {} and be taken for that (if it is to be raw, say so: \
                     -O raw)",
                    known.words()
                );
                Err(Error::at(&path.display(), what))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what only an image has, of a target that is raw.
    fn check_clusters(self, location: &Location) -> Result<(), Error> {
        let why = match self {
            _ if !self.format.is_raw() => return Ok(()),
            Self { cluster_bytes: Some(_), .. } => "clusters (leave out --cluster-size)",
            Self { compression: Some(_), .. } => "compressed clusters (leave out --compress)",
            _ => return Ok(()),
        };
        Err(Error::at(location, format!("a raw image has no {why}")))
    }

    /// Refuses a target that is an image and not a file.
    fn check_in_place(self, location: &Location) -> Result<(), Error> {
        if self.format.is_raw() {
            return Ok(());
        }
        let upload = match location {
            Location::Object(_) => " (and uploaded as it is by a second copy, with -f raw)",
            _ => "",
        };
        let name = self.format.name();
        Err(Error::at(location, format!("a {name} image is made as a file only{upload}")))
    }
}

/// Opens the target for a disk of `size` bytes copied from `from`, if that is a path. `overwrite` says which existing
/// targets may be overwritten.
pub(crate) fn target(
    location: &Location,
    from: Option<&Path>,
    format: TargetFormat,
    size: u64,
    overwrite: OverwriteOptions,
    connecting: Connecting<'_>,
) -> Result<Target, Error> {
    let force = overwrite.force;
    format.check_clusters(location)?;
    let path = match location {
        Location::File(path) => path,
        Location::Object(url) => {
            format.check_in_place(location)?;
            let endpoint = object_endpoint::open(url, size, force)?;
            return Ok(Target { endpoint, kind: TargetKind::Object, is_zero: false });
        }
        Location::Rbd(_) => {
            format.check_in_place(location)?;
            let raw = Some(Format::Raw);
            let options = ChainOptions { writable: true, format: raw, ..ChainOptions::default() };
            let endpoint = remote_image(location, &options, &RemoteOptions::default())?;
            check_size(location, &*endpoint, size)?;
            return Ok(Target { endpoint, kind: TargetKind::InPlace, is_zero: false });
        }
        Location::Nbd(uri) => {
            format.check_in_place(location)?;
            let endpoint = nbd::connect(uri, connecting, true)?;
            check_size(location, &*endpoint, size)?;
            return Ok(Target { endpoint, kind: TargetKind::InPlace, is_zero: false });
        }
    };
    let found = match fs::metadata(path) {
        Ok(found) => Some(found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(Error::at(location, os_message(&error))),
    };
    check_other(location, path, from)?;
    match found {
        Some(found) if found.file_type().is_block_device() => {
            format.check_in_place(location)?;
            if !force {
                let what = "it is a block device (to overwrite what is on it: --force)";
                return Err(Error::at(location, what));
            }
            let options = ChainOptions {
                format: Some(Format::Raw),
                writable: true,
                allow_mounted: overwrite.mounted,
                ..ChainOptions::default()
            };
            let endpoint = image(location, path, &options)?;
            check_size(location, &*endpoint, size)?;
            Ok(Target { endpoint, kind: TargetKind::InPlace, is_zero: false })
        }
        Some(found) if found.is_file() => replace(location, path, &found, format, size, force),
        Some(_) => Err(Error::at(location, "neither a regular file nor a block device")),
        None if fs::symlink_metadata(path).is_ok() => {
            Err(Error::at(location, "it is a link to nothing (remove it first, with rm)"))
        }
        None => new_file(location, path, format, size, OverwritePolicy::Nothing, None),
    }
}

/// A new file that replaces an existing one.
fn replace(
    location: &Location,
    path: &Path,
    found: &fs::Metadata,
    format: TargetFormat,
    size: u64,
    force: bool,
) -> Result<Target, Error> {
    if found.len() > 0 && !force {
        let what = "there is such a file already (to overwrite it: --force)";
        return Err(Error::at(location, what));
    }
    // The file that a symbolic link points to is replaced, not the link.
    let real = fs::canonicalize(path).map_err(|error| Error::at(location, os_message(&error)))?;
    let old = File::options().read(true).write(true).open(&real);
    let old =
        old.map_err(|error| Error::at(location, format!("cannot open: {}", os_message(&error))))?;
    match lock::lock(old.as_fd(), Access::Write) {
        Ok(()) | Err(LockError::Unsupported) => {}
        Err(error) => return Err(Error::at(location, lock_holder::told(old.as_fd(), error))),
    }
    new_file(location, &real, format, size, OverwritePolicy::File { mode: found.mode() }, Some(old))
}

fn new_file(
    location: &Location,
    to: &Path,
    format: TargetFormat,
    size: u64,
    replaces: OverwritePolicy,
    replaced: Option<File>,
) -> Result<Target, Error> {
    let failed = |what: String| Error::at(location, what);
    let image =
        format.format.builder(size, format.cluster_bytes, format.compression).map_err(failed)?;
    let bytes = if image.is_some() { 0 } else { size };
    let file = AtomicFile::create(to, bytes, replaces).map_err(failed)?;
    let disk_bytes = image.as_ref().map_or(size, |image| image.max_data_end());
    let content = match image {
        None => Content::Raw,
        Some(image) => {
            let written = ImageFile::open(file.path(), true);
            let written = written.map_err(|error| Error::at(location, error.what()))?;
            if format.compression.is_some() {
                let endpoint = compressed_endpoint::open(location.to_string(), image, written)?;
                let kind = TargetKind::Replaced { file, format, _replaced: replaced };
                return Ok(Target { endpoint, kind, is_zero: true });
            }
            Content::New(NewImage::new(image, written))
        }
    };
    let storage = FileStorage::open(file.path(), OpenOptions::default())
        .map_err(|error| failed(format!("cannot open: {}", reason(error.errno()))))?;
    // Each byte is written once, so an allocation cache would not help.
    let map = AllocationCache::new(disk_bytes, false);
    let disk = BlockDevice::mapped(Arc::new(storage), Vec::new(), disk_bytes, false, map);
    let endpoint = file_endpoint::open(location.to_string(), Arc::new(disk), content)?;
    let kind = TargetKind::Replaced { file, format, _replaced: replaced };
    Ok(Target { endpoint, kind, is_zero: true })
}

fn check_size(location: &Location, endpoint: &dyn Endpoint, size: u64) -> Result<(), Error> {
    let target_size = endpoint.capabilities().size;
    if target_size < size {
        let what = format!("it is too small: it has {target_size} bytes, the source has {size}");
        return Err(Error::at(location, what));
    }
    Ok(())
}

/// Refuses the source `from` as the target at `path`.
pub(crate) fn check_other(
    location: &Location,
    path: &Path,
    from: Option<&Path>,
) -> Result<(), Error> {
    let found = |path: &Path| fs::metadata(path).ok();
    match found(path).zip(from.and_then(found)) {
        Some((found, from)) if is_same(&found, &from) => {
            Err(Error::at(location, "it is the source itself"))
        }
        _ => Ok(()),
    }
}

fn is_same(a: &fs::Metadata, b: &fs::Metadata) -> bool {
    let same_device =
        a.file_type().is_block_device() && b.file_type().is_block_device() && a.rdev() == b.rdev();
    same_device || (a.dev(), a.ino()) == (b.dev(), b.ino())
}
