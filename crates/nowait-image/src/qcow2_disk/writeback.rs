//! The metadata of a served image and its files: reads on a cache miss, and crash-safe writeback.
//!
//! Invariant: metadata is written stage by stage, each durable before the next begins
//! ([`WriteOrder`]). The metadata lock is never held during I/O. After a failed writeback no
//! metadata is written again, so that the image stays as it was; or, where the storages have kept all
//! that was written, that batch is written again before any other.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nowait::internal::FlushCoalescer;

use nowait::{Error, IoBuffer, Operation, ReadCursor, Storage, WriteCursor, injected_panic};
use tracing::error;

use crate::formats::qcow2::entries::Cluster;
use crate::image_file::ImageFile;
use crate::injected_bug;
use crate::injected_bug::ImageBug;

use crate::qcow2_disk::damage::Damage;
use crate::qcow2_disk::metadata::Metadata;
use crate::qcow2_disk::metadata_cache::{MetadataError, WriteOrder, WritebackBlock};
use crate::qcow2_disk::metadata_survey;
use crate::qcow2_disk::refcount_allocator::{ClusterRun, DeferredFree};
use crate::qcow2_disk::yielding_lock::{lock, lock_for_io};

/// The most dirty metadata of a qcow2 image, in bytes.
/// Beyond it: a change of the metadata flushes first.
const MAX_DIRTY_BYTES: u64 = 16 << 20;
/// How long metadata of a qcow2 image may stay dirty.
/// Beyond it: the flusher thread writes it.
const MAX_DIRTY_TIME: Duration = Duration::from_secs(5);
/// Most bytes of adjacent blocks in one write.
const RUN_BYTES: usize = 1 << 20;
/// The file grows to multiples of this many bytes, because growing holds up writes to it.
const GROW_BYTES: u64 = 16 << 20;

/// The state that the flusher thread waits for.
#[derive(Default)]
struct FlusherState {
    /// Whether metadata has changed since the last writeback began.
    dirty: bool,
    /// Tells the thread to end.
    stopping: bool,
}

/// The length of a file, and the step that it grows in, in bytes.
struct FileLength {
    bytes: u64,
    step: u64,
}

/// The metadata and the files of the top image of a chain.
pub(crate) struct MetadataWriteback {
    /// The file with the metadata, for the survey of all tables.
    host: Arc<ImageFile>,
    /// Whether the survey is done; held during it.
    surveyed: Mutex<bool>,
    metadata: Mutex<Metadata>,
    /// The file with the data.
    data: Arc<dyn Storage>,
    /// The file with the metadata, if it is not the data file.
    separate: Option<Arc<dyn Storage>>,
    /// Length of the file with the metadata. Held while the file grows, so that writers behind its
    /// end wait.
    len: Mutex<FileLength>,
    /// Shares writebacks between the flushes.
    flushes: FlushCoalescer,
    /// The batch of a writeback that has failed, whose storages have kept what was written.
    unfinished: Mutex<Vec<WritebackBlock>>,
    flusher: Mutex<FlusherState>,
    changed: Condvar,
    /// Whether bits of bitmaps were written since the last writeback began.
    has_bits: AtomicBool,
}

impl MetadataWriteback {
    /// `len` is the length in bytes of the file with the metadata.
    pub(crate) fn new(
        host: Arc<ImageFile>,
        metadata: Metadata,
        data: Arc<dyn Storage>,
        separate: Option<Arc<dyn Storage>>,
        len: u64,
    ) -> Self {
        Self {
            host,
            surveyed: Mutex::new(false),
            metadata: Mutex::new(metadata),
            data,
            separate,
            len: Mutex::new(FileLength { bytes: len, step: GROW_BYTES }),
            flushes: FlushCoalescer::default(),
            unfinished: Mutex::default(),
            flusher: Mutex::default(),
            changed: Condvar::new(),
            has_bits: AtomicBool::new(false),
        }
    }

