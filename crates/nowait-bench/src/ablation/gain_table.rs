//! A table of the engine's figures: its rows, a repeatable measurement for each variant, and the
//! gains between variants.
//!
//! Invariant: text and JSON are made from the same samples; a higher figure is better.

use std::io;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::args::What;
use crate::report::Entry;
use crate::table::MinMedianMax;

const NS_PER_US: f64 = 1e3;

/// The latency of requests, from before the submission until the completion was reaped, in µs:
/// 50 %, 10 %, 1 % and 0.1 % of the requests took longer.
pub(crate) type Latency = [f64; 4];

pub(crate) fn latency_of(latencies_ns: &Histogram<u64>) -> Latency {
    [0.5, 0.9, 0.99, 0.999].map(|part| latencies_ns.value_at_quantile(part) as f64 / NS_PER_US)
}

/// One variant in one round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sample {
    /// Finished requests per second.
    pub(crate) per_second: f64,
    /// Transferred MiB per second.
    pub(crate) mib_per_second: f64,
    /// Nanoseconds of processor time for a request: of all threads of the process that makes the
    /// requests, not of kernel threads.
    pub(crate) cpu_ns: f64,
    /// `None` if reading the clock would cost more than a request.
    pub(crate) latency: Option<Latency>,
}

/// The unit of the figures of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Iops,
    MibPerSecond,
}

impl Unit {
    /// Its name in a heading.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Unit::Iops => "IOPS",
            Unit::MibPerSecond => "MiB/s",
        }
    }
}

/// How a gain is calculated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metric {
    /// Each variant divided by the first, which is the one without the mechanism.
    OverFirst,
    /// The first variant, this engine or the first device, divided by each of the others.
    FirstOver,
}

/// The figures of the kernel work that introduced the mechanism.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Source {
    /// The figures in the words of the source.
    pub(crate) words: &'static str,
    /// The resulting gain as a factor; `None` if the figures state no gain.
    pub(crate) factor: Option<f64>,
}

/// A variant: its title, and its measurement from set-up to clean-up.
pub(crate) struct Variant<'a> {
    pub(crate) name: String,
    pub(crate) measure: Box<dyn Fn() -> io::Result<Sample> + 'a>,
}

/// One variant in one row.
pub(crate) type Cell<'a> = Entry<Variant<'a>, Sample>;

/// A cell before it is measured.
pub(crate) fn cell<'a>(
    name: impl Into<String>,
    measure: impl Fn() -> io::Result<Sample> + 'a,
) -> Cell<'a> {
    Entry::new(Variant { name: name.into(), measure: Box::new(measure) })
}

/// The median over the rounds of each percentile; `None` if no latencies were measured.
pub(crate) fn latency(cell: &Cell<'_>) -> Option<Latency> {
    let timed: Vec<Latency> = cell.samples.iter().filter_map(|sample| sample.latency).collect();
    let mut medians = [0.0; 4];
    for (n, median) in medians.iter_mut().enumerate() {
        *median = MinMedianMax::of(&timed, |latency| latency[n])?.median;
    }
    Some(medians)
}

/// All variants under one load.
pub(crate) struct Row<'a> {
    /// The load.
    pub(crate) title: String,
    /// The published figures for this load.
    pub(crate) source: Option<Source>,
    /// One cell for each variant of the table.
    pub(crate) cells: Vec<Cell<'a>>,
}

/// A mechanism switched on against off.
pub(crate) struct Table<'a> {
    /// The selection that this table belongs to.
    pub(crate) what: What,
    /// The subject of the comparison.
    pub(crate) title: String,
    pub(crate) unit: Unit,
    pub(crate) gain: Metric,
    /// Facts that the reader needs to interpret the figures.
    pub(crate) note: String,
    /// The rows in the order of measuring.
    pub(crate) rows: Vec<Row<'a>>,
}

