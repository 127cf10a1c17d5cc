//! The command-line options of `upgrade`.

use std::path::PathBuf;

use clap::Args;

use crate::args::control_args::ServerArgs;

/// Exchange the program of a running server; its clients notice a short pause
///
/// The new program takes over the sockets, the locks of the images and the connections of NBD
/// clients. If it is not ready in time, the old one goes on as if nothing had happened.
/// Connections with TLS are closed after their requests in flight: their keys cannot be handed over.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct UpgradeArgs {
    /// The new program; without it the path from which the server was started
    #[arg(value_hint = clap::ValueHint::ExecutablePath)]
    pub(crate) binary: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

const AFTER_HELP: &str = "\
Examples:
  nowait upgrade                     after the package was updated
  nowait upgrade ./target/release/nowait --control /run/nowait/control

The new program gets the arguments of the old one, in its environment and directory, and reads the
file of --config again. The process number changes: systemd and the --pid-file are told. A server
that --exit-with-parent watches, or that is process 1, cannot be upgraded.

Exit status:
  0   the new program serves
  1   the old program goes on, and why; or no server of this user is running
  2   wrong command line";
