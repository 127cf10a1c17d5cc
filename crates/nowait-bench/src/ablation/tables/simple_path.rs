//! The simple path off and on: the gain of the early decision, on the null queue and on the file.
//!
//! Invariant: both variants make the same requests.

use std::io::{self, IoSliceMut};

use nowait::{BlockingFile, Config, WorkerPool};

use crate::ablation::blocking_calls::{Block, calls};
use crate::ablation::closed_loop::StopCondition;
use crate::ablation::fixture::{Fixture, ring_tasks};
use crate::ablation::plan::{Measurement, Plan, PlannedRow};
use crate::ablation::result_table::{Metric, Sample, Source, Unit};
use crate::ablation::tables::{OFF_AND_ON, PAGE_BYTES, RANDOM_READ, names, source};
use crate::ablation::{TableSelection, executor};
use crate::workload::Workload;

const DEPTHS: [usize; 4] = [1, 128, 256, 512];
const NOTE: &str = "4K random reads. poll: Engine, on a queue that does nothing (the engine's own \
    cost, no latencies taken) and on the file. sync: File, one call after the other; it has no \
    switch, so off is the same read into two touching halves, which takes the generic way. \
    async: AsyncFile, whose engine is on a thread of its own: each request pays for a hop to that \
    thread and one back, also at depth 1. Source: 4K randread, polled, depth 512 +16 %; libaio +4 %; depth 1 no change";

pub(crate) fn plan<'a>(fixture: &'a Fixture<'a>) -> Plan<'a> {
    let mut rows = Vec::new();
    for null in [true, false] {
        for depth in DEPTHS {
            let load = Workload { depth, ..RANDOM_READ };
            let measurements = OFF_AND_ON.map(|simple| -> Measurement<'a> {
                let config = Config { simple, ..Config::default() };
                if null {
                    Box::new(move || fixture.on_null(&load, config))
                } else {
                    Box::new(move || fixture.on_file(&load, config))
                }
            });
            let queue = if null { "null queue" } else { "file" };
            let title = format!("{queue}, poll, depth {depth}");
            rows.push(PlannedRow { title, source: of(depth), measurements: measurements.into() });
        }
    }
    let measurements =
        OFF_AND_ON.map(|simple| -> Measurement<'a> { Box::new(move || sync(fixture, simple)) });
    rows.push(PlannedRow {
        title: "file, sync, depth 1".to_owned(),
        source: of(1),
        measurements: measurements.into(),
    });
    rows.extend(DEPTHS.map(|depth| {
        let load = Workload { depth, ..RANDOM_READ };
        let measurements = OFF_AND_ON.map(|simple| -> Measurement<'a> {
            let config = Config { simple, ..Config::default() };
            Box::new(move || in_tasks(fixture, &load, config))
        });
        let title = format!("file, async, depth {depth}");
        PlannedRow { title, source: None, measurements: measurements.into() }
    }));
    Plan {
        what: TableSelection::Simple,
        title: "simple path off and on, 4K random read".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        variants: names(&["off", "on"]),
        note: NOTE.to_owned(),
        rows,
    }
}

fn of(depth: usize) -> Option<Source> {
    match depth {
        1 => source("±0", 1.0),
        512 => source("+16 %", 1.16),
        _ => None,
    }
}

/// Measures the blocking interface.
fn sync(fixture: &Fixture<'_>, simple: bool) -> io::Result<Sample> {
    let file = BlockingFile::new(fixture.disk()?);
    let mut block = Block::random();
    let page = &mut block.0[..PAGE_BYTES];
    let mut read = |pos| {
        let got = if simple {
            file.read_at(page, pos)?
        } else {
            let (first, second) = page.split_at_mut(PAGE_BYTES / 2);
            file.read_vectored_at(&mut [IoSliceMut::new(first), IoSliceMut::new(second)], pos)?
        };
        if got == PAGE_BYTES { Ok(()) } else { Err(io::Error::other("a read was cut short")) }
    };
    let run = |offsets: &mut _, stop_condition: StopCondition<'_>| {
        calls(offsets, stop_condition.warm_up(), PAGE_BYTES, &mut read)?;
        calls(offsets, stop_condition, PAGE_BYTES, &mut read)
    };
    fixture.measure_loop(&RANDOM_READ, run, true)
}

/// Measures the async interface, on a ring like the polled interface.
fn in_tasks(fixture: &Fixture<'_>, load: &Workload, config: Config) -> io::Result<Sample> {
    // Without hints every byte counts as mapped, as in the other interfaces.
    let disk = fixture.hinted_disk(fixture.path, false)?;
    let workers = WorkerPool::new(&disk, config.workers);
    let file = ring_tasks(disk, workers, config)?;
    let read = |pos, buffer| file.read(pos, buffer);
    let run = |offsets: &mut _, stop_condition: StopCondition<'_>| {
        executor::drive(load, offsets, stop_condition.warm_up(), read)?;
        executor::drive(load, offsets, stop_condition, read)
    };
    fixture.measure_loop(load, run, true)
}
