//! The directory of a cache: whose it is, how much is in it, and what goes when it is too much.
//!
//! Servers on one machine share it without a lock on its files: what they write for one version of an
//! object is the same, and torn or foreign bytes are found by their checksum.
//!
//! Invariant: only files of the cache's own form are removed, the one that was used longest ago first. What is opened is a
//! regular file or a directory of this user; no link is followed, and no other kind of file is waited for.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use ring::digest;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, openat};

/// The smallest size of a cache in bytes.
pub const MIN_CACHE_BYTES: u64 = 64 << 20;
/// The part of its size that is made free when it is full.
const FREED: u64 = 16;
const NAME_BYTES: usize = 64;

/// A cache of what was read of objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// The directory; made if it is not there.
    pub directory: PathBuf,
    /// The most bytes in it, at least [`MIN_CACHE_BYTES`]. For a moment it may be a sixteenth more
    /// for each server that uses it.
    pub bytes: u64,
}

/// The directory of one version of an object, in that of a cache.
pub(super) struct CacheDirectory {
    options: CacheOptions,
    /// The directory of the object.
    #[cfg(any(test, feature = "fuzz"))]
    pub(super) path: PathBuf,
    /// The seed of the checksums of its blocks.
    pub(super) key: [u8; 32],
    /// That directory, with a lock, so that it is not removed.
    open: OwnedFd,
}

impl CacheDirectory {
    /// The directory of the object that is called `name`, which names its version too.
    ///
    /// # Errors
    /// A message of one line: the directory cannot be made, or is another user's.
    pub(super) fn open(options: &CacheOptions, name: &str) -> Result<Self, String> {
        let shown = options.directory.display();
        let failed = |error: &io::Error| format!("the cache {shown} cannot be used: {error}");
        let make = |path: &Path| DirBuilder::new().recursive(true).mode(0o700).create(path);
        make(&options.directory).map_err(|error| failed(&error))?;
        let found = fs::metadata(&options.directory).map_err(|error| failed(&error))?;
        if let Some(why) = refusal(&found) {
            return Err(format!("the cache {shown} {why}"));
        }
        let digest = digest::digest(&digest::SHA256, name.as_bytes());
        let key: [u8; 32] = digest.as_ref().try_into().map_err(|_| "no digest")?;
        let path = options.directory.join(hex(&key));
        make(&path).map_err(|error| failed(&error))?;
        let open = own_directory(&path).map_err(|error| failed(&error))?;
        // A file system without locks: then no directory is removed either.
        let _ = rustix::fs::flock(&open, FlockOperation::NonBlockingLockShared);
        Ok(Self {
            options: options.clone(),
            #[cfg(any(test, feature = "fuzz"))]
            path,
            key,
            open,
        })
    }

    /// Opens the file called `name`, to read it, or to write it too, which makes it if it is not there.
    ///
    /// # Errors
    /// The errors of openat(2); `InvalidData`: not a regular file, or another user's.
    pub(super) fn file(&self, name: &str, write: bool) -> io::Result<File> {
        let access = if write { OFlags::RDWR | OFlags::CREATE } else { OFlags::RDONLY };
        let mode = Mode::RUSR | Mode::WUSR;
        let file = File::from(openat(&self.open, name, access | CAREFUL, mode)?);
        let found = file.metadata()?;
        match found.is_file() && is_own(&found) {
            true => Ok(file),
            false => Err(io::Error::new(io::ErrorKind::InvalidData, "a file in it is foreign")),
        }
    }

    /// The bytes that may be written before [`CacheDirectory::trim`] is to be called again.
    pub(super) const fn slack(&self) -> u64 {
        self.options.bytes / FREED
    }

    /// Removes what was used longest ago, if there is more than may be.
    pub(super) fn trim(&self) {
        let mut files = Vec::new();
        let objects = entries(&self.options.directory);
        for object in objects.filter(|it| fs::symlink_metadata(it).is_ok_and(|it| it.is_dir())) {
            let before = files.len();
            files.extend(entries(&object).filter_map(|path| {
                let found = fs::symlink_metadata(&path).ok().filter(Metadata::is_file)?;
                Some((
                    found.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                    found.blocks() * 512,
                    path,
                ))
            }));
            if files.len() == before {
                remove_unused(&object);
            }
        }
        let mut bytes: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        if bytes <= self.options.bytes - self.slack() {
            return;
        }
        files.sort_unstable();
        for (_, freed, path) in files {
            if bytes <= self.options.bytes - 2 * self.slack() {
                return;
            }
            if fs::remove_file(path).is_ok() {
                bytes -= freed;
            }
        }
    }
}

/// No link is followed, and an open waits for nothing.
const CAREFUL: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// Opens the directory at `path`, which must be this user's.
fn own_directory(path: &Path) -> io::Result<OwnedFd> {
    let open = openat(CWD, path, OFlags::DIRECTORY | CAREFUL, Mode::empty())?;
    let found = File::from(open);
    match is_own(&found.metadata()?) {
        true => Ok(found.into()),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

fn is_own(found: &Metadata) -> bool {
    found.uid() == rustix::process::geteuid().as_raw()
}

/// Why a cache is not kept in the directory that was `found`.
fn refusal(found: &Metadata) -> Option<&'static str> {
    if !found.is_dir() {
        return Some("is not a directory");
    }
    if !is_own(found) {
        return Some("is another user's, who could put other bytes into it");
    }
    let others = found.mode() & 0o077 != 0;
    others.then_some("can be used by others (chmod 700 it, or give a new directory)")
}

/// The entries of `directory` with a name of the cache's form.
fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let is_name =
        |name: &str| name.len() <= NAME_BYTES && name.bytes().all(|b| b.is_ascii_hexdigit());
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let own = entries.filter(move |entry| entry.file_name().to_str().is_some_and(is_name));
    own.map(|entry| entry.path())
}

/// Removes the directory of an object if it is empty and no server has it open.
fn remove_unused(directory: &Path) {
    let Ok(open) = own_directory(directory) else { return };
    if rustix::fs::flock(&open, FlockOperation::NonBlockingLockExclusive).is_ok() {
        let _ = fs::remove_dir(directory);
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
