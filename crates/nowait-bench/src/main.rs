//! The program `nowait-bench`, which `nowait bench` executes: runs the measurements of the bench crate
//! and prints their tables.
//!
//! Invariant: a file that exists, or a device, is only written to with `--overwrite`.

use std::path::PathBuf;
use std::{env, io};

use nowait_bench::{Bench, BenchArgs, CancelFlag, Error};
use nowait_daemon::error::{CliError, os_message};
use nowait_daemon::process::{self, log};

fn main() {
    process::set_up();
    let ended = BenchArgs::of_this_process().and_then(|args| {
        run(args).map_err(|error| {
            log::write_line(tracing::Level::ERROR, &error);
            error.status()
        })
    });
    process::end(ended.err().unwrap_or_default());
}

/// Measures and prints.
fn run(args: BenchArgs) -> Result<(), CliError> {
    let failed = |error: Error| CliError::new(error.to_string());
    let stop = CancelFlag::on_signal().map_err(failed)?;
    let bench = Bench { args, nowait: Some(nowait()?), stop };
    let report = nowait_bench::run(&bench, &mut io::stdout().lock()).map_err(failed)?;
    match report.failures.first() {
        _ if report.interrupted => Err(CliError::new("interrupted, the tables above are complete")),
        Some(line) => Err(CliError::new(format!("not everything could be measured: {line}"))),
        None => Ok(()),
    }
}

/// The program to measure: the one that started this one, or else the one beside it.
fn nowait() -> Result<PathBuf, CliError> {
    if let Some(path) = env::var_os("NOWAIT") {
        return Ok(path.into());
    }
    let this = env::current_exe();
    let this =
        this.map_err(|e| CliError::new(format!("cannot find this program: {}", os_message(&e))))?;
    Ok(this.with_file_name("nowait"))
}
