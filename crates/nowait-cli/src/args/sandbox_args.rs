//! The command-line option for the sandbox of a server.

use clap::{Args, ValueEnum};

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
    sandbox: Option<When>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum When {
    /// Confined as far as the kernel can do it
    Auto,
    /// Or nothing is served: the kernel has to have landlock and seccomp
    On,
    /// Not at all, for debuggers and profilers
    Off,
}

impl From<When> for SandboxChoice {
    fn from(when: When) -> Self {
        match when {
            When::Auto => Self::Auto,
            When::On => Self::On,
            When::Off => Self::Off,
        }
    }
}

impl SandboxArgs {
    /// Puts what is given over `config`.
    pub(crate) fn put_over(&self, config: &mut ServeConfig) {
        let Self { sandbox } = self;
        config.sandbox = sandbox.map_or(config.sandbox, Into::into);
    }
}
