//! Rounds and report of a measurement, the same for all of them: entries in turns, and tables as text and
//! JSON.
//!
//! Invariant: what is compared is measured in turns in each round (A B A B), so that a slowdown of
//! the machine affects all of it. What fails is not tried again. A table is in the report only if
//! all its rounds are complete.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Map, Value};

use crate::bench::Bench;
use crate::error::Error;
use crate::table::MinMedianMax;

/// The result of a measurement. Its tables are printed already.
#[derive(Debug)]
pub struct Report {
    /// All figures: the object that `--json` prints.
    pub json: Value,
    /// One line for each failure; what failed is left out of its table, or named there.
    pub failures: Vec<String>,
    /// Whether the measurement was cancelled before the end.
    pub interrupted: bool,
}

/// Something that is measured once in each round.
#[derive(Clone, Debug)]
pub(crate) struct Entry<K, S> {
    pub(crate) key: K,
    /// One sample for each round; none if there is a problem.
    pub(crate) samples: Vec<S>,
    /// The reason why it could not be measured.
    pub(crate) problem: Option<String>,
    /// Whether the reason is that this machine lacks something: `ErrorKind::Unsupported`. That is
    /// no failure of the measurement.
    pub(crate) is_lacking: bool,
}

impl<K, S> Entry<K, S> {
    pub(crate) fn new(key: K) -> Self {
        Self { key, samples: Vec::new(), problem: None, is_lacking: false }
    }

    /// A figure over the rounds; zeros without samples.
    pub(crate) fn of(&self, figure: impl Fn(&S) -> f64) -> MinMedianMax {
        let none = MinMedianMax { median: 0.0, min: 0.0, max: 0.0 };
        MinMedianMax::of(&self.samples, figure).unwrap_or(none)
    }

    pub(crate) fn median(&self, figure: impl Fn(&S) -> f64) -> f64 {
        self.of(figure).median
    }
}

/// A report in the making. Progress goes to stderr, if that is a terminal.
pub(crate) struct Reporter<'a> {
    bench: &'a Bench,
    out: &'a mut dyn Write,
    bar: ProgressBar,
    tables: Vec<Value>,
    failures: Vec<(String, Value)>,
    interrupted: bool,
}

