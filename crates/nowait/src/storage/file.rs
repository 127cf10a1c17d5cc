//! An open file or block device, and the calls to it that may wait.
//!
//! Invariant: `direct` and `buffered` are descriptors of the same file; the properties queried at
//! open (alignment, supported operations) do not change later.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, Stat};
use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};

use crate::queue::preadv2;
use crate::read_ahead::ahead_reads::AheadSource;
use crate::read_ahead::shared_inode::{InodeNumber, SharedInode};
use crate::storage::open_options::OpenOptions;
use crate::storage::opening::{self, Opened, is_device};
use crate::storage::untorn_limits::UntornLimits;
use crate::storage::{Storage, StorageProperties, StorageSpace, Wanted, extents_by_seek, fiemap};
use crate::types::alignment::Alignment;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::io_cursor::ReadCursor;
use crate::types::request::{ExtentStatus, Flags};

/// statfs(2).
const FUSE_SUPER_MAGIC: libc::c_long = 0x6573_5546;

/// An open file or block device.
pub struct FileStorage {
    /// The descriptor for transfers, if it is another one.
    direct: Option<OwnedFd>,
    /// This file without `O_DIRECT`, for transfers that direct I/O cannot do: parts of blocks,
    /// and the last block of a file that ends inside it. Syncs use it too; see
    /// [`FileStorage::sync`].
    pub(super) buffered: Arc<File>,
    /// The file offset of the descriptor that appends use: `buffered`, or where pwritev2(2) is forbidden another one.
    pub(super) appending: Mutex<Option<File>>,
    /// The process that has locked the file through this handle; 0: none.
    pub(super) locked_by: AtomicU32,
    /// The file, which other handles of the process may have open.
    pub(super) inode: Arc<SharedInode>,
    properties: StorageProperties,
    untorn: Option<UntornLimits>,
    /// [`Flags::DONT_CACHE`] where transfers may have it.
    cache_flags: Flags,
}

