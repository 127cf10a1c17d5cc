//! Creates raw and qcow2 images, empty, with optional preallocation.
//!
//! Invariant: an image appears under its name complete and durable, or not at all; no existing file
//! is replaced. Every cluster of a new qcow2 image has a refcount of 1, and its data clusters
//! follow each other.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::atomic_file::{AtomicFile, OverwritePolicy};
use crate::base_version;
use crate::chain::{Chain, ChainOptions, Locking};
use crate::error::{ImageError, create_message};
use crate::formats::format::Format;
use crate::formats::qcow2::encode::encode;
use crate::formats::qcow2::entries::with_copied;
use crate::formats::qcow2::header::{BackingName, Header, MAX_NAME_BYTES};
use crate::formats::qcow2::layout;
use crate::formats::qcow2::layout::{RefcountLayout, SECTOR_BYTES, write_numbers};
use crate::image_file::ImageFile;
use crate::named_storages::NamedStorages;

pub use crate::formats::qcow2::layout::{CLUSTER_BYTES, DEFAULT_CLUSTER_BYTES};

/// The parts of an image that are allocated when it is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preallocation {
    /// As little as possible.
    Off,
    /// All tables, and a position for each cluster, without space for the data. For qcow2 only.
    Metadata,
    /// The space for the data, too.
    Falloc,
}

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
    /// Directories that backing files may be in, beside the image's own; not those below them.
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
        }
    }
}

/// Makes the image `path`. Returns the size of its disk in bytes.
///
/// # Errors
/// One line: an impossible combination, a file that exists already, a problem with the backing
/// file, or the failed system call. There is no new file then.
pub fn create(path: &Path, options: &CreateOptions) -> Result<u64, ImageError> {
    let refused = |why: String| ImageError::refused(path, why);
    check_combination(options).map_err(refused)?;
    if fs::symlink_metadata(path).is_ok() {
        return Err(refused("there is such a file already (remove it first, with rm)".into()));
    }
    let file = AtomicFile::create(path, 0, OverwritePolicy::Nothing).map_err(refused)?;
    let backing = match &options.backing {
        Some(name) => Some(check_backing(path, name, options)?),
        None => None,
    };
    let Some(size) = options.size.or(backing.as_ref().map(|&(_, size)| size)) else {
        return Err(refused("a disk without a backing file needs a size".into()));
    };
    let size = match options.format {
        Format::Raw => size,
        Format::Qcow2 => size.next_multiple_of(SECTOR_BYTES),
    };
    let written = match options.format {
        Format::Raw if options.preallocation == Preallocation::Off || size == 0 => {
            file.file().set_len(size)
        }
        Format::Raw => file.file().reserve(size),
        Format::Qcow2 => {
            let bits = layout::cluster_bits(options.cluster_bytes).map_err(refused)?;
            let header = Header {
                backing: backing.map(|(backing, _)| backing),
                ..Header::empty(size, bits)
            };
            let layout = ImageLayout::new(header, options.preallocation).map_err(refused)?;
            layout.write(file.file(), options.preallocation)
        }
    };
    written.map_err(|error| explain(path, &error))?;
    if let Some(base) = &options.backing {
        let version = options.backing_storages.get(base).and_then(|storage| storage.version());
        // Where it cannot be kept, it is told when the image is opened.
        let _ = base_version::check(file.file(), base, version, true)?;
    }
    file.finish().map_err(refused)?;
    Ok(size)
}

/// Writes an empty image with `header` to `file`.
#[cfg(feature = "sim")]
pub(crate) fn write(file: &ImageFile, header: Header) -> Result<(), ImageError> {
    let layout = ImageLayout::new(header, Preallocation::Off);
    let layout = layout.map_err(|why| ImageError::refused(file.path(), why))?;
    layout.write(file, Preallocation::Off).map_err(|error| explain(file.path(), &error))
}

