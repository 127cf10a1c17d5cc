//! An open file or block device, and the calls to it that may wait.
//!
//! Invariant: `direct` and `buffered` are descriptors of the same file; the properties queried at
//! open (size, alignment, supported operations) do not change later.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FallocateFlags, FileType, Mode, OFlags, SeekFrom};

use crate::storage::descriptor::Descriptor;
use crate::types::alignment::Alignment;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::request::ExtentStatus;
use crate::types::transfer::{Outcome, Transfer};

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

/// How a file or block device is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Writes, discards and zeroes fail with `EROFS`.
    pub read_only: bool,
    /// Whether the page cache is bypassed.
    pub direct: Direct,
    /// A block device is opened for writing even if it is in use, by a mounted file system for
    /// example. Otherwise the kernel refuses that (open(2), `O_EXCL`).
    pub allow_mounted: bool,
    /// Turns the allocation cache off; see [`crate::Config::hint`].
    pub no_hint: bool,
}

/// An open file or block device.
pub struct FileStorage {
    direct: Descriptor,
    /// The same file without `O_DIRECT`, for transfers that direct I/O cannot do: parts of blocks,
    /// and the last block of a file that ends inside it. Syncs use it too; see
    /// [`FileStorage::sync`].
    buffered: Descriptor,
    align: Alignment,
    size: u64,
    read_only: bool,
    nowait: bool,
    punch_hole: bool,
    device: bool,
    /// Granularity of zeroing and deallocation in bytes: a block device's logical block.
    zeroing_block: u32,
}

