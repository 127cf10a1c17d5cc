//! `nowait copy`: runs a copy, shows its progress and prints the outcome.
//!
//! Invariant: the outcome is printed after the copy is complete; any failure ends with exit status
//! 1, or 3 where the target is partly written. A complete copy with unreadable ranges ends with 4.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use nowait_copy::{CopySource, CopyTarget, Lost, Options, Phase, Progress, Report};
use serde_json::{Value, json};

use crate::args::copy_args::CopyArgs;
use crate::output;
use nowait_daemon::disks::waiting::Waiting;
use nowait_daemon::endpoints::signals;
use nowait_daemon::error::{CliError, os_message, plain};
use nowait_daemon::secrets;
use nowait_daemon::size::human;

const STYLE: &str = "{msg:9} [{bar:24}] {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";

/// The exit status where a block device or an export is written in part.
const WRITTEN_IN_PART: u8 = 3;
/// The exit status of a copy with zeros for unreadable ranges.
const UNREADABLE: u8 = 4;
/// The limit of unreadable ranges that are listed on standard error.
const LISTED_RANGES: usize = 20;

/// Copies and prints the result.
///
/// # Errors
/// A failure on either side, or an interruption.
pub(crate) fn run(args: &CopyArgs) -> Result<u8, CliError> {
    let cancel = cancel_on_signal()?;
    let options = Options {
        from: CopySource::At(args.from.clone()),
        to: CopyTarget::At(args.to.clone()),
        from_format: args.from_format,
        backing_dirs: args.others.backing_dir.clone(),
        backings: args.others.backing.clone(),
        data_files: args.others.data_file.clone(),
        remote: args.auth.options(),
        to_format: args.to_format(),
        to_format_given: args.to_format.is_some(),
        cluster_bytes: args.cluster_size,
        compression: args.compression(),
        increment: args.increment(),
        force: args.force,
        allow_mounted: args.allow_mounted,
        verify: args.verify,
        rescue: args.rescue,
        connections: usize::from(args.connections()),
        tls_certs: args.tls_certs.clone(),
        requests: usize::from(args.requests),
        sparse_bytes: args.sparse as usize,
    };
    if args.tls_certs.is_some() {
        secrets::keep_in_memory();
    }
    let bar = Bar::new(args.no_progress);
    // Until the first data moves.
    let mut waiting =
        Some(Waiting::start([&args.from, &args.to].into_iter().chain(&options.backings)));
    let copied = nowait_copy::copy(&options, &cancel, &mut |progress| {
        waiting = None;
        bar.show(progress);
    });
    drop(waiting);
    bar.clear();
    let report = copied.map_err(|error| failed(&error))?;
    let text =
        if args.json { format!("{}\n", in_json(args, &report)) } else { in_words(args, &report) };
    output::print(text)?;
    if report.lost.bytes == 0 {
        return Ok(0);
    }
    // The exit status says it, too, where standard error is closed.
    let _ = io::stderr().write_all(lost_in_words(args, &report.lost).as_bytes());
    Ok(UNREADABLE)
}

/// The unreadable ranges: a line with their sum, and one for each of the first ranges.
fn lost_in_words(args: &CopyArgs, lost: &Lost) -> String {
    let (from, to) = (plain(&args.from.to_string()), plain(&args.to.to_string()));
    let mut text =
        format!("nowait: {from}: {} bytes cannot be read, and are zeros in {to}:\n", lost.bytes);
    for range in lost.ranges.iter().take(LISTED_RANGES) {
        let _ = writeln!(text, "  offset {}, length {}", range.pos, range.len);
    }
    match lost.ranges.len().saturating_sub(LISTED_RANGES) {
        0 => {}
        more if lost.truncated => {
            let _ = writeln!(text, "  and more than {more} more ranges");
        }
        more => {
            let how = if args.json { "" } else { " (--json lists them)" };
            let _ = writeln!(text, "  and {more} more ranges{how}");
        }
    }
    text
}

/// A flag that a signal sets.
pub(crate) fn cancel_on_signal() -> Result<Arc<AtomicBool>, CliError> {
    signals::flag().map_err(|e| CliError::new(format!("cannot handle signals: {}", os_message(&e))))
}

/// The failure of a copy, with its exit status.
pub(crate) fn failed(error: &nowait_copy::Error) -> CliError {
    let line = CliError::new(error.to_string());
    match error {
        nowait_copy::Error::WrittenInPart { .. } => line.with_status(WRITTEN_IN_PART),
        _ => line,
    }
}

/// The progress bar of a copy.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// A bar, unless progress is not to be shown or standard error is not a terminal.
    pub(crate) fn new(no_progress: bool) -> Self {
        if no_progress || !io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(STYLE) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self(bar)
    }

    /// Shows the progress of a copy.
    pub(crate) fn show(&self, progress: Progress) {
        let phase = match progress.phase {
            Phase::Copying => "copying",
            Phase::Flushing => "flushing",
            Phase::Verifying => "verifying",
        };
        self.set(phase, progress.done, progress.total);
    }

    /// Shows that `done` of `total` bytes of a phase are done.
    pub(crate) fn set(&self, phase: &'static str, done: u64, total: u64) {
        if self.0.message() != phase {
            self.0.set_message(phase);
            self.0.reset();
        }
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// Removes the bar.
    pub(crate) fn clear(&self) {
        self.0.finish_and_clear();
    }
}

fn bytes_per_second(report: &Report) -> f64 {
    report.size as f64 / report.elapsed.as_secs_f64().max(f64::EPSILON)
}

fn in_json(args: &CopyArgs, report: &Report) -> Value {
    let lost = &report.lost;
    let ranges = lost.ranges.iter().map(|range| json!({"offset": range.pos, "length": range.len}));
    json!({
        "from": args.from.to_string(),
        "to": args.to.to_string(),
        "to_format": args.to_format().name(),
        "size_bytes": report.size,
        "to_size_bytes": report.target_size,
        "data_bytes": report.data,
        "zero_bytes": report.zero,
        "unchanged_bytes": report.unchanged,
        "compared_bytes": report.compared,
        "seconds": report.elapsed.as_secs_f64(),
        "bytes_per_second": bytes_per_second(report),
        "verified": args.verify,
        "unreadable_bytes": lost.bytes,
        "unreadable": ranges.collect::<Vec<_>>(),
        "unreadable_truncated": lost.truncated,
    })
}

fn in_words(args: &CopyArgs, report: &Report) -> String {
    let (from, to) = (plain(&args.from.to_string()), plain(&args.to.to_string()));
    let verified = if args.verify { ", compared and found equal" } else { "" };
    let seconds = report.elapsed.as_secs_f64();
    let rest = match report.target_size - report.size {
        0 => String::new(),
        bytes if !args.to_format().is_raw() => {
            format!("the last {} of {to} are zeros\n", human(bytes))
        }
        bytes => format!("the last {} of {to} are as they were\n", human(bytes)),
    };
    let unchanged = match args.increment() {
        Some(_) => format!(", {} unchanged", human(report.unchanged)),
        None => String::new(),
    };
    format!(
        "copied {from} to {to}: {}, of them {} data and {} zeros{unchanged}, in {seconds:.1} s{verified}\n{rest}",
        human(report.size),
        human(report.data),
        human(report.zero),
    )
}
