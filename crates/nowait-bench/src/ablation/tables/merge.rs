//! Requests that touch each in a transfer of its own, against all of a burst in one transfer.
//!
//! Invariant: both variants make the same requests.

use nowait::Config;

use crate::ablation::TableSelection;
use crate::ablation::fixture::{Fixture, Queue};
use crate::ablation::gain_table::{Metric, Row, Table, Unit};
use crate::ablation::tables::{RANDOM_READ, every_request_tried, switched};
use crate::workload::{Order, Workload};

const NOTE: &str = "4K requests on the file; random ones do not touch, so that they gain nothing. \
    one by one: merge off";

pub(crate) fn table<'a>(fixture: &'a Fixture<'a>) -> Table<'a> {
    let cases = [(Order::Sequential, 16), (Order::Sequential, 64), (Order::Random, 64)];
    let rows = fixture.directions().iter().flat_map(|&direction| {
        cases.map(|(order, depth)| {
            let load = Workload { direction, order, depth, ..RANDOM_READ };
            let measure = move |merge| {
                fixture.on(Queue::File, &load, Config { merge, ..every_request_tried() })
            };
            let title = format!("{} {}, depth {depth}", order.name(), direction.name());
            Row { title, source: None, cells: switched(["one by one", "merged"], measure) }
        })
    });
    Table {
        what: TableSelection::Merge,
        title: "neighbours one by one and merged".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        note: NOTE.to_owned(),
        rows: rows.collect(),
    }
}