    /// The file with the data.
    pub(crate) fn data(&self) -> &Arc<dyn Storage> {
        &self.data
    }

    /// The file with the metadata.
    pub(crate) fn host(&self) -> &ImageFile {
        &self.host
    }

    /// The storage of the file with the metadata, and the bytes of a block of it.
    pub(crate) fn metadata_storage(&self) -> (Arc<dyn Storage>, u64) {
        let storage = self.separate.as_ref().unwrap_or(&self.data);
        (storage.clone(), lock(&self.metadata).cache.block())
    }

    /// Like [`Metadata::reserve_bitmaps`].
    pub(crate) fn reserve_bitmaps(&self, runs: &[ClusterRun]) -> bool {
        lock(&self.metadata).reserve_bitmaps(runs)
    }

    fn file(&self) -> &dyn Storage {
        &**self.separate.as_ref().unwrap_or(&self.data)
    }

    /// Runs `act` on the metadata, again after each cache miss, until it has all blocks it needs.
    ///
    /// # Errors
    /// `EIO` for metadata that contradicts itself, `ENOSPC` where there is no room, the errno of a
    /// failed read.
    pub(crate) fn with<T>(
        &self,
        act: impl FnMut(&mut Metadata) -> Result<T, MetadataError>,
    ) -> Result<T, Error> {
        self.attempt(act)?.map_err(|_| Error::new(libc::EIO, Operation::Read))
    }

    /// Like [`MetadataWriteback::with`], for a change of the disk. Metadata that contradicts itself
    /// is not changed from then on, and the image is marked as corrupt.
    ///
    /// # Errors
    /// Like [`MetadataWriteback::with`].
    pub(crate) fn update<T>(
        &self,
        act: impl FnMut(&mut Metadata) -> Result<T, MetadataError>,
    ) -> Result<T, Error> {
        self.attempt(act)?.map_err(|damage| {
            self.mark_damaged(damage);
            Error::new(libc::EIO, Operation::Write)
        })
    }

    /// Stops all changes of the metadata and marks the image as corrupt. Earlier changes are
    /// complete and are still written, together with the mark.
    fn mark_damaged(&self, damage: Damage) {
        if !lock(&self.metadata).mark_damaged() {
            return;
        }
        error!(
            "{}: its metadata is damaged: {damage}; from now on it is only written to where it has \
             data already (end this, copy what you can, and use nowait check --repair)",
            self.host.path().display()
        );
        let marked = self.attempt(Metadata::set_corrupt_bit).and_then(|_| self.flush());
        if let Err(error) = marked {
            error!("{}: it cannot be marked as corrupt: {error}", self.host.path().display());
        }
    }

    /// Finds the clusters that are in use and have a refcount of 0. Done once, by one thread, while
    /// others wait for it.
    fn survey(&self) -> Result<(), Error> {
        let mut is_done = lock_for_io(&self.surveyed);
        if !*is_done {
            let failed = |error: io::Error| Error::from_io(&error, Operation::Read);
            let uncounted = metadata_survey::uncounted(&self.host).map_err(failed)?;
            lock(&self.metadata).survey(uncounted);
            *is_done = true;
        }
        Ok(())
    }

    fn attempt<T>(
        &self,
        mut act: impl FnMut(&mut Metadata) -> Result<T, MetadataError>,
    ) -> Result<Result<T, Damage>, Error> {
        loop {
            let mut metadata = lock(&self.metadata);
            let (pos, len) = match act(&mut metadata) {
                Ok(done) => return Ok(Ok(done)),
                Err(MetadataError::NotCached { pos, len }) => (pos, len),
                Err(MetadataError::Corrupt(damage)) => return Ok(Err(damage)),
                Err(MetadataError::Unsurveyed) => {
                    drop(metadata);
                    self.survey()?;
                    continue;
                }
                Err(MetadataError::NoSpace) => {
                    return Err(Error::new(libc::ENOSPC, Operation::Write));
                }
            };
            let generation = metadata.cache.generation();
            drop(metadata);
            let mut bytes = IoBuffer::zeroed(len as usize)?;
            self.file().read_at(pos, &mut ReadCursor::from(&mut bytes[..]))?;
            lock(&self.metadata).cache.insert_clean(pos, &bytes, generation);
        }
    }