impl FileStorage {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// The errno of open(2). `EISDIR` for a directory, `ENOTBLK` for anything else that is neither
    /// a regular file nor a block device, `ENOMEDIUM` for a block device of 0 bytes, such as a loop
    /// device without a file, `ESTALE` when the path was replaced during the call, `EOPNOTSUPP`
    /// when [`Direct::On`] is not possible, `EBUSY` for a block device that is opened for writing
    /// and is mounted or otherwise in use. No error leaves a change in the file.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        let os = |e| Error::from_os(e, Operation::Open);
        let stat = rustix::fs::stat(path).map_err(os)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        match kind {
            FileType::RegularFile | FileType::BlockDevice => {}
            FileType::Directory => return Err(Error::new(libc::EISDIR, Operation::Open)),
            _ => return Err(Error::new(libc::ENOTBLK, Operation::Open)),
        }
        let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let flags = access | OFlags::CLOEXEC;
        let device = kind == FileType::BlockDevice;
        // Only one descriptor claims the device: two claims of this process would exclude each
        // other.
        let alone = match device && !options.read_only && !options.allow_mounted {
            true => OFlags::EXCL,
            false => OFlags::empty(),
        };
        let buffered = rustix::fs::open(path, flags | alone, Mode::empty()).map_err(os)?;
        let opened = rustix::fs::fstat(&buffered).map_err(os)?;
        if (opened.st_dev, opened.st_ino) != (stat.st_dev, stat.st_ino) {
            return Err(Error::new(libc::ESTALE, Operation::Open));
        }
        let size = rustix::fs::seek(&buffered, SeekFrom::End(0)).map_err(os)?;
        if size == 0 && device {
            return Err(Error::new(libc::ENOMEDIUM, Operation::Open));
        }
        let (direct, align) = open_for_transfers(path, flags, options.direct)?;
        let same = rustix::fs::fstat(&direct).map_err(os)?;
        if (same.st_dev, same.st_ino) != (stat.st_dev, stat.st_ino) {
            return Err(Error::new(libc::ESTALE, Operation::Open));
        }
        let nowait = probe_nowait(direct.as_fd(), align);
        let punches = !options.read_only && (device || probe_punch_hole(&buffered, size));
        let read_only = options.read_only;
        let zeroing_block = if device { logical_block(&buffered) } else { 1 };
        let (direct, buffered) = (direct.into(), buffered.into());
        Ok(Self {
            direct,
            buffered,
            align,
            size,
            read_only,
            nowait,
            punch_hole: punches,
            device,
            zeroing_block,
        })
    }

    /// Opens a simulated device instead of a file.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE` when no descriptor is left.
    #[cfg(feature = "sim")]
    pub fn simulated(
        device: &std::sync::Arc<crate::sim::SimDevice>,
        options: OpenOptions,
    ) -> Result<Self, Error> {
        Self::simulated_file(device, 0, options)
    }

    /// Opens a file of a simulated device: 0 is the device itself, all others are read-only.
    ///
    /// # Errors
    /// As [`FileStorage::simulated`].
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
                rustix::event::eventfd(0, flags).map_err(|e| Error::from_os(e, Operation::Open))?;
            Ok(Descriptor::simulated(fd, device.clone(), file, direct))
        };
        Ok(Self {
            direct: handle(direct)?,
            buffered: handle(false)?,
            align: if direct { like.align } else { Alignment::NONE },
            size: device.bytes_of(file),
            read_only: options.read_only,
            nowait: like.nowait,
            punch_hole: !options.read_only && like.punches,
            device: false,
            zeroing_block: 1,
        })
    }

    /// Bytes of the file when it was opened, not rounded to any block.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The alignment that direct I/O requires; [`Alignment::NONE`] when the page cache is used.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.align
    }

    /// Whether the file was opened for reading only.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether the file supports `RWF_NOWAIT`; probed once at open.
    #[must_use]
    pub fn supports_nowait(&self) -> bool {
        self.nowait
    }

    /// Whether storage can be deallocated, and zeros made without writing them; probed once at
    /// open.
    #[must_use]
    pub fn supports_punch_hole(&self) -> bool {
        self.punch_hole
    }

    /// Whether this is a block device and not a file. If a device has no command for zeroing, the
    /// kernel writes zeros to it (`blkdev_issue_zeroout`).
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.device
    }

    /// Granularity of [`FileStorage::punch`] and [`FileStorage::zero`] in bytes, a power of two:
    /// the logical block of a block device, 1 for a file.
    #[must_use]
    pub fn zeroing_block(&self) -> u32 {
        self.zeroing_block
    }

    /// The descriptor for transfers.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.direct.fd()
    }

    /// The descriptor for locks. No ring holds its open file description, so a lock ends with the
    /// process and not some time later.
    #[must_use]
    pub fn lock_fd(&self) -> BorrowedFd<'_> {
        self.buffered.fd()
    }

    /// Makes one transfer and waits for its end.
    ///
    /// # Safety
    /// Until this returns, the memory that `transfer` names is valid and not accessed otherwise.
    #[inline]
    pub(crate) unsafe fn transfer(&self, transfer: &Transfer) -> Outcome {
        // SAFETY: as promised by the caller.
        unsafe { self.direct.transfer(transfer) }
    }

    /// Reads into all of `bufs` from byte `pos` on, with any alignment; returns the bytes read,
    /// fewer only where the file ends.
    ///
    /// # Errors
    /// The errno of preadv(2).
    pub fn read_at(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        let total: usize = bufs.iter().map(|buf| buf.len()).sum();
        let aligned = |buf: &IoSliceMut<'_>| self.is_aligned(buf.as_ptr() as u64, buf.len());
        let direct = self.is_aligned_range(pos) && bufs.iter().all(aligned);
        let mut done = 0;
        let mut rest = bufs;
        while done < total {
            match self.descriptor(direct && done == 0).preadv(rest, pos + done as u64) {
                Ok(0) => break,
                Ok(count) => {
                    done += count;
                    IoSliceMut::advance_slices(&mut rest, count);
                }
                Err(error) => {
                    let range = ByteRange::new(pos, total as u64);
                    return Err(Error::from_os(error, Operation::Read).at(range));
                }
            }
        }
        Ok(done)
    }

    /// Writes all of `bufs` from byte `pos` on, with any alignment; a write past the end of the
    /// file grows it.
    ///
    /// # Errors
    /// The errno of pwritev(2); `EIO` when it wrote nothing.
    pub fn write_at(&self, bufs: &[IoSlice<'_>], pos: u64) -> Result<(), Error> {
        let aligned = |buf: &IoSlice<'_>| self.is_aligned(buf.as_ptr() as u64, buf.len());
        let direct = self.is_aligned_range(pos) && bufs.iter().all(aligned);
        self.write_all(&mut bufs.to_vec(), pos, direct)
    }

    /// Writes all of `bytes` from byte `pos` on through the page cache, which takes parts of blocks
    /// and does not round the file's end up to a block.
    pub(crate) fn write_buffered(&self, bytes: &[u8], pos: u64) -> Result<(), Error> {
        self.write_all(&mut [IoSlice::new(bytes)], pos, false)
    }

    /// Writes all of `bufs` from byte `pos` on; what a `direct` write leaves goes through the page
    /// cache, because it may begin inside a block.
    fn write_all(&self, mut bufs: &mut [IoSlice<'_>], pos: u64, direct: bool) -> Result<(), Error> {
        let total: usize = bufs.iter().map(|buf| buf.len()).sum();
        let fail = |e| Error::from_os(e, Operation::Write).at(ByteRange::new(pos, total as u64));
        let mut done = 0;
        while done < total {
            match self.descriptor(direct && done == 0).pwritev(bufs, pos + done as u64) {
                Ok(0) => return Err(fail(rustix::io::Errno::IO)),
                Ok(count) => {
                    done += count;
                    IoSlice::advance_slices(&mut bufs, count);
                }
                Err(error) => return Err(fail(error)),
            }
        }
        Ok(())
    }

    fn is_aligned_range(&self, pos: u64) -> bool {
        pos & (u64::from(self.align.offset) - 1) == 0
    }

    fn is_aligned(&self, base: u64, len: usize) -> bool {
        base & (u64::from(self.align.memory) - 1) == 0
            && len as u64 & (u64::from(self.align.offset) - 1) == 0
    }

    fn descriptor(&self, direct: bool) -> &Descriptor {
        if direct { &self.direct } else { &self.buffered }
    }

    /// Deallocates the storage of `range`, which then reads as zeros.
    ///
    /// # Errors
    /// The errno of fallocate(2): `EOPNOTSUPP` where the file system cannot, `EINVAL` for parts of
    /// a [`FileStorage::zeroing_block`].
    pub fn punch(&self, range: ByteRange) -> Result<(), Error> {
        self.allocate(
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            range,
            Operation::Discard,
        )
    }

    /// Makes `range` read as zeros and keeps its storage allocated.
    ///
    /// # Errors
    /// The errno of fallocate(2): `EOPNOTSUPP` where the file system cannot.
    pub fn zero(&self, range: ByteRange) -> Result<(), Error> {
        self.allocate(
            FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
            range,
            Operation::Zero,
        )
    }

    fn allocate(
        &self,
        mode: FallocateFlags,
        range: ByteRange,
        operation: Operation,
    ) -> Result<(), Error> {
        self.buffered
            .fallocate(mode, range.pos, range.len)
            .map_err(|e| Error::from_os(e, operation).at(range))
    }

    /// fdatasync(2), which covers every write that was completed before on any descriptor. It uses
    /// the buffered descriptor: the kernel reports a lost write once for each open file
    /// description, so a transfer with `RWF_DSYNC` on the same one could take the report away.
    ///
    /// # Errors
    /// The errno of fdatasync(2). A later call may succeed although data was lost (C51), so the
    /// caller has to latch the failure.
    pub fn sync(&self) -> Result<(), Error> {
        self.buffered.fdatasync().map_err(|e| Error::from_os(e, Operation::Flush))
    }

    /// Sets the length of the file to `bytes`. [`FileStorage::size`] does not change.
    ///
    /// # Errors
    /// The errno of ftruncate(2).
    pub fn set_len(&self, bytes: u64) -> Result<(), Error> {
        self.buffered.ftruncate(bytes).map_err(|e| Error::from_os(e, Operation::Write))
    }

    /// The present size of a block device in bytes, without waiting: lseek(2) would wait for a
    /// concurrent fallocate(2).
    ///
    /// # Errors
    /// The errno of ioctl(2) with `BLKGETSIZE64`: `ENOTTY` for a file.
    pub(crate) fn device_bytes(&self) -> Result<u64, Error> {
        const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
        let mut bytes = 0u64;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&self.buffered.fd());
        // SAFETY: the call writes one number of 64 bits.
        let result = unsafe { libc::ioctl(fd, BLKGETSIZE64, &raw mut bytes) };
        match result {
            0 => Ok(bytes),
            _ => Err(Error::from_io(&std::io::Error::last_os_error(), Operation::Status)),
        }
    }

    /// Appends at most `limit` extents of `range` as lseek(2) reports them; they cover `range`
    /// unless the limit was reached.
    ///
    /// # Errors
    /// The errno of lseek(2): `EINVAL` where the file system does not support the query, `EIO`;
    /// never `ENXIO`.
    pub fn extents(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        let mut pos = range.pos;
        let push = |extents: &mut Vec<ExtentStatus>, len: u64, hole: bool| {
            if len > 0 {
                extents.push(ExtentStatus::top(len, hole));
            }
            extents.len() < limit
        };
        while pos < range.end() {
            let data = self.seek(SeekFrom::Data(pos), range)?;
            if !push(extents, data - pos, true) || data == range.end() {
                return Ok(());
            }
            let hole = self.seek(SeekFrom::Hole(data), range)?;
            if !push(extents, hole - data, false) {
                return Ok(());
            }
            if hole <= pos {
                // The file system reports no progress: end the loop.
                push(extents, range.end() - pos, false);
                return Ok(());
            }
            pos = hole;
        }
        Ok(())
    }

    /// The position that lseek(2) returns, at most the end of `range`.
    fn seek(&self, to: SeekFrom, range: ByteRange) -> Result<u64, Error> {
        match self.buffered.seek(to) {
            Ok(pos) => Ok(pos.min(range.end())),
            Err(rustix::io::Errno::NXIO) => Ok(range.end()),
            Err(error) => Err(Error::from_os(error, Operation::Status).at(range)),
        }
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
        let refused = e == rustix::io::Errno::INVAL;
        Error::from_os(if refused { rustix::io::Errno::OPNOTSUPP } else { e }, Operation::Open)
    })?;
    let align = Alignment::of(fd.as_fd())?;
    Ok((fd, align))
}

