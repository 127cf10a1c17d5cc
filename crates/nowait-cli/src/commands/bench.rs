//! `nowait bench`: becomes the program `nowait-bench`, so that this one carries no measurements.
//!
//! Invariant: the program beside this one comes before those on `PATH`.

use std::env;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::args::bench_args::BenchArgs;
use nowait_daemon::error::{CliError, os_message};

const PROGRAM: &str = "nowait-bench";

/// Executes `nowait-bench` with the arguments after `bench` as they are. Its variable
/// `NOWAIT` names this program, which it measures. Returns only if that failed.
pub(crate) fn run(args: &BenchArgs) -> CliError {
    let this = match env::current_exe() {
        Ok(this) => this,
        Err(e) => return CliError::new(format!("cannot find this program: {}", os_message(&e))),
    };
    let beside = this.with_file_name(PROGRAM);
    let program = if beside.is_file() { &beside } else { Path::new(PROGRAM) };
    let error = Command::new(program).args(&args.arguments).env("NOWAIT", &this).exec();
    match error.kind() {
        io::ErrorKind::NotFound => CliError::new(format!(
            "{PROGRAM} is neither beside {} nor on PATH: 'cargo build --release' builds both, and \
             'cargo install --path crates/nowait-bench' installs it",
            this.display()
        )),
        _ => CliError::at(program, format_args!("cannot be run: {}", os_message(&error))),
    }
}
