//! `nowait export replicate`: the disk of an export is copied to another server, again and again.
//!
//! Invariant: as of the other commands that ask a server.

use nowait_control::{Client, ReplicationInfo, StartReplication};
use nowait_daemon::error::{CliError, plain};
use nowait_daemon::size::human;

use crate::args::control_args::ReplicateCommand;
use crate::control_client::ask;

/// Begins, shows or stops a replication.
///
/// # Errors
/// No server or more than one runs, or it has refused.
pub(crate) fn run(command: &ReplicateCommand) -> Result<(), CliError> {
    let ReplicateCommand { export, target, every, rate, resume, stop, server } = command;
    let start = target.as_ref().map(|target| StartReplication {
        target: target.clone(),
        every_seconds: *every,
        rate_bytes: *rate,
        resume: *resume,
    });
    let request = |client: &Client| match &start {
        Some(start) => client.start_replication(export, start),
        None if *stop => client.stop_replication(export),
        None => client.replication(export),
    };
    ask(server, request, in_words)
}

fn in_words(info: &ReplicationInfo) -> String {
    let has = match (info.instant_unix_seconds, info.consistent) {
        (None, _) => "no round is complete yet".to_owned(),
        (Some(_), true) => {
            format!("it has the disk as of {:.0} s ago", info.lag_seconds)
        }
        (Some(_), false) => "it is a mixture of two instants".to_owned(),
    };
    let failed = info.last_error.as_deref().map(|why| format!("; {}", plain(why)));
    format!(
        "{} to {}: {has}, {} left{}\n",
        info.state,
        plain(&info.target),
        human(info.left_bytes),
        failed.unwrap_or_default()
    )
}