    /// Scans from cluster `first` of the disk ([`Metadata::scan`]). Returns the mapping, how many
    /// clusters, at most `max`, are alike, and the number of reads. Tables for the clusters behind
    /// them are read in the same transfers, because the scan needs them next.
    ///
    /// # Errors
    /// Like [`MetadataWriteback::with`].
    pub(crate) fn scan(&self, first: u64, max: u64) -> Result<((Cluster, u64), usize), Error> {
        let mut reads = 0;
        loop {
            let metadata = lock(&self.metadata);
            let pos = match metadata.scan(first, max) {
                Ok(found) => return Ok((found, reads)),
                Err(MetadataError::NotCached { pos, .. }) => pos,
                Err(_) => return Err(Error::new(libc::EIO, Operation::Read)),
            };
            let (wanted, generation) =
                (metadata.ahead(first, max, pos), metadata.cache.generation());
            let block = metadata.cache.block();
            drop(metadata);
            let start = wanted.first().map_or(pos, |&first| first.min(pos));
            let end = wanted.last().map_or(pos, |&last| last.max(pos)) + block;
            let mut bytes = IoBuffer::zeroed((end - start) as usize)?;
            self.file().read_at(start, &mut ReadCursor::from(&mut bytes[..]))?;
            reads += 1;
            let mut metadata = lock(&self.metadata);
            for pos in wanted {
                let at = (pos - start) as usize;
                if let Some(bytes) = bytes.get(at..at + block as usize) {
                    metadata.cache.insert_clean(pos, bytes, generation);
                }
            }
        }
    }

    /// Defers the free of clusters that no pointer ever referred to.
    pub(crate) fn defer_free(&self, clusters: ClusterRun) {
        lock(&self.metadata).defer_free(clusters, false);
    }

    /// Makes the file with the metadata at least `bytes` long. To be called before a write behind
    /// its end: only then is the length known here.
    ///
    /// # Errors
    /// `ENOSPC` where the file cannot grow; other errors of ftruncate(2).
    pub(crate) fn grow_file_to(&self, bytes: u64) -> Result<(), Error> {
        let mut len = lock_for_io(&self.len);
        if bytes > len.bytes && !injected_bug::injected(ImageBug::ForgetToGrow) {
            let step = bytes.next_multiple_of(len.step);
            let grown = self.file().set_len(step).map(|()| step);
            // A quota or a limit on file sizes may leave room for these bytes, but not for a whole step.
            let grown = grown.or_else(|_| self.file().set_len(bytes).map(|()| bytes));
            len.bytes = grown.map_err(|error| match error.errno() {
                // A block device has a fixed size.
                libc::EINVAL => Error::new(libc::ENOSPC, Operation::Write),
                _ => error,
            })?;
        }
        Ok(())
    }

    /// Sets the step that the file grows in.
    #[cfg(feature = "sim")]
    pub(crate) fn grow_by(&self, bytes: u64) {
        lock(&self.len).step = bytes;
    }

    /// Makes all completed changes durable, data and metadata.
    ///
    /// # Errors
    /// The error of the failed write or sync for the flush that met it, `EIO` for all others from
    /// then on, unless [`MetadataWriteback::keeps_unsynced`].
    pub(crate) fn flush(&self) -> Result<(), Error> {
        if injected_bug::injected(ImageBug::FlushBesideAnother) && self.flushes.is_running() {
            return Ok(());
        }
        let write_back = || {
            lock(&self.flusher).dirty = false;
            self.changed.notify_all();
            self.write_back()
        };
        let keeps = || self.data.keeps_unsynced() && self.file().keeps_unsynced();
        let flushed = self.flushes.flush_unless_kept(write_back, keeps);
        if flushed.is_err() && self.keeps_unsynced() {
            self.mark_dirty();
        }
        flushed
    }

