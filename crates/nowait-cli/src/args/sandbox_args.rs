//! The command-line option for the sandbox of a server.

use clap::Args;

use nowait_daemon::config::ServeConfig;
use nowait_daemon::config::choices::SandboxChoice;

/// Options of what a server gives up when it is ready.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sandbox")]
pub(crate) struct SandboxArgs {
    /// Whether the server gives up what it does not need when it begins to serve [default: auto]
    ///
    /// It can then open no files but each IMAGE, those in the directories of --allow-dir and the
    /// like, execute no program, connect by TCP nowhere, and make no system call but those that a
    /// server makes (landlock and seccomp; docs/operating.md says more).
    #[arg(long, value_name = "WHEN", value_enum)]
    sandbox: Option<SandboxChoice>,
}

impl SandboxArgs {
    /// Puts what is given over `config`.
    pub(crate) fn put_over(&self, config: &mut ServeConfig) {
        let Self { sandbox } = self;
        config.sandbox = sandbox.unwrap_or(config.sandbox);
    }
}
