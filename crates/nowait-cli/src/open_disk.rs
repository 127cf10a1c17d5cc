//! Opens and locks images for `serve`.
//!
//! Invariant: an image is not changed before it is locked. A file's format is detected by qcow2's
//! magic, and a file that was detected as raw is kept from getting that magic. A block device is
//! raw where no format is given.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::{fs, io};

use nowait::{
    AllocationCache, BlockDevice, BlockingFile, Error, FileStorage, OpenOptions, Storage, Uring,
};
use nowait_image::lock::{self, Access, LockError};
use nowait_image::lock_holder;
use nowait_image::qcow2_disk::{self, OpenImage, Qcow2Map, ServeOptions};
use nowait_image::{
    Chain, ChainOptions, Format, HostFile, Locking, MAGIC, NO_MEDIUM, Signature, in_use, mark_raw,
};
use nowait_server::{AnyExport, Export};
use tracing::warn;

use crate::args::ServeArgs;
use crate::export_spec::NamedExport;
use crate::{args, open_chain, systemd};
use nowait_cli::error::{CliError, os_message};

/// An open image by its format.
enum DiskFormat {
    Raw {
        disk: Arc<BlockDevice<AllocationCache>>,
    },
    /// qcow2, with the handle that holds its locks and writes back its metadata.
    Qcow2 {
        disk: Arc<BlockDevice<Qcow2Map>>,
        open_image: OpenImage,
    },
}

/// An open and locked image.
pub(crate) struct OpenedDisk {
    pub(crate) named: NamedExport,
    content: DiskFormat,
}

