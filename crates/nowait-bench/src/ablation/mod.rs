//! The mechanisms of the engine, each switched on against off: the selection, the options and the
//! run.
//!
//! Invariant: all variants of a row are measured alternately in each round (A B A B), so that a
//! slowdown of the machine affects all of them. A table is in the report only if all its rounds are
//! complete. A file of the user is only written to with permission.
#![deny(unsafe_code)]

mod offsets;
mod result_table;
mod closed_loop;
mod executor;
mod delayed;
mod vectored_io;
mod fixture;
mod blocking_calls;
mod bare_ring;
mod fio_engine;
mod loop_device;
mod plan;
mod tables;
mod text;
mod ablation_report;
mod chart;
mod html;

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;

use crate::cancel::CancelFlag;
use crate::cpus::Placement;
use crate::error::Error;
use crate::nbd_servers::Output;
use crate::report::{Machine, MeasuredFile};
use crate::test_file::Target;

use fixture::Fixture;
use plan::Plan;

pub use ablation_report::EngineReport;
pub use result_table::{
    Cell, Latency, Metric, Row as EngineRow, Sample as EngineSample, Source, Table, Unit,
};

const DURATION_MIN: Duration = Duration::from_millis(1);
const ROUNDS_MAX: u32 = 100;
const LATENCY_MAX: Duration = Duration::from_secs(1);

/// Which tables are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableSelection {
    /// The simple path off and on.
    Simple,
    /// Deferred against inline completion.
    Completion,
    /// The segments of a request one after the other against all of them in one transfer.
    Vectored,
    /// Request slots from the allocator against slots from the pool.
    Pool,
    /// Always a worker against a non-blocking attempt first, and the loop device of the kernel.
    Nowait,
    /// This engine compared with a bare ring, plain system calls and fio.
    Engines,
    /// All tables.
    All,
}

impl TableSelection {
    /// Every single table, without `All`.
    pub const EACH: [TableSelection; 6] = [
        TableSelection::Simple,
        TableSelection::Completion,
        TableSelection::Vectored,
        TableSelection::Pool,
        TableSelection::Nowait,
        TableSelection::Engines,
    ];

    /// Its name on the command line and in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            TableSelection::Simple => "simple",
            TableSelection::Completion => "completion",
            TableSelection::Vectored => "vectored",
            TableSelection::Pool => "pool",
            TableSelection::Nowait => "nowait",
            TableSelection::Engines => "engines",
            TableSelection::All => "all",
        }
    }

    fn includes(self, one: TableSelection) -> bool {
        self == TableSelection::All || self == one
    }
}

/// The options of a measurement of the engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The tables to measure.
    pub what: TableSelection,
    /// The file or block device to measure on, at least 64 MiB, of which the first GiB is used;
    /// `None` creates a file of 256 MiB in `$TMPDIR`, or in /var/tmp, and removes it afterwards.
    pub file: Option<PathBuf>,
    /// Whether `file` may be overwritten (otherwise only reads are measured on it), and `html`
    /// replaced.
    pub overwrite: bool,
    /// How long one variant is measured in one round, at least 1 ms, after a warm-up of a fifth of
    /// that.
    pub duration: Duration,
    /// The number of rounds, 1 to 100.
    pub rounds: u32,
    /// Latencies of the simulated queue in the table `vectored`, each above 0 and at most 1 s.
    pub latency: Vec<Duration>,
    /// The path of the report as an HTML page.
    pub html: Option<PathBuf>,
    /// Text or JSON.
    pub output: Output,
    /// Ends the measurement early.
    pub stop: CancelFlag,
}

/// All tables, three rounds of half a second, on a temporary file.
impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            what: TableSelection::All,
            file: None,
            overwrite: false,
            duration: Duration::from_millis(500),
            rounds: 3,
            latency: vec![Duration::from_micros(100), Duration::from_millis(4)],
            html: None,
            output: Output::Text,
            stop: CancelFlag::default(),
        }
    }
}

