//! Backing chains: an image and all files below it, opened and checked.
//!
//! Invariant: when a chain is open, every header in it was read and is supported, no file occurs
//! twice, every file that was not requested for writing is open for reading only, and no file's bytes were
//! changed. A format is guessed only for the first file, only by a format's own first bytes, and never
//! for a block device.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nowait::{Direct, Storage};

use crate::backing_name::OpenedBacking;
use crate::error::{ImageError, plain};
use crate::formats::driver::{OpenTerms, Opened, OtherFiles};
use crate::formats::format::Format;
use crate::formats::layer::Layer;
use crate::formats::probe::{is_guessed, signature_of};
use crate::formats::signature;
use crate::formats::signature::Signature;
use crate::formats::table::{by_recorded_name, names};
use crate::handed_over::HandedOver;
use crate::image_file::{FileId, ImageFile, Opening};
use crate::lock::{Access, LockError};
use crate::named_storages::NamedStorages;
use crate::path_policy::PathPolicy;
use crate::snapshot_name::snapshot_in;
use crate::warning::Warning;
use crate::{base_version, lock, lock_holder};

/// The most images in a chain, each with a descriptor. QEMU has no limit.
/// Beyond it: the image is refused.
pub const MAX_LAYERS: usize = 64;

/// Whether the files of a chain are locked when they are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locking {
    /// Locks as QEMU takes them, by [`crate::lock`]; a file system without locks is accepted.
    Locked,
    /// Not at all, for an inspection of an image that may be in use.
    Unlocked,
}

/// The reason for which an image is opened for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Its disk is written to.
    Write,
    /// Its disk gets another size.
    Resize,
    /// Its metadata is repaired.
    Repair,
    /// Its data goes to the image below it.
    Commit,
}

impl Purpose {
    /// The refusal for an image of a format that is only read, to follow its name.
    fn refusal(self, format: Format) -> String {
        match self {
            Self::Write => format!(
                "a {} image is only read (say --read-only, put a qcow2 image on it with nowait create \
                 --backing, or copy it to one)",
                format.name()
            ),
            Self::Resize => format.cannot_be("resized"),
            Self::Repair => format.cannot_be("repaired"),
            Self::Commit => format.cannot_be("committed to"),
        }
    }
}

impl Purpose {
    /// Refuses to write to the internal snapshot `snapshot` of `file`.
    fn refuse_snapshot(self, file: &ImageFile, snapshot: &OsStr) -> ImageError {
        let shown = plain(&snapshot.to_string_lossy());
        let remedy = match self {
            Self::Write => "say --read-only",
            Self::Resize | Self::Repair | Self::Commit => "leave out the @ and its name",
        };
        let why = format!("its internal snapshot '{shown}' is only read ({remedy})");
        ImageError::refused(file.path(), why)
    }
}

/// How to open an image.
#[derive(Clone, Debug)]
pub struct ChainOptions {
    /// The format of the first file; `None` guesses with [`Format::probe`].
    pub format: Option<Format>,
    /// Without a format: whether the first file was guessed to be raw by a process that has it open since. Unless it
    /// begins like qcow2, it is raw, whatever a guest has written to it.
    pub settled_raw: bool,
    /// Whether the first file will be written to.
    pub writable: bool,
    /// Purpose of the writes to it.
    pub purpose: Purpose,
    /// Whether the first file's backing file will be written to.
    pub backing_writable: bool,
    /// Whether a first file that is marked dirty or corrupt is accepted, for an inspection.
    pub damaged: bool,
    /// Whether a block device is opened for writing although it is in use elsewhere, as by a
    /// mounted file system.
    pub allow_mounted: bool,
    /// Whether the files are locked.
    pub locking: Locking,
    /// Directories that backing files may be in, beside the first file's own; not those below them.
    pub backing_dirs: Vec<PathBuf>,
    /// The storages that a header may name as the image below it, beside files.
    pub backing_storages: NamedStorages,
    /// The data files that may be opened; no others are, wherever they are.
    pub data_files: Vec<PathBuf>,
    /// Whether the page cache is bypassed, for all files alike. Only for a device
    /// ([`crate::open()`]), as are `cache_holes` and `allocate_ahead`.
    pub direct: Direct,
    /// Whether mappings are cached; see [`nowait::OpenOptions::cache_holes`]. Never where others may write.
    pub cache_holes: bool,
    /// See [`nowait::OpenOptions::allocate_ahead`].
    pub allocate_ahead: bool,
    /// Where the bitmaps of a raw disk are, if not beside it ([`crate::BitmapsPlace`]). Those that are beside it already
    /// stay there.
    pub bitmap_dir: Option<PathBuf>,
    /// The absolute path that a new raw file gets when it is complete, without symbolic links: its bitmaps are those of that.
    pub final_path: Option<PathBuf>,
    /// Whether no part of the first file's path may be a symbolic link, whatever is changed meanwhile.
    pub no_links: bool,
    /// The files of the image that are open elsewhere: their locks and claims are taken over instead
    /// of made.
    pub handed_over: HandedOver,
}

