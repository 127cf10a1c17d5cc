//! The files of a log: a directory, and a file for each segment.
//!
//! Invariant: a directory is changed only by the one that has its lock.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::Advice;
use rustix::io::Errno;

use crate::storage::Storage;
use crate::storage::durable_names::sync_directory;
use crate::storage::file::FileStorage;
use crate::storage::file_calls::FileLock;
use crate::storage::open_options::{Direct, OpenOptions};
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};

/// The file that is locked while the log is open.
const LOCK: &str = "lock";

/// The directory of a log. Every call may wait.
#[cfg_attr(not(feature = "sim"), expect(unreachable_pub, reason = "a simulation implements it"))]
pub trait LogDirectory: Send + Sync {
    /// The names of all files.
    ///
    /// # Errors
    /// The errno of getdents(2).
    fn names(&self) -> Result<Vec<String>, Error>;

    /// Opens a file.
    ///
    /// # Errors
    /// The errno of open(2), `ENOENT` if there is none.
    fn open(&self, name: &str) -> Result<Arc<dyn Storage>, Error>;

    /// Opens a file after a process may have been killed or a sync may have failed: all that is read then
    /// is durable.
    ///
    /// # Errors
    /// The errors of [`LogDirectory::open`]; the errno of fdatasync(2).
    fn open_settled(&self, name: &str) -> Result<Arc<dyn Storage>, Error>;

    /// Makes a file of `bytes` zeros, with storage for them where the file system can allocate it.
    ///
    /// # Errors
    /// The errno of open(2), fallocate(2) and ftruncate(2): `ENOSPC`. The file may be there then.
    fn create(&self, name: &str, bytes: u64) -> Result<Arc<dyn Storage>, Error>;

    /// Renames a file; one that has the new name is gone.
    ///
    /// # Errors
    /// The errno of rename(2).
    fn rename(&self, from: &str, to: &str) -> Result<(), Error>;

    /// Removes a file.
    ///
    /// # Errors
    /// The errno of unlink(2).
    fn remove(&self, name: &str) -> Result<(), Error>;

    /// Makes the names durable.
    ///
    /// # Errors
    /// The errno of fsync(2).
    fn sync(&self) -> Result<(), Error>;
}

/// A directory of a file system.
pub(crate) struct FileDirectory {
    path: PathBuf,
    direct: Direct,
}

/// The lock of a directory, which ends when it is dropped.
pub(crate) struct DirectoryLock {
    _file: FileStorage,
}

impl FileDirectory {
    /// Opens the directory at `path`, or makes it if `create` is set, and locks it.
    ///
    /// # Errors
    /// The errno of mkdir(2) and open(2); `EBUSY` if another handle has it.
    pub(crate) fn open(
        path: &Path,
        direct: Direct,
        create: bool,
    ) -> Result<(Self, DirectoryLock), Error> {
        let failed = |error: std::io::Error| Error::from_io(&error, Operation::Open);
        let made = if create { std::fs::create_dir(path) } else { Ok(()) };
        match made {
            _ if !create => {}
            Ok(()) => {
                let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
                sync_directory(parent.unwrap_or(Path::new(".")))?;
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(error)),
        }
        std::fs::read_dir(path).map_err(failed)?;
        let options = OpenOptions::new().create(true).mode(0o600).direct(Direct::Off);
        let lock = FileStorage::open_file(&path.join(LOCK), options)?;
        lock.lock(FileLock::Exclusive, false).map_err(|error| match error.errno() {
            libc::EAGAIN => Error::new(libc::EBUSY, Operation::Lock),
            _ => error,
        })?;
        Ok((Self { path: path.to_owned(), direct }, DirectoryLock { _file: lock }))
    }

    fn storage(&self, name: &str, options: OpenOptions) -> Result<FileStorage, Error> {
        FileStorage::open(&self.path.join(name), options.direct(self.direct))
    }
}

impl LogDirectory for FileDirectory {
    fn names(&self) -> Result<Vec<String>, Error> {
        let failed = |error| Error::from_io(&error, Operation::Open);
        let entries = std::fs::read_dir(&self.path).map_err(failed)?;
        let names = entries.map(|entry| entry.map(|it| it.file_name().into_string().ok()));
        // A name that is not UTF-8 is not of a log.
        names.filter_map(Result::transpose).collect::<Result<_, _>>().map_err(failed)
    }

    fn open(&self, name: &str) -> Result<Arc<dyn Storage>, Error> {
        Ok(Arc::new(self.storage(name, OpenOptions::new())?))
    }

    /// Through the page cache a page whose writeback has failed may read as if it were written: it is
    /// dropped from the cache.
    fn open_settled(&self, name: &str) -> Result<Arc<dyn Storage>, Error> {
        let storage = self.storage(name, OpenOptions::new())?;
        storage.sync()?;
        rustix::fs::fadvise(storage.lock_fd(), 0, None, Advice::DontNeed)
            .map_err(|error| Error::from_os(error, Operation::Open))?;
        Ok(Arc::new(storage))
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Arc<dyn Storage>, Error> {
        // One that an earlier call has left could not be removed then.
        self.remove(name)?;
        let options = OpenOptions::new().create(true).create_new(true).mode(0o600);
        let storage = self.storage(name, options)?;
        match storage.preallocate(ByteRange::new(0, bytes)) {
            Err(error) if error.errno() != libc::EOPNOTSUPP => return Err(error),
            _ => {}
        }
        storage.set_len(bytes)?;
        Ok(Arc::new(storage))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Error> {
        rustix::fs::rename(self.path.join(from), self.path.join(to))
            .map_err(|error| Error::from_os(error, Operation::Write))
    }

    fn remove(&self, name: &str) -> Result<(), Error> {
        match rustix::fs::unlink(self.path.join(name)) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(Error::from_os(error, Operation::Write)),
        }
    }

    fn sync(&self) -> Result<(), Error> {
        sync_directory(&self.path)
    }
}
