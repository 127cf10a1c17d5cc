//! The rows and variants of each table.
//!
//! Invariant: no plan contains writes to a file that may not be overwritten.

mod simple_path;
mod inline_completion;
mod vectored;
mod coalescing;
mod pool;
mod nowait_first;
mod engines;

use crate::ablation::TableSelection;
use crate::ablation::fixture::Fixture;
use crate::ablation::plan::Plan;
use crate::ablation::result_table::Source;
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
pub(crate) fn plan<'a>(fixture: &'a Fixture<'a>, what: TableSelection) -> Vec<Plan<'a>> {
    let mut plans = Vec::new();
    for one in TableSelection::EACH.into_iter().filter(|&one| what.includes(one)) {
        match one {
            TableSelection::Simple => plans.push(simple_path::plan(fixture)),
            TableSelection::Completion => plans.extend(inline_completion::plan(fixture)),
            TableSelection::Vectored => {
                plans.push(vectored::plan(fixture));
                plans.extend(coalescing::plan(fixture));
                plans.extend(coalescing::plan_durable(fixture));
            }
            TableSelection::Pool => plans.push(pool::plan(fixture)),
            TableSelection::Nowait => plans.extend(nowait_first::plan(fixture)),
            TableSelection::Engines => plans.extend(engines::plan(fixture)),
            TableSelection::All => {}
        }
    }
    plans
}

/// The two values of the switch that is measured.
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
