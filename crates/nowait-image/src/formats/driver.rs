//! The row of a format in the table: what it is called, and what can be done with its images.
//!
//! Invariant: what a format cannot do is `None`, and is refused in one line by the code that works on
//! all formats. A row is given files that are open and locked already, and layers that are checked.

use std::ffi::OsStr;
use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::sync::Arc;

use nowait::ByteRange;
use serde_json::{Map, Value};

use crate::error::ImageError;
use crate::formats::chain_reader::ChainReader;
use crate::formats::decompress::Compression;
use crate::formats::format::Format;
use crate::formats::layer::{BackingName, Content, Layer};
use crate::image_file::ImageFile;

pub(crate) type Resize = fn(&[Layer], u64) -> Result<(), ImageError>;
pub(crate) type Commit = fn(&[Layer], &mut CommitTerms<'_>) -> Result<Committed, ImageError>;
pub(crate) type Written = Result<io::Result<()>, String>;
pub(crate) type WriteEmpty = fn(&ImageFile, u64, Option<BackingName>, CreateTerms) -> Written;
pub(crate) type Describe =
    fn(&ImageFile, &Path, Option<&OsStr>) -> Result<Option<ImageInfo>, ImageError>;
pub(crate) type NewBuilder =
    fn(u64, Option<u64>, Option<Compression>) -> Result<Box<dyn ImageBuilder>, String>;

/// The row of a format.
pub struct Driver {
    pub(crate) format: Format,
    /// The format's name on the command line and in headers.
    pub name: &'static str,
    /// Other names in headers.
    pub(crate) aliases: &'static [&'static str],
    /// The endings of file names, without the dot, by which a new image gets this format.
    pub endings: &'static [&'static str],
    /// The ending that the name of a file must have, without the dot, to be guessed to be an image of this
    /// format by its first bytes. `None`: the first bytes are enough.
    pub(crate) guessed_ending: Option<&'static str>,
    /// Bytes in which the size of a disk is counted.
    pub(crate) size_unit: u64,
    /// Whether images are written to.
    pub(crate) writable: bool,
    /// Whether images may have internal snapshots that can be opened.
    pub(crate) has_snapshots: bool,
    /// The bytes that an image begins with: one of these.
    pub(crate) magics: &'static [&'static [u8]],
    /// Reads and checks the header, and opens the files that it names.
    pub(crate) open: fn(&Arc<ImageFile>, &mut OpenTerms<'_>) -> Result<Opened, ImageError>,
    pub(crate) create: Option<Creation>,
    pub(crate) check: Option<Checking>,
    /// Prepares lookups of where the disk's bytes are.
    pub(crate) map: for<'a> fn(&'a Layer) -> Result<Box<dyn LayerMap + 'a>, ImageError>,
    /// Makes the disk of the first layer `size` bytes large, which is in range and another size.
    pub(crate) resize: Option<Resize>,
    /// Commits the first layer to the second one.
    pub(crate) commit: Option<Commit>,
    /// Describes the image in a file at a path, or its disk as of a snapshot; `None` if it has no header.
    pub(crate) info: Describe,
}

impl Driver {
    /// Whether an image that begins with `first` may be one of this format.
    pub(crate) fn begins(&self, first: &[u8]) -> bool {
        self.magics.iter().any(|magic| first.starts_with(magic))
    }

    /// Whether a file called `path` that begins like this format is guessed to be an image of it.
    pub(crate) fn is_guessed_by_name(&self, path: &Path) -> bool {
        self.guessed_ending.is_none_or(|ending| {
            path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending))
        })
    }
}

/// The terms on which an image is opened.
pub(crate) struct OpenTerms<'a> {
    pub(crate) writable: bool,
    /// Whether an image that is marked dirty or corrupt is accepted.
    pub(crate) damaged: bool,
    /// The internal snapshot whose disk is opened, by its name or ID; only of a format that has such.
    pub(crate) snapshot: Option<&'a OsStr>,
    pub(crate) files: &'a mut dyn OtherFiles,
}

/// Opens the other files that a header names, under the rules for files that a stranger may have named.
pub(crate) trait OtherFiles {
    /// A file with a part of the disk of `image`, which is only read: one in the directory of `image`.
    ///
    /// # Errors
    /// The reason why the image is refused; the errno of a failed system call.
    fn extent_file(
        &mut self,
        image: &ImageFile,
        name: &OsStr,
    ) -> Result<Arc<ImageFile>, ImageError>;

    /// The file with the data of `image`, which may be written to: one that the user has given.
    ///
    /// # Errors
    /// The reason why the image is refused; the errno of a failed system call.
    fn data_file(&mut self, image: &ImageFile, name: &OsStr) -> Result<Arc<ImageFile>, ImageError>;
}

/// An opened image, without its file.
pub(crate) struct Opened {
    pub(crate) content: Box<dyn Content>,
    /// Size of the disk in bytes.
    pub(crate) size: u64,
    /// Like [`Layer::data`].
    pub(crate) data: Vec<Arc<ImageFile>>,
    /// Whether the header says that it is corrupt.
    pub(crate) marked_corrupt: bool,
}

/// The parts of an image that are allocated when it is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preallocation {
    /// Only what is written takes space.
    Off,
    /// All tables, and a position for each cluster, without space for the data. For qcow2 only.
    Metadata,
    /// The space for the data, too.
    Falloc,
}

/// The optional features of a new qcow2 image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// How its clusters are compressed, where they are compressed; `None` is deflate, which programs of
    /// any age read.
    pub compression: Option<Compression>,
    /// Whether its L2 entries are extended: each cluster has 32 subclusters, which are allocated on their own.
    pub extended_l2: bool,
}

