//! The rows and variants of each table.
//!
//! Invariant: no table contains writes to a file that may not be overwritten.

mod nowait_first;
mod engines;
mod append_log;
mod switches;

use std::io;

use nowait::Config;

use crate::ablation::fixture::Fixture;
use crate::ablation::gain_table::{Cell, Sample, Source, Table, cell};
use crate::args::What;
use crate::workload::{Direction, Order, Workload};

const PAGE_BYTES: usize = 4096;
const RANDOM_READ: Workload = Workload {
    direction: Direction::Read,
    order: Order::Random,
    block_bytes: PAGE_BYTES,
    depth: 1,
    durable: false,
    beside: None,
};

/// The tables of `what`, in the order in which they are measured.
pub(crate) fn all<'a>(fixture: &'a Fixture<'a>, what: What) -> Vec<Table<'a>> {
    let each = |one| match one {
        What::Nowait => nowait_first::tables(fixture).into(),
        What::Log => vec![append_log::table(fixture)],
        What::Engines => engines::tables(fixture),
        switch => switches::table(fixture, switch).into_iter().collect(),
    };
    let is_chosen = |one: &What| what == What::All || what == *one;
    What::TABLES.into_iter().filter(is_chosen).flat_map(each).collect()
}

/// The default, but every request is tried, however many are refused: no figure is silently that of
/// the workers.
fn every_request_tried() -> Config {
    Config { back_off: false, ..Config::default() }
}

/// The cells of a switch: off, then on.
fn switched<'a>(
    [off, on]: [&str; 2],
    measure: impl Fn(bool) -> io::Result<Sample> + Copy + 'a,
) -> Vec<Cell<'a>> {
    vec![cell(off, move || measure(false)), cell(on, move || measure(true))]
}

fn source(words: &'static str, factor: f64) -> Option<Source> {
    Some(Source { words, factor: Some(factor) })
}
