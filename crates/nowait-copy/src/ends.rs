//! The two sides of a copy, opened: files locked, exports asked for, refusals said before anything
//! is changed.
//!
//! Invariant: a source is never written to; a target that holds something is not touched without
//! leave, and not if it is too small.
//! Knows: error, place, port, file_port, nbd. Known by: job.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nowait::{Direct, Disk, OpenOptions};
use nowait_image::lock::{self, Access, LockError};
use nowait_image::served::{self, ServeOptions};
use nowait_image::{
    Chain, ChainOptions, Format, HostFile, ImageError, Locking, NewImage, Partial, Replaces,
};
use rustix::io::Errno;

use crate::error::{Error, reason, words};
use crate::file_port::{self, Content};
use crate::nbd::{self, Connecting};
use crate::place::Place;
use crate::port::Port;

/// The target, ready to be written to.
pub(crate) struct Target {
    pub(crate) port: Box<dyn Port>,
    pub(crate) named: Named,
    /// Whether all of it reads as zeros.
    pub(crate) is_zero: bool,
}

/// What a target is called while it is written.
pub(crate) enum Named {
    /// What it is called afterwards.
    AsEver,
    /// Something else, until it is complete.
    Apart {
        file: Partial,
        /// What is in it.
        format: Format,
        /// What it replaces, held locked so that nobody begins to use it.
        _replaced: Option<File>,
    },
}

impl Named {
    /// Gives a file its name, when it is complete and nobody writes to it any more.
    pub(crate) fn finish(self) -> Result<(), String> {
        match self {
            Self::AsEver => Ok(()),
            Self::Apart { file, .. } => file.finish(),
        }
    }

