//! Request slots from the allocator against slots from the pool, freed on the allocating thread and
//! on another thread.
//!
//! Invariant: both variants make the same requests.

use nowait::Config;

use crate::ablation::TableSelection;
use crate::ablation::fixture::Fixture;
use crate::ablation::plan::{Measurement, Plan, PlannedRow};
use crate::ablation::result_table::{Metric, Unit};
use crate::ablation::tables::{OFF_AND_ON, RANDOM_READ, names, source};
use crate::workload::Workload;

const DEPTH: usize = 128;
const NOTE: &str = "4K random reads, depth 128. another thread: each completion is handed to a \
    worker thread, from where the slot comes home. Source: 562K → 574K; freed on another CPU 648K \
    and 647K";

pub(crate) fn plan<'a>(fixture: &'a Fixture<'a>) -> Plan<'a> {
    let load = Workload { depth: DEPTH, ..RANDOM_READ };
    let mut rows = Vec::new();
    for null in [true, false] {
        for inline_completion in [true, false] {
            let measurements = OFF_AND_ON.map(|pool| -> Measurement<'a> {
                let config = Config { pool, inline_completion, ..Config::default() };
                if null {
                    Box::new(move || fixture.on_null(&load, config))
                } else {
                    Box::new(move || fixture.on_file(&load, config))
                }
            });
            let queue = if null { "null queue" } else { "file" };
            let (freed, source) = if inline_completion {
                ("same thread", source("562K → 574K", 574.0 / 562.0))
            } else {
                ("another thread", source("648K, 647K", 647.0 / 648.0))
            };
            let title = format!("{queue}, freed on {freed}");
            rows.push(PlannedRow { title, source, measurements: measurements.into() });
        }
    }
    Plan {
        what: TableSelection::Pool,
        title: "request slots from the allocator and from the pool".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        variants: names(&["allocator", "pool"]),
        note: NOTE.to_owned(),
        rows,
    }
}
