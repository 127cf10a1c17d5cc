//! The simple path off and on: the gain of the early decision, on the null queue and on the file.
//!
//! Invariant: both variants make the same requests.

use std::io::{self, IoSliceMut};

use nowait::{BlockingFile, Config};

use crate::ablation::async_loop::{self, AsyncApi};
use crate::ablation::blocking_calls::{Block, calls, whole};
use crate::ablation::fixture::{Fixture, Queue};
use crate::ablation::gain_table::{Metric, Row, Sample, Source, Table, Unit};
use crate::ablation::tables::{PAGE_BYTES, RANDOM_READ, every_request_tried, source, switched};
use crate::args::What;
use crate::workload::{Direction, Workload};

const DEPTHS: [usize; 4] = [1, 128, 256, 512];
/// The depth of rows that are measured at one depth only.
const DEPTH: usize = 128;
const NOTE: &str = "4K random. Engine: on a queue that does nothing (the engine's own cost, no latencies \
    taken) and on the file, by io_uring where nothing else is named. allocation cache: extents come from it, as in a server; else every \
    byte counts as mapped. polled: the ring polls the device (HIPRI), which the source's \
    figure for depth 512 is about. BlockingFile: one call after the other; it has no switch, so off is \
    the same read into two touching halves, which takes the general path. AsyncFile: its engine is on \
    a thread of its own, so each request pays for a hop to that thread and one back. LocalAsyncFile: its \
    engine is on the tasks' thread. Instructions are not counted here but by cargo test -p nowait --test \
    cost. Source: 4K randread, polled, depth 512 +16 %; libaio +4 %; depth 1 no change";
const VARIANTS: [&str; 2] = ["off", "on"];

/// The interface that the requests go through.
#[derive(Clone, Copy)]
enum Api {
    Engine(Queue),
    /// An engine that takes its extents from the allocation cache.
    Cached(Queue),
    Blocking,
    Tasks(AsyncApi),
}

impl Api {
    fn name(self) -> String {
        match self {
            Api::Engine(queue) => format!("{}, Engine", queue.name()),
            Api::Cached(queue) => format!("{}, Engine, allocation cache", queue.name()),
            Api::Blocking => "file, BlockingFile".to_owned(),
            Api::Tasks(api) => format!("file, {}", api.name()),
        }
    }

    fn measure(self, fixture: &Fixture<'_>, load: &Workload, simple: bool) -> io::Result<Sample> {
        let config = Config { simple, ..every_request_tried() };
        match self {
            Api::Engine(queue) => fixture.on(queue, load, config),
            Api::Cached(queue) => fixture.on_cache(queue, load, config),
            Api::Blocking => blocking(fixture, simple),
            Api::Tasks(api) => async_loop::run(api, fixture, load, config),
        }
    }
}

/// The interface, direction and depth of each row, and the source's figure.
fn cases() -> Vec<(Api, Direction, usize, Option<Source>)> {
    use AsyncApi::{AnyThread, ThisThread};
    use Direction::{Read, Write};
    let at_depths = |api, depth_1: Option<Source>| {
        DEPTHS.map(move |depth| (api, Read, depth, depth_1.filter(|_| depth == 1)))
    };
    let others = |queue| {
        let engines =
            [(Api::Engine(queue), Write), (Api::Cached(queue), Read), (Api::Cached(queue), Write)];
        engines.map(|(api, direction)| (api, direction, DEPTH, None))
    };
    let same = source("±0", 1.0);
    let mut cases = Vec::new();
    cases.extend(at_depths(Api::Engine(Queue::Null), None));
    cases.extend(others(Queue::Null));
    cases.extend(at_depths(Api::Engine(Queue::File), same));
    cases.extend(others(Queue::File));
    cases.push((Api::Engine(Queue::Polled), Read, 512, source("+16 % (polled)", 1.16)));
    cases.push((Api::Engine(Queue::Aio), Read, 512, source("+4 % (libaio)", 1.04)));
    cases.push((Api::Blocking, Read, 1, same));
    cases.extend(
        [AnyThread, ThisThread].into_iter().flat_map(|api| at_depths(Api::Tasks(api), None)),
    );
    cases
}

pub(crate) fn table<'a>(fixture: &'a Fixture<'a>) -> Table<'a> {
    let allowed = |direction| fixture.directions().contains(&direction);
    let cases = cases().into_iter().filter(|(_, direction, ..)| allowed(*direction));
    let row = |(api, direction, depth, source): (Api, Direction, usize, _)| {
        let load = Workload { direction, depth, ..RANDOM_READ };
        let cells = switched(VARIANTS, move |on| api.measure(fixture, &load, on));
        let title = format!("{}, {}, depth {depth}", api.name(), direction.name());
        Row { title, source, cells }
    };
    Table {
        what: What::Simple,
        title: "simple path off and on".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        note: NOTE.to_owned(),
        rows: cases.map(row).collect(),
    }
}

/// Measures the blocking interface.
fn blocking(fixture: &Fixture<'_>, simple: bool) -> io::Result<Sample> {
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
