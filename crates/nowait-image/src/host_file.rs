//! An open file of an image: its bytes, its size, and its holes.
//!
//! Invariant: a read fills all of its memory; bytes behind the end of the file read as zeros, as in
//! every image format in which files may be cut short.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::error::ImageError;
use crate::mounts::in_use;
#[cfg(feature = "sim")]
use crate::sim_file::{SimDevice, SimFile};
#[cfg(test)]
use crate::tests::write_log;
#[cfg(test)]
use crate::tests::write_log::Step;

/// The unit of `st_blocks`, whatever the file system's own block size (stat(2)).
const STAT_BLOCK_BYTES: u64 = 512;

/// The refusal of a block device without bytes.
pub const NO_MEDIUM: &str =
    "it is a block device without bytes (is a medium in it, or a file attached to it?)";

/// The refusal of a directory, a pipe, a socket or a character device.
const NO_DISK: &str = "neither a regular file nor a block device";

/// Most zeros in bytes that are written at once where no hole can be made.
const ZEROING_BYTES: u64 = 1 << 20;

/// Identity of a file, independent of its name (stat(2), `st_dev` and `st_ino`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
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

/// A regular file or block device, open at least for reading.
#[derive(Debug)]
pub struct HostFile {
    path: PathBuf,
    file: File,
    /// The simulated file, if it is one; then `file` is only a placeholder for its descriptor.
    #[cfg(feature = "sim")]
    simulated: Option<Box<SimFile>>,
}

/// Calls the simulated file, if this is one; else the real file.
macro_rules! call {
    ($self:ident, $simulated:ident => $there:expr, $here:expr) => {{
        #[cfg(feature = "sim")]
        if let Some($simulated) = &$self.simulated {
            return $there;
        }
        $here
    }};
}

/// A run of data or a hole of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostRun {
    /// Bytes; never 0.
    pub(crate) len: u64,
    pub(crate) hole: bool,
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

impl HostFile {
    /// Opens `path`, also for writing if `writable`; then a block device is claimed, which excludes
    /// other claims, such as a mounted file system's.
    ///
    /// # Errors
    /// Those of open(2); a refusal of a file that is neither a regular file nor a block device, or
    /// of a block device that is in use.
    pub fn open(path: &Path, writable: bool) -> Result<Self, ImageError> {
        let opening = if writable { Opening::Exclusive } else { Opening::ReadOnly };
        Self::open_as(path, path, opening)
    }

    /// As [`HostFile::open`], for the file at `real`, which is called `path` from then on.
    pub(crate) fn open_as(real: &Path, path: &Path, opening: Opening) -> Result<Self, ImageError> {
        Self::opened(rustix::fs::open(real, flags(opening), Mode::empty()), path)
    }

    /// As [`HostFile::open`], for the file `name` in `directory`, which is called `path` from then
    /// on. A link is not followed.
    pub(crate) fn open_in(
        directory: BorrowedFd<'_>,
        name: &OsStr,
        path: &Path,
        opening: Opening,
    ) -> Result<Self, ImageError> {
        let flags = flags(opening) | OFlags::NOFOLLOW;
        Self::opened(rustix::fs::openat(directory, name, flags, Mode::empty()), path)
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
        let file = File::from(file);
        let kind = file.metadata().map_err(|error| ImageError::os(path, "look at it", &error))?;
        if !kind.is_file() && !kind.file_type().is_block_device() {
            let errno = if kind.is_dir() { libc::EISDIR } else { libc::ENOTBLK };
            return Err(ImageError::refused(path, NO_DISK).with_errno(errno));
        }
        Ok(Self::of(path.to_owned(), file))
    }

    /// A file that was opened or made elsewhere, and is called `path`.
    pub(crate) const fn of(path: PathBuf, file: File) -> Self {
        Self {
            path,
            file,
            #[cfg(feature = "sim")]
            simulated: None,
        }
    }

    /// The file with this number of a simulated device.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: no descriptor is left for the placeholder.
    #[cfg(feature = "sim")]
    pub fn simulated(device: &std::sync::Arc<SimDevice>, number: u16) -> io::Result<Self> {
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        let simulated = Some(Box::new(SimFile::new(device, number)));
        Ok(Self { simulated, ..Self::of(format!("file-{number}").into(), File::from(fd)) })
    }

    /// The simulated file, if it is one.
    #[cfg(feature = "sim")]
    pub(crate) fn as_simulated(&self) -> Option<&SimFile> {
        self.simulated.as_deref()
    }

