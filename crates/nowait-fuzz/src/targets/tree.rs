//! A directory tree in which an image may name some files and must not reach the others.
//!
//! Invariant: everything is below a temporary directory, and [`Tree::snapshot`] includes every file
//! of it.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use nowait_image::ImageFile;
use tempfile::TempDir;

use super::image::scratch;

/// The directory of the images, relative to the tree.
const IMAGES: &str = "images";
/// Files, relative to the directory of the images. One directory has a name that starts with the
/// name of that directory.
const FILES: [&str; 11] = [
    "base.raw",
    "data.raw",
    "odd\nname",
    "two words",
    ".hidden",
    "sub/inner.raw",
    "sub/.hidden",
    ".dot/base.raw",
    "../beside/base.raw",
    "../images2/base.raw",
    "../.secret",
];
/// Links, relative to the same directory, and their targets.
const LINKS: [(&str, &str); 9] = [
    ("in", "base.raw"),
    ("twice", "in"),
    (".in", "base.raw"),
    ("out", "../beside/base.raw"),
    ("below", "sub/inner.raw"),
    ("rc", ".hidden"),
    ("others", "../beside"),
    ("here", "."),
    ("none", "nowhere"),
];

/// The state of a file: its bytes and its change time (`st_ctime`).
type State = (Vec<u8>, i64, i64);

/// The tree.
pub(crate) struct Tree {
    scratch: TempDir,
    images: PathBuf,
}

impl Tree {
    pub(crate) fn new() -> Result<Self, String> {
        let scratch = scratch()?;
        let root = scratch.path().canonicalize().map_err(|error| error.to_string())?;
        let images = root.join(IMAGES);
        let made = || -> std::io::Result<()> {
            for directory in ["images/sub", "images/.dot", "beside", "images2"] {
                fs::create_dir_all(root.join(directory))?;
            }
            FILES.iter().try_for_each(|name| fs::write(images.join(name), name.as_bytes()))?;
            LINKS.iter().try_for_each(|(name, to)| symlink(to, images.join(name)))
        };
        made().map_err(|error| format!("{}: {error}", root.display()))?;
        Ok(Self { scratch, images })
    }

    /// The canonical path of the directory of the images.
    pub(crate) fn images(&self) -> &Path {
        &self.images
    }

    /// Every file of the tree by its path, links not followed.
    pub(crate) fn snapshot(&self) -> Result<BTreeMap<PathBuf, State>, String> {
        let mut files = BTreeMap::new();
        collect_files(self.scratch.path(), &mut files).map_err(|error| error.to_string())?;
        Ok(files)
    }

    /// Returns an error if no image may name `file`, which was opened.
    pub(crate) fn refuses(&self, file: &ImageFile) -> Result<(), String> {
        let number = file.fd().map_err(|error| error.to_string())?.as_raw_fd();
        let real = fs::read_link(format!("/proc/self/fd/{number}")).map_err(|e| e.to_string())?;
        let hidden = |path: &Path| {
            path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."))
        };
        let wrong = if real.parent() != Some(self.images()) {
            "lies outside the image's own directory"
        } else if hidden(&real) || hidden(file.path()) {
            "is hidden"
        } else {
            return Ok(());
        };
        Err(format!("{:?} was opened as {:?}, and {wrong}", real, file.path()))
    }
}

fn collect_files(directory: &Path, files: &mut BTreeMap<PathBuf, State>) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let (path, meta) = (entry.path(), entry.metadata()?);
        if meta.is_dir() {
            collect_files(&path, files)?;
        } else if meta.is_file() {
            let bytes = fs::read(&path)?;
            files.insert(path, (bytes, meta.ctime(), meta.ctime_nsec()));
        } else {
            let to = fs::read_link(&path)?.into_os_string().into_encoded_bytes();
            files.insert(path, (to, meta.ctime(), meta.ctime_nsec()));
        }
    }
    Ok(())
}
