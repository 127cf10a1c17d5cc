//! One image of a chain: its files, and what its format knows of it.
//!
//! Invariant: when a layer exists, its header was read and is supported; its files are open for
//! reading only, unless they were requested for writing.

use std::any::Any;
use std::ffi::OsString;
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::file_name::plain_name;
use crate::formats::format::Format;
use crate::formats::mapped_disk::DiskReader;
use crate::image_file::ImageFile;

/// The backing file as named in the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingName {
    /// The name as the header has it; may be relative to the image's directory.
    pub name: OsString,
    /// The format, where it is recorded.
    pub format: Option<String>,
}

impl BackingName {
    /// The name for programs in any directory, of an image in `directory`: a path, or the name as it is
    /// where it is none, as QEMU has it (`full-backing-filename`).
    #[must_use]
    pub fn full(&self, directory: &Path) -> PathBuf {
        match plain_name(&self.name) == Some(Path::new(&self.name)) {
            true => directory.join(&self.name),
            false => PathBuf::from(&self.name),
        }
    }
}

/// The disk of an image and of all below it.
pub(crate) type Disk = Box<dyn DiskReader>;

/// An open image as its format knows it, which has checked its bytes.
pub(crate) trait Content: Any + Debug + Send + Sync {
    /// Bytes of a run that begins and ends where the mapping may change: a cluster. `None` where the
    /// disk is in the file as it is.
    fn unit(&self) -> Option<u64>;

    /// The image below, as the header names it.
    fn backing(&self) -> Option<&BackingName> {
        None
    }

    /// The disk of `layer`, which has this content, on `below`, the disk of the image below.
    ///
    /// # Errors
    /// Damage in the tables; the errno of a failed system call.
    fn disk(&self, layer: &Layer, below: Option<Disk>) -> io::Result<Disk>;
}

/// One image of a chain.
#[derive(Debug)]
pub struct Layer {
    /// The image's file.
    pub file: Arc<ImageFile>,
    /// Size of the disk in bytes.
    pub size: u64,
    pub(crate) format: Format,
    /// The files with the data, in the format's order; at least one, which may be the image's file.
    pub(crate) data: Vec<Arc<ImageFile>>,
    pub(crate) content: Box<dyn Content>,
}

impl Layer {
    /// The format of the image.
    #[must_use]
    pub const fn format(&self) -> Format {
        self.format
    }

    /// The content, if it is a `T`.
    pub(crate) fn content<T: Content>(&self) -> Option<&T> {
        let content: &dyn Any = &*self.content;
        content.downcast_ref()
    }

    /// Its file and the other ones with its data.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Arc<ImageFile>> {
        std::iter::once(&self.file).chain(self.other_files())
    }

    /// The files with its data that are not the image's own.
    pub fn other_files(&self) -> impl Iterator<Item = &Arc<ImageFile>> {
        self.data.iter().filter(|data| !Arc::ptr_eq(data, &self.file))
    }

    /// The files with its data, numbered as in [`crate::map::MapEntry::file`].
    #[must_use]
    pub fn data_files(&self) -> &[Arc<ImageFile>] {
        &self.data
    }

    /// The file with the data; the first one if there are several.
    #[must_use]
    pub fn data_file(&self) -> &Arc<ImageFile> {
        self.data.first().unwrap_or(&self.file)
    }
}
