//! The command-line options for block devices of this machine, and the command `nowait ublk`.

use clap::{Args, Subcommand};

use crate::args::QueueKind;

/// The greatest number of a device: one less than the kernel's minor numbers.
const MAX_ID: i64 = (1 << 20) - 1;

/// The block device that an image becomes.
#[derive(Debug, Args)]
pub(crate) struct UblkArgs {
    /// Make the first IMAGE a block device of this machine, /dev/ublkbID
    ///
    /// Without ID any free number is taken; "serving /dev/ublkbID" tells which. It needs the kernel's
    /// ublk driver and io_uring. Without --nbd there is no socket. The device outlives a server that
    /// is killed: its users wait until 'nowait serve --ublk=ID' serves the same IMAGE again. A server
    /// that is stopped waits 10 s for the users to leave, and leaves the device like that if they do
    /// not; 'nowait ublk' lists and removes devices.
    #[arg(help_heading = "Addresses", long, value_name = "ID", num_args = 0..=1, require_equals = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=MAX_ID))]
    pub(crate) ublk: Option<Option<u32>>,
}

impl UblkArgs {
    /// Checks rules that the parser does not.
    ///
    /// # Errors
    /// A message for the user: the driver's commands are io_uring's.
    pub(crate) fn check(&self, queue: Option<QueueKind>) -> Result<(), String> {
        match (self.ublk, queue) {
            (Some(_), Some(QueueKind::Threads)) => {
                Err("--ublk needs io_uring: leave --queue threads out".into())
            }
            _ => Ok(()),
        }
    }
}

/// List and remove block devices that 'nowait serve --ublk' and other ublk servers have made
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct UblkCommand {
    #[command(subcommand)]
    pub(crate) action: UblkAction,
}

/// What to do with devices.
#[derive(Debug, Subcommand)]
pub(crate) enum UblkAction {
    /// Show the devices: their nodes, states, servers, sizes and users
    List {
        /// Print a JSON array, for scripts
        #[arg(long)]
        json: bool,
    },
    /// Show what the kernel's ublk driver can do, one feature a line
    Features,
    /// Remove a device; its server ends if it serves nothing else
    ///
    /// What the kernel has cached is written first, if there is a server. Without one the requests
    /// that wait for it fail.
    Stop {
        /// The number N of /dev/ublkbN
        #[arg(value_parser = clap::value_parser!(u32).range(0..=MAX_ID))]
        id: u32,
        /// Remove it also while it is in use: its users get I/O errors
        #[arg(long)]
        force: bool,
    },
}

const AFTER_HELP: &str = "\
Examples:
  nowait serve disk.img --ublk        serve an image as /dev/ublkb0, or another free number
  nowait ublk list                    the devices, and what uses them
  nowait ublk stop 0                  remove /dev/ublkb0

States:
  served    a server serves it
  waiting   its server has ended, requests wait: 'nowait serve IMAGE --ublk=N' goes on
  failing   its server has ended, requests fail
  stopped   it has no node

Exit status:
  0   success
  1   there is no driver, no right to it or no such device, or the device is in use
  2   wrong command line";
