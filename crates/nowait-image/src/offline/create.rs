//! Creates images, empty, with optional preallocation.
//!
//! Invariant: an image appears under its name complete and durable, or not at all; no existing file
//! is replaced.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::atomic_file::{AtomicFile, OverwritePolicy};
use crate::base_version;
use crate::chain::{Chain, ChainOptions, Locking};
use crate::error::{ImageError, create_message};
use crate::formats::driver::{CreateTerms, Creation};
use crate::formats::format::Format;
use crate::formats::layer::BackingName;
use crate::formats::qcow2::header::MAX_NAME_BYTES;
use crate::named_storages::NamedStorages;

pub use crate::formats::driver::{Features, Preallocation};
pub use crate::formats::qcow2::layout::{CLUSTER_BYTES, DEFAULT_CLUSTER_BYTES};

/// The parameters of a new image.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Size of the disk in bytes; `None` takes the backing file's.
    pub size: Option<u64>,
    /// The image's format.
    pub format: Format,
    /// The backing file as the header is to name it: a relative name is relative to the image's
    /// directory.
    pub backing: Option<PathBuf>,
    /// The format of the backing file; `None` means raw, and refuses a file that begins like qcow2.
    pub backing_format: Option<Format>,
    /// Directories that backing files may be in, in addition to the image's own; not those below them.
    pub backing_dirs: Vec<PathBuf>,
    /// The storages that a backing file may be in instead, by their names.
    pub backing_storages: NamedStorages,
    /// The data files of backing files that may be opened.
    pub data_files: Vec<PathBuf>,
    /// Whether the backing files are locked meanwhile; not where this process has locked them.
    pub backing_locking: Locking,
    /// Bytes of a cluster, a power of two in [`CLUSTER_BYTES`]; `None` is
    /// [`DEFAULT_CLUSTER_BYTES`].
    pub cluster_bytes: Option<u64>,
    /// The preallocation.
    pub preallocation: Preallocation,
    /// The optional features, of a qcow2 image.
    pub features: Features,
}

impl CreateOptions {
    /// An image of `format` and `size` bytes, without a backing file, with clusters of
    /// [`DEFAULT_CLUSTER_BYTES`] and no preallocation.
    #[must_use]
    pub fn new(format: Format, size: Option<u64>) -> Self {
        Self {
            size,
            format,
            backing: None,
            backing_format: None,
            backing_dirs: Vec::new(),
            backing_storages: NamedStorages::default(),
            data_files: Vec::new(),
            backing_locking: Locking::Locked,
            cluster_bytes: None,
            preallocation: Preallocation::Off,
            features: Features::default(),
        }
    }

    fn terms(&self) -> CreateTerms {
        CreateTerms {
            has_backing: self.backing.is_some(),
            cluster_bytes: self.cluster_bytes,
            preallocation: self.preallocation,
            features: self.features,
        }
    }
}

/// Makes the image `path`. Returns the size of its disk in bytes.
///
/// # Errors
/// One line: an impossible combination, a file that exists already, a problem with the backing
/// file, or the failed system call. There is no new file then.
pub fn create(path: &Path, options: &CreateOptions) -> Result<u64, ImageError> {
    let (file, size) = create_unnamed(path, options)?;
    file.finish().map_err(|why| ImageError::refused(path, why))?;
    Ok(size)
}

/// Makes an image that is to get the name `path` once it is complete. Returns it, and the size of its disk in bytes.
///
/// # Errors
/// Like [`create`].
pub fn create_unnamed(
    path: &Path,
    options: &CreateOptions,
) -> Result<(AtomicFile, u64), ImageError> {
    let refused = |why: String| ImageError::refused(path, why);
    let driver = options.format.driver();
    let Some(creation) = &driver.create else {
        return Err(refused(options.format.cannot_be("made")));
    };
    let terms = options.terms();
    (creation.check)(terms).map_err(refused)?;
    let file = new_file(path)?;
    let size = write_into(&file, path, creation, terms, options)?;
    Ok((file, size))
}

/// Like [`create_unnamed`], a qcow2 image that stands on the backing file of `options`, with all of its size.
///
/// # Errors
/// Like [`create`]; a refusal without a backing file.
pub fn create_overlay(
    path: &Path,
    options: &CreateOptions,
) -> Result<(AtomicFile, u64), ImageError> {
    match options.backing {
        Some(_) => create_unnamed(path, options),
        None => Err(ImageError::refused(path, "an overlay needs a backing file")),
    }
}

/// An empty file that is to be `path`, which must not exist.
fn new_file(path: &Path) -> Result<AtomicFile, ImageError> {
    let refused = |why: String| ImageError::refused(path, why);
    if fs::symlink_metadata(path).is_ok() {
        return Err(refused("there is such a file already (remove it first, with rm)".into()));
    }
    AtomicFile::create(path, 0, OverwritePolicy::Nothing).map_err(refused)
}

