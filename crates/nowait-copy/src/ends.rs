//! The two sides of a copy, opened: files locked, exports asked for, refusals said before anything
//! is changed.
//!
//! Invariant: a source is never written to; a target that holds something is not touched without
//! leave, and not if it is too small.
//! Knows: error, place, port, file_port, nbd, partial. Known by: job.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nowait::{Disk, OpenOptions};
use nowait_image::lock::{self, Access, LockError};
use nowait_image::{Format, HostFile};
use rustix::io::Errno;

use crate::error::{Error, reason, words};
use crate::file_port;
use crate::nbd;
use crate::partial::{Partial, Replaces};
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
        /// What it replaces, held locked so that nobody begins to use it.
        _replaced: Option<File>,
    },
}

impl Named {
    /// Gives a file its name, when it is complete and nobody writes to it any more.
    pub(crate) fn finish(self) -> Result<(), String> {
        match self {
            Self::AsEver => Ok(()),
            Self::Apart { file, _replaced } => file.finish(),
        }
    }
}

/// Opens the source. Without a `format`, a file that begins like a qcow2 image is refused.
pub(crate) fn source(
    place: &Place,
    format: Option<Format>,
    connections: usize,
) -> Result<Box<dyn Port>, Error> {
    let path = match place {
        Place::Nbd(uri) => return nbd::connect(uri, connections, false),
        Place::File(path) => path,
    };
    let port = open(path, path, true, Locking::Lock)?;
    let format = match format {
        Some(format) => format,
        None => probe(path)?,
    };
    match format {
        Format::Raw => Ok(port),
        Format::Qcow2 => {
            let what = "it is a qcow2 image, which cannot be copied yet \
                        (to copy the file as it is: --from-format raw)";
            Err(Error::at(place, what))
        }
    }
}

/// Opens the target for a disk of `size` bytes that comes from `from`. `force` allows to overwrite.
pub(crate) fn target(
    place: &Place,
    from: &Place,
    size: u64,
    force: bool,
    connections: usize,
) -> Result<Target, Error> {
    let path = match place {
        Place::File(path) => path,
        Place::Nbd(uri) => {
            let port = nbd::connect(uri, connections, true)?;
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
            if !force {
                let what = "it is a block device (to overwrite what is on it: --force)";
                return Err(Error::at(place, what));
            }
            let port = open(path, path, false, Locking::Lock)?;
            large_enough(place, &*port, size)?;
            Ok(Target { port, named: Named::AsEver, is_zero: false })
        }
        Some(found) if found.is_file() => replace(place, path, &found, size, force),
        Some(_) => Err(Error::at(place, "neither a regular file nor a block device")),
        None if fs::symlink_metadata(path).is_ok() => {
            Err(Error::at(place, "it is a link to nothing (remove it first, with rm)"))
        }
        None => new_file(place, path, size, Replaces::Nothing, None),
    }
}

/// A new file in the place of one that is there.
fn replace(
    place: &Place,
    path: &Path,
    found: &fs::Metadata,
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
    new_file(place, &real, size, Replaces::File { mode: found.mode() }, Some(old))
}

fn new_file(
    place: &Place,
    to: &Path,
    size: u64,
    replaces: Replaces,
    replaced: Option<File>,
) -> Result<Target, Error> {
    let partial = Partial::create(to, size, replaces).map_err(|what| Error::at(place, what))?;
    let name = PathBuf::from(place.to_string());
    let port = open(partial.path(), &name, false, Locking::Locked)?;
    let named = Named::Apart { file: partial, _replaced: replaced };
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

/// Whether a file that is opened has to be locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Locking {
    /// As QEMU does.
    Lock,
    /// It is, by another descriptor of this process.
    Locked,
}

/// Opens the file at `path`, which is called `name` in what is said of it.
fn open(path: &Path, name: &Path, read_only: bool, lock: Locking) -> Result<Box<dyn Port>, Error> {
    let shown = name.display();
    // Each byte is looked at once, so there is nothing to remember about it.
    let options = OpenOptions { read_only, no_hint: true, ..OpenOptions::default() };
    let disk = Disk::open(path, options).map_err(|error| Error::at(&shown, cannot_open(error)))?;
    let access = if read_only { Access::Read } else { Access::Write };
    if lock == Locking::Lock {
        match lock::lock(disk.lock_fd(), access) {
            Ok(()) | Err(LockError::Unsupported) => {}
            Err(error) => return Err(Error::at(&shown, error)),
        }
    }
    file_port::open(shown.to_string(), Arc::new(disk))
}

fn cannot_open(error: nowait::Error) -> String {
    match Errno::from_raw_os_error(error.errno()) {
        Errno::ISDIR => "it is a directory".into(),
        Errno::NOTBLK => "neither a regular file nor a block device".into(),
        Errno::NODATA => "it is empty".into(),
        _ => format!("cannot open: {}", reason(error.errno())),
    }
}

fn probe(path: &Path) -> Result<Format, Error> {
    let format = HostFile::open(path, false).and_then(|file| Format::probe(&file));
    format.map_err(|error| Error::at(&path.display(), error.what()))
}
