//! Warnings: what a user should know about an image that is opened all the same.
//!
//! Invariant: the text names one file and is one line for a log; control characters in a name are
//! escaped where it is printed.

use std::fmt;
use std::path::PathBuf;

use crate::formats::signature::Signature;

/// A warning about a file of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Warning {
    /// Its file system has no locks, so that other processes may open it, too.
    NotLocked(PathBuf),
    /// A guest may write its first bytes, and it could not be marked as raw.
    NotMarked(PathBuf),
    /// The version of the remote image that it stands on could not be kept with it.
    NoBaseVersion(PathBuf),
    /// Its header says that it is corrupt.
    MarkedCorrupt(PathBuf),
    /// It is used as raw, and begins like an image or a packed file.
    BeginsLike(PathBuf, Signature),
    /// Its bytes go through the page cache, although direct I/O is preferred.
    PageCache(PathBuf),
    /// A program that does not know dirty bitmaps has written to it, which makes those that it has invalid.
    StaleBitmaps(PathBuf),
    /// The disk that the bitmaps in this file are of was changed without them, or is another one: all of each is dirty.
    ChangedDisk(PathBuf),
    /// The bitmaps in this file are not used, because of this.
    UnusedBitmaps(PathBuf, String),
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLocked(path) => write!(
                f,
                "{}: its file system has no locks, so nothing keeps others from it",
                path.display()
            ),
            Self::NotMarked(path) => write!(
                f,
                "{}: it cannot be marked as raw here (no extended attributes), so always open it \
                 with --format raw: a client can make it begin like another format",
                path.display()
            ),
            Self::NoBaseVersion(path) => write!(
                f,
                "{}: the version of the image that it stands on cannot be kept with it here, so that \
                 another one will not be noticed at the next start",
                path.display()
            ),
            Self::MarkedCorrupt(path) => {
                write!(f, "{}: it is marked corrupt: not all of it may be right", path.display())
            }
            Self::BeginsLike(path, signature) => {
                write!(
                    f,
                    "{}: it begins like {} but is served raw",
                    path.display(),
                    signature.words()
                )
            }
            Self::PageCache(path) => {
                write!(f, "{}: no direct I/O here, going through the page cache", path.display())
            }
            Self::StaleBitmaps(path) => write!(
                f,
                "{}: its dirty bitmaps are not used: another program has written to it without them",
                path.display()
            ),
            Self::ChangedDisk(path) => write!(
                f,
                "{}: the disk may have been changed without its dirty bitmaps, so that all of each is dirty",
                path.display()
            ),
            Self::UnusedBitmaps(path, why) => {
                write!(f, "{}: its dirty bitmaps are not used: {why}", path.display())
            }
        }
    }
}
