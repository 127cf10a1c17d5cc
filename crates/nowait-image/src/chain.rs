//! An image and all the files below it, opened and found to be usable.
//!
//! Invariant: when a chain is open, every header in it was read and is supported, no file occurs
//! twice, what nobody asked to write to is open for reading only, and nothing was changed. A format is
//! never guessed but for the first file, and there only by qcow2's own first bytes.
//! Knows: error, host, header, lock, places. Known by: everything that works on an image.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::ImageError;
use crate::header::{self, Header};
use crate::host::HostFile;
use crate::lock::{self, Access, LockError};
use crate::places::{Place, Places};

/// Files one on top of the other at most. QEMU has no bound; each takes a descriptor here.
pub const MAX_LAYERS: usize = 64;

/// What is inside an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The disk's bytes and nothing else.
    Raw,
    /// QEMU's own format, versions 2 and 3.
    Qcow2,
}

impl Format {
    /// Its name on the command line and in headers.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }

    /// The format of `file` by its first bytes: qcow2 if they are qcow2's, else raw.
    ///
    /// A guess is safe only for a file whose first bytes nobody else chose: who may write to a raw
    /// disk can make it begin like qcow2. So a file that was ever served raw is to be opened with
    /// its format given.
    ///
    /// # Errors
    /// What pread(2) says.
    pub fn probe(file: &HostFile) -> Result<Self, ImageError> {
        let mut first = [0; header::MAGIC.len()];
        file.read_at(0, &mut first).map_err(|e| ImageError::os(file.path(), "read", &e))?;
        Ok(if first == header::MAGIC { Self::Qcow2 } else { Self::Raw })
    }
}

/// Whether the files of a chain are locked when they are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locking {
    /// As QEMU does it, in [`crate::lock`]; a file system without locks is accepted.
    Locked,
    /// Not at all: for looking at what may be in use.
    Unlocked,
}

/// How to open a chain.
#[derive(Clone, Debug)]
pub struct ChainOptions {
    /// The format of the first file; `None` guesses with [`Format::probe`].
    pub format: Option<Format>,
    /// Whether the first file will be written to.
    pub writable: bool,
    /// Whether the first one's backing file will be written to.
    pub backing_writable: bool,
    /// Whether a first file is accepted that is marked dirty or corrupt, to look at it.
    pub damaged: bool,
    /// Whether the files are locked.
    pub locking: Locking,
    /// Directories that files named in headers may be below, beside the first file's own.
    pub backing_dirs: Vec<PathBuf>,
}

