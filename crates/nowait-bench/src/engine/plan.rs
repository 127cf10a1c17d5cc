//! A table before it is measured: its rows, and for each variant a turn that can be taken again and
//! again.
//!
//! Invariant: within a round each variant of a row has one turn; one that fails is not tried again.
//! Knows: table. Known by: tables, engine.

use std::io;

use indicatif::ProgressBar;

use super::What;
use super::table::{Cell, Gain, Row, Sample, Source, Table, Unit};
use crate::stop::Stop;

/// Measures one variant once, from set-up to clean-up.
pub(crate) type Turn<'a> = Box<dyn FnMut() -> io::Result<Sample> + 'a>;

/// A row before it is measured.
pub(crate) struct PlannedRow<'a> {
    pub(crate) title: String,
    pub(crate) source: Option<Source>,
    /// One for each of the table's variants.
    pub(crate) turns: Vec<Turn<'a>>,
}

/// A table before it is measured.
pub(crate) struct Plan<'a> {
    pub(crate) what: What,
    pub(crate) title: String,
    pub(crate) unit: Unit,
    pub(crate) gain: Gain,
    pub(crate) variants: Vec<String>,
    /// What the reader has to know to judge the figures.
    pub(crate) note: String,
    pub(crate) rows: Vec<PlannedRow<'a>>,
}

impl Plan<'_> {
    pub(crate) fn turns_per_round(&self) -> usize {
        self.rows.iter().map(|row| row.turns.len()).sum()
    }

    /// Takes all turns. `None` when stopped before the end.
    pub(crate) fn measure(self, rounds: u32, stop: &Stop, bar: &ProgressBar) -> Option<Table> {
        let Plan { what, title, unit, gain, variants, note, rows: planned } = self;
        let mut rows = Vec::with_capacity(planned.len());
        for PlannedRow { title: row_title, source, mut turns } in planned {
            let mut cells = vec![Cell::default(); turns.len()];
            for _ in 0..rounds {
                for ((turn, cell), variant) in turns.iter_mut().zip(&mut cells).zip(&variants) {
                    bar.set_message(format!("{title}, {row_title}: {variant}"));
                    cell.take(turn);
                    if stop.requested() {
                        return None;
                    }
                    bar.inc(1);
                }
            }
            rows.push(Row { title: row_title, source, cells });
        }
        Some(Table { what, title, unit, gain, variants, note, rows })
    }
}

impl Cell {
    fn take(&mut self, turn: &mut Turn<'_>) {
        if self.problem.is_some() {
            return;
        }
        match turn() {
            Ok(sample) => self.samples.push(sample),
            Err(error) => {
                self.problem = Some(error.to_string());
                self.samples.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn plan<'a>(turns: Vec<Turn<'a>>) -> Plan<'a> {
        Plan {
            what: What::Simple,
            title: "t".into(),
            unit: Unit::Iops,
            gain: Gain::OverFirst,
            variants: vec!["off".into(), "on".into()],
            note: String::new(),
            rows: vec![PlannedRow { title: "r".into(), source: None, turns }],
        }
    }

    fn sample() -> Sample {
        Sample { per_second: 1.0, mib_per_second: 1.0, latency: None }
    }

    #[test]
    fn variants_take_turns_within_each_round() {
        let order = RefCell::new(String::new());
        let turn = |name: char| -> Turn<'_> {
            let order = &order;
            Box::new(move || {
                order.borrow_mut().push(name);
                Ok(sample())
            })
        };
        let table =
            plan(vec![turn('A'), turn('B')]).measure(3, &Stop::default(), &ProgressBar::hidden());
        assert_eq!(*order.borrow(), "ABABAB");
        assert_eq!(table.map(|table| table.rows[0].cells[1].samples.len()), Some(3));
    }

    #[test]
    fn a_variant_that_fails_is_named_and_not_tried_again() {
        let tries = RefCell::new(0);
        let fails: Turn<'_> = Box::new(|| {
            *tries.borrow_mut() += 1;
            Err(io::Error::other("no luck"))
        });
        let works: Turn<'_> = Box::new(|| Ok(sample()));
        let table = plan(vec![fails, works]).measure(3, &Stop::default(), &ProgressBar::hidden());
        let cells = table.map(|table| table.rows[0].cells.clone()).unwrap_or_default();
        assert_eq!(*tries.borrow(), 1);
        assert_eq!(cells[0].problem.as_deref(), Some("no luck"));
        assert_eq!(cells[1].samples.len(), 3);
    }

    #[test]
    fn a_stopped_table_is_no_table() {
        let stop = Stop::default();
        let turns: Vec<Turn<'_>> = vec![Box::new(|| {
            stop.request();
            Ok(sample())
        })];
        assert!(plan(turns).measure(3, &stop, &ProgressBar::hidden()).is_none());
    }
}
