//! An attached device: the handle by which a request names it, and what each request needs of it.
//!
//! Invariant: a handle stands for one device of one engine. Once that is detached, a request through the
//! handle is refused, whatever was attached since.

use std::cell::Cell;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use crate::block::block_map::{BlockMap, Extent};
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::{BlockingDevice, JobDevice};
use crate::engine::completion::Stats;
use crate::engine::simple_path::SimplePath;
use crate::types::config::Config;
use crate::types::error::{Error, Operation};
use crate::types::token::Target;

/// In place of the number of an engine: the device is detached.
const DETACHED: u64 = u64::MAX;

/// Counts that each device has by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    /// Requests that took the simple path.
    Simple,
    /// Requests that took the general path.
    General,
    /// Requests that went to a worker at first.
    Worker,
    /// Requests that were tried without waiting, and went to a worker.
    Retried,
    /// Slots that another thread has returned.
    Remote,
    /// Bytes of holes that were zero-filled.
    ZeroFilled,
    /// Requests that failed.
    Failed,
}

const COUNTS: usize = Count::Failed as usize + 1;

/// A device of an engine.
pub(crate) struct AttachedDevice<M: BlockMap + ?Sized> {
    /// The number of its engine in the process, or [`DETACHED`].
    engine: Cell<u64>,
    /// Its index in the engine's table, and the number of its first file in the queue.
    first: Target,
    /// The number of its files.
    files: u32,
    /// Requests are not tried without waiting for now.
    is_backing_off: Cell<bool>,
    pub(crate) disk: Arc<BlockDevice<M>>,
    pub(crate) simple_path: SimplePath,
    /// Where the simple transfer that was started last ends in its file.
    end: Cell<u64>,
    counts: [Cell<u64>; COUNTS],
    /// The device as the jobs of workers name it.
    jobs: Arc<dyn JobDevice>,
    /// Whether its reads may be served from memory.
    pub(crate) reads_ahead: bool,
}

impl<M: BlockMap + ?Sized> AttachedDevice<M> {
    /// A device of the engine with number `engine`, at `index` of its table. Its `files` are the numbers
    /// that they have in the queue.
    pub(crate) fn new(
        engine: u64,
        index: u32,
        disk: Arc<BlockDevice<M>>,
        files: Range<u32>,
        config: &Config,
    ) -> Self
    where
        BlockingDevice<M>: JobDevice,
    {
        let device = Self {
            engine: Cell::new(engine),
            first: Target::new(index, files.start),
            files: files.len() as u32,
            is_backing_off: Cell::new(false),
            simple_path: SimplePath::new(&disk, config),
            disk: disk.clone(),
            end: Cell::new(u64::MAX),
            counts: Default::default(),
            reads_ahead: disk.read_ahead().is_some(),
            jobs: Arc::new(BlockingDevice(disk)),
        };
        device.set_backing_off(config, false);
        device
    }

    /// Its index in the engine's table.
    #[inline(always)]
    pub(crate) fn index(&self) -> u32 {
        self.first.device()
    }

    /// Whether it is attached to the engine with this number.
    #[inline(always)]
    pub(crate) fn is_of(&self, engine: u64) -> bool {
        self.engine.get() == engine
    }

    /// The numbers of its files in the queue.
    pub(crate) fn files(&self) -> Range<u32> {
        let first = self.first.file();
        first..first + self.files
    }

    /// The device and its first file.
    #[inline(always)]
    pub(crate) fn first(&self) -> Target {
        self.first
    }

    /// The device and one of its files; one that the queue refuses if the map has named a file that the
    /// device does not have.
    #[inline(always)]
    pub(crate) fn target(&self, file: u16) -> Target {
        if file == 0 { self.first } else { self.other_target(file.into()) }
    }

    #[inline(never)]
    fn other_target(&self, file: u32) -> Target {
        let number = if file < self.files { self.first.file() + file } else { u32::MAX };
        Target::new(self.index(), number)
    }

    /// Whether a simple transfer to or from `extent` begins where the one before it ends. To be called
    /// for each.
    #[inline(always)]
    pub(crate) fn continues(&self, extent: Extent) -> bool {
        self.end.replace(extent.pos + extent.len) == extent.pos
    }

    /// Refuses later requests.
    pub(crate) fn detach(&self) {
        self.engine.set(DETACHED);
    }

    /// The error of a request through an engine that is not its own: `ENODEV` if the device is detached,
    /// else `EINVAL`.
    #[cold]
    pub(crate) fn refusal(&self) -> Error {
        let errno = if self.is_of(DETACHED) { libc::ENODEV } else { libc::EINVAL };
        Error::new(errno, Operation::Validate)
    }

    /// Whether requests go to the workers without a try.
    #[inline]
    pub(crate) fn is_backing_off(&self) -> bool {
        self.is_backing_off.get()
    }

    /// Begins or ends a back-off, in which no request takes the simple path.
    pub(crate) fn set_backing_off(&self, config: &Config, on: bool) {
        let on = on || self.disk.waits_in_queue();
        self.is_backing_off.set(on);
        self.simple_path.set_on(&self.disk, config.simple && config.nowait_first && !on);
    }

    /// The device as the jobs of workers name it.
    pub(crate) fn jobs(&self) -> Arc<dyn JobDevice> {
        self.jobs.clone()
    }

    #[inline(always)]
    pub(crate) fn count(&self, what: Count) {
        self.add(what, 1);
    }

    #[inline(always)]
    pub(crate) fn add(&self, what: Count, number: u64) {
        let count = &self.counts[what as usize];
        count.set(count.get() + number);
    }

    /// Takes back that the request which was counted last took the simple path.
    pub(crate) fn uncount_simple(&self) {
        let count = &self.counts[Count::Simple as usize];
        count.set(count.get() - 1);
    }

    /// The counts of the device itself; those of the mechanisms are 0.
    pub(crate) fn stats(&self) -> Stats {
        let count = |what: Count| self.counts[what as usize].get();
        Stats {
            simple: count(Count::Simple),
            general: count(Count::General),
            worker: count(Count::Worker),
            retried: count(Count::Retried),
            remote: count(Count::Remote),
            zero_filled: count(Count::ZeroFilled),
            failed: count(Count::Failed),
            ..Stats::default()
        }
    }
}

/// A device that is attached to an engine, by which requests name it. Clones name the same device.
///
/// The device stays open until every clone is dropped and the engine has detached it.
pub struct DeviceHandle<M: BlockMap + ?Sized>(Rc<AttachedDevice<M>>);

impl<M: BlockMap + ?Sized> DeviceHandle<M> {
    pub(crate) fn new(device: Rc<AttachedDevice<M>>) -> Self {
        Self(device)
    }

    /// The device in its engine.
    #[inline(always)]
    pub(crate) fn attached(&self) -> &AttachedDevice<M> {
        &self.0
    }

    /// The device.
    #[inline]
    #[must_use]
    pub fn disk(&self) -> &Arc<BlockDevice<M>> {
        &self.0.disk
    }

    /// Its number among the devices of its engine: a small one, which another device may have once this
    /// one is detached and none of its requests is in flight.
    #[inline]
    #[must_use]
    pub fn index(&self) -> u32 {
        self.0.index()
    }
}

impl<M: BlockMap + ?Sized> Clone for DeviceHandle<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M: BlockMap + ?Sized> fmt::Debug for DeviceHandle<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceHandle").field("index", &self.0.index()).finish_non_exhaustive()
    }
}