impl<'a> Reporter<'a> {
    pub(crate) fn begin(bench: &'a Bench, out: &'a mut dyn Write) -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("[{bar:24}] {eta} left  {wide_msg}") {
            bar.set_style(style);
        }
        Self { bench, out, bar, tables: Vec::new(), failures: Vec::new(), interrupted: false }
    }

    /// Prints the lines before the first table. `entries` are measured in each round of all tables.
    pub(crate) fn heading(&mut self, text: &str, entries: usize) -> Result<(), Error> {
        self.bar.set_length(entries as u64 * u64::from(self.bench.args.rounds));
        self.print(false, text)
    }

    /// Measures each entry in each round. False if that was cancelled.
    pub(crate) fn measure<K, S>(
        &mut self,
        entries: &mut [Entry<K, S>],
        name: impl Fn(&K) -> String,
        measure: impl Fn(&K) -> io::Result<S>,
    ) -> bool {
        for _ in 0..self.bench.args.rounds {
            for entry in entries.iter_mut() {
                if entry.problem.is_none() {
                    self.bar.set_message(name(&entry.key));
                    let outcome = measure(&entry.key);
                    if self.bench.stop.requested() {
                        self.interrupted = true;
                        return false;
                    }
                    match outcome {
                        Ok(sample) => entry.samples.push(sample),
                        Err(error) => {
                            entry.problem = Some(error.to_string());
                            entry.is_lacking = error.kind() == io::ErrorKind::Unsupported;
                            entry.samples.clear();
                        }
                    }
                }
                self.bar.inc(1);
            }
        }
        true
    }

    /// Measures each of `keys` in each round, and leaves out what fails; `failure` describes it by a
    /// line and an object. `None` if that was cancelled.
    pub(crate) fn compare<K, S>(
        &mut self,
        keys: impl IntoIterator<Item = K>,
        name: impl Fn(&K) -> String,
        measure: impl Fn(&K) -> io::Result<S>,
        failure: impl Fn(&K, &str) -> (String, Value),
    ) -> Option<Vec<Entry<K, S>>> {
        let mut rows: Vec<_> = keys.into_iter().map(Entry::new).collect();
        if !self.measure(&mut rows, name, measure) {
            return None;
        }
        let failed = rows.iter().filter_map(|row| Some(failure(&row.key, row.problem.as_ref()?)));
        self.failures.extend(failed);
        rows.retain(|row| row.problem.is_none());
        Some(rows)
    }

    /// Adds a line about something that its table names.
    pub(crate) fn failure(&mut self, line: String) {
        self.failures.push((line.clone(), line.into()));
    }

    /// Prints a finished table.
    pub(crate) fn table(&mut self, text: &str, json: Value) -> Result<(), Error> {
        self.tables.push(json);
        let bar = self.bar.clone();
        bar.suspend(|| self.print(false, text))
    }

    /// Prints the end: the failures, or the JSON object, which is `head` with the tables by the name `tables`.
    pub(crate) fn end(mut self, head: Value, tables: &str) -> Result<Report, Error> {
        self.bar.finish_and_clear();
        let failures: String =
            self.failures.iter().map(|(line, _)| format!("\n{line}\n")).collect();
        self.print(false, &failures)?;
        if self.interrupted {
            self.print(false, "\nstopped before the end\n")?;
        }
        let mut object = match head {
            Value::Object(head) => head,
            _ => Map::new(),
        };
        object.insert(tables.to_owned(), std::mem::take(&mut self.tables).into());
        object.insert("interrupted".to_owned(), self.interrupted.into());
        object.insert("rounds".to_owned(), self.bench.args.rounds.into());
        let (failures, objects): (Vec<String>, Vec<Value>) =
            std::mem::take(&mut self.failures).into_iter().unzip();
        object.entry("failures").or_insert_with(|| objects.into());
        let json = Value::Object(object);
        self.print(true, &format!("{json:#}\n"))?;
        Ok(Report { json, failures, interrupted: self.interrupted })
    }

    /// Prints `text`, which is for reports as JSON or for those as text.
    fn print(&mut self, json: bool, text: &str) -> Result<(), Error> {
        if json != self.bench.args.json {
            return Ok(());
        }
        let written = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush());
        written.map_err(Error::system("writing the report"))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use serde_json::json;

    use super::*;

    type Outcome = io::Result<f64>;

    /// Measures `A` and `B` in three rounds. Returns what was measured, the entries, and the report.
    fn measured(
        measure: impl Fn(char, &Bench) -> Outcome,
    ) -> (String, Vec<Entry<char, f64>>, Report) {
        let (run, order, mut out) = (Bench::of("peers"), RefCell::default(), Vec::new());
        let mut reporter = Reporter::begin(&run, &mut out);
        let mut entries = ['A', 'B'].map(Entry::new);
        let complete = reporter.measure(&mut entries, char::to_string, |&name| {
            RefCell::<String>::borrow_mut(&order).push(name);
            measure(name, &run)
        });
        assert_eq!(complete, !run.stop.requested());
        let report = reporter.end(json!({}), "tables").expect("a report");
        assert_eq!(String::from_utf8(out).unwrap().contains("stopped before the end"), !complete);
        (order.into_inner(), entries.to_vec(), report)
    }

    #[test]
    fn entries_alternate_within_each_round() {
        let (order, entries, report) = measured(|_, _| Ok(1.0));
        assert_eq!((order.as_str(), report.interrupted), ("ABABAB", false));
        assert_eq!(entries[1].samples.len(), 3);
    }

    #[test]
    fn an_entry_that_fails_is_named_and_not_tried_again() {
        let fails = |name, _: &Bench| match name {
            'A' => Err(io::Error::other("no luck")),
            _ => Ok(1.0),
        };
        let (order, entries, _) = measured(fails);
        assert_eq!((order.as_str(), entries[0].problem.as_deref()), ("ABBB", Some("no luck")));
        assert_eq!((entries[0].samples.len(), entries[1].samples.len()), (0, 3));
    }

    #[test]
    fn a_cancelled_measurement_ends_at_once_and_is_reported_as_interrupted() {
        let (order, _, report) = measured(|_, run| {
            run.stop.request();
            Ok(1.0)
        });
        assert_eq!((order.as_str(), report.interrupted), ("A", true));
        assert_eq!(report.json["interrupted"], true);
    }
}
