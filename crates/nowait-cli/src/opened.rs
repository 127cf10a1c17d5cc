//! Images that are open, locked and ready to be served.
//!
//! Invariant: nothing of an image is changed before it is locked. A format is guessed by qcow2's
//! own first bytes, and what was guessed to be raw never comes to begin like that.
//! Knows: args, error, export, info. Known by: serve.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use nowait::{Disk, Error, Extents, File, OpenOptions, Uring};
use nowait_image::lock::{self, Access, LockError};
use nowait_image::served::{self, Keeper, Qcow2, ServeOptions};
use nowait_image::{Chain, ChainOptions, Format, HostFile, Locking, MAGIC};
use nowait_server::{Device, Export};
use tracing::warn;

use crate::args::{self, ServeArgs};
use crate::error::{CliError, reason};
use crate::export::Named;
use crate::info::begins_like_qcow2;

/// What is in an image.
enum Inside {
    /// The disk's bytes; `guessed` if nobody said so.
    Raw { disk: Arc<Disk<Extents>>, guessed: bool },
    /// Clusters.
    Qcow2 { disk: Arc<Disk<Qcow2>>, keeper: Keeper },
}

/// An image that is open, locked and known.
pub(crate) struct Opened {
    pub(crate) named: Named,
    inside: Inside,
}

