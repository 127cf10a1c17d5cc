//! An open image: the state that all engines of one device share.
//!
//! Invariant: after a failed flush every later flush fails until the device is reopened (C51), unless
//! the storage says that it has lost nothing.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::block::allocate_ahead::{AheadTarget, AllocateAhead};
use crate::block::allocation_cache::AllocationCache;
use crate::block::block_map::{BlockMap, Extent, Intent, LinearMap, WouldBlock};
use crate::block::device_file::DeviceFile;
use crate::block::flush_coalescer::FlushCoalescer;
use crate::block::range_lock::RangeLocks;
use crate::block::waiting_flushes::WaitingFlushes;
use crate::queue::{IoQueue, QueueFile, Uring};
use crate::read_ahead::ahead_reads::{AheadReads, AheadSource, Served};
use crate::read_ahead::shared_inode::{self, SharedInode};
use crate::sim_hooks::injected_bug;
use crate::sim_hooks::injected_bug::EngineBug;
use crate::storage::file::FileStorage;
use crate::storage::open_options::OpenOptions;
use crate::storage::untorn_limits::UntornLimits;
use crate::storage::{Storage, StorageProperties};
use crate::types::alignment::Alignment;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::io_cursor::ReadCursor;
use crate::types::request::{ExtentStatus, Flags};
use crate::types::weight::{DEFAULT_WEIGHT, WEIGHTS};

/// The read-ahead of a device.
pub(crate) struct ReadAhead {
    /// The streams of all handles of the file.
    reads: Arc<AheadReads>,
    source: Arc<dyn AheadSource>,
}

impl ReadAhead {
    /// Like [`AheadReads::note`], of a device whose end was last seen at byte `end`.
    pub(crate) fn note(&self, range: ByteRange, end: u64) {
        self.reads.note(&self.source, range, end.max(range.end()));
    }

    /// Like [`AheadReads::serve`].
    pub(crate) fn serve(
        &self,
        range: ByteRange,
        memory: &mut ReadCursor<'_>,
        must_not_wait: bool,
    ) -> Served {
        self.reads.serve(range, memory, must_not_wait)
    }
}

/// An open file, image or block device, with the map `M` of its bytes.
pub struct BlockDevice<M: BlockMap + ?Sized> {
    /// The storage that is written to.
    primary: Arc<dyn Storage>,
    /// The other storages that extents may lie in, by [`crate::Extent::file`] from 1 on.
    backing: Vec<Arc<dyn Storage>>,
    pub(crate) ranges: RangeLocks,
    align: Alignment,
    /// The size of a disk, where requests are cut off or refused; of a file that grows the size that
    /// was last seen.
    limit: AtomicU64,
    /// The primary storage, if the device was opened as a file.
    pub(super) file: Option<DeviceFile>,
    /// Each write goes to the end of the file.
    pub(super) appends: bool,
    read_only: bool,
    nowait: bool,
    waits_in_queue: bool,
    /// Shared with the device that this one was made from, or that is made from it.
    pub(super) flushes: Arc<FlushCoalescer>,
    ahead: AllocateAhead,
    /// Its share of a pool of workers, one of [`WEIGHTS`].
    weight: AtomicU32,
    /// The file whose bytes the device has at the same positions, if it was opened by its path.
    inode: Option<Arc<SharedInode>>,
    /// Where sequential reads are read ahead from, if they are.
    read_ahead: Option<ReadAhead>,
    /// Flushes of engines that wait for the next sync.
    pub(crate) waiting: WaitingFlushes,
    /// The first bytes of the device must not become these; empty if there is no such rule.
    forbidden: &'static [u8],
    /// The last field: an `Arc<BlockDevice<M>>` is also an `Arc<BlockDevice<dyn BlockMap>>`.
    pub(crate) map: M,
}

impl BlockDevice<AllocationCache> {
    /// Opens the image at `path`. With [`OpenOptions::cache_holes`] its allocation cache is empty at
    /// first; see [`BlockDevice::scan`].
    ///
    /// # Errors
    /// Like [`FileStorage::open`]; `EINVAL` for options of files, which make one or append.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        options.check(true)?;
        let storage = Arc::new(FileStorage::open(path, options)?);
        Ok(Self::raw(storage.clone(), options)?.of_file(storage, options))
    }

    /// The device whose bytes are those of `storage`, with an empty allocation cache if `options` say
    /// so, and else with none; see [`BlockDevice::scan`]. Of `options` only those of the cache count.
    ///
    /// # Errors
    /// Like [`Storage::size`].
    pub fn raw(storage: Arc<dyn Storage>, options: OpenOptions) -> Result<Self, Error> {
        let map = AllocationCache::new(storage.size()?, options.cache_holes);
        let mut map = map.allocating_ahead(options.allocate_ahead);
        if storage.properties().device {
            map = map.without_end();
        }
        Self::linear(storage, map)
    }

    /// Fills the allocation cache from the file system, if the device has one
    /// ([`OpenOptions::cache_holes`]). To be called after the image was locked and before it is used:
    /// requests through this `BlockDevice` keep the cache correct, writes of others do not.
    pub fn scan(&self) {
        self.map.scan(&*self.primary);
    }
}

