//! The complete report of a measurement of the engine: machine, file, tables.
//!
//! Invariant: the parts that are printed during the measurement add up to the output of `Display`.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use crate::ablation::result_table::Table;
use crate::report::{Machine, MeasuredFile};

/// The tables, the machine and the file. `Display` formats the text, `Value::from(&report)` the
/// JSON object.
#[derive(Clone, Debug)]
pub struct EngineReport {
    /// The machine that was measured.
    pub machine: Machine,
    /// The file that was measured.
    pub file: MeasuredFile,
    /// Whether the page cache was bypassed.
    pub direct: bool,
    /// Measured time of one variant in one round.
    pub duration: Duration,
    /// Rounds of each row.
    pub rounds: u32,
    /// The finished tables, in the order of measuring.
    pub tables: Vec<Table>,
    /// Whether the measurement was cancelled before the end.
    pub interrupted: bool,
}

impl EngineReport {
    /// One line for each cell without figures: the variant and the reason.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for table in &self.tables {
            for row in &table.rows {
                for (variant, cell) in table.variants.iter().zip(&row.cells) {
                    let problem = cell.problem.as_ref();
                    let line =
                        |problem| format!("{}, {}: {variant}: {problem}", table.title, row.title);
                    lines.extend(problem.map(line));
                }
            }
        }
        lines
    }

    /// The lines before the first table.
    pub(crate) fn heading(&self) -> String {
        let mut text = format!("Linux {}, {}\n", self.machine.kernel, self.machine.processor);
        let origin =
            if self.file.temporary { ", made for this and removed afterwards" } else { "" };
        text += &format!("{}: {} MiB{origin}\n", self.file.path.display(), self.file.bytes >> 20);
        if !self.file.written {
            text += "only reads: the file may not be overwritten (--overwrite allows it)\n";
        }
        if !self.direct {
            text += "no direct I/O on this file system: the figures are the page cache's\n";
        }
        text += &format!(
            "{} rounds of {} s for each variant, in turns; medians\n",
            self.rounds,
            self.duration.as_secs_f64(),
        );
        text
    }

    /// The lines after the last table.
    pub(crate) fn ending(&self) -> String {
        if self.interrupted { "\nstopped before the end\n".to_owned() } else { String::new() }
    }
}

impl fmt::Display for EngineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.heading())?;
        self.tables.iter().try_for_each(|table| table.fmt(f))?;
        f.write_str(&self.ending())
    }
}

impl From<&EngineReport> for Value {
    fn from(report: &EngineReport) -> Value {
        json!({
            "machine": {
                "kernel": report.machine.kernel,
                "processor": report.machine.processor,
            },
            "file": {
                "path": report.file.path.to_string_lossy(),
                "bytes": report.file.bytes,
                "temporary": report.file.temporary,
                "written": report.file.written,
                "direct": report.direct,
            },
            "seconds": report.duration.as_secs_f64(),
            "rounds": report.rounds,
            "tables": report.tables.iter().map(Table::to_json).collect::<Vec<_>>(),
            "interrupted": report.interrupted,
        })
    }
}
