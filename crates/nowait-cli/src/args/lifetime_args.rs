//! The command-line options for a server's end and its PID file.

use std::path::PathBuf;

use clap::Args;

/// When a server ends, and its PID file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Lifetime")]
pub(crate) struct LifetimeArgs {
    /// End, as by SIGTERM, when the last client disconnects
    ///
    /// A connection that has not chosen an export is no client: one that only looks at what there
    /// is does not end the server, and without any client it waits for one.
    #[arg(long)]
    pub(crate) exit_with_last_client: bool,

    /// End, as by SIGTERM, when the process that started this one ends
    ///
    /// Linux means the thread that started it: prctl(2), PR_SET_PDEATHSIG.
    #[arg(long)]
    pub(crate) exit_with_parent: bool,

    /// Write the process's number to PATH when clients can connect
    ///
    /// The file appears whole, in place of an older one, and is removed at the end.
    #[arg(long, visible_alias = "pidfile", value_name = "PATH")]
    pub(crate) pid_file: Option<PathBuf>,

    /// What a server does anyway, for qemu-nbd's sake: it goes on when clients have left
    #[arg(short = 't', long, hide = true, conflicts_with = "exit_with_last_client")]
    persistent: bool,
}
