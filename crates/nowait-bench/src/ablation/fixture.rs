//! The common environment of all measurements: the file, opened in the way each of them needs, and the
//! duration.
//!
//! Invariant: a file that may not be overwritten is opened read-only.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nowait::{
    AioThreadQueue, AllocationCache, AsyncFile, BlockDevice, BlockMap, Config, Flags, IoQueue,
    LinearMap, LocalAsyncFile, Null, OpenOptions, SingleDisk, Uring, WorkerPool,
};
use tempfile::TempDir;

use crate::ablation::closed_loop::{Interval, StopCondition, drive};
use crate::ablation::gain_table::Sample;
use crate::bench::Bench;
use crate::cancel::CancelFlag;
use crate::error::Error;
use crate::offsets::{Offsets, Region};
use crate::test_file::{Access, Target, temporary_directory};
use crate::workload::{Direction, Workload};

/// The largest part of a file that is used: a larger one would not change the results.
pub(crate) const BYTES_MAX: u64 = 1 << 30;

/// The environment of all measurements.
pub(crate) struct Fixture<'a> {
    pub(crate) path: &'a Path,
    /// Bytes of the file that are used.
    pub(crate) bytes: u64,
    pub(crate) writable: bool,
    /// Whether the page cache is bypassed.
    pub(crate) direct: bool,
    pub(crate) duration: Duration,
    pub(crate) stop: &'a CancelFlag,
    /// A directory for files that are made.
    scratch: TempDir,
}

impl<'a> Fixture<'a> {
    pub(crate) fn set(target: &'a Target, bench: &'a Bench) -> Result<Fixture<'a>, Error> {
        // In the directory of the file if it is a temporary one; no file is created beside a file
        // of the user.
        let beside = target.path.parent().filter(|_| target.was_made()).map(Path::to_owned);
        let scratch = temporary_directory(beside);
        let mut fixture = Fixture {
            path: &target.path,
            bytes: target.bytes.min(BYTES_MAX),
            writable: target.access == Access::ReadWrite,
            direct: false,
            duration: bench.args.duration(),
            stop: &bench.stop,
            scratch: scratch.map_err(Error::system("making a directory for a sparse file"))?,
        };
        let file_error = |error: nowait::Error| Error::File {
            path: target.path.clone(),
            problem: error.to_string(),
        };
        let disk =
            BlockDevice::open_mapped(fixture.path, fixture.open_options()).map_err(file_error)?;
        fixture.direct = disk.is_direct();
        Ok(fixture)
    }

    fn open_options(&self) -> OpenOptions {
        OpenOptions::new().read_only(!self.writable)
    }

    /// The directions that may be measured on the file.
    pub(crate) fn directions(&self) -> &'static [Direction] {
        if self.writable { &[Direction::Read, Direction::Write] } else { &[Direction::Read] }
    }

    pub(crate) fn region(&self, block_bytes: usize) -> Region {
        Region { start: 0, bytes: self.bytes, block: block_bytes as u64 }
    }

    pub(crate) fn stop_condition(&self, timed: bool) -> StopCondition<'a> {
        StopCondition { duration: self.duration, stop: self.stop, timed }
    }

    /// The file as a disk whose every byte counts as mapped.
    pub(crate) fn disk(&self) -> io::Result<Arc<BlockDevice<LinearMap>>> {
        Ok(Arc::new(BlockDevice::open_mapped(self.path, self.open_options())?))
    }

    /// The file as a disk that caches its holes and allocates ahead, as far as `options` say.
    pub(crate) fn cached_disk(
        &self,
        path: &Path,
        options: OpenOptions,
    ) -> io::Result<Arc<BlockDevice<AllocationCache>>> {
        let read_only = path == self.path && !self.writable;
        let disk = BlockDevice::open(path, options.read_only(read_only))?;
        disk.scan();
        Ok(Arc::new(disk))
    }

    /// The file as another program would open it.
    pub(crate) fn plain(path: &Path, writable: bool, direct: bool) -> io::Result<File> {
        let flags = if direct { rustix::fs::OFlags::DIRECT.bits().cast_signed() } else { 0 };
        fs::OpenOptions::new().read(true).write(writable).custom_flags(flags).open(path)
    }

    /// A file of `bytes` without allocated blocks. It is truncated rather than created again,
    /// because file systems release a removed file later, which would disturb the measurement.
    pub(crate) fn sparse(&self, bytes: u64) -> io::Result<PathBuf> {
        let path = self.scratch_path("sparse.img");
        let file = fs::OpenOptions::new().write(true).create(true).truncate(true).open(&path)?;
        file.set_len(bytes)?;
        file.sync_all()?;
        Ok(path)
    }

    /// A file or directory of the measurement's own.
    pub(crate) fn scratch_path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Measures `load` on an engine for which every byte is mapped.
    pub(crate) fn on(&self, queue: Queue, load: &Workload, config: Config) -> io::Result<Sample> {
        self.on_disk(self.disk()?, queue, load, config)
    }

    /// Measures `load` on an engine that takes its extents from the allocation cache.
    pub(crate) fn on_cache(
        &self,
        queue: Queue,
        load: &Workload,
        config: Config,
    ) -> io::Result<Sample> {
        self.on_disk(
            self.cached_disk(self.path, OpenOptions::new().cache_holes(true))?,
            queue,
            load,
            config,
        )
    }

    fn on_disk<M: BlockMap>(
        &self,
        disk: Arc<BlockDevice<M>>,
        queue: Queue,
        load: &Workload,
        config: Config,
    ) -> io::Result<Sample> {
        let workers = WorkerPool::default();
        match queue {
            Queue::Null => {
                self.on_engine(SingleDisk::new(disk, workers, Null::new()?, config)?, queue, load)
            }
            Queue::File | Queue::Polled => {
                self.on_engine(ring_engine(&disk, &workers, config)?, queue, load)
            }
            Queue::Aio => {
                let aio = AioThreadQueue::new(config.slots)?;
                self.on_engine(SingleDisk::new(disk, workers, aio, config)?, queue, load)
            }
        }
    }

    fn on_engine<Q: IoQueue, M: BlockMap>(
        &self,
        mut engine: SingleDisk<Q, M>,
        queue: Queue,
        load: &Workload,
    ) -> io::Result<Sample> {
        let flags = if queue == Queue::Polled { Flags::HIPRI } else { Flags::NONE };
        let sample = self.measure(load, queue != Queue::Null, |offsets, stop_condition| {
            drive(&mut engine, load, flags, offsets, stop_condition)
        });
        if queue == Queue::Polled && engine.stats().polled == 0 {
            let problem = "no transfer was polled: the device has no poll queues";
            return Err(io::Error::new(io::ErrorKind::Unsupported, problem));
        }
        sample
    }

    /// Warms up and measures one loop of `load` in the whole file.
    pub(crate) fn measure(
        &self,
        load: &Workload,
        timed: bool,
        mut run: impl FnMut(&mut Offsets, StopCondition<'_>) -> io::Result<Interval>,
    ) -> io::Result<Sample> {
        let mut offsets = Offsets::endless(load.order, self.region(load.block_bytes), 0);
        let stop_condition = self.stop_condition(timed);
        run(&mut offsets, stop_condition.warm_up())?;
        run(&mut offsets, stop_condition)?.sample(load.block_bytes)
    }
}