impl FileStorage {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// The errno of open(2). `EISDIR` for a directory, `ENOTBLK` for anything else that is neither
    /// a regular file nor a block device, `ENOMEDIUM` for a block device of 0 bytes, such as a loop
    /// device without a file, `ESTALE` when the path was replaced during the call, `EOPNOTSUPP`
    /// when [`Direct::On`](crate::Direct::On) is not possible, `EBUSY` for a block device that is opened for writing
    /// and is mounted or otherwise in use. No error leaves a change in the file.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        let opened = opening::open(path, options)?;
        Self::with(opened, options, probe_punch_hole)
    }

    /// The regular file `file`, which is at `path`, opened a second time for transfers. All else, and locks, are of the open
    /// file description of `file`, so that one descriptor less is needed than by [`FileStorage::open`] beside it. No ring
    /// may have that description.
    ///
    /// # Errors
    /// Like [`FileStorage::open`]; `ESTALE` if another file is at `path`, `EINVAL` for a block device, and if `file` is not
    /// open as `options` say: for reading only, or for both.
    pub fn of_open_file(file: Arc<File>, path: &Path, options: OpenOptions) -> Result<Self, Error> {
        Self::with(opening::open_beside(file, path, options)?, options, probe_punch_hole)
    }

    /// Opens the file at `path` as one that grows: parts of pages are written through the page cache,
    /// so that other writers of the same page lose nothing, and nothing is padded. Nothing behind its
    /// end is probed, where others may be writing.
    ///
    /// # Errors
    /// Like [`FileStorage::open`]; the errno of ftruncate(2) where `options` truncate.
    pub(crate) fn open_file(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        let mut opened = opening::open(path, options)?;
        if !opened.device && opened.align != Alignment::NONE {
            let page = u32::try_from(rustix::param::page_size()).unwrap_or(u32::MAX);
            opened.align.offset = opened.align.offset.max(page);
        }
        let file = Self::with(opened, options, |_, _| true)?;
        // With `RWF_NOWAIT` the calls are there.
        let may_lack_flags = !file.properties.nowait && !file.properties.device;
        if may_lack_flags
            && !options.read_only
            && preadv2::is_write_forbidden(file.buffered.as_fd())
        {
            let appending = file.open_to_append()?;
            *file.appending.lock().unwrap_or_else(PoisonError::into_inner) = Some(appending);
        }
        Ok(file)
    }

    fn with(
        opened: Opened,
        options: OpenOptions,
        punches: impl FnOnce(&File, u64) -> bool,
    ) -> Result<Self, Error> {
        let Opened { buffered, direct, align, stat, device } = opened;
        let size = size_of(&buffered, device)?;
        if device && size == 0 {
            return Err(Error::new(libc::ENOMEDIUM, Operation::Open));
        }
        let read_only = options.read_only;
        let has_flags = !preadv2::is_write_forbidden(direct.as_fd());
        let nowait =
            has_flags && !is_on_fuse(direct.as_fd()) && probe_nowait(direct.as_fd(), align);
        let properties = StorageProperties {
            align,
            read_only,
            nowait,
            waits_in_queue: !nowait,
            punch_hole: !read_only && (device || punches(&buffered, size)),
            device,
            zeroing_block: if device { logical_block(&buffered) } else { 1 },
            // A file system on several devices, or on none, has a number without a major.
            shares_syncs: device || libc::major(stat.st_dev) != 0,
        };
        let inode = SharedInode::of(inode_number(&stat, device));
        if options.truncate && !device {
            buffered.set_len(0).map_err(|e| Error::from_io(&e, Operation::Open))?;
            inode.changed(ByteRange::new(0, u64::MAX));
        }
        let appending = Mutex::new(None);
        let (untorn, cache_flags) = match align == Alignment::NONE {
            true => (None, probe_dont_cache(&buffered)),
            false => (UntornLimits::of(direct.as_fd(), align).filter(|_| has_flags), Flags::NONE),
        };
        if options.untorn && untorn.is_none() {
            return Err(Error::new(libc::EOPNOTSUPP, Operation::Open));
        }
        if let Some(life) = options.write_life {
            life.set(buffered.as_fd());
        }
        Ok(Self {
            direct: Some(direct),
            buffered,
            appending,
            locked_by: AtomicU32::new(0),
            inode,
            properties,
            untorn,
            cache_flags,
        })
    }

    /// A file or block device that was opened elsewhere, without `O_DIRECT`. Nothing is probed: by
    /// its properties it supports neither `RWF_NOWAIT`, so that all of its requests go to workers, nor holes.
    ///
    /// # Errors
    /// `EISDIR` and `ENOTBLK` as [`FileStorage::open`]; the errno of fstat(2) or fcntl(2).
    pub fn of(buffered: Arc<File>) -> Result<Self, Error> {
        let os = |e| Error::from_os(e, Operation::Open);
        let stat = rustix::fs::fstat(&buffered).map_err(os)?;
        let device = is_device(&stat)?;
        let access = rustix::fs::fcntl_getfl(&buffered).map_err(os)? & OFlags::ACCMODE;
        let properties = StorageProperties {
            align: Alignment::NONE,
            read_only: access == OFlags::RDONLY,
            nowait: false,
            waits_in_queue: true,
            punch_hole: false,
            device,
            zeroing_block: if device { logical_block(&buffered) } else { 1 },
            shares_syncs: false,
        };
        let appending = Mutex::new(None);
        let inode = SharedInode::of(inode_number(&stat, device));
        let (untorn, cache_flags) = (None, Flags::NONE);
        Ok(Self {
            direct: None,
            buffered,
            appending,
            locked_by: AtomicU32::new(0),
            inode,
            properties,
            untorn,
            cache_flags,
        })
    }

    /// The descriptor for locks. No ring holds its open file description, so a lock ends with the
    /// process and not some time later.
    #[must_use]
    pub fn lock_fd(&self) -> BorrowedFd<'_> {
        self.buffered.as_fd()
    }

    /// The descriptor for a transfer of the bytes from `pos` on, with segments of these addresses
    /// and lengths.
    fn descriptor_for(
        &self,
        pos: u64,
        offset: u32,
        mut segments: impl Iterator<Item = (*const u8, usize)>,
    ) -> BorrowedFd<'_> {
        let (memory, offset) = (self.properties.align.memory as usize - 1, offset as usize - 1);
        let aligned = pos as usize & offset == 0
            && segments.all(|(base, len)| base as usize & memory == 0 && len & offset == 0);
        let direct = self.direct.as_ref().filter(|_| aligned);
        direct.map_or(self.buffered.as_fd(), AsFd::as_fd)
    }

    fn allocate(
        &self,
        mode: FallocateFlags,
        range: ByteRange,
        operation: Operation,
    ) -> Result<(), Error> {
        let mode = mode | FallocateFlags::KEEP_SIZE;
        let done =
            retry_on_intr(|| rustix::fs::fallocate(&self.buffered, mode, range.pos, range.len));
        self.inode.changed(range);
        done.map_err(|e| Error::from_os(e, operation).at(range))
    }
}

