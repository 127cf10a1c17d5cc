//! The command-line options for local block devices, and the command `nowait ublk`.

use clap::{Args, Subcommand};

use nowait_daemon::config::ublk_spec::{MAX_ID, UblkSpec};

/// The block devices that images become.
#[derive(Debug, Args)]
pub(crate) struct UblkArgs {
    /// Make IMAGE a local block device, /dev/ublkbID; can be given once for each IMAGE
    ///
    /// EXPORT is the name of one of several IMAGEs; without it the node is for the first IMAGE that has
    /// none. Without ID any free number is taken; "serving /dev/ublkbID" tells which. It needs the
    /// kernel's ublk driver and io_uring. Without --nbd there is no socket. The device outlives a server
    /// that is killed: its users wait until 'nowait serve --ublk=ID' serves the same IMAGE again. A
    /// server that is stopped waits 10 s for the users to leave, and leaves the device like that if they
    /// do not; 'nowait ublk' lists and removes devices.
    #[arg(help_heading = "Addresses", long, value_name = "[EXPORT=]ID")]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "")]
    #[arg(value_parser = str::parse::<UblkSpec>)]
    pub(crate) ublk: Vec<UblkSpec>,
}

/// List and remove block devices that 'nowait serve --ublk' and other ublk servers have made
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct UblkCommand {
    #[command(subcommand)]
    pub(crate) action: UblkAction,
}

/// Commands for devices.
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
    /// Remove a device; its server exits if it serves nothing else
    ///
    /// What the kernel has cached is written first, if there is a server. Without one the requests
    /// that wait for it fail.
    Stop {
        /// The number N of /dev/ublkbN
        #[arg(value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_ID)))]
        id: u32,
        /// Remove it also while it is in use: its users get I/O errors
        #[arg(long)]
        force: bool,
    },
}

const AFTER_HELP: &str = "\
Examples:
  nowait serve disk.img --ublk        serve an image as /dev/ublkb0, or another free number
  nowait serve a=a.img b=b.img --ublk=a=1 --ublk=b=2
                                      serve two images as /dev/ublkb1 and /dev/ublkb2
  nowait ublk list                    the devices, and what uses them
  nowait ublk stop 0                  remove /dev/ublkb0

States:
  served    a server serves it
  waiting   its server has exited, requests wait: 'nowait serve IMAGE --ublk=N' goes on
  failing   its server has exited, requests fail
  stopped   it has no node

Exit status:
  0   success
  1   there is no driver, no right to it or no such device, or the device is in use
  2   wrong command line";
