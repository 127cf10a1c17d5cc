//! An open image: what all engines of one device share.
//!
//! Invariant: `direct` and `buffered` are descriptors of the same file. After a failed flush every
//! later flush fails until the device is opened anew (C51).
//! Knows: error, align, map, ranges. Known by: blocking, engine, file.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, FileType, Mode, OFlags, SeekFrom};

use crate::align::Alignment;
use crate::error::{Doing, Error, Range};
use crate::map::{Extents, Identity, Intent, Map};
use crate::ranges::RangeLocks;

/// Whether the page cache is bypassed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Yes, or the open fails.
    On,
    /// No.
    Off,
    /// Yes where the file system can.
    #[default]
    Auto,
}

/// How an image is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Writes, discards and zeroes are `EROFS`.
    pub read_only: bool,
    /// Whether the page cache is bypassed.
    pub direct: Direct,
    /// The switch `hint`: whether the map remembers; see [`crate::Config::hint`].
    pub no_hint: bool,
}

/// An open image.
pub struct Disk<M> {
    direct: OwnedFd,
    /// The same file without `O_DIRECT`, for the part of its last block that direct I/O cannot
    /// write without growing the file.
    buffered: OwnedFd,
    pub(crate) map: M,
    pub(crate) ranges: RangeLocks,
    align: Alignment,
    size: u64,
    read_only: bool,
    nowait: bool,
    punches: bool,
    flush_failed: AtomicBool,
}

/// The descriptors of an image, and what was found out about it.
struct Opened {
    direct: OwnedFd,
    buffered: OwnedFd,
    align: Alignment,
    size: u64,
    block: bool,
}

impl Disk<Extents> {
    /// Opens the image at `path`, with a hint cache that knows nothing yet; see [`Disk::scan`].
    ///
    /// # Errors
    /// What open(2) said; `EISDIR` for a directory, `ENOTBLK` for anything else that is neither
    /// a regular file nor a block device, `ENODATA` for an empty image, `EOPNOTSUPP` when
    /// [`Direct::On`] is not possible. Nothing of the image is changed.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        let opened = Opened::new(path, options)?;
        let map = Extents::new(opened.size, !options.no_hint);
        Ok(Self::from_opened(opened, map, options))
    }

    /// Learns which ranges are holes. To be called when nobody else writes to the image any more:
    /// after it was locked, before it is used. What is learnt is kept right across everything that
    /// is done through this `Disk`, and only that.
    pub fn scan(&self) {
        self.map.scan(self.buffered());
    }
}

impl Disk<Identity> {
    /// Opens the image at `path` and takes every byte for mapped.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub fn open_mapped(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        Ok(Self::from_opened(Opened::new(path, options)?, Identity, options))
    }
}

impl Opened {
    fn new(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        let os = |e| Error::from_os(e, Doing::Open);
        let stat = rustix::fs::stat(path).map_err(os)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        match kind {
            FileType::RegularFile | FileType::BlockDevice => {}
            FileType::Directory => return Err(Error::new(libc::EISDIR, Doing::Open)),
            _ => return Err(Error::new(libc::ENOTBLK, Doing::Open)),
        }
        let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let flags = access | OFlags::CLOEXEC;
        let buffered = rustix::fs::open(path, flags, Mode::empty()).map_err(os)?;
        let opened = rustix::fs::fstat(&buffered).map_err(os)?;
        if (opened.st_dev, opened.st_ino) != (stat.st_dev, stat.st_ino) {
            return Err(Error::new(libc::ESTALE, Doing::Open));
        }
        let size = rustix::fs::seek(&buffered, SeekFrom::End(0)).map_err(os)?;
        if size == 0 {
            return Err(Error::new(libc::ENODATA, Doing::Open));
        }
        let (direct, align) = Self::direct(path, flags, options.direct)?;
        let same = rustix::fs::fstat(&direct).map_err(os)?;
        if (same.st_dev, same.st_ino) != (stat.st_dev, stat.st_ino) {
            return Err(Error::new(libc::ESTALE, Doing::Open));
        }
        Ok(Self { direct, buffered, align, size, block: kind == FileType::BlockDevice })
    }

    /// Opens the file once more, for transfers.
    fn direct(path: &Path, flags: OFlags, direct: Direct) -> Result<(OwnedFd, Alignment), Error> {
        if direct != Direct::Off {
            match Self::open_direct(path, flags) {
                Ok(opened) => return Ok(opened),
                Err(error) if direct == Direct::On => return Err(error),
                Err(_) => {}
            }
        }
        let fd = open_quietly(path, flags);
        Ok((fd.map_err(|e| Error::from_os(e, Doing::Open))?, Alignment::NONE))
    }

