//! `nowait copy`: hands the options to the copying crate, shows its progress and prints the outcome.
//!
//! Invariant: the outcome is printed after the copy is complete; whatever ends it early, the exit
//! status is 1.
//! Knows: copy_args, error, size. Known by: main.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use nowait_copy::{Options, Phase, Progress, Report};
use nowait_image::Format;
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

use crate::copy_args::CopyArgs;
use crate::error::{CliError, reason};
use crate::size::human;

const STYLE: &str = "{msg:9} [{bar:24}] {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";

/// Copies and prints what it came to.
///
/// # Errors
/// What is wrong with either side, or that it was interrupted.
pub(crate) fn run(args: &CopyArgs) -> Result<(), CliError> {
    let stop = stop_on_signal()?;
    let options = Options {
        from: args.from.clone(),
        to: args.to.clone(),
        from_format: args.from_format,
        backing_dirs: args.backing_dir.clone(),
        to_format: args.to_format(),
        cluster_bytes: args.cluster_size,
        force: args.force,
        verify: args.verify,
        connections: usize::from(args.connections),
        tls_certs: args.tls_certs.clone(),
        requests: usize::from(args.requests),
        sparse_bytes: args.sparse as usize,
    };
    let shown = !args.no_progress && io::stderr().is_terminal();
    let mut bar = Bar::new(shown);
    let copied = nowait_copy::copy(&options, &stop, &mut |progress| bar.show(progress));
    bar.0.finish_and_clear();
    let report = copied.map_err(|error| CliError::new(error.to_string()))?;
    let text =
        if args.json { format!("{}\n", in_json(args, &report)) } else { in_words(args, &report) };
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|e| CliError::new(format!("standard output: {}", reason(&e))))
}

/// A flag that a signal sets. A file that grows beyond what is allowed is an error, not the end of
/// the process.
fn stop_on_signal() -> Result<Arc<AtomicBool>, CliError> {
    let stop = Arc::new(AtomicBool::new(false));
    let registered = [SIGINT, SIGTERM, SIGHUP]
        .into_iter()
        .try_for_each(|signal| signal_hook::flag::register(signal, stop.clone()).map(drop))
        .and_then(|()| signal_hook::flag::register(SIGXFSZ, Arc::default()).map(drop));
    match registered {
        Ok(()) => Ok(stop),
        Err(e) => Err(CliError::new(format!("cannot handle signals: {}", reason(&e)))),
    }
}

struct Bar(ProgressBar);

impl Bar {
    fn new(shown: bool) -> Self {
        if !shown {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(STYLE) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self(bar)
    }

    fn show(&mut self, progress: Progress) {
        let phase = match progress.phase {
            Phase::Copying => "copying",
            Phase::Flushing => "flushing",
            Phase::Verifying => "verifying",
        };
        if self.0.message() != phase {
            self.0.set_message(phase);
            self.0.reset();
        }
        self.0.set_length(progress.total);
        self.0.set_position(progress.done);
    }
}

fn bytes_per_second(report: &Report) -> f64 {
    report.size as f64 / report.elapsed.as_secs_f64().max(f64::EPSILON)
}

fn in_json(args: &CopyArgs, report: &Report) -> Value {
    json!({
        "from": args.from.to_string(),
        "to": args.to.to_string(),
        "to_format": args.to_format().name(),
        "size_bytes": report.size,
        "to_size_bytes": report.target_size,
        "data_bytes": report.data,
        "zero_bytes": report.zero,
        "seconds": report.elapsed.as_secs_f64(),
        "bytes_per_second": bytes_per_second(report),
        "verified": args.verify,
    })
}

fn in_words(args: &CopyArgs, report: &Report) -> String {
    let verified = if args.verify { ", compared and found equal" } else { "" };
    let seconds = report.elapsed.as_secs_f64();
    let rest = match report.target_size - report.size {
        0 => String::new(),
        bytes if args.to_format() == Format::Qcow2 => {
            format!("the last {} of {} are zeros\n", human(bytes), args.to)
        }
        bytes => format!("the last {} of {} are as they were\n", human(bytes), args.to),
    };
    format!(
        "copied {} to {}: {}, of them {} data and {} zeros, in {seconds:.1} s{verified}\n{rest}",
        args.from,
        args.to,
        human(report.size),
        human(report.data),
        human(report.zero),
    )
}