    /// Like [`MetadataWriteback::flush`], after bits of bitmaps were written to the file with the metadata.
    ///
    /// # Errors
    /// Like [`MetadataWriteback::flush`].
    pub(crate) fn flush_with_bits(&self) -> Result<(), Error> {
        self.has_bits.store(true, Ordering::SeqCst);
        self.flush()
    }

    /// Whether a later flush can make durable what failed ones could not.
    pub(crate) fn keeps_unsynced(&self) -> bool {
        !self.flushes.has_failed()
    }

    /// To be called before metadata is changed: flushes where too much of it is dirty.
    ///
    /// # Errors
    /// Like [`MetadataWriteback::flush`].
    pub(crate) fn throttle_dirty(&self) -> Result<(), Error> {
        let full = lock(&self.metadata).cache.dirty_bytes() >= MAX_DIRTY_BYTES;
        if full || self.flushes.has_failed() { self.flush() } else { Ok(()) }
    }

    /// To be called when metadata was changed: the flusher thread writes it if no flush does.
    pub(crate) fn mark_dirty(&self) {
        if !std::mem::replace(&mut lock(&self.flusher).dirty, true) {
            self.changed.notify_all();
        }
    }

    fn write_back(&self) -> Result<(), Error> {
        let unfinished = std::mem::take(&mut *lock(&self.unfinished));
        if !unfinished.is_empty() {
            self.write_batch(unfinished)?;
        }
        let batch = lock(&self.metadata).cache.take_batch();
        if !batch.is_empty() {
            return self.write_batch(batch);
        }
        let has_bits = self.has_bits.swap(false, Ordering::SeqCst);
        let bits_file = self.separate.as_ref().filter(|_| has_bits);
        let synced = self.data.sync().and_then(|()| bits_file.map_or(Ok(()), |file| file.sync()));
        synced.inspect_err(|_| self.has_bits.store(has_bits, Ordering::SeqCst))
    }

    fn write_batch(&self, batch: Vec<WritebackBlock>) -> Result<(), Error> {
        let written = self.write_stages(&batch);
        match written {
            Ok(()) => lock(&self.metadata).cache.finish_writeback(),
            Err(_) => *lock(&self.unfinished) = batch,
        }
        written
    }

    fn write_stages(&self, batch: &[WritebackBlock]) -> Result<(), Error> {
        for stage in WriteOrder::ALL {
            let blocks: Vec<_> = batch.iter().filter(|block| block.stage == stage).collect();
            self.write_blocks(&blocks)?;
            if injected_bug::injected(ImageBug::ForgetOrder) && stage != WriteOrder::Mappings {
                continue;
            }
            if stage == WriteOrder::DataAndRefcounts {
                self.data.sync()?;
            }
            if !blocks.is_empty()
                && (stage != WriteOrder::DataAndRefcounts || self.separate.is_some())
            {
                self.file().sync()?;
            }
        }
        Ok(())
    }

    /// Writes blocks, sorted by position; adjacent ones in one transfer.
    fn write_blocks(&self, blocks: &[&WritebackBlock]) -> Result<(), Error> {
        let follows =
            |a: &&WritebackBlock, b: &&WritebackBlock| a.pos + a.bytes.len() as u64 == b.pos;
        let all: usize = blocks.iter().map(|block| block.bytes.len()).sum();
        if all == 0 {
            return Ok(());
        }
        let mut run = IoBuffer::zeroed(RUN_BYTES.min(all))?;
        for neighbours in blocks.chunk_by(follows) {
            let size = neighbours.first().map_or(1, |block| block.bytes.len());
            for blocks_of_run in neighbours.chunks((RUN_BYTES / size).max(1)) {
                let Some(first) = blocks_of_run.first() else { continue };
                let slots = run.chunks_exact_mut(size);
                slots
                    .zip(blocks_of_run)
                    .for_each(|(slot, block)| slot.copy_from_slice(&block.bytes));
                self.grow_file_to(first.pos + (blocks_of_run.len() * size) as u64)?;
                let bytes = &run[..blocks_of_run.len() * size];
                self.file().write_at(first.pos, &mut WriteCursor::from(bytes), None)?;
            }
        }
        Ok(())
    }

