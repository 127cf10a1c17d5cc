//! Tests of races between the start of a request and other threads that mark holes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::block::allocation_cache::AllocationCache;
use crate::block::block_map::{BlockMap, Extent, Intent, WouldBlock};
use crate::block::device::BlockDevice;
use crate::block::range_lock::LockMode;
use crate::blocking::worker_pool::WorkerPool;
use crate::engine::Engine;
use crate::engine::attached_device::DeviceHandle;
use crate::sim::{Faults, SimDevice, SimOptions, SimQueue};
use crate::storage::open_options::OpenOptions;
use crate::storage::sim::SimStorage;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::request::{Flags, Op, Request};

const BLOCK: u64 = 4096;
const THERE: ByteRange = ByteRange::new(BLOCK, BLOCK);
const ELSEWHERE: ByteRange = ByteRange::new(2 * BLOCK, BLOCK);

/// A map that marks the range as a hole after each answer, as another thread may, unless the range
/// is locked.
struct RacingMap {
    map: AllocationCache,
    disk: OnceLock<Weak<BlockDevice<Self>>>,
    races: AtomicBool,
}

impl RacingMap {
    fn race(&self, range: ByteRange) {
        let disk = self.disk.get().and_then(Weak::upgrade);
        if let Some(disk) = disk.filter(|_| self.races.load(Ordering::Relaxed))
            && disk.ranges.try_lock(range, LockMode::Exclusive)
        {
            self.map.invalidate(range);
            self.map.mark_hole(range);
            disk.ranges.unlock(range, LockMode::Exclusive);
        }
    }
}

impl BlockMap for RacingMap {
    fn map_extent(&self, range: ByteRange, intent: Intent) -> Result<Extent, WouldBlock> {
        let extent = self.map.map_extent(range, intent);
        if intent == Intent::Write {
            self.race(range);
        }
        extent
    }

    fn is_mapped(&self, range: ByteRange) -> bool {
        let mapped = self.map.is_mapped(range);
        self.race(range);
        mapped
    }

    fn mark_allocated(&self, range: ByteRange) {
        self.map.mark_allocated(range);
    }

    fn invalidate(&self, range: ByteRange) {
        self.map.invalidate(range);
    }

    fn mark_hole(&self, range: ByteRange) {
        self.map.mark_hole(range);
    }

    fn caches_holes(&self) -> bool {
        true
    }
}

struct Rig {
    device: Arc<SimDevice>,
    disk: Arc<BlockDevice<RacingMap>>,
    workers: WorkerPool,
    engine: Engine<SimQueue, RacingMap>,
    handle: DeviceHandle<RacingMap>,
}

impl Rig {
    fn new(config: Config) -> Self {
        let device = Arc::new(SimDevice::new(SimOptions::able(16 * BLOCK)));
        let storage = SimStorage::open(&device, 0, OpenOptions::default());
        let map = AllocationCache::new(device.bytes(), true);
        let map = RacingMap { map, disk: OnceLock::new(), races: AtomicBool::new(false) };
        let disk = Arc::new(BlockDevice::linear(Arc::new(storage), map).unwrap());
        let _ = disk.map.disk.set(Arc::downgrade(&disk));
        let workers = WorkerPool::simulated();
        let queue = SimQueue::new(device.clone()).unwrap();
        let mut engine = Engine::new(queue, workers.clone(), config).unwrap();
        let handle = engine.attach(disk.clone()).unwrap();
        let mut rig = Self { device, disk, workers, engine, handle };
        rig.write(THERE);
        rig.write(ELSEWHERE);
        rig.settle();
        rig.disk.map.races.store(true, Ordering::Relaxed);
        rig
    }

    fn write(&mut self, range: ByteRange) {
        let buf = self.engine.buffer(&self.handle, range).unwrap();
        let io = Request { op: Op::Write, flags: Flags::NONE, range };
        assert!(self.engine.submit(&self.handle, io, buf, 0).is_ok());
    }

    /// Polls the engine without waiting.
    fn poll(&mut self) {
        self.engine.poll().unwrap();
    }

    /// Whether a write without a worker is in flight to a range that is cached as a hole.
    fn hides_data(&self) -> bool {
        let without_worker = self.engine.in_flight() > self.workers.waiting();
        without_worker && self.disk.is_hole(THERE)
    }

    fn settle(&mut self) {
        while self.engine.in_flight() > 0 {
            self.poll();
            while let Some(item) = self.workers.take_simulated(0) {
                self.workers.run(item);
            }
            while let Some(done) = self.engine.next() {
                assert_eq!(done.result().unwrap(), BLOCK);
            }
        }
    }
}

#[test]
fn c18_a_write_without_a_worker_never_lands_where_a_hole_was_just_marked() {
    for simple in [true, false] {
        let mut rig = Rig::new(Config { simple, ..Config::default() });
        rig.write(THERE);
        rig.poll();
        let hides = rig.hides_data();
        rig.settle();
        assert!(!hides, "simple: {simple}");
    }
}

#[test]
fn c18_a_deferred_overwrite_goes_to_a_worker_where_a_hole_was_marked() {
    let mut rig = Rig::new(Config::default());
    rig.disk.map.races.store(false, Ordering::Relaxed);
    rig.device.set_faults(Faults { refusals: u16::MAX, ..Faults::default() });
    rig.write(ELSEWHERE);
    rig.write(THERE);
    while rig.engine.stats().deferred == 0 {
        rig.poll();
    }
    rig.device.set_faults(Faults::default());
    rig.disk.map.invalidate(THERE);
    rig.disk.map.mark_hole(THERE);
    let probe = rig.workers.take_simulated(0).unwrap();
    rig.workers.run(probe);
    // After 100 polls a write without a worker would have ended.
    let mut hides = false;
    for _ in 0..100 {
        rig.poll();
        hides |= rig.hides_data();
    }
    rig.settle();
    assert!(!hides);
}
