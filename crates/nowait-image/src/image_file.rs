//! An open file of an image: its bytes, its size, and its holes.
//!
//! Invariant: a read fills all of its memory; bytes behind the end of the file read as zeros, as in
//! every image format in which files may be cut short.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, io};

#[cfg(feature = "sim")]
use nowait::SimStorage;
use nowait::internal::retry_while_claimed;
use nowait::{ByteRange, ExtentStatus, FileStorage, ReadCursor, Storage, WriteCursor};
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::error::{ImageError, os_error};
use crate::mounts::in_use;
#[cfg(test)]
use crate::tests::write_log;

/// The unit of `st_blocks`, whatever the file system's own block size (stat(2)).
const STAT_BLOCK_BYTES: u64 = 512;

/// The refusal of a block device without bytes.
pub const NO_MEDIUM: &str =
    "it is a block device without bytes (is a medium in it, or a file attached to it?)";

/// The refusal of a directory, a pipe, a socket or a character device.
const NO_DISK: &str = "neither a regular file nor a block device";

/// Most zeros in bytes that are written together where no hole can be made.
const ZEROING_BYTES: u64 = 1 << 20;

/// Identity of a file, independent of its name (stat(2), `st_dev` and `st_ino`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

impl FileId {
    pub(crate) fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let stat = rustix::fs::fstat(fd)?;
        Ok(Self { device: stat.st_dev, inode: stat.st_ino })
    }
}

/// The mode in which a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    ReadOnly,
    /// For writing; a block device only if no other user claims it (`O_EXCL`).
    Exclusive,
    /// For writing, whatever else uses the block device.
    Shared,
}

/// A file of an image: its name and its bytes.
pub struct ImageFile {
    path: PathBuf,
    storage: Arc<dyn Storage>,
    /// The open file behind it, if it has a descriptor.
    file: Option<Arc<File>>,
    /// The storage itself, if it is simulated.
    #[cfg(feature = "sim")]
    simulated: Option<Arc<SimStorage>>,
}

/// O_NONBLOCK: the open of a pipe would wait for its other end before it could be refused. O_EXCL
/// without O_CREAT is for block devices; Linux ignores it for files.
fn flags(opening: Opening) -> OFlags {
    let access = match opening {
        Opening::ReadOnly => OFlags::RDONLY,
        Opening::Exclusive => OFlags::RDWR | OFlags::EXCL,
        Opening::Shared => OFlags::RDWR,
    };
    access | OFlags::NONBLOCK | OFlags::CLOEXEC
}

impl ImageFile {
    /// Opens `path`, also for writing if `writable`; then a block device is claimed, which excludes
    /// other claims, such as a mounted file system's.
    ///
    /// # Errors
    /// The errnos of open(2); a refusal of a file that is neither a regular file nor a block device, or
    /// of a block device that is in use.
    pub fn open(path: &Path, writable: bool) -> Result<Self, ImageError> {
        let opening = if writable { Opening::Exclusive } else { Opening::ReadOnly };
        Self::open_as(path, path, opening)
    }

    /// Like [`ImageFile::open`], for the file at `real`, which is called `path` from then on.
    pub(crate) fn open_as(real: &Path, path: &Path, opening: Opening) -> Result<Self, ImageError> {
        let open = || rustix::fs::open(real, flags(opening), Mode::empty());
        Self::opened(retry_while_claimed(open), path)
    }