/// Measures, writes the result to `out` and returns it. Progress goes to stderr, if that is a
/// terminal.
///
/// A variant that cannot be measured is named in its table with the reason. After a cancellation by
/// the [`CancelFlag`], the report and the page contain the finished tables.
///
/// # Errors
/// [`Error::Option`] and [`Error::File`] before anything is measured, [`Error::System`] if `out` or
/// the page cannot be written.
pub fn run_engine(options: &EngineOptions, out: &mut impl Write) -> Result<EngineReport, Error> {
    check(options)?;
    let page = options.html.as_deref().map(|path| crate::page::create(path, options.overwrite));
    let page = page.transpose()?;
    let target = Target::open(options.file.as_deref(), options.overwrite, &[])?;
    let fixture = Fixture::set(&target, options)?;
    let plans = tables::plan(&fixture, options.what);
    let mut report = EngineReport {
        machine: Machine::this(Placement::Shared)?,
        file: MeasuredFile { bytes: fixture.bytes, ..MeasuredFile::of(&target) },
        direct: fixture.direct,
        duration: options.duration,
        rounds: options.rounds,
        tables: Vec::new(),
        interrupted: false,
    };
    put_text(options, out, &report.heading())?;
    let bar = progress_bar(&plans, options.rounds);
    for plan in plans {
        let table = plan.measure(options.rounds, &options.stop, &bar);
        let Some(table) = table else {
            report.interrupted = true;
            break;
        };
        bar.suspend(|| put_text(options, out, &table.to_string()))?;
        report.tables.push(table);
    }
    bar.finish_and_clear();
    finish(options, &report, page, out)?;
    Ok(report)
}

fn finish(
    options: &EngineOptions,
    report: &EngineReport,
    page: Option<File>,
    out: &mut impl Write,
) -> Result<(), Error> {
    if let Some(mut page) = page {
        page.write_all(html::page(report).as_bytes()).map_err(Error::system("writing the page"))?;
    }
    match options.output {
        Output::Text => put(out, &report.ending()),
        Output::Json => put(out, &format!("{:#}\n", Value::from(report))),
    }
}

fn check(options: &EngineOptions) -> Result<(), Error> {
    let within = |good: bool, name: &'static str, problem: &'static str| {
        if good { Ok(()) } else { Err(Error::Option { name, problem }) }
    };
    within(options.duration >= DURATION_MIN, "duration", "has to be 0.001 seconds or more")?;
    within((1..=ROUNDS_MAX).contains(&options.rounds), "rounds", "has to be 1 to 100")?;
    let good_latency = |latency: &Duration| !latency.is_zero() && *latency <= LATENCY_MAX;
    let rule = "has to be more than 0 and at most 1 second";
    within(options.latency.iter().all(good_latency), "latency", rule)
}

fn progress_bar(plans: &[Plan<'_>], rounds: u32) -> ProgressBar {
    let measurements =
        plans.iter().map(Plan::measurements_per_round).sum::<usize>() as u64 * u64::from(rounds);
    let bar = ProgressBar::with_draw_target(Some(measurements), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("[{bar:24}] {eta} left  {wide_msg}") {
        bar.set_style(style);
    }
    bar
}

fn put_text(options: &EngineOptions, out: &mut impl Write, text: &str) -> Result<(), Error> {
    match options.output {
        Output::Text => put(out, text),
        Output::Json => Ok(()),
    }
}

fn put(out: &mut impl Write, text: &str) -> Result<(), Error> {
    let written: io::Result<()> = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(Error::system("writing the report"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_out_of_range_is_rejected_by_name() {
        let good = EngineOptions::default();
        assert!(check(&good).is_ok());
        let bad = [
            ("duration", EngineOptions { duration: Duration::ZERO, ..good.clone() }),
            ("rounds", EngineOptions { rounds: 0, ..good.clone() }),
            ("latency", EngineOptions { latency: vec![Duration::ZERO], ..good.clone() }),
        ];
        for (name, options) in bad {
            let text = check(&options).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(text.starts_with(name), "{text:?}");
        }
    }
}
