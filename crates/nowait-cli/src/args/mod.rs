//! The command line, and the help that `--help` prints.
//!
//! Invariant: parsed values are in range; the methods here return the defaults that the help
//! states.

mod help_texts;
mod bitmap_args;
mod tls_args;
mod remote_args;
pub(crate) mod image_args;
pub(crate) mod info_args;
pub(crate) mod copy_args;
pub(crate) mod backup_args;
pub(crate) mod change_args;
mod address_args;
pub(crate) mod bench_args;
pub(crate) mod control_args;
mod lifetime_args;
mod message_args;
mod sandbox_args;
pub(crate) mod setup_args;
pub(crate) mod ublk_args;
pub(crate) mod upgrade_args;
pub(crate) mod top_args;
mod vhost_user_args;
pub(crate) mod serve_args;

use clap::{Parser, Subcommand};

use backup_args::{BackupArgs, RestoreArgs};
use bench_args::BenchArgs;
use change_args::{CommitArgs, CreateArgs, ResizeArgs};
use control_args::{ConnectionsArgs, ExportCommand, StatusArgs};
use copy_args::CopyArgs;
use help_texts::AFTER_HELP;
use image_args::{CheckArgs, MapArgs};
use info_args::InfoArgs;
use serve_args::ServeArgs;
use setup_args::{CompletionsArgs, ManArgs};
use top_args::TopArgs;
use ublk_args::UblkCommand;
use upgrade_args::UpgradeArgs;

/// The exit status for a wrong command line.
pub(crate) const USAGE_STATUS: u8 = 2;
/// The exit status for a wrong command line of `check`, whose status 2 means a corrupt image (EX_USAGE of sysexits.h).
pub(crate) const CHECK_USAGE_STATUS: u8 = 64;

/// Serve disk images and block devices to other programs and machines, by direct I/O
#[derive(Debug, Parser)]
#[command(name = "nowait", version, arg_required_else_help = true, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Serve(Box<ServeArgs>),
    Create(CreateArgs),
    Info(InfoArgs),
    Map(MapArgs),
    Check(CheckArgs),
    Copy(Box<CopyArgs>),
    Backup(Box<BackupArgs>),
    Restore(Box<RestoreArgs>),
    Resize(ResizeArgs),
    Commit(CommitArgs),
    Ublk(UblkCommand),
    Status(StatusArgs),
    Export(ExportCommand),
    Connections(ConnectionsArgs),
    Upgrade(UpgradeArgs),
    Top(TopArgs),
    Bench(BenchArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

impl Command {
    /// Its name on the command line.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Serve(_) => "serve",
            Self::Create(_) => "create",
            Self::Info(_) => "info",
            Self::Map(_) => "map",
            Self::Check(_) => "check",
            Self::Copy(_) => "copy",
            Self::Backup(_) => "backup",
            Self::Restore(_) => "restore",
            Self::Resize(_) => "resize",
            Self::Commit(_) => "commit",
            Self::Ublk(_) => "ublk",
            Self::Status(_) => "status",
            Self::Export(_) => "export",
            Self::Connections(_) => "connections",
            Self::Upgrade(_) => "upgrade",
            Self::Top(_) => "top",
            Self::Bench(_) => "bench",
            Self::Completions(_) => "completions",
            Self::Man(_) => "man",
        }
    }

    /// Whether it is for a running server, by its control interface.
    pub(crate) const fn asks_a_server(&self) -> bool {
        matches!(
            self,
            Self::Status(_)
                | Self::Export(_)
                | Self::Connections(_)
                | Self::Upgrade(_)
                | Self::Top(_)
        )
    }

    /// Checks rules that the parser does not.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self {
            Self::Serve(args) => args.config().map(drop),
            Self::Map(args) => args.image.check(),
            Self::Check(args) => args.image.check(),
            Self::Copy(args) => args.check(),
            Self::Backup(args) => args.check(),
            Self::Restore(_) => Ok(()),
            Self::Resize(args) => args.image.check(),
            Self::Commit(args) => args.image.check(),
            Self::Create(_) | Self::Info(_) | Self::Ublk(_) | Self::Bench(_) => Ok(()),
            Self::Status(_)
            | Self::Export(_)
            | Self::Connections(_)
            | Self::Upgrade(_)
            | Self::Top(_) => Ok(()),
            Self::Completions(_) | Self::Man(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod config_tests;
#[cfg(test)]
mod tests;
