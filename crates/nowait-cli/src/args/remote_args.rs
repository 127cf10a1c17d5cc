//! The command-line option for images that are behind a network.

use std::time::Duration;

use clap::Args;
use nowait_remote::RemoteOptions;

/// The most seconds that requests wait: a day.
const MAX_SECONDS: u64 = 24 * 60 * 60;

/// What is done when a server is not there.
#[derive(Debug, Args)]
#[command(next_help_heading = "Exports")]
pub(crate) struct RemoteArgs {
    /// How long requests wait for the server of an IMAGE when its connection is lost, at most 86400;
    /// then they fail with EIO until the server is there again
    ///
    /// What it had not answered is asked again, and so are the writes that no flush has made durable:
    /// no client notices a server that is killed and started again within this time.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=MAX_SECONDS))]
    reconnect: u64,
}

impl RemoteArgs {
    /// How remote storages are used.
    pub(crate) fn options(&self) -> RemoteOptions {
        RemoteOptions { reconnect: Duration::from_secs(self.reconnect), ..RemoteOptions::default() }
    }
}