impl Default for ChainOptions {
    fn default() -> Self {
        Self {
            format: None,
            settled_raw: false,
            writable: false,
            purpose: Purpose::Write,
            backing_writable: false,
            damaged: false,
            allow_mounted: false,
            locking: Locking::Locked,
            backing_dirs: Vec::new(),
            backing_storages: NamedStorages::default(),
            data_files: Vec::new(),
            direct: Direct::Auto,
            cache_holes: true,
            allocate_ahead: true,
            bitmap_dir: None,
            final_path: None,
            no_links: false,
            handed_over: HandedOver::default(),
        }
    }
}

impl ChainOptions {
    /// Whether the file that has `above` files above it will be written to.
    const fn writes(&self, above: usize) -> bool {
        match above {
            0 => self.writable,
            1 => self.backing_writable,
            _ => false,
        }
    }

    /// The mode in which a file is opened that will be written to if `writable`.
    fn opening(&self, writable: bool) -> Opening {
        match (writable, self.allow_mounted || self.handed_over.is_some()) {
            (false, _) => Opening::ReadOnly,
            (true, false) => Opening::Exclusive,
            (true, true) => Opening::Shared,
        }
    }
}

/// An image and its backing images.
#[derive(Debug)]
pub struct Chain {
    /// Each followed by its backing image; never empty.
    layers: Vec<Layer>,
    warnings: Vec<Warning>,
    /// The descriptions with the locks, where they were handed over: else the layers' files have
    /// them.
    handed_over: Vec<OwnedFd>,
}

/// The next file of the chain, and its format if that is given.
struct PendingLayer {
    file: ImageFile,
    format: Option<Format>,
    /// The internal snapshot that is meant.
    snapshot: Option<OsString>,
}

impl Chain {
    /// Opens the image at `path` and all images below it. `path` may be that of a file, an `@`, and the name
    /// or ID of an internal snapshot, if there is no file of that name ([`crate::snapshot_in`]).
    ///
    /// # Errors
    /// One line that names the file and what is wrong with it. No file was changed.
    pub fn open(path: &Path, options: &ChainOptions) -> Result<Self, ImageError> {
        let (file, snapshot) = snapshot_in(path).unzip();
        let path = file.as_deref().unwrap_or(path);
        let opening = options.opening(options.writable);
        let file = match options.no_links {
            true => ImageFile::open_without_links(path, opening)?,
            false => ImageFile::open_as(path, path, opening)?,
        };
        let ChainOptions { backing_dirs, data_files, .. } = options;
        let policy = PathPolicy::new(path, !file.is_block_device(), backing_dirs, data_files)?;
        Self::from(PendingLayer { file, format: options.format, snapshot }, options, &policy)
    }

    /// Opens the image in `storage`, which is called `name`, and all images below it: files in the
    /// given directories only. The storage is not locked, and without a format it is raw.
    ///
    /// # Errors
    /// Like [`Chain::open`].
    pub fn open_storage(
        name: &Path,
        storage: Arc<dyn Storage>,
        options: &ChainOptions,
    ) -> Result<Self, ImageError> {
        let ChainOptions { backing_dirs, data_files, .. } = options;
        let policy = PathPolicy::new(name, false, backing_dirs, data_files)?;
        let file = ImageFile::on_storage(name.to_owned(), storage);
        let first = PendingLayer { file, format: options.format, snapshot: None };
        Self::from(first, options, &policy)
    }

    /// Opens the backing file `name` of an image that is to be made at `path`, with all images
    /// below it, read-only: under the same rules as a later open of that image.
    ///
    /// # Errors
    /// As for [`Chain::open`]; a refusal where the format would have to be guessed.
    pub(crate) fn open_backing(
        path: &Path,
        name: &OsStr,
        options: &ChainOptions,
    ) -> Result<Self, ImageError> {
        let policy = PathPolicy::new(path, true, &options.backing_dirs, &options.data_files)?;
        let storages = &options.backing_storages;
        let backing = OpenedBacking::open(path, name, Opening::ReadOnly, &policy, storages)?;
        let format = backing.format(path, options.format)?;
        let OpenedBacking { file, is_storage, snapshot, .. } = backing;
        if format.is_none() && (is_storage || signature_of(&file)?.is_some()) {
            let why = "the format of its backing file is not guessed, because a guest may have made a raw \
                       disk begin like an image (give --backing-format)";
            return Err(ImageError::refused(path, why));
        }
        let format = format.or(Some(Format::Raw));
        Self::from(PendingLayer { file, format, snapshot }, options, &policy)
    }

