//! The simple path off and on: what deciding early saves, on a queue that does nothing and on the
//! file.
//!
//! Invariant: both variants make the same requests. Knows: scene, drive, executor, psync. Known by:
//! tables.

use std::io::{self, IoSliceMut};

use nowait::{AsyncFile, Config, File, Uring, Workers};

use super::{OFF_AND_ON, PAGE_BYTES, RANDOM_READ, names, source};
use crate::engine::What;
use crate::engine::drive::Pace;
use crate::engine::executor;
use crate::engine::plan::{Plan, PlannedRow, Turn};
use crate::engine::psync::{Block, calls};
use crate::engine::scene::Scene;
use crate::engine::table::{Gain, Sample, Source, Unit};
use crate::workload::Workload;

const DEPTHS: [usize; 4] = [1, 128, 256, 512];
const NOTE: &str = "4K random reads. poll: Engine, on a queue that does nothing (the engine's own \
    cost, no latencies taken) and on the file. sync: File, one call after the other; it has no \
    switch, so off is the same read into two touching halves, which takes the generic way. \
    async: AsyncFile, whose engine is on a thread of its own: each request pays for a hop to that \
    thread and one back, also at depth 1. Source: 4K randread, polled, depth 512 +16 %; libaio +4 %; depth 1 no change";

pub(crate) fn plan<'a>(scene: &'a Scene<'a>) -> Plan<'a> {
    let mut rows = Vec::new();
    for null in [true, false] {
        for depth in DEPTHS {
            let load = Workload { depth, ..RANDOM_READ };
            let turns = OFF_AND_ON.map(|simple| -> Turn<'a> {
                let config = Config { simple, ..Config::default() };
                if null {
                    Box::new(move || scene.on_null(&load, config))
                } else {
                    Box::new(move || scene.on_file(&load, config))
                }
            });
            let queue = if null { "null queue" } else { "file" };
            let title = format!("{queue}, poll, depth {depth}");
            rows.push(PlannedRow { title, source: of(depth), turns: turns.into() });
        }
    }
    let turns = OFF_AND_ON.map(|simple| -> Turn<'a> { Box::new(move || sync(scene, simple)) });
    rows.push(PlannedRow {
        title: "file, sync, depth 1".to_owned(),
        source: of(1),
        turns: turns.into(),
    });
    rows.extend(DEPTHS.map(|depth| {
        let load = Workload { depth, ..RANDOM_READ };
        let turns = OFF_AND_ON.map(|simple| -> Turn<'a> {
            let config = Config { simple, ..Config::default() };
            Box::new(move || in_tasks(scene, &load, config))
        });
        let title = format!("file, async, depth {depth}");
        PlannedRow { title, source: None, turns: turns.into() }
    }));
    Plan {
        what: What::Simple,
        title: "simple path off and on, 4K random read".to_owned(),
        unit: Unit::Iops,
        gain: Gain::OverFirst,
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

/// The blocking face.
fn sync(scene: &Scene<'_>, simple: bool) -> io::Result<Sample> {
    let file = File::new(scene.disk()?);
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
    let run = |places: &mut _, pace: Pace<'_>| {
        calls(places, pace.warm_up(), PAGE_BYTES, &mut read)?;
        calls(places, pace, PAGE_BYTES, &mut read)
    };
    scene.stretch(&RANDOM_READ, run, true)
}

/// The async face, on a ring as the polled one is.
fn in_tasks(scene: &Scene<'_>, load: &Workload, config: Config) -> io::Result<Sample> {
    // Without hints every byte is taken for mapped, as by the other faces.
    let disk = scene.hinted_disk(scene.path, false)?;
    let workers = Workers::new(&disk, config.workers);
    let file = AsyncFile::with_queue(disk, workers, config, |disk| Uring::new(disk.fd()))?;
    let read = |pos, buffer| file.read(pos, buffer);
    let run = |places: &mut _, pace: Pace<'_>| {
        executor::drive(load, places, pace.warm_up(), read)?;
        executor::drive(load, places, pace, read)
    };
    scene.stretch(load, run, true)
}
