//! Opens the images of `serve`, each under the name of its export.
//!
//! Invariant: no image is opened twice for writing; every warning is in the log.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io, iter};

use crate::error::{CliError, os_message, plain};
use nowait_image::{Bitmap, ChainOptions, Image, ImageError};
use nowait_remote::{Location, RbdStorage, RemoteOptions};
use nowait_server::{AnyExport, BitmapSpec, BlockSize, ExportOptions};
use rustix::io::Errno;
use tracing::warn;

use crate::config::ServeConfig;
use crate::config::choices::Mechanism;
use crate::config::export_spec::NamedExport;
use crate::disks::parallel_map;
use crate::disks::waiting;
use crate::process::malloc_threshold;
use crate::process::systemd;

/// The most threads that open images.
pub(crate) const OPENING_THREADS: usize = 4;

/// An open and locked image, and the name of its export.
pub(crate) struct OpenedDisk {
    pub(crate) named: NamedExport,
    pub(crate) image: Image,
    /// How it was opened.
    pub(crate) options: ChainOptions,
    /// The text for clients; the name of the file, not its directory, if there is nothing.
    pub(crate) description: Option<String>,
    pub(crate) identity: ImageIdentity,
    /// The blocks of its clients, if these are given.
    pub(crate) block_size: Option<BlockSize>,
}

/// By which it can be told whether two images are one.
#[derive(Clone, Debug)]
pub(crate) struct ImageIdentity {
    /// The path or URI.
    name: PathBuf,
    /// The device and inode of a file.
    file: Option<(u64, u64)>,
}

impl ImageIdentity {
    /// The identity of the image called `name`, as of now.
    pub(crate) fn of(name: &Path) -> Self {
        let file = fs::metadata(name).map(|meta| (meta.dev(), meta.ino())).ok();
        Self { name: name.to_owned(), file }
    }

    /// Whether both are one file, or the same URI.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.name == other.name || self.file.is_some() && self.file == other.file
    }
}

impl OpenedDisk {
    /// The export.
    pub(crate) fn export(&self) -> AnyExport {
        let NamedExport { name, image } = self.named.clone();
        let place = Location::parse(&image.into()).map(|location| location.short_name());
        let description = self.description.clone().or(place.ok()).unwrap_or_default();
        let when_a_flush_fails = Some(systemd::notify_failed_flush as fn());
        let block_size = self.block_size;
        let options = ExportOptions { name, description, when_a_flush_fails, block_size };
        AnyExport::of_image(&self.image, options)
    }

    /// The export with the dirty bitmaps that are stored in its image. Of an image that is only read these stay as they are.
    pub(crate) fn export_with_stored_bitmaps(&self) -> AnyExport {
        let export = self.export();
        let stored = self.image.stored_bitmaps().unwrap_or_else(|error| {
            warn!("{error}");
            Vec::new()
        });
        let of = plain(&self.named.image.to_string_lossy());
        if stored.len() > BitmapSpec::MAX_OF_EXPORT {
            warn!("{of}: only {} of its bitmaps are served", BitmapSpec::MAX_OF_EXPORT);
        }
        for (bitmap, bits) in stored.into_iter().take(BitmapSpec::MAX_OF_EXPORT) {
            let Bitmap { name, granularity, auto, .. } = bitmap;
            let Some(mut bits) = bits else {
                warn!(
                    "{of}: bitmap {name:?} is not served: the program that wrote to the image last has not saved it"
                );
                continue;
            };
            let enabled = auto && !self.image.is_read_only();
            let spec = BitmapSpec { name, granularity, enabled };
            if let Err(why) = export.add_stored_bitmap(&spec, &mut bits) {
                warn!("{of}: bitmap {:?}: {why}", spec.name);
            }
        }
        export
    }

    /// Opens and locks the image of `named`, which is a file or a block device.
    ///
    /// # Errors
    /// One line that names the file and what is wrong with it.
    pub(crate) fn open(
        named: NamedExport,
        options: ChainOptions,
        description: Option<String>,
    ) -> Result<Self, CliError> {
        let image = nowait_image::open(&named.image, &options);
        Self::of(named, image, options, description)
    }

    /// Like [`OpenedDisk::open`], but the image may also be a URI, and has the blocks that are `common` to all.
    pub(crate) fn open_anywhere(
        named: NamedExport,
        options: ChainOptions,
        description: Option<String>,
        common: &Common,
    ) -> Result<Self, CliError> {
        let location = Location::parse(&named.image.clone().into());
        let location = location.map_err(|error| CliError::at(&named.image, error))?;
        let open = || nowait_remote::open(&location, &options, &common.remote);
        let image = waiting::on([&location], open);
        let opened = Self::of(named, image, options, description)?;
        check_blocks(common.block_size, opened.image.size())
            .map_err(|why| CliError::at(&opened.named.image, why))?;
        Ok(Self { block_size: common.block_size, ..opened })
    }