    /// The complete target once more, to be read, where who wrote it cannot read it.
    pub(crate) fn reopened(&self, place: &Place) -> Result<Option<Box<dyn Port>>, Error> {
        match self {
            Self::Apart { file, format: Format::Qcow2, .. } => {
                let options = ChainOptions { locking: Locking::Unlocked, ..chain_options() };
                image(place, file.path(), &options).map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// Opens the source. Without a `format`, a file that begins like a qcow2 image is taken for one.
/// What it stands on may be below its own directory, and below `backing_dirs`.
pub(crate) fn source(
    place: &Place,
    format: Option<Format>,
    backing_dirs: &[PathBuf],
    connecting: Connecting<'_>,
) -> Result<Box<dyn Port>, Error> {
    let path = match place {
        Place::Nbd(uri) => return nbd::connect(uri, connecting, false),
        Place::File(path) => path,
    };
    // What cannot be opened here is told of when it is opened to be read.
    let probed = || HostFile::open(path, false).and_then(|file| Format::probe(&file)).ok();
    match format.or_else(probed) {
        Some(Format::Qcow2) => {
            let backing_dirs = backing_dirs.to_vec();
            image(place, path, &ChainOptions { backing_dirs, ..chain_options() })
        }
        _ => {
            let port = open(path, path, true, Locking::Locked, Content::Raw)?;
            let changed = format.is_none() && probed() == Some(Format::Qcow2);
            if changed {
                Err(Error::at(place, "it was changed while it was opened"))
            } else {
                Ok(port)
            }
        }
    }
}

fn chain_options() -> ChainOptions {
    ChainOptions { format: Some(Format::Qcow2), ..ChainOptions::default() }
}

/// A qcow2 image and all that it stands on, to be read. `path` is where `place` is now.
fn image(place: &Place, path: &Path, options: &ChainOptions) -> Result<Box<dyn Port>, Error> {
    let failed = |error: ImageError| match Some(error.path()) == place.path() {
        true => Error::at(place, error.what()),
        false => Error::at(&error.path().display(), error.what()),
    };
    let chain = Chain::open(path, options).map_err(failed)?;
    if chain.top().size == 0 {
        return Err(Error::at(place, "it is empty"));
    }
    let options = ServeOptions { writable: false, direct: Direct::Auto, hint: true };
    let (disk, keeper) = served::open(chain, options).map_err(failed)?;
    file_port::open(place.to_string(), Arc::new(disk), Content::Image { _keeper: keeper })
}

/// What a target is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) format: Format,
    /// Bytes of a cluster, of a qcow2 image.
    pub(crate) cluster_bytes: Option<u64>,
}

impl Shape {
    /// Refuses what only a file can be.
    fn fits_what_is_there(self, place: &Place) -> Result<(), Error> {
        match self.format {
            Format::Raw => Ok(()),
            Format::Qcow2 => Err(Error::at(place, "a qcow2 image is made as a file only")),
        }
    }
}

/// Opens the target for a disk of `size` bytes that comes from `from`. `force` allows to overwrite.
pub(crate) fn target(
    place: &Place,
    from: &Place,
    shape: Shape,
    size: u64,
    force: bool,
    connecting: Connecting<'_>,
) -> Result<Target, Error> {
    if shape.format == Format::Raw && shape.cluster_bytes.is_some() {
        return Err(Error::at(place, "a raw image has no clusters (leave out --cluster-size)"));
    }
    let path = match place {
        Place::File(path) => path,
        Place::Nbd(uri) => {
            shape.fits_what_is_there(place)?;
            let port = nbd::connect(uri, connecting, true)?;
            large_enough(place, &*port, size)?;
            return Ok(Target { port, named: Named::AsEver, is_zero: false });
        }
    };
    let found = match fs::metadata(path) {
        Ok(found) => Some(found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(Error::at(place, words(&error))),
    };
    if let (Some(found), Some(from)) = (&found, from.path())
        && fs::metadata(from).is_ok_and(|from| is_same(found, &from))
    {
        return Err(Error::at(place, "it is the source itself"));
    }
    match found {
        Some(found) if found.file_type().is_block_device() => {
            shape.fits_what_is_there(place)?;
            if !force {
                let what = "it is a block device (to overwrite what is on it: --force)";
                return Err(Error::at(place, what));
            }
            let port = open(path, path, false, Locking::Locked, Content::Raw)?;
            large_enough(place, &*port, size)?;
            Ok(Target { port, named: Named::AsEver, is_zero: false })
        }
        Some(found) if found.is_file() => replace(place, path, &found, shape, size, force),
        Some(_) => Err(Error::at(place, "neither a regular file nor a block device")),
        None if fs::symlink_metadata(path).is_ok() => {
            Err(Error::at(place, "it is a link to nothing (remove it first, with rm)"))
        }
        None => new_file(place, path, shape, size, Replaces::Nothing, None),
    }
}

/// A new file in the place of one that is there.
fn replace(
    place: &Place,
    path: &Path,
    found: &fs::Metadata,
    shape: Shape,
    size: u64,
    force: bool,
) -> Result<Target, Error> {
    if found.len() > 0 && !force {
        let what = "there is such a file already (to overwrite it: --force)";
        return Err(Error::at(place, what));
    }
    // The file that a link leads to is replaced, not the link.
    let real = fs::canonicalize(path).map_err(|error| Error::at(place, words(&error)))?;
    let old = File::options().read(true).write(true).open(&real);
    let old = old.map_err(|error| Error::at(place, format!("cannot open: {}", words(&error))))?;
    match lock::lock(old.as_fd(), Access::Write) {
        Ok(()) | Err(LockError::Unsupported) => {}
        Err(error) => return Err(Error::at(place, error)),
    }
    new_file(place, &real, shape, size, Replaces::File { mode: found.mode() }, Some(old))
}

fn new_file(
    place: &Place,
    to: &Path,
    shape: Shape,
    size: u64,
    replaces: Replaces,
    replaced: Option<File>,
) -> Result<Target, Error> {
    let failed = |what: String| Error::at(place, what);
    let image = match shape.format {
        Format::Raw => None,
        Format::Qcow2 => Some(NewImage::new(size, shape.cluster_bytes).map_err(failed)?),
    };
    let bytes = image.as_ref().map_or(size, NewImage::max_data_end);
    let file = Partial::create(to, bytes, replaces).map_err(failed)?;
    let content = match image {
        None => Content::Raw,
        Some(image) => {
            let written = HostFile::open(file.path(), true);
            let file = written.map_err(|error| Error::at(place, error.what()))?;
            Content::New { image, file }
        }
    };
    let name = PathBuf::from(place.to_string());
    let port = open(file.path(), &name, false, Locking::Unlocked, content)?;
    let named = Named::Apart { file, format: shape.format, _replaced: replaced };
    Ok(Target { port, named, is_zero: true })
}

fn large_enough(place: &Place, port: &dyn Port, size: u64) -> Result<(), Error> {
    let room = port.facts().size;
    if room < size {
        let what = format!("it is too small: it has {room} bytes, the source has {size}");
        return Err(Error::at(place, what));
    }
    Ok(())
}

fn is_same(a: &fs::Metadata, b: &fs::Metadata) -> bool {
    let same_device =
        a.file_type().is_block_device() && b.file_type().is_block_device() && a.rdev() == b.rdev();
    same_device || (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// Opens the file at `path`, which is called `name` in what is said of it. It is not locked where
/// another descriptor of this process holds the lock.
fn open(
    path: &Path,
    name: &Path,
    read_only: bool,
    locking: Locking,
    content: Content,
) -> Result<Box<dyn Port>, Error> {
    let shown = name.display();
    // Each byte is looked at once, so there is nothing to remember about it.
    let options = OpenOptions { read_only, no_hint: true, ..OpenOptions::default() };
    let disk = Disk::open(path, options).map_err(|error| Error::at(&shown, cannot_open(error)))?;
    let access = if read_only { Access::Read } else { Access::Write };
    if locking == Locking::Locked {
        match lock::lock(disk.lock_fd(), access) {
            Ok(()) | Err(LockError::Unsupported) => {}
            Err(error) => return Err(Error::at(&shown, error)),
        }
    }
    file_port::open(shown.to_string(), Arc::new(disk), content)
}

fn cannot_open(error: nowait::Error) -> String {
    match Errno::from_raw_os_error(error.errno()) {
        Errno::ISDIR => "it is a directory".into(),
        Errno::NOTBLK => "neither a regular file nor a block device".into(),
        Errno::NODATA => "it is empty".into(),
        _ => format!("cannot open: {}", reason(error.errno())),
    }
}
