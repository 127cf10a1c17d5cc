//! Request slots from the allocator against slots from the pool, freed where they were taken and on
//! another thread.
//!
//! Invariant: both variants make the same requests. Knows: scene. Known by: tables.

use nowait::Config;

use super::{OFF_AND_ON, RANDOM_READ, names, source};
use crate::engine::What;
use crate::engine::plan::{Plan, PlannedRow, Turn};
use crate::engine::scene::Scene;
use crate::engine::table::{Gain, Unit};
use crate::workload::Workload;

const DEPTH: usize = 128;
const NOTE: &str = "4K random reads, depth 128. another thread: each completion is handed to a \
    worker thread, from where the slot comes home. Source: 562K → 574K; freed on another CPU 648K \
    and 647K";

pub(crate) fn plan<'a>(scene: &'a Scene<'a>) -> Plan<'a> {
    let load = Workload { depth: DEPTH, ..RANDOM_READ };
    let mut rows = Vec::new();
    for null in [true, false] {
        for inline_completion in [true, false] {
            let turns = OFF_AND_ON.map(|pool| -> Turn<'a> {
                let config = Config { pool, inline_completion, ..Config::default() };
                if null {
                    Box::new(move || scene.on_null(&load, config))
                } else {
                    Box::new(move || scene.on_file(&load, config))
                }
            });
            let queue = if null { "null queue" } else { "file" };
            let (freed, source) = if inline_completion {
                ("same thread", source("562K → 574K", 574.0 / 562.0))
            } else {
                ("another thread", source("648K, 647K", 647.0 / 648.0))
            };
            let title = format!("{queue}, freed on {freed}");
            rows.push(PlannedRow { title, source, turns: turns.into() });
        }
    }
    Plan {
        what: What::Pool,
        title: "request slots from the allocator and from the pool".to_owned(),
        unit: Unit::Iops,
        gain: Gain::OverFirst,
        variants: names(&["allocator", "pool"]),
        note: NOTE.to_owned(),
        rows,
    }
}