    fn from(
        first: PendingLayer,
        options: &ChainOptions,
        policy: &PathPolicy,
    ) -> Result<Self, ImageError> {
        let mut chain = Self { layers: Vec::new(), warnings: Vec::new(), handed_over: Vec::new() };
        let mut pending = Some(first);
        let mut seen = Vec::new();
        while let Some(PendingLayer { file, format, snapshot }) = pending.take() {
            let refused = |what: String| Err(ImageError::refused(file.path(), what));
            if chain.layers.len() == MAX_LAYERS {
                return refused(format!("more than {MAX_LAYERS} images stand on each other"));
            }
            if file.remote().is_none() {
                let identity = file.identity();
                let identity = identity.map_err(|e| ImageError::os(file.path(), "stat", &e))?;
                if seen.contains(&identity) {
                    return refused(
                        "it is its own backing file, directly or through others".into(),
                    );
                }
                seen.push(identity);
            }
            let snapshot = snapshot.as_deref();
            let layer = chain.open_layer(file, format, snapshot, options, policy)?;
            let opening = options.opening(options.writes(chain.layers.len() + 1));
            pending = backing_of(&layer, opening, policy, &options.backing_storages)?;
            chain.layers.push(layer);
        }
        chain.check_versions(options)?;
        Ok(chain)
    }

    /// Checks that each image stands on the version of a remote one that it was made on. The only change of a file, after
    /// all else is known to be right.
    fn check_versions(&mut self, options: &ChainOptions) -> Result<(), ImageError> {
        let mut warnings = Vec::new();
        for (above, pair) in self.layers.windows(2).enumerate() {
            if let [overlay, base] = pair {
                let version = base.file.remote().and_then(|storage| storage.version());
                let (overlay, base) = (&overlay.file, base.file.path());
                let checked = base_version::check(overlay, base, version, options.writes(above));
                warnings.extend(checked?);
            }
        }
        self.warnings.extend(warnings);
        Ok(())
    }

    /// The chain of the images in `files`, each followed by its backing image; the first one may be
    /// written to.
    ///
    /// # Errors
    /// The line for the first image that is refused.
    #[cfg(feature = "sim")]
    pub fn simulated(
        files: Vec<(ImageFile, Format)>,
        options: ChainOptions,
    ) -> Result<Self, ImageError> {
        let options = ChainOptions { locking: Locking::Unlocked, ..options };
        let mut chain = Self { layers: Vec::new(), warnings: Vec::new(), handed_over: Vec::new() };
        for (file, format) in files {
            let policy = PathPolicy::default();
            let layer = chain.open_layer(file, Some(format), None, &options, &policy)?;
            chain.layers.push(layer);
        }
        Ok(chain)
    }

    /// The images, each followed by its backing image; never empty.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The first image, which was given by its path.
    #[must_use]
    pub fn top(&self) -> &Layer {
        &self.layers[0]
    }