impl Storage for FileStorage {
    fn properties(&self) -> StorageProperties {
        self.properties
    }

    fn size(&self) -> Result<u64, Error> {
        size_of(&self.buffered, self.properties.device)
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        self.read_with(bufs, pos, Flags::NONE)
    }

    fn read_with(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        pos: u64,
        flags: Flags,
    ) -> Result<usize, Error> {
        let passed = Flags::HIPRI | self.cache_flags;
        let segments = bufs.iter().map(|buf| (buf.as_ptr(), buf.len()));
        let fd = self.descriptor_for(pos, self.properties.align.read_offset, segments);
        preadv2::read(fd, bufs, pos, flags.rw_flags(passed)).map_err(|error| {
            let len = bufs.iter().map(|buf| buf.len() as u64).sum();
            Error::from_os(error, Operation::Read).at(ByteRange::new(pos, len))
        })
    }

    fn write(&self, bufs: &[IoSlice<'_>], pos: u64, flags: Flags) -> Result<usize, Error> {
        let segments = bufs.iter().map(|buf| (buf.as_ptr(), buf.len()));
        let fd = self.descriptor_for(pos, self.properties.align.offset, segments);
        let passed = Flags::OF_TRANSFERS | self.cache_flags;
        let written = preadv2::write(fd, bufs, pos, flags.rw_flags(passed));
        let range = ByteRange::new(pos, bufs.iter().map(|buf| buf.len() as u64).sum());
        self.inode.changed(range);
        written.map_err(|error| Error::from_os(error, Operation::Write).at(range))
    }

    /// fdatasync(2), which covers every write that was completed before on any descriptor. It uses
    /// the buffered descriptor: the kernel reports a lost write once for each open file
    /// description, so a transfer with `RWF_DSYNC` on the same one could take the report away.
    fn sync(&self) -> Result<(), Error> {
        retry_on_intr(|| rustix::fs::fdatasync(&self.buffered))
            .map_err(|e| Error::from_os(e, Operation::Flush))
    }

    fn punch(&self, range: ByteRange) -> Result<(), Error> {
        self.allocate(FallocateFlags::PUNCH_HOLE, range, Operation::Discard)
    }

    fn zero(&self, range: ByteRange) -> Result<(), Error> {
        self.allocate(FallocateFlags::ZERO_RANGE, range, Operation::Zero)
    }

    fn preallocate(&self, range: ByteRange) -> Result<(), Error> {
        self.allocate(FallocateFlags::empty(), range, Operation::Write)
    }

    fn unwritten(&self, range: ByteRange, ranges: &mut Vec<ByteRange>) -> Result<(), Error> {
        fiemap::unwritten(self.buffered.as_fd(), range, ranges)
    }

    fn space(&self) -> Result<StorageSpace, Error> {
        let os = |error| Error::from_os(error, Operation::Status);
        let stat = rustix::fs::fstat(&self.buffered).map_err(os)?;
        let system = rustix::fs::fstatvfs(&self.buffered).map_err(os)?;
        Ok(StorageSpace {
            allocated: stat.st_blocks.cast_unsigned() * 512,
            free: system.f_bavail.saturating_mul(system.f_frsize),
        })
    }

    fn set_len(&self, bytes: u64) -> Result<(), Error> {
        let done = retry_on_intr(|| rustix::fs::ftruncate(&self.buffered, bytes));
        self.inode.changed(ByteRange::new(bytes, u64::MAX));
        done.map_err(|e| Error::from_os(e, Operation::Write))
    }

    fn extents(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        extents_by_seek(range, limit, extents, |pos, wanted| {
            let to = match wanted {
                Wanted::Data => SeekFrom::Data(pos),
                Wanted::Hole => SeekFrom::Hole(pos),
            };
            match retry_on_intr(|| rustix::fs::seek(&self.buffered, to)) {
                Ok(found) => Ok(Some(found)),
                Err(Errno::NXIO) => Ok(None),
                Err(error) => Err(Error::from_os(error, Operation::Status)),
            }
        })
    }

    fn untorn(&self) -> Option<UntornLimits> {
        self.untorn
    }

    fn drops_cached(&self) -> bool {
        self.cache_flags != Flags::NONE
    }

    fn inode(&self) -> Option<Arc<SharedInode>> {
        Some(self.inode.clone())
    }

    fn claim(&self) -> Option<BorrowedFd<'_>> {
        (self.properties.device && !self.properties.read_only).then_some(self.buffered.as_fd())
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.direct.as_ref().map_or(self.buffered.as_fd(), AsFd::as_fd))
    }
}

