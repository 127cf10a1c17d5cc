//! Which rows and variants each table has.
//!
//! Invariant: nothing is planned that would write to a file which may not be overwritten. Knows:
//! scene, plan, drive and the clients. Known by: engine.

mod simple;
mod completion;
mod vectored;
mod coalescing;
mod pool;
mod nowait_first;
mod engines;

use super::What;
use super::plan::Plan;
use super::scene::Scene;
use super::table::Source;
use crate::workload::{Direction, Order, Workload};

const PAGE_BYTES: usize = 4096;
const RANDOM_READ: Workload = Workload {
    direction: Direction::Read,
    order: Order::Random,
    block_bytes: PAGE_BYTES,
    depth: 1,
    beside: None,
};

/// The tables of `what`, in the order in which they are measured.
pub(crate) fn plan<'a>(scene: &'a Scene<'a>, what: What) -> Vec<Plan<'a>> {
    let mut plans = Vec::new();
    for one in What::EACH.into_iter().filter(|&one| what.includes(one)) {
        match one {
            What::Simple => plans.push(simple::plan(scene)),
            What::Completion => plans.extend(completion::plan(scene)),
            What::Vectored => {
                plans.push(vectored::plan(scene));
                plans.extend(coalescing::plan(scene));
                plans.extend(coalescing::plan_durable(scene));
            }
            What::Pool => plans.push(pool::plan(scene)),
            What::Nowait => plans.extend(nowait_first::plan(scene)),
            What::Engines => plans.extend(engines::plan(scene)),
            What::All => {}
        }
    }
    plans
}

/// The switch that is measured, off and on.
const OFF_AND_ON: [bool; 2] = [false, true];

fn names(variants: &[&str]) -> Vec<String> {
    variants.iter().map(|&name| name.to_owned()).collect()
}

fn source(words: &'static str, factor: f64) -> Option<Source> {
    Some(Source { words, factor: Some(factor) })
}

fn word(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    }
}
