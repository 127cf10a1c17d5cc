//! Always a worker against a non-blocking attempt first, without and with the hint; and the loop
//! device of the kernel against the engine.
//!
//! Invariant: a sparse file has no allocated blocks when a measurement begins; a loop device is
//! detached after each measurement.

use std::fmt;
use std::io;

use nowait::{Config, Flags, OpenOptions, WorkerPool};

use crate::ablation::bare_ring::BareRing;
use crate::ablation::blocking_calls::Jobs;
use crate::ablation::closed_loop::{StopCondition, drive};
use crate::ablation::fixture::{Fixture, ring_engine};
use crate::ablation::gain_table::{Metric, Row, Sample, Source, Table, Unit, cell};
use crate::ablation::loop_device::LoopDevice;
use crate::ablation::tables::{PAGE_BYTES, RANDOM_READ, every_request_tried, source};
use crate::args::What;
use crate::offsets::{Offsets, Region};
use crate::workload::{Direction, Order, Workload};

const JOBS: usize = 12;
/// The depth of each of several jobs.
const DEPTH: usize = 16;
const SPARSE_BYTES: u64 = 4 << 30;
const NOTE: &str = "4K. A job is a thread with an engine and a part of the file of its own. always a \
    worker: nowait_first off. The four after it try every request, however many are refused; each has \
    what the one before it has, and one switch more: the hint, merge, allocate_ahead. As by default: \
    with all that, and with back_off, which hands requests to workers for a while after many refusals. \
    The sparse file of 4 GiB has no storage when a turn begins, and each of its blocks is written at \
    most once. Source: 12 jobs on a stable mapping 5×; random writes to a sparse file regress without a hint";
const NOTE_LOOP: &str = "4K on the same file: a bare io_uring loop on the kernel's loop device over it, \
    and the engine on it directly. A job is a thread with a ring and a part of the file of its own. \
    The processor time of the loop device's kernel threads is not in CPU ns";

/// The variants: title, and the switches of nowait first, of the engine and of the disk.
fn variants() -> [(&'static str, Config, OpenOptions); 6] {
    let on = every_request_tried();
    let none = Config { nowait_first: false, merge: false, ..on };
    let first = Config { nowait_first: true, ..none };
    let merge = Config { merge: true, ..first };
    let plain = OpenOptions::new().allocate_ahead(false);
    let cached = plain.cache_holes(true);
    [
        ("always a worker", none, cached),
        ("nowait first, no hint", first, plain),
        ("nowait first, hint", first, cached),
        ("neighbours merged", merge, cached),
        ("allocate ahead", merge, cached.allocate_ahead(true)),
        ("as by default", Config::default(), cached.allocate_ahead(true)),
    ]
}

/// The client that makes the requests.
#[derive(Clone, Copy)]
enum Client {
    Engine(Config, OpenOptions),
    LoopDevice,
}

/// A row.
#[derive(Clone, Copy)]
struct Case {
    load: Workload,
    jobs: usize,
    is_sparse: bool,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Workload { order, direction, depth, .. } = self.load;
        let file = if self.is_sparse { "sparse file" } else { "stable mapping" };
        let jobs = if self.jobs == 1 { "1 job" } else { "12 jobs" };
        write!(f, "{file}, {} {}, {jobs}, depth {depth}", order.name(), direction.name())
    }
}

/// Writes to the sparse file, by 1 job and by 12.
fn sparse() -> impl Iterator<Item = Case> {
    [Order::Sequential, Order::Random].into_iter().flat_map(|order| {
        let load = Workload { direction: Direction::Write, order, depth: DEPTH, ..RANDOM_READ };
        [1, JOBS].map(|jobs| Case { load, jobs, is_sparse: true })
    })
}

pub(crate) fn tables<'a>(fixture: &'a Fixture<'a>) -> [Table<'a>; 2] {
    let table = |title: &str, note: &str, rows| Table {
        what: What::Nowait,
        title: title.to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        note: note.to_owned(),
        rows,
    };
    let stable = fixture.directions().iter().map(|&direction| {
        let load = Workload { direction, order: Order::Sequential, depth: DEPTH, ..RANDOM_READ };
        Case { load, jobs: JOBS, is_sparse: false }
    });
    let attempts = stable.chain(sparse()).map(|case| {
        let regress = Source { words: "regress without hint", factor: None };
        let source = match (case.is_sparse, case.load.order) {
            (false, _) => source("5×", 5.0),
            (true, Order::Random) => Some(regress),
            (true, Order::Sequential) => None,
        };
        let cells = variants().map(|(name, config, options)| {
            cell(name, move || case.measure(fixture, Client::Engine(config, options)))
        });
        Row { title: case.to_string(), source, cells: cells.into() }
    });
    let depths = fixture.directions().iter().flat_map(|&direction| {
        [(1, 1), (16, 1), (64, 1), (DEPTH, JOBS)].map(|(depth, jobs)| {
            let load = Workload { direction, depth, ..RANDOM_READ };
            Case { load, jobs, is_sparse: false }
        })
    });
    let cached = OpenOptions::new().cache_holes(true);
    let beside_loop = depths.chain(sparse()).map(|case| {
        let clients = [
            ("loop device", Client::LoopDevice),
            ("engine", Client::Engine(every_request_tried(), cached)),
        ];
        let cells = clients.map(|(name, client)| cell(name, move || case.measure(fixture, client)));
        Row { title: case.to_string(), source: None, cells: cells.into() }
    });
    [
        table("always a worker, and nowait first", NOTE, attempts.collect()),
        table("the kernel's loop device and the engine", NOTE_LOOP, beside_loop.collect()),
    ]
}

impl Case {
    /// Measures the load of each job on its part of the file, for the duration of a measurement; in a
    /// sparse file at most until each block was written once.
    fn measure(self, fixture: &Fixture<'_>, client: Client) -> io::Result<Sample> {
        let (path, bytes, writable) = match self.is_sparse {
            false => (fixture.path.to_owned(), fixture.bytes, fixture.writable),
            true => (fixture.sparse(SPARSE_BYTES)?, SPARSE_BYTES, true),
        };
        let load = self.load;
        let all = Region { start: 0, bytes, block: PAGE_BYTES as u64 };
        let jobs = Jobs { count: self.jobs, order: load.order, all, once: self.is_sparse };
        let stop_condition = fixture.stop_condition(true);
        match client {
            Client::Engine(config, options) => {
                let disk = fixture.cached_disk(&path, options)?;
                let workers = WorkerPool::default();
                jobs.run(stop_condition, || {
                    let mut engine = ring_engine(&disk, &workers, config)?;
                    Ok(move |offsets: &mut Offsets, stop_condition: StopCondition<'_>| {
                        drive(&mut engine, &load, Flags::NONE, offsets, stop_condition)
                    })
                })
            }
            Client::LoopDevice => {
                let device = LoopDevice::over(&path, writable, fixture.direct)?;
                let file = Fixture::plain(&device.path, writable, true)?;
                jobs.run(stop_condition, || {
                    let mut ring = BareRing::new(&file, &load)?;
                    Ok(move |offsets: &mut Offsets, stop_condition: StopCondition<'_>| {
                        ring.run(offsets, stop_condition)
                    })
                })
            }
        }
    }
}