fn write_into(
    file: &AtomicFile,
    path: &Path,
    creation: &Creation,
    terms: CreateTerms,
    options: &CreateOptions,
) -> Result<u64, ImageError> {
    let refused = |why: String| ImageError::refused(path, why);
    let backing = match &options.backing {
        Some(name) => Some(check_backing(path, name, options)?),
        None => None,
    };
    let Some(size) = options.size.or(backing.as_ref().map(|&(_, size)| size)) else {
        return Err(refused("a disk without a backing file needs a size".into()));
    };
    let size = size.next_multiple_of(options.format.driver().size_unit);
    let backing = backing.map(|(backing, _)| backing);
    let written = (creation.write)(file.file(), size, backing, terms).map_err(refused)?;
    written.map_err(|error| explain(path, &error))?;
    if let Some(base) = &options.backing {
        let version = options.backing_storages.get(base).and_then(|storage| storage.version());
        // Where it cannot be kept, it is told when the image is opened.
        let _ = base_version::check(file.file(), base, version, true)?;
    }
    Ok(size)
}

/// The backing file's entry for the header, and the size of its disk. It is opened with all images
/// below it, under the rules of a later open, so that the new image can be opened.
fn check_backing(
    path: &Path,
    name: &Path,
    options: &CreateOptions,
) -> Result<(BackingName, u64), ImageError> {
    if name.as_os_str().len() > MAX_NAME_BYTES as usize {
        let why = format!("the name of its backing file is longer than {MAX_NAME_BYTES} bytes");
        return Err(ImageError::refused(path, why));
    }
    let chain = ChainOptions {
        format: options.backing_format,
        backing_dirs: options.backing_dirs.clone(),
        backing_storages: options.backing_storages.clone(),
        data_files: options.data_files.clone(),
        locking: options.backing_locking,
        ..ChainOptions::default()
    };
    let chain = Chain::open_backing(path, name.as_os_str(), &chain)?;
    let format = Some(chain.top().format().name().to_owned());
    Ok((BackingName { name: name.as_os_str().to_owned(), format }, chain.top().size))
}

fn explain(path: &Path, error: &io::Error) -> ImageError {
    let what = match error.kind() {
        ErrorKind::AlreadyExists => "there is such a file already (remove it first, with rm)",
        ErrorKind::NotFound => &create_message("create", error),
        // The length is more than an `off_t` can tell.
        ErrorKind::InvalidInput => return ImageError::os(path, "create", &Errno::FBIG.into()),
        ErrorKind::Unsupported => {
            "the file system cannot reserve space (leave out --preallocation)"
        }
        _ => return ImageError::os(path, "create", error),
    };
    ImageError::refused(path, what)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::error::os_message;

    fn raw(size: u64) -> CreateOptions {
        CreateOptions::new(Format::Raw, Some(size))
    }

    #[test]
    fn a_new_raw_image_has_exactly_the_requested_size_and_takes_no_space() {
        let directory = tempfile::tempdir().unwrap();
        for bytes in [0, 1, 511, 4096, 1_000_000_007, 1 << 40] {
            let path = directory.path().join(bytes.to_string());
            assert_eq!(create(&path, &raw(bytes)).unwrap(), bytes);
            let found = fs::metadata(&path).unwrap();
            assert_eq!((found.len(), found.blocks()), (bytes, 0));
            assert_eq!(
                found.mode() & 0o133,
                0,
                "only the owner may write, and no user may execute"
            );
        }
    }

    #[test]
    fn a_file_that_exists_is_refused_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        fs::write(&path, "precious").unwrap();
        let error = create(&path, &raw(4096)).unwrap_err().to_string();
        assert!(error.contains("disk.img: there is such a file already (remove it"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_size_that_is_refused_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        let error = create(&path, &raw(u64::MAX)).unwrap_err().to_string();
        assert!(error.ends_with(&os_message(&Errno::FBIG.into())), "{error}");
        let qcow2 = CreateOptions { format: Format::Qcow2, ..raw(1 << 60) };
        let error = create(&path, &qcow2).unwrap_err().to_string();
        assert!(error.contains("larger clusters"), "{error}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn errors_of_the_file_system_are_reported_in_words() {
        for (errno, words) in [
            (Errno::NOSPC, "cannot create: No space left on device"),
            (Errno::DQUOT, "cannot create: Disk quota exceeded"),
            (Errno::FBIG, &format!("cannot create: {}", os_message(&Errno::FBIG.into()))),
            (Errno::NOENT, "directory does not exist"),
            (Errno::OPNOTSUPP, "cannot reserve space"),
            (Errno::ROFS, "cannot create: Read-only file system"),
        ] {
            let error = explain(Path::new("a.img"), &errno.into()).to_string();
            assert!(error.starts_with("a.img: ") && error.contains(words), "{error}");
            assert!(!error.contains("os error"), "{error}");
        }
    }
}