    fn open_direct(path: &Path, flags: OFlags) -> Result<(OwnedFd, Alignment), Error> {
        let fd = open_quietly(path, flags | OFlags::DIRECT).map_err(|e| {
            let refused = e == rustix::io::Errno::INVAL;
            Error::from_os(if refused { rustix::io::Errno::OPNOTSUPP } else { e }, Doing::Open)
        })?;
        let align = Alignment::of(fd.as_fd())?;
        Ok((fd, align))
    }
}

impl<M: Map> Disk<M> {
    fn from_opened(opened: Opened, map: M, options: OpenOptions) -> Self {
        let nowait = can_nowait(opened.direct.as_fd(), opened.align);
        let punches = !options.read_only && can_punch(&opened);
        Self {
            direct: opened.direct,
            buffered: opened.buffered,
            map,
            ranges: RangeLocks::new(),
            align: opened.align,
            size: opened.size,
            read_only: options.read_only,
            nowait,
            punches,
            flush_failed: AtomicBool::new(false),
        }
    }

    /// Bytes of the device, not rounded to any block.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// What direct I/O asks of a transfer; [`Alignment::NONE`] when the page cache is used.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.align
    }

    /// Whether the page cache is bypassed.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.align != Alignment::NONE
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether the file takes `RWF_NOWAIT`; asked once at open.
    #[must_use]
    pub fn takes_nowait(&self) -> bool {
        self.nowait
    }

    /// Whether storage can be given back and zeros made without writing them; asked once at open.
    #[must_use]
    pub fn punches_holes(&self) -> bool {
        self.punches
    }

    /// Whether all of `range` is known to be a hole, which reads as zeros without I/O (C14).
    #[must_use]
    pub fn is_hole(&self, range: Range) -> bool {
        let extent = self.map.begin(range, Intent::Read);
        extent.is_ok_and(|extent| extent.hole && extent.len == range.len)
    }

    /// The descriptor that transfers go through.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.direct.as_fd()
    }

    /// The descriptor for locks: of an open file description that no ring holds, so that a lock
    /// ends with the process and not some time later.
    #[must_use]
    pub fn lock_fd(&self) -> BorrowedFd<'_> {
        self.buffered()
    }

    pub(crate) fn buffered(&self) -> BorrowedFd<'_> {
        self.buffered.as_fd()
    }

    /// fdatasync(2), which covers every write that was completed before, on any queue (C49).
    pub(crate) fn flush(&self) -> Result<(), Error> {
        if self.flush_failed.load(Ordering::Acquire) {
            return Err(Error::new(libc::EIO, Doing::Flush));
        }
        rustix::fs::fdatasync(&self.direct).map_err(|error| {
            // The kernel reports a lost write once; whoever asks next must hear of it too.
            self.flush_failed.store(true, Ordering::Release);
            Error::from_os(error, Doing::Flush)
        })
    }
}

/// Opens for transfers that do not count as accesses, where that is allowed: it is to the file's
/// owner (open(2), `O_NOATIME`), and saves the kernel a look at the clock for each read.
fn open_quietly(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    match rustix::fs::open(path, flags | OFlags::NOATIME, Mode::empty()) {
        Err(rustix::io::Errno::PERM) => rustix::fs::open(path, flags, Mode::empty()),
        opened => opened,
    }
}

/// Whether one small read with `RWF_NOWAIT` is taken: served or `EAGAIN`, but not refused.
fn can_nowait(fd: BorrowedFd<'_>, align: Alignment) -> bool {
    let bytes = align.offset.max(512);
    let Some(mut buffer) = crate::buffer::Aligned::zeroed(bytes as usize) else { return false };
    let mut slices = [std::io::IoSliceMut::new(&mut buffer)];
    let read = rustix::io::preadv2(fd, &mut slices, 0, rustix::io::ReadWriteFlags::NOWAIT);
    !matches!(read, Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL))
}

/// Asks with a hole behind the end of the file, which changes nothing.
fn can_punch(opened: &Opened) -> bool {
    if opened.block {
        return true;
    }
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let behind = opened.size.next_multiple_of(1 << 20);
    rustix::fs::fallocate(&opened.buffered, mode, behind, 1 << 20).is_ok()
}
