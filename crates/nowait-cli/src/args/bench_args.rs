//! The command line of `nowait bench`: that of another program, which reads it.
//!
//! Invariant: no argument is looked at here, `--help` included.

use std::ffi::OsString;

use clap::{Args, ValueHint};

/// Measure, on this host: this server and its copies beside others, the engine's mechanisms on
/// against off
///
/// The program `nowait-bench`, beside this one or on PATH, does it; `nowait bench --help` is its manual.
#[derive(Debug, Args)]
#[command(disable_help_flag = true, after_help = AFTER_HELP)]
pub(crate) struct BenchArgs {
    /// The arguments of nowait-bench
    #[arg(value_name = "ARGS", trailing_var_arg = true, allow_hyphen_values = true, value_hint = ValueHint::FilePath)]
    pub(crate) arguments: Vec<OsString>,
}

const AFTER_HELP: &str = "\
Examples:
  nowait bench --help          what can be measured, and how
  nowait bench peers           NBD servers side by side, on a temporary file

Exit status:
  0   the tables are complete
  1   nothing could be measured, or not all of it that this host has, or nowait-bench is missing
  2   wrong command line";
