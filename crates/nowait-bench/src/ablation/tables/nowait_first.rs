//! Always a worker against a non-blocking attempt first, without and with the hint; and the loop
//! device of the kernel against the engine.
//!
//! Invariant: a sparse file has no allocated blocks when a measurement begins; a loop device is
//! detached after each measurement.

use std::io;
use std::path::Path;
use std::sync::Arc;

use nowait::{AllocationCache, BlockDevice, Config, WorkerPool};

use crate::ablation::blocking_calls::in_threads;
use crate::ablation::closed_loop::{Interval, drive};
use crate::ablation::fixture::{Fixture, ring_engine};
use crate::ablation::loop_device::LoopDevice;
use crate::ablation::offsets::{Offsets, Region};
use crate::ablation::plan::{Measurement, Plan, PlannedRow};
use crate::ablation::result_table::{Metric, Sample, Source, Unit};
use crate::ablation::tables::{PAGE_BYTES, RANDOM_READ, names, source, word};
use crate::ablation::{TableSelection, blocking_calls};
use crate::workload::{Direction, Order, Workload};

const JOBS: usize = 12;
/// The depth of each job.
const DEPTH: usize = 16;
const SPARSE_BYTES: u64 = 64 << 20;
const NOTE: &str = "12 jobs, each a thread with an engine and a part of the file of its own, 4K, \
    depth 16. always a worker: nowait_first off. The sparse file has no storage when a turn begins, \
    and each of its blocks is written once. Source: 12 jobs on a stable mapping 5×; random writes to \
    a sparse file regress without a hint";
const NOTE_LOOP: &str = "The same file at depth 1: plain system calls on the kernel's loop device \
    over it, and the engine on it directly";

/// The three variants: title, non-blocking attempt first, hint.
const VARIANTS: [(&str, bool, bool); 3] = [
    ("always a worker", false, true),
    ("nowait first, no hint", true, false),
    ("nowait first, hint", true, true),
];

/// The load of the jobs.
#[derive(Clone, Copy)]
enum Jobs {
    /// Requests to the file, which is mapped, for the duration of a measurement.
    Stable(Direction),
    /// Each block of a sparse file once.
    Sparse(Order),
}

pub(crate) fn plan<'a>(fixture: &'a Fixture<'a>) -> Vec<Plan<'a>> {
    let mut rows = Vec::new();
    for &direction in fixture.directions() {
        let title = format!("stable mapping, sequential {}", word(direction));
        rows.push(row(fixture, title, Jobs::Stable(direction), source("5×", 5.0)));
    }
    for (name, order) in [("sequential", Order::Sequential), ("random", Order::Random)] {
        let regress = Source { words: "regress without hint", factor: None };
        let source = (order == Order::Random).then_some(regress);
        rows.push(row(fixture, format!("sparse file, {name} write"), Jobs::Sparse(order), source));
    }
    let jobs = Plan {
        what: TableSelection::Nowait,
        title: "always a worker, and nowait first".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        variants: names(&VARIANTS.map(|(name, ..)| name)),
        note: match LoopDevice::obstacle() {
            Some(obstacle) => {
                format!("{NOTE}. The kernel's loop device is not measured: {obstacle}")
            }
            None => NOTE.to_owned(),
        },
        rows,
    };
    let with_loop = LoopDevice::obstacle().is_none().then(|| plan_loop(fixture));
    std::iter::once(jobs).chain(with_loop).collect()
}

fn row<'a>(
    fixture: &'a Fixture<'a>,
    title: String,
    jobs: Jobs,
    source: Option<Source>,
) -> PlannedRow<'a> {
    let measurements = VARIANTS.map(|(_, nowait_first, hint)| -> Measurement<'a> {
        let config = Config { nowait_first, hint, ..Config::default() };
        Box::new(move || jobs.measure(fixture, config))
    });
    PlannedRow { title, source, measurements: measurements.into() }
}

impl Jobs {
    fn measure(self, fixture: &Fixture<'_>, config: Config) -> io::Result<Sample> {
        match self {
            Jobs::Stable(_) => self.on(fixture, fixture.path, fixture.bytes, config),
            Jobs::Sparse(_) => {
                self.on(fixture, &fixture.sparse(SPARSE_BYTES)?, SPARSE_BYTES, config)
            }
        }
    }

    fn load(self) -> Workload {
        let (direction, order) = match self {
            Jobs::Stable(direction) => (direction, Order::Sequential),
            Jobs::Sparse(order) => (Direction::Write, order),
        };
        Workload { direction, order, block_bytes: PAGE_BYTES, depth: DEPTH, beside: None }
    }

    fn on(
        self,
        fixture: &Fixture<'_>,
        path: &Path,
        bytes: u64,
        config: Config,
    ) -> io::Result<Sample> {
        let disk = fixture.hinted_disk(path, config.hint)?;
        let workers = WorkerPool::new(&disk, config.workers);
        let all = Region { start: 0, bytes, block: PAGE_BYTES as u64 };
        let region = |job: usize| all.part(job as u64, JOBS as u64);
        let run = |job: usize, gate: &blocking_calls::Gate| {
            self.job(fixture, &disk, &workers, region(job), config, gate)
        };
        in_threads(JOBS, run)?.sample()
    }

    fn job(
        self,
        fixture: &Fixture<'_>,
        disk: &Arc<BlockDevice<AllocationCache>>,
        workers: &WorkerPool,
        region: Region,
        config: Config,
        gate: &blocking_calls::Gate,
    ) -> io::Result<Interval> {
        let load = self.load();
        let engine = ring_engine(disk, workers, config);
        let mut offsets = match self {
            Jobs::Stable(_) => Offsets::endless(load.order, region, region.start),
            Jobs::Sparse(_) => Offsets::once(load.order, region, region.start),
        };
        gate.wait();
        drive(&mut engine?, &load, &mut offsets, fixture.stop_condition(true))
    }
}

fn plan_loop<'a>(fixture: &'a Fixture<'a>) -> Plan<'a> {
    let row = |&direction: &Direction| {
        let load = Workload { direction, ..RANDOM_READ };
        let measurements: Vec<Measurement<'a>> = vec![
            Box::new(move || on_loop_device(fixture, &load)),
            Box::new(move || fixture.on_file(&load, Config::default())),
        ];
        PlannedRow { title: format!("4K random {}", word(direction)), source: None, measurements }
    };
    Plan {
        what: TableSelection::Nowait,
        title: "the kernel's loop device and the engine, depth 1".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        variants: names(&["loop device", "engine"]),
        note: NOTE_LOOP.to_owned(),
        rows: fixture.directions().iter().map(row).collect(),
    }
}

fn on_loop_device(fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
    let device = LoopDevice::over(fixture.path, fixture.writable, fixture.direct)?;
    let file = fixture.plain(&device.path, true)?;
    blocking_calls::run(&file, load, fixture, fixture.stop_condition(true).warm_up())?;
    blocking_calls::run(&file, load, fixture, fixture.stop_condition(true))?.sample()
}
