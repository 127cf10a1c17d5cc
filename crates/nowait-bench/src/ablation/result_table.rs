//! A table of figures: the samples, their summary over the rounds, and the gains between variants.
//!
//! Invariant: text, JSON and page are made from the same samples; a higher figure is better.

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::ablation::TableSelection;
use crate::comparison::MinMedianMax;

const NS_PER_US: f64 = 1e3;

/// The latency of requests, from before the submission until the completion was reaped, in µs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// The median: half of the requests took longer.
    pub p50_us: f64,
    /// 10 % of the requests took longer.
    pub p90_us: f64,
    /// 1 % of the requests took longer.
    pub p99_us: f64,
    /// 0.1 % of the requests took longer.
    pub p999_us: f64,
}

impl Latency {
    pub(crate) fn of(latencies_ns: &Histogram<u64>) -> Latency {
        let us = |quantile| latencies_ns.value_at_quantile(quantile) as f64 / NS_PER_US;
        Latency { p50_us: us(0.5), p90_us: us(0.9), p99_us: us(0.99), p999_us: us(0.999) }
    }

    /// The figures from the shortest to the longest.
    #[must_use]
    pub fn all(&self) -> [f64; 4] {
        [self.p50_us, self.p90_us, self.p99_us, self.p999_us]
    }
}

/// One variant in one round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Finished requests per second.
    pub per_second: f64,
    /// Transferred MiB per second.
    pub mib_per_second: f64,
    /// `None` if reading the clock would cost more than a request.
    pub latency: Option<Latency>,
}

/// The unit of the figures of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Finished requests per second.
    Iops,
    /// Bytes.
    MibPerSecond,
}

impl Unit {
    /// Its name in a heading.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Unit::Iops => "IOPS",
            Unit::MibPerSecond => "MiB/s",
        }
    }

    fn of(self, sample: &Sample) -> f64 {
        match self {
            Unit::Iops => sample.per_second,
            Unit::MibPerSecond => sample.mib_per_second,
        }
    }
}

/// How a gain is calculated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Each variant divided by the first, which is the one without the mechanism.
    OverFirst,
    /// The first variant, which is this engine, divided by each of the others.
    FirstOver,
}

/// The figures of the kernel work that introduced the mechanism.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Source {
    /// The figures in the words of the source.
    pub words: &'static str,
    /// The resulting gain as a factor; `None` if the figures state no gain.
    pub factor: Option<f64>,
}

/// One variant in one row.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// One sample for each round; empty if there is a problem.
    pub samples: Vec<Sample>,
    /// The reason why it could not be measured.
    pub problem: Option<String>,
}

impl Cell {
    /// The summary of a figure over the rounds; `None` if there are no samples.
    #[must_use]
    pub fn spread(&self, figure: impl Fn(&Sample) -> f64) -> Option<MinMedianMax> {
        spread(self.samples.iter().map(figure).collect())
    }

    /// The median over the rounds of each percentile; `None` if no latencies were measured.
    #[must_use]
    pub fn latency(&self) -> Option<Latency> {
        let median = |figure: fn(&Latency) -> f64| {
            let all = self.samples.iter().filter_map(|sample| sample.latency.as_ref().map(figure));
            Some(spread(all.collect())?.median)
        };
        Some(Latency {
            p50_us: median(|latency| latency.p50_us)?,
            p90_us: median(|latency| latency.p90_us)?,
            p99_us: median(|latency| latency.p99_us)?,
            p999_us: median(|latency| latency.p999_us)?,
        })
    }
}

/// The middle (or the mean of the two in the middle), the lowest and the highest of `figures`.
fn spread(mut figures: Vec<f64>) -> Option<MinMedianMax> {
    figures.sort_by(f64::total_cmp);
    let (&min, &max) = figures.first().zip(figures.last())?;
    let middle = figures.get((figures.len() - 1) / 2..=figures.len() / 2)?;
    Some(MinMedianMax { median: middle.iter().sum::<f64>() / middle.len() as f64, min, max })
}

/// All variants under one load.
#[derive(Clone, Debug)]
pub struct Row {
    /// The load.
    pub title: String,
    /// The published figures for this load.
    pub source: Option<Source>,
    /// One cell for each variant of the table.
    pub cells: Vec<Cell>,
}

/// A mechanism switched on against off. `Display` formats the text.
#[derive(Clone, Debug)]
pub struct Table {
    /// The selection that this table belongs to.
    pub what: TableSelection,
    /// What is compared.
    pub title: String,
    /// The unit of all figures.
    pub unit: Unit,
    /// How the gains are calculated.
    pub gain: Metric,
    /// The titles of the columns.
    pub variants: Vec<String>,
    /// What the reader must know to interpret the figures.
    pub note: String,
    /// The rows in the order of measuring.
    pub rows: Vec<Row>,
}