impl BlockDevice<LinearMap> {
    /// Opens the image at `path` and treats every byte as mapped.
    ///
    /// # Errors
    /// Like [`BlockDevice::open`].
    pub fn open_mapped(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        options.check(true)?;
        let storage = Arc::new(FileStorage::open(path, options)?);
        Ok(Self::linear(storage.clone(), LinearMap)?.of_file(storage, options))
    }
}

impl<M: BlockMap> BlockDevice<M> {
    /// The same, of which `storage` is the file, opened with `options`.
    pub(super) fn of_file(mut self, storage: Arc<FileStorage>, options: OpenOptions) -> Self {
        self.inode = storage.inode();
        if options.read_ahead && self.is_direct() {
            let reads = self.inode.as_deref().map(SharedInode::ahead);
            // A handle sees what others have changed before it was opened.
            reads.iter().for_each(|reads| reads.forget(ByteRange::new(0, u64::MAX)));
            self.read_ahead = reads.map(|reads| ReadAhead { reads, source: storage });
        }
        self
    }

    /// The device whose bytes are those of `storage`, found by `map`.
    pub(crate) fn linear(storage: Arc<dyn Storage>, map: M) -> Result<Self, Error> {
        let (size, read_only) = (storage.size()?, storage.properties().read_only);
        let inode = storage.inode();
        let mut device = Self::mapped(storage, Vec::new(), size, read_only, map);
        device.inode = inode;
        Ok(device)
    }

    /// A device of `size` bytes, which `map` finds in the storages `primary` and `backing`. Its
    /// alignment is the strictest of all; [`Alignment::NONE`] if one of them uses the page cache.
    #[must_use]
    pub fn mapped(
        primary: Arc<dyn Storage>,
        backing: Vec<Arc<dyn Storage>>,
        size: u64,
        read_only: bool,
        map: M,
    ) -> Self {
        let mut properties = primary.properties();
        for storage in backing.iter().map(|storage| storage.properties()) {
            properties.align = properties.align.strictest(storage.align);
            properties.nowait &= storage.nowait;
            properties.waits_in_queue |= storage.waits_in_queue;
        }
        let StorageProperties { align, nowait, waits_in_queue, .. } = properties;
        let (ranges, flushes) = (RangeLocks::new(), Arc::default());
        let limit = AtomicU64::new(size);
        Self {
            primary,
            backing,
            ranges,
            align,
            limit,
            file: None,
            appends: false,
            read_only,
            nowait,
            waits_in_queue,
            flushes,
            ahead: AllocateAhead::default(),
            weight: AtomicU32::new(DEFAULT_WEIGHT),
            inode: None,
            read_ahead: None,
            waiting: WaitingFlushes::default(),
            forbidden: &[],
            map,
        }
    }

    /// The same, but refuses (`EPERM`) every write that could make the device begin with `bytes`:
    /// for an image whose format was guessed because it does not. None of `bytes` is 0.
    #[must_use]
    pub fn with_forbidden_prefix(mut self, bytes: &'static [u8]) -> Self {
        self.forbidden = bytes;
        self
    }
}

impl<M: BlockMap + ?Sized> BlockDevice<M> {
    /// This device's storages, size, rights and flushes behind another `map`.
    pub(super) fn with_map<N: BlockMap>(&self, map: N) -> BlockDevice<N> {
        let (primary, backing) = (self.primary.clone(), self.backing.clone());
        let mut device = BlockDevice::mapped(primary, backing, self.limit(), self.read_only, map);
        device.set_weight(self.weight());
        (device.flushes, device.forbidden) = (self.flushes.clone(), self.forbidden);
        device.inode = self.inode.clone();
        device
    }

