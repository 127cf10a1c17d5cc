//! `nowait export backup`: disks of a running server as they were at an instant.
//!
//! Invariant: as of the other commands that ask a server.

use nowait_control::{BackupInfo, Client, ClientError, EndBackup, ExportInfo, StartBackup};
use nowait_server::BackupEnd;

use crate::args::control_args::{BackupAction, BackupCommand, EndedBackups, StartedBackups};
use crate::control_client::{absolute, ask, tell};
use nowait_daemon::error::{CliError, plain};
use nowait_daemon::size::short;

/// Begins, ends or lists backups.
///
/// # Errors
/// No server or more than one runs, or it has refused.
pub(crate) fn run(command: &BackupCommand) -> Result<(), CliError> {
    match &command.action {
        BackupAction::Start(started) => start(started),
        BackupAction::Commit(ended) => end(ended, BackupEnd::Commit),
        BackupAction::Abort(ended) => end(ended, BackupEnd::Abort),
        BackupAction::List { server } => ask(server, backups, |all| table(all)),
    }
}

fn start(started: &StartedBackups) -> Result<(), CliError> {
    let Some((first, with)) = started.exports.split_first() else { return Ok(()) };
    let backup = StartBackup {
        name: started.name.clone(),
        bitmap: started.bitmap.clone(),
        only_dirty: started.only_dirty,
        discards: started.discard,
        scratch: started.scratch.as_deref().map(absolute).transpose()?,
        max_scratch_bytes: started.scratch_size,
        with: with.to_vec(),
    };
    let names = |all: &Vec<BackupInfo>| {
        let line = |backup: &BackupInfo| format!("{}\n", plain(&backup.name));
        all.iter().map(line).collect()
    };
    ask(&started.server, |client| client.start_backup(first, &backup), names)
}

fn end(ended: &EndedBackups, end: BackupEnd) -> Result<(), CliError> {
    let Some((first, with)) = ended.exports.split_first() else { return Ok(()) };
    let others = EndBackup { with: with.to_vec() };
    tell(&ended.server, |client| client.end_backup(first, &others, end))
}

/// The exports that have backups.
fn backups(client: &Client) -> Result<Vec<ExportInfo>, ClientError> {
    let mut all = client.exports()?;
    all.retain(|export| export.backup.is_some());
    Ok(all)
}

fn table(exports: &[ExportInfo]) -> String {
    let line = |export: &ExportInfo| {
        let backup = export.backup.as_ref()?;
        let bitmap = backup.bitmap.as_deref().map_or_else(|| "-".to_owned(), plain);
        let name =
            if export.name.is_empty() { format!("@{}", export.id) } else { plain(&export.name) };
        Some(format!(
            "  {name:<16} {:<24} {bitmap:<12} {:>10} {:>10} {}\n",
            plain(&backup.name),
            short(backup.scratch_bytes),
            short(backup.max_scratch_bytes),
            backup.failure.as_deref().map_or_else(|| "running".into(), plain),
        ))
    };
    let head =
        "  export           backup                   bitmap          scratch    of most state\n";
    std::iter::once(head.to_owned()).chain(exports.iter().filter_map(line)).collect()
}