impl Table {
    /// The figure of a cell over the rounds.
    #[must_use]
    pub fn figure(&self, cell: &Cell) -> Option<MinMedianMax> {
        cell.spread(|sample| self.unit.of(sample))
    }

    /// The gain of a row's variant, counted from 0, as a factor. `None` for the first variant, and
    /// where one of the two figures is missing or 0.
    #[must_use]
    pub fn gain(&self, row: &Row, variant: usize) -> Option<f64> {
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

    /// The name of the gain of a variant.
    #[must_use]
    pub fn gain_name(&self, variant: usize) -> String {
        let name = |n: usize| self.variants.get(n).map_or("", String::as_str);
        match self.gain {
            Metric::OverFirst => format!("{} ÷ {}", name(variant), name(0)),
            Metric::FirstOver => format!("{} ÷ {}", name(0), name(variant)),
        }
    }

    pub(crate) fn to_json(&self) -> Value {
        let cell = |row: &Row, n: usize, cell: &Cell| {
            json!({
                "variant": self.variants.get(n),
                "iops": cell.spread(|sample| sample.per_second).map(spread_json),
                "mib_per_second": cell.spread(|sample| sample.mib_per_second).map(spread_json),
                "latency_us": cell.latency().map(latency_json),
                "gain": self.gain(row, n),
                "problem": cell.problem,
            })
        };
        let row = |row: &Row| {
            json!({
                "row": row.title,
                "source": row.source.map(|source| source.words),
                "source_gain": row.source.and_then(|source| source.factor),
                "cells": row.cells.iter().enumerate().map(|(n, it)| cell(row, n, it))
                    .collect::<Vec<_>>(),
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

fn spread_json(spread: MinMedianMax) -> Value {
    json!({ "median": spread.median, "min": spread.min, "max": spread.max })
}

fn latency_json(latency: Latency) -> Value {
    let Latency { p50_us, p90_us, p99_us, p999_us } = latency;
    json!({ "p50": p50_us, "p90": p90_us, "p99": p99_us, "p99.9": p999_us })
}

/// Samples for the tests of the text and of the page.
#[cfg(test)]
pub(crate) mod examples {
    use super::*;

    pub(crate) fn cell(iops: [f64; 3]) -> Cell {
        let latency = Latency { p50_us: 10.0, p90_us: 20.0, p99_us: 40.0, p999_us: 80.0 };
        let sample = |per_second| Sample {
            per_second,
            mib_per_second: per_second / 256.0,
            latency: Some(latency),
        };
        Cell { samples: iops.map(sample).to_vec(), problem: None }
    }

    pub(crate) fn broken() -> Cell {
        Cell { samples: Vec::new(), problem: Some("not <here>".into()) }
    }

    pub(crate) fn table(variants: &[&str], cells: Vec<Cell>) -> Table {
        Table {
            what: TableSelection::Simple,
            title: "4K read".into(),
            unit: Unit::Iops,
            gain: Metric::OverFirst,
            variants: variants.iter().map(|&name| name.to_owned()).collect(),
            note: "a note".into(),
            rows: vec![Row {
                title: "poll, depth 1".into(),
                source: Some(Source { words: "+16 %", factor: Some(1.16) }),
                cells,
            }],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::examples::{broken, cell, table};
    use super::*;

    #[test]
    fn a_figure_has_the_median_minimum_and_maximum_of_the_rounds() {
        let of = |figures: &[f64]| spread(figures.to_vec()).map(|it| [it.median, it.min, it.max]);
        assert_eq!(of(&[3.0, 1.0, 2.0]), Some([2.0, 1.0, 3.0]));
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]), Some([2.5, 1.0, 4.0]));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn the_gain_compares_medians_and_names_both_variants() {
        let cells = vec![cell([90.0, 100.0, 999.0]), cell([150.0, 1.0, 200.0]), broken()];
        let mut table = table(&["off", "on", "other"], cells);
        let gains = |table: &Table| [0, 1, 2].map(|n| table.gain(&table.rows[0], n));
        assert_eq!(gains(&table), [None, Some(1.5), None]);
        assert_eq!(table.gain_name(1), "on ÷ off");
        table.gain = Metric::FirstOver;
        assert_eq!(gains(&table), [None, Some(100.0 / 150.0), None]);
        assert_eq!(table.gain_name(1), "off ÷ on");
    }
}