/// The requested properties of a new image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CreateTerms {
    pub(crate) has_backing: bool,
    pub(crate) cluster_bytes: Option<u64>,
    pub(crate) preallocation: Preallocation,
    pub(crate) features: Features,
}

/// How new images are made.
pub(crate) struct Creation {
    /// Checks that the terms go together.
    pub(crate) check: fn(CreateTerms) -> Result<(), String>,
    /// Writes an empty image of a disk of some bytes to a file. The outer error is a refusal, the inner
    /// one that of a system call.
    pub(crate) write: WriteEmpty,
    /// A builder for a disk of some bytes, in clusters of some bytes that may be compressed; `None` where the data is written to
    /// the file as it is.
    pub(crate) builder: Option<NewBuilder>,
}

/// A new image whose data the caller writes: it assigns positions in the file, and finally writes the
/// tables.
pub trait ImageBuilder: Debug + Send {
    /// Size of the disk in bytes.
    fn size(&self) -> u64;

    /// The end of the clusters that are allocated so far, in bytes of the file.
    fn data_end(&self) -> u64;

    /// The end of the data in the file, in bytes, if all of the disk is written.
    fn max_data_end(&self) -> u64;

    /// The ranges of the file for the bytes of `range`, which is inside the disk, in the order of
    /// the disk. Bytes of a cluster that were not written before are zeros.
    fn allocate(&mut self, range: ByteRange) -> Vec<ByteRange>;

    /// Bytes of a cluster.
    fn cluster_bytes(&self) -> u64;

    /// How clusters are compressed.
    fn compression(&self) -> Compression;

    /// The position in the file for `len` bytes of compressed data, less than a cluster: those of the cluster that
    /// begins at `pos` on the disk, which has no position yet.
    ///
    /// # Errors
    /// [`io::ErrorKind::FileTooLarge`] if the image is larger than its tables can express.
    fn allocate_packed(&mut self, pos: u64, len: u64) -> io::Result<u64>;

    /// Writes the tables to `file`, in which all data has been written, and sets its length. The
    /// caller has to sync the file.
    ///
    /// # Errors
    /// [`io::ErrorKind::FileTooLarge`] if the image is larger than its tables can express; the errno of
    /// a failed write.
    fn finish(&mut self, file: &ImageFile) -> io::Result<()>;
}

/// Callback for progress: bytes or entries done, and the total.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// How metadata is checked and repaired.
pub(crate) struct Checking {
    pub(crate) check: fn(&Layer, Progress<'_>) -> Result<Report, ImageError>,
    pub(crate) repair: fn(&Layer, Progress<'_>) -> Result<Repaired, ImageError>,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Wrong refcounts, flags and pointers.
    pub corruptions: u64,
    /// Clusters with a refcount that is too high.
    pub leaks: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Clusters that are allocated in this image.
    pub allocated_clusters: u64,
    /// Clusters that are compressed.
    pub compressed_clusters: u64,
    /// Clusters that do not follow the previous one in the file.
    pub fragmented_clusters: u64,
    /// The end of the last cluster in use, in bytes of the file.
    pub image_end: u64,
}

/// The result of a repair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repaired {
    /// The state after the repair.
    pub report: Report,
    /// Corruptions that were repaired.
    pub corruptions_fixed: u64,
    /// Leaks that were repaired.
    pub leaks_fixed: u64,
}

/// The mapping of a run of the disk in one image.
#[derive(Clone, Copy)]
pub(crate) struct Status {
    /// Bytes of the run.
    pub(crate) len: u64,
    pub(crate) data: bool,
    pub(crate) zero: bool,
    /// Position in the file with the data, if the bytes are there as they are.
    pub(crate) offset: Option<u64>,
    /// Index of that file in [`Layer::data`].
    pub(crate) file: usize,
}

/// One image, prepared for lookups from the beginning of its disk to the end.
pub(crate) trait LayerMap {
    /// Size of the disk as QEMU counts it.
    fn size(&self) -> u64;

    /// The mapping at `pos`, which is inside the disk, for at most `len` bytes.
    ///
    /// # Errors
    /// Damage in the metadata; the errno of a failed read.
    fn status(&mut self, pos: u64, len: u64) -> Result<Status, ImageError>;
}

/// The state of the overlay after its data is in the backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlay {
    /// It is empty, and takes next to no space.
    Emptied,
    /// It is unchanged.
    Kept,
}

/// The result of a commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Bytes of data that the overlay had.
    pub data_bytes: u64,
    /// Bytes that the overlay had as zeros.
    pub zero_bytes: u64,
    /// The size of the backing file's disk before.
    pub old_size: u64,
    /// The size of that disk now: at least that of the overlay.
    pub size: u64,
}

/// The terms of a commit.
pub(crate) struct CommitTerms<'a> {
    pub(crate) overlay: Overlay,
    /// Looks at the disk before the backing file is changed, and may refuse.
    pub(crate) before: &'a mut dyn FnMut(&ChainReader) -> Result<(), ImageError>,
    pub(crate) progress: Progress<'a>,
}

/// A fact about an image, for a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// A number of bytes.
    Bytes(u64),
    /// Words, without control characters.
    Words(String),
}

/// A description of an image by its header.
#[derive(Clone, Debug)]
pub struct ImageInfo {
    /// The format.
    pub format: Format,
    /// The format with its version or variant, in words.
    pub title: String,
    /// Size of the disk in bytes.
    pub size: u64,
    /// The keys that `qemu-img info --output=json` has for such an image.
    pub json: Map<String, Value>,
    /// Lines of text, a name and a fact each, in the words of `qemu-img info`.
    pub lines: Vec<(&'static str, Fact)>,
    /// Why the image cannot be served writable, if so.
    pub note: Option<String>,
}
