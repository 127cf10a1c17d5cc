//! The bytes of a file, a block device or a simulated disk, and of any other storage.
//!
//! Invariant: no code outside this folder and the queues assumes that a storage has a descriptor.

mod fiemap;
pub(crate) mod untorn_limits;
pub(crate) mod write_life;
pub(crate) mod open_options;
pub(crate) mod device_claim;
mod opening;
pub(crate) mod file;
pub(crate) mod file_calls;
pub(crate) mod durable_names;
#[cfg(feature = "sim")]
pub(crate) mod sim;
mod read_modify_write;
mod exact_write;

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::queue::pending_transfer::AsyncTransfers;
use crate::read_ahead::shared_inode::SharedInode;
use crate::storage::untorn_limits::UntornLimits;
use crate::types::alignment::Alignment;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::request::{ExtentStatus, Flags};

/// The bytes that a device, or a part of it, is stored in. Every call but [`Storage::descriptor`]
/// may wait, so an engine makes them on worker threads; its own transfers reach the storage through
/// an [`crate::IoQueue`].
///
/// The trait is safe: whatever a storage returns, the engine accesses only the request's memory.
pub trait Storage: Send + Sync {
    /// The properties, which do not change while the storage is open.
    fn properties(&self) -> StorageProperties;

    /// The version of the bytes, for a storage that is only read and can be exchanged as a whole while nothing has it open:
    /// two that differ have different bytes. One line. `None`: nothing is known of versions.
    fn version(&self) -> Option<String> {
        None
    }

    /// The present size in bytes, not rounded to any block. It does not wait for other calls.
    ///
    /// # Errors
    /// The errno of fstat(2) or ioctl(2).
    fn size(&self) -> Result<u64, Error>;

    /// One read into `bufs` from byte `pos` on, of any alignment. Returns the bytes read; fewer
    /// than asked for where the storage ends or the read was cut short, 0 only at the end.
    ///
    /// # Errors
    /// The errno of preadv2(2), never `EINTR`.
    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error>;

    /// Like [`Storage::read`]; [`Flags::HIPRI`] is a hint, and the other flags do not concern reads.
    ///
    /// # Errors
    /// Like [`Storage::read`].
    fn read_with(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        pos: u64,
        _flags: Flags,
    ) -> Result<usize, Error> {
        self.read(bufs, pos)
    }

