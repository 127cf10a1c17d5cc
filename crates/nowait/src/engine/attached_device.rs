//! The devices of an engine: the handle by which a request names one, what a simple request needs of it,
//! and the rest of its state.
//!
//! Invariant: a handle stands for one device of one engine. Once that is detached, a request through the
//! handle is refused, whatever was attached since; its files and its entry of the table stay until no
//! slot names it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::{Index, IndexMut};
use std::rc::Rc;
use std::sync::Arc;

use slab::Slab;

use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::{BlockingDevice, JobDevice};
use crate::engine::back_off::BackOff;
use crate::engine::completion::Stats;
use crate::engine::merge_run::Run;
use crate::engine::simple_path::SimplePath;
use crate::types::config::Config;
use crate::types::error::{Error, Operation};
use crate::types::token::Target;

/// In place of the number of an engine: the device is detached.
const DETACHED: u64 = u64::MAX;

/// Parts of a device that a simple request needs.
pub(crate) struct AttachedDevice<M: BlockMap + ?Sized> {
    /// The number of its engine in the process, or [`DETACHED`].
    pub(crate) engine: Cell<u64>,
    /// Its index in the engine's table, and the number of its first file in the queue.
    pub(crate) first: Target,
    /// The number of its files.
    pub(crate) files: u32,
    pub(crate) disk: Arc<BlockDevice<M>>,
    pub(crate) simple_path: SimplePath,
    /// Where the simple transfer that was started last ends in its file.
    pub(crate) end: Cell<u64>,
    /// Requests that took the simple path, the general one, and those that went to a worker at first.
    pub(crate) simple: Cell<u64>,
    pub(crate) general: Cell<u64>,
    pub(crate) worker: Cell<u64>,
    /// Transfers that were reaped, but for the only ones of reads and writes that they served.
    pub(crate) reaped: Cell<u64>,
    /// Durable writes in flight that could share a sync.
    pub(crate) durable_writes: Cell<u32>,
    /// Requests are not tried without waiting for now.
    pub(crate) is_backing_off: Cell<bool>,
}

impl<M: BlockMap + ?Sized> AttachedDevice<M> {
    /// Its index in the engine's table.
    #[inline(always)]
    pub(crate) fn index(&self) -> u32 {
        self.first.device()
    }

    /// This device and one of its files; one that the queue refuses if the map has named a file that the
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

    /// Refuses later requests.
    pub(crate) fn detach(&self) {
        self.engine.set(DETACHED);
    }

    /// The error of a request through an engine that is not its own: `ENODEV` if the device is detached,
    /// else `EINVAL`.
    #[cold]
    pub(crate) fn refusal(&self) -> Error {
        let is_detached = self.engine.get() == DETACHED;
        let errno = if is_detached { libc::ENODEV } else { libc::EINVAL };
        Error::new(errno, Operation::Validate)
    }
}

/// A device that is attached to an engine, by which requests name it. Clones name the same device.
///
/// The device stays open until every clone is dropped and the engine has detached it.
pub struct DeviceHandle<M: BlockMap + ?Sized>(pub(crate) Rc<AttachedDevice<M>>);

impl<M: BlockMap + ?Sized> DeviceHandle<M> {
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