    fn of(
        named: NamedExport,
        image: Result<Image, ImageError>,
        options: ChainOptions,
        description: Option<String>,
    ) -> Result<Self, CliError> {
        let image = image.map_err(|error| failed(&options, &named.image, &error))?;
        image.warnings().iter().for_each(|warning| warn!("{warning}"));
        let identity = ImageIdentity::of(&named.image);
        Ok(Self { named, image, options, description, identity, block_size: None })
    }

    /// Flushes the image. With `ended`, which requires that no request is in flight, unused space
    /// is freed, too.
    pub(crate) fn close(self, ended: bool) -> Result<(), CliError> {
        let flushed = if ended { self.image.close() } else { self.image.flush() };
        flushed.map_err(|error| CliError::at(&self.named.image, error))
    }
}

/// Checks that an image of `size` bytes has whole blocks.
///
/// # Errors
/// Why not, for a line with the name of the image.
pub(crate) fn check_blocks(block_size: Option<BlockSize>, size: u64) -> Result<(), String> {
    match block_size.map(|size| size.bytes()) {
        Some(block) if !size.is_multiple_of(block.into()) => {
            Err(format!("its {size} bytes are not a multiple of --block-size {block}"))
        }
        _ => Ok(()),
    }
}

/// Opens all of `exports`.
pub(crate) fn open_all(
    config: &ServeConfig,
    exports: Vec<NamedExport>,
    common: &Common,
) -> Result<Vec<OpenedDisk>, CliError> {
    let (mut names, mut files) = (HashSet::new(), HashSet::new());
    for named in &exports {
        let ImageIdentity { name, file } = ImageIdentity::of(&named.image);
        let same = !names.insert(name) | file.is_some_and(|file| !files.insert(file));
        if same && !config.read_only {
            let what = "it is given twice (serve it under one name, or try --read-only)";
            return Err(CliError::at(&named.image, what));
        }
    }
    let descriptions = config.export.iter().map(|export| export.description.clone());
    let descriptions = descriptions.chain(iter::repeat(None));
    let all: Vec<_> = exports.into_iter().zip(descriptions).collect();
    parallel_map::try_map(all, OPENING_THREADS, |(named, description)| {
        let options = common.options.clone();
        OpenedDisk::open_anywhere(named, options, description, common)
    })
}

/// Options that the images of a server have in common.
pub(crate) struct Common {
    pub(crate) options: ChainOptions,
    pub(crate) remote: RemoteOptions,
    pub(crate) block_size: Option<BlockSize>,
}

/// How the images of `config` are opened, with the storages that they may stand on.
///
/// # Errors
/// One line that names such a storage and what is wrong with it.
pub(crate) fn common(config: &ServeConfig) -> Result<Common, CliError> {
    let remote = config.remote_options()?;
    let given = &config.backing;
    if config.names_objects() {
        malloc_threshold::return_when_freed();
    }
    let backings = waiting::on(given, || nowait_remote::open_backings(given, &remote));
    let backing_storages = backings.map_err(|error| CliError::of_image(&error))?;
    for uri in &config.allow_uri {
        if let Ok(Location::Rbd(_)) = uri.location() {
            RbdStorage::load_library().map_err(CliError::new)?;
        }
    }
    let bitmap_dir = config.bitmap_dir.as_deref().map(directory_of_bitmaps).transpose()?;
    let options = ChainOptions { backing_storages, bitmap_dir, ..chain_options(config) };
    Ok(Common { options, remote, block_size: config.block_size })
}

/// The directory of `--bitmap-dir`, without symbolic links.
fn directory_of_bitmaps(path: &Path) -> Result<PathBuf, CliError> {
    let found = path.canonicalize().map_err(|error| CliError::at(path, os_message(&error)))?;
    match found.is_dir() {
        true => Ok(found),
        false => Err(CliError::at(path, "it is not a directory (--bitmap-dir)")),
    }
}

/// How the images of `config` are opened.
pub(crate) fn chain_options(config: &ServeConfig) -> ChainOptions {
    ChainOptions {
        format: config.format,
        writable: !config.read_only,
        allow_mounted: config.allow_mounted,
        backing_dirs: config.backing_dir.clone(),
        data_files: config.data_file.clone(),
        direct: config.direct.into(),
        cache_holes: config.is_on(Mechanism::Hint),
        allocate_ahead: config.is_on(Mechanism::AllocateAhead),
        ..ChainOptions::default()
    }
}

/// The error of an open, with what the user can do about it where `serve` has an answer.
fn failed(options: &ChainOptions, image: &Path, error: &ImageError) -> CliError {
    let why = match Errno::from_raw_os_error(error.errno()) {
        _ if error.path() != image => return CliError::of_image(error),
        Errno::ISDIR => "it is a directory (give an image file)".into(),
        Errno::NOENT => format!("{} (make it with 'nowait create')", error.what()),
        errno @ (Errno::ACCESS | Errno::PERM | Errno::ROFS)
            // If the image cannot be read either, --read-only does not help.
            if options.writable && fs::File::open(image).is_ok() =>
        {
            let why = os_message(&io::Error::from(errno));
            format!("cannot open for writing: {why} (try --read-only)")
        }
        _ => return CliError::of_image(error),
    };
    CliError::at(image, why)
}
