//! Always a worker against a non-blocking attempt first, without and with the hint; and the loop
//! device of the kernel against the engine.
//!
//! Invariant: a sparse file has no allocated blocks when a measurement begins; a loop device is
//! detached after each measurement.

use std::io;

use nowait::{Config, WorkerPool};

use crate::ablation::TableSelection;
use crate::ablation::blocking_calls::{self, in_threads};
use crate::ablation::closed_loop::drive;
use crate::ablation::fixture::{Fixture, Queue, ring_engine};
use crate::ablation::gain_table::{Metric, Row, Sample, Source, Table, Unit, cell};
use crate::ablation::loop_device::LoopDevice;
use crate::ablation::tables::{PAGE_BYTES, RANDOM_READ, source};
use crate::offsets::{Offsets, Region};
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

pub(crate) fn tables<'a>(fixture: &'a Fixture<'a>) -> Vec<Table<'a>> {
    let row = |title: String, is_sparse, direction, order, source| {
        let load = Workload { direction, order, depth: DEPTH, ..RANDOM_READ };
        let cells = VARIANTS.map(|(name, nowait_first, hint)| {
            let config = Config { nowait_first, hint, ..Config::default() };
            cell(name, move || jobs(fixture, is_sparse, load, config))
        });
        Row { title, source, cells: cells.into() }
    };
    let mut rows = Vec::new();
    for &direction in fixture.directions() {
        let title = format!("stable mapping, sequential {}", direction.name());
        rows.push(row(title, false, direction, Order::Sequential, source("5×", 5.0)));
    }
    let regress = Source { words: "regress without hint", factor: None };
    for (order, source) in [(Order::Sequential, None), (Order::Random, Some(regress))] {
        let title = format!("sparse file, {} write", order.name());
        rows.push(row(title, true, Direction::Write, order, source));
    }
    let obstacle = LoopDevice::obstacle();
    let not_measured = |why| format!("{NOTE}. The kernel's loop device is not measured: {why}");
    let jobs = Table {
        what: TableSelection::Nowait,
        title: "always a worker, and nowait first".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        note: obstacle.map_or_else(|| NOTE.to_owned(), not_measured),
        rows,
    };
    let with_loop = obstacle.is_none().then(|| loop_table(fixture));
    std::iter::once(jobs).chain(with_loop).collect()
}

/// Measures `load` of each job on its part of the file, for the duration of a measurement; or each
/// block of a sparse file once.
fn jobs(
    fixture: &Fixture<'_>,
    is_sparse: bool,
    load: Workload,
    config: Config,
) -> io::Result<Sample> {
    let (path, bytes) = match is_sparse {
        false => (fixture.path.to_owned(), fixture.bytes),
        true => (fixture.sparse(SPARSE_BYTES)?, SPARSE_BYTES),
    };
    let disk = fixture.hinted_disk(&path, config.hint)?;
    let workers = WorkerPool::new(&disk, config.workers);
    let all = Region { start: 0, bytes, block: PAGE_BYTES as u64 };
    let job = |job: usize, gate: &blocking_calls::Gate| {
        let region = all.part(job as u64, JOBS as u64);
        let engine = ring_engine(&disk, &workers, config);
        let mut offsets = match is_sparse {
            true => Offsets::once(load.order, region, region.start),
            false => Offsets::endless(load.order, region, 0),
        };
        gate.wait();
        drive(&mut engine?, &load, &mut offsets, fixture.stop_condition(true))
    };
    in_threads(JOBS, job)?.sample()
}

fn loop_table<'a>(fixture: &'a Fixture<'a>) -> Table<'a> {
    let row = |&direction: &Direction| {
        let load = Workload { direction, ..RANDOM_READ };
        let engine = move || fixture.on(Queue::File, &load, Config::default());
        let cells = vec![
            cell("loop device", move || on_loop_device(fixture, &load)),
            cell("engine", engine),
        ];
        Row { title: format!("4K random {}", direction.name()), source: None, cells }
    };
    Table {
        what: TableSelection::Nowait,
        title: "the kernel's loop device and the engine, depth 1".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        note: NOTE_LOOP.to_owned(),
        rows: fixture.directions().iter().map(row).collect(),
    }
}

fn on_loop_device(fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
    let device = LoopDevice::over(fixture.path, fixture.writable, fixture.direct)?;
    blocking_calls::run(&fixture.plain(&device.path, true)?, load, fixture)
}
