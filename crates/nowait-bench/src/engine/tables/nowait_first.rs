//! Always a worker against trying without waiting first, without and with the hint; and the kernel's
//! loop device against the engine.
//!
//! Invariant: a sparse file has no storage when a turn begins; a loop device is taken down after each.
//! Knows: scene, drive, psync, loop_device. Known by: tables.

use std::io;
use std::path::Path;
use std::sync::Arc;

use nowait::{Config, Disk, Extents, Workers};

use super::{PAGE_BYTES, RANDOM_READ, names, source, word};
use crate::engine::What;
use crate::engine::drive::{Stretch, drive};
use crate::engine::loop_device::LoopDevice;
use crate::engine::places::{Places, Region};
use crate::engine::plan::{Plan, PlannedRow, Turn};
use crate::engine::psync::{self, in_threads};
use crate::engine::scene::{Scene, ring_engine};
use crate::engine::table::{Gain, Sample, Source, Unit};
use crate::workload::{Direction, Order, Workload};

const JOBS: usize = 12;
/// Of each job.
const DEPTH: usize = 16;
const SPARSE_BYTES: u64 = 64 << 20;
const NOTE: &str = "12 jobs, each a thread with an engine and a part of the file of its own, 4K, \
    depth 16. always a worker: nowait_first off. The sparse file has no storage when a turn begins, \
    and each of its blocks is written once. Source: 12 jobs on a stable mapping 5×; random writes to \
    a sparse file regress without a hint";
const NOTE_LOOP: &str = "The same file at depth 1: plain system calls on the kernel's loop device \
    over it, and the engine on it directly";

/// The three ways of serving.
const WAYS: [(&str, bool, bool); 3] = [
    ("always a worker", false, true),
    ("nowait first, no hint", true, false),
    ("nowait first, hint", true, true),
];

/// What the jobs do.
#[derive(Clone, Copy)]
enum Jobs {
    /// On the file, which is mapped, for as long as a turn is.
    Stable(Direction),
    /// Each block of a sparse file once.
    Sparse(Order),
}

pub(crate) fn plan<'a>(scene: &'a Scene<'a>) -> Vec<Plan<'a>> {
    let mut rows = Vec::new();
    for &direction in scene.directions() {
        let title = format!("stable mapping, sequential {}", word(direction));
        rows.push(row(scene, title, Jobs::Stable(direction), source("5×", 5.0)));
    }
    for (name, order) in [("sequential", Order::Sequential), ("random", Order::Random)] {
        let regress = Source { words: "regress without hint", factor: None };
        let source = (order == Order::Random).then_some(regress);
        rows.push(row(scene, format!("sparse file, {name} write"), Jobs::Sparse(order), source));
    }
    let jobs = Plan {
        what: What::Nowait,
        title: "always a worker, and nowait first".to_owned(),
        unit: Unit::Iops,
        gain: Gain::OverFirst,
        variants: names(&WAYS.map(|(name, ..)| name)),
        note: NOTE.to_owned(),
        rows,
    };
    vec![jobs, plan_loop(scene)]
}

fn row<'a>(
    scene: &'a Scene<'a>,
    title: String,
    jobs: Jobs,
    source: Option<Source>,
) -> PlannedRow<'a> {
    let turns = WAYS.map(|(_, nowait_first, hint)| -> Turn<'a> {
        let config = Config { nowait_first, hint, ..Config::default() };
        Box::new(move || jobs.measure(scene, config))
    });
    PlannedRow { title, source, turns: turns.into() }
}

impl Jobs {
    fn measure(self, scene: &Scene<'_>, config: Config) -> io::Result<Sample> {
        match self {
            Jobs::Stable(_) => self.on(scene, scene.path, scene.bytes, config),
            Jobs::Sparse(_) => self.on(scene, &scene.sparse(SPARSE_BYTES)?, SPARSE_BYTES, config),
        }
    }

    fn load(self) -> Workload {
        let (direction, order) = match self {
            Jobs::Stable(direction) => (direction, Order::Sequential),
            Jobs::Sparse(order) => (Direction::Write, order),
        };
        Workload { direction, order, block_bytes: PAGE_BYTES, depth: DEPTH, beside: None }
    }

    fn on(self, scene: &Scene<'_>, path: &Path, bytes: u64, config: Config) -> io::Result<Sample> {
        let disk = scene.hinted_disk(path, config.hint)?;
        let workers = Workers::new(&disk, config.workers);
        let all = Region { start: 0, bytes, block: PAGE_BYTES as u64 };
        let region = |job: usize| all.part(job as u64, JOBS as u64);
        let run = |job: usize, gate: &psync::Gate| {
            self.job(scene, &disk, &workers, region(job), config, gate)
        };
        in_threads(JOBS, run)?.sample()
    }

    fn job(
        self,
        scene: &Scene<'_>,
        disk: &Arc<Disk<Extents>>,
        workers: &Workers,
        region: Region,
        config: Config,
        gate: &psync::Gate,
    ) -> io::Result<Stretch> {
        let load = self.load();
        let engine = ring_engine(disk, workers, config);
        let mut places = match self {
            Jobs::Stable(_) => Places::endless(load.order, region, region.start),
            Jobs::Sparse(_) => Places::once(load.order, region, region.start),
        };
        gate.wait();
        drive(&mut engine?, &load, &mut places, scene.pace(true))
    }
}

fn plan_loop<'a>(scene: &'a Scene<'a>) -> Plan<'a> {
    let row = |&direction: &Direction| {
        let load = Workload { direction, ..RANDOM_READ };
        let turns: Vec<Turn<'a>> = vec![
            Box::new(move || on_loop_device(scene, &load)),
            Box::new(move || scene.on_file(&load, Config::default())),
        ];
        PlannedRow { title: format!("4K random {}", word(direction)), source: None, turns }
    };
    Plan {
        what: What::Nowait,
        title: "the kernel's loop device and the engine, depth 1".to_owned(),
        unit: Unit::Iops,
        gain: Gain::OverFirst,
        variants: names(&["loop device", "engine"]),
        note: NOTE_LOOP.to_owned(),
        rows: scene.directions().iter().map(row).collect(),
    }
}

fn on_loop_device(scene: &Scene<'_>, load: &Workload) -> io::Result<Sample> {
    let device = LoopDevice::over(scene.path, scene.writable, scene.direct)?;
    let file = scene.plain(&device.path, true)?;
    psync::run(&file, load, scene, scene.pace(true).warm_up())?;
    psync::run(&file, load, scene, scene.pace(true))?.sample()
}