/// Opens with `O_NOATIME`, so that a read updates no access time and the kernel reads no clock for
/// it; without it where the process does not own the file (`EPERM`, open(2)).
fn open_noatime(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    match rustix::fs::open(path, flags | OFlags::NOATIME, Mode::empty()) {
        Err(rustix::io::Errno::PERM) => rustix::fs::open(path, flags, Mode::empty()),
        opened => opened,
    }
}

/// Whether one small read with `RWF_NOWAIT` is supported: served, or refused with `EAGAIN` only.
fn probe_nowait(fd: BorrowedFd<'_>, align: Alignment) -> bool {
    let bytes = align.offset.max(512);
    let Some(mut buffer) = crate::memory::buffer_pool::AlignedBox::zeroed(bytes as usize) else {
        return false;
    };
    let mut slices = [IoSliceMut::new(&mut buffer)];
    let read = rustix::io::preadv2(fd, &mut slices, 0, rustix::io::ReadWriteFlags::NOWAIT);
    !matches!(read, Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL))
}

/// The logical block of a block device in bytes; 4096 if it reports none that is a power of two.
fn logical_block(device: &OwnedFd) -> u32 {
    let reported = rustix::fs::ioctl_blksszget(device).ok();
    reported.filter(|block| block.is_power_of_two()).unwrap_or(4096)
}

/// Probes with a hole behind the end of the file, which changes nothing. The hole keeps a distance
/// from the end, where a process that has just created the file may be about to write.
fn probe_punch_hole(file: &OwnedFd, size: u64) -> bool {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, (size + 1).next_multiple_of(1 << 20), 1 << 20).is_ok()
}
