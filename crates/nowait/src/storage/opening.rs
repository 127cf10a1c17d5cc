//! Opening a file or block device: two descriptors of it, one for direct transfers.
//!
//! Invariant: both descriptors are of the same file, and one that is there already is not changed.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::{Errno, retry_on_intr};

use crate::storage::device_claim::retry_while_claimed;
use crate::storage::open_options::{Direct, OpenOptions};
use crate::types::alignment::Alignment;
use crate::types::error::{Error, Operation};

/// A file that was opened.
pub(crate) struct Opened {
    /// Without `O_DIRECT`.
    pub(crate) buffered: Arc<File>,
    /// With it, if that is possible and wanted.
    pub(crate) direct: OwnedFd,
    /// Requirements of `direct`.
    pub(crate) align: Alignment,
    pub(crate) stat: Stat,
    pub(crate) device: bool,
}

fn os(error: Errno) -> Error {
    Error::from_os(error, Operation::Open)
}

/// Opens, or makes, the file at `path`; it is not truncated yet.
///
/// # Errors
/// Like [`crate::FileStorage::open`].
pub(crate) fn open(path: &Path, options: OpenOptions) -> Result<Opened, Error> {
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let flags = access | OFlags::CLOEXEC;
    let (buffered, stat) = match rustix::fs::stat(path) {
        _ if options.unnamed => make(path, flags | OFlags::TMPFILE, options)?,
        Ok(_) if options.create_new => return Err(os(Errno::EXIST)),
        Ok(stat) => open_existing(path, flags, stat, options)?,
        Err(Errno::NOENT) if options.create_new => {
            make(path, flags | OFlags::CREATE | OFlags::EXCL, options)?
        }
        Err(Errno::NOENT) if options.create => make(path, flags | OFlags::CREATE, options)?,
        Err(error) => return Err(os(error)),
    };
    let device = is_device(&stat)?;
    let again = match options.unnamed {
        // It has no path; proc(5) has one.
        true => PathBuf::from(format!("/proc/self/fd/{}", buffered.as_raw_fd())),
        false => path.to_owned(),
    };
    let (direct, align) = open_for_transfers(&again, flags, options.direct)?;
    is_same(&direct, &stat)?;
    let buffered = Arc::new(File::from(buffered));
    Ok(Opened { buffered, direct, align, stat, device })
}

/// Opens the regular file `buffered`, which is at `path`, for transfers, too.
///
/// # Errors
/// Like [`crate::FileStorage::of_open_file`].
pub(crate) fn open_beside(
    buffered: Arc<File>,
    path: &Path,
    options: OpenOptions,
) -> Result<Opened, Error> {
    let stat = rustix::fs::fstat(&buffered).map_err(os)?;
    let access = rustix::fs::fcntl_getfl(&buffered).map_err(os)? & OFlags::ACCMODE;
    let wanted = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    if is_device(&stat)? || access != wanted {
        return Err(os(Errno::INVAL));
    }
    let (direct, align) = open_for_transfers(path, wanted | OFlags::CLOEXEC, options.direct)?;
    is_same(&direct, &stat)?;
    Ok(Opened { buffered, direct, align, stat, device: false })
}

fn make(path: &Path, flags: OFlags, options: OpenOptions) -> Result<(OwnedFd, Stat), Error> {
    let mode = Mode::from_raw_mode(options.mode);
    let file = retry_on_intr(|| rustix::fs::open(path, flags, mode)).map_err(os)?;
    let stat = rustix::fs::fstat(&file).map_err(os)?;
    Ok((file, stat))
}

/// Opens the file of `stat`.
fn open_existing(
    path: &Path,
    flags: OFlags,
    stat: Stat,
    options: OpenOptions,
) -> Result<(OwnedFd, Stat), Error> {
    let device = is_device(&stat)?;
    // Only one descriptor claims the device: two claims of this process would exclude each other.
    let alone = match device && !options.read_only && !options.allow_mounted {
        true => OFlags::EXCL,
        false => OFlags::empty(),
    };
    let open = || rustix::fs::open(path, flags | alone, Mode::empty());
    let file = retry_while_claimed(open).map_err(os)?;
    is_same(&file, &stat)?;
    Ok((file, stat))
}

