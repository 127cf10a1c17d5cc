//! The segments of a request one after the other against all at once, on the file and on queues of a
//! given latency.
//!
//! Invariant: both variants move the same bytes, from memory that does not touch. Knows: scene,
//! scatter, delayed. Known by: tables.

use std::io;
use std::time::Duration;

use nowait::{Config, Engine, Flags, Queue, Workers};

use super::{OFF_AND_ON, PAGE_BYTES, names, source};
use crate::engine::What;
use crate::engine::delayed::Delayed;
use crate::engine::places::Places;
use crate::engine::plan::{Plan, PlannedRow, Turn};
use crate::engine::scatter::{Hand, Mix, Scatter, Shape};
use crate::engine::scene::{Scene, ring_engine};
use crate::engine::table::{Gain, Sample, Source, Unit};
use crate::workload::{Direction, Order};

const SHAPE: Shape = Shape { segments: 8, segment_bytes: PAGE_BYTES };
const NOTE: &str = "8 × 4K in memory that does not touch, one request at a time; mixed: a read and a \
    write in turn, at random. one by one: each segment is waited for. With 8 segments the most that \
    a queue of pure latency can gain is 8×. Source: random writev 8.7×, sequential 6.6×, mixed 5×";

/// Where the transfers go.
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

pub(crate) fn plan<'a>(scene: &'a Scene<'a>) -> Plan<'a> {
    let read = Mix::Only(Direction::Read);
    let write = Mix::Only(Direction::Write);
    let loads: [(&str, Mix, Order, Option<Source>); 5] = [
        ("random readv", read, Order::Random, None),
        ("sequential readv", read, Order::Sequential, None),
        ("random writev", write, Order::Random, source("8.7×", 8.7)),
        ("sequential writev", write, Order::Sequential, source("6.6×", 6.6)),
        ("mixed", Mix::Both, Order::Random, source("5×", 5.0)),
    ];
    let queues = scene.latency.iter().map(|&latency| Storage::Latency(latency));
    let mut rows = Vec::new();
    for storage in std::iter::once(Storage::File).chain(queues) {
        for (name, mix, order, source) in loads {
            if !scene.writable && mix != read {
                continue;
            }
            let turns = OFF_AND_ON.map(|vectored| -> Turn<'a> {
                let config = Config { vectored, ..Config::default() };
                let load =
                    Load { mix, order, shape: SHAPE, flags: Flags::NONE, hand: Hand::Together };
                Box::new(move || load.on(storage, scene, config))
            });
            let title = format!("{}, {name}", storage.name());
            rows.push(PlannedRow { title, source, turns: turns.into() });
        }
    }
    Plan {
        what: What::Vectored,
        title: "segments one by one and all at once".to_owned(),
        unit: Unit::MibPerSecond,
        gain: Gain::OverFirst,
        variants: names(&["one by one", "at once"]),
        note: NOTE.to_owned(),
        rows,
    }
}

/// Requests of many segments.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    pub(crate) mix: Mix,
    pub(crate) order: Order,
    pub(crate) shape: Shape,
    pub(crate) flags: Flags,
    pub(crate) hand: Hand,
}

impl Load {
    /// Measures it.
    pub(crate) fn on(
        self,
        storage: Storage,
        scene: &Scene<'_>,
        config: Config,
    ) -> io::Result<Sample> {
        let disk = scene.disk()?;
        let workers = Workers::new(&disk, config.workers);
        match storage {
            Storage::File => {
                let engine = ring_engine(&disk, &workers, config)?;
                self.run(Scatter::new(engine, self.shape), scene)
            }
            Storage::Latency(latency) => {
                let engine = Engine::new(disk, workers, Delayed::new(latency)?, config)?;
                self.run(Scatter::new(engine, self.shape), scene)
            }
        }
    }

    fn run<Q: Queue>(self, mut scatter: Scatter<Q>, scene: &Scene<'_>) -> io::Result<Sample> {
        let region = scene.region(self.shape.bytes() as usize);
        let mut places = Places::endless(self.order, region, 1);
        let pace = scene.pace(true);
        scatter.run(self.mix, self.flags, self.hand, &mut places, pace.warm_up())?;
        scatter.run(self.mix, self.flags, self.hand, &mut places, pace)?.sample()
    }
}
