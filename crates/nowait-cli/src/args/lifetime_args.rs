//! The command-line options for a server's beginning and end: background, PID file, log file.

use std::path::PathBuf;

use clap::Args;

use nowait_daemon::config::ServeConfig;

/// When a server begins and ends, its PID file and its log file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Lifetime")]
pub(crate) struct LifetimeArgs {
    /// Exit, as by SIGTERM, when the last client disconnects
    ///
    /// A connection that has not chosen an export is not a client: one that only lists the exports does not stop the
    /// server, and a server that has had no client waits for one.
    #[arg(long)]
    pub(crate) exit_with_last_client: bool,

    /// Exit, as by SIGTERM, when the process that started this one exits
    ///
    /// Linux means the thread that started it: prctl(2), PR_SET_PDEATHSIG.
    #[arg(long)]
    pub(crate) exit_with_parent: bool,

    /// Go to the background when clients can connect: this process exits then, with status 0
    ///
    /// If the server cannot start, this process exits with its status, after its error line. In the
    /// background the server has no terminal, and /dev/null for standard input, output and error: see
    /// --log-file. The directory that it is in stays the same.
    #[arg(long)]
    pub(crate) fork: bool,

    /// Write the process's number to PATH when clients can connect
    ///
    /// The file appears whole, in place of an older one, and is removed at the end.
    #[arg(long, visible_alias = "pidfile", value_name = "PATH")]
    pub(crate) pid_file: Option<PathBuf>,

    /// Write messages to the end of PATH, each with its time, in place of standard error
    ///
    /// It begins when clients can connect: what keeps a server from starting is on standard error. At
    /// SIGHUP the file is opened again by its name (where the server has no terminal), so that
    /// logrotate(8) can move it away.
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    pub(crate) log_file: Option<PathBuf>,

    /// For qemu-nbd's sake; a server goes on in any case when clients have left
    #[arg(short = 't', long, hide = true, conflicts_with = "exit_with_last_client")]
    persistent: bool,
}

impl LifetimeArgs {
    /// Puts what is given over `config`.
    ///
    /// # Errors
    /// A message for the user: a server that goes on is one that ends, by the configuration.
    pub(crate) fn put_over(&self, config: &mut ServeConfig) -> Result<(), String> {
        let Self { exit_with_last_client, exit_with_parent, fork, pid_file, log_file, persistent } =
            self;
        config.exit_with_last_client |= exit_with_last_client;
        config.exit_with_parent |= exit_with_parent;
        config.fork |= fork;
        config.pid_file = pid_file.clone().or(config.pid_file.take());
        config.log_file = log_file.clone().or(config.log_file.take());
        match *persistent && config.exit_with_last_client {
            true => Err("--persistent does not go with --exit-with-last-client".into()),
            false => Ok(()),
        }
    }
}