    /// One write of `bufs` from byte `pos` on, of any alignment. Returns the bytes written, fewer
    /// than asked for where the write was cut short. A write past the end grows a file. With
    /// [`Flags::DSYNC`] the bytes are durable; [`Flags::HIPRI`] is a hint.
    ///
    /// # Errors
    /// The errno of pwritev2(2), never `EINTR`.
    fn write(&self, bufs: &[IoSlice<'_>], pos: u64, flags: Flags) -> Result<usize, Error>;

    /// Makes every write durable that was completed before.
    ///
    /// # Errors
    /// The errno of fdatasync(2). A later call may succeed although data was lost (C51), so the
    /// caller has to latch the failure, unless [`Storage::keeps_unsynced`].
    fn sync(&self) -> Result<(), Error>;

    /// Whether all completed writes that no [`Storage::sync`] has made durable are still kept, although
    /// one has failed: then a later one that succeeds makes them durable.
    fn keeps_unsynced(&self) -> bool {
        false
    }

    /// Deallocates the storage of `range`, which then reads as zeros.
    ///
    /// # Errors
    /// The errno of fallocate(2): `EOPNOTSUPP` where the storage cannot, `EINVAL` for parts of a
    /// [`StorageProperties::zeroing_block`].
    fn punch(&self, range: ByteRange) -> Result<(), Error> {
        Err(Error::new(libc::EOPNOTSUPP, Operation::Discard).at(range))
    }

    /// Makes `range` read as zeros and keeps its storage allocated.
    ///
    /// # Errors
    /// Like [`Storage::punch`].
    fn zero(&self, range: ByteRange) -> Result<(), Error> {
        Err(Error::new(libc::EOPNOTSUPP, Operation::Zero).at(range))
    }

    /// Allocates storage for the holes in `range`, which still read as zeros and are not data to
    /// [`Storage::extents`]. Other bytes and the size stay as they are. After an error some of them
    /// may have storage.
    ///
    /// # Errors
    /// The errno of fallocate(2): `ENOSPC`; `EOPNOTSUPP` where the storage cannot.
    fn preallocate(&self, range: ByteRange) -> Result<(), Error> {
        Err(Error::new(libc::EOPNOTSUPP, Operation::Write).at(range))
    }

    /// Appends the ranges that touch `range` and have storage that was never written.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the storage cannot tell, `EFBIG` for more ranges than it lists.
    fn unwritten(&self, range: ByteRange, _ranges: &mut Vec<ByteRange>) -> Result<(), Error> {
        Err(Error::new(libc::EOPNOTSUPP, Operation::Status).at(range))
    }

    /// The space that the storage takes, and that is left for it.
    ///
    /// # Errors
    /// The errno of fstat(2) or fstatfs(2); `EOPNOTSUPP` where the storage cannot tell.
    fn space(&self) -> Result<StorageSpace, Error> {
        Err(Error::new(libc::EOPNOTSUPP, Operation::Status))
    }

    /// Sets the size to `bytes`.
    ///
    /// # Errors
    /// The errno of ftruncate(2): `EINVAL` for a storage of a fixed size.
    fn set_len(&self, _bytes: u64) -> Result<(), Error> {
        Err(Error::new(libc::EINVAL, Operation::Write))
    }

    /// Appends at most `limit` extents of `range`; they cover `range` unless the limit was reached. A storage that knows
    /// no holes has one extent of data.
    ///
    /// # Errors
    /// The errno of lseek(2): `EINVAL` where the storage does not support the query, `EIO`.
    fn extents(
        &self,
        range: ByteRange,
        _limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        extents.push(ExtentStatus::top(range.len, false));
        Ok(())
    }

    /// The descriptor by which a queue of the kernel reaches the storage. Without one, transfers go
    /// to [`Storage::transfers`], to a queue that was made for the storage, or to the worker threads
    /// ([`crate::Config::nowait_first`] off).
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The storage as one that makes transfers itself, on threads of its own, as one behind a network
    /// does; then it has no descriptor. A durable write needs no sync after it.
    fn transfers(&self) -> Option<Arc<dyn AsyncTransfers>> {
        None
    }

    /// The limits of writes that are not torn ([`Flags::UNTORN`]); `None` where a loss of power may tear
    /// any.
    fn untorn(&self) -> Option<UntornLimits> {
        None
    }

    /// Whether the kernel drops what a transfer with [`Flags::DONT_CACHE`] leaves in the page cache.
    fn drops_cached(&self) -> bool {
        false
    }

    /// The file, as all handles of it in this process share it.
    #[doc(hidden)]
    fn inode(&self) -> Option<Arc<SharedInode>> {
        None
    }

    /// The simulated device whose queues make the transfers, and the number of the file there.
    #[cfg(feature = "sim")]
    fn simulated(&self) -> Option<(Arc<crate::sim::SimDevice>, u16)> {
        None
    }

    /// The descriptor that claims a block device for this process alone (open(2), `O_EXCL`), if
    /// there is one.
    fn claim(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// The properties of a storage.
#[derive(Clone, Copy, Debug)]
pub struct StorageProperties {
    /// The alignment of transfers that bypass the page cache, as all transfers of a queue have to;
    /// [`Alignment::NONE`] where there is no such requirement. A call of [`Storage::read`] or
    /// [`Storage::write`] that is not aligned so goes through the page cache.
    pub align: Alignment,
    /// Whether it was opened for reading only.
    pub read_only: bool,
    /// Whether transfers with `RWF_NOWAIT` are supported.
    pub nowait: bool,
    /// Whether a transfer may keep the thread that submits it to a queue waiting, or one of the threads that the queue has for
    /// all storages: each request goes to a worker then. So it is for a file that the kernel reads and writes without
    /// `RWF_NOWAIT`.
    pub waits_in_queue: bool,
    /// Whether storage can be deallocated, and zeros made without writing them.
    pub punch_hole: bool,
    /// Whether it is a block device, whose size may change, and not a file. If a device has no
    /// command for zeroing, the kernel writes zeros to it (`blkdev_issue_zeroout`).
    pub device: bool,
    /// Granularity of [`Storage::punch`] and [`Storage::zero`] in bytes, a power of two: the
    /// logical block of a block device, 1 for a file.
    pub zeroing_block: u32,
    /// Whether the kernel makes several writes with `RWF_DSYNC` durable together: each passes
    /// through the cache of the one block device below (FUA), or shares a flush of it with others
    /// (block/blk-flush.c). Other file systems sync the file for each of them.
    pub shares_syncs: bool,
}

impl StorageProperties {
    /// Properties of a file that is written to by calls that wait, without holes: the others are changed in a copy.
    #[must_use]
    pub const fn new(align: Alignment) -> Self {
        Self {
            align,
            read_only: false,
            nowait: false,
            waits_in_queue: false,
            punch_hole: false,
            device: false,
            zeroing_block: 1,
            shares_syncs: true,
        }
    }
}

/// Space of a file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageSpace {
    /// Allocated to the file.
    pub allocated: u64,
    /// Free in its file system, for any user.
    pub free: u64,
}

/// [`Storage::extents`] by lseek(2): `seek` returns the position of the first data from a position
/// on, or of the first hole, or `None` if there is none.
fn extents_by_seek(
    range: ByteRange,
    limit: usize,
    extents: &mut Vec<ExtentStatus>,
    seek: impl Fn(u64, Wanted) -> Result<Option<u64>, Error>,
) -> Result<(), Error> {
    let seek = |pos, wanted| {
        let found = seek(pos, wanted).map_err(|error| error.at(range))?;
        Ok(found.unwrap_or(u64::MAX).min(range.end()))
    };
    let push = |extents: &mut Vec<ExtentStatus>, len: u64, hole: bool| {
        if len > 0 {
            extents.push(ExtentStatus::top(len, hole));
        }
        extents.len() < limit
    };
    let mut pos = range.pos;
    while pos < range.end() {
        let data = seek(pos, Wanted::Data)?;
        if !push(extents, data - pos, true) || data == range.end() {
            return Ok(());
        }
        let hole = seek(data, Wanted::Hole)?;
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

/// The goal of a seek.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Data,
    Hole,
}
