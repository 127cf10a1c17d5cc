//! The segments of a request one after the other against all in one transfer, on the file and on
//! queues of a given latency.
//!
//! Invariant: both variants transfer the same bytes, from memory blocks that do not touch.

use std::io;
use std::time::Duration;

use nowait::{Config, Engine, Flags, IoQueue, WorkerPool};

use crate::ablation::TableSelection;
use crate::ablation::delayed::Delayed;
use crate::ablation::fixture::{Fixture, ring_engine};
use crate::ablation::offsets::Offsets;
use crate::ablation::plan::{Measurement, Plan, PlannedRow};
use crate::ablation::result_table::{Metric, Sample, Source, Unit};
use crate::ablation::tables::{OFF_AND_ON, PAGE_BYTES, names, source};
use crate::ablation::vectored_io::{OperationMix, Shape, SubmitMode, VectoredIo};
use crate::workload::{Direction, Order};

const SHAPE: Shape = Shape { segments: 8, segment_bytes: PAGE_BYTES };
const NOTE: &str = "8 × 4K in memory that does not touch, one request at a time; mixed: a read and a \
    write in turn, at random. one by one: each segment is waited for. With 8 segments the most that \
    a queue of pure latency can gain is 8×. Source: random writev 8.7×, sequential 6.6×, mixed 5×";

/// The target of the transfers.
#[derive(Clone, Copy)]
pub(crate) enum Storage {
    File,
    Latency(Duration),
}

impl Storage {
    pub(crate) fn name(self) -> String {
        match self {
            Storage::File => "file".to_owned(),
            Storage::Latency(latency) => format!("{latency:?} queue"),
        }
    }
}

pub(crate) fn plan<'a>(fixture: &'a Fixture<'a>) -> Plan<'a> {
    let read = OperationMix::Only(Direction::Read);
    let write = OperationMix::Only(Direction::Write);
    let loads: [(&str, OperationMix, Order, Option<Source>); 5] = [
        ("random readv", read, Order::Random, None),
        ("sequential readv", read, Order::Sequential, None),
        ("random writev", write, Order::Random, source("8.7×", 8.7)),
        ("sequential writev", write, Order::Sequential, source("6.6×", 6.6)),
        ("mixed", OperationMix::Both, Order::Random, source("5×", 5.0)),
    ];
    let queues = fixture.latency.iter().map(|&latency| Storage::Latency(latency));
    let mut rows = Vec::new();
    for storage in std::iter::once(Storage::File).chain(queues) {
        for (name, mix, order, source) in loads {
            if !fixture.writable && mix != read {
                continue;
            }
            let measurements = OFF_AND_ON.map(|vectored| -> Measurement<'a> {
                let config = Config { vectored, ..Config::default() };
                let load = Load {
                    mix,
                    order,
                    shape: SHAPE,
                    flags: Flags::NONE,
                    submit_mode: SubmitMode::Together,
                };
                Box::new(move || load.on(storage, fixture, config))
            });
            let title = format!("{}, {name}", storage.name());
            rows.push(PlannedRow { title, source, measurements: measurements.into() });
        }
    }
    Plan {
        what: TableSelection::Vectored,
        title: "segments one by one and all at once".to_owned(),
        unit: Unit::MibPerSecond,
        gain: Metric::OverFirst,
        variants: names(&["one by one", "at once"]),
        note: NOTE.to_owned(),
        rows,
    }
}

/// Requests of many segments.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    pub(crate) mix: OperationMix,
    pub(crate) order: Order,
    pub(crate) shape: Shape,
    pub(crate) flags: Flags,
    pub(crate) submit_mode: SubmitMode,
}

impl Load {
    /// Measures the requests on one target.
    pub(crate) fn on(
        self,
        storage: Storage,
        fixture: &Fixture<'_>,
        config: Config,
    ) -> io::Result<Sample> {
        let disk = fixture.disk()?;
        let workers = WorkerPool::new(&disk, config.workers);
        match storage {
            Storage::File => {
                let engine = ring_engine(&disk, &workers, config)?;
                self.run(VectoredIo::new(engine, self.shape), fixture)
            }
            Storage::Latency(latency) => {
                let engine = Engine::new(disk, workers, Delayed::new(latency)?, config)?;
                self.run(VectoredIo::new(engine, self.shape), fixture)
            }
        }
    }

    fn run<Q: IoQueue>(
        self,
        mut vectored_io: VectoredIo<Q>,
        fixture: &Fixture<'_>,
    ) -> io::Result<Sample> {
        let region = fixture.region(self.shape.bytes() as usize);
        let mut offsets = Offsets::endless(self.order, region, 1);
        let stop_condition = fixture.stop_condition(true);
        vectored_io.run(
            self.mix,
            self.flags,
            self.submit_mode,
            &mut offsets,
            stop_condition.warm_up(),
        )?;
        vectored_io
            .run(self.mix, self.flags, self.submit_mode, &mut offsets, stop_condition)?
            .sample()
    }
}
