//! The command-line options of `top`.

use clap::Args;

use crate::args::control_args::ServerArgs;

/// Watch a running server: what its exports and clients do, second by second
///
/// Rates and latencies are those of the last second. Latencies are too high by at most a factor of
/// two; one request in sixteen is timed.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct TopArgs {
    /// Print one second, and exit; the same where standard output is not a terminal
    #[arg(long)]
    pub(crate) once: bool,

    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

const AFTER_HELP: &str = "\
Keys:
  q, Esc, Ctrl-C   quit
  ?                help: the columns

Columns that a narrow terminal has no place for are left out: the image first,
the latencies before the errors.

Examples:
  nowait top
  nowait top --once
  nowait top --json | jq '.exports[] | {name, requests_per_second}'
  nowait top --control tcp:127.0.0.1:9000

Exit status:
  0   closed by a key or a signal, or printed
  1   no server of this user is running, or it answers no more
  2   wrong command line";