/// `ESTALE` if `file` is not that of `stat`.
fn is_same(file: &OwnedFd, stat: &Stat) -> Result<(), Error> {
    let opened = rustix::fs::fstat(file).map_err(os)?;
    match (opened.st_dev, opened.st_ino) == (stat.st_dev, stat.st_ino) {
        true => Ok(()),
        false => Err(os(Errno::STALE)),
    }
}

/// Whether a file is a block device. `EISDIR` for a directory, `ENOTBLK` for what is not a regular file
/// either.
pub(crate) fn is_device(stat: &Stat) -> Result<bool, Error> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(false),
        FileType::BlockDevice => Ok(true),
        FileType::Directory => Err(Error::new(libc::EISDIR, Operation::Open)),
        _ => Err(Error::new(libc::ENOTBLK, Operation::Open)),
    }
}

/// Opens the descriptor for transfers.
fn open_for_transfers(
    path: &Path,
    flags: OFlags,
    direct: Direct,
) -> Result<(OwnedFd, Alignment), Error> {
    if direct != Direct::Off {
        match open_direct(path, flags) {
            Ok(opened) => return Ok(opened),
            Err(error) if direct == Direct::On => return Err(error),
            Err(_) => {}
        }
    }
    let fd = open_noatime(path, flags);
    Ok((fd.map_err(|e| Error::from_os(e, Operation::Open))?, Alignment::NONE))
}

fn open_direct(path: &Path, flags: OFlags) -> Result<(OwnedFd, Alignment), Error> {
    let fd = open_noatime(path, flags | OFlags::DIRECT).map_err(|e| {
        let refused = e == Errno::INVAL;
        Error::from_os(if refused { Errno::OPNOTSUPP } else { e }, Operation::Open)
    })?;
    let align = Alignment::of(fd.as_fd())?;
    Ok((fd, align))
}

/// Opens with `O_NOATIME`, so that a read updates no access time and the kernel reads no clock for
/// it; without it where the process does not own the file (`EPERM`, open(2)).
fn open_noatime(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    match rustix::fs::open(path, flags | OFlags::NOATIME, Mode::empty()) {
        Err(Errno::PERM) => rustix::fs::open(path, flags, Mode::empty()),
        opened => opened,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FileStorage, Storage};

    fn both(path: &Path) -> Arc<File> {
        Arc::new(File::options().read(true).write(true).open(path).unwrap())
    }

    #[test]
    fn a_file_that_is_open_gets_one_descriptor_more_for_transfers() {
        let named = tempfile::NamedTempFile::new().unwrap();
        named.as_file().set_len(8192).unwrap();
        let file = both(named.path());
        let options = OpenOptions::new();
        let storage = FileStorage::of_open_file(file.clone(), named.path(), options).unwrap();
        assert_eq!(storage.lock_fd().as_raw_fd(), file.as_raw_fd());
        assert_ne!(storage.descriptor().unwrap().as_raw_fd(), file.as_raw_fd());
        assert_eq!(storage.size().unwrap(), 8192);
        // It lives as long as one of the two.
        drop(file);
        storage.sync().unwrap();
    }

    #[test]
    fn a_file_that_is_open_otherwise_or_has_been_replaced_is_refused() {
        let [named, other] = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
        let of = |file: Arc<File>, path: &Path, read_only| {
            let options = OpenOptions::new().read_only(read_only);
            FileStorage::of_open_file(file, path, options).map(drop).map_err(|it| it.errno())
        };
        let read = || Arc::new(File::open(named.path()).unwrap());
        assert_eq!(of(read(), named.path(), true), Ok(()));
        assert_eq!(of(read(), named.path(), false), Err(libc::EINVAL));
        assert_eq!(of(both(named.path()), named.path(), true), Err(libc::EINVAL));
        assert_eq!(of(both(named.path()), named.path(), false), Ok(()));
        assert_eq!(of(both(named.path()), other.path(), false), Err(libc::ESTALE));
    }
}
