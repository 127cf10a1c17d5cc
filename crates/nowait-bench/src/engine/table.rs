//! A table of figures: samples, what they come to over the rounds, and the variants beside each
//! other.
//!
//! Invariant: text, JSON and page are made from the same samples; a higher figure is a better one.
//! Knows: comparison (Spread). Known by: plan, text, html, report.

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use super::What;
use crate::comparison::Spread;

const NS_PER_US: f64 = 1e3;

/// How long requests took, from before they were submitted until they were taken back, in µs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// Half of them took longer.
    pub p50_us: f64,
    /// 10 % took longer.
    pub p90_us: f64,
    /// 1 % took longer.
    pub p99_us: f64,
    /// 0.1 % took longer.
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
    /// Their bytes, in MiB per second.
    pub mib_per_second: f64,
    /// `None` where looking at the clock would cost more than a request.
    pub latency: Option<Latency>,
}

/// What a table's figures are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Finished requests per second.
    Iops,
    /// Bytes.
    MibPerSecond,
}

impl Unit {
    /// As it stands in a heading.
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

/// What is divided by what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gain {
    /// Each variant by the first, which is the one without the mechanism.
    OverFirst,
    /// The first variant, which is this engine, by each of the others.
    FirstOver,
}

/// The figures of the kernel work that introduced the mechanism.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Source {
    /// As they were given.
    pub words: &'static str,
    /// The gain that they come to, as a factor; `None` if they are not of one.
    pub factor: Option<f64>,
}

/// One variant in one row.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// One for each round; none if there is a problem.
    pub samples: Vec<Sample>,
    /// Why it could not be measured.
    pub problem: Option<String>,
}

impl Cell {
    /// A figure over the rounds; `None` if there is none.
    #[must_use]
    pub fn spread(&self, figure: impl Fn(&Sample) -> f64) -> Option<Spread> {
        spread(self.samples.iter().map(figure).collect())
    }

    /// The median over the rounds of each percentile; `None` if none were taken.
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
fn spread(mut figures: Vec<f64>) -> Option<Spread> {
    figures.sort_by(f64::total_cmp);
    let (&min, &max) = figures.first().zip(figures.last())?;
    let middle = figures.get((figures.len() - 1) / 2..=figures.len() / 2)?;
    Some(Spread { median: middle.iter().sum::<f64>() / middle.len() as f64, min, max })
}

/// All variants under one load.
#[derive(Clone, Debug)]
pub struct Row {
    /// The load.
    pub title: String,
    /// What was said of it elsewhere.
    pub source: Option<Source>,
    /// One for each of the table's variants.
    pub cells: Vec<Cell>,
}

/// A mechanism on against off. `Display` gives the text.
#[derive(Clone, Debug)]
pub struct Table {
    /// Which measurement it belongs to.
    pub what: What,
    /// What is compared.
    pub title: String,
    /// Of all figures.
    pub unit: Unit,
    /// What the gains are of.
    pub gain: Gain,
    /// The columns.
    pub variants: Vec<String>,
    /// What the reader has to know to judge the figures.
    pub note: String,
    /// In the order of measuring.
    pub rows: Vec<Row>,
}

impl Table {
    /// The figure of a cell over the rounds.
    #[must_use]
    pub fn figure(&self, cell: &Cell) -> Option<Spread> {
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
            Gain::OverFirst => (other, first),
            Gain::FirstOver => (first, other),
        };
        (under > 0.0).then_some(over / under)
    }

    /// What the gain of a variant is called.
    #[must_use]
    pub fn gain_name(&self, variant: usize) -> String {
        let name = |n: usize| self.variants.get(n).map_or("", String::as_str);
        match self.gain {
            Gain::OverFirst => format!("{} ÷ {}", name(variant), name(0)),
            Gain::FirstOver => format!("{} ÷ {}", name(0), name(variant)),
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

fn spread_json(spread: Spread) -> Value {
    json!({ "median": spread.median, "min": spread.min, "max": spread.max })
}

fn latency_json(latency: Latency) -> Value {
    let Latency { p50_us, p90_us, p99_us, p999_us } = latency;
    json!({ "p50": p50_us, "p90": p90_us, "p99": p99_us, "p99.9": p999_us })
}

/// What the tests of text and page have in common.
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
            what: What::Simple,
            title: "4K read".into(),
            unit: Unit::Iops,
            gain: Gain::OverFirst,
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
    fn a_figure_is_the_middle_the_lowest_and_the_highest_round() {
        let of = |figures: &[f64]| spread(figures.to_vec()).map(|it| [it.median, it.min, it.max]);
        assert_eq!(of(&[3.0, 1.0, 2.0]), Some([2.0, 1.0, 3.0]));
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]), Some([2.5, 1.0, 4.0]));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn the_gain_is_of_medians_and_says_what_is_divided_by_what() {
        let cells = vec![cell([90.0, 100.0, 999.0]), cell([150.0, 1.0, 200.0]), broken()];
        let mut table = table(&["off", "on", "other"], cells);
        let gains = |table: &Table| [0, 1, 2].map(|n| table.gain(&table.rows[0], n));
        assert_eq!(gains(&table), [None, Some(1.5), None]);
        assert_eq!(table.gain_name(1), "on ÷ off");
        table.gain = Gain::FirstOver;
        assert_eq!(gains(&table), [None, Some(100.0 / 150.0), None]);
        assert_eq!(table.gain_name(1), "off ÷ on");
    }
}