impl AheadSource for FileStorage {
    /// The read ends where the file does: the kernel would go on behind it, as for
    /// `BlockDevice::room`.
    fn fill(&self, pos: u64, memory: &mut [u8]) -> Option<usize> {
        let storage: &dyn Storage = self;
        let room = storage.size().ok()?.saturating_sub(pos);
        let len = memory.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        let mut rest = ReadCursor::from(&mut memory[..len]);
        storage.read_at(pos, &mut rest).ok()?;
        Some(len - rest.len() as usize)
    }
}

fn inode_number(stat: &Stat, device: bool) -> InodeNumber {
    match device {
        true => InodeNumber::Device(stat.st_rdev),
        false => InodeNumber::File { device: stat.st_dev, number: stat.st_ino },
    }
}

/// The present size of a file or a block device in bytes, without waiting: lseek(2) would wait for
/// a concurrent fallocate(2) on a device.
fn size_of(fd: impl AsFd, device: bool) -> Result<u64, Error> {
    const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
    if !device {
        let stat = rustix::fs::fstat(fd).map_err(|e| Error::from_os(e, Operation::Status))?;
        return Ok(stat.st_size.cast_unsigned());
    }
    let mut bytes = 0u64;
    // SAFETY: the call writes one number of 64 bits.
    match unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), BLKGETSIZE64, &raw mut bytes) } {
        0 => Ok(bytes),
        _ => Err(Error::from_io(&std::io::Error::last_os_error(), Operation::Status)),
    }
}

/// Whether the file is on FUSE, whose direct I/O takes `RWF_NOWAIT` and waits for the process that has the file system
/// (fs/fuse/file.c), also within io_uring_enter(2).
fn is_on_fuse(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|found| found.f_type == FUSE_SUPER_MAGIC)
}

/// Whether one small read with `RWF_NOWAIT` is supported: served, or refused with `EAGAIN` only.
fn probe_nowait(fd: BorrowedFd<'_>, align: Alignment) -> bool {
    let bytes = align.offset.max(512);
    let Some(mut buffer) = crate::memory::buffer_pool::AlignedBox::zeroed(bytes as usize) else {
        return false;
    };
    let mut slices = [IoSliceMut::new(&mut buffer)];
    let read = rustix::io::preadv2(fd, &mut slices, 0, ReadWriteFlags::NOWAIT);
    !read.is_err_and(|error| {
        matches!(error, Errno::OPNOTSUPP | Errno::INVAL) || preadv2::is_forbidden(error)
    })
}

/// [`Flags::DONT_CACHE`] if a small read through the page cache may have it.
fn probe_dont_cache(file: &File) -> Flags {
    let mut bytes = [0; 512];
    let flags = ReadWriteFlags::from_bits_retain(libc::RWF_DONTCACHE as u32);
    match rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut bytes)], 0, flags) {
        Ok(_) => Flags::DONT_CACHE,
        Err(_) => Flags::NONE,
    }
}

/// The logical block of a block device in bytes; 4096 if it reports none that is a power of two.
fn logical_block(device: impl AsFd) -> u32 {
    let reported = rustix::fs::ioctl_blksszget(device).ok();
    reported.filter(|block| block.is_power_of_two()).unwrap_or(4096)
}

/// Probes with a hole behind the end of the file, which changes nothing. The hole keeps a distance
/// from the end, where a process that has just created the file may be about to write.
fn probe_punch_hole(file: &File, size: u64) -> bool {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, (size + 1).next_multiple_of(1 << 20), 1 << 20).is_ok()
}