    /// Where the bytes of a request at `pos` begin in its buffer: `pos` modulo the block, so that
    /// buffer and device are aligned alike.
    #[inline]
    #[must_use]
    pub fn buffer_offset(&self, pos: u64) -> usize {
        (pos & (u64::from(self.0.disk.alignment().offset) - 1)) as usize
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

/// The state of a device in its engine.
pub(crate) struct DeviceState<M: BlockMap + ?Sized> {
    pub(crate) attached: Rc<AttachedDevice<M>>,
    /// Device as the jobs of workers name it.
    pub(crate) jobs: Arc<dyn JobDevice>,
    pub(crate) back_off: BackOff,
    /// Of [`AttachedDevice::reaped`], those that the back-off has seen.
    pub(crate) observed: u64,
    /// The run of neighbours that is open.
    pub(crate) run: Option<Run>,
    /// Neighbours that are left to be pushed on their own.
    pub(crate) pause: u32,
    /// Overwrites that wait for the probe request.
    pub(crate) deferred: VecDeque<u32>,
    /// The slot of the probe request: a refused overwrite that a worker has.
    pub(crate) probe_slot: Option<u32>,
    /// Counts that neither `attached` nor `back_off` has.
    pub(crate) stats: Stats,
}

impl<M: BlockMap + ?Sized> DeviceState<M> {
    /// The counts of the device; those of the pool are the engine's.
    pub(crate) fn stats(&self) -> Stats {
        let AttachedDevice { simple, general, worker, .. } = &*self.attached;
        let (simple, general, worker) = (simple.get(), general.get(), worker.get());
        Stats { simple, general, worker, refused: self.back_off.total(), ..self.stats }
    }

    /// Tries the simple path from now on, if it is on and there is no back-off, or does not.
    pub(crate) fn update_simple_path(&self, config: &Config) {
        self.attached.is_backing_off.set(self.back_off.is_backing_off());
        let on = config.simple && config.nowait_first && !self.back_off.is_backing_off();
        self.attached.simple_path.set_on(&self.attached.disk, on);
    }
}

/// Adds 1 to a count.
#[inline(always)]
pub(crate) fn count(count: &Cell<u64>) {
    count.set(count.get() + 1);
}

/// The devices of an engine by index.
pub(crate) struct DeviceTable<M: BlockMap + ?Sized>(Slab<DeviceState<M>>);

impl<M: BlockMap + ?Sized> DeviceTable<M> {
    pub(crate) const fn new() -> Self {
        Self(Slab::new())
    }

    /// Adds a device of the engine with number `engine`, whose files in the queue begin with number
    /// `first_file`.
    pub(crate) fn add(
        &mut self,
        engine: u64,
        disk: Arc<BlockDevice<M>>,
        (first_file, files): (u32, u32),
        config: &Config,
    ) -> Rc<AttachedDevice<M>> {
        let entry = self.0.vacant_entry();
        let index = entry.key() as u32;
        let attached = Rc::new(AttachedDevice {
            engine: Cell::new(engine),
            first: Target::new(index, first_file),
            files,
            simple_path: SimplePath::new(&disk, config),
            disk: disk.clone(),
            end: Cell::new(u64::MAX),
            simple: Cell::new(0),
            general: Cell::new(0),
            worker: Cell::new(0),
            reaped: Cell::new(0),
            durable_writes: Cell::new(0),
            is_backing_off: Cell::new(false),
        });
        let state = DeviceState {
            attached: attached.clone(),
            jobs: Arc::new(BlockingDevice(disk)),
            back_off: BackOff::new(config.back_off),
            observed: 0,
            run: None,
            pause: 0,
            deferred: VecDeque::new(),
            probe_slot: None,
            stats: Stats::default(),
        };
        state.update_simple_path(config);
        entry.insert(state);
        attached
    }

    /// Takes a device out, which no slot names.
    pub(crate) fn remove(&mut self, index: u32) -> Option<DeviceState<M>> {
        self.0.try_remove(index as usize)
    }

    /// The state of a device, if it is in the table.
    pub(crate) fn get(&self, device: &AttachedDevice<M>) -> Option<&DeviceState<M>> {
        let found = self.0.get(device.index() as usize);
        found.filter(|found| std::ptr::eq(&*found.attached, device))
    }

    /// All devices.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &DeviceState<M>> {
        self.0.iter().map(|(_, device)| device)
    }
}

impl<M: BlockMap + ?Sized> Index<u32> for DeviceTable<M> {
    type Output = DeviceState<M>;
    #[inline]
    fn index(&self, index: u32) -> &DeviceState<M> {
        &self.0[index as usize]
    }
}

impl<M: BlockMap + ?Sized> IndexMut<u32> for DeviceTable<M> {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut DeviceState<M> {
        &mut self.0[index as usize]
    }
}
