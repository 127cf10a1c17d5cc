//! An open file of an image: bytes at positions, its size, and where it has holes.
//!
//! Invariant: a read gives every byte that was asked for; what lies behind the end reads as zeros,
//! as in every image format that files are cut short in.
//! Knows: error, simulated. Known by: chain, and whatever reads an image without an engine.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::error::ImageError;
#[cfg(test)]
use crate::recorder::{self, Step};
#[cfg(feature = "sim")]
use crate::simulated::{SimDevice, SimFile};

/// The unit of `st_blocks`, whatever the file system's own block size (stat(2)).
const STAT_BLOCK_BYTES: u64 = 512;

/// Zeros that are written at once where no hole can be made.
const ZEROING_BYTES: u64 = 1 << 20;

/// Which file it is, whatever name led to it (stat(2), `st_dev` and `st_ino`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

/// A regular file or block device, open at least for reading.
#[derive(Debug)]
pub struct HostFile {
    path: PathBuf,
    file: File,
    /// If it is simulated; then `file` only stands for it where a descriptor is asked for.
    #[cfg(feature = "sim")]
    simulated: Option<Box<SimFile>>,
}

/// Makes the call on the simulated file, if that is what it is; else on the file.
macro_rules! call {
    ($self:ident, $simulated:ident => $there:expr, $here:expr) => {{
        #[cfg(feature = "sim")]
        if let Some($simulated) = &$self.simulated {
            return $there;
        }
        $here
    }};
}

/// Whether a run of a file has data, from a position on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostRun {
    /// Bytes; never 0.
    pub(crate) len: u64,
    pub(crate) hole: bool,
}

impl HostFile {
    /// Opens `path`, for writing too if `writable`.
    ///
    /// # Errors
    /// What open(2) says; or that it is neither a regular file nor a block device.
    pub fn open(path: &Path, writable: bool) -> Result<Self, ImageError> {
        Self::open_as(path, path, writable)
    }

    /// As [`HostFile::open`], of the file at `real`, which is called `path` from then on.
    pub(crate) fn open_as(real: &Path, path: &Path, writable: bool) -> Result<Self, ImageError> {
        // O_NONBLOCK: to open a pipe would wait for its other end, before it could be refused.
        let file = OpenOptions::new()
            .read(true)
            .write(writable)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(real)
            .map_err(|error| ImageError::os(path, "open", &error))?;
        let kind = file.metadata().map_err(|error| ImageError::os(path, "look at it", &error))?;
        if !kind.is_file() && !kind.file_type().is_block_device() {
            return Err(ImageError::refused(path, "neither a regular file nor a block device"));
        }
        Ok(Self::of(path.to_owned(), file))
    }

    /// A file that was opened, or made, elsewhere, and is called `path`.
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
    /// `EMFILE`, `ENFILE`: no descriptor is left to stand for it.
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

    /// The name it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open descriptor, for the lock.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn identity(&self) -> io::Result<Identity> {
        let stat = self.file.metadata()?;
        Ok(Identity { device: stat.dev(), inode: stat.ino() })
    }

    /// Its size in bytes, of a block device too.
    ///
    /// # Errors
    /// What lseek(2) says.
    pub fn size(&self) -> io::Result<u64> {
        call!(self, it => Ok(it.size()), Ok(rustix::fs::seek(&self.file, SeekFrom::End(0))?))
    }

    /// Bytes that it takes on its file system; 0 for a block device.
    ///
    /// # Errors
    /// What fstat(2) says.
    pub fn allocated(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks().saturating_mul(STAT_BLOCK_BYTES))
    }

    /// Fills `memory` from `pos` on; with zeros behind the end of the file.
    ///
    /// # Errors
    /// What pread(2) says.
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
    /// What pwrite(2) says.
    pub fn write_at(&self, pos: u64, bytes: &[u8]) -> io::Result<()> {
        #[cfg(test)]
        recorder::note(&self.path, Step::Write(pos, bytes.to_vec()));
        self.file.write_all_at(bytes, pos)
    }

    /// Makes everything written durable.
    ///
    /// # Errors
    /// What fdatasync(2) says.
    pub fn sync(&self) -> io::Result<()> {
        #[cfg(test)]
        recorder::note(&self.path, Step::Sync);
        self.file.sync_data()
    }

    /// Makes the file `size` bytes long.
    ///
    /// # Errors
    /// What ftruncate(2) says.
    pub fn set_len(&self, size: u64) -> io::Result<()> {
        #[cfg(test)]
        recorder::note(&self.path, Step::Size(size));
        self.file.set_len(size)
    }

    /// Reserves space for all of the first `size` bytes, and makes the file that long.
    ///
    /// # Errors
    /// What fallocate(2) says: `ENOSPC` without enough space, `EOPNOTSUPP` where the file system
    /// reserves none.
    pub(crate) fn reserve(&self, size: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, size)?)
    }

    /// Makes `len` bytes from `pos` on a hole: zeros that take no space.
    ///
    /// # Errors
    /// What fallocate(2) says: `EOPNOTSUPP` where the file system or device has no holes.
    pub(crate) fn punch(&self, pos: u64, len: u64) -> io::Result<()> {
        #[cfg(test)]
        recorder::note(&self.path, Step::Hole(pos, len));
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, pos, len)?)
    }

    /// Makes `len` bytes from `pos` on read as zeros, as a hole where that is possible.
    ///
    /// # Errors
    /// What pwrite(2) says.
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

    /// Whether its size can be chosen: not that of a block device.
    pub(crate) fn is_regular(&self) -> io::Result<bool> {
        Ok(self.file.metadata()?.is_file())
    }

    /// The run of data or hole that begins at `pos`, at most `len` bytes. `None` at or behind the
    /// end of the file. Where the file system cannot tell, everything is data.
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