    /// Warnings that a user should know about its files.
    #[must_use]
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The descriptors that hold the locks, and of block devices the claims.
    pub(crate) fn held_files(&self) -> Vec<BorrowedFd<'_>> {
        let handed_over: Vec<_> =
            self.handed_over.iter().filter_map(|fd| FileId::of(fd.as_fd()).ok()).collect();
        let own = |file: &&Arc<ImageFile>| {
            file.identity().is_ok_and(|identity| !handed_over.contains(&identity))
        };
        let own = self.layers.iter().flat_map(Layer::files).filter(own);
        let own = own.filter_map(|file| file.fd().ok());
        self.handed_over.iter().map(AsFd::as_fd).chain(own).collect()
    }

    /// Lets the images below the first one be read by others, whose locks were handed over by a
    /// process or a chain that wrote to one of them.
    ///
    /// # Errors
    /// Like [`lock::lower`].
    pub(crate) fn lower_locks_below(&self) -> Result<(), LockError> {
        let written: Vec<_> = self.top().files().filter_map(|file| file.identity().ok()).collect();
        let is_below =
            |fd: &&OwnedFd| FileId::of(fd.as_fd()).is_ok_and(|id| !written.contains(&id));
        self.handed_over.iter().filter(is_below).try_for_each(|fd| lock::lower(fd.as_fd()))
    }

    fn open_layer(
        &mut self,
        file: ImageFile,
        format: Option<Format>,
        snapshot: Option<&OsStr>,
        options: &ChainOptions,
        policy: &PathPolicy,
    ) -> Result<Layer, ImageError> {
        let top = self.layers.is_empty();
        let writable = options.writes(self.layers.len());
        self.lock(&file, writable, options)?;
        let settled = (top && options.settled_raw && format.is_none()).then_some(());
        let begins = || signature_of(&file);
        let is_image =
            |found| matches!(found, Some(Signature::Supported(it)) if is_guessed(it, &file));
        let format = match (format, settled) {
            (Some(format), _) => format,
            (None, Some(())) if !is_image(begins()?) => Format::Raw,
            (None, _) => Format::probe(&file)?,
        };
        if writable && !format.driver().writable {
            return Err(ImageError::refused(file.path(), options.purpose.refusal(format)));
        }
        if let Some(snapshot) = snapshot {
            format.check_snapshot(&file, snapshot)?;
            if writable {
                return Err(options.purpose.refuse_snapshot(&file, snapshot));
            }
        }
        let file = Arc::new(file);
        let damaged = top && options.damaged;
        let mut named = NamedFiles { chain: self, writable, options, policy };
        let mut terms = OpenTerms { writable, damaged, snapshot, files: &mut named };
        let opened = (format.driver().open)(&file, &mut terms)?;
        if opened.marked_corrupt {
            self.warnings.push(Warning::MarkedCorrupt(file.path().to_owned()));
        }
        let Opened { content, size, data, .. } = opened;
        Ok(Layer { file, size, format, data, content })
    }

    fn lock(
        &mut self,
        file: &ImageFile,
        writable: bool,
        options: &ChainOptions,
    ) -> Result<(), ImageError> {
        if options.locking == Locking::Unlocked || file.remote().is_some() {
            return Ok(());
        }
        let first = self.handed_over.len();
        if options.handed_over.is_some() {
            match options.handed_over.take(file) {
                Some(taken) => self.handed_over.extend(taken),
                None if options.handed_over.allows_others() => {}
                None => {
                    return Err(ImageError::refused(
                        file.path(),
                        "another file has taken its place",
                    ));
                }
            }
        }
        let access = if writable { Access::Write } else { Access::Read };
        let own = file.fd().map_err(|e| ImageError::os(file.path(), "lock it", &e))?;
        let fd = self.handed_over.get(first).map_or(own, AsFd::as_fd);
        match lock::lock(fd, access) {
            Ok(()) => Ok(()),
            Err(LockError::Unsupported) => {
                self.warnings.push(Warning::NotLocked(file.path().to_owned()));
                Ok(())
            }
            Err(error) => Err(ImageError::refused(file.path(), lock_holder::told(fd, error))),
        }
    }
}

/// The files that the header of an image names beside the one below, opened under the rules of a chain.
struct NamedFiles<'a> {
    chain: &'a mut Chain,
    writable: bool,
    options: &'a ChainOptions,
    policy: &'a PathPolicy,
}

impl OtherFiles for NamedFiles<'_> {
    fn extent_file(
        &mut self,
        image: &ImageFile,
        name: &OsStr,
    ) -> Result<Arc<ImageFile>, ImageError> {
        let file = self.policy.extent_file(image.path(), name)?;
        self.chain.lock(&file, false, self.options)?;
        Ok(Arc::new(file))
    }

    fn data_file(&mut self, image: &ImageFile, name: &OsStr) -> Result<Arc<ImageFile>, ImageError> {
        let Self { writable, options, .. } = *self;
        let data = self.policy.data_file(image.path(), name, options.opening(writable))?;
        self.chain.lock(&data, writable, options)?;
        // A data file begins with a guest's bytes.
        if writable && !data.is_block_device() && data.fd().and_then(signature::mark_raw).is_err() {
            self.chain.warnings.push(Warning::NotMarked(data.path().to_owned()));
        }
        Ok(Arc::new(data))
    }
}

/// The image below `layer`, opened, and its format.
fn backing_of(
    layer: &Layer,
    opening: Opening,
    policy: &PathPolicy,
    storages: &NamedStorages,
) -> Result<Option<PendingLayer>, ImageError> {
    let Some(backing) = layer.content.backing() else {
        return Ok(None);
    };
    let image = layer.file.path();
    let opened = OpenedBacking::open(image, &backing.name, opening, policy, storages)?;
    let recorded = match backing.format.as_deref() {
        None => None,
        Some(name) => match by_recorded_name(name) {
            Some(format) => Some(format),
            None => {
                let names = names(false);
                let why =
                    format!("its backing file's format '{name}' is not supported ({names} are)");
                return Err(ImageError::refused(image, why));
            }
        },
    };
    let format = opened.format(image, recorded)?;
    let OpenedBacking { file, is_storage, snapshot, .. } = opened;
    // A guest with a raw disk can make it begin like qcow2 and name any file of the host as the
    // backing file. A file without a known signature can only be raw.
    if format.is_none() && (is_storage || signature_of(&file)?.is_some()) {
        return Err(ImageError::refused(
            image,
            "the format of its backing file is not recorded, and not guessed \
             (record it with qemu-img rebase -u -b BACKING -F FORMAT)",
        ));
    }
    Ok(Some(PendingLayer { file, format: format.or(Some(Format::Raw)), snapshot }))
}
