//! Deferred against inline completion of writes.
//!
//! Invariant: only planned if writing is allowed.

use nowait::Config;

use crate::ablation::TableSelection;
use crate::ablation::fixture::Fixture;
use crate::ablation::plan::{Measurement, Plan, PlannedRow};
use crate::ablation::result_table::{Metric, Unit};
use crate::ablation::tables::{OFF_AND_ON, names, source};
use crate::workload::{Direction, Order, Workload};

const DEPTH: usize = 64;
const BLOCKS_KIB: [usize; 4] = [4, 8, 12, 16];
const NOTE: &str = "Random writes to the file, depth 64. deferred: each completion makes a detour \
    over a worker thread. Source: AIO direct writes, 4K 1004 → 1193 MiB/s";

pub(crate) fn plan<'a>(fixture: &'a Fixture<'a>) -> Option<Plan<'a>> {
    let row = |kib: usize| {
        let load = Workload {
            direction: Direction::Write,
            order: Order::Random,
            block_bytes: kib << 10,
            depth: DEPTH,
            beside: None,
        };
        let measurements = OFF_AND_ON.map(|inline_completion| -> Measurement<'a> {
            let config = Config { inline_completion, ..Config::default() };
            Box::new(move || fixture.on_file(&load, config))
        });
        let source = (kib == 4).then(|| source("1004 → 1193 MiB/s", 1193.0 / 1004.0)).flatten();
        PlannedRow { title: format!("{kib}K write"), source, measurements: measurements.into() }
    };
    fixture.writable.then(|| Plan {
        what: TableSelection::Completion,
        title: "deferred and inline completion".to_owned(),
        unit: Unit::MibPerSecond,
        gain: Metric::OverFirst,
        variants: names(&["deferred", "inline"]),
        note: NOTE.to_owned(),
        rows: BLOCKS_KIB.map(row).into(),
    })
}