    /// The name that the file was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open descriptor, for the lock.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn identity(&self) -> io::Result<FileId> {
        let stat = self.file.metadata()?;
        Ok(FileId { device: stat.dev(), inode: stat.ino() })
    }

    /// The size in bytes, also of a block device.
    ///
    /// # Errors
    /// Those of lseek(2).
    pub fn size(&self) -> io::Result<u64> {
        call!(self, it => Ok(it.size()), Ok(rustix::fs::seek(&self.file, SeekFrom::End(0))?))
    }

    /// Bytes that the file takes on its file system; 0 for a block device.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn allocated(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks().saturating_mul(STAT_BLOCK_BYTES))
    }

    /// Fills `memory` from `pos` on; with zeros behind the end of the file.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn read_at(&self, pos: u64, memory: &mut [u8]) -> io::Result<()> {
        call!(self, it => it.read_at(pos, memory), ());
        let mut done = 0;
        while done < memory.len() {
            let Some(at) = pos.checked_add(done as u64).filter(|&at| i64::try_from(at).is_ok())
            else {
                break;
            };
            match self.file.read_at(&mut memory[done..], at) {
                Ok(0) => break,
                Ok(got) => done += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        memory[done..].fill(0);
        Ok(())
    }

    /// Writes all of `bytes` at `pos`.
    ///
    /// # Errors
    /// Those of pwrite(2).
    pub fn write_at(&self, pos: u64, bytes: &[u8]) -> io::Result<()> {
        #[cfg(test)]
        write_log::note(&self.path, Step::Write(pos, bytes.to_vec()));
        self.file.write_all_at(bytes, pos)
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// Those of fdatasync(2).
    pub fn sync(&self) -> io::Result<()> {
        #[cfg(test)]
        write_log::note(&self.path, Step::Sync);
        self.file.sync_data()
    }

    /// Makes the file `size` bytes long.
    ///
    /// # Errors
    /// Those of ftruncate(2).
    pub fn set_len(&self, size: u64) -> io::Result<()> {
        #[cfg(test)]
        write_log::note(&self.path, Step::Size(size));
        self.file.set_len(size)
    }

    /// Reserves space for all of the first `size` bytes, and makes the file that long.
    ///
    /// # Errors
    /// Those of fallocate(2): `ENOSPC` without enough space, `EOPNOTSUPP` where the file system
    /// reserves none.
    pub(crate) fn reserve(&self, size: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, size)?)
    }

    /// Makes `len` bytes from `pos` on a hole: zeros that take no space.
    ///
    /// # Errors
    /// Those of fallocate(2): `EOPNOTSUPP` where the file system or device has no holes.
    pub(crate) fn punch(&self, pos: u64, len: u64) -> io::Result<()> {
        #[cfg(test)]
        write_log::note(&self.path, Step::Hole(pos, len));
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, pos, len)?)
    }

    /// Makes `len` bytes from `pos` on read as zeros, as a hole where that is possible.
    ///
    /// # Errors
    /// Those of pwrite(2).
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

    /// Whether it is a regular file, whose size can be changed.
    pub(crate) fn is_regular(&self) -> io::Result<bool> {
        Ok(self.file.metadata()?.is_file())
    }

    /// Whether it is a block device.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn is_block_device(&self) -> io::Result<bool> {
        Ok(self.file.metadata()?.file_type().is_block_device())
    }

    /// The run of data or the hole that begins at `pos`, at most `len` bytes. `None` at or behind
    /// the end of the file. Where the file system reports no holes, all is data.
    pub(crate) fn run(&self, pos: u64, len: u64) -> io::Result<Option<HostRun>> {
        let end = self.size()?;
        if pos >= end {
            return Ok(None);
        }
        let len = len.min(end - pos).max(1);
        let found = match rustix::fs::seek(&self.file, SeekFrom::Data(pos)) {
            Ok(data) if data > pos => HostRun { len: len.min(data - pos), hole: true },
            Ok(_) => match rustix::fs::seek(&self.file, SeekFrom::Hole(pos)) {
                Ok(hole) if hole > pos => HostRun { len: len.min(hole - pos), hole: false },
                _ => HostRun { len, hole: false },
            },
            Err(Errno::NXIO) => HostRun { len, hole: true },
            Err(_) => HostRun { len, hole: false },
        };
        Ok(Some(found))
    }
}
