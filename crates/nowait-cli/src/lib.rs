//! The `nowait` command: parse, compose, print.
//!
//! For the program `nowait` only: others take the libraries behind it.
//!
//! Invariant: success is exit status 0, a failure is one line on standard error and 1, a wrong
//! command line one line and 2; a copy that left its target partly written is 3, a copy with
//! unreadable ranges 4; `check` reports its findings by its exit status, and has 64 for a wrong
//! command line. A panic is one line and 70.

mod header_lines;
mod output;
mod habits;
mod args;
mod usage;
mod open_chain;
mod control_client;
mod commands;

use std::fmt;
use std::io::{self, Write};

use crate::args::Command;
#[cfg(feature = "control")]
use crate::commands::top;
use crate::commands::{
    backup_chain, bench, check, commit, control, copy, create, info, map, resize, setup, ublk,
};
use nowait_daemon::config::{ServeConfig, config_file};
use nowait_daemon::error::CliError;
use nowait_daemon::process::{log, systemd};
use nowait_daemon::serve;
use nowait_daemon::upgrade::{launcher, receiver};

/// The standard streams, for the words of a server.
struct Terminal;

impl serve::Output for Terminal {
    fn ready(&self, lines: &str) {
        // If standard output is closed, no process waits for the line.
        let _ = output::print(lines).and_then(|()| output::flush());
    }

    fn note(&self, text: fmt::Arguments<'_>) {
        let _ = writeln!(io::stderr(), "{text}");
    }
}

/// Runs the command of this process. Returns the exit status.
#[must_use]
pub fn run() -> u8 {
    if let Some(status) = launcher::run_if_asked() {
        return status;
    }
    let command = match usage::parse() {
        Ok(cli) => cli.command,
        Err(status) => {
            systemd::reject_clients();
            return status;
        }
    };
    let config = match &command {
        Command::Serve(args) => args.config(),
        other => other.check().map(|()| ServeConfig::default()),
    };
    let config = match config {
        Ok(config) => config,
        Err(why) => {
            systemd::reject_clients();
            receiver::refuse(&why);
            return usage::refuse(&command, &why);
        }
    };
    match execute(command, config) {
        Ok(status) => status,
        Err(error) => {
            if !error.is_silent() {
                log::write_line(tracing::Level::ERROR, &error);
            }
            error.status()
        }
    }
}

/// Runs `command`, whose rules were checked; `serve` with its `config`. Returns the exit status.
fn execute(command: Command, config: ServeConfig) -> Result<u8, CliError> {
    if command.asks_a_server()
        && let Some(why) = nowait_control::DISABLED
    {
        return Err(CliError::new(why));
    }
    match command {
        Command::Serve(args) => {
            if args.print_config {
                let text = config_file::text(&config).map_err(CliError::new)?;
                return output::print(text).map(|()| 0);
            }
            log::start(config.verbose);
            serve::run(&config, &Terminal).map(|()| 0)
        }
        Command::Create(args) => create::run(&args).map(|()| 0),
        Command::Info(args) => info::run(&args).map(|()| 0),
        Command::Map(args) => map::run(&args).map(|()| 0),
        Command::Check(args) => check::run(&args),
        Command::Copy(args) => copy::run(&args),
        Command::Backup(args) => backup_chain::run(&args),
        Command::Restore(args) => backup_chain::restore(&args).map(|()| 0),
        Command::Resize(args) => resize::run(&args).map(|()| 0),
        Command::Commit(args) => commit::run(&args).map(|()| 0),
        Command::Ublk(command) => ublk::run(&command).map(|()| 0),
        Command::Status(args) => control::status(&args).map(|()| 0),
        Command::Export(command) => control::export(&command).map(|()| 0),
        Command::Connections(args) => control::connections(&args).map(|()| 0),
        #[cfg(not(feature = "control"))]
        Command::Top(_) => Ok(0),
        #[cfg(feature = "control")]
        Command::Top(args) => top::run(&args).map(|()| 0),
        Command::Upgrade(args) => control::upgrade(&args).map(|()| 0),
        Command::Bench(args) => Err(bench::run(&args)),
        Command::Completions(args) => setup::completions(&args).map(|()| 0),
        Command::Man(args) => setup::man(&args).map(|()| 0),
    }
}
