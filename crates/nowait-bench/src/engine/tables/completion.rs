//! Deferred against inline completion of writes.
//!
//! Invariant: only planned where writing is allowed. Knows: scene. Known by: tables.

use nowait::Config;

use super::{OFF_AND_ON, names, source};
use crate::engine::What;
use crate::engine::plan::{Plan, PlannedRow, Turn};
use crate::engine::scene::Scene;
use crate::engine::table::{Gain, Unit};
use crate::workload::{Direction, Order, Workload};

const DEPTH: usize = 64;
const BLOCKS_KIB: [usize; 4] = [4, 8, 12, 16];
const NOTE: &str = "Random writes to the file, depth 64. deferred: each completion makes a detour \
    over a worker thread. Source: AIO direct writes, 4K 1004 → 1193 MiB/s";

pub(crate) fn plan<'a>(scene: &'a Scene<'a>) -> Option<Plan<'a>> {
    let row = |kib: usize| {
        let load = Workload {
            direction: Direction::Write,
            order: Order::Random,
            block_bytes: kib << 10,
            depth: DEPTH,
            beside: None,
        };
        let turns = OFF_AND_ON.map(|inline_completion| -> Turn<'a> {
            let config = Config { inline_completion, ..Config::default() };
            Box::new(move || scene.on_file(&load, config))
        });
        let source = (kib == 4).then(|| source("1004 → 1193 MiB/s", 1193.0 / 1004.0)).flatten();
        PlannedRow { title: format!("{kib}K write"), source, turns: turns.into() }
    };
    scene.writable.then(|| Plan {
        what: What::Completion,
        title: "deferred and inline completion".to_owned(),
        unit: Unit::MibPerSecond,
        gain: Gain::OverFirst,
        variants: names(&["deferred", "inline"]),
        note: NOTE.to_owned(),
        rows: BLOCKS_KIB.map(row).into(),
    })
}