/// The queue of an engine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Queue {
    /// A queue that does nothing.
    Null,
    /// A ring, on the file.
    File,
    /// The same, and the ring polls the device for completions. Not measured if the device cannot
    /// be polled.
    Polled,
    /// Linux AIO and threads, on the file.
    Aio,
}

impl Queue {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Queue::Null => "null queue",
            Queue::File => "file",
            Queue::Polled => "file, polled",
            Queue::Aio => "file, Linux AIO",
        }
    }
}

/// An engine on a ring.
pub(crate) fn ring_engine<M: BlockMap>(
    disk: &Arc<BlockDevice<M>>,
    workers: &WorkerPool,
    config: Config,
) -> io::Result<SingleDisk<Uring, M>> {
    let queue = Uring::new().map_err(no_ring)?;
    Ok(SingleDisk::new(disk.clone(), workers.clone(), queue, config)?)
}

/// The reason why no ring could be set up, with a remedy.
fn no_ring(error: nowait::Error) -> io::Error {
    io::Error::other(Uring::refusal(error))
}

/// The async interface of this thread to `disk`, on a ring.
pub(crate) fn ring_of_this_thread<M: BlockMap + 'static>(
    disk: Arc<BlockDevice<M>>,
    workers: WorkerPool,
    config: Config,
) -> io::Result<LocalAsyncFile> {
    let queue = Uring::new().map_err(no_ring)?;
    Ok(LocalAsyncFile::with_queue(disk, workers, queue, config)?)
}

/// The async interface of `disk` on a ring.
pub(crate) fn ring_tasks(
    disk: Arc<BlockDevice<AllocationCache>>,
    workers: WorkerPool,
    config: Config,
) -> io::Result<AsyncFile> {
    // Only the thread that owns the ring can create it, and it reports only the error number. This
    // attempt gives the full error.
    drop(Uring::new().map_err(no_ring)?);
    Ok(AsyncFile::with_queue(disk, workers, config, Uring::new)?)
}
