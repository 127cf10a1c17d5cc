//! The command-line option for what a server reports by itself.

use clap::Args;

use nowait_daemon::config::ServeConfig;
use nowait_daemon::config::choices::Threshold;

/// Options of messages.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Messages")]
pub(crate) struct MessageArgs {
    /// Warn of requests that take longer than TIME, such as 500ms, 10s or 2m; off: of none [default: 10s]
    ///
    /// A request is timed from its submission to storage until it completes; the time in the warning is at most a
    /// quarter of TIME too short. One that does not complete is warned of, too. The same warning is repeated
    /// every 30 s at most.
    #[arg(long, value_name = "TIME", value_parser = str::parse::<Threshold>)]
    slow_requests: Option<Threshold>,
}

impl MessageArgs {
    /// Puts what is given over `config`.
    pub(crate) fn put_over(&self, config: &mut ServeConfig) {
        let Self { slow_requests } = self;
        config.slow_requests = slow_requests.unwrap_or(config.slow_requests);
    }
}
