//! The simple path off and on: the gain of the early decision, on the null queue and on the file.
//!
//! Invariant: both variants make the same requests.

use std::io::{self, IoSliceMut};

use nowait::{BlockingFile, Config, WorkerPool};

use crate::ablation::blocking_calls::{Block, calls, whole};
use crate::ablation::fixture::{Fixture, Queue, ring_tasks};
use crate::ablation::gain_table::{Metric, Row, Sample, Source, Table, Unit};
use crate::ablation::tables::{PAGE_BYTES, RANDOM_READ, source, switched};
use crate::ablation::{TableSelection, async_loop};
use crate::workload::Workload;

const DEPTHS: [usize; 4] = [1, 128, 256, 512];
const NOTE: &str = "4K random reads. poll: Engine, on a queue that does nothing (the engine's own \
    cost, no latencies taken) and on the file. sync: File, one call after the other; it has no \
    switch, so off is the same read into two touching halves, which takes the generic way. \
    async: AsyncFile, whose engine is on a thread of its own: each request pays for a hop to that \
    thread and one back, also at depth 1. Source: 4K randread, polled, depth 512 +16 %; libaio +4 %; depth 1 no change";
const VARIANTS: [&str; 2] = ["off", "on"];

pub(crate) fn table<'a>(fixture: &'a Fixture<'a>) -> Table<'a> {
    let load = |depth| Workload { depth, ..RANDOM_READ };
    let config = |simple| Config { simple, ..Config::default() };
    let mut rows = Vec::new();
    for queue in [Queue::Null, Queue::File] {
        rows.extend(DEPTHS.map(|depth| Row {
            title: format!("{}, poll, depth {depth}", queue.name()),
            source: of(depth),
            cells: switched(VARIANTS, move |on| fixture.on(queue, &load(depth), config(on))),
        }));
    }
    rows.push(Row {
        title: "file, sync, depth 1".to_owned(),
        source: of(1),
        cells: switched(VARIANTS, |on| sync(fixture, on)),
    });
    rows.extend(DEPTHS.map(|depth| Row {
        title: format!("file, async, depth {depth}"),
        source: None,
        cells: switched(VARIANTS, move |on| in_tasks(fixture, &load(depth), config(on))),
    }));
    Table {
        what: TableSelection::Simple,
        title: "simple path off and on, 4K random read".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
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
        whole(got, PAGE_BYTES)
    };
    fixture.measure(&RANDOM_READ, true, |offsets, stop_condition| {
        calls(offsets, stop_condition, PAGE_BYTES, &mut read)
    })
}

/// Measures the async interface, on a ring like the polled interface.
fn in_tasks(fixture: &Fixture<'_>, load: &Workload, config: Config) -> io::Result<Sample> {
    // Without hints every byte counts as mapped, as in the other interfaces.
    let disk = fixture.hinted_disk(fixture.path, false)?;
    let workers = WorkerPool::new(&disk, config.workers);
    let file = ring_tasks(disk, workers, config)?;
    fixture.measure(load, true, |offsets, stop_condition| {
        async_loop::drive(load, offsets, stop_condition, |pos, buffer| file.read(pos, buffer))
    })
}