impl Table<'_> {
    /// The figure of a cell over the rounds.
    pub(crate) fn figure(&self, cell: &Cell<'_>) -> Option<MinMedianMax> {
        MinMedianMax::of(&cell.samples, |sample| match self.unit {
            Unit::Iops => sample.per_second,
            Unit::MibPerSecond => sample.mib_per_second,
        })
    }

    /// The gain of a row's variant, counted from 0, as a factor. `None` for the first variant, and
    /// where one of the two figures is missing or 0.
    pub(crate) fn gain(&self, row: &Row<'_>, variant: usize) -> Option<f64> {
        if variant == 0 {
            return None;
        }
        let first = self.figure(row.cells.first()?)?.median;
        let other = self.figure(row.cells.get(variant)?)?.median;
        let (over, under) = match self.gain {
            Metric::OverFirst => (other, first),
            Metric::FirstOver => (first, other),
        };
        (under > 0.0).then_some(over / under)
    }

    /// The cells without figures, each with the title of its row and the reason.
    pub(crate) fn problems(&self) -> Vec<(&str, &Cell<'_>, &str)> {
        let mut all = Vec::new();
        for row in &self.rows {
            all.extend(row.cells.iter().filter_map(|cell| {
                cell.problem.as_deref().map(|problem| (row.title.as_str(), cell, problem))
            }));
        }
        all
    }

    /// The reasons why cells have no figures, each once: of a row that has none at all, of a variant
    /// that has none in any row, or of a variant in a row.
    pub(crate) fn reasons(&self) -> Vec<String> {
        let mut reasons: Vec<String> = Vec::new();
        for row in &self.rows {
            let is_empty = row.cells.iter().all(|cell| cell.problem.is_some());
            for cell in &row.cells {
                let Some(problem) = &cell.problem else { continue };
                let (row, name) = (&row.title, &cell.key.name);
                let is_same = |other: &&Cell<'_>| other.key.name == *name;
                let mut others = self.rows.iter().flat_map(|row| &row.cells).filter(is_same);
                let line = match others.any(|other| other.problem.is_none()) {
                    true if is_empty => format!("{row}: {problem}"),
                    true => format!("{row}, {name}: {problem}"),
                    false => format!("{name}: {problem}"),
                };
                if !reasons.contains(&line) {
                    reasons.push(line);
                }
            }
        }
        reasons
    }

    pub(crate) fn to_json(&self) -> Value {
        let cell = |row: &Row<'_>, n: usize, cell: &Cell<'_>| {
            let of = |figure: fn(&Sample) -> f64| {
                MinMedianMax::of(&cell.samples, figure).map(MinMedianMax::to_json)
            };
            let latency = latency(cell).map(|[p50, p90, p99, p999]| {
                json!({ "p50": p50, "p90": p90, "p99": p99, "p99.9": p999 })
            });
            json!({
                "variant": cell.key.name,
                "iops": of(|sample| sample.per_second),
                "mib_per_second": of(|sample| sample.mib_per_second),
                "cpu_ns_per_request": of(|sample| sample.cpu_ns),
                "latency_us": latency,
                "gain": self.gain(row, n),
                "problem": cell.problem,
            })
        };
        let row = |row: &Row<'_>| {
            let cells = row.cells.iter().enumerate().map(|(n, it)| cell(row, n, it));
            json!({
                "row": row.title,
                "source": row.source.map(|source| source.words),
                "source_gain": row.source.and_then(|source| source.factor),
                "cells": cells.collect::<Vec<_>>(),
            })
        };
        json!({
            "what": self.what.name(),
            "title": self.title,
            "unit": self.unit.name(),
            "note": self.note,
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }
}

/// Samples for the tests of the text.
#[cfg(test)]
pub(crate) mod examples {
    use super::*;

    /// A table of one row. A variant has the figures of three rounds, or failed.
    pub(crate) fn table(variants: &[(&str, Option<[f64; 3]>)]) -> Table<'static> {
        let sample = |per_second| Sample {
            per_second,
            mib_per_second: per_second / 256.0,
            cpu_ns: 1e9 / per_second,
            latency: Some([10.0, 20.0, 40.0, 80.0]),
        };
        let cell = |&(name, iops): &(&str, Option<[f64; 3]>)| Entry {
            samples: iops.map_or_else(Vec::new, |iops| iops.map(sample).to_vec()),
            problem: iops.is_none().then(|| "not <here>".to_owned()),
            ..cell(name, || Err(io::Error::other("an example")))
        };
        Table {
            what: What::Simple,
            title: "4K read".into(),
            unit: Unit::Iops,
            gain: Metric::OverFirst,
            note: "a note".into(),
            rows: vec![Row {
                title: "Engine, depth 1".into(),
                source: Some(Source { words: "+16 %", factor: Some(1.16) }),
                cells: variants.iter().map(cell).collect(),
            }],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::examples::table;
    use super::*;

    #[test]
    fn the_gain_compares_medians_and_is_the_same_in_json() {
        let on = ("on", Some([150.0, 1.0, 200.0]));
        let mut table = table(&[("off", Some([90.0, 100.0, 999.0])), on, ("other", None)]);
        let gains = |table: &Table<'_>| [0, 1, 2].map(|n| table.gain(&table.rows[0], n));
        assert_eq!(gains(&table), [None, Some(1.5), None]);
        let json = table.to_json();
        let cells = &json["rows"][0]["cells"];
        assert_eq!((&cells[1]["gain"], &cells[1]["variant"]), (&json!(1.5), &json!("on")));
        assert_eq!(cells[2]["problem"], "not <here>");
        table.gain = Metric::FirstOver;
        assert_eq!(gains(&table), [None, Some(100.0 / 150.0), None]);
    }
}