impl Default for ChainOptions {
    fn default() -> Self {
        Self {
            format: None,
            writable: false,
            backing_writable: false,
            damaged: false,
            locking: Locking::Locked,
            backing_dirs: Vec::new(),
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
}

/// What a layer of a chain holds.
#[derive(Debug)]
pub enum Content {
    /// The disk's bytes.
    Raw,
    /// A header, and the file that has the data where that is another one.
    Qcow2 {
        /// What the header says.
        header: Box<Header>,
        /// The external data file.
        data: Option<Arc<HostFile>>,
    },
}

/// One image of a chain.
#[derive(Debug)]
pub struct Layer {
    /// The image's file.
    pub file: Arc<HostFile>,
    /// What is in it.
    pub content: Content,
    /// Size of the disk in bytes.
    pub size: u64,
    guessed: bool,
}

impl Layer {
    /// The format of the image.
    #[must_use]
    pub const fn format(&self) -> Format {
        match self.content {
            Content::Raw => Format::Raw,
            Content::Qcow2 { .. } => Format::Qcow2,
        }
    }

    /// The header, of a qcow2 image.
    #[must_use]
    pub fn header(&self) -> Option<&Header> {
        match &self.content {
            Content::Raw => None,
            Content::Qcow2 { header, .. } => Some(header),
        }
    }

    /// Whether the format was not given but guessed from the first bytes.
    #[must_use]
    pub const fn is_guessed(&self) -> bool {
        self.guessed
    }

    /// The file that the data is in.
    #[must_use]
    pub const fn data_file(&self) -> &Arc<HostFile> {
        match &self.content {
            Content::Qcow2 { data: Some(data), .. } => data,
            _ => &self.file,
        }
    }
}

/// An image and what it stands on.
#[derive(Debug)]
pub struct Chain {
    /// Each followed by its backing image; never empty.
    layers: Vec<Layer>,
    unlocked: Vec<PathBuf>,
}

/// What to open next, and as what.
struct Next {
    place: Place,
    format: Option<Format>,
}

impl Chain {
    /// Opens the image at `path` and all below it.
    ///
    /// # Errors
    /// One line: what is wrong with which of the files. Nothing was changed then.
    pub fn open(path: &Path, options: &ChainOptions) -> Result<Self, ImageError> {
        let places = Places::new(path, &options.backing_dirs)?;
        let mut chain = Self { layers: Vec::new(), unlocked: Vec::new() };
        let place = Place { named: path.to_owned(), real: path.to_owned() };
        let mut next = Some(Next { place, format: options.format });
        let mut seen = Vec::new();
        while let Some(Next { place, format }) = next.take() {
            let refused = |what: String| Err(ImageError::refused(&place.named, what));
            if chain.layers.len() == MAX_LAYERS {
                return refused(format!("more than {MAX_LAYERS} images stand on each other"));
            }
            let writable = options.writes(chain.layers.len());
            let file = HostFile::open_as(&place.real, &place.named, writable)?;
            let identity = file.identity().map_err(|e| ImageError::os(file.path(), "stat", &e))?;
            if seen.contains(&identity) {
                return refused("it is its own backing file, directly or through others".into());
            }
            seen.push(identity);
            let layer = chain.open_layer(file, format, options, &places)?;
            next = backing_of(&layer, &places)?;
            chain.layers.push(layer);
        }
        Ok(chain)
    }

    /// The images in `files`, each followed by its backing image; the first one may be written to.
    ///
    /// # Errors
    /// What is wrong with one of them.
    #[cfg(feature = "sim")]
    pub fn simulated(files: Vec<(HostFile, Format)>) -> Result<Self, ImageError> {
        let options =
            ChainOptions { writable: true, locking: Locking::Unlocked, ..ChainOptions::default() };
        let mut chain = Self { layers: Vec::new(), unlocked: Vec::new() };
        for (file, format) in files {
            let layer = chain.open_layer(file, Some(format), &options, &Places::default())?;
            chain.layers.push(layer);
        }
        Ok(chain)
    }

    /// The images, each followed by its backing image; never empty.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The image that was asked for.
    #[must_use]
    pub fn top(&self) -> &Layer {
        &self.layers[0]
    }

    /// The files that are on a file system without locks, so that nobody is kept away from them.
    #[must_use]
    pub fn unlocked(&self) -> &[PathBuf] {
        &self.unlocked
    }

    fn open_layer(
        &mut self,
        file: HostFile,
        format: Option<Format>,
        options: &ChainOptions,
        places: &Places,
    ) -> Result<Layer, ImageError> {
        let top = self.layers.is_empty();
        let writable = options.writes(self.layers.len());
        self.lock(&file, writable, options.locking)?;
        let guessed = format.is_none();
        let format = format.map_or_else(|| Format::probe(&file), Ok)?;
        let (content, size) = match format {
            Format::Raw => {
                let size =
                    file.size().map_err(|e| ImageError::os(file.path(), "find its size", &e))?;
                (Content::Raw, size)
            }
            Format::Qcow2 => {
                let header = Header::read(&file)?;
                let marked = header.is_dirty() || header.is_corrupt();
                let supported = match top && options.damaged && marked {
                    true => header.understood(),
                    false => header.supported(writable),
                };
                supported.map_err(|why| ImageError::refused(file.path(), why))?;
                let data = self.open_data_file(&file, &header, writable, options, places)?;
                let size = header.size;
                (Content::Qcow2 { header: Box::new(header), data }, size)
            }
        };
        Ok(Layer { file: Arc::new(file), content, size, guessed })
    }

    fn open_data_file(
        &mut self,
        image: &HostFile,
        header: &Header,
        writable: bool,
        options: &ChainOptions,
        places: &Places,
    ) -> Result<Option<Arc<HostFile>>, ImageError> {
        if !header.has_data_file() {
            return Ok(None);
        }
        let Some(name) = &header.data_file else {
            return Err(ImageError::refused(
                image.path(),
                "its data is in another file, whose name is not recorded",
            ));
        };
        let place = places.resolve(image.path(), name, "data file")?;
        let data = HostFile::open_as(&place.real, &place.named, writable)?;
        self.lock(&data, writable, options.locking)?;
        Ok(Some(Arc::new(data)))
    }

    fn lock(
        &mut self,
        file: &HostFile,
        writable: bool,
        locking: Locking,
    ) -> Result<(), ImageError> {
        if locking == Locking::Unlocked {
            return Ok(());
        }
        let access = if writable { Access::Write } else { Access::Read };
        match lock::lock(file.fd(), access) {
            Ok(()) => Ok(()),
            Err(LockError::Unsupported) => {
                self.unlocked.push(file.path().to_owned());
                Ok(())
            }
            Err(error) => Err(ImageError::refused(file.path(), error.to_string())),
        }
    }
}

/// The place and the format of the image below `layer`.
fn backing_of(layer: &Layer, places: &Places) -> Result<Option<Next>, ImageError> {
    let Some(backing) = layer.header().and_then(|header| header.backing.as_ref()) else {
        return Ok(None);
    };
    let image = layer.file.path();
    let place = places.resolve(image, &backing.name, "backing file")?;
    let format = match backing.format.as_deref() {
        Some("raw" | "file" | "host_device") => Format::Raw,
        Some("qcow2") => Format::Qcow2,
        Some(other) => {
            let other: String = other.chars().filter(|c| !c.is_control()).collect();
            return Err(ImageError::refused(
                image,
                format!("its backing file's format '{other}' is not supported (raw and qcow2 are)"),
            ));
        }
        // Whoever could write to a raw disk could make it begin like qcow2, and name any file of
        // the host as its backing file. What does not begin so can only be raw.
        None if Format::probe(&HostFile::open(&place.real, false)?)? == Format::Qcow2 => {
            return Err(ImageError::refused(
                image,
                "the format of its backing file is not recorded, and not guessed \
                 (record it with qemu-img rebase -u -b BACKING -F FORMAT)",
            ));
        }
        None => Format::Raw,
    };
    Ok(Some(Next { place, format: Some(format) }))
}
