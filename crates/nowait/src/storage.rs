//! An open file or block device, and the calls to it that may wait.
//!
//! Invariant: `direct` and `buffered` are descriptors of the same file; what is asked of it at
//! open (size, alignment, what it can) stays as it was then.
//! Knows: error, align, io, descriptor. Known by: map, disk, blocking.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FallocateFlags, FileType, Mode, OFlags, SeekFrom};

use crate::align::Alignment;
use crate::descriptor::Descriptor;
use crate::error::{Doing, Error, Range};
use crate::io::{Outcome, Span, Transfer};

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

/// An open file or block device.
pub struct Storage {
    direct: Descriptor,
    /// The same file without `O_DIRECT`, for what direct I/O cannot do: parts of blocks, and the
    /// last block of a file that ends inside it. And for syncs: see [`Storage::sync`].
    buffered: Descriptor,
    align: Alignment,
    size: u64,
    read_only: bool,
    nowait: bool,
    punches: bool,
    device: bool,
}

impl Storage {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// What open(2) said; `EISDIR` for a directory, `ENOTBLK` for anything else that is neither
    /// a regular file nor a block device, `ENODATA` for an empty file, `ESTALE` when it was
    /// replaced meanwhile, `EOPNOTSUPP` when [`Direct::On`] is not possible. Nothing of the file is
    /// changed.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
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
        let (direct, align) = open_for_transfers(path, flags, options.direct)?;
        let same = rustix::fs::fstat(&direct).map_err(os)?;
        if (same.st_dev, same.st_ino) != (stat.st_dev, stat.st_ino) {
            return Err(Error::new(libc::ESTALE, Doing::Open));
        }
        let nowait = can_nowait(direct.as_fd(), align);
        let device = kind == FileType::BlockDevice;
        let punches = !options.read_only && (device || can_punch(&buffered, size));
        let read_only = options.read_only;
        let (direct, buffered) = (direct.into(), buffered.into());
        Ok(Self { direct, buffered, align, size, read_only, nowait, punches, device })
    }

    /// Opens a simulated device instead of a file.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: no descriptor is left to stand for it.
    #[cfg(feature = "sim")]
    pub fn simulated(
        device: &std::sync::Arc<crate::sim::SimDevice>,
        options: OpenOptions,
    ) -> Result<Self, Error> {
        Self::simulated_file(device, 0, options)
    }

    /// Opens a file of a simulated device: itself, or one that is read only.
    ///
    /// # Errors
    /// As [`Storage::simulated`].
    #[cfg(feature = "sim")]
    pub fn simulated_file(
        device: &std::sync::Arc<crate::sim::SimDevice>,
        file: u16,
        options: OpenOptions,
    ) -> Result<Self, Error> {
        let like = device.options();
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        let direct = options.direct != Direct::Off;
        let handle = |direct| {
            let fd =
                rustix::event::eventfd(0, flags).map_err(|e| Error::from_os(e, Doing::Open))?;
            Ok(Descriptor::simulated(fd, device.clone(), file, direct))
        };
        Ok(Self {
            direct: handle(direct)?,
            buffered: handle(false)?,
            align: if direct { like.align } else { Alignment::NONE },
            size: device.bytes_of(file),
            read_only: options.read_only,
            nowait: like.nowait,
            punches: !options.read_only && like.punches,
            device: false,
        })
    }

    /// Bytes of the file when it was opened, not rounded to any block.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// What direct I/O asks of a transfer; [`Alignment::NONE`] when the page cache is used.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.align
    }

    /// Whether it was opened for reading only.
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

    /// Whether it is a block device and not a file. The kernel zeroes one by writing zeros where
    /// the device has no command for it (`blkdev_issue_zeroout`).
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.device
    }

    /// The descriptor that transfers go through.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.direct.fd()
    }

    /// The descriptor for locks: of an open file description that no ring holds, so that a lock
    /// ends with the process and not some time later.
    #[must_use]
    pub fn lock_fd(&self) -> BorrowedFd<'_> {
        self.buffered.fd()
    }

    /// Makes one transfer, and waits for it.
    ///
    /// # Safety
    /// The memory that `transfer` names is valid, and not touched by anyone else, until this
    /// returns.
    #[inline]
    pub(crate) unsafe fn transfer(&self, transfer: &Transfer) -> Outcome {
        // SAFETY: as promised by the caller.
        unsafe { self.direct.transfer(transfer) }
    }

    /// Reads into all of `bufs` from byte `pos` on, whatever their alignment; returns the bytes
    /// read, fewer only where the file ends.
    ///
    /// # Errors
    /// What preadv(2) said.
    pub fn read_at(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        let total: usize = bufs.iter().map(|buf| buf.len()).sum();
        let aligned = |buf: &IoSliceMut<'_>| self.is_aligned(buf.as_ptr() as u64, buf.len());
        let direct = self.is_placed(pos) && bufs.iter().all(aligned);
        let mut done = 0;
        let mut rest = bufs;
        while done < total {
            match self.descriptor(direct && done == 0).preadv(rest, pos + done as u64) {
                Ok(0) => break,
                Ok(count) => {
                    done += count;
                    IoSliceMut::advance_slices(&mut rest, count);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    let range = Range::new(pos, total as u64);
                    return Err(Error::from_os(error, Doing::Read).at(range));
                }
            }
        }
        Ok(done)
    }

    /// Writes all of `bufs` from byte `pos` on, whatever their alignment; the file grows where
    /// they end behind its end.
    ///
    /// # Errors
    /// What pwritev(2) said; `EIO` when it wrote nothing.
    pub fn write_at(&self, bufs: &[IoSlice<'_>], pos: u64) -> Result<(), Error> {
        let total: usize = bufs.iter().map(|buf| buf.len()).sum();
        let fail = |e| Error::from_os(e, Doing::Write).at(Range::new(pos, total as u64));
        let aligned = |buf: &IoSlice<'_>| self.is_aligned(buf.as_ptr() as u64, buf.len());
        let direct = self.is_placed(pos) && bufs.iter().all(aligned);
        let mut done = 0;
        let mut list = bufs.to_vec();
        let mut rest = list.as_mut_slice();
        while done < total {
            match self.descriptor(direct && done == 0).pwritev(rest, pos + done as u64) {
                Ok(0) => return Err(fail(rustix::io::Errno::IO)),
                Ok(count) => {
                    done += count;
                    IoSlice::advance_slices(&mut rest, count);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(fail(error)),
            }
        }
        Ok(())
    }

    /// Writes all of `bytes` from byte `pos` on through the page cache, which takes parts of
    /// blocks and does not round the file's end up to one.
    pub(crate) fn write_buffered(&self, mut bytes: &[u8], mut pos: u64) -> Result<(), Error> {
        while !bytes.is_empty() {
            match self.buffered.pwritev(&[IoSlice::new(bytes)], pos) {
                Ok(0) => return Err(Error::new(libc::EIO, Doing::Write)),
                Ok(put) => {
                    bytes = bytes.get(put..).unwrap_or_default();
                    pos += put as u64;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::from_os(error, Doing::Write)),
            }
        }
        Ok(())
    }

    fn is_placed(&self, pos: u64) -> bool {
        pos & (u64::from(self.align.offset) - 1) == 0
    }

    fn is_aligned(&self, base: u64, len: usize) -> bool {
        base & (u64::from(self.align.memory) - 1) == 0
            && len as u64 & (u64::from(self.align.offset) - 1) == 0
    }

    fn descriptor(&self, direct: bool) -> &Descriptor {
        if direct { &self.direct } else { &self.buffered }
    }

    /// Gives the storage of `range` back; it then reads as zeros.
    ///
    /// # Errors
    /// What fallocate(2) said; `EOPNOTSUPP` where the file system cannot.
    pub fn punch(&self, range: Range) -> Result<(), Error> {
        self.allocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, range, Doing::Discard)
    }

    /// Makes `range` read as zeros and keeps its storage.
    ///
    /// # Errors
    /// What fallocate(2) said; `EOPNOTSUPP` where the file system cannot.
    pub fn zero(&self, range: Range) -> Result<(), Error> {
        self.allocate(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, range, Doing::Zero)
    }

    fn allocate(&self, mode: FallocateFlags, range: Range, doing: Doing) -> Result<(), Error> {
        self.buffered
            .fallocate(mode, range.pos, range.len)
            .map_err(|e| Error::from_os(e, doing).at(range))
    }

    /// fdatasync(2), which covers every write that was completed before, on any descriptor. It goes
    /// by the descriptor that no transfer with `RWF_DSYNC` goes by: the kernel reports a lost write
    /// once to each, and what such a transfer has been told no later call would be.
    ///
    /// # Errors
    /// What it said. A later call may succeed although data was lost (C51): remember it.
    pub fn sync(&self) -> Result<(), Error> {
        self.buffered.fdatasync().map_err(|e| Error::from_os(e, Doing::Flush))
    }

    /// Makes the file `bytes` long. [`Storage::size`] stays what it was at open.
    ///
    /// # Errors
    /// What ftruncate(2) said.
    pub fn set_len(&self, bytes: u64) -> Result<(), Error> {
        self.buffered.ftruncate(bytes).map_err(|e| Error::from_os(e, Doing::Write))
    }

    /// Bytes of the file now.
    ///
    /// # Errors
    /// What lseek(2) said.
    pub fn len_now(&self) -> Result<u64, Error> {
        self.buffered.seek(SeekFrom::End(0)).map_err(|e| Error::from_os(e, Doing::Status))
    }

    /// Appends at most `limit` spans of `range` as lseek(2) reports them; they cover `range`
    /// unless the limit was reached.
    ///
    /// # Errors
    /// What lseek(2) said: `EINVAL` where the file system cannot tell, `EIO`; never `ENXIO`.
    pub fn spans(&self, range: Range, limit: usize, spans: &mut Vec<Span>) -> Result<(), Error> {
        let mut pos = range.pos;
        let push = |spans: &mut Vec<Span>, len: u64, hole: bool| {
            if len > 0 {
                spans.push(Span::on_top(len, hole));
            }
            spans.len() < limit
        };
        while pos < range.end() {
            let data = self.seek(SeekFrom::Data(pos), range)?;
            if !push(spans, data - pos, true) || data == range.end() {
                return Ok(());
            }
            let hole = self.seek(SeekFrom::Hole(data), range)?;
            if !push(spans, hole - data, false) {
                return Ok(());
            }
            pos = hole;
        }
        Ok(())
    }

    /// The place that lseek(2) names, or the end of `range` where there is none up to it.
    fn seek(&self, to: SeekFrom, range: Range) -> Result<u64, Error> {
        match self.buffered.seek(to) {
            Ok(pos) => Ok(pos.min(range.end())),
            Err(rustix::io::Errno::NXIO) => Ok(range.end()),
            Err(error) => Err(Error::from_os(error, Doing::Status).at(range)),
        }
    }
}

/// Opens the file once more, for transfers.
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
    let mut slices = [IoSliceMut::new(&mut buffer)];
    let read = rustix::io::preadv2(fd, &mut slices, 0, rustix::io::ReadWriteFlags::NOWAIT);
    !matches!(read, Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL))
}

/// Asks with a hole behind the end of the file, which changes nothing.
fn can_punch(file: &OwnedFd, size: u64) -> bool {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, size.next_multiple_of(1 << 20), 1 << 20).is_ok()
}