impl OpenedDisk {
    pub(crate) fn size(&self) -> u64 {
        match &self.content {
            DiskFormat::Raw { disk, .. } => disk.size(),
            DiskFormat::Qcow2 { disk, .. } => disk.size(),
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        match &self.content {
            DiskFormat::Raw { disk, .. } => disk.is_read_only(),
            DiskFormat::Qcow2 { disk, .. } => disk.is_read_only(),
        }
    }

    pub(crate) fn is_direct(&self) -> bool {
        match &self.content {
            DiskFormat::Raw { disk, .. } => disk.is_direct(),
            DiskFormat::Qcow2 { disk, .. } => disk.is_direct(),
        }
    }

    pub(crate) fn format(&self) -> Format {
        match &self.content {
            DiskFormat::Raw { .. } => Format::Raw,
            DiskFormat::Qcow2 { .. } => Format::Qcow2,
        }
    }

    /// A ring for the image, as each queue has one.
    pub(crate) fn ring(&self) -> Result<Uring, Error> {
        match &self.content {
            DiskFormat::Raw { disk, .. } => Uring::for_files(&disk.files()?),
            DiskFormat::Qcow2 { disk, .. } => Uring::for_files(&disk.files()?),
        }
    }

    /// The export, with at most `workers` threads that may block. Without a `description` clients
    /// see the name of the file, not its directory.
    pub(crate) fn export(&self, workers: u32, description: Option<String>) -> AnyExport {
        let NamedExport { name, image } = self.named.clone();
        let file = || image.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let description = description.unwrap_or_else(file);
        match &self.content {
            DiskFormat::Raw { disk } => {
                let device = Export::new(disk.clone(), workers, name, description);
                AnyExport::new(device.when_a_flush_fails(systemd::notify_failed_flush))
            }
            DiskFormat::Qcow2 { disk, .. } => {
                let device = Export::new(disk.clone(), workers, name, description);
                AnyExport::new(device.when_a_flush_fails(systemd::notify_failed_flush))
            }
        }
    }

    /// Flushes the image. With `ended`, which requires that no request is in flight, unused space
    /// is freed, too.
    pub(crate) fn close(self, ended: bool) -> Result<(), CliError> {
        let read_only = self.is_read_only();
        let flushed = match self.content {
            _ if read_only => Ok(()),
            DiskFormat::Raw { disk, .. } => BlockingFile::new(disk).flush(),
            DiskFormat::Qcow2 { disk, open_image } => {
                let flushed = BlockingFile::new(disk).flush();
                if ended { flushed.and_then(|()| open_image.close()) } else { flushed }
            }
        };
        flushed.map_err(|error| CliError::at(&self.named.image, error))
    }
}

/// Opens all of `exports`.
pub(crate) fn open_all(
    args: &ServeArgs,
    exports: Vec<NamedExport>,
) -> Result<Vec<OpenedDisk>, CliError> {
    let mut all: Vec<OpenedDisk> = Vec::new();
    for named in exports {
        let same = all.iter().any(|other| is_same_file(&other.named.image, &named.image));
        if same && !args.read_only {
            let what = "it is given twice (serve it under one name, or try --read-only)";
            return Err(CliError::at(&named.image, what));
        }
        all.push(open(args, named)?);
    }
    Ok(all)
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let id = |path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    id(one).is_some_and(|one| id(other) == Some(one))
}

/// Opens and locks the image in the given format, or else in the detected one.
fn open(args: &ServeArgs, named: NamedExport) -> Result<OpenedDisk, CliError> {
    let image = &named.image;
    let content = match args.format.map_or_else(|| probe_format(image), Ok)? {
        Format::Qcow2 => open_qcow2(args, image)?,
        Format::Raw => open_raw(args, image)?,
    };
    let opened = OpenedDisk { named, content };
    if args.direct == args::Direct::Auto && !opened.is_direct() {
        let image = opened.named.image.display();
        warn!("{image}: no direct I/O here, going through the page cache");
    }
    Ok(opened)
}

fn probe_format(image: &Path) -> Result<Format, CliError> {
    match HostFile::open(image, false) {
        Ok(file) => Format::probe(&file).map_err(|error| open_chain::failed(&error)),
        // The error is reported by the open for serving that follows.
        Err(_) => Ok(Format::Raw),
    }
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

fn warn_of_no_mark(path: &Path) {
    warn!(
        "{}: it cannot be marked as raw here (no extended attributes), so always open it with \
         --format raw: a client can make it begin like another format",
        path.display()
    );
}

fn open_qcow2(args: &ServeArgs, image: &Path) -> Result<DiskFormat, CliError> {
    let failed = |error: nowait_image::ImageError| open_chain::failed(&error);
    let options = ChainOptions {
        format: Some(Format::Qcow2),
        writable: !args.read_only,
        backing_writable: false,
        damaged: false,
        allow_mounted: args.allow_mounted,
        locking: Locking::Locked,
        backing_dirs: args.others.backing_dir.clone(),
        data_files: args.others.data_file.clone(),
    };
    let chain = Chain::open(image, &options).map_err(failed)?;
    chain.unlocked().iter().for_each(|path| warn_of_no_lock(path));
    chain.unmarked().iter().for_each(|path| warn_of_no_mark(path));
    let hint = args.config().hint;
    let options = ServeOptions { writable: !args.read_only, direct: direct(args), hint };
    let (disk, open_image) = qcow2_disk::open(chain, options).map_err(failed)?;
    Ok(DiskFormat::Qcow2 { disk: Arc::new(disk), open_image })
}

fn open_raw(args: &ServeArgs, image: &Path) -> Result<DiskFormat, CliError> {
    let (read_only, no_hint) = (args.read_only, !args.config().hint);
    let options =
        OpenOptions { read_only, direct: direct(args), allow_mounted: args.allow_mounted, no_hint };
    let failed = |error| CliError::at(image, open_failure(args, image, error));
    let storage = FileStorage::open(image, options).map_err(failed)?;
    let access = if read_only { Access::Read } else { Access::Write };
    match lock::lock(storage.lock_fd(), access) {
        Ok(()) => {}
        Err(LockError::Unsupported) => warn_of_no_lock(image),
        Err(error) => {
            return Err(CliError::at(image, lock_holder::told(storage.lock_fd(), error)));
        }
    }
    // A block device is not probed: without a format it is raw, whatever its first bytes are.
    let device = storage.properties().device;
    let guessed = args.format.is_none() && !device;
    let signature = HostFile::open(image, false).ok().and_then(|file| Signature::probe(&file).ok());
    if let Some(signature) = signature.flatten() {
        if guessed {
            // The file had no signature when its format was detected, before it was locked.
            return Err(CliError::at(image, "it was changed while it was opened"));
        }
        warn!("{}: it begins like {} but is served raw", image.display(), signature.words());
    }
    if !guessed && !device && !read_only && mark_raw(storage.lock_fd()).is_err() {
        warn_of_no_mark(image);
    }
    let disk = BlockDevice::raw(Arc::new(storage), no_hint).map_err(failed)?;
    disk.scan();
    let disk = if guessed { disk.with_forbidden_prefix(&MAGIC) } else { disk };
    Ok(DiskFormat::Raw { disk: Arc::new(disk) })
}

fn open_failure(args: &ServeArgs, image: &Path, error: Error) -> String {
    let errno = error.errno();
    let why = os_message(&io::Error::from_raw_os_error(errno));
    match rustix::io::Errno::from_raw_os_error(errno) {
        rustix::io::Errno::BUSY => in_use(image),
        rustix::io::Errno::ISDIR => "it is a directory (give an image file)".into(),
        rustix::io::Errno::NOTBLK => "neither a regular file nor a block device".into(),
        rustix::io::Errno::NOMEDIUM => NO_MEDIUM.into(),
        rustix::io::Errno::NOENT => "there is no such file (make it with 'nowait create')".into(),
        rustix::io::Errno::OPNOTSUPP => {
            "its file system does no direct I/O (try --direct auto)".into()
        }
        rustix::io::Errno::ACCESS | rustix::io::Errno::PERM | rustix::io::Errno::ROFS
            // If the image cannot be read either, --read-only does not help.
            if !args.read_only && fs::File::open(image).is_ok() =>
        {
            format!("cannot open for writing: {why} (try --read-only)")
        }
        _ => format!("cannot open: {why}"),
    }
}
