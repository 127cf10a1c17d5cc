//! A table before it is measured: its rows, and a repeatable measurement for each variant.
//!
//! Invariant: in each round, each variant of a row is measured once; a variant that fails is not
//! tried again.

use std::io;

use indicatif::ProgressBar;

use crate::ablation::TableSelection;
use crate::ablation::result_table::{Cell, Metric, Row, Sample, Source, Table, Unit};
use crate::cancel::CancelFlag;

/// Measures one variant once, from set-up to clean-up.
pub(crate) type Measurement<'a> = Box<dyn FnMut() -> io::Result<Sample> + 'a>;

/// A row before it is measured.
pub(crate) struct PlannedRow<'a> {
    pub(crate) title: String,
    pub(crate) source: Option<Source>,
    /// One measurement for each variant of the table.
    pub(crate) measurements: Vec<Measurement<'a>>,
}

/// A table before it is measured.
pub(crate) struct Plan<'a> {
    pub(crate) what: TableSelection,
    pub(crate) title: String,
    pub(crate) unit: Unit,
    pub(crate) gain: Metric,
    pub(crate) variants: Vec<String>,
    /// What the reader must know to interpret the figures.
    pub(crate) note: String,
    pub(crate) rows: Vec<PlannedRow<'a>>,
}

impl Plan<'_> {
    pub(crate) fn measurements_per_round(&self) -> usize {
        self.rows.iter().map(|row| row.measurements.len()).sum()
    }

    /// Runs all measurements. `None` if cancelled before the end.
    pub(crate) fn measure(
        self,
        rounds: u32,
        stop: &CancelFlag,
        bar: &ProgressBar,
    ) -> Option<Table> {
        let Plan { what, title, unit, gain, variants, note, rows: planned } = self;
        let mut rows = Vec::with_capacity(planned.len());
        for PlannedRow { title: row_title, source, mut measurements } in planned {
            let mut cells = vec![Cell::default(); measurements.len()];
            for _ in 0..rounds {
                for ((measurement, cell), variant) in
                    measurements.iter_mut().zip(&mut cells).zip(&variants)
                {
                    bar.set_message(format!("{title}, {row_title}: {variant}"));
                    cell.record(measurement);
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
    fn record(&mut self, measurement: &mut Measurement<'_>) {
        if self.problem.is_some() {
            return;
        }
        match measurement() {
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

    fn plan<'a>(measurements: Vec<Measurement<'a>>) -> Plan<'a> {
        Plan {
            what: TableSelection::Simple,
            title: "t".into(),
            unit: Unit::Iops,
            gain: Metric::OverFirst,
            variants: vec!["off".into(), "on".into()],
            note: String::new(),
            rows: vec![PlannedRow { title: "r".into(), source: None, measurements }],
        }
    }

    fn sample() -> Sample {
        Sample { per_second: 1.0, mib_per_second: 1.0, latency: None }
    }

    #[test]
    fn variants_alternate_within_each_round() {
        let order = RefCell::new(String::new());
        let measurement = |name: char| -> Measurement<'_> {
            let order = &order;
            Box::new(move || {
                order.borrow_mut().push(name);
                Ok(sample())
            })
        };
        let table = plan(vec![measurement('A'), measurement('B')]).measure(
            3,
            &CancelFlag::default(),
            &ProgressBar::hidden(),
        );
        assert_eq!(*order.borrow(), "ABABAB");
        assert_eq!(table.map(|table| table.rows[0].cells[1].samples.len()), Some(3));
    }

    #[test]
    fn a_variant_that_fails_is_named_and_not_tried_again() {
        let tries = RefCell::new(0);
        let fails: Measurement<'_> = Box::new(|| {
            *tries.borrow_mut() += 1;
            Err(io::Error::other("no luck"))
        });
        let works: Measurement<'_> = Box::new(|| Ok(sample()));
        let table =
            plan(vec![fails, works]).measure(3, &CancelFlag::default(), &ProgressBar::hidden());
        let cells = table.map(|table| table.rows[0].cells.clone()).unwrap_or_default();
        assert_eq!(*tries.borrow(), 1);
        assert_eq!(cells[0].problem.as_deref(), Some("no luck"));
        assert_eq!(cells[1].samples.len(), 3);
    }

    #[test]
    fn a_cancelled_table_is_not_reported() {
        let stop = CancelFlag::default();
        let measurements: Vec<Measurement<'_>> = vec![Box::new(|| {
            stop.request();
            Ok(sample())
        })];
        assert!(plan(measurements).measure(3, &stop, &ProgressBar::hidden()).is_none());
    }
}
