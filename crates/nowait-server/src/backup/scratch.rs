//! The file that old bytes of a disk are copied to.
//!
//! Invariant: a block is at the position that it has on the disk; only blocks that were copied and not freed have
//! storage, as far as the file system has holes.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nowait::{
    BlockDevice, BlockMap, BlockingFile, ByteRange, Error, FileStorage, Flags, OpenOptions,
    Operation, Storage,
};

/// Reason why scratch cannot take or give bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScratchFailure {
    /// It has as many bytes as it may.
    Full(u64),
    Storage(Error),
}

impl fmt::Display for ScratchFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(limit) => write!(f, "its scratch is full, {limit} bytes"),
            Self::Storage(error) => write!(f, "its scratch: {error}"),
        }
    }
}

/// A storage for old bytes, which has `size` bytes or more.
pub(crate) struct Scratch {
    file: BlockingFile<dyn BlockMap>,
    storage: Arc<dyn Storage>,
    /// Bytes that may be in use.
    limit: u64,
    used: AtomicU64,
}

impl Scratch {
    /// Scratch in `storage`, of whose bytes at most `limit` are used.
    ///
    /// # Errors
    /// Like [`Storage::size`].
    pub(crate) fn new(storage: Arc<dyn Storage>, limit: u64) -> Result<Self, Error> {
        let options = OpenOptions::new().allocate_ahead(false);
        let disk: Arc<BlockDevice<dyn BlockMap>> =
            Arc::new(BlockDevice::raw(storage.clone(), options)?);
        Ok(Self { file: BlockingFile::new(disk), storage, limit, used: AtomicU64::new(0) })
    }

    /// Its storage.
    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Bytes of blocks that were copied and not freed.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes that may be in use.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Keeps whole blocks.
    pub(crate) fn write(&self, pos: u64, bytes: &[u8]) -> Result<(), ScratchFailure> {
        let len = bytes.len() as u64;
        let before = self.used.fetch_add(len, Ordering::Relaxed);
        if before.saturating_add(len) > self.limit {
            self.used.fetch_sub(len, Ordering::Relaxed);
            return Err(ScratchFailure::Full(self.limit));
        }
        self.file
            .write_at(bytes, pos, Flags::NONE)
            .and_then(|written| all_of(bytes.len(), written, Operation::Write))
            .map_err(ScratchFailure::Storage)
    }

    /// Fills `bytes` with those that were kept from `pos` on.
    pub(crate) fn read(&self, pos: u64, bytes: &mut [u8]) -> Result<(), ScratchFailure> {
        let len = bytes.len();
        self.file
            .read_at(bytes, pos)
            .and_then(|read| all_of(len, read, Operation::Read))
            .map_err(ScratchFailure::Storage)
    }

    /// Frees the storage of whole blocks. Where the file system cannot, they count as used.
    pub(crate) fn free(&self, range: ByteRange) {
        if self.file.discard(range).is_ok() {
            self.used.fetch_sub(range.len, Ordering::Relaxed);
        }
    }
}

fn all_of(wanted: usize, moved: usize, operation: Operation) -> Result<(), Error> {
    match moved == wanted {
        true => Ok(()),
        false => Err(Error::new(libc::EIO, operation)),
    }
}

/// Makes a sparse file of `size` bytes for [`crate::BackupSpec::scratch`], in `directory`, or called `name` there, which
/// must not be there. It has no name when this returns, and is gone with the backup.
///
/// # Errors
/// The errno of open(2), `EEXIST`, or of ftruncate(2), such as `EFBIG`.
pub fn scratch_file(
    directory: &Path,
    name: Option<&Path>,
    size: u64,
) -> Result<Arc<dyn Storage>, Error> {
    let options = OpenOptions::new().mode(0o600);
    let named = |path: &Path| {
        let made = FileStorage::open(path, options.create_new(true));
        if made.is_ok() {
            std::fs::remove_file(path).map_err(|error| Error::from_io(&error, Operation::Open))?;
        }
        made
    };
    let made = match name {
        Some(name) => named(&directory.join(name)),
        None => FileStorage::open(directory, options.unnamed(true)).or_else(|error| {
            // Not every file system can make a file without a name.
            match error.errno() {
                libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT => {
                    named(&directory.join(format!(".nowait-scratch-{}", std::process::id())))
                }
                _ => Err(error),
            }
        }),
    }?;
    made.set_len(size)?;
    Ok(Arc::new(made))
}