    /// Frees the deferred clusters and truncates the file to what is in use. To be called after the
    /// last flush, when no requests follow.
    ///
    /// # Errors
    /// Like [`MetadataWriteback::flush`].
    pub(crate) fn free_deferred(&self, cluster_bytes: u64) -> Result<(), Error> {
        // The refcounts of a damaged image are not changed: that is for a repair.
        let mut metadata = lock(&self.metadata);
        let deferred = match metadata.is_damaged() {
            true => Vec::new(),
            false => metadata.take_deferred(),
        };
        drop(metadata);
        if !deferred.is_empty() {
            // A cluster that is still in use, whatever its refcount says, is not freed.
            let failed = |error: io::Error| Error::from_io(&error, Operation::Read);
            let references = metadata_survey::references(&self.host).map_err(failed)?;
            for &DeferredFree { cluster, compressed } in &deferred {
                if references.of(cluster) > 0 && !compressed {
                    continue;
                }
                // An error leaves the refcount as it is: at worst a leak.
                let _ = self.with(|metadata| metadata.free(cluster, references.of(cluster)));
                self.throttle_dirty()?;
            }
            if !injected_bug::injected(ImageBug::ForgetGivenBack) {
                self.flush()?;
            }
        }
        let shortfall = u64::from(injected_bug::injected(ImageBug::CutTooShort));
        let end = (lock(&self.metadata).end() - shortfall) * cluster_bytes;
        let mut len = lock_for_io(&self.len);
        if end < len.bytes {
            self.file().set_len(end)?;
            len.bytes = end;
        }
        Ok(())
    }

    /// Whether metadata is dirty and may be written.
    #[cfg(feature = "sim")]
    pub(crate) fn is_due(&self) -> bool {
        lock(&self.flusher).dirty && !self.flushes.has_failed()
    }

    /// Like [`MetadataWriteback::flush`]. The next flush of a client reports a failure.
    pub(crate) fn background_flush(&self) {
        let flushed = self.flush();
        if flushed.is_err() && injected_bug::injected(ImageBug::ForgetFailure) {
            #[cfg(feature = "sim")]
            self.flushes.forget_failure();
            lock(&self.unfinished).clear();
        }
    }

    /// Starts the flusher thread, which writes metadata that no flush writes.
    pub(crate) fn spawn_flusher(self: &Arc<Self>) -> std::io::Result<JoinHandle<()>> {
        let writeback = self.clone();
        let thread = std::thread::Builder::new().name("nowait-image".into());
        thread.spawn(move || {
            let wait_while = |state, time, waits: fn(&mut FlusherState) -> bool| {
                let waited = writeback.changed.wait_timeout_while(state, time, waits);
                waited.unwrap_or_else(PoisonError::into_inner).0
            };
            let mut state = lock(&writeback.flusher);
            // After a failure nothing is written any more.
            while !state.stopping && !writeback.flushes.has_failed() {
                state = wait_while(state, Duration::MAX, |now| !now.stopping && !now.dirty);
                state = wait_while(state, MAX_DIRTY_TIME, |now| !now.stopping && now.dirty);
                if state.dirty && !state.stopping {
                    drop(state);
                    injected_panic::panic_at("flusher");
                    writeback.background_flush();
                    state = lock(&writeback.flusher);
                }
            }
        })
    }

    /// Ends the flusher thread. Does not wait for it.
    pub(crate) fn stop_flusher(&self) {
        lock(&self.flusher).stopping = true;
        self.changed.notify_all();
    }
}