    pub(crate) fn forbidden_prefix(&self) -> &'static [u8] {
        self.forbidden
    }

    /// Size of the device in bytes, not rounded to any block, as of the open, the last
    /// [`BlockDevice::refresh`] or [`BlockDevice::grow`]. That of a file that grows is asked of the
    /// file system each time; 0 if it cannot tell, and then [`BlockDevice::metadata`] says why.
    #[inline]
    #[must_use]
    pub fn size(&self) -> u64 {
        let Some(file) = self.growing() else { return self.limit() };
        let size = file.size().unwrap_or(0);
        self.limit.store(size, Ordering::Relaxed);
        size
    }

    /// The size of a disk, and of a file that grows the one that was last seen.
    #[inline]
    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Queries the size of a raw device or file again, without waiting, and returns the size of this
    /// device. If the storage has another size, later requests are checked against that, and the
    /// map knows nothing any more. A file that has become smaller does not count: it was cut off
    /// behind this device's back, and what is missing is `EIO` (C55). The size of an image in another
    /// format changes only by [`BlockDevice::grow`].
    ///
    /// # Errors
    /// The errno of fstat(2) or ioctl(2); `ENODEV` for a device of 0 bytes, such as one that was
    /// unplugged. The size is unchanged then.
    pub fn refresh(&self) -> Result<u64, Error> {
        let before = self.limit();
        if self.map.image().is_some() {
            return Ok(before);
        }
        let now = self.primary.size()?;
        if self.growing().is_some() {
            return Ok(now);
        }
        match self.primary.properties().device {
            true if now == 0 => return Err(Error::new(libc::ENODEV, Operation::Status)),
            true if now != before => self.set_size(now),
            false if now > before => self.set_size(now),
            _ => {}
        }
        Ok(self.size())
    }

    /// Makes the device `size` bytes large, at least as many as it has; the new ones read as zeros.
    /// A block device has the size that it was given elsewhere. It blocks, and when it returns the
    /// new size is durable. Requests may be in flight.
    ///
    /// # Errors
    /// `EINVAL`: the device would become smaller, or it is a block device of another size. `EROFS`:
    /// it is read-only. `EOPNOTSUPP`: it is an image in a format that cannot grow while it is in use.
    /// The errno of ftruncate(2), such as `EFBIG` and `ENOSPC`, and of fdatasync(2).
    pub fn grow(&self, size: u64) -> Result<(), Error> {
        let failed = |errno| Error::new(errno, Operation::Write);
        let before = self.refresh()?;
        if size < before {
            return Err(failed(libc::EINVAL));
        }
        if size == before {
            return Ok(());
        }
        if self.read_only {
            return Err(failed(libc::EROFS));
        }
        if self.map.image().is_some() {
            return Err(failed(libc::EOPNOTSUPP));
        }
        // The map forgets which storage that is.
        self.give_back();
        self.primary.set_len(size)?;
        self.primary.sync()?;
        self.set_size(size);
        Ok(())
    }

    /// The file, if the device is one that grows.
    #[inline]
    pub(crate) fn growing(&self) -> Option<&FileStorage> {
        self.file.as_deref().filter(|file| !file.properties().device)
    }

    /// Whether each write goes to the end.
    #[inline]
    pub(crate) fn appends(&self) -> bool {
        self.appends
    }

    /// Whether a write with `flags` goes to the end.
    pub(crate) fn appends_with(&self, flags: Flags) -> bool {
        self.appends && !flags.contains(Flags::NO_APPEND)
    }

    fn set_size(&self, size: u64) {
        if self.growing().is_none() {
            self.map.resize(size);
            self.limit.store(size, Ordering::Relaxed);
        }
    }

    /// The alignment that direct I/O requires; [`Alignment::NONE`] when the page cache is used.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.align
    }

    /// Its share of a [`WorkerPool`](crate::WorkerPool), as compared with the other devices of the pool: those
    /// that always have requests there take turns in proportion to it.
    #[must_use]
    pub fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    /// Gives it another weight, on all of its engines, from the next request on that goes to a worker: one of
    /// [`WEIGHTS`]; what is outside is taken as the nearer bound. Each device begins with
    /// [`DEFAULT_WEIGHT`].
    pub fn set_weight(&self, weight: u32) {
        let weight = weight.clamp(*WEIGHTS.start(), *WEIGHTS.end());
        self.weight.store(weight, Ordering::Relaxed);
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

    /// Whether all storages support `RWF_NOWAIT`; probed once at open.
    #[must_use]
    pub fn supports_nowait(&self) -> bool {
        self.nowait
    }

    /// Whether one of its storages has [`StorageProperties::waits_in_queue`].
    pub(crate) fn waits_in_queue(&self) -> bool {
        self.waits_in_queue
    }

    /// Like [`StorageProperties::shares_syncs`] of the storage that is written to.
    pub(crate) fn shares_syncs(&self) -> bool {
        self.primary.properties().shares_syncs
    }

    /// The limits of writes with [`Flags::UNTORN`](crate::Flags::UNTORN), as of the open; `None` if there
    /// are no such writes: without direct I/O, for images in a format, and where neither the device nor the
    /// file system has them.
    #[must_use]
    pub fn untorn_limits(&self) -> Option<UntornLimits> {
        self.inode.as_ref().and_then(|_| self.primary.untorn())
    }

    /// Like [`Storage::drops_cached`], of all storages.
    pub(crate) fn drops_cached(&self) -> bool {
        self.backing.is_empty() && self.primary.drops_cached()
    }

    /// Whether storage can be deallocated, and zeros made without writing them; probed once at
    /// open. Of a file that grows it is assumed: a probe behind its end could meet what others write.
    #[must_use]
    pub fn supports_punch_hole(&self) -> bool {
        !self.read_only && self.primary.properties().punch_hole
    }

    /// The extent at the start of `range`, without waiting: a hole reads as zeros without I/O
    /// (C14), and an unknown range counts as data. The next extent may be of the same kind. The
    /// depth is always 1.
    #[inline]
    #[must_use]
    pub fn cached_extent(&self, range: ByteRange) -> ExtentStatus {
        match self.extent(range, Intent::Read) {
            Ok(Extent { len, hole, .. }) => ExtentStatus::top(len, hole),
            Err(WouldBlock) => ExtentStatus::top(range.len, false),
        }
    }

    /// [`BlockMap::map_extent`], cut to the length of `range` and at least one byte long. `pos`
    /// needs no check: the kernel refuses a position outside the file.
    #[inline(always)]
    pub(crate) fn extent(&self, range: ByteRange, intent: Intent) -> Result<Extent, WouldBlock> {
        let extent = self.map.map_extent(range, intent)?;
        Ok(Extent { len: extent.len.max(1).min(range.len), ..extent })
    }

    /// [`BlockMap::map_extent_blocking`], cut likewise.
    pub(crate) fn extent_blocking(&self, range: ByteRange, intent: Intent) -> Extent {
        let extent = self.map.map_extent_blocking(range, intent);
        Extent { len: extent.len.max(1).min(range.len), ..extent }
    }

    /// Whether all of `range` is known to be a hole.
    #[inline]
    #[must_use]
    pub fn is_hole(&self, range: ByteRange) -> bool {
        self.cached_extent(range) == ExtentStatus::top(range.len, true)
    }

    /// The storages, by [`crate::Extent::file`], as a queue reaches them.
    pub(crate) fn queue_files(&self) -> Vec<QueueFile<'_>> {
        let cached = !self.is_direct();
        let all = std::iter::once(&self.primary).chain(&self.backing);
        let reached = all.map(|storage| match (storage.transfers(), storage.descriptor()) {
            (Some(transfers), _) => QueueFile::Transfers(transfers),
            (None, Some(file)) => QueueFile::Descriptor { file, cached },
            #[cfg(feature = "sim")]
            (None, None) => match storage.simulated() {
                Some((device, file)) => QueueFile::Simulated(device, file),
                None => QueueFile::Unreachable,
            },
            #[cfg(not(feature = "sim"))]
            (None, None) => QueueFile::Unreachable,
        });
        reached.collect()
    }

    /// The descriptors that claim block devices for this process alone.
    #[must_use]
    pub fn claims(&self) -> Vec<BorrowedFd<'_>> {
        let storages = std::iter::once(&self.primary).chain(&self.backing);
        storages.filter_map(|storage| storage.claim()).collect()
    }

    /// Why transfers of the device cannot be polled for (C48); `None` if they can.
    ///
    /// # Errors
    /// Like [`Uring::new`] and [`IoQueue::attach`].
    pub fn polling_refusal(&self) -> Result<Option<&'static str>, Error> {
        let mut ring = Uring::new()?;
        let mut files = self.queue_files();
        files.retain(|file| file.descriptor().is_ok());
        if files.is_empty() {
            return Ok(Some("its storage makes transfers itself"));
        }
        let first = ring.attach(&files)?;
        Ok((first..first + files.len() as u32).find_map(|file| ring.polling_refusal(file)))
    }

    /// Whether a storage makes transfers itself ([`Storage::transfers`]).
    #[must_use]
    pub fn is_remote(&self) -> bool {
        let mut all = std::iter::once(&self.primary).chain(&self.backing);
        all.any(|storage| storage.transfers().is_some())
    }

    /// Whether a durable write needs a sync after its transfers: one with `DSYNC` makes the data
    /// durable, but not an image's metadata; and through the page cache a lost page is reported to
    /// only one of several transfers (C28), while a flush remembers the error (C51).
    pub(crate) fn syncs_separately(&self) -> bool {
        let cached = !self.is_direct() && self.primary.transfers().is_none();
        cached || self.map.image().is_some()
    }

    /// The descriptor for transfers to the storage that is written to.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if it has none.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Error> {
        self.primary.descriptor().ok_or(Error::new(libc::EOPNOTSUPP, Operation::SetUp))
    }

    /// The storage with this [`crate::Extent::file`]; the primary one for a number out of range.
    #[inline]
    pub(crate) fn storage(&self, file: u16) -> &dyn Storage {
        let backing = usize::from(file).checked_sub(1).and_then(|at| self.backing.get(at));
        &**backing.unwrap_or(&self.primary)
    }

    /// The storage that is written to.
    pub(crate) fn top(&self) -> &dyn Storage {
        &*self.primary
    }

    /// Allocates ahead, if the device does, before a write to `range`, which is locked. On a thread
    /// that may block.
    pub(crate) fn allocate_ahead(&self, range: ByteRange) {
        if let Some(target) = self.ahead_target() {
            self.ahead.before_write(target, range);
        }
    }

    /// Gives back what was allocated ahead, because a write has found no space, and allocates
    /// nothing ahead from now on. True if the write may find space now.
    pub(crate) fn give_up_allocate_ahead(&self) -> bool {
        self.ahead_target().is_some_and(|target| self.ahead.turn_off(target))
    }

    /// Gives back the storage that was allocated ahead and not used, except where a request is in
    /// flight ([`crate::OpenOptions::allocate_ahead`]). The drop does the same, so this is for a process
    /// that ends without it. It blocks.
    pub fn give_back(&self) {
        if let Some(target) = self.ahead_target() {
            self.ahead.give_back(target);
        }
    }

    /// Bytes that were allocated ahead of writes so far ([`crate::OpenOptions::allocate_ahead`]), those that
    /// were given back included.
    #[must_use]
    pub fn allocated_ahead(&self) -> u64 {
        self.ahead.total()
    }

    /// Bytes of the file that its handles with read-ahead in this process have read from memory so far
    /// ([`crate::OpenOptions::read_ahead`]); 0 if this one has none.
    #[must_use]
    pub fn served_ahead(&self) -> u64 {
        self.read_ahead.as_ref().map_or(0, |ahead| ahead.reads.served())
    }

    /// Its read-ahead, if it has one.
    #[inline]
    pub(crate) fn read_ahead(&self) -> Option<&ReadAhead> {
        self.read_ahead.as_ref()
    }

    /// Records that a write to `range` by a queue has ended, before its request is answered.
    pub(crate) fn written(&self, range: ByteRange) {
        self.map.mark_allocated(range);
        if shared_inode::any_reads_ahead()
            && let Some(inode) = &self.inode
        {
            inode.changed(range);
        }
    }

    fn ahead_target(&self) -> Option<AheadTarget<'_>> {
        let (storage, ranges, size) = (&*self.primary, &self.ranges, self.limit());
        self.map.ahead().map(|map| AheadTarget { map, storage, ranges, size })
    }

    /// Whether requests need range locks: for read-modify-write of blocks (C13), for cached holes,
    /// or for an image that deallocates clusters.
    pub(crate) fn locks(&self) -> bool {
        self.align.offset > 1 || self.map.caches_holes() || self.map.image().is_some()
    }

    /// Makes the writes durable that were completed before on any queue (C49). It blocks;
    /// concurrent flushes share a sync.
    pub(crate) fn flush(&self) -> Result<(), Error> {
        if injected_bug::injected(EngineBug::DropFlush) {
            return Ok(());
        }
        let image = self.map.image();
        self.flushes.flush_unless_kept(
            || image.map_or_else(|| self.primary.sync(), |image| image.flush()),
            || image.map_or_else(|| self.primary.keeps_unsynced(), |it| it.keeps_unsynced()),
        )
    }

    /// Whether a flush has failed, so that every flush fails (C51).
    #[must_use]
    pub fn has_failed_flush(&self) -> bool {
        self.flushes.has_failed()
    }
}

impl<M: BlockMap + ?Sized> Drop for BlockDevice<M> {
    fn drop(&mut self) {
        self.give_back();
    }
}
