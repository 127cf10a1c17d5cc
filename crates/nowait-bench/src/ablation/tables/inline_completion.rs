//! Deferred against inline completion of writes.
//!
//! Invariant: only made if writing is allowed.

use nowait::Config;

use crate::ablation::TableSelection;
use crate::ablation::fixture::{Fixture, Queue};
use crate::ablation::gain_table::{Metric, Row, Table, Unit};
use crate::ablation::tables::{RANDOM_READ, every_request_tried, source, switched};
use crate::workload::{Direction, Workload};

const NOTE: &str = "Random writes to the file, depth 64. deferred: each completion makes a detour \
    over a worker thread. Source: AIO direct writes, 4K 1004 → 1193 MiB/s";

pub(crate) fn table<'a>(fixture: &'a Fixture<'a>) -> Option<Table<'a>> {
    let measured = source("1004 → 1193 MiB/s", 1193.0 / 1004.0);
    let row = |(kib, source): (usize, _)| {
        let (direction, block_bytes) = (Direction::Write, kib << 10);
        let load = Workload { direction, block_bytes, depth: 64, ..RANDOM_READ };
        let measure = move |inline_completion| {
            fixture.on(Queue::File, &load, Config { inline_completion, ..every_request_tried() })
        };
        let cells = switched(["deferred", "inline"], measure);
        Row { title: format!("{kib}K write"), source, cells }
    };
    fixture.writable.then(|| Table {
        what: TableSelection::Completion,
        title: "deferred and inline completion".to_owned(),
        unit: Unit::MibPerSecond,
        gain: Metric::OverFirst,
        note: NOTE.to_owned(),
        rows: [(4, measured), (8, None), (12, None), (16, None)].map(row).into(),
    })
}
