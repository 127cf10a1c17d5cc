//! What other threads may do between two steps of a request's start.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::config::Config;
use crate::disk::Disk;
use crate::engine::Engine;
use crate::error::Range;
use crate::io::{Flags, Io, Op};
use crate::map::{Extent, Extents, Intent, Map, WouldBlock};
use crate::ranges::Hold;
use crate::sim::{Faults, Sim, SimDevice, SimOptions};
use crate::storage::{OpenOptions, Storage};
use crate::worker::Workers;

const BLOCK: u64 = 4096;
const THERE: Range = Range::new(BLOCK, BLOCK);
const ELSEWHERE: Range = Range::new(2 * BLOCK, BLOCK);

/// A map in which somebody remembers a hole as soon as an answer was given, unless the range is held.
struct Beside {
    map: Extents,
    disk: OnceLock<Weak<Disk<Self>>>,
    strikes: AtomicBool,
}

impl Beside {
    fn strike(&self, range: Range) {
        let disk = self.disk.get().and_then(Weak::upgrade);
        if let Some(disk) = disk.filter(|_| self.strikes.load(Ordering::Relaxed))
            && disk.ranges.try_take(range, Hold::Exclusive)
        {
            self.map.forget(range);
            self.map.hole(range);
            disk.ranges.free(range, Hold::Exclusive);
        }
    }
}

impl Map for Beside {
    fn begin(&self, range: Range, intent: Intent) -> Result<Extent, WouldBlock> {
        let extent = self.map.begin(range, intent);
        if intent == Intent::Write {
            self.strike(range);
        }
        extent
    }

    fn is_mapped(&self, range: Range) -> bool {
        let mapped = self.map.is_mapped(range);
        self.strike(range);
        mapped
    }

    fn written(&self, range: Range) {
        self.map.written(range);
    }

    fn forget(&self, range: Range) {
        self.map.forget(range);
    }

    fn hole(&self, range: Range) {
        self.map.hole(range);
    }

    fn remembers_holes(&self) -> bool {
        true
    }
}

struct Rig {
    device: Arc<SimDevice>,
    disk: Arc<Disk<Beside>>,
    workers: Workers,
    engine: Engine<Sim, Beside>,
}

impl Rig {
    fn new(config: Config) -> Self {
        let device = Arc::new(SimDevice::new(SimOptions::able(16 * BLOCK)));
        let storage = Storage::simulated(&device, OpenOptions::default()).unwrap();
        let map = Extents::new(storage.size(), true);
        let map = Beside { map, disk: OnceLock::new(), strikes: AtomicBool::new(false) };
        let disk = Arc::new(Disk::mapped(storage, Vec::new(), device.bytes(), false, map));
        let _ = disk.map.disk.set(Arc::downgrade(&disk));
        let workers = Workers::simulated(&disk);
        let queue = Sim::new(device.clone()).unwrap();
        let engine = Engine::new(disk.clone(), workers.clone(), queue, config).unwrap();
        let mut rig = Self { device, disk, workers, engine };
        rig.write(THERE);
        rig.write(ELSEWHERE);
        rig.settle();
        rig.disk.map.strikes.store(true, Ordering::Relaxed);
        rig
    }

    fn write(&mut self, range: Range) {
        let buf = self.engine.buffer(range).unwrap();
        let io = Io { op: Op::Write, flags: Flags::NONE, range };
        assert!(self.engine.submit(io, buf, 0).is_ok());
    }

    /// Looks at the queue without waiting for it.
    fn poll(&mut self) {
        self.engine.poll().unwrap();
    }

    /// Whether a write without a worker is on its way to what is known as a hole.
    fn hides_data(&self) -> bool {
        let on_its_way = self.engine.in_flight() > self.workers.waiting();
        on_its_way && self.disk.is_hole(THERE)
    }

    fn settle(&mut self) {
        while self.engine.in_flight() > 0 {
            self.poll();
            while let Some(job) = self.workers.take(0) {
                self.workers.run(job);
            }
            while let Some(done) = self.engine.next() {
                assert_eq!(done.result().unwrap(), BLOCK);
            }
        }
    }
}

#[test]
fn c18_no_data_lands_without_a_worker_where_a_hole_was_remembered_just_before() {
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
fn c18_an_overwrite_that_was_parked_is_none_any_more_where_a_hole_was_remembered() {
    let mut rig = Rig::new(Config::default());
    rig.disk.map.strikes.store(false, Ordering::Relaxed);
    rig.device.set_faults(Faults { refusals: u16::MAX, ..Faults::default() });
    rig.write(ELSEWHERE);
    rig.write(THERE);
    while rig.engine.stats().parked == 0 {
        rig.poll();
    }
    rig.device.set_faults(Faults::default());
    rig.disk.map.forget(THERE);
    rig.disk.map.hole(THERE);
    let first = rig.workers.take(0).unwrap();
    rig.workers.run(first);
    // What is asked without waiting has ended by then.
    let mut hides = false;
    for _ in 0..100 {
        rig.poll();
        hides |= rig.hides_data();
    }
    rig.settle();
    assert!(!hides);
}
