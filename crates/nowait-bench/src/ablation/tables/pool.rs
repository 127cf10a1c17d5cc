//! Request slots from the allocator against slots from the pool, freed on the allocating thread and
//! on another thread.
//!
//! Invariant: both variants make the same requests.

use nowait::Config;

use crate::ablation::TableSelection;
use crate::ablation::fixture::{Fixture, Queue};
use crate::ablation::gain_table::{Metric, Row, Table, Unit};
use crate::ablation::tables::{RANDOM_READ, every_request_tried, source, switched};
use crate::workload::Workload;

const NOTE: &str = "4K random reads, depth 128. another thread: each completion is handed to a \
    worker thread, from where the slot comes home. Source: 562K → 574K; freed on another CPU 648K \
    and 647K";

pub(crate) fn table<'a>(fixture: &'a Fixture<'a>) -> Table<'a> {
    let load = Workload { depth: 128, ..RANDOM_READ };
    let frees = [
        (true, "same thread", source("562K → 574K", 574.0 / 562.0)),
        (false, "another thread", source("648K, 647K", 647.0 / 648.0)),
    ];
    let row = |queue: Queue| {
        frees.map(|(inline_completion, freed, source)| {
            let config = Config { inline_completion, ..every_request_tried() };
            let measure = move |pool| fixture.on(queue, &load, Config { pool, ..config });
            let title = format!("{}, freed on {freed}", queue.name());
            Row { title, source, cells: switched(["allocator", "pool"], measure) }
        })
    };
    Table {
        what: TableSelection::Pool,
        title: "request slots from the allocator and from the pool".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        note: NOTE.to_owned(),
        rows: [Queue::Null, Queue::File].into_iter().flat_map(row).collect(),
    }
}