impl Opened {
    pub(crate) fn size(&self) -> u64 {
        match &self.inside {
            Inside::Raw { disk, .. } => disk.size(),
            Inside::Qcow2 { disk, .. } => disk.size(),
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        match &self.inside {
            Inside::Raw { disk, .. } => disk.is_read_only(),
            Inside::Qcow2 { disk, .. } => disk.is_read_only(),
        }
    }

    pub(crate) fn is_direct(&self) -> bool {
        match &self.inside {
            Inside::Raw { disk, .. } => disk.is_direct(),
            Inside::Qcow2 { disk, .. } => disk.is_direct(),
        }
    }

    pub(crate) fn format(&self) -> Format {
        match &self.inside {
            Inside::Raw { .. } => Format::Raw,
            Inside::Qcow2 { .. } => Format::Qcow2,
        }
    }

    /// A ring for it, as each queue would have one.
    pub(crate) fn ring(&self) -> Result<Uring, Error> {
        match &self.inside {
            Inside::Raw { disk, .. } => Uring::for_files(&disk.files()),
            Inside::Qcow2 { disk, .. } => Uring::for_files(&disk.files()),
        }
    }

    /// What is served, with at most `workers` threads that may block.
    pub(crate) fn export(&self, workers: u32) -> Export {
        let Named { name, image } = self.named.clone();
        let description = format!("{}", image.display());
        match &self.inside {
            Inside::Raw { disk, guessed } => {
                let device = Device::new(disk.clone(), workers, name, description);
                Export::new(if *guessed { device.never_beginning(&MAGIC) } else { device })
            }
            Inside::Qcow2 { disk, .. } => {
                Export::new(Device::new(disk.clone(), workers, name, description))
            }
        }
    }

    /// Makes everything durable. With `ended`, when nothing is in flight any more, space that is
    /// not needed is given back too.
    pub(crate) fn close(self, ended: bool) -> Result<(), CliError> {
        let read_only = self.is_read_only();
        let flushed = match self.inside {
            _ if read_only => Ok(()),
            Inside::Raw { disk, .. } => File::new(disk).flush(),
            Inside::Qcow2 { disk, keeper } => {
                let flushed = File::new(disk).flush();
                if ended { flushed.and_then(|()| keeper.close()) } else { flushed }
            }
        };
        flushed.map_err(|error| CliError::at(&self.named.image, error))
    }
}

/// Opens all of `exports`.
pub(crate) fn open_all(args: &ServeArgs, exports: Vec<Named>) -> Result<Vec<Opened>, CliError> {
    let mut all: Vec<Opened> = Vec::new();
    for named in exports {
        let same = all.iter().any(|other| is_same_file(&other.named.image, &named.image));
        if same && !args.read_only {
            let what = "it is given twice (serve it under one name, or try --read-only)";
            return Err(CliError::at(&named.image, what));
        }
        let inside = open(args, &named.image)?;
        all.push(Opened { named, inside });
    }
    Ok(all)
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let id = |path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    id(one).is_some_and(|one| id(other) == Some(one))
}

/// Opens and locks the image. Its format is the one that was given, or else guessed.
fn open(args: &ServeArgs, image: &Path) -> Result<Inside, CliError> {
    // What cannot be opened here is told of when it is opened to be served.
    let guess = || HostFile::open(image, false).and_then(|file| Format::probe(&file));
    let inside = match args.format.or_else(|| guess().ok()) {
        Some(Format::Qcow2) => open_qcow2(args, image)?,
        _ => open_raw(args, image)?,
    };
    let direct = match &inside {
        Inside::Raw { disk, .. } => disk.is_direct(),
        Inside::Qcow2 { disk, .. } => disk.is_direct(),
    };
    if args.direct == args::Direct::Auto && !direct {
        warn!("{}: no direct I/O here, going through the page cache", image.display());
    }
    Ok(inside)
}

fn direct(args: &ServeArgs) -> nowait::Direct {
    match args.direct {
        args::Direct::On => nowait::Direct::On,
        args::Direct::Off => nowait::Direct::Off,
        args::Direct::Auto => nowait::Direct::Auto,
    }
}

fn warn_of_no_lock(path: &Path) {
    warn!("{}: its file system has no locks, so nothing keeps others from it", path.display());
}

fn open_qcow2(args: &ServeArgs, image: &Path) -> Result<Inside, CliError> {
    let failed = |error: nowait_image::ImageError| CliError::new(error.to_string());
    let options = ChainOptions {
        format: Some(Format::Qcow2),
        writable: !args.read_only,
        backing_writable: false,
        damaged: false,
        locking: Locking::Locked,
        backing_dirs: args.backing_dir.clone(),
    };
    let chain = Chain::open(image, &options).map_err(failed)?;
    chain.unlocked().iter().for_each(|path| warn_of_no_lock(path));
    let hint = args.config().hint;
    let options = ServeOptions { writable: !args.read_only, direct: direct(args), hint };
    let (disk, keeper) = served::open(chain, options).map_err(failed)?;
    Ok(Inside::Qcow2 { disk: Arc::new(disk), keeper })
}

fn open_raw(args: &ServeArgs, image: &Path) -> Result<Inside, CliError> {
    let (read_only, no_hint) = (args.read_only, !args.config().hint);
    let options = OpenOptions { read_only, direct: direct(args), no_hint };
    let disk = Disk::open(image, options)
        .map_err(|error| CliError::at(image, open_failure(args, error)))?;
    let access = if read_only { Access::Read } else { Access::Write };
    match lock::lock(disk.lock_fd(), access) {
        Ok(()) => {}
        Err(LockError::Unsupported) => warn_of_no_lock(image),
        Err(error) => return Err(CliError::at(image, error)),
    }
    disk.scan();
    let guessed = args.format.is_none();
    if fs::File::open(image).is_ok_and(|file| begins_like_qcow2(&file)) {
        if guessed {
            // It did not when its format was guessed, and was not locked then.
            return Err(CliError::at(image, "it was changed while it was opened"));
        }
        warn!("{}: it begins like a qcow2 image but is served raw", image.display());
    }
    Ok(Inside::Raw { disk: Arc::new(disk), guessed })
}

fn open_failure(args: &ServeArgs, error: Error) -> String {
    let errno = error.errno();
    let why = reason(&io::Error::from_raw_os_error(errno));
    match rustix::io::Errno::from_raw_os_error(errno) {
        rustix::io::Errno::ISDIR => "it is a directory (give an image file)".into(),
        rustix::io::Errno::NOTBLK => "neither a regular file nor a block device".into(),
        rustix::io::Errno::NODATA => "it is empty (make an image with 'nowait create')".into(),
        rustix::io::Errno::NOENT => "there is no such file (make it with 'nowait create')".into(),
        rustix::io::Errno::OPNOTSUPP => {
            "its file system does no direct I/O (try --direct auto)".into()
        }
        rustix::io::Errno::ACCESS | rustix::io::Errno::PERM | rustix::io::Errno::ROFS
            if !args.read_only =>
        {
            format!("cannot open for writing: {why} (try --read-only)")
        }
        _ => format!("cannot open: {why}"),
    }
}
