//! The command-line arguments of `nowait export backup`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use nowait_daemon::size;

use crate::args::control_args::ServerArgs;

/// Read a disk as it was at an instant, while it goes on being written
///
/// A backup is a read-only export of its own, EXPORT.backup, which NBD clients reach as they reach the
/// others. Before something is written to the disk, its old bytes are copied to a scratch file. It lasts
/// until 'commit' or 'abort'; clients that leave decide nothing. docs/backup.md has examples.
#[derive(Debug, Args)]
pub(crate) struct BackupCommand {
    #[command(subcommand)]
    pub(crate) action: BackupAction,
}

/// Exports whose backups end together.
#[derive(Debug, Args)]
pub(crate) struct EndedBackups {
    /// The names of the exports, or @ID
    #[arg(value_name = "EXPORT", required = true)]
    pub(crate) exports: Vec<String>,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// The actions on backups.
#[derive(Debug, Subcommand)]
pub(crate) enum BackupAction {
    /// Begin backups of disks as they are at one instant; if one cannot begin, none does
    Start(StartedBackups),
    /// End backups that were read: the frozen bits are forgotten
    Commit(EndedBackups),
    /// End backups: what was noted up to their instant is noted in the bitmap again
    Abort(EndedBackups),
    /// Show the backups that have not ended
    List {
        #[command(flatten)]
        server: ServerArgs,
    },
}

/// Exports whose backups begin together.
#[derive(Debug, Args)]
pub(crate) struct StartedBackups {
    /// The names of the exports, or @ID
    #[arg(value_name = "EXPORT", required = true)]
    pub(crate) exports: Vec<String>,
    /// The name of the new export; EXPORT.backup without it, 'backup' for an export without a name
    ///
    /// For one EXPORT only.
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Freeze this dirty bitmap: the backup offers its bits, and later changes go to a successor
    #[arg(long, value_name = "BITMAP")]
    pub(crate) bitmap: Option<String>,
    /// Keep and serve only what is dirty in the bitmap; reads of the rest fail with EPERM
    #[arg(long, requires = "bitmap")]
    pub(crate) only_dirty: bool,
    /// Let clients discard what they have read, which frees its scratch
    ///
    /// Reads of it fail with EIO from then on. The new export is not marked as read-only then, because
    /// clients discard nothing of one that is; writes fail with EPERM.
    #[arg(long)]
    pub(crate) discard: bool,
    /// The file for old bytes, which is made and has no name any more when this returns
    ///
    /// It is in a directory of --allow-dir of the server. Without this it is beside the image if that is
    /// in such a directory, and otherwise in the first one. For one EXPORT only.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) scratch: Option<PathBuf>,
    /// The most bytes of old data; a backup that needs more fails, and its disk goes on
    ///
    /// At least 64K. Without this the size of the disk, or half of what is free if that is less.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) scratch_size: Option<u64>,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}