/// Checks that the options can be combined.
fn check_combination(options: &CreateOptions) -> Result<(), String> {
    layout::cluster_bits(options.cluster_bytes)?;
    let raw = options.format == Format::Raw;
    let reserved = options.preallocation != Preallocation::Off;
    let refused = if raw && options.backing.is_some() {
        "a raw image has no backing file (take --format qcow2)"
    } else if raw && options.cluster_bytes.is_some() {
        "a raw image has no clusters (leave out --cluster-size, or take --format qcow2)"
    } else if raw && options.preallocation == Preallocation::Metadata {
        "a raw image has no metadata to preallocate (take falloc, or --format qcow2)"
    } else if options.backing.is_some() && reserved {
        "what is preallocated would hide the backing file (leave out --preallocation)"
    } else {
        return Ok(());
    };
    Err(refused.into())
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

/// The layout of a new image, in this order: the header, the refcount table, its blocks, the L1
/// table, L2 tables, data.
struct ImageLayout {
    header: Header,
    /// Refcount blocks.
    blocks: u64,
    /// L2 tables and data clusters that are preallocated.
    l2_tables: u64,
    data: u64,
    /// All clusters of the image.
    clusters: u64,
}

impl ImageLayout {
    /// The layout of an image with `header`, which gets the positions of its tables.
    fn new(mut header: Header, preallocation: Preallocation) -> Result<Self, String> {
        let cluster = header.cluster_bytes();
        let l1_entries = header.size.div_ceil(header.l2_reach());
        let (l2_tables, data) = match preallocation {
            Preallocation::Off => (0, 0),
            _ => (l1_entries, header.size.div_ceil(cluster)),
        };
        layout::check_l1(&header)?;
        if encode(&header).len() as u64 > cluster {
            let what = "the name of its backing file does not fit into a cluster";
            return Err(format!("{what} (give a larger --cluster-size)"));
        }
        let rest = 1 + (l1_entries * 8).div_ceil(cluster) + l2_tables + data;
        let RefcountLayout { table, blocks, clusters } = RefcountLayout::of(&header, rest)?;
        header.refcount_table_pos = cluster;
        header.refcount_table_clusters = table as u32;
        header.l1_entries = l1_entries as u32;
        header.l1_pos = (1 + table + blocks) * cluster;
        Ok(Self { header, blocks, l2_tables, data, clusters })
    }

    fn write(&self, file: &ImageFile, preallocation: Preallocation) -> io::Result<()> {
        let header = &self.header;
        let cluster = header.cluster_bytes();
        let end = self.clusters * cluster;
        if preallocation == Preallocation::Falloc {
            file.reserve(end)?;
        } else {
            file.set_len(end)?;
        }
        file.write_at(0, &encode(header))?;
        let block_pos =
            header.refcount_table_pos + u64::from(header.refcount_table_clusters) * cluster;
        write_numbers(file, header.refcount_table_pos, self.blocks, |index| {
            (block_pos + index * cluster).to_be_bytes()
        })?;
        write_numbers(file, block_pos, self.clusters, |_| 1u16.to_be_bytes())?;
        let l2_pos = header.l1_pos + (u64::from(header.l1_entries) * 8).next_multiple_of(cluster);
        write_numbers(file, header.l1_pos, self.l2_tables, |index| {
            with_copied(l2_pos + index * cluster).to_be_bytes()
        })?;
        let data_pos = l2_pos + self.l2_tables * cluster;
        write_numbers(file, l2_pos, self.data, |index| {
            with_copied(data_pos + index * cluster).to_be_bytes()
        })
    }
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

    #[test]
    fn every_layout_counts_all_of_its_clusters_and_its_header_is_parsed_back() {
        for bits in 9..=21 {
            for size in [0, 512, 1 << 20, (64 << 20) + 512] {
                for preallocation in [Preallocation::Off, Preallocation::Metadata] {
                    let layout =
                        ImageLayout::new(Header::empty(size, bits), preallocation).unwrap();
                    let ImageLayout { header, blocks, l2_tables, data, clusters } = layout;
                    assert_eq!(Header::parse(&encode(&header)).unwrap(), header);
                    let l1 = (u64::from(header.l1_entries) * 8).div_ceil(1 << bits);
                    let table = u64::from(header.refcount_table_clusters);
                    assert_eq!(clusters, 1 + table + blocks + l1 + l2_tables + data);
                    assert!(blocks * header.block_entries() >= clusters);
                    assert!(header.refcount_table_entries() >= blocks);
                }
            }
        }
    }
}
