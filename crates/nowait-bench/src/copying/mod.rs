//! Copying disks: nowait compared with qemu-img and nbdcopy, route by route.
//!
//! Invariant: on one route all copiers copy the same bytes, alternately, one at a time. All files
//! are in a temporary directory, which is removed afterwards.

mod copy_case;
mod timed;
mod table;
mod copy_run;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tempfile::TempDir;

pub use copy_case::{Content, Copier, CopyCase};
pub use table::{CopyReport, CopyRow, CopySample, CopyTable};

use crate::cancel::CancelFlag;
use crate::cpus::Placement;
use crate::error::Error;
use crate::nbd_servers::Output;
use crate::report::Machine;
use copy_run::CopyRun;

const MIB: u64 = 1 << 20;

/// The options of the copy benchmark.
#[derive(Clone, Debug)]
pub struct CopyOptions {
    /// The nowait program, which also serves.
    pub nowait: PathBuf,
    /// The directory for the files; `None` is `$TMPDIR`, or /var/tmp. It needs room for two full
    /// disks and one more.
    pub directory: Option<PathBuf>,
    /// Bytes of a full disk, at least 1 MiB; a sparse disk has twice as many.
    pub bytes: u64,
    /// The number of rounds, at least 1.
    pub rounds: u32,
    /// Text or JSON.
    pub output: Output,
    /// Cancels the measurement after the current copy.
    pub stop: CancelFlag,
}

/// Measures, writes the result to `out` and returns it. Progress goes to stderr, if that is a terminal.
///
/// A copier that fails is left out of that table and named in the report.
///
/// # Errors
/// [`Error::Option`]; [`Error::System`] if `out` cannot be written, or the files not be made.
pub fn run_copies(options: &CopyOptions, out: &mut impl Write) -> Result<CopyReport, Error> {
    if options.rounds == 0 || options.bytes < MIB {
        return Err(Error::Option {
            name: "rounds",
            problem: "has to be 1 or more, of 1 MiB or more",
        });
    }
    let parent =
        options.directory.clone().or_else(|| std::env::var_os("TMPDIR").map(PathBuf::from));
    let directory = tempfile::Builder::new()
        .prefix("nowait-bench-")
        .tempdir_in(parent.unwrap_or_else(|| PathBuf::from("/var/tmp")))
        .map_err(Error::system("making a directory for the files (name one with --directory)"))?;
    let scratch = TempDir::with_prefix("nowait-bench-")
        .map_err(Error::system("making a directory for sockets"))?;
    let missing = ["qemu-img", "nbdcopy"].into_iter().filter(|name| !runs(name)).collect();
    let mut report = CopyReport {
        machine: Machine::this(Placement::Shared)?,
        rounds: options.rounds,
        tables: Vec::new(),
        failures: Vec::new(),
        missing,
        interrupted: false,
    };
    let text = options.output == Output::Text;
    let mut say = |text: String| put(out, &text);
    if text {
        say(report.heading())?;
    }
    let bar = progress_bar(options.rounds);
    'contents: for content in Content::ALL {
        let bytes = match content {
            Content::Full => options.bytes,
            Content::Sparse => 2 * options.bytes,
        } / MIB
            * MIB;
        let copy_run = CopyRun {
            directory: directory.path(),
            scratch: scratch.path(),
            nowait: &options.nowait,
            bytes,
        };
        copy_run.prepare(content).map_err(Error::system("making the disks to copy"))?;
        for route in CopyCase::ALL {
            let rows = rows(&copy_run, route, options, &mut report, &bar);
            if options.stop.requested() {
                report.interrupted = true;
                break 'contents;
            }
            let table = CopyTable { content, route, bytes, rows };
            if text {
                bar.suspend(|| say(table.to_string()))?;
            }
            report.tables.push(table);
        }
    }
    bar.finish_and_clear();
    match options.output {
        Output::Text => say(report.ending())?,
        Output::Json => say(format!("{:#}\n", serde_json::Value::from(&report)))?,
    }
    Ok(report)
}

/// Runs all rounds on one route; fewer if cancelled.
fn rows(
    copy_run: &CopyRun<'_>,
    route: CopyCase,
    options: &CopyOptions,
    report: &mut CopyReport,
    bar: &ProgressBar,
) -> Vec<CopyRow> {
    let there = |copier: &Copier| {
        copier.takes(route) && !report.missing.iter().any(|name| copier.name().starts_with(name))
    };
    let new = |copier| CopyRow { copier, samples: Vec::new() };
    let mut rows: Vec<CopyRow> = Copier::ALL.into_iter().filter(there).map(new).collect();
    for _ in 0..options.rounds {
        bar.inc(1);
        rows.retain_mut(|row| {
            if options.stop.requested() {
                return true;
            }
            bar.set_message(format!("{}: {}", route.name(), row.copier.name()));
            match copy_run.run(row.copier, route) {
                Ok(sample) => {
                    row.samples.push(sample);
                    true
                }
                Err(e) => {
                    let (copier, route) = (row.copier.name(), route.name());
                    report.failures.push(format!("{copier} failed, {route}: {e}"));
                    false
                }
            }
        });
    }
    rows
}

fn runs(program: &str) -> bool {
    let mut command = Command::new(program);
    let quiet = command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null());
    quiet.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn progress_bar(rounds: u32) -> ProgressBar {
    let steps = u64::from(rounds) * (CopyCase::ALL.len() * Content::ALL.len()) as u64;
    let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("[{bar:24}] {eta} left  {wide_msg}") {
        bar.set_style(style);
    }
    bar
}

fn put(out: &mut impl Write, text: &str) -> Result<(), Error> {
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(Error::system("writing the report"))
}
