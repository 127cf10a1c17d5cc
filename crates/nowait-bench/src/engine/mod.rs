//! The engine's mechanisms, each on against off: what is measured, with which options, and the run.
//!
//! Invariant: all variants of a row take turns within each round (A B A B), so that a machine which
//! slows down slows down for all of them; a table is in the report only if all its rounds are; a
//! file that was there before is only written to with leave.
//! Knows: everything in this directory. Known by: the crate's door.
#![deny(unsafe_code)]

mod places;
mod table;
mod drive;
mod executor;
mod delayed;
mod scatter;
mod scene;
mod psync;
mod bare_ring;
mod fio;
mod loop_device;
mod plan;
mod tables;
mod text;
mod report;
mod chart;
mod html;

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;

use crate::cpus::Placement;
use crate::error::Error;
use crate::peers::Output;
use crate::report::{Machine, MeasuredFile};
use crate::stop::Stop;
use crate::target::Target;

use plan::Plan;
use scene::Scene;

pub use report::EngineReport;
pub use table::{
    Cell, Gain, Latency, Row as EngineRow, Sample as EngineSample, Source, Table, Unit,
};

const DURATION_MIN: Duration = Duration::from_millis(1);
const ROUNDS_MAX: u32 = 100;
const LATENCY_MAX: Duration = Duration::from_secs(1);

/// Which tables are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The simple path off and on.
    Simple,
    /// Deferred against inline completion.
    Completion,
    /// The segments of a request one after the other against all at once.
    Vectored,
    /// Request slots from the allocator against slots from the pool.
    Pool,
    /// Always a worker against trying without waiting first, and the kernel's loop device.
    Nowait,
    /// This engine beside a bare ring, plain system calls and fio.
    Engines,
    /// All of them.
    All,
}

impl What {
    /// Every single one, without `All`.
    pub const EACH: [What; 6] =
        [What::Simple, What::Completion, What::Vectored, What::Pool, What::Nowait, What::Engines];

    /// The word for it on a command line and in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            What::Simple => "simple",
            What::Completion => "completion",
            What::Vectored => "vectored",
            What::Pool => "pool",
            What::Nowait => "nowait",
            What::Engines => "engines",
            What::All => "all",
        }
    }

    fn includes(self, one: What) -> bool {
        self == What::All || self == one
    }
}

/// What to measure, on what, for how long.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Which tables.
    pub what: What,
    /// The file or block device to measure on, at least 64 MiB, of which the first GiB is used;
    /// `None` makes a file of 256 MiB in `$TMPDIR`, or in /var/tmp, and removes it afterwards.
    pub file: Option<PathBuf>,
    /// Whether `file` may be written over (otherwise only reads are measured on it), and `html` be
    /// replaced.
    pub overwrite: bool,
    /// How long one variant is measured in one round, at least 1 ms. Before it comes a fifth of
    /// that as warm-up.
    pub duration: Duration,
    /// How often, 1 to 100.
    pub rounds: u32,
    /// Latencies of the made-up queue in the table `vectored`, each above 0 and at most 1 s.
    pub latency: Vec<Duration>,
    /// Where to put the report as one HTML page.
    pub html: Option<PathBuf>,
    /// Text or JSON.
    pub output: Output,
    /// Ends the measurement early.
    pub stop: Stop,
}

/// Everything there is, three rounds of half a second, on a file made for it.
impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            what: What::All,
            file: None,
            overwrite: false,
            duration: Duration::from_millis(500),
            rounds: 3,
            latency: vec![Duration::from_micros(100), Duration::from_millis(4)],
            html: None,
            output: Output::Text,
            stop: Stop::default(),
        }
    }
}

/// Measures, writes the result to `out` and returns it. Progress goes to stderr, if that is a
/// terminal.
///
/// A variant that cannot be measured is named in its table with the reason. After a [`Stop`] the
/// report, and the page, hold the tables that were finished.
///
/// # Errors
/// [`Error::Option`] and [`Error::File`] before anything is measured, [`Error::System`] if `out` or
/// the page cannot be written.
pub fn run_engine(options: &EngineOptions, out: &mut impl Write) -> Result<EngineReport, Error> {
    check(options)?;
    let page = options.html.as_deref().map(|path| crate::page::create(path, options.overwrite));
    let page = page.transpose()?;
    let target = Target::open(options.file.as_deref(), options.overwrite, &[])?;
    let scene = Scene::set(&target, options)?;
    let plans = tables::plan(&scene, options.what);
    let mut report = EngineReport {
        machine: Machine::this(Placement::Shared)?,
        file: MeasuredFile { bytes: scene.bytes, ..MeasuredFile::of(&target) },
        direct: scene.direct,
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
    let turns = plans.iter().map(Plan::turns_per_round).sum::<usize>() as u64 * u64::from(rounds);
    let bar = ProgressBar::with_draw_target(Some(turns), ProgressDrawTarget::stderr());
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
    fn options_out_of_range_are_refused_by_name() {
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