    /// Like [`ImageFile::open`], but no part of `path` may be a symbolic link. (Before Linux 5.6, which cannot tell,
    /// only its last one.)
    pub(crate) fn open_without_links(path: &Path, opening: Opening) -> Result<Self, ImageError> {
        let (flags, resolve) = (flags(opening), ResolveFlags::NO_SYMLINKS);
        let open = || rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve);
        let opened = retry_while_claimed(open);
        Self::opened(
            match opened {
                Err(Errno::NOSYS) => {
                    rustix::fs::open(path, flags | OFlags::NOFOLLOW, Mode::empty())
                }
                Err(Errno::LOOP) => {
                    let why = "a symbolic link is in its path now";
                    return Err(ImageError::refused(path, why).with_errno(libc::ELOOP));
                }
                opened => opened,
            },
            path,
        )
    }

    /// Like [`ImageFile::open`], for the file `name` in `directory`, which is called `path` from then
    /// on. A link is not followed.
    pub(crate) fn open_in(
        directory: BorrowedFd<'_>,
        name: &OsStr,
        path: &Path,
        opening: Opening,
    ) -> Result<Self, ImageError> {
        let flags = flags(opening) | OFlags::NOFOLLOW;
        let open = || rustix::fs::openat(directory, name, flags, Mode::empty());
        Self::opened(retry_while_claimed(open), path)
    }

    fn opened(opened: rustix::io::Result<OwnedFd>, path: &Path) -> Result<Self, ImageError> {
        let file = opened.map_err(|error| match error {
            Errno::BUSY => ImageError::refused(path, in_use(path)),
            Errno::NOMEDIUM => ImageError::refused(path, NO_MEDIUM),
            Errno::NXIO if path.metadata().is_ok_and(|it| it.file_type().is_socket()) => {
                ImageError::refused(path, NO_DISK)
            }
            _ => ImageError::os(path, "open", &error.into()),
        })?;
        Self::of(path.to_owned(), file).map_err(|error| match error.raw_os_error() {
            Some(errno @ (libc::EISDIR | libc::ENOTBLK)) => {
                ImageError::refused(path, NO_DISK).with_errno(errno)
            }
            _ => ImageError::os(path, "look at it", &error),
        })
    }

    /// A file that was opened or made elsewhere, and is called `path`.
    pub(crate) fn of(path: PathBuf, file: impl Into<OwnedFd>) -> io::Result<Self> {
        let file = Arc::new(File::from(file.into()));
        let storage = FileStorage::of(file.clone()).map_err(os_error)?;
        #[cfg(test)]
        let storage = write_log::logged(&path, storage);
        Ok(Self {
            path,
            storage: Arc::new(storage),
            file: Some(file),
            #[cfg(feature = "sim")]
            simulated: None,
        })
    }

    /// A storage that is reached without a descriptor and is called `name`.
    #[must_use]
    pub fn on_storage(name: PathBuf, storage: Arc<dyn Storage>) -> Self {
        Self {
            path: name,
            storage,
            file: None,
            #[cfg(feature = "sim")]
            simulated: None,
        }
    }

    /// The storage behind it.
    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// The storage itself, if it is reached without a descriptor and so cannot be opened by its name a
    /// second time.
    pub(crate) fn remote(&self) -> Option<&Arc<dyn Storage>> {
        Some(&self.storage).filter(|storage| storage.transfers().is_some())
    }

    /// The file with this number of a simulated device.
    #[cfg(feature = "sim")]
    #[must_use]
    pub fn simulated(device: &Arc<nowait::sim::SimDevice>, number: u16) -> Self {
        let storage = Arc::new(SimStorage::inspect(device, number));
        let path = format!("file-{number}").into();
        Self { path, storage: storage.clone(), file: None, simulated: Some(storage) }
    }

    /// A new file called `path` that is in no file system.
    #[cfg(feature = "sim")]
    pub(crate) fn in_memory(path: &Path) -> io::Result<Self> {
        let memory = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC)?;
        Self::of(path.to_owned(), memory)
    }

    /// All of its bytes.
    #[cfg(feature = "sim")]
    pub(crate) fn content(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.size()? as usize];
        self.read_at(0, &mut bytes).map(|()| bytes)
    }

    /// The simulated file, if it is one.
    #[cfg(feature = "sim")]
    pub(crate) fn as_simulated(&self) -> Option<&SimStorage> {
        self.simulated.as_deref()
    }

    /// The name that the file was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open descriptor, for locks and attributes.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for a storage without a descriptor.
    pub fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        self.storage.descriptor().ok_or(Errno::OPNOTSUPP.into())
    }

    /// The open file description that has the locks, if it has one.
    pub(crate) fn open_file(&self) -> Option<&Arc<File>> {
        self.file.as_ref()
    }

    pub(crate) fn identity(&self) -> io::Result<FileId> {
        FileId::of(self.fd()?)
    }

    /// The size of a regular file and its times, in seconds and nanoseconds: of the last change of its bytes, and of any.
    ///
    /// # Errors
    /// The errnos of fstat(2).
    pub(crate) fn size_and_times(&self) -> io::Result<[u64; 5]> {
        #[cfg(feature = "sim")]
        if let Some((device, _)) = self.simulated.as_ref().and_then(|it| it.simulated()) {
            let changed = device.changed_at() + 1;
            return Ok([device.bytes(), 1, changed, 1, changed]);
        }
        let stat = rustix::fs::fstat(self.fd()?)?;
        let [mtime, ctime] = [stat.st_mtime, stat.st_ctime].map(i64::cast_unsigned);
        Ok([stat.st_size.cast_unsigned(), mtime, stat.st_mtime_nsec, ctime, stat.st_ctime_nsec])
    }

    /// The size in bytes, also of a block device.
    ///
    /// # Errors
    /// Like [`Storage::size`].
    pub fn size(&self) -> io::Result<u64> {
        self.storage.size().map_err(os_error)
    }

    /// Bytes that the file takes on its file system; 0 for a block device, and for a storage without a
    /// descriptor.
    ///
    /// # Errors
    /// The errnos of fstat(2).
    pub fn allocated(&self) -> io::Result<u64> {
        let Ok(fd) = self.fd() else { return Ok(0) };
        let stat = rustix::fs::fstat(fd)?;
        Ok(stat.st_blocks.cast_unsigned().saturating_mul(STAT_BLOCK_BYTES))
    }

    /// Fills `memory` from `pos` on; with zeros behind the end of the file.
    ///
    /// # Errors
    /// The errnos of pread(2).
    pub fn read_at(&self, pos: u64, memory: &mut [u8]) -> io::Result<()> {
        let mut rest = ReadCursor::from(memory);
        if i64::try_from(pos).is_ok() {
            self.storage.read_at(pos, &mut rest).map_err(os_error)?;
        }
        rest.fill(0);
        Ok(())
    }

    /// Writes all of `bytes` at `pos`.
    ///
    /// # Errors
    /// The errnos of pwrite(2).
    pub fn write_at(&self, pos: u64, bytes: &[u8]) -> io::Result<()> {
        self.storage.write_at(pos, &mut WriteCursor::from(bytes), None).map_err(os_error)
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// Those of fdatasync(2).
    pub fn sync(&self) -> io::Result<()> {
        self.storage.sync().map_err(os_error)
    }

    /// Like [`ImageFile::sync`], and the times of the file, too.
    ///
    /// # Errors
    /// Those of fsync(2).
    pub(crate) fn sync_with_times(&self) -> io::Result<()> {
        match self.fd() {
            Ok(fd) => Ok(rustix::fs::fsync(fd)?),
            Err(_) => self.sync(),
        }
    }

    /// Makes the file `size` bytes long.
    ///
    /// # Errors
    /// The errnos of ftruncate(2).
    pub fn set_len(&self, size: u64) -> io::Result<()> {
        self.storage.set_len(size).map_err(os_error)
    }

    /// Reserves space for all of the first `size` bytes, and makes the file that long.
    ///
    /// # Errors
    /// The errnos of fallocate(2): `ENOSPC` without enough space, `EOPNOTSUPP` where the file system
    /// reserves none.
    pub(crate) fn reserve(&self, size: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(self.fd()?, FallocateFlags::empty(), 0, size)?)
    }

    /// Makes `len` bytes from `pos` on a hole: zeros that take no space.
    ///
    /// # Errors
    /// The errnos of fallocate(2): `EOPNOTSUPP` where the file system or device has no holes.
    pub(crate) fn punch(&self, pos: u64, len: u64) -> io::Result<()> {
        self.storage.punch(ByteRange::new(pos, len)).map_err(os_error)
    }

    /// Makes `len` bytes from `pos` on read as zeros, as a hole where that is possible.
    ///
    /// # Errors
    /// The errnos of pwrite(2).
    pub(crate) fn zero(&self, pos: u64, len: u64) -> io::Result<()> {
        if self.punch(pos, len).is_ok() {
            return Ok(());
        }
        let zeros = vec![0; ZEROING_BYTES.min(len) as usize];
        let mut done = 0;
        while done < len {
            let part = (len - done).min(ZEROING_BYTES);
            self.write_at(pos + done, zeros.get(..part as usize).unwrap_or_default())?;
            done += part;
        }
        Ok(())
    }

    /// Whether it is a block device, whose size cannot be changed, and not a regular file.
    #[must_use]
    pub fn is_block_device(&self) -> bool {
        self.storage.properties().device
    }

    /// The run of data or the hole that begins at `pos`, at most `len` bytes. `None` at or behind
    /// the end of the file. Where the file system reports no holes, all is data.
    pub(crate) fn run(&self, pos: u64, len: u64) -> io::Result<Option<ExtentStatus>> {
        let end = self.size()?;
        if pos >= end {
            return Ok(None);
        }
        let len = len.min(end - pos).max(1);
        let mut found = Vec::new();
        let asked = self.storage.extents(ByteRange::new(pos, len), 1, &mut found);
        let first = asked.ok().and_then(|()| found.pop());
        Ok(Some(first.unwrap_or(ExtentStatus { len, hole: false, depth: 1 })))
    }
}

impl fmt::Debug for ImageFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageFile").field("path", &self.path).finish_non_exhaustive()
    }
}
