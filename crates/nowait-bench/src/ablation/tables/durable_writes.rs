//! A sync for each durable write against one sync for all that are in flight.
//!
//! Invariant: only made if writing is allowed.

use nowait::Config;

use crate::ablation::TableSelection;
use crate::ablation::fixture::{Fixture, Queue};
use crate::ablation::gain_table::{Metric, Row, Table, Unit};
use crate::ablation::tables::{RANDOM_READ, every_request_tried, switched};
use crate::workload::{Direction, Workload};

const NOTE: &str = "4K random writes to the file, each durable when it ends. each: the kernel \
    syncs for each write. together: the writes in flight share a sync. Both are the same at depth \
    1, and on a block device or a file system on one, where the kernel shares flushes by itself";

pub(crate) fn table<'a>(fixture: &'a Fixture<'a>) -> Option<Table<'a>> {
    let row = |depth| {
        let load = Workload { direction: Direction::Write, depth, durable: true, ..RANDOM_READ };
        let measure = move |group_syncs| {
            fixture.on(Queue::File, &load, Config { group_syncs, ..every_request_tried() })
        };
        let cells = switched(["each", "together"], measure);
        Row { title: format!("4K durable write, depth {depth}"), source: None, cells }
    };
    fixture.writable.then(|| Table {
        what: TableSelection::Durable,
        title: "durable writes one by one and together".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        note: NOTE.to_owned(),
        rows: [1, 16, 64].map(row).into(),
    })
}
